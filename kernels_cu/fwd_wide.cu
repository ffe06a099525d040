// FlashAttention-2 forward of float32 and float64 (sm_75 and newer), on whatever wide.cuh multiplies with. One CTA takes one
// block of query rows of one head and walks over the key blocks that some row sees, from the last to the first; each warp
// owns 16 whole rows, so the softmax needs no other warp. Scores are never written. No host code, no inline assembly.
//
// Defines: WIDE (wide.cuh), HEAD_DIM, HEAD_DIM_V (multiples of 128 bytes), BLOCK_M = 16 * NUM_WARPS, BLOCK_N, STAGES (1: K
// and V in one buffer each, each loaded while the other is worked on; 2: both doubled, one barrier a step), MIN_BLOCKS (CTAs
// an SM), PARTS (CTAs that share a block's columns of V, HEAD_DIM_V each), and the features of config.cuh.
// Params: aux0-2 bitmap strides (mask.cuh), aux3 heads in an L2 section (schedule.cuh).
#include "schedule.cuh"
#include "weights.cuh"

namespace {

constexpr int THREADS = 32 * NUM_WARPS;
constexpr int N = BLOCK_N / 8, ND = HEAD_DIM_V / 8;
constexpr int GROUP = N < 4 ? N : 4;  // score columns in flight, in eights

static_assert(BLOCK_M == 16 * NUM_WARPS, "a warp owns 16 rows");
static_assert(BLOCK_N % 16 == 0 && N % GROUP == 0 && BLOCK_N <= 128, "whole steps of 16 keys");
static_assert(STAGES == 1 || STAGES == 2, "one or two buffers");

typedef WideTile<BLOCK_M, HEAD_DIM> TileQ;
typedef WideTile<BLOCK_N, HEAD_DIM> TileK;
typedef WideTile<BLOCK_N, HEAD_DIM_V> TileV;

// Shared memory, in bytes from its start: tiles, then the scales of their rows.
constexpr int K_AT = TileQ::kBytes, V_AT = K_AT + STAGES * TileK::kBytes;

// What a CTA knows of its work; the accumulators live beside it.
struct Work {
  const Params& p;
  Scores scores;
  const u32* live;
  Range keys;                   // seen by some row of the block
  int clean_first, clean_last;  // key blocks seen whole by all rows
  int columns_v;                // of V that are this CTA's
  const Element* k;
  const Element* v;
  u8* memory;
  u32 q_shared, k_shared, v_shared;
  u32 q_lane, k_lane, v_lane;   // where this lane reads (wide.cuh), its warp's rows of Q included
  int row;                      // the thread's first; the other is 8 below
  int lane;

  // The next key block at or below n with something to see; -1 when there is none.
  DEVICE int visit(int n) const {
    const int lowest = keys.first / BLOCK_N;
#if MASK || SEGMENTS
    while (n >= lowest && !live_tile(live, n)) n--;
#endif
    return n >= lowest ? n : -1;
  }

#if SCALED
  DEVICE float* q_scales() const { return (float*)(memory + V_AT + STAGES * TileV::kBytes); }
  DEVICE float* k_scales(int stage) const { return q_scales() + BLOCK_M + stage * BLOCK_N; }
  DEVICE float* v_scales(int stage) const { return q_scales() + BLOCK_M + (STAGES + stage) * BLOCK_N; }
#endif
  DEVICE void split_q() const {
#if SCALED
    split_tile<TileQ, THREADS>(q_shared, q_scales(), threadIdx.x);
#endif
  }
  DEVICE void split_k(int stage) const {
#if SCALED
    split_tile<TileK, THREADS>(k_shared + stage * TileK::kBytes, k_scales(stage), threadIdx.x);
#endif
  }
  DEVICE void split_v(int stage) const {
#if SCALED
    split_tile<TileV, THREADS>(v_shared + stage * TileV::kBytes, v_scales(stage), threadIdx.x);
#endif
  }

