// What the kernels of the 16-bit backward share: switches, the order of dq_accum, and stores of gradients, what becomes
// of scores. No products here.
//
// The kernels' own integers: aux3 counts an entry's blocks of rows (VARLEN: of the longest), aux4 is a kernel's own,
// aux5 counts dq_accum's blocks of one head, aux6 the rows of all of k, aux7 the q heads that one block of threads serves.
#pragma once
#include "mask.cuh"
#include "mma.cuh"

#ifndef WANT_DQ
#define WANT_DQ 1
#endif
#ifndef WANT_DK
#define WANT_DK 1
#endif
#ifndef WANT_DV
#define WANT_DV 1
#endif
#ifndef WHOLE_D  // head dims are HEAD_DIM and HEAD_DIM_V
#define WHOLE_D 0
#endif
#ifndef DLSE
#define DLSE 0
#endif
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif

static_assert(DTYPE == F16 || DTYPE == BF16, "16-bit operands");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "tiles are made of 32 columns");

// Rows of the entry's own in arrays of queries; with q_seqlens the last ones lie beyond its length.
DEVICE int rows_q(const Params& p, const Entry& e) { return VARLEN ? e.seqlen_q : (int)p.seqlen_q; }
DEVICE int rows_kv(const Params& p, const Entry& e) { return VARLEN ? e.seqlen_kv : (int)p.seqlen_kv; }

// First element of (entry, head) in an array with the given strides; rows follow from there.
DEVICE i64 base_q(const Entry& e, int head, i64 stride_b, i64 stride_h, i64 stride_s) {
  return (VARLEN ? 0 : e.batch * stride_b) + head * stride_h + e.start_q * stride_s;
}
DEVICE i64 base_kv(const Entry& e, int head, i64 stride_b, i64 stride_h, i64 stride_s) {
  return (VARLEN ? 0 : e.batch * stride_b) + head * stride_h + e.start_kv * stride_s;
}

DEVICE float softmax_scale(const Params& p) {
  return p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
}

// dq_accum keeps block `block` of BLOCK_M rows of (entry, head) as 16 x 8 pieces, row of pieces after row of pieces. Packed
// sequences start on a block of their own: sequence b at floor(start / BLOCK_M) + b.
DEVICE i64 dq_block(const Params& p, const Entry& e, int head, int block) {
  if (VARLEN) return head * p.aux5 + e.start_q / BLOCK_M + e.batch + block;
  return (e.batch * p.heads_q + head) * p.aux5 + block;
}
DEVICE float* dq_tile(const Params& p, const Entry& e, int head, int block) {
  return p.dq_accum + dq_block(p, e, head, block) * (BLOCK_M * HEAD_DIM);
}

// Where element i of a lane's accumulator fragment lies in its piece: the lane's four together where there are vector
// reductions, else one element of all lanes together.
DEVICE int accum_index(int lane, int i) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + i;
#else
  return i * 32 + lane;
#endif
}

