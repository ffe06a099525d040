// The 16-bit backward on mma.sync, FlashAttention-2's: a block of threads owns BLOCK_N keys of one head, keeps K and V in
// shared memory and dK and dV in registers, and walks over the query blocks that see them, recomputing P from LSE.
//
// Scores are kept transposed (keys are rows): a warp owns BLOCK_N / WARPS_N keys, so that P and dS are A operands of dV and
// dK as they stand. With WARPS_M = 2 two warps share their keys: each computes half of the queries' scores and accumulates
// half of the columns, and P and dS pass through shared memory. dS always does, for dQ, which leaves by reductions to
// dq_accum (DETERMINISTIC: in the order of the key blocks).
#include "bwd.cuh"

#define THREADS (32 * WARPS_N * WARPS_M)
#ifndef UNROLL_SUB
#define UNROLL_SUB 1
#endif
#define NEED_DS (WANT_DQ || WANT_DK)
#define SHARE_P (WARPS_M > 1)
// A window's blocks of keys begin at queries that earlier blocks reach last: taken from the end, they find their turns free.
#define DESCENDING (DETERMINISTIC && HAS_LEFT)

#define KEYS (BLOCK_N / WARPS_N)     // of a warp
#define QUERIES (BLOCK_M / WARPS_M)  // of a warp, SUB_M at a time
#define MT (KEYS / 16)
#define NT (SUB_M / 8)
#define DT (HEAD_DIM / WARPS_M / 8)
#define DT_V (HEAD_DIM_V / WARPS_M / 8)
#define DQ_WARPS_D (WARPS_N * WARPS_M / DQ_WARPS_M)
#define DQ_MT (BLOCK_M / DQ_WARPS_M / 16)
#define DQ_DT (HEAD_DIM / DQ_WARPS_D / 8)

static_assert(KEYS % 16 == 0 && QUERIES % SUB_M == 0 && SUB_M % 16 == 0, "warps own whole 16 x 16 patches");
static_assert(HEAD_DIM % (16 * DQ_WARPS_D) == 0 && BLOCK_M % (16 * DQ_WARPS_M) == 0, "so do they of dQ");
static_assert(THREADS >= 2 * BLOCK_M, "a thread copies one element of LSE or delta");

using QTile = Tile<BLOCK_M, HEAD_DIM>;
using DoTile = Tile<BLOCK_M, HEAD_DIM_V>;
using KTile = Tile<BLOCK_N, HEAD_DIM>;
using VTile = Tile<BLOCK_N, HEAD_DIM_V>;
using STile = Tile<BLOCK_N, BLOCK_M>;  // P and dS, transposed

#define SMEM_K 0
#define SMEM_V (SMEM_K + KTile::kBytes)
#define SMEM_Q (SMEM_V + VTile::kBytes)
#define SMEM_DO (SMEM_Q + STAGES * QTile::kBytes)
#define SMEM_DS (SMEM_DO + STAGES * DoTile::kBytes)
#define SMEM_P (SMEM_DS + (NEED_DS ? STile::kBytes : 0))
#define SMEM_LSE (SMEM_P + (SHARE_P ? STile::kBytes : 0))  // and delta, a stage after the other

// Row of shared memory, in rows of tile T, where SMEM_* starts: added to a patch's row it costs no register.
#define ROW_OF(T, start) ((start) / T::kRowBytes)
static_assert(SMEM_LSE % 1024 == 0, "tiles start on whole rows");

// c += a b for one k step whose rows of TB start at `row`; the columns are every STRIDE-th 16 from `base` on.
template <typename TB, int STRIDE, int M, int N>
DEVICE void mma_step_strided(Acc<M, N>& c, const FragmentA<M>& a, u32 base, int row) {
#pragma unroll
  for (int n = 0; n < N / 2; n++) {
    u32 b[4];
    ldmatrix_x4_trans(b, TB::patch(base, row, STRIDE * n));
#pragma unroll
    for (int m = 0; m < M; m++) {
      mma_m16n8k16(c.x[m][2 * n], a.r[m], b[0], b[1]);
      mma_m16n8k16(c.x[m][2 * n + 1], a.r[m], b[2], b[3]);
    }
  }
}