  // NOTE: both are bounded by what the block sees: a value that nothing sees must not meet its zero weights.
  DEVICE void load_k(int n, int stage) const {
    load_wide<TileK, THREADS>(k_shared + stage * TileK::kBytes, k + (i64)n * BLOCK_N * p.k_stride_s, p.k_stride_s,
                              keys.first - n * BLOCK_N, keys.last - n * BLOCK_N, (int)p.head_dim,
                              rematerialize(threadIdx.x));
  }
  DEVICE void load_v(int n, int stage) const {
    load_wide<TileV, THREADS>(v_shared + stage * TileV::kBytes, v + (i64)n * BLOCK_N * p.v_stride_s, p.v_stride_s,
                              keys.first - n * BLOCK_N, keys.last - n * BLOCK_N, columns_v, rematerialize(threadIdx.x));
  }
};

struct State {
  Accum out[ND][4];
  Accum top[2];  // running maxima, as exponents (weights.cuh)
  Accum sum[2];  // the lane's own share until finish()
};

DEVICE void scores_of(Accum (&s)[N][4], const Work& w, int stage) {
  zero(s);
#pragma unroll 2
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    const OperandA a = load_a<TileQ>(w.q_lane, 0, step);
#pragma unroll
    for (int n = 0; n < N; n += GROUP) {
      OperandB b[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP; i++) b[i] = load_b<TileK>(w.k_lane + stage * TileK::kBytes, 8 * (n + i), step);
      add_product(part<GROUP>(s, n), a, b, RowFactor());
    }
  }
#if SCALED
  unscale(s, w.q_scales() + (threadIdx.x / 32) * 16 + w.lane / 4, w.k_scales(stage), w.lane);
#endif
}

// Turns raw products into stored scores. BOUNDED: the tile crosses a diagonal or an end, so positions are tested.
template <bool BOUNDED>
DEVICE void apply_scores(Accum (&s)[N][4], const Work& w, int column) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = w.row + 8 * r;
    const Range keys = key_range_of_row(w.scores.entry, row);
    const int first = keys.first - column, last = keys.last - column;  // against constants below
    const bool inside = row < w.scores.entry.seqlen_q;                 // rows past the end must not be read
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int offset = 8 * n + j;
        Accum& x = s[n][2 * r + j];
        const bool seen = !BOUNDED || (offset < last && (!HAS_LEFT || offset >= first));
        if (TRANSFORM || MASK || SEGMENTS) {
          x = seen && inside ? stored_score(w.p, w.scores, x, row, column + offset) : -(Accum)infinity();
        } else {
          if (ANY_SCALE && w.scores.flip) x = -x;
          if (!seen) x = -(Accum)infinity();
        }
      }
    }
  }
}

// Stored scores -> weights; `rescale` brings what was summed before to the new maximum.
DEVICE void weigh(Accum (&s)[N][4], State& state, Accum (&rescale)[2], Accum factor) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Accum top = -(Accum)infinity();
#pragma unroll
    for (int n = 0; n < N; n++) top = max(top, max(s[n][2 * r], s[n][2 * r + 1]));
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    top = max(state.top[r], exponent(top, factor));
    const Accum subtrahend = top == -(Accum)infinity() ? 0 : top;  // nothing seen yet: weights 2^-infinity
    rescale[r] = exp_difference(state.top[r], subtrahend);
    state.top[r] = top;
    state.sum[r] *= rescale[r];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        Accum& x = s[n][2 * r + j];
        x = weight(x, subtrahend, factor);
        state.sum[r] += x;
      }
    }
  }
}

#if DROPOUT
// Zeroes the dropped weights; `column` is the tile's first.
DEVICE void apply_dropout(Accum (&s)[N][4], const Work& w, int column) {
  const u32 threshold = (u32)w.p.dropout_threshold;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Philox4 words;
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int at = column + 8 * n + 2 * (w.lane & 3);
      if (n % 4 == 0)  // one call serves the thread's eight of 32 columns
        words = dropout_words(w.scores.dropout, w.row + 8 * r, at);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (dropout_draw(words, (BLOCK_N % 32 ? at : 8 * n) + j) >= threshold) s[n][2 * r + j] = 0;
    }
  }
}
#endif

