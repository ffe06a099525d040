// FlashAttention-2 forward on mma.sync (fp16, bf16; sm_75 and newer). One CTA takes one block of query rows of one head and
// walks over the key blocks that some row sees, from the last to the first; each warp owns whole 16-row strips, so the
// softmax needs no other warp. Scores are never written. No host code, no inline assembly.
//
// Defines: HEAD_DIM, HEAD_DIM_V (multiples of 32), BLOCK_M, BLOCK_N, NUM_WARPS, STAGES (1: K and V in one buffer each, each
// loaded while the other is worked on; 2: both doubled, one barrier a step), Q_IN_REGISTERS, MIN_BLOCKS (CTAs an SM),
// WHOLE_D (the head dims are the compile-time ones), TIE_SUMS (k steps from one tie() to the next; 0: none), and the
// features of config.cuh.
// Params: aux0-2 bitmap strides (mask.cuh), aux3 heads in an L2 section (schedule.cuh).
#include "schedule.cuh"
#include "softmax.cuh"

namespace {

constexpr int THREADS = 32 * NUM_WARPS;
constexpr int WARP_ROWS = BLOCK_M / NUM_WARPS;
constexpr int M = WARP_ROWS / 16, N = BLOCK_N / 8, ND = HEAD_DIM_V / 8;
constexpr int K_STEPS = HEAD_DIM / 16;

static_assert(WARP_ROWS % 16 == 0 && BLOCK_N % (DROPOUT ? 32 : 16) == 0, "strips of 16 rows, k steps, Philox calls");
static_assert(STAGES == 1 || STAGES == 2, "one or two buffers");

typedef Tile<BLOCK_M, HEAD_DIM> TileQ;
typedef Tile<BLOCK_N, HEAD_DIM> TileK;
typedef Tile<BLOCK_N, HEAD_DIM_V> TileV;
typedef Tile<BLOCK_M, HEAD_DIM_V> TileO;

constexpr int Q_BYTES = TileQ::kBytes > TileO::kBytes ? TileQ::kBytes : TileO::kBytes;  // O leaves through Q's place

// What a CTA knows of its work; the accumulators live beside it.
struct Work {
  const Params& p;
  Scores scores;
  const u32* live;
  Range keys;            // seen by some row of the block
  int clean_first, clean_last;  // key blocks seen whole by all rows
  int m0;                // first query row
  const u16* k;
  const u16* v;
  u32 q_shared, k_shared, v_shared;
  u32 q_lane, k_lane, v_lane;  // the lane's part of ldmatrix addresses
  int warp_row, lane;

  // The next key block at or below n with something to see; -1 when there is none.
  DEVICE int visit(int n) const {
    const int lowest = keys.first / BLOCK_N;
#if MASK || SEGMENTS
    while (n >= lowest && !live_tile(live, n)) n--;
#endif
    return n >= lowest ? n : -1;
  }

  template <bool BOUNDED>
  DEVICE void load_k(int n, int stage) const {
    load_tile<TileK, THREADS, BOUNDED, WHOLE_D>(k_shared + stage * TileK::kBytes, k + (i64)n * BLOCK_N * p.k_stride_s,
                                       p.k_stride_s, keys.first - n * BLOCK_N, keys.last - n * BLOCK_N,
                                       (int)p.head_dim, rematerialize(threadIdx.x));
  }

  // NOTE: bounded by what the block sees: a value that nothing sees must not meet its zero weights.
  template <bool BOUNDED>
  DEVICE void load_v(int n, int stage) const {
    load_tile<TileV, THREADS, BOUNDED, WHOLE_D>(v_shared + stage * TileV::kBytes, v + (i64)n * BLOCK_N * p.v_stride_s,
                                       p.v_stride_s, keys.first - n * BLOCK_N, keys.last - n * BLOCK_N,
                                       (int)p.head_dim_v, rematerialize(threadIdx.x));
  }
};

struct State {
  Acc<M, ND> out;
  Softmax<M> softmax;
#if Q_IN_REGISTERS
  FragmentA<M> q[K_STEPS];
#endif
};

DEVICE Acc<M, N> scores_of(const Work& w, const State& state, int stage) {
  Acc<M, N> s;
  s.zero();
  const u32 q_lane = rematerialize(w.q_lane);
  const u32 k_lane = rematerialize(w.k_lane) + stage * TileK::kBytes;
#pragma unroll
  for (int k = 0; k < K_STEPS; k++) {
#if Q_IN_REGISTERS
    mma_step_nt<TileK>(s, state.q[k], k_lane, 0, k);
#else
    mma_step_nt<TileK>(s, load_a<TileQ, M>(q_lane, 0, k), k_lane, 0, k);
#endif
  }
  return s;
}

// Makes the weights depend on the sums, which are never negative. NOTE: otherwise ptxas sinks the additions below the
// products, keeps every float32 weight alive for them, and spills.
DEVICE void tie(FragmentA<M>& a, const Softmax<M>& softmax) {
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) a.r[m][r] = softmax.sum[m][r] < 0.f ? 0u : a.r[m][r];
}

