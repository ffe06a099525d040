// The bias's gradient on Hopper (sm_90a), fp16 and bf16, head dims up to 128, for a bias that has rows and keys of its own: dS summed
// over the entries and heads along which the bias is broadcast, in registers and in one fixed order, so that it is deterministic and
// needs no more memory than the bias. Scores are recomputed from LSE, transposed as in bwd_sm90.cu.
//
// CTAs are resident and take items from a counter: a tile of the bias and one of aux3 parts of the entries and heads that add to it.
// With several parts, part i writes float32 to scratch + i * aux4 (the bias's elements), and bwd_dbias_sum adds them up. A warp
// tells the others the steps and brings LSE and delta, another brings operands (TMA); two warpgroups of 64 keys each make products,
// weights and sums. A score belongs to one row and one key alone, so that what is not finite where nothing looks needs no cleaning,
// only selects.
//
// Shared memory: a ring of Q, K, dO and V, the item's tile of the bias, from whose place the sums leave, two stages of LSE and delta.
// Rows and keys are counted from the first of the arrays: visible ones begin elsewhere in each entry.
//
// Params as bwd_sm90.cuh says, but lse is what is scratch there; aux1, aux2 batches and heads of the bias; aux5 items, semaphore their
// counter; mask and live tiles are made of BLOCK_M 64 from the arrays' first rows and keys on.
#define BLOCK_N 128
#define STAGES 1
#define STAGES_DO 1
#define DS_TILES 0
#define DQ_BYTES 0
#include "bwd_sm90_scores.cuh"

#ifndef PARTS  // of sums, in float32
#define PARTS 0
#endif
#ifndef STORE_TILES  // the sums leave by TMA, through the bias's place in shared memory
#define STORE_TILES 0
#endif
#if STORE_TILES
#define MAP_DBIAS &map_dbias
#define AND_MAP_DBIAS , const __grid_constant__ TMap map_dbias
#else
#define MAP_DBIAS nullptr
#define AND_MAP_DBIAS
#endif
static_assert(BIAS && !VARLEN && BLOCK_M == 128 && D <= 128 && DV <= 128, "what it is for");
static_assert(!STORE_TILES || (BIAS_TILES && !PARTS), "a tile of the bias's size and type");

#define SLOT_BYTES (256 * (D > DV ? D : DV))
#define TILE_OF_BIAS (BIAS_TILES * BLOCK_M * BLOCK_N * (int)sizeof(BiasElement))
#define TOLD 4  // steps at most before the last one is over
#define STEP_BYTES 48
#define T_BIAS (SLOTS * SLOT_BYTES)
#define T_ROWS (T_BIAS + TILE_OF_BIAS)  // LSE and delta
#define T_STEPS (T_ROWS + 4 * ROW_BYTES)
#define T_KEPT (T_STEPS + TOLD * STEP_BYTES)
#define T_BAR (T_KEPT + 2 * KEPT_BYTES)
#define FULL(stage) (base + T_BAR + 16 * (stage))
#define EMPTY(stage) (FULL(stage) + 8)
#define ROWS_AT SLOTS  // whose barriers are where
#define STEPS_AT (ROWS_AT + 2)
#define BIAS_AT (STEPS_AT + TOLD)
#define T_TOTAL (T_BAR + 16 * (BIAS_AT + CONSUMERS))
static_assert(T_TOTAL <= 232448, "shared memory");

#define LOWEST -0x40000000
#define CLIP 1e30f  // above all raw scores; NaN becomes it, so that the bias's -infinity hides NaN as well

template <int N>
struct Int {
  static constexpr int value = N;
};

struct Item {
  int m, n, part, head, batch;  // tile of the bias, its first head and entry
  int first, last, heads;       // of what adds to it, heads fastest
  DEVICE int batch_of(int i) const { return batch + i / heads; }
  DEVICE int head_of(int i) const { return head + i % heads; }
};