#if SCALED
// Gives the weights the scales of V's rows, relative to the largest, which a weight is at most.
DEVICE RowFactor scale_weights(Accum (&s)[N][4], const Work& w, int stage) {
  const float* scales = w.v_scales(stage);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < BLOCK_N; i += 32) largest = max(largest, scales[(i + w.lane) % BLOCK_N]);
  const float up = scale_up(__float_as_uint(warp_max(largest)) >> 23) * 0.5f;
  scale_columns(s, scales, up, w.lane);
  RowFactor factor;
  factor.back[0] = factor.back[1] = power_inverse(up);
  return factor;
}
#endif

// Softmax of one tile's scores, then out += weights . V.
template <bool BOUNDED>
DEVICE void absorb(const Work& w, State& state, Accum (&s)[N][4], int n, int stage) {
  apply_scores<BOUNDED>(s, w, n * BLOCK_N + 2 * (w.lane & 3));
#if SCATTERED
  const u32 seen = occupied(s, Visible());
#endif
  Accum rescale[2];
  weigh(s, state, rescale, w.scores.unit * (Accum)LOG2E);
#if DROPOUT
  apply_dropout(s, w, n * BLOCK_N);
#endif
  if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
    for (int d = 0; d < ND; d++) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.out[d][i] *= rescale[i / 2];
    }
  }
#if SCALED
  const RowFactor factor = scale_weights(s, w, stage);
#else
  const RowFactor factor;
#endif
#pragma unroll
  for (int k = 0; k < BLOCK_N / 16; k++) {
    const OperandA a = from_accumulator(s[2 * k], s[2 * k + 1], factor);
#if SCATTERED
    const Live live = live_rows(seen, k);
#else
    const Live live;
#endif
#pragma unroll
    for (int d = 0; d < ND; d += kTiles) {
      OperandB b[kTiles];
      load_b_rows<TileV, true>(b, w.v_lane + stage * TileV::kBytes, 16 * k, d / kTiles, live);
      add_product(part<kTiles>(state.out, d), a, b, factor);
      tie(d + kTiles, state.out[d][3]);
    }
  }
}

// One key block; returns the next. BOUNDED: the block crosses a diagonal or an end.
template <bool BOUNDED>
DEVICE int step(const Work& w, State& state, int n, int& stage) {
  const int next = w.visit(n - 1);
  Accum s[N][4];
  cp_async_wait<0>();
  w.split_k(stage);
#if STAGES == 1
  __syncthreads();
  w.load_v(n, 0);
  cp_async_commit();
  scores_of(s, w, 0);
  cp_async_wait<0>();
  w.split_v(0);
  __syncthreads();
  if (next >= 0) w.load_k(next, 0);
  cp_async_commit();
  absorb<BOUNDED>(w, state, s, n, 0);
#else
  w.split_v(stage);
  __syncthreads();
  if (next >= 0) {
    w.load_k(next, stage ^ 1);
    w.load_v(next, stage ^ 1);
  }
  cp_async_commit();
  scores_of(s, w, stage);
  absorb<BOUNDED>(w, state, s, n, stage);
  stage ^= 1;
#endif
  return next;
}

