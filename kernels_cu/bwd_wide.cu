// Backward of float32 and float64 (sm_75 and newer), on whatever wide.cuh multiplies with. One CTA keeps one block of keys and
// values and walks over the query blocks that see some of it. Scores are transposed, so weights and score gradients are the
// first operands of dV += PT dO and dK += dST Q as they stand. Only dST passes through shared memory, for dQ += dS K, which is
// added to global memory. No host code, no inline assembly.
//
// Defines: those of bwd_wide.cuh, WIDE (wide.cuh), MIN_BLOCKS (CTAs an SM), PARTS (CTAs that share the columns of a block's
// dQ, dK and dV), WANT_DQ, WANT_DK, WANT_DV, DETERMINISTIC (key blocks add to dQ in order), SPLIT_GROUP (each q head has its
// own CTAs, which add to dK and dV; DETERMINISTIC: in order), and the features of config.cuh. What is added to, dq and with
// SPLIT_GROUP dk and dv, starts as zeros, and so does the semaphore.
// Params: aux0-2 bitmap strides (mask.cuh), aux3 heads in an L2 section (schedule.cuh), aux4 the first of the semaphore's
// words that count a key block's q heads.
#include "bwd_wide.cuh"
#include "schedule.cuh"

// A group's q heads add to dK and dV in order.
#define HEADS_WAIT (DETERMINISTIC && SPLIT_GROUP && (WANT_DK || WANT_DV))

namespace {

constexpr int ND = HEAD_DIM / PARTS / 8, NDV = HEAD_DIM_V / PARTS / 8;  // this CTA's columns, in eights

static_assert(ND % kTiles == 0 && NDV % kTiles == 0, "parts are whole groups of columns");
static_assert(STAGES == 1 || STAGES == 2, "one or two buffers");

struct Visit {
  int head, m;  // query head and block
};

struct Work : Tiles {
  int n;     // the key block
  int part;  // of the columns
  int head_last;
  u32 k_down_lane;  // where this lane reads K for dQ (wide.cuh)

  DEVICE bool live(int head, int m) const {
#if MASK || SEGMENTS
    return live_tile(live_row(p, scores.entry.batch, head, m), n);
#else
    return true;
#endif
  }

  // The first visit from v on, head after head; head_last when there is none.
  DEVICE Visit seek(Visit v) const {
    const int last = (rows.last + BLOCK_M - 1) / BLOCK_M;
    while (v.head < head_last && (v.m >= last || !live(v.head, v.m))) {
      if (++v.m >= last) v = {v.head + 1, rows.first / BLOCK_M};
    }
    return v;
  }
};

struct State {
#if WANT_DK
  Accum dk[ND][4];
#endif
#if WANT_DV
  Accum dv[NDV][4];
#endif
};

// out += XT B over the query block's rows, with XT in registers.
template <typename TB, int COLUMNS>
DEVICE void accumulate(Accum (&out)[COLUMNS][4], const Accum (&x)[N][4], u32 b_lane, int part_of, u32 seen,
                       const RowFactor& factor) {
#pragma unroll
  for (int k = 0; k < BLOCK_M / 16; k++) {
    const OperandA a = from_accumulator(x[2 * k], x[2 * k + 1], factor);
#if SCATTERED
    const Live live = live_rows(seen, k);
#else
    const Live live;
#endif
#pragma unroll
    for (int d = 0; d < COLUMNS; d += kTiles) {
      OperandB b[kTiles];
      load_b_rows<TB, true>(b, b_lane, 16 * k, (PARTS > 1 ? part_of * COLUMNS : 0) / kTiles + d / kTiles, live);
      add_product(part<kTiles>(out, d), a, b, factor);
      tie(d + kTiles, out[d][3]);
    }
  }
}

#if WANT_DQ
#if SCALED
typedef WideTile<BLOCK_N, BLOCK_M> TileS;  // dST in halves
constexpr int DS_SCALES_AT = DS_AT + TileS::kBytes;

// dST times the scales of K's rows over those of dO's, in halves; each warp's strip has one scale.
DEVICE void store_ds(const Work& w, const Accum (&ds)[N][4], int stage) {
  const int row = (threadIdx.x / 32) * 16 + w.lane / 4;
  float x[N][4], largest = 0;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float2 scale = *(const float2*)(w.dout_scales(stage) + 8 * n + 2 * (w.lane % 4));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[n][i] = ds[n][i] * power_inverse(i % 2 ? scale.y : scale.x) * w.k_scales()[row + 8 * (i / 2)];
      largest = max(largest, fabsf(x[n][i]));
    }
  }
  const u32 field = exponent_field(warp_max(largest));
  const float up = scale_up(field);
  const u32 to = w.shared + DS_AT + 4 * (w.lane % 4);
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 big, small;
      halve(x[n][2 * r] * up, x[n][2 * r + 1] * up, big, small);
      store_shared4(to + TileS::offset(row + 8 * r, 2 * n), big);
      store_shared4(to + TileS::offset(row + 8 * r, 2 * n + 1), small);
    }
  }
  if (w.lane == 0) ((float*)(w.memory + DS_SCALES_AT))[threadIdx.x / 32] = scale_back(field);
}
#else
constexpr int DS_PITCH = BLOCK_M + 8;