DEVICE Item item_of(const Params& p, int index) {
  const int parts = (int)p.aux3, blocks_m = ceil_div((int)p.seqlen_q, BLOCK_M), blocks_n = ceil_div((int)p.seqlen_kv, BLOCK_N);
  int rest = index / parts;
  Item x;
  x.part = index - rest * parts;
  x.n = rest % blocks_n;
  rest /= blocks_n;
  x.m = rest % blocks_m;
  rest /= blocks_m;
  x.head = rest % (int)p.aux2;
  x.batch = rest / (int)p.aux2;
  x.heads = (int)p.heads_q / (int)p.aux2;
  const i64 count = (p.batch / p.aux1) * x.heads;
  x.first = (int)(count * x.part / parts);
  x.last = (int)(count * (x.part + 1) / parts);
  return x;
}

// Whether anything is to be seen in the item's tile of an entry and head.
DEVICE bool is_live([[maybe_unused]] const Params& p, const Item& x, const Entry& e, [[maybe_unused]] int head) {
  const Range rows = query_range(e, x.n * BLOCK_N, min(x.n * BLOCK_N + BLOCK_N, e.seqlen_kv));
  if (rows.first >= x.m * BLOCK_M + BLOCK_M || rows.last <= max(rows.first, x.m * BLOCK_M)) return false;
#if SKIPPING
  const u32* words = p.live_tiles + e.batch * p.q_stride_b + head * p.q_stride_h + x.n * p.q_stride_s;
  return words[x.m / 16] >> (2 * x.m & 31) & 3;
#else
  return true;
#endif
}

enum Flag { FIRST = 1, ODD = 2, END = 4 };  // of an item; the bias's barrier completes its phase 1; no step, but the end

// A step's numbers in shared memory, read where they are needed: no registers hold them while products run.
struct Step {
  u32 at;
  __device__ __forceinline__ int get(int i) const { return (int)shared_load(at + 4 * i); }
  __device__ __forceinline__ int flags() const { return get(0); }
  __device__ __forceinline__ int row0() const { return get(1); }
  __device__ __forceinline__ int key0() const { return get(2); }
  __device__ __forceinline__ int batch() const { return get(3); }
  __device__ __forceinline__ int head() const { return get(4); }
  __device__ __forceinline__ int keys() const { return get(5); }
  __device__ __forceinline__ int left() const { return get(6); }
  __device__ __forceinline__ int right() const { return get(7); }
  __device__ __forceinline__ int bias_head() const { return get(8); }
  __device__ __forceinline__ int bias_batch() const { return get(9); }
  __device__ __forceinline__ int part() const { return get(10); }
  __device__ __forceinline__ int offset() const { return get(11); }
};

// ------------------------------------------------------------------------------------------------ producers
// Zeros of an item in whose tile nothing is to be seen, by a warp.
__device__ __forceinline__ void store_zeros(const Params& p, const Item& x, int lane) {
  const int row0 = x.m * BLOCK_M, key0 = x.n * BLOCK_N, rows = min(BLOCK_M, (int)p.seqlen_q - row0);
  const i64 at = x.batch * p.dbias_stride_b + x.head * p.dbias_stride_h + row0 * p.dbias_stride_q + key0;
#if STORE_TILES
  constexpr int EACH = 16 / sizeof(BiasElement);
  BiasElement* to = (BiasElement*)p.dbias + at;
#elif PARTS
  constexpr int EACH = 1;
  float* to = (float*)p.scratch + x.part * p.aux4 + at;
#else
  constexpr int EACH = 1;
  BiasElement* to = (BiasElement*)p.dbias + at;
#endif
  constexpr int ACROSS = BLOCK_N / EACH < 32 ? BLOCK_N / EACH : 32;  // lanes of a row
  const int keys = (int)p.seqlen_kv - key0, key = EACH * (lane % ACROSS);
#pragma unroll 1
  for (int row = lane / ACROSS; row < rows; row += 32 / ACROSS)
#pragma unroll
    for (int more = 0; more < BLOCK_N; more += EACH * ACROSS) {
      if (key + more >= keys) continue;
      if (EACH > 1)
        *(uint4*)(to + row * p.dbias_stride_q + key + more) = make_uint4(0, 0, 0, 0);
      else
        to[row * p.dbias_stride_q + key + more] = 0;
    }
}

