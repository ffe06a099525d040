// What the float32 and float64 kernels of the backward share: tiles of a block of keys and a block of queries, raw products
// (transposed: keys along m, so that each warp owns 16 keys), and from them weights and score gradients.
//
// Defines: HEAD_DIM, HEAD_DIM_V (multiples of 128 bytes), BLOCK_M, BLOCK_N = 16 * NUM_WARPS, STAGES of Q and dO.
#pragma once
#include "weights.cuh"

#ifndef WANT_DQ
#define WANT_DQ 0
#endif
#ifndef WANT_DK
#define WANT_DK 0
#endif
#ifndef WANT_DV
#define WANT_DV 0
#endif

namespace {

constexpr int THREADS = 32 * NUM_WARPS;
constexpr int N = BLOCK_M / 8;
constexpr int GROUP = N < 4 ? N : 4;  // score columns in flight, in eights
constexpr bool SCORE_GRADIENTS = WANT_DQ || WANT_DK || !WANT_DV;

static_assert(BLOCK_N == 16 * NUM_WARPS, "a warp owns 16 keys");
static_assert(BLOCK_M % 16 == 0 && N % GROUP == 0 && BLOCK_M <= 128, "whole steps of 16 rows");
static_assert(BLOCK_M <= THREADS, "rows' LSE and delta come in one pass each");

typedef WideTile<BLOCK_N, HEAD_DIM> TileK;
typedef WideTile<BLOCK_N, HEAD_DIM_V> TileV;
typedef WideTile<BLOCK_M, HEAD_DIM> TileQ;
typedef WideTile<BLOCK_M, HEAD_DIM_V> TileO;

// Shared memory, in bytes from its start.
constexpr int V_AT = TileK::kBytes;
constexpr int Q_AT = V_AT + (SCORE_GRADIENTS ? TileV::kBytes : 0);
constexpr int DO_AT = Q_AT + STAGES * TileQ::kBytes;
constexpr int ROWS_AT = DO_AT + STAGES * TileO::kBytes;  // LSE, then delta, of each stage
constexpr int ROW_BYTES = BLOCK_M * (int)sizeof(Accum);
constexpr int SCALES_AT = ROWS_AT + 2 * STAGES * ROW_BYTES;  // of the rows of K and V, and of Q and dO of each stage
constexpr int DS_AT = SCALES_AT + (SCALED ? 4 * (2 * BLOCK_N + 2 * STAGES * BLOCK_M) : 0);

struct Tiles {
  const Params& p;
  Scores scores;
  Range rows;  // that see some key of the block
  int key;     // the thread's first; the other is 8 below
  int lane;
  u8* memory;
  u32 shared;
  u32 k_lane, v_lane;  // where this lane reads its warp's rows (wide.cuh)

  // Takes the block of keys from n0 on, of an entry.
  DEVICE void start(const Entry& e, int head, int n0, u8* at) {
    scores = load_scores(p, e, head);
    rows = query_range(e, n0, min(n0 + BLOCK_N, e.seqlen_kv));
    lane = threadIdx.x % 32;
    key = n0 + (threadIdx.x / 32) * 16 + lane / 4;
    memory = at;
    shared = smem_address(at);
    k_lane = shared + TileK::lane_a(lane) + (threadIdx.x / 32) * 16 * TileK::kRowBytes;
    v_lane = shared + V_AT + TileV::lane_a(lane) + (threadIdx.x / 32) * 16 * TileV::kRowBytes;
  }

  // NOTE: keys that no row sees must not meet their zero gradients.
  DEVICE void load_keys(int head_kv, int n0) const {
    const Entry& e = scores.entry;
    const i64 batch = VARLEN ? 0 : e.batch, row = e.start_kv + n0;
    const Range seen = key_range(e, 0, e.seqlen_q);
    const int first = seen.first - n0, last = min(seen.last, min(n0 + BLOCK_N, e.seqlen_kv)) - n0;
    const Element* k = (const Element*)p.k + batch * p.k_stride_b + head_kv * p.k_stride_h + row * p.k_stride_s;
    load_wide<TileK, THREADS>(shared, k, p.k_stride_s, first, last, (int)p.head_dim, threadIdx.x);
    if (SCORE_GRADIENTS) {
      const Element* v = (const Element*)p.v + batch * p.v_stride_b + head_kv * p.v_stride_h + row * p.v_stride_s;
      load_wide<TileV, THREADS>(shared + V_AT, v, p.v_stride_s, first, last, (int)p.head_dim_v, threadIdx.x);
    }
  }