// Softmax of one tile's scores, then out += weights . V.
template <bool BOUNDED>
DEVICE void absorb(const Work& w, State& state, Acc<M, N>& s, int n, int stage) {
  const int row = w.m0 + w.warp_row + w.lane / 4;
  apply_scores<BOUNDED>(s, w.p, w.scores, row, n * BLOCK_N + 2 * (w.lane & 3));
#if SCATTERED
  SeenKeys<M, N> seen;
  seen.find(s);
#endif
  const float c = w.scores.unit * (float)LOG2E;
  state.softmax.raise(s, state.out, c);
  const u32 v_lane = rematerialize(w.v_lane) + stage * TileV::kBytes;
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; k++) {
#if DROPOUT
    if (k % 2 == 0) {
      state.softmax.weigh(s, c, 2 * k, 2 * k + 4);
      apply_dropout(s, w.p, w.scores, row, n * BLOCK_N + 16 * k, 2 * k, w.lane);
    }
#else
    state.softmax.weigh(s, c, 2 * k, 2 * k + 2);
#endif
    FragmentA<M> a = to_a(s, k);
    if (TIE_SUMS && (k + 1) % max(TIE_SUMS, 1) == 0) tie(a, state.softmax);
#if SCATTERED
    mma_step_nn<TileV, M, ND, true>(state.out, a, v_lane, k, 0, seen.keep[k][0], seen.keep[k][1]);
#else
    mma_step_nn<TileV>(state.out, a, v_lane, k, 0);
#endif
  }
}

// One key block; returns the next. BOUNDED: the block crosses a diagonal or an end.
template <bool BOUNDED>
DEVICE int step(const Work& w, State& state, int n, int& stage) {
  const int next = w.visit(n - 1);
  cp_async_wait<0>();
  __syncthreads();
#if STAGES == 1
  w.load_v<BOUNDED>(n, 0);
  cp_async_commit();
  Acc<M, N> s = scores_of(w, state, 0);
  cp_async_wait<0>();
  __syncthreads();
  if (next >= 0) w.load_k<BOUNDED || HAS_LEFT>(next, 0);
  cp_async_commit();
  absorb<BOUNDED>(w, state, s, n, 0);
#else
  if (next >= 0) {
    w.load_k<BOUNDED || HAS_LEFT>(next, stage ^ 1);
    w.load_v<BOUNDED || HAS_LEFT>(next, stage ^ 1);
  }
  cp_async_commit();
  Acc<M, N> s = scores_of(w, state, stage);
  absorb<BOUNDED>(w, state, s, n, stage);
  stage ^= 1;
#endif
  return next;
}