// Steps, and their LSE and delta; rows that see nothing, or are none, have an infinite LSE and so no weight.
__device__ __forceinline__ void tell_steps(const Params& p, u32 base) {
  int n = 0, odd = 0;  // steps told
  auto tell = [&](int flags, const Item& x, int head, const Entry& e) INLINE {
    mbarrier_wait(EMPTY(STEPS_AT + n % TOLD), ~(n / TOLD) & 1);
    if (lane_now() == 0) {
      const u32 to = base + T_STEPS + n % TOLD * STEP_BYTES;
      shared_store_v4(to, flags, x.m * BLOCK_M, x.n * BLOCK_N, e.batch);
      shared_store_v4(to + 16, head, e.seqlen_kv, e.diagonal_left, e.diagonal_right);
      shared_store_v4(to + 32, x.head, x.batch, x.part, e.offset);
      mbarrier_arrive(FULL(STEPS_AT + n % TOLD));
    }
  };
  for (int index = blockIdx.x; index < p.aux5;) {
    const Item x = item_of(p, index);
    int first = FIRST;
#pragma unroll 1
    for (int i = x.first; i < x.last; i++) {
      const Visible v = load_visible(p, x.batch_of(i));
      if (!is_live(p, x, v.entry, x.head_of(i))) continue;
      tell(first | odd, x, x.head_of(i), v.entry);
      first = 0;
      const int lane = lane_now();
      mbarrier_wait(EMPTY(ROWS_AT + (n & 1)), ~n >> 1 & 1);
      const i64 at = first_sum(p, v, x.head_of(i)) - v.row_begin;
      const u32 to = base + T_ROWS + (n & 1) * (2 * ROW_BYTES) - 4 * x.m * BLOCK_M;
#pragma unroll 1
      for (int row = x.m * BLOCK_M + lane; row < x.m * BLOCK_M + BLOCK_M; row += 32) {
        const bool seen = row >= v.row_begin && row < v.row_begin + v.rows;
        const float lse = seen ? ((const float*)p.lse)[at + row] : (float)infinity();
        const float delta = seen ? ((const float*)p.delta)[at + row] : 0.f;
        shared_store(to + 4 * row, __float_as_uint(lse));
        shared_store(to + 4 * row + ROW_BYTES, __float_as_uint(delta));
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(FULL(ROWS_AT + (n & 1)));
      n++;
    }
    if (first)
      store_zeros(p, item_of(p, index), lane_now());
    else
      odd ^= ODD;
    if (lane_now() == 0) index = (int)gridDim.x + atomicAdd(p.semaphore, 1);
    index = __shfl_sync(~0u, index, 0);
  }
  tell(END, Item(), 0, Entry());
}

__device__ __forceinline__ void load_operands(const Params& p, const TMap* map_q, const TMap* map_k, const TMap* map_v,
                                              const TMap* map_do, [[maybe_unused]] const TMap* map_bias, u32 base) {
  Ring slots{0, 1};
  for (int n = 0;; n++) {
    mbarrier_wait(FULL(STEPS_AT + n % TOLD), n / TOLD & 1);
    const Step x{base + T_STEPS + n % TOLD * STEP_BYTES};
    [[maybe_unused]] const int flags = x.flags();
    if (flags & END) break;
    const int row0 = x.row0(), key0 = x.key0(), batch = x.batch(), head = x.head(), head_kv = head / group_of(p);
    auto load = [&](const TMap* map, int dim, int row, int of_head) INLINE {
      const u32 to = base + slots.stage * SLOT_BYTES, full = FULL(slots.stage);
      mbarrier_wait(EMPTY(slots.stage), slots.parity);
      mbarrier_expect(full, dim * 256);
      for (int y = 0; y < dim / 64; y++) tma_load(to + y * (BLOCK_M * 128), map, 64 * y, row, of_head, batch, full);
      slots.next(SLOTS);
    };
    load(map_q, D, row0, head);
    load(map_k, D, key0, head_kv);
    load(map_do, DV, row0, head);
    load(map_v, DV, key0, head_kv);
#if BIAS_TILES
    if (flags & FIRST) {
      const int bias_head = p.bias_stride_h ? x.bias_head() : 0, bias_batch = p.bias_stride_b ? x.bias_batch() : 0;
      for (int part = 0; part < CONSUMERS; part++) {
        const u32 full = FULL(BIAS_AT + part);
        mbarrier_wait(EMPTY(BIAS_AT + part), !(flags & ODD));
        mbarrier_expect(full, TILE_OF_BIAS / 2);
        for (int y = 0; y < BIAS; y++)
          tma_load(base + T_BIAS + (part * BIAS + y) * (BLOCK_M * 128), map_bias, key0 + 64 * part + 32 * y, row0, bias_head, bias_batch,
                   full);
      }
    }
#endif
    mbarrier_arrive(EMPTY(STEPS_AT + n % TOLD));
  }
}

// ------------------------------------------------------------------------------------------------ consumers
#if BIAS_TILES
// A thread's part of the tile of the bias, in the order of its scores; the sums leave from the same place. 16 bits: `at` is for
// ldmatrix. 32 bits: the thread's first element, in slabs of 32 keys.
struct BiasTile {
  const u32 at;
#if BIAS == 1
  __device__ __forceinline__ void get(float (&values)[8], int y) const {
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, at + y * 2048);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 pair = unpack_half2(pairs[j]);
      values[2 * j] = pair.x, values[2 * j + 1] = pair.y;
    }
  }
  __device__ __forceinline__ void put(const float* sum, int y) const {
    stmatrix_x4_trans(at + y * 2048, pack_half2(sum[0], sum[1]), pack_half2(sum[2], sum[3]), pack_half2(sum[4], sum[5]),
                      pack_half2(sum[6], sum[7]));
  }
