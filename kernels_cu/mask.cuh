// Who sees whom, and what a score is before the softmax: lengths and offsets of a batch entry, visible ranges of a block,
// softcap, bias, ALiBi, the masks, dropout. Every family includes this; what a switch leaves out costs nothing.
//
// A *stored* score is what the softmax works on: times `unit` it is the score in natural units, which with TRANSFORM it
// already is (unit 1); without, it is q.k, negated if the scale is negative (unit |scale|). Hidden is -infinity.
// No loads of q, k or v and no softmax here.
#pragma once
#include "philox.cuh"
#include "ptx.cuh"

struct Range {
  int first, last;  // [first, last); empty when last <= first
};

// One batch entry (or packed sequence): its lengths, its rows in packed arrays, and its two diagonals:
// row i sees keys i + diagonal_left .. i + diagonal_right.
struct Entry {
  int batch;
  int seqlen_q, seqlen_kv;
  int offset;  // of row 0 against key 0
  int diagonal_left, diagonal_right;
  i64 start_q, start_kv;  // first row in packed arrays; 0 otherwise
};

DEVICE int clamp_index(i64 x, i64 lowest, i64 highest) { return (int)min(max(x, lowest), highest); }

DEVICE Entry load_entry(const Params& p, int batch) {
  Entry e;
  e.batch = batch;
  e.seqlen_q = (int)p.seqlen_q;
  e.seqlen_kv = (int)p.seqlen_kv;
  e.start_q = e.start_kv = 0;
#if VARLEN
  e.start_q = p.cu_seqlens_q[batch];
  e.start_kv = p.cu_seqlens_k[batch];
  e.seqlen_q = p.cu_seqlens_q[batch + 1] - (int)e.start_q;
  e.seqlen_kv = p.cu_seqlens_k[batch + 1] - (int)e.start_kv;
#elif VARIABLE
  if (p.q_seqlens) e.seqlen_q = clamp_index(p.q_seqlens[batch], 0, p.seqlen_q);
  if (p.kv_seqlens) e.seqlen_kv = clamp_index(p.kv_seqlens[batch], 0, p.seqlen_kv);
#endif
  i64 offset = p.q_offset_mode == OFFSET_BOTTOM_RIGHT ? (i64)e.seqlen_kv - e.seqlen_q : p.q_offset_value;
#if VARIABLE
  if (p.q_offset_mode == OFFSET_ARRAY) offset = p.q_offset[batch];
#endif
  const i64 far = 1 << 30;  // beyond every length: sums of two indices stay in 32 bits
  e.offset = clamp_index(offset, -far, far);
  e.diagonal_left = HAS_LEFT ? clamp_index(offset - p.window_left, -far, far) : 0;
  e.diagonal_right = HAS_RIGHT ? clamp_index(offset + p.window_right, -far, far) : 0;
  return e;
}

// Keys that some row of [first, last) sees by position; rows are within the entry.
DEVICE Range key_range(const Entry& e, int first, int last) {
  if (last <= first) return {0, 0};
  return {HAS_LEFT ? max(0, first + e.diagonal_left) : 0,
          HAS_RIGHT ? min(e.seqlen_kv, last + e.diagonal_right) : e.seqlen_kv};
}

// Keys that every row of [first, last) sees by position.
DEVICE Range key_range_of_all(const Entry& e, int first, int last) {
  return {HAS_LEFT ? max(0, last - 1 + e.diagonal_left) : 0,
          HAS_RIGHT ? min(e.seqlen_kv, first + 1 + e.diagonal_right) : e.seqlen_kv};
}

// Rows that see some key of [first, last) by position; keys are within the entry.
DEVICE Range query_range(const Entry& e, int first, int last) {
  if (last <= first) return {0, 0};
  return {HAS_RIGHT ? max(0, first - e.diagonal_right) : 0,
          HAS_LEFT ? min(e.seqlen_q, last - e.diagonal_left) : e.seqlen_q};
}

// Rows that see every key of [first, last) by position.
DEVICE Range query_range_of_all(const Entry& e, int first, int last) {
  return {HAS_RIGHT ? max(0, last - 1 - e.diagonal_right) : 0,
          HAS_LEFT ? min(e.seqlen_q, first + 1 - e.diagonal_left) : e.seqlen_q};
}

// Keys that one row sees by position.
DEVICE Range key_range_of_row(const Entry& e, int row) {
  return {HAS_LEFT ? max(0, row + e.diagonal_left) : 0,
          HAS_RIGHT ? min(e.seqlen_kv, row + 1 + e.diagonal_right) : e.seqlen_kv};
}

