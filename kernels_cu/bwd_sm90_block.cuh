// What the main kernels of the Hopper backward share: shared memory, the producer, the key block that a CTA owns, stores of dK and
// dV. A kernel defines BLOCK_M, BLOCK_N, STAGES (of Q), STAGES_DO, DS_TILES (tiles of dS or P) and DQ_BYTES (of a float32 dQ tile
// in shared memory) first. No products here.
#pragma once
#include "bwd_sm90_rows.cuh"

#define CONSUMERS 2
#define SPREAD 64  // key blocks of a head that begin at different query blocks
#define THREADS (128 * (CONSUMERS + 1))

#define D HEAD_DIM
#define DV HEAD_DIM_V
#define K_BYTES (BLOCK_N * D * 2)
#define V_BYTES (BLOCK_N * DV * 2)
#define Q_BYTES (BLOCK_M * D * 2)
#define DO_BYTES (BLOCK_M * DV * 2)
#define DS_BYTES (BLOCK_M * BLOCK_N * 2)
#define ROW_BYTES (BLOCK_M * 4)
#ifndef BIAS_TILES  // the bias comes by TMA, with Q
#define BIAS_TILES 0
#endif
#define BIAS_BYTES (BIAS_TILES ? BLOCK_M * BLOCK_N * 2 : 0)
#if BIAS_TILES
#define MAP_BIAS &map_bias
#define AND_MAP_BIAS , const __grid_constant__ TMap map_bias
#else
#define MAP_BIAS nullptr
#define AND_MAP_BIAS
#endif
// dK and dV go out by TMA, which leaves out what lies beyond the keys
#define STORE_BOXES (D == 128 && DV == 128 && !(VARIABLE || SKIPPING || DROPOUT || BIAS))
#if STORE_BOXES && WANT_DK
#define MAP_DK &map_dk
#define AND_MAP_DK , const __grid_constant__ TMap map_dk
#else
#define MAP_DK nullptr
#define AND_MAP_DK
#endif
#if STORE_BOXES && WANT_DV
#define MAP_DV &map_dv
#define AND_MAP_DV , const __grid_constant__ TMap map_dv
#else
#define MAP_DV nullptr
#define AND_MAP_DV
#endif
#define WORDS (BLOCK_M / 64)  // of a thread's scores, a bit each
static_assert(!(MASK || DROPOUT) || BLOCK_M % 64 == 0, "whole words of bits");
#ifndef DQ_TILES  // float32 dQ tiles in shared memory, in turns
#define DQ_TILES 1
#endif

// Offsets from the 1024-aligned base
#define S_K 0
#define S_V (S_K + K_BYTES)
#define S_Q (S_V + V_BYTES)
#define S_DO (S_Q + STAGES * Q_BYTES)
#define S_DS (S_DO + STAGES_DO * DO_BYTES)
#define S_DQ (S_DS + DS_TILES * DS_BYTES)
#define S_BIAS (S_DQ + DQ_TILES * DQ_BYTES)
#define S_LSE (S_BIAS + STAGES * BIAS_BYTES)
#define S_DELTA (S_LSE + STAGES * ROW_BYTES)
#define S_BAR (S_DELTA + STAGES_DO * ROW_BYTES)
#define BAR_K S_BAR
#define BAR_V (BAR_K + 8)
#define BAR_Q_FULL (BAR_V + 8)
#define BAR_Q_EMPTY (BAR_Q_FULL + 8 * STAGES)
#define BAR_DO_FULL (BAR_Q_EMPTY + 8 * STAGES)
#define BAR_DO_EMPTY (BAR_DO_FULL + 8 * STAGES_DO)
#define S_SLOT (BAR_DO_EMPTY + 8 * STAGES_DO)  // SKIPPING: what each stage of Q holds
#define S_KEPT (S_SLOT + (SKIPPING ? 16 * STAGES : 0))
#define KEPT_BYTES (DROPOUT && BLOCK_N == 128 ? BLOCK_M * 16 : 0)  // of a step: what warps tell each other about dropped weights
#define S_TOTAL (S_KEPT + 2 * KEPT_BYTES)
static_assert(S_TOTAL + 1024 <= 232448, "shared memory");
static_assert(STAGES == STAGES_DO, "one ring in the producer");
#define SHARE_DEPTH 3  // pieces of dQ in flight for each warpgroup of a share
static_assert(!WANT_DQ || 3 * SHARE_DEPTH * PIECE_BYTES <= S_LSE, "stages of a share of dQ");