#else
  // Rows are 128 bytes; 16-byte chunks are turned by the row.
  __device__ __forceinline__ u32 place(int y, int j) const {
    return (at ^ (16 * (j & 1) + 32 * (j >> 1 & 1))) + (16 * y + 8 * (j >> 2) + (j & 1)) * 128;
  }
  __device__ __forceinline__ void get(float (&values)[8], int y) const {
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = __uint_as_float(shared_load(place(y, j)));
  }
  __device__ __forceinline__ void put(const float* sum, int y) const {
#pragma unroll
    for (int j = 0; j < 8; j++) shared_store(place(y, j), __float_as_uint(sum[j]));
  }
#endif
};
#else
// A thread's values of the bias, in the order of its scores; `row` and `key` are its first.
struct Bias {
  const BiasElement* at;
  i64 stride, to_second;
  int rows;
  bool second;
  __device__ __forceinline__ Bias(const Params& p, int batch, int head, int row, int key)
      : stride(p.bias_stride_q), to_second(8 * p.bias_stride_k), rows((int)p.seqlen_q - row), second(key + 8 < p.seqlen_kv) {
    at = (const BiasElement*)p.bias + batch * p.bias_stride_b + head * p.bias_stride_h + row * stride + key * p.bias_stride_k;
    if (key >= p.seqlen_kv) rows = 0;
  }
  // The next eight.
  __device__ __forceinline__ void get(float (&values)[8], int) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const BiasElement* from = at + x * stride;
        values[j + x] = x < rows ? to_accum(from[0]) : 0.f;
        values[j + x + 2] = x < rows && second ? to_accum(from[to_second]) : 0.f;
      }
      at += 8 * stride;
      rows -= 8;
    }
  }
};
#endif