// What one block of threads works on: keys [first_key, last_key) of an entry, for the q heads from `head` on.
struct Work {
  Entry entry;
  int head_kv, head;
  int block, first_key, last_key;
  Range rows;  // that see some of these keys

  // Blocks of those rows, from the first to the one behind the last.
  DEVICE int first_m() const { return rows.first / BLOCK_M; }
  DEVICE int end_m() const { return (rows.last + BLOCK_M - 1) / BLOCK_M; }
};

DEVICE Work load_work(const Params& p, int block) {
  // Blocks run through the key blocks of aux4 heads together: the earliest, which a causal mask makes the longest, first;
  // DESCENDING: the latest first.
  const int heads = (int)(p.heads_q / p.aux7), all = heads * (int)p.batch, blocks = (int)p.aux3, section_heads = (int)p.aux4;
  const int section = block / (section_heads * blocks), rest = block % (section_heads * blocks);
  const int here = min(section_heads, all - section * section_heads);
  const int index = section * section_heads + rest % here;
  Work w;
  w.block = uniform(DESCENDING ? blocks - 1 - rest / here : rest / here);
  w.entry = load_entry(p, uniform(index / heads));
  w.head = uniform(index % heads * (int)p.aux7);
  w.head_kv = w.head / (int)(p.heads_q / p.heads_kv);
  w.first_key = w.block * BLOCK_N;
  w.last_key = min(w.first_key + BLOCK_N, w.entry.seqlen_kv);
  w.rows = query_range(w.entry, w.first_key, w.last_key);
  return w;
}

// The blocks of queries in the order of the walk, one q head after the other, and their copies to shared memory.
struct Queries {
  const u16* q;
  const u16* dout;
  i64 sums;  // the block's first element in LSE and delta
  int head, m;

  DEVICE void start(const Params& p, const Work& w, int head_) {
    head = head_;
    m = w.first_m();
    const i64 row = (i64)m * BLOCK_M;
    Entry e = w.entry;
    e.batch = opaque(e.batch);
    q = (const u16*)p.q + base_q(e, head, p.q_stride_b, p.q_stride_h, p.q_stride_s) + row * p.q_stride_s;
    dout = (const u16*)p.dout + base_q(e, head, p.dout_stride_b, p.dout_stride_h, p.dout_stride_s) + row * p.dout_stride_s;
    sums = base_q(e, head, p.lse_stride_b, p.lse_stride_h, 1) + row;
  }

  // Whether the block's tile holds anything, as far as mask and segments go.
  DEVICE bool live(const Params& p, const Work& w) const {
#if MASK || SEGMENTS
    return live_tile(live_row(p, w.entry.batch, head, m), w.block);
#endif
    return true;
  }

  // Moves on to the next block that holds anything; false at the end of the last head.
  DEVICE bool advance(const Params& p, const Work& w) {
    do {
      m++;
      q += BLOCK_M * p.q_stride_s;
      dout += BLOCK_M * p.dout_stride_s;
      sums += BLOCK_M;
      if (m == w.end_m()) {
        if (head + 1 == w.head + (int)p.aux7) return false;
        start(p, w, head + 1);
      }
    } while (!live(p, w));
    return true;
  }

  // Starts copying the block. Rows that see none of the keys become zeros.
  DEVICE void load(const Params& p, const Work& w, u32 smem, int stage) const {
    const int first = w.rows.first - m * BLOCK_M, last = w.rows.last - m * BLOCK_M, thread = opaque(threadIdx.x);
    load_tile<QTile, THREADS, true, WHOLE_D>(smem + SMEM_Q + stage * QTile::kBytes, q, p.q_stride_s, first, last,
                                            (int)p.head_dim, thread);
    load_tile<DoTile, THREADS, true, WHOLE_D>(smem + SMEM_DO + stage * DoTile::kBytes, dout, p.dout_stride_s, first, last,
                                             (int)p.head_dim_v, thread);
    if (thread < 2 * BLOCK_M) {
      const int row = thread % BLOCK_M;
      const float* from = (const float*)(thread < BLOCK_M ? p.lse : p.delta) + sums + row;
      cp_async4(smem + SMEM_LSE + stage * (2 * BLOCK_M * 4) + thread * 4, from, row >= first && row < last);
    }
    cp_async_commit();
  }
};