// The bitmap of tiles in which mask and segments leave something: bit n % 32 of word
// live_tiles[b * aux0 + h * aux1 + m * aux2 + n / 32] for query block m and key block n.
DEVICE const u32* live_row(const Params& p, int batch, int head, int m) {
  return p.live_tiles + batch * p.aux0 + head * p.aux1 + m * p.aux2;
}
DEVICE bool live_tile(const u32* row, int n) { return row[n >> 5] >> (n & 31) & 1; }

// Everything about scores that a block needs, for one entry and query head.
struct Scores {
  Entry entry;
  int head;
  Accum scale;          // softmax_scale
  Accum unit;           // natural units of a stored score, positive
  bool flip;            // stored = -raw (a negative scale, without TRANSFORM; needs ANY_SCALE)
  Accum cap, slope;
  const BiasElement* bias;  // at this entry and head
  const u8* mask;
  const int* q_segments;
  const int* kv_segments;
  DropoutKey dropout;
};

DEVICE Scores load_scores(const Params& p, const Entry& entry, int head) {
  Scores s;
  s.entry = entry;
  s.head = head;
  s.scale = p.softmax_scale ? (Accum)*p.softmax_scale : (Accum)p.softmax_scale_value;
  s.flip = ANY_SCALE && !TRANSFORM && s.scale < 0;
  // NOTE: never 0, since 0 * -infinity is NaN; with so small a unit all weights come out equal, as they should.
  s.unit = TRANSFORM ? (Accum)1 : max((Accum)fabs(s.scale), (Accum)1e-30);
  s.cap = SOFTCAP ? (Accum)p.softcap : (Accum)0;
  s.slope = ALIBI ? ((const Accum*)p.alibi_slopes)[entry.batch * p.alibi_slopes_stride_b + head] : (Accum)0;
  s.bias = BIAS ? (const BiasElement*)p.bias + entry.batch * p.bias_stride_b + head * p.bias_stride_h : nullptr;
  s.mask = MASK ? p.mask + entry.batch * p.mask_stride_b + head * p.mask_stride_h : nullptr;
  s.q_segments = SEGMENTS ? p.q_segment_ids + entry.batch * p.seqlen_q : nullptr;
  s.kv_segments = SEGMENTS ? p.kv_segment_ids + entry.batch * p.seqlen_kv : nullptr;
  if (DROPOUT) s.dropout = dropout_key(p, entry.batch, head);
  return s;
}

// tanh: for 16-bit inputs to float32's absolute accuracy with one exponential, else to the last bits, since a large cap
// times an absolute error is more than float32 scores may be off.
DEVICE float tanh_score(float x) {
#if DTYPE == F32
  return tanhf(x);
#else
  const float e = exp2_fast(x * (float)(-2 * LOG2E));  // infinite for very negative x: the quotient is then 0
  return fmaf(2.f, reciprocal_fast(1.f + e), -1.f);
#endif
}
DEVICE double tanh_score(double x) { return tanh(x); }

// c * tanh(x / c); `slope` becomes its derivative.
DEVICE Accum soft_cap(Accum x, Accum cap, Accum& slope) {
  const Accum t = tanh_score(x / cap);
  slope = 1 - t * t;
  return cap * t;
}

// Raw q.k -> stored score, hidden keys as -infinity. Row and column must lie within the entry's lengths. Positions
// (window, lengths) are the caller's: see key_range_of_row. `slope` is the softcap's derivative, 1 without one.
DEVICE Accum stored_score(const Params& p, const Scores& s, Accum raw, int row, int column, Accum& slope) {
  slope = 1;
  Accum x = raw;
  if (TRANSFORM) {
    x *= s.scale;
  } else if (ANY_SCALE && s.flip) {
    x = -x;
  }
  if (SOFTCAP) x = soft_cap(x, s.cap, slope);
  if (ALIBI) x -= s.slope * (Accum)abs(row + s.entry.offset - column);
  if (BIAS) {
    const Accum bias = to_accum(s.bias[row * p.bias_stride_q + column * p.bias_stride_k]);
    x = bias == (Accum)-infinity() ? bias : x + bias;  // a select: raw may be NaN where the bias hides
  }
  if (MASK && !s.mask[row * p.mask_stride_q + column * p.mask_stride_k]) x = (Accum)-infinity();
  if (SEGMENTS && s.q_segments[row] != s.kv_segments[column]) x = (Accum)-infinity();
  return x;
}

DEVICE Accum stored_score(const Params& p, const Scores& s, Accum raw, int row, int column) {
  Accum slope;
  return stored_score(p, s, raw, row, column, slope);
}