// A thread's sums, element by element.
__device__ __forceinline__ void store_sums(const Params& p, const Step& x, const float (&sum)[BLOCK_M / 2], int row, int column) {
  const int key = x.key0() + row;
  if (key >= p.seqlen_kv) return;
  int rows = (int)p.seqlen_q - x.row0() - column;
  const bool second = key + 8 < p.seqlen_kv;
  const i64 stride = p.dbias_stride_q;
  i64 at = x.bias_batch() * p.dbias_stride_b + x.bias_head() * p.dbias_stride_h + ((int)p.seqlen_q - rows) * stride + key;
#if PARTS
  float* to = (float*)p.scratch + x.part() * p.aux4 + at;
  auto as_stored = [](float y) INLINE { return y; };
#else
  BiasElement* to = (BiasElement*)p.dbias + at;
  auto as_stored = [](float y) INLINE { return from_accum<BiasElement>(y); };
#endif
#pragma unroll
  for (int i = 0; i < BLOCK_M / 2; i += 4) {
#pragma unroll
    for (int y = 0; y < 2; y++) {
      if (y < rows) to[y * stride] = as_stored(sum[i + y]);
      if (y < rows && second) to[y * stride + 8] = as_stored(sum[i + y + 2]);
    }
    to += 8 * stride;
    rows -= 8;
  }
}