DEVICE void load_keys(const Params& p, const Work& w, u32 smem) {
  const Range seen = key_range(w.entry, 0, w.entry.seqlen_q);
  const int first = seen.first - w.first_key, last = min(seen.last, w.last_key) - w.first_key;
  const u16* k = (const u16*)p.k + base_kv(w.entry, w.head_kv, p.k_stride_b, p.k_stride_h, p.k_stride_s) +
                 w.first_key * p.k_stride_s;
  const u16* v = (const u16*)p.v + base_kv(w.entry, w.head_kv, p.v_stride_b, p.v_stride_h, p.v_stride_s) +
                 w.first_key * p.v_stride_s;
  load_tile<KTile, THREADS, true, WHOLE_D>(smem + SMEM_K, k, p.k_stride_s, first, max(first, last), (int)p.head_dim, threadIdx.x);
  load_tile<VTile, THREADS, true, WHOLE_D>(smem + SMEM_V, v, p.v_stride_s, first, max(first, last), (int)p.head_dim_v, threadIdx.x);
}

template <int M, int N>
DEVICE void store_scores(const Acc<M, N>& c, u32 base, int row) {
#pragma unroll
  for (int k = 0; k < N / 2; k++) {
    const FragmentA<M> a = to_a(c, k);
#pragma unroll
    for (int m = 0; m < M; m++) stmatrix_x4(STile::patch(base, row + 16 * m, 16 * k), a.r[m]);
  }
}

// The turn of this block of keys among those that add to query block m of `head`: how many come before it.
DEVICE int turn_of(const Params& p, const Work& w, int head, int m) {
  const Entry& e = w.entry;
  int first = HAS_LEFT ? max(0, m * BLOCK_M + e.diagonal_left) / BLOCK_N : 0, end = w.block;
  if (DESCENDING) {
    const Range keys = key_range(e, m * BLOCK_M, min((m + 1) * BLOCK_M, e.seqlen_q));
    first = w.block + 1;
    end = (keys.last + BLOCK_N - 1) / BLOCK_N;
  }
#if MASK || SEGMENTS
  const u32* row = live_row(p, e.batch, head, m);
  int turn = 0;
  for (int word = first / 32; word * 32 < end; word++) {
    u32 bits = row[word];
    if (word * 32 < first) bits &= ~0u << first % 32;
    if (word * 32 + 32 > end) bits &= (1u << end % 32) - 1;
    turn += __popc(bits);
  }
  return turn;
#endif
  return end - first;
}

#if WANT_DQ
// dQ of a block of queries += dS K.
DEVICE void add_dq(u32 s_columns, u32 k_columns, float* tile, int warp, int lane) {
  Acc<DQ_MT, DQ_DT> dq;
  dq.zero();
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; k++) {
    FragmentA<DQ_MT> a;
#pragma unroll
    for (int m = 0; m < DQ_MT; m++) ldmatrix_x4_trans(a.r[m], STile::patch(s_columns, ROW_OF(STile, SMEM_DS) + 16 * k, 16 * m));
    mma_step_strided<KTile, 16 * DQ_WARPS_D>(dq, a, k_columns, ROW_OF(KTile, SMEM_K) + 16 * k);
  }
  const int strip = warp % DQ_WARPS_M * DQ_MT;
  float* piece = tile + (strip * (HEAD_DIM / 8) + 2 * (warp / DQ_WARPS_M)) * 128;