// Rounds 8 columns from `column` on and stores those below `columns`.
DEVICE void store_chunk(u16* row, int column, int columns, const float (&x)[8]) {
  const u32 word[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
  if (columns % 8 == 0) {
    if (column < columns) *(uint4*)(row + column) = make_uint4(word[0], word[1], word[2], word[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (column + i < columns) row[column + i] = (u16)(word[i / 2] >> (16 * (i & 1)));
}

#if SCATTERED
// Zeroes what is not finite in K and V. A key that some row sees has made that row's LSE or delta infinite or NaN already;
// one that no row sees must not reach dQ as 0 * NaN.
template <int CHUNKS, int THREADS>
DEVICE void clean_keys(u32 tiles) {
  constexpr u32 EXPONENT = DTYPE == F16 ? 0x7c00u : 0x7f80u;
  for (int i = threadIdx.x; i < CHUNKS; i += THREADS) {
    const uint4 x = load_shared16(tiles + 16 * i);
    u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if ((word[j] & EXPONENT) == EXPONENT) word[j] &= 0xffff0000u;
      if ((word[j] >> 16 & EXPONENT) == EXPONENT) word[j] &= 0xffffu;
    }
    store_shared16(tiles + 16 * i, make_uint4(word[0], word[1], word[2], word[3]));
  }
}

// Zeroes the rows of Q and dO that see no key at all, as their LSE tells.
template <typename QTile, typename DoTile, int THREADS>
DEVICE void clean_queries(u32 q, u32 dout, const float* lse) {
  constexpr int CHUNKS_Q = QTile::kCols / 8, CHUNKS = CHUNKS_Q + DoTile::kCols / 8;
  bool dead = false;
  for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) dead |= lse[i] == -infinity();
  if (!__syncthreads_or(dead)) return;
  for (int i = threadIdx.x; i < BLOCK_M * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (lse[row] != -infinity()) continue;
    const u32 address = chunk < CHUNKS_Q ? q + QTile::offset(row, chunk) : dout + DoTile::offset(row, chunk - CHUNKS_Q);
    store_shared16(address, make_uint4(0, 0, 0, 0));
  }
  __syncthreads();
}
#endif


#if DROPOUT
// What a thread's keys `key`, key + 8, key + 16 and key + 24 draw, modulo 32, for its queries `row` and row + 1. A Philox call
// serves the keys of both parities; a thread has those of one, and the lane 4 away those of the other: each makes the call
// of one query and hands half of it over.
struct Draws {
  u32 word[2][2];  // of query j: t = 0 and 1, t = 2 and 3

  DEVICE void draw(const DropoutKey& dropout, int row, int key) {
    const bool odd = key & 1;
    const Philox4 call = dropout_words(dropout, row + odd, key);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 even_keys = __byte_perm(call.word[2 * i], call.word[2 * i + 1], 0x5410);
      const u32 odd_keys = __byte_perm(call.word[2 * i], call.word[2 * i + 1], 0x7632);
      const u32 mine = odd ? odd_keys : even_keys, theirs = __shfl_xor_sync(~0u, odd ? even_keys : odd_keys, 4);
      word[0][i] = odd ? theirs : mine;
      word[1][i] = odd ? mine : theirs;
    }
  }
  // Query j, key 8 t of the group of 32 from `key` on; HALF: t counts from the 16 that `key` lies in.
  template <bool HALF>
  DEVICE u32 get(int j, int t, int key) const {
    const u32 pair = HALF ? (key & 16 ? word[j][1] : word[j][0]) : word[j][t / 2];
    return pair >> (16 * (t % 2)) & 0xffffu;
  }
};
#endif

// What one query row brings to the scores of a thread, whose first key is `key`: stored_score (mask.cuh) with all that
// depends on the row alone done once. Rows from the entry's length on are never looked at.
struct ScoreRow {
  const BiasElement* bias;  // at `key`
  const u8* mask;
  int distance, segment;

  DEVICE ScoreRow(const Params& p, const Scores& s, int row, int key) {
    bias = BIAS ? s.bias + row * p.bias_stride_q + key * p.bias_stride_k : nullptr;
    mask = MASK ? s.mask + row * p.mask_stride_q + key * p.mask_stride_k : nullptr;
    distance = row + s.entry.offset - key;
    segment = SEGMENTS && row < s.entry.seqlen_q ? s.q_segments[row] : 0;
  }
  // The stored score of key + offset, whose segment is `key_segment`; `scale` is softmax_scale, over the softcap if any.
  DEVICE float score(const Params& p, const Scores& s, float scale, float raw, int offset, int key_segment, float& slope) const {
    float x = TRANSFORM ? raw * scale : raw;
    if (SOFTCAP) {
      x = tanh_score(x);
      slope = 1.f - x * x;
      x *= s.cap;
    }
    if (ALIBI) x -= s.slope * (float)abs(distance - offset);
    if (BIAS) {
      const float b = to_accum(bias[offset * p.bias_stride_k]);
      x = b == -infinity() ? b : x + b;  // a select: raw may be NaN where the bias hides
    }
    if (MASK && !mask[offset * p.mask_stride_k]) x = -infinity();
    if (SEGMENTS && segment != key_segment) x = -infinity();
    return x;
  }
};

// S -> P as dV takes it, dP -> dS as dQ and dK take it. The thread's first key is `key` and its first query `row`, of the
// entry; `lse` and `delta` belong to `row`; rows from last_row on see nothing. BOUNDED: the tile crosses a diagonal or an end;
// CAPPED: dS with the softcap's derivative.
template <bool BOUNDED, bool CAPPED, int MT, int NT>
DEVICE void weights(Acc<MT, NT>& s, Acc<MT, NT>& dp, const Params& p, const Scores& scores, int last_row, int key, int row,
                    const float* lse, const float* delta) {
  static_assert(!DROPOUT || MT == 1 || MT % 2 == 0, "a thread's keys are half of a group of 32, or whole ones");
  const float unit = (TRANSFORM ? 1.f : scores.scale) * (float)LOG2E;
#if TRANSFORM || MASK || SEGMENTS
  const float scale = SOFTCAP ? scores.scale / scores.cap : scores.scale;
  int segments[2 * MT];  // of the keys
#pragma unroll
  for (int m = 0; m < 2 * MT; m++)
    segments[m] = SEGMENTS && key + 8 * m < scores.entry.seqlen_kv ? scores.kv_segments[key + 8 * m] : 0;
#endif
#pragma unroll
  for (int n = 0; n < NT; n++) {
#if DROPOUT
    Draws draws[(MT + 1) / 2];
#pragma unroll
    for (int g = 0; g < (MT + 1) / 2; g++) draws[g].draw(scores.dropout, row + 8 * n, key + 32 * g);
#endif
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int i = row + 8 * n + j;
      const float raw_lse = lse[8 * n + j];
      const float lse2 = raw_lse == -infinity() ? infinity() : SUBTRACT_FIRST ? raw_lse : raw_lse * (float)LOG2E;
      const float d = delta[8 * n + j];
      const Range keys = key_range_of_row(scores.entry, i);
      const int first = keys.first - key, last = (i < last_row ? keys.last : 0) - key;
#if TRANSFORM || MASK || SEGMENTS
      const ScoreRow score_row(p, scores, i, key);
#endif
#pragma unroll
      for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int offset = 16 * m + 8 * r;
          float x = s.x[m][n][2 * r + j], slope = 1.f;
          bool seen = !BOUNDED || (offset < last && (!HAS_LEFT || offset >= first));
#if TRANSFORM || MASK || SEGMENTS
          if (seen) {
            x = score_row.score(p, scores, scale, x, offset, segments[2 * m + r], slope);
            seen = x != -infinity();
          }
#endif
          const float weight = seen ? exp2_fast(SUBTRACT_FIRST ? (x - lse2) * unit : fmaf(x, unit, -lse2)) : 0.f;
          const float dweight = dp.x[m][n][2 * r + j];
#if DROPOUT
          const bool keep = draws[m / 2].template get<MT == 1>(j, 2 * (m % 2) + r, key) < (u32)p.dropout_threshold;
          float ds = weight * fmaf(keep ? dweight : 0.f, (float)p.dropout_scale, -d);
          s.x[m][n][2 * r + j] = keep ? weight : 0.f;
#else
          float ds = weight * (dweight - d);
          s.x[m][n][2 * r + j] = weight;
#endif
          if (SOFTCAP && CAPPED) ds *= slope;
          if (BOUNDED || SCATTERED) ds = seen ? ds : 0.f;
          dp.x[m][n][2 * r + j] = ds;
        }
      }
    }
  }
}