  // NOTE: likewise rows that see no key of the block.
  DEVICE void load_queries(int head, int m, int stage) const {
    const int thread = rematerialize(threadIdx.x);
    const Entry& e = scores.entry;
    const i64 batch = VARLEN ? 0 : e.batch, row = e.start_q + (i64)m * BLOCK_M;
    const int first = rows.first - m * BLOCK_M, last = rows.last - m * BLOCK_M;
    const Element* q = (const Element*)p.q + batch * p.q_stride_b + head * p.q_stride_h + row * p.q_stride_s;
    const Element* dout =
        (const Element*)p.dout + batch * p.dout_stride_b + head * p.dout_stride_h + row * p.dout_stride_s;
    load_wide<TileQ, THREADS>(shared + Q_AT + stage * TileQ::kBytes, q, p.q_stride_s, first, last, (int)p.head_dim,
                              thread);
    load_wide<TileO, THREADS>(shared + DO_AT + stage * TileO::kBytes, dout, p.dout_stride_s, first, last,
                              (int)p.head_dim_v, thread);
    if (thread < BLOCK_M) {
      const i64 at = batch * p.lse_stride_b + head * p.lse_stride_h + row + thread;
      const bool inside = thread >= first && thread < last;
      const u32 to = shared + ROWS_AT + 2 * stage * ROW_BYTES + thread * (int)sizeof(Accum);
      cp_async_element(to, (const Accum*)p.lse + at, inside);
      if (SCORE_GRADIENTS) cp_async_element(to + ROW_BYTES, (const Accum*)p.delta + at, inside);
    }
  }

  // LSE (kind 0) or delta (1) of a row of the query block.
  DEVICE Accum row_value(int kind, int stage, int row) const {
    return ((const Accum*)(memory + ROWS_AT + (2 * stage + kind) * ROW_BYTES))[row];
  }

#if SCALED
  DEVICE float* k_scales() const { return (float*)(memory + SCALES_AT); }
  DEVICE float* v_scales() const { return k_scales() + BLOCK_N; }
  DEVICE float* q_scales(int stage) const { return v_scales() + BLOCK_N + stage * BLOCK_M; }
  DEVICE float* dout_scales(int stage) const { return q_scales(STAGES) + stage * BLOCK_M; }
#endif
  // What the thread loaded has arrived.
  DEVICE void split_keys() const {
#if SCALED
    split_tile<TileK, THREADS>(shared, k_scales(), threadIdx.x);
    if (SCORE_GRADIENTS) split_tile<TileV, THREADS>(shared + V_AT, v_scales(), threadIdx.x);
#endif
  }
  DEVICE void split_queries(int stage) const {
#if SCALED
    split_tile<TileQ, THREADS>(q_tile(stage), q_scales(stage), threadIdx.x);
    split_tile<TileO, THREADS>(dout_tile(stage), dout_scales(stage), threadIdx.x);
#endif
  }