#pragma unroll
  for (int m = 0; m < DQ_MT; m++) {
#pragma unroll
    for (int n = 0; n < DQ_DT; n++) {
      float* to = piece + (m * (HEAD_DIM / 8) + n / 2 * 2 * DQ_WARPS_D + n % 2) * 128;
      const float(&x)[4] = dq.x[m][n];
#if __CUDA_ARCH__ >= 900
      red_add4(to + accum_index(lane, 0), x[0], x[1], x[2], x[3]);
#else
#pragma unroll
      for (int i = 0; i < 4; i++) red_add(to + accum_index(lane, i), x[i]);
#endif
    }
  }
}
#endif

// Writes a gradient of the block's keys: to `accum`, float32 sums over some of a group's q heads, where there is one, else rounded
// through `stage`, a tile of shared memory that is free, to `to`.
template <typename T, int N>
DEVICE void store_gradient(Acc<MT, N>& c, float factor, u32 stage, u16* to, i64 stride, float* accum, int rows, int columns,
                           int warp_n, int warp_m, int lane) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c.x[m][n][i] *= factor;
  if (accum) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = warp_n * KEYS + 16 * m + 8 * r + lane / 4;
          const int column = (n / 2 * WARPS_M + warp_m) * 16 + n % 2 * 8 + lane % 4 * 2;
          if (row < rows) *(float2*)(accum + row * T::kCols + column) = make_float2(c.x[m][n][2 * r], c.x[m][n][2 * r + 1]);
        }
    return;
  }
  const u32 base = T::patch(stage + T::lane_down(lane), warp_n * KEYS, 16 * warp_m);
#pragma unroll
  for (int k = 0; k < N / 2; k++) {
    const FragmentA<MT> a = to_a(c, k);
#pragma unroll
    for (int m = 0; m < MT; m++) stmatrix_x4(T::patch(base, 16 * m, 16 * WARPS_M * k), a.r[m]);
  }
  if (WARPS_M > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  constexpr int ROWS = BLOCK_N / (WARPS_N * WARPS_M);
  store_tile_rows<T, ROWS>(to, stride, stage, (warp_n * WARPS_M + warp_m) * ROWS, rows, columns, lane);
}

extern __shared__ __align__(128) u8 shared[];