// Named barriers
#define ID_DS 1                 // both warpgroups have stored dS
#define ID_DQ_FULL 2            // + warpgroup
#define ID_DQ_EMPTY 4           // + warpgroup
#define ID_WARPGROUP 6          // + warpgroup
#define ID_TURN 8               // + warpgroup: its turn to issue S^T and dP^T
#define ID_PAIR 10              // + pair of warps: both have told which weights they keep
#define DQ_FULL(part, tile) (ID_DQ_FULL + (part) + 8 * (tile))
#define DQ_EMPTY(part, tile) (ID_DQ_EMPTY + (part) + 8 * (tile))
static_assert(!DROPOUT || DQ_TILES < 2, "barriers for each");

#define INLINE __attribute__((always_inline))

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};
template <auto X> struct Constant {
  static constexpr auto value = X;
};

// Descriptor of the operand at byte `offset` of shared memory; only the low word moves, so that it stays in uniform registers.
__device__ __forceinline__ u64 operand(u32 base16, u32 offset, u32 leading_bytes) {
  return (u64)(base16 + (offset >> 4) + ((leading_bytes >> 4) << 16)) | (0x40000040ull << 32);
}

struct Ring {  // a stage and the parity of its barrier
  int stage, parity;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// What a CTA is there for. Every CTA waits for some of lower index alone, and those have been started before it.
enum Role { TILE, SUMS_TO_DQ, CLEAR_SUMS, NOTHING };
struct Job {
  Role role;
  int section, unit, index;  // key slot of the unit, or share of the section
};

__device__ __forceinline__ Job job_of(const Params& p, int index) {
  const int together = (int)p.aux3, tiles = together * (int)p.aux2, shares = (int)p.aux4, clears = CLEARED ? shares : 0;
  const int size = tiles + shares + clears, section = index / size, late = tiles - tiles / 4;
  int i = index - section * size;
  if (i < clears) return {section < last_section(p) ? CLEAR_SUMS : NOTHING, section + 1, 0, i};
  i -= clears;
  if (i >= late) {  // late, so that the section before is done; not last, since other CTAs may be shorter
    if (i < late + shares) return {section > 0 ? SUMS_TO_DQ : NOTHING, section - 1, 0, i - late};
    i -= shares;
  }
#if HAS_RIGHT || HAS_LEFT || DETERMINISTIC  // heavy key blocks first; no key block long before the one that has its turn next
  const int unit = section * together + i % together, slot = i / together;
#else
  const int unit = section * together + i / (int)p.aux2, slot = i % (int)p.aux2;
#endif
  return {unit < units(p) ? TILE : NOTHING, section, unit, slot};
}

// A share, by the whole CTA.
__device__ __forceinline__ void do_share(const Params& p, const Job& job, u32 base) {
  const int heads = (int)p.aux3 * group_of(p), slots = heads * (int)p.aux1, first = job.index * SHARE_SLOTS;
  dependency_wait();
  if (job.role == SUMS_TO_DQ) {
    if ((threadIdx.x & 127) == 0) wait_for_turn(slots_done(p, job.section), 2 * (int)p.aux2 * (int)p.aux3);  // those who load
    convert_slots<3, SHARE_DEPTH>(p, job.section, first, min(first + SHARE_SLOTS, slots), base, base + S_BAR);
  } else {
    const i64 before = (i64)job.section * heads * p.aux0, all = units(p) * group_of(p) * p.aux0;
    const i64 rows = min((i64)heads * p.aux0, all - before), size = (rows + p.aux4 - 1) / p.aux4;
    const i64 begin = before + min(job.index * size, rows), end = before + min((job.index + 1) * size, rows);
    for (i64 i = begin * (HEAD_DIM / 4) + threadIdx.x; i < end * (HEAD_DIM / 4); i += THREADS)
      ((float4*)p.dq_accum)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    __syncthreads();
    if (threadIdx.x == 0) pass_turn(shares_cleared(p, job.section), 1);
  }
}

struct Work {  // one CTA's: a key block and the query blocks [m_begin, m_end) that see it, taken from m_first on, around
  Visible seen;
  int section, head_kv, slot, n, m_begin, m_end, m_first;
  __device__ __forceinline__ int blocks() const { return m_end - m_begin; }
  __device__ __forceinline__ int after(int m) const {
    if (DETERMINISTIC) return m == m_begin ? m_end - 1 : m - 1;
    return m + 1 == m_end ? m_begin : m + 1;
  }
};

__device__ __forceinline__ Work work_of(const Params& p, const Job& job) {
  const Unit u = unit_of(p, job.unit);
  const Slot s = slot_of(p, p.cu_seqlens_k, u.batch, job.index, BLOCK_N);
  Work w;
  w.section = job.section;
  w.head_kv = u.head_kv;
  w.slot = job.index;
  w.n = s.block;
  w.seen = load_visible(p, s.batch);
  const int first = w.n * BLOCK_N, last = min(first + BLOCK_N, w.seen.keys) - 1;
  const int row_begin = HAS_RIGHT ? max(0, first - w.seen.right) : 0;
  const int row_end = HAS_LEFT ? min(w.seen.rows, last - w.seen.left + 1) : w.seen.rows;
  w.m_begin = row_begin / BLOCK_M;
  w.m_end = max(w.m_begin, ceil_div(row_end, BLOCK_M));
  w.m_first = DETERMINISTIC ? w.m_end - 1 : w.m_begin;
#if !HAS_RIGHT && !HAS_LEFT && !DETERMINISTIC  // spread over the query blocks, so that few CTAs add to one at a time
  const int place = w.n % SPREAD, size = min(SPREAD, ceil_div(w.seen.keys, BLOCK_N) - w.n + place);
  w.m_first = place * w.m_end / size;
#endif
  return w;
}

// The query blocks that one head's rows bring to a CTA, in its order.
struct Walk {
  const Work& w;
#if SKIPPING  // those in which mask and segments leave something
  // Bit m % 32 of word m / 32 for query block m; behind these words as many that say whether all is left.
  const u32* words;
  __device__ __forceinline__ Walk(const Params& p, const Work& w_, int head) : w(w_) {
    words = p.live_tiles + w.seen.entry.batch * p.q_stride_b + head * p.q_stride_h + w.n * p.q_stride_s;
  }
  __device__ __forceinline__ bool whole(const Params& p, int m) const { return words[p.q_stride_s / 2 + (m >> 5)] >> (m & 31) & 1; }
#if DETERMINISTIC
  // The last below m, or less than m_begin.
  __device__ __forceinline__ int below(int m) const {
    if (m <= w.m_begin) return -1;
    int i = (m - 1) >> 5;
    u32 word = words[i] & ~0u >> (31 - ((m - 1) & 31));
    while (word == 0) {
      if (i * 32 <= w.m_begin) return -1;
      word = words[--i];
    }
    return 32 * i + 31 - __clz(word);
  }
  __device__ __forceinline__ int first() const { return below(w.m_end); }
  __device__ __forceinline__ int after(int m) const {
    const int next = below(m);
    return next >= w.m_begin ? next : first();
  }
#else
  // The first from m on, or m_end.
  __device__ __forceinline__ int from(int m) const {
    if (m >= w.m_end) return w.m_end;
    int i = m >> 5;
    u32 word = words[i] & ~0u << (m & 31);
    while (word == 0) {
      if (++i * 32 >= w.m_end) return w.m_end;
      word = words[i];
    }
    return min(w.m_end, 32 * i + __ffs(word) - 1);
  }
  __device__ __forceinline__ int after(int m) const {
    const int next = from(m + 1);
    return next < w.m_end ? next : from(w.m_begin);
  }
  __device__ __forceinline__ int first() const { return after(w.m_first - 1); }
#endif
  __device__ __forceinline__ int blocks() const {
    int count = 0;
    for (int i = w.m_begin >> 5; i * 32 < w.m_end; i++) {
      u32 word = words[i];
      if (i == w.m_begin >> 5) word &= ~0u << (w.m_begin & 31);
      if (i * 32 + 32 > w.m_end) word &= (1u << (w.m_end & 31)) - 1;
      count += __popc(word);
    }
    return count;
  }
#else
  __device__ __forceinline__ Walk(const Params&, const Work& w_, int) : w(w_) {}
  __device__ __forceinline__ int after(int m) const { return w.after(m); }
  __device__ __forceinline__ int first() const { return w.m_first; }
  __device__ __forceinline__ int blocks() const { return w.blocks(); }
#endif
};

// Query blocks of all heads of the group.
__device__ __forceinline__ int steps_of([[maybe_unused]] const Params& p, const Work& w, int group) {
#if SKIPPING
  int steps = 0;
  for (int g = 0; g < group; g++) steps += Walk(p, w, w.head_kv * group + g).blocks();
  return steps;
#endif
  return group * w.blocks();
}

// DETERMINISTIC: how many key blocks add to a query block before this one.
__device__ __forceinline__ int turn_of([[maybe_unused]] const Params& p, const Work& w, [[maybe_unused]] int head, int m) {
  const int first = HAS_LEFT ? max(0, m * BLOCK_M + w.seen.left) / BLOCK_N : 0;
#if SKIPPING
  const u32* words = p.live_tiles + w.seen.entry.batch * p.q_stride_b + head * p.q_stride_h + p.v_stride_h + m * p.v_stride_s;
  int turn = 0;
  for (int i = first >> 5; i * 32 < w.n; i++) {
    u32 word = words[i];
    if (i == first >> 5) word &= ~0u << (first & 31);
    if (i * 32 + 32 > w.n) word &= (1u << (w.n & 31)) - 1;
    turn += __popc(word);
  }
  return turn;
#endif
  return w.n - first;
}

// ------------------------------------------------------------------------------------------------ producer
// A key block's first row in the tensor maps. With variable lengths they hold whole arrays; otherwise they begin at the first
// visible row or key.
__device__ __forceinline__ int key_in_map(const Work& w) {
  return w.n * BLOCK_N + (VARIABLE ? (int)w.seen.entry.start_kv + w.seen.key_begin : 0);
}

__device__ __forceinline__ void load_keys(const Params& p, const TMap* map_k, const TMap* map_v, const Work& w, u32 base) {
  const int batch = VARLEN ? 0 : w.seen.entry.batch, key0 = key_in_map(w);
  mbarrier_expect(base + BAR_K, K_BYTES);
#pragma unroll
  for (int x = 0; x < D / 64; x++)
    tma_load(base + S_K + x * BLOCK_N * 128, map_k, 64 * x, key0, w.head_kv, batch, base + BAR_K);
#if NEED_DS
  mbarrier_expect(base + BAR_V, V_BYTES);
#pragma unroll
  for (int x = 0; x < DV / 64; x++)
    tma_load(base + S_V + x * BLOCK_N * 128, map_v, 64 * x, key0, w.head_kv, batch, base + BAR_V);
#endif
}

// Without map_k, K and V are on their way already.
__device__ __forceinline__ void produce(const Params& p, const TMap* map_q, const TMap* map_k, const TMap* map_v,
                                        const TMap* map_do, [[maybe_unused]] const TMap* map_bias, const Work& w, u32 base) {
  const int group = group_of(p), batch = VARLEN ? 0 : w.seen.entry.batch;
  const int row0 = VARIABLE ? (int)w.seen.entry.start_q + w.seen.row_begin : 0;
  if (map_k) load_keys(p, map_k, map_v, w, base);
  // NOTE: racecheck reports the bulk copies of LSE and delta against the consumers' reads, as it does for any ring of bulk copies:
  // it does not see that they wait for the EMPTY barriers.
  dependency_wait();
  Ring ring{0, 1};
  for (int g = 0; g < group; g++) {
    const int head = w.head_kv * group + g;
    const int block = (int)(first_sum(p, w.seen, head) / BLOCK_M);
    const Walk walk(p, w, head);
    for (int i = 0, m = walk.first(), blocks = walk.blocks(); i < blocks; i++, m = walk.after(m)) {
      const i64 sums = (i64)(block + m) * BLOCK_M;
      const u32 full_q = base + BAR_Q_FULL + 8 * ring.stage, full_do = base + BAR_DO_FULL + 8 * ring.stage;
      mbarrier_wait(base + BAR_Q_EMPTY + 8 * ring.stage, ring.parity);
#if SKIPPING
      shared_store_v4(base + S_SLOT + 16 * ring.stage, m, head, walk.whole(p, m), 0);
#endif
      mbarrier_expect(full_q, Q_BYTES + ROW_BYTES + BIAS_BYTES);
#if BIAS_TILES
#pragma unroll
      for (int x = 0; x < BLOCK_N / 64; x++)
        tma_load(base + S_BIAS + ring.stage * BIAS_BYTES + x * BLOCK_M * 128, map_bias, w.seen.key_begin + w.n * BLOCK_N + 64 * x,
                 w.seen.row_begin + m * BLOCK_M, p.bias_stride_h ? head : 0, p.bias_stride_b ? w.seen.entry.batch : 0, full_q);
#endif
#pragma unroll
      for (int x = 0; x < D / 64; x++)
        tma_load(base + S_Q + ring.stage * Q_BYTES + x * BLOCK_M * 128, map_q, 64 * x, row0 + m * BLOCK_M, head, batch, full_q);
      bulk_load(base + S_LSE + ring.stage * ROW_BYTES, (const float*)p.scratch + sums, ROW_BYTES, full_q);
      mbarrier_wait(base + BAR_DO_EMPTY + 8 * ring.stage, ring.parity);
      mbarrier_expect(full_do, DO_BYTES + NEED_DS * ROW_BYTES);
#pragma unroll
      for (int x = 0; x < DV / 64; x++)
        tma_load(base + S_DO + ring.stage * DO_BYTES + x * BLOCK_M * 128, map_do, 64 * x, row0 + m * BLOCK_M, head, batch, full_do);
      if (NEED_DS) bulk_load(base + S_DELTA + ring.stage * ROW_BYTES, (const float*)p.delta + sums, ROW_BYTES, full_do);
      ring.next(STAGES);
    }
  }
}

// ------------------------------------------------------------------------------------------------ consumers
// A warp's 16 rows of a gradient (64 x DIM accumulator, rows = keys) into shared memory at `stage` (slabs of `slab` bytes).
template <int DIM>
__device__ __forceinline__ void stage_gradient(const float (&x)[DIM / 2], float scale, u32 stage, u32 slab, int warp, int lane) {
  const int r = warp * 16 + (lane & 15);
#pragma unroll
  for (int j = 0; j < DIM / 16; j++)
    stmatrix_x4(stage + (j >> 2) * slab + r * 128 + (((2 * (j & 3) + (lane >> 4)) ^ (r & 7)) << 4),
                pack_half2(x[8 * j] * scale, x[8 * j + 1] * scale), pack_half2(x[8 * j + 2] * scale, x[8 * j + 3] * scale),
                pack_half2(x[8 * j + 4] * scale, x[8 * j + 5] * scale), pack_half2(x[8 * j + 6] * scale, x[8 * j + 7] * scale));
}

// Writes them by way of there: whole 16-byte pieces of rows below `rows`, columns below `columns`.
template <int DIM>
__device__ __forceinline__ void store_gradient(const float (&x)[DIM / 2], float scale, u32 stage, u32 slab, u16* out,
                                               i64 stride, int rows, int columns, int warp, int lane) {
  stage_gradient<DIM>(x, scale, stage, slab, warp, lane);
  __syncwarp();
  constexpr int LANES = DIM / 8, ROWS = 32 / LANES;  // 16-byte pieces of a row; rows at a time
#pragma unroll
  for (int i = 0; i < 16 / ROWS; i++) {
    const int row = warp * 16 + i * ROWS + lane / LANES, piece = lane % LANES;
    uint4 v;
    shared_load_v4(stage + (piece >> 3) * slab + row * 128 + (((piece & 7) ^ (row & 7)) << 4), v.x, v.y, v.z, v.w);
    if (row < rows && piece * 8 < columns) *(uint4*)(out + row * stride + piece * 8) = v;
  }
}

#if STORE_BOXES
// The same by TMA, for the warpgroup's keys from number `key` of the CTA's block on. Wait for the reads before the end.
template <int DIM>
__device__ __forceinline__ void store_boxes(const float (&x)[DIM / 2], float scale, u32 stage, u32 slab, const TMap* map,
                                            const Work& w, int key, int warp, int lane) {
  stage_gradient<DIM>(x, scale, stage, slab, warp, lane);
  proxy_fence();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < DIM / 64; i++)
      tma_store(map, 64 * i, w.n * BLOCK_N + key + warp * 16, w.head_kv, w.seen.entry.batch, stage + i * slab + warp * 2048);
    bulk_commit();
  }
}
#endif