  DEVICE u32 q_tile(int stage) const { return shared + Q_AT + stage * TileQ::kBytes; }
  DEVICE u32 dout_tile(int stage) const { return shared + DO_AT + stage * TileO::kBytes; }
};

// c = A BT: the warp's 16 rows of A, the query block's rows of B, COLUMNS along k.
template <typename TA, typename TB>
DEVICE void product(Accum (&c)[N][4], u32 a_lane, u32 b_lane) {
  zero(c);
#pragma unroll 2
  for (int step = 0; step < TA::kCols / 16; step++) {
    const OperandA a = load_a<TA>(a_lane, 0, step);
#pragma unroll
    for (int n = 0; n < N; n += GROUP) {
      OperandB b[GROUP];
#pragma unroll
      for (int i = 0; i < GROUP; i++) b[i] = load_b<TB>(b_lane, 8 * (n + i), step);
      add_product(part<GROUP>(c, n), a, b, RowFactor());
    }
  }
}

#if SCATTERED
struct NotNegative {
  DEVICE bool operator()(Accum x) const { return !(x < 0); }
};
#endif

// Raw products s and dp -> weights in s (dropped ones 0, kept ones not yet scaled up), and in dp gradients: of the scores
// after the softcap for the bias (FOR_BIAS), else of softmax_scale * q.k. `row` is the thread's first, `seen` gets
// occupied()'s bits. Positions are tested in every tile: beside the products that costs nothing.
template <bool FOR_BIAS>
DEVICE void differentiate(Accum (&s)[N][4], Accum (&dp)[N][4], const Tiles& w, int row, int stage, u32& seen) {
  const Entry& e = w.scores.entry;
  const Accum factor = w.scores.unit * (Accum)LOG2E;
  Accum slopes[SOFTCAP ? N : 1][4];
  Range rows[2];  // that see the thread's keys
#pragma unroll
  for (int r = 0; r < 2; r++) {
    rows[r] = query_range(e, w.key + 8 * r, w.key + 8 * r + 1);
    if (w.key + 8 * r >= e.seqlen_kv) rows[r].last = 0;
    rows[r].first -= row, rows[r].last -= row;  // against constants below
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, offset = 8 * n + i % 2, column = w.key + 8 * r;
      Accum& x = s[n][i];
      bool visible = offset < rows[r].last && (!HAS_RIGHT || offset >= rows[r].first);
      Accum slope = 1;
      if (TRANSFORM || MASK || SEGMENTS) {
        if (visible) x = stored_score(w.p, w.scores, x, row + offset, column, slope);
        visible = visible && x != -(Accum)infinity();
      } else if (ANY_SCALE && w.scores.flip) {
        x = -x;
      }
      const Accum lse = exponent_of_log(w.row_value(0, stage, 8 * n + 2 * (w.lane % 4) + i % 2));
      x = visible ? weight(x, lse, factor) : (Accum)(SCATTERED ? -1 : 0);  // -1 until occupied() has looked
      if (SOFTCAP && !FOR_BIAS) slopes[n][i] = slope;
    }
  }
#if SCATTERED
  seen = occupied(s, NotNegative());
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (s[n][i] < 0) s[n][i] = 0, dp[n][i] = 0;
    }
  }
#endif
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Accum& x = s[n][i];
      Accum kept = 1;
#if DROPOUT
      const int column = w.key + 8 * (i / 2);
      const Philox4 words =
          dropout_words(w.scores.dropout, row + 8 * n + i % 2, column);
      kept = dropout_draw(words, column) < (u32)w.p.dropout_threshold ? (Accum)w.p.dropout_scale : (Accum)0;
#endif
      if (SCORE_GRADIENTS) {
        const Accum delta = w.row_value(1, stage, 8 * n + 2 * (w.lane % 4) + i % 2);
        // selects: what a weight of 0 hides may be NaN
        Accum dx = DROPOUT ? (kept == 0 ? (Accum)0 : dp[n][i] * kept) : dp[n][i];
        dx = x == 0 ? (Accum)0 : x * (dx - delta);
        if (SOFTCAP && !FOR_BIAS) dx = x == 0 ? (Accum)0 : dx * slopes[n][i];
        dp[n][i] = dx;
      }
      if (DROPOUT && kept == 0) x = 0;
    }
  }
}

// Scores of the query block in `stage` against the block of keys, and their gradients.
template <bool FOR_BIAS>
DEVICE void score_gradients(Accum (&s)[N][4], Accum (&dp)[N][4], const Tiles& w, int m, int stage, u32& seen) {
  product<TileK, TileQ>(s, w.k_lane, w.q_tile(stage) + TileQ::lane_b(w.lane));
  if (SCORE_GRADIENTS) product<TileV, TileO>(dp, w.v_lane, w.dout_tile(stage) + TileO::lane_b(w.lane));
#if SCALED
  const int key = (threadIdx.x / 32) * 16 + w.lane / 4;
  unscale(s, w.k_scales() + key, w.q_scales(stage), w.lane);
  if (SCORE_GRADIENTS) unscale(dp, w.v_scales() + key, w.dout_scales(stage), w.lane);
#endif
  differentiate<FOR_BIAS>(s, dp, w, m * BLOCK_M + 2 * (w.lane % 4), stage, seen);
}

}  // namespace