// The block's share of dK and dV, once no operand in shared memory is needed any more.
DEVICE void store_gradients(const Params& p, Acc<MT, DT>& dk, Acc<MT, DT_V>& dv, int block, int thread) {
  const Work w = load_work(p, block);
  const int lane = thread & 31, warp_n = thread / 32 / WARPS_M, warp_m = thread / 32 % WARPS_M;
  const u32 smem = smem_address(shared);
  const int rows = min(BLOCK_N, rows_kv(p, w.entry) - w.first_key);
  const bool partial = p.aux7 != p.heads_q / p.heads_kv;
  const i64 part = ((VARLEN ? 0 : w.entry.batch) * p.heads_q + w.head) / p.aux7;
  const i64 accum_row = part * p.aux6 + w.entry.start_kv + w.first_key;
#if WANT_DK
  u16* to_dk = (u16*)p.dk + base_kv(w.entry, w.head_kv, p.dk_stride_b, p.dk_stride_h, p.dk_stride_s) +
               w.first_key * p.dk_stride_s;
  store_gradient<KTile>(dk, softmax_scale(p), smem + SMEM_K, to_dk, p.dk_stride_s,
                        partial ? p.dk_accum + accum_row * HEAD_DIM : nullptr, rows, (int)p.head_dim, warp_n, warp_m, lane);
#endif
#if WANT_DV
  u16* to_dv = (u16*)p.dv + base_kv(w.entry, w.head_kv, p.dv_stride_b, p.dv_stride_h, p.dv_stride_s) +
               w.first_key * p.dv_stride_s;
  store_gradient<VTile>(dv, DROPOUT ? (float)p.dropout_scale : 1.f, smem + SMEM_V, to_dv, p.dv_stride_s,
                        partial ? p.dv_accum + accum_row * HEAD_DIM_V : nullptr, rows, (int)p.head_dim_v, warp_n, warp_m,
                        lane);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) bwd(const __grid_constant__ Params p) {
  const u32 smem = smem_address(shared);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int warp_n = warp / WARPS_M, warp_m = warp % WARPS_M;
  const Work w = load_work(p, blockIdx.x);
  if (w.first_key >= rows_kv(p, w.entry)) return;

  // Lanes' parts of ldmatrix addresses; tiles, stages and steps are added to them.
  const u32 down = smem + KTile::lane_down(lane), across = smem + KTile::lane_across(lane);
  const u32 down_v = smem + VTile::lane_down(lane), across_v = smem + VTile::lane_across(lane);
  const u32 down_s = smem + STile::lane_down(lane), across_s = smem + STile::lane_across(lane);
  const u32 k_rows = KTile::patch(down, warp_n * KEYS, 0), v_rows = VTile::patch(down_v, warp_n * KEYS, 0);
  const u32 k_columns = KTile::patch(down, 0, 16 * (warp / DQ_WARPS_M));
  const u32 q_rows = QTile::patch(across, warp_m * QUERIES, 0), do_rows = DoTile::patch(across_v, warp_m * QUERIES, 0);
  const u32 q_columns = QTile::patch(down, 0, 16 * warp_m), do_columns = DoTile::patch(down_v, 0, 16 * warp_m);
  const u32 s_rows = STile::patch(down_s, warp_n * KEYS, 0);
  const u32 s_columns = STile::patch(across_s, 0, warp % DQ_WARPS_M * DQ_MT * 16);

  Acc<MT, DT> dk;
  Acc<MT, DT_V> dv;
  dk.zero();
  dv.zero();

  Queries ahead;  // the block that is copied last
  bool more = w.rows.last > w.rows.first;
  if (more) {
    ahead.start(p, w, w.head);
    more = ahead.live(p, w) || ahead.advance(p, w);
  }
  if (more) {
    load_keys(p, w, smem);
    ahead.load(p, w, smem, 0);
  }
  int stage = 0, head = w.head;
  Scores scores = load_scores(p, w.entry, head);
  scores.flip = false;
#if SCATTERED
  bool clean = false;
#endif
#if DETERMINISTIC
  int* passed = nullptr;  // the turn that is still to be handed on
  int passed_turn = 0;
#endif
  while (more) {
    const int m = ahead.m;
    if (head != ahead.head) {
      head = ahead.head;
      scores = load_scores(p, w.entry, head);
      scores.flip = false;
    }
    cp_async_wait<0>();
    __syncthreads();
#if STAGES == 2
    more = ahead.advance(p, w);
    if (more) ahead.load(p, w, smem, stage ^ 1);
#endif
    const float* lse = (const float*)(shared + SMEM_LSE) + stage * (2 * BLOCK_M);
    const float* delta = lse + BLOCK_M;
#if SCATTERED
    if (!clean) clean_keys<(KTile::kBytes + VTile::kBytes) / 16, THREADS>(smem + SMEM_K);
    clean_queries<QTile, DoTile, THREADS>(smem + SMEM_Q + stage * QTile::kBytes, smem + SMEM_DO + stage * DoTile::kBytes, lse);
    if (!clean) __syncthreads();
    clean = true;
#endif
    const u32 q_stage = stage * QTile::kBytes, do_stage = stage * DoTile::kBytes;
    const int row0 = m * BLOCK_M;
    const Range whole = query_range_of_all(w.entry, opaque(w.first_key), opaque(w.first_key) + BLOCK_N);
    const bool bounded = w.first_key + BLOCK_N > w.entry.seqlen_kv || row0 < whole.first ||
                         row0 + BLOCK_M > min(whole.last, w.rows.last);
#pragma unroll UNROLL_SUB
    for (int sub = 0; sub < QUERIES; sub += SUB_M) {
      Acc<MT, NT> s, dp;
      s.zero();
      dp.zero();
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; k++)
        mma_step_nt<QTile>(s, load_a<KTile, MT>(k_rows, ROW_OF(KTile, SMEM_K), k), q_rows + q_stage + sub * QTile::kRowBytes,
                           ROW_OF(QTile, SMEM_Q), k);
#if NEED_DS
#pragma unroll
      for (int k = 0; k < HEAD_DIM_V / 16; k++)
        mma_step_nt<DoTile>(dp, load_a<VTile, MT>(v_rows, ROW_OF(VTile, SMEM_V), k), do_rows + do_stage + sub * DoTile::kRowBytes,
                            ROW_OF(DoTile, SMEM_DO), k);
#endif
      const int row = warp_m * QUERIES + sub + 2 * (lane & 3);
      const int key = w.first_key + warp_n * KEYS + lane / 4;
      if (bounded) {
        weights<true, true>(s, dp, p, scores, w.rows.last, key, row0 + row, lse + row, delta + row);
      } else {
        weights<false, true>(s, dp, p, scores, w.rows.last, key, row0 + row, lse + row, delta + row);
      }
      const int column = warp_m * QUERIES + sub;
#if SHARE_P
#if WANT_DV
      store_scores(s, STile::patch(s_rows, 0, column), ROW_OF(STile, SMEM_P));
#endif
#endif
#if NEED_DS && (WANT_DQ || SHARE_P)
      store_scores(dp, STile::patch(s_rows, 0, column), ROW_OF(STile, SMEM_DS));
#endif
#if !SHARE_P
#pragma unroll
      for (int k = 0; k < SUB_M / 16; k++) {
#if WANT_DV
        mma_step_strided<DoTile, 16>(dv, to_a(s, k), do_columns + do_stage + sub * DoTile::kRowBytes,
                                     ROW_OF(DoTile, SMEM_DO) + 16 * k);
#endif
      }
#pragma unroll
      for (int k = 0; k < SUB_M / 16; k++) {
#if WANT_DK
        mma_step_strided<QTile, 16>(dk, to_a(dp, k), q_columns + q_stage + sub * QTile::kRowBytes,
                                    ROW_OF(QTile, SMEM_Q) + 16 * k);
#endif
      }
#endif
    }
    __syncthreads();
#if DETERMINISTIC && WANT_DQ
    if (passed && threadIdx.x == 0) store_release(passed, passed_turn + 1);
#endif
#if SHARE_P
#if WANT_DV
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; k++)
      mma_step_strided<DoTile, 16 * WARPS_M>(dv, load_a<STile, MT>(s_rows, ROW_OF(STile, SMEM_P), k), do_columns + do_stage,
                                             ROW_OF(DoTile, SMEM_DO) + 16 * k);