#if VARIABLE
// Rows [from, ROWS) of a tile become zeros: what a neighbour or padding left there may be NaN. Each warpgroup writes them all,
// before its own reads.
template <int SLABS, int ROWS>
__device__ __forceinline__ void zero_tail(u32 tile, int from, int part, int thread) {
  if (from >= ROWS) return;
#pragma unroll 1
  for (int row = from + (thread >> 3); row < ROWS; row += 16) {
#pragma unroll
    for (int x = 0; x < SLABS; x++) shared_store_v4(tile + (x * ROWS + row) * 128 + (thread & 7) * 16, 0, 0, 0, 0);
  }
  proxy_fence();
  barrier_sync(ID_WARPGROUP + part, 128);
}
#endif

// Zeros for keys that nothing sees: block `w.n` of the keys lies behind the visible ones.
__device__ __forceinline__ void hide(const Params& p, const Work& w) {
  dependency_wait();
  const Visible& v = w.seen;
  const int block = w.n - ceil_div(v.keys, BLOCK_N), total = VARLEN ? v.entry.seqlen_kv : (int)p.seqlen_kv;
  const i64 batch = VARLEN ? 0 : v.entry.batch;
  u16* dk = (u16*)p.dk + batch * p.dk_stride_b + w.head_kv * p.dk_stride_h;
  u16* dv = (u16*)p.dv + batch * p.dv_stride_b + w.head_kv * p.dv_stride_h;
  const int thread = threadIdx.x, d = (int)p.head_dim, dv_columns = (int)p.head_dim_v;
  if (WANT_DK)
    zero_hidden<THREADS>(dk + v.entry.start_kv * p.dk_stride_s, p.dk_stride_s, d, block, BLOCK_N, v.key_begin, v.keys, total, thread);
  if (WANT_DV)
    zero_hidden<THREADS>(dv + v.entry.start_kv * p.dv_stride_s, p.dv_stride_s, dv_columns, block, BLOCK_N, v.key_begin, v.keys, total,
                         thread);
#if VARLEN
  if (w.slot == p.aux2 - 1) {
    if (WANT_DK) zero_unowned<THREADS>(p, dk, p.dk_stride_s, d, p.cu_seqlens_k, p.aux6, thread);
    if (WANT_DV) zero_unowned<THREADS>(p, dv, p.dv_stride_s, dv_columns, p.cu_seqlens_k, p.aux6, thread);
  }
#endif
  if (WANT_DQ && thread == 0) pass_turn(slots_done(p, w.section), 2);
}

// Barriers of all rings; a block barrier follows.
__device__ __forceinline__ void init_barriers(u32 base) {
  mbarrier_init(base + BAR_K, 1);
  mbarrier_init(base + BAR_V, 1);
  for (int i = 0; i < STAGES; i++) {
    mbarrier_init(base + BAR_Q_FULL + 8 * i, 1);
    mbarrier_init(base + BAR_Q_EMPTY + 8 * i, 4 * CONSUMERS);
  }
  for (int i = 0; i < STAGES_DO; i++) {
    mbarrier_init(base + BAR_DO_FULL + 8 * i, 1);
    mbarrier_init(base + BAR_DO_EMPTY + 8 * i, 4 * CONSUMERS);
  }
  mbarrier_init_fence();
}