// The rows' sums end, and out and LSE are written; rows past the entry's end (dense arrays) get 0 and -infinity.
DEVICE void finish(const Work& w, State& state, int head, int column) {
  const Params& p = w.p;
  const Entry& e = w.scores.entry;
  const int rows = VARLEN ? e.seqlen_q : (int)p.seqlen_q;
  const i64 batch = VARLEN ? 0 : e.batch;
  Accum* lse = (Accum*)p.lse + batch * p.lse_stride_b + head * p.lse_stride_h + e.start_q;
  Element* out = (Element*)p.out + batch * p.out_stride_b + head * p.out_stride_h + e.start_q * p.out_stride_s + column;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = w.row + 8 * r;
    Accum sum = state.sum[r], factor;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const bool live = row < e.seqlen_q && state.top[r] != -(Accum)infinity();
    const Accum row_lse = finish_row(state.top[r], sum, SINKS ? (const Accum*)p.sinks + head : nullptr, factor);
    if (DROPOUT) factor *= (Accum)p.dropout_scale;
    if (row >= rows) continue;
    if (p.lse && column == 0 && (w.lane & 3) == 0) lse[row] = live ? row_lse : -(Accum)infinity();
#pragma unroll
    for (int d = 0; d < ND; d += kTiles) {
      // NOTE: factor 0 makes zeros of what a row that saw nothing met: another row's NaN, perhaps
      store_row<false>(out + row * p.out_stride_s, part<kTiles>(state.out, d), r, live ? factor : (Accum)0, d / kTiles,
                w.columns_v, (int)p.head_dim_v, w.lane);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) fwd_wide(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int blocks = ((int)p.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const Block found = find_block(blockIdx.x, blocks * PARTS, (int)p.heads_q, (int)p.batch, (int)p.aux3, HAS_RIGHT);
  const int index = found.index / PARTS, column = found.index % PARTS * HEAD_DIM_V, head = found.head;
  const Entry e = load_entry(p, found.batch);
  const int m0 = index * BLOCK_M;
  if (VARLEN && m0 >= e.seqlen_q) return;
  const int head_kv = head / (int)(p.heads_q / p.heads_kv);
  const Range rows = {m0, min(m0 + BLOCK_M, e.seqlen_q)};
  const Range clean = key_range_of_all(e, rows.first, rows.last);
  const i64 batch = VARLEN ? 0 : found.batch;

  Work w = {p};
  w.scores = load_scores(p, e, head);
  w.keys = key_range(e, rows.first, rows.last);
  w.clean_first = (clean.first + BLOCK_N - 1) / BLOCK_N;
  w.clean_last = max(clean.last, 0) / BLOCK_N;
  w.columns_v = (int)p.head_dim_v - column;
  w.k = (const Element*)p.k + batch * p.k_stride_b + head_kv * p.k_stride_h + e.start_kv * p.k_stride_s;
  w.v = (const Element*)p.v + batch * p.v_stride_b + head_kv * p.v_stride_h + e.start_kv * p.v_stride_s + column;
  w.memory = shared;
  w.q_shared = smem_address(shared);
  w.k_shared = w.q_shared + K_AT;
  w.v_shared = w.q_shared + V_AT;
  w.lane = threadIdx.x % 32;
  w.q_lane = w.q_shared + TileQ::lane_a(w.lane) + (threadIdx.x / 32) * 16 * TileQ::kRowBytes;
  w.k_lane = w.k_shared + TileK::lane_b(w.lane);
  w.v_lane = w.v_shared + TileV::lane_b_rows(w.lane);
  w.row = m0 + (threadIdx.x / 32) * 16 + w.lane / 4;
#if MASK || SEGMENTS
  w.live = live_row(p, found.batch, head, index);
#endif

  State state;
  zero(state.out);
  state.top[0] = state.top[1] = -(Accum)infinity();
  state.sum[0] = state.sum[1] = 0;
  int n = w.keys.last > w.keys.first ? w.visit((w.keys.last - 1) / BLOCK_N) : -1;
  int stage = 0;
  if (n >= 0) {
    const Element* q =
        (const Element*)p.q + batch * p.q_stride_b + head * p.q_stride_h + (e.start_q + m0) * p.q_stride_s;
    load_wide<TileQ, THREADS>(w.q_shared, q, p.q_stride_s, 0, rows.last - m0, (int)p.head_dim, threadIdx.x);
    w.load_k(n, 0);
    if (STAGES == 2) w.load_v(n, 0);
    cp_async_commit();
    cp_async_wait<0>();
    w.split_q();
  }
  while (n >= w.clean_last) n = step<true>(w, state, n, stage);  // right diagonal, end
  while (n >= max(w.clean_first, 0)) n = step<false>(w, state, n, stage);
  if (HAS_LEFT) while (n >= 0) n = step<true>(w, state, n, stage);
  finish(w, state, head, column);
}