DEVICE Block block_of(const Params& p, u32 cta) {
  const int blocks = ((int)p.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  return find_block(cta, blocks, (int)p.heads_q, (int)p.batch, (int)p.aux3, HAS_RIGHT);
}

// NOTE: all it needs is worked out anew rather than kept in registers through the loop.
// The rows' sums end, and out and LSE are written; rows past the entry's end (dense arrays) get 0 and -infinity.
DEVICE void finish(const Params& p, State& state) {
  const Block block = block_of(p, rematerialize(blockIdx.x));
  const Entry e = load_entry(p, block.batch);
  const float unit = load_scores(p, e, block.head).unit;
  const int m0 = block.index * BLOCK_M, head = block.head;
  const int lane = rematerialize(threadIdx.x) % 32, warp_row = rematerialize(threadIdx.x) / 32 * WARP_ROWS;
  extern __shared__ __align__(1024) u8 shared[];
  const u32 out_shared = smem_address(shared);
  const int rows = (VARLEN ? e.seqlen_q : (int)p.seqlen_q) - m0;  // of the block, that exist
  state.softmax.finish();
#if SINKS
  const float sink_value = ((const float*)p.sinks)[head];
  const float* sink = &sink_value;
#else
  const float* sink = nullptr;
#endif
  float* lse = (float*)p.lse + (VARLEN ? e.start_q : e.batch * p.lse_stride_b) + head * p.lse_stride_h + m0;
  __syncthreads();  // Q's place is free
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp_row + 16 * m + 8 * r + lane / 4;
      const bool inside = m0 + row < e.seqlen_q;
      float factor;
      const float top = inside ? state.softmax.max[m][r] * unit : -infinity();
      const float row_lse = finish_row(top, state.softmax.sum[m][r], sink, factor);
      if (DROPOUT) factor *= (float)p.dropout_scale;
      if (p.lse && (lane & 3) == 0 && row < rows) lse[row] = row_lse;
#pragma unroll
      for (int n = 0; n < ND; n++) {
        // a select: a row that saw nothing may have met another row's NaN
        const float x = top == -infinity() ? 0.f : state.out.x[m][n][2 * r] * factor;
        const float y = top == -infinity() ? 0.f : state.out.x[m][n][2 * r + 1] * factor;
        store_shared4(out_shared + TileO::offset(row, n) + 4 * (lane & 3), pack(x, y));
      }
    }
  }
  __syncwarp();
  u16* out = (u16*)p.out + (VARLEN ? 0 : e.batch * p.out_stride_b) + head * p.out_stride_h +
             (e.start_q + m0) * p.out_stride_s;
  store_tile_rows<TileO, WARP_ROWS>(out, p.out_stride_s, out_shared, warp_row, rows, (int)p.head_dim_v, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) fwd(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const Block block = block_of(p, blockIdx.x);
  const Entry e = load_entry(p, block.batch);
  const int m0 = block.index * BLOCK_M;
  if (VARLEN && m0 >= e.seqlen_q) return;
  const int head_kv = block.head / (int)(p.heads_q / p.heads_kv);
  const Range rows = {m0, min(m0 + BLOCK_M, e.seqlen_q)};
  const Range clean = key_range_of_all(e, rows.first, rows.last);
  const i64 batch = VARLEN ? 0 : block.batch;

  Work w = {p};
  w.scores = load_scores(p, e, block.head);
  w.keys = key_range(e, rows.first, rows.last);
  w.clean_first = (clean.first + BLOCK_N - 1) / BLOCK_N;
  w.clean_last = max(clean.last, 0) / BLOCK_N;  // negative when first rows see nothing
  w.m0 = m0;
  w.k = (const u16*)p.k + batch * p.k_stride_b + head_kv * p.k_stride_h + e.start_kv * p.k_stride_s;
  w.v = (const u16*)p.v + batch * p.v_stride_b + head_kv * p.v_stride_h + e.start_kv * p.v_stride_s;
  w.q_shared = smem_address(shared);
  w.k_shared = w.q_shared + Q_BYTES;
  w.v_shared = w.k_shared + STAGES * TileK::kBytes;
  w.warp_row = (threadIdx.x / 32) * WARP_ROWS;
  w.lane = threadIdx.x % 32;
  w.q_lane = w.q_shared + TileQ::lane_down(w.lane) + w.warp_row * TileQ::kRowBytes;
  w.k_lane = w.k_shared + TileK::lane_across(w.lane);
  w.v_lane = w.v_shared + TileV::lane_down(w.lane);
#if MASK || SEGMENTS
  w.live = live_row(p, block.batch, block.head, block.index);
#endif

  State state;
  state.out.zero();
  state.softmax.start();
  int n = w.keys.last > w.keys.first ? w.visit((w.keys.last - 1) / BLOCK_N) : -1;
  int stage = 0;
  if (n >= 0) {
    const u16* q = (const u16*)p.q + batch * p.q_stride_b + block.head * p.q_stride_h + (e.start_q + m0) * p.q_stride_s;
    load_tile<TileQ, THREADS, true, WHOLE_D>(w.q_shared, q, p.q_stride_s, 0, rows.last - m0,
                                    (int)p.head_dim, rematerialize(threadIdx.x));
    w.load_k<true>(n, 0);
    if (STAGES == 2) w.load_v<true>(n, 0);
    cp_async_commit();
#if Q_IN_REGISTERS
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) state.q[k] = load_a<TileQ, M>(w.q_lane, 0, k);
#endif
  }
  while (n >= w.clean_last) n = step<true>(w, state, n, stage);                           // right diagonal, end
  while (n >= max(w.clean_first, 0)) n = step<false>(w, state, n, stage);
  if (HAS_LEFT) while (n >= 0) n = step<true>(w, state, n, stage);
  finish(p, state);
}