DEVICE void store_ds(const Work& w, const Accum (&ds)[N][4], int) {
  Accum* to = (Accum*)(w.memory + DS_AT) + ((threadIdx.x / 32) * 16 + w.lane / 4) * DS_PITCH + 2 * (w.lane % 4);
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      to[8 * r * DS_PITCH + 8 * n] = ds[n][2 * r];
      to[8 * r * DS_PITCH + 8 * n + 1] = ds[n][2 * r + 1];
    }
  }
}
#endif

// A: dS of query rows 16 * strip .. and keys 16 * k ..
DEVICE OperandA load_ds(const Work& w, int strip, int k) {
#if SCALED
  return load_a_rows<TileS>(w.shared + DS_AT + TileS::lane_a_rows(w.lane), 16 * k, strip);
#else
  const Accum* ds = (const Accum*)(w.memory + DS_AT) + w.lane % 4 * DS_PITCH + 16 * strip + w.lane / 4;
  Element x[2][4];
#pragma unroll
  for (int s = 0; s < 2; s++) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[s][i] = ds[(16 * k + 8 * s + 4 * (i / 2)) * DS_PITCH + 8 * (i % 2)];
  }
  OperandA a;
  a.set(x);
  return a;
#endif
}

#if DETERMINISTIC
// Where key block n of a row of tiles waits for the one before it that adds to the same rows of dQ.
DEVICE int* turn(const Work& w, Visit v) {
  const int blocks = ((int)w.p.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  const i64 head = (i64)w.scores.entry.batch * w.p.heads_q + v.head;
  return w.p.semaphore + (head * blocks + v.m) * PARTS + w.part;
}

DEVICE void await_turn(const Work& w, Visit v) {
  if (threadIdx.x == 0) {
    for (int before = w.n - 1; before >= 0; before--) {
      const Range rows = query_range(w.scores.entry, before * BLOCK_N, (before + 1) * BLOCK_N);
      const bool visited = rows.last > rows.first && v.m * BLOCK_M < rows.last && (v.m + 1) * BLOCK_M > rows.first;
      if (!visited) break;  // nor did the ones before it
#if MASK || SEGMENTS
      if (!live_tile(live_row(w.p, w.scores.entry.batch, v.head, v.m), before)) continue;
#endif
      while (load_acquire(turn(w, v)) != before + 1) __nanosleep(20);
      break;
    }
  }
  __syncthreads();
}
#endif

// dQ of the query block += dS K, in units of 16 rows and 8 * kTiles columns.
DEVICE void add_dq(const Work& w, Visit v, int stage) {
  constexpr int STRIPS = BLOCK_M / 16, GROUPS = ND / kTiles;
  const Params& p = w.p;
  const Entry& e = w.scores.entry;
  Element* dq = (Element*)p.dq + (VARLEN ? 0 : e.batch) * p.dq_stride_b + v.head * p.dq_stride_h +
                e.start_q * p.dq_stride_s + w.part * (ND * 8);
#if DETERMINISTIC
  await_turn(w, v);
#endif
  for (int unit = threadIdx.x / 32; unit < STRIPS * GROUPS; unit += NUM_WARPS) {
    const int strip = unit % STRIPS, group = unit / STRIPS;
    Accum sum[kTiles][4];
    zero(sum);
#pragma unroll 4
    for (int k = 0; k < BLOCK_N / 16; k++) {
      const OperandA a = load_ds(w, strip, k);
#if SCATTERED
      const Live live = live_columns(a);
#else
      const Live live;
#endif
      RowFactor factor;
#if SCALED
      factor.back[0] = factor.back[1] = ((const float*)(w.memory + DS_SCALES_AT))[k];
#endif
      OperandB b[kTiles];
      load_b_rows<TileK, false>(b, w.k_down_lane, 16 * k, w.part * GROUPS + group, live);
      add_product(sum, a, b, factor);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = v.m * BLOCK_M + 16 * strip + 8 * r + w.lane / 4;
      Accum scale = w.scores.scale;
#if SCALED
      scale *= w.dout_scales(stage)[16 * strip + 8 * r + w.lane / 4];
#endif
      if (row >= w.rows.first && row < w.rows.last)
        store_row<true>(dq + row * p.dq_stride_s, sum, r, scale, group, (int)p.head_dim - w.part * (ND * 8),
                        (int)p.head_dim, w.lane);
    }
  }
#if DETERMINISTIC
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(turn(w, v), w.n + 1);
#endif
}
#endif

// Gives XT the scales of the rows of Q (of 0) or dO (1), which it meets.
DEVICE RowFactor scale_queries(const Work& w, Accum (&x)[N][4], int of, int stage) {
#if SCALED
  scale_columns(x, of ? w.dout_scales(stage) : w.q_scales(stage), 1, w.lane);
  return row_factor(x);
#else
  return RowFactor();
#endif
}

// One query block of one head.
DEVICE void absorb(const Work& w, State& state, Visit v, int stage) {
  Accum s[N][4], dp[N][4];
  u32 seen = ~0u;
  score_gradients<false>(s, dp, w, v.m, stage, seen);
#if WANT_DQ
  store_ds(w, dp, stage);
#endif
#if WANT_DV
  accumulate<TileO, NDV>(state.dv, s, w.dout_tile(stage) + TileO::lane_b_rows(w.lane), w.part, seen,
                         scale_queries(w, s, 1, stage));
#endif
#if WANT_DK
  accumulate<TileQ, ND>(state.dk, dp, w.q_tile(stage) + TileQ::lane_b_rows(w.lane), w.part, seen,
                        scale_queries(w, dp, 0, stage));
#endif
#if WANT_DQ
  __syncthreads();
  add_dq(w, v, stage);
#endif
}

// dK or dV rows of the block: all that the array has; those past the entry's end (dense arrays) come out as zeros.
template <int COLUMNS>
DEVICE void store_gradient(const Work& w, Accum (&x)[COLUMNS][4], Element* to, i64 stride_s, Accum factor, int head_dim) {
  const int rows = VARLEN ? w.scores.entry.seqlen_kv : (int)w.p.seqlen_kv;
  const int column = w.part * COLUMNS * 8;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = w.key + 8 * r;
    if (row >= rows) continue;
#pragma unroll
    for (int d = 0; d < COLUMNS; d += kTiles)
      store_row<SPLIT_GROUP>(to + row * stride_s + column, part<kTiles>(x, d), r, factor, d / kTiles, head_dim - column,
                             head_dim, w.lane);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) bwd_wide(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const int blocks = ((int)p.seqlen_kv + BLOCK_N - 1) / BLOCK_N, group = (int)(p.heads_q / p.heads_kv);
  const Block found = find_block(blockIdx.x, blocks * PARTS, (int)(SPLIT_GROUP ? p.heads_q : p.heads_kv), (int)p.batch,
                                 (int)p.aux3, false);
  const Entry e = load_entry(p, found.batch);
  const int head_kv = SPLIT_GROUP ? found.head / group : found.head;
  const int head_first = SPLIT_GROUP ? found.head : head_kv * group;
  const int n0 = found.index / PARTS * BLOCK_N;
  if (VARLEN && n0 >= e.seqlen_kv) return;
  Work w = {p};
  w.start(e, head_first, n0, shared);
  w.n = found.index / PARTS;
  w.part = found.index % PARTS;
  w.head_last = SPLIT_GROUP ? head_first + 1 : head_first + group;
  w.k_down_lane = w.shared + TileK::lane_b_rows_apart(w.lane);

  State state;
#if WANT_DK
  zero(state.dk);
#endif
#if WANT_DV
  zero(state.dv);
#endif
  Visit v = {w.head_last, 0};
  if (w.rows.last > w.rows.first) v = w.seek({head_first, w.rows.first / BLOCK_M});
  int stage = 0;
  bool first = true;
  if (v.head < w.head_last) {
    w.load_keys(head_kv, n0);
    if (STAGES == 2) w.load_queries(v.head, v.m, 0);
    cp_async_commit();
  }
  while (v.head < w.head_last) {
    const Visit next = w.seek({v.head, v.m + 1});
    if (v.head != w.scores.head) w.scores = load_scores(p, e, v.head);
    if (STAGES == 1) {
      __syncthreads();
      w.load_queries(v.head, v.m, 0);
      cp_async_commit();
    }
    cp_async_wait<0>();
    if (first) w.split_keys();
    first = false;
    w.split_queries(stage);
    __syncthreads();
    if (STAGES == 2 && next.head < w.head_last) w.load_queries(next.head, next.m, stage ^ 1);
    cp_async_commit();
    absorb(w, state, v, stage);
    if (STAGES == 2) stage ^= 1;
    v = next;
  }
  const i64 batch = VARLEN ? 0 : found.batch;
#if HEADS_WAIT
  // They are neighbours in the grid and end at about the same time.
  int* heads = p.semaphore + p.aux4 + ((found.batch * p.heads_kv + head_kv) * blocks + w.n) * PARTS + w.part;
  if (threadIdx.x == 0) {
    while (load_acquire(heads) != found.head % group) __nanosleep(20);
  }
  __syncthreads();
#endif
#if WANT_DK
  Element* dk = (Element*)p.dk + batch * p.dk_stride_b + head_kv * p.dk_stride_h + e.start_kv * p.dk_stride_s;
  store_gradient<ND>(w, state.dk, dk, p.dk_stride_s, w.scores.scale, (int)p.head_dim);
#endif
#if WANT_DV
  Element* dv = (Element*)p.dv + batch * p.dv_stride_b + head_kv * p.dv_stride_h + e.start_kv * p.dv_stride_s;
  store_gradient<NDV>(w, state.dv, dv, p.dv_stride_s, DROPOUT ? (Accum)p.dropout_scale : (Accum)1, (int)p.head_dim_v);
#endif
#if HEADS_WAIT
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release(heads, found.head % group + 1);
#endif
}