__device__ __forceinline__ void consume(const Params& p, [[maybe_unused]] const TMap* map_dbias, u32 base, int part) {
  constexpr int HALF = BLOCK_M / 2;             // queries of a product
  constexpr bool EARLY = SLOTS >= 6;            // whether the next step's Q and K have slots while this one's are in use
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const int row = part * 64 + warp * 16 + (lane >> 2), column = 2 * (lane & 3);  // this thread's keys: row, row + 8
  const float softmax_scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  const u32 base16 = (base & 0x3FFFF) >> 4;
#if BIAS == 1
  [[maybe_unused]] const u32 tile = base + T_BIAS + part * (BLOCK_M * 128) + ((lane >> 4) * 8 + (lane & 7)) * 128 +
                                    (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#else
  [[maybe_unused]] const u32 tile = base + T_BIAS + (2 * part + (warp >> 1)) * (BLOCK_M * 128) + column * 128 +
                                    ((64 * (warp & 1) + 4 * (lane >> 2)) ^ (16 * column));
#endif
  float s0[HALF / 2], s1[HALF / 2], dp[HALF / 2], sum[BLOCK_M / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_M / 2; i++) sum[i] = 0.f;
  Ring slots{0, 0};

  auto product = [&](float(&x)[HALF / 2], u32 queries, u32 keys, auto dims, int half) INLINE {  // of slots: keys by half the queries
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < decltype(dims)::value / 16; k++)
      Wgmma<HALF>::ss(x, operand(base16 + keys * (SLOT_BYTES >> 4) + part * 512, (k >> 2) * (BLOCK_N * 128) + 32 * (k & 3), 16),
                      operand(base16 + queries * (SLOT_BYTES >> 4), half * (HALF * 128) + (k >> 2) * (BLOCK_M * 128) + 32 * (k & 3), 16),
                      k > 0);
    wgmma_commit();
  };
  auto next_slot = [&](bool there) INLINE {  // when it is full; stays where it is if there is none
    const int slot = slots.stage;
    if (there) {
      mbarrier_wait(FULL(slot), slots.parity);
      slots.next(SLOTS);
    }
    return slot;
  };
  auto free_slots = [&](int queries, int keys) INLINE {
    if (lane == 0) mbarrier_arrive(EMPTY(queries));
    if (lane == 0) mbarrier_arrive(EMPTY(keys));
  };
  auto step_at = [&](int n) INLINE {
    mbarrier_wait(FULL(STEPS_AT + n % TOLD), n / TOLD & 1);
    return Step{base + T_STEPS + n % TOLD * STEP_BYTES};
  };

  bool more = !(step_at(0).flags() & END);
  if (!more) return;
  int q = next_slot(true), k = next_slot(true);
  product(s0, q, k, Int<D>(), 0);  // S^T = K Q^T
  // While weights and sums of one half are made, the other's products run.
#pragma unroll 1
  for (int n = 0; more; n++) {
    const Step x = step_at(n);
    const u32 rows_at = base + T_ROWS + (n & 1) * (2 * ROW_BYTES) + column * 4;
    const int g = next_slot(true), v = next_slot(true);
    wgmma_wait<0>();
    touch(s0);
    product(dp, g, v, Int<DV>(), 0);  // dP^T = V dO^T
    product(s1, q, k, Int<D>(), 1);
#if DROPOUT
    u32 kept[WORDS];
    kept_weights(kept, p, dropout_key(p, x.batch(), x.head()), x.row0(), x.key0() / 32 + 2 * part + (warp >> 1),
                 base + T_KEPT + (n & 1) * KEPT_BYTES, part, warp, lane);
#endif
#if BIAS_TILES
    if (const int flags = x.flags(); flags & FIRST) mbarrier_wait(FULL(BIAS_AT + part), flags / ODD & 1);
#endif
    mbarrier_wait(FULL(ROWS_AT + (n & 1)), n >> 1 & 1);

    auto weights = [&](float(&s)[HALF / 2], int half) INLINE {  // S^T -> P^T
      const int row0 = x.row0() + half * HALF, key0 = x.key0(), batch = x.batch(), head = x.head(), keys = x.keys();
      Work w;  // of all rows and keys
      w.seen.entry.batch = batch;
      w.seen.row_begin = w.seen.key_begin = 0;
      w.seen.rows = (int)p.seqlen_q;
      w.seen.keys = keys;
      w.n = key0 / BLOCK_N;
      [[maybe_unused]] Features<HALF / 2> features(p, w, row, column + half * HALF, part * 128 + thread, softmax_scale);
#if MASK
      const u32* bits = (const u32*)p.mask + batch * p.k_stride_b + head * p.k_stride_h + 2 * key0 + part * 128 + thread;
      features.shown[0] = bits[min(row0, (int)p.seqlen_q - 1) / 64 * p.k_stride_s];
#endif
#if BIAS_TILES
      const BiasTile bias{tile + half * (HALF * 128)};
#else
      Bias bias(p, batch, head, row0 + column, key0 + row);
#endif
#if ALIBI
      const float slope = ((const float*)p.alibi_slopes)[batch * p.alibi_slopes_stride_b + head];
      const float far = (float)(row0 + column + x.offset() - key0 - row);
#endif
#pragma unroll
      for (int y = 0; y < HALF / 16; y++) {
        float values[8];
        bias.get(values, y);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const int i = 8 * y + j;
          s[i] = fmaf(fminf(s[i], CLIP), softmax_scale, values[j]);
#if ALIBI
          s[i] -= slope * fabsf(far + (float)(8 * (i >> 2) + (i & 1) - 4 * (i & 2)));
#endif
        }
      }
      // First and last query row, less this thread's first, that see its two keys
      int low0 = key0 + row < keys ? LOWEST : -LOWEST, low1 = key0 + row + 8 < keys ? LOWEST : -LOWEST;
      bool clean = key0 + BLOCK_N <= keys;
#if HAS_RIGHT
      const int right = key0 + row - x.right() - row0 - column;
      low0 = max(low0, right);
      low1 = max(low1, right + 8);
      clean = clean && row0 >= key0 + BLOCK_N - 1 - x.right();
#endif
#if HAS_LEFT
      const int high0 = key0 + row - x.left() - row0 - column;
      clean = clean && row0 + HALF - 1 <= key0 - x.left();
#endif
      if (!clean) {
#pragma unroll
        for (int i = 0; i < HALF / 2; i++) {
          const int at = 8 * (i >> 2) + (i & 1);
          bool seen = at >= ((i & 2) ? low1 : low0);
#if HAS_LEFT
          seen = seen && at <= high0 + ((i & 2) ? 8 : 0);
#endif
          if (!seen) s[i] = NEG_INF;
        }
      }
#if SKIPPING
      features.hide(s, x.row0() / BLOCK_M, false);
#endif
#pragma unroll
      for (int i = 0; i < HALF / 2; i += 4) {
        const float2 l = shared_load_f2(rows_at + half * (HALF * 4) + i * 8);
#pragma unroll
        for (int j = i; j < i + 4; j++) s[j] = exp2_approx((s[j] - (j & 1 ? l.y : l.x)) * (float)LOG2E);
      }
    };
    auto add = [&](const float(&s)[HALF / 2], int half) INLINE {
#pragma unroll
      for (int i = 0; i < HALF / 2; i += 4) {
        const float2 d = shared_load_f2(rows_at + ROW_BYTES + half * (HALF * 4) + i * 8);
#pragma unroll
        for (int j = i; j < i + 4; j++) {
          const float delta = j & 1 ? d.y : d.x;
#if DROPOUT
          const float dweight = fmaf(is_kept(kept, half * (HALF / 2) + j) ? dp[j] : 0.f, (float)p.dropout_scale, -delta);
#else
          const float dweight = dp[j] - delta;
#endif
          fma_unless_zero(sum[half * (HALF / 2) + j], s[j], dweight);  // what nothing sees may be anything
        }
      }
    };

    weights(s0, 0);
    wgmma_wait<1>();
    touch(dp);
    add(s0, 0);
    touch(dp);
    product(dp, g, v, Int<DV>(), 1);
    const int next_flags = step_at(n + 1).flags();
    more = !(next_flags & END);
    int next_q = 0, next_k = 0;
    if (EARLY) {  // without a next step: of whatever is there, for nobody
      next_q = next_slot(more);
      next_k = next_slot(more);
      touch(s0);
      product(s0, next_q, next_k, Int<D>(), 0);
    }
    wgmma_wait<1 + EARLY>();
    touch(s1);
    free_slots(q, k);
    weights(s1, 1);
    wgmma_wait<EARLY>();
    touch(dp);
    free_slots(g, v);
    add(s1, 1);
    if (!EARLY) {
      next_q = next_slot(more);
      next_k = next_slot(more);
      touch(s0);
      product(s0, next_q, next_k, Int<D>(), 0);
    }
    q = next_q, k = next_k;

    if (next_flags & (FIRST | END)) {
#if STORE_TILES
#pragma unroll
      for (int y = 0; y < BLOCK_M / 16; y++) BiasTile{tile}.put(sum + 8 * y, y);
      proxy_fence();
#else
      store_sums(p, x, sum, row, column);
#endif
#if BIAS_TILES
      barrier_sync(ID_WARPGROUP + part, 128);  // all have read the bias, and left their sums
      if (thread == 0) {
#if STORE_TILES
        for (int y = 0; y < BIAS; y++)
          tma_store(map_dbias, x.key0() + 64 * part + 32 * y, x.row0(), x.bias_head(), x.bias_batch(),
                    base + T_BIAS + (part * BIAS + y) * (BLOCK_M * 128));
        bulk_commit();
        bulk_wait_read<0>();
#endif
        mbarrier_arrive(EMPTY(BIAS_AT + part));
      }
#endif
#pragma unroll
      for (int i = 0; i < BLOCK_M / 2; i++) sum[i] = 0.f;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(EMPTY(ROWS_AT + (n & 1)));
    if (lane == 0) mbarrier_arrive(EMPTY(STEPS_AT + n % TOLD));
  }
  wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_sm90_dbias(const __grid_constant__ Params p, const __grid_constant__ TMap map_q,
                                  const __grid_constant__ TMap map_k, const __grid_constant__ TMap map_v,
                                  const __grid_constant__ TMap map_do AND_MAP_BIAS AND_MAP_DBIAS) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < BIAS_AT + CONSUMERS; i++) {
      mbarrier_init(FULL(i), 1);
      mbarrier_init(EMPTY(i), i < STEPS_AT ? 4 * CONSUMERS : i < BIAS_AT ? 4 * CONSUMERS + 1 : 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<40>();
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) load_operands(p, &map_q, &map_k, &map_v, &map_do, MAP_BIAS, base);
    if (warp == 1) tell_steps(p, base);
  } else {
    registers_take<232>();
    consume(p, MAP_DBIAS, base, warpgroup - 1);
  }
}