#endif
#if WANT_DK
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; k++)
      mma_step_strided<QTile, 16 * WARPS_M>(dk, load_a<STile, MT>(s_rows, ROW_OF(STile, SMEM_DS), k), q_columns + q_stage,
                                            ROW_OF(QTile, SMEM_Q) + 16 * k);
#endif
#endif
#if STAGES == 1
    if (SHARE_P) __syncthreads();
    more = ahead.advance(p, w);
    if (more) ahead.load(p, w, smem, 0);
#endif
#if WANT_DQ
#if DETERMINISTIC
    passed = p.semaphore + dq_block(p, w.entry, head, m);
    passed_turn = turn_of(p, w, head, m);
    if (threadIdx.x == 0) {
      while (load_acquire(passed) != passed_turn) __nanosleep(20);
    }
    __syncthreads();
#endif
    add_dq(s_columns, k_columns, dq_tile(p, w.entry, head, m), warp, lane);
#endif
    if (STAGES == 2) stage ^= 1;
  }
  cp_async_wait<0>();
  __syncthreads();
#if DETERMINISTIC && WANT_DQ
  if (passed && threadIdx.x == 0) store_release(passed, passed_turn + 1);
#endif

  store_gradients(p, dk, dv, opaque(blockIdx.x), opaque(threadIdx.x));
}
