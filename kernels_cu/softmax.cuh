// A warp's strips of scores in registers: the score pipeline over accumulator fragments, the online softmax, dropout.
// float32 accumulators of mma.cuh's layout (wgmma's is the same with M = 1 per warp). No loads of q, k, v; no products.
#pragma once
#include "mask.cuh"
#include "mma.cuh"

// Turns raw products into stored scores. The thread's first row is `row` and its first column `column`. BOUNDED: the
// tile crosses a diagonal or the entry's end, so positions are tested; otherwise all its columns are visible to all rows.
template <bool BOUNDED, int M, int N>
DEVICE void apply_scores(Acc<M, N>& c, const Params& p, const Scores& s, int row, int column) {
  if (ANY_SCALE && !TRANSFORM && s.flip) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c.x[m][n][i] = -c.x[m][n][i];
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int i = row + 16 * m + 8 * r;
      const Range keys = key_range_of_row(s.entry, i);
      const int first = keys.first - column, last = keys.last - column;  // against constants below
#pragma unroll
      for (int n = 0; n < N; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& x = c.x[m][n][2 * r + j];
          const int offset = 8 * n + j;
          bool seen = !BOUNDED || (offset < last && (!HAS_LEFT || offset >= first));
          if (TRANSFORM || MASK || SEGMENTS) {
            seen = seen && i < s.entry.seqlen_q;  // rows past the end must not be read
            Scores unflipped = s;
            unflipped.flip = false;
            if (seen) x = stored_score(p, unflipped, x, i, column + offset);
          }
          if (!seen) x = -infinity();
        }
      }
    }
  }
}

// The running maximum and sum of each of a thread's 2 M rows. `max` is of stored scores, the same in the four lanes of a
// row; `sum` is the lane's own share until finish().
template <int M>
struct Softmax {
  float max[M][2], sum[M][2];

  DEVICE void start() {
#pragma unroll
    for (int m = 0; m < M; m++) {
      max[m][0] = max[m][1] = -infinity();
      sum[m][0] = sum[m][1] = 0.f;
    }
  }

  // Brings the maxima up to the tile's scores, and sums and `out` to the new maxima; c = unit * log2(e).
  template <int N, int ND>
  DEVICE void raise(const Acc<M, N>& s, Acc<M, ND>& out, float c) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float top = max[m][r];
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s.x[m][n][2 * r], s.x[m][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float rescale = exp2_fast(exponent(max[m][r], c, -subtrahend(top, c)));
        max[m][r] = top;
        sum[m][r] *= rescale;
#pragma unroll
        for (int n = 0; n < ND; n++) {
          out.x[m][n][2 * r] *= rescale;
          out.x[m][n][2 * r + 1] *= rescale;
        }
      }
    }
  }

  // Stored scores -> weights 2^((score - max) c), added to the sums, for accumulator columns 8 first .. 8 last - 1.
  template <int N>
  DEVICE void weigh(Acc<M, N>& s, float c, int first, int last) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float base = -subtrahend(max[m][r], c);
#pragma unroll
        for (int n = first; n < last; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float& x = s.x[m][n][2 * r + j];
            x = exp2_fast(exponent(x, c, base));
            sum[m][r] += x;
          }
        }
      }
    }
  }

  // What every score of a row loses; nothing while the row has seen nothing, whose weights are then 2^-infinity.
  static DEVICE float subtrahend(float top, float c) {
    if (SUBTRACT_FIRST) c = 1.f;
    return top == -infinity() ? 0.f : top * c;
  }
  static DEVICE float exponent(float score, float c, float base) {
    return SUBTRACT_FIRST ? (score + base) * c : fmaf(score, c, base);
  }

  // Sums over the row's four lanes.
  DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
        sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
      }
  }
};

// From a row's maximum (natural units) and sum: its natural-log LSE, and what its accumulator is to be multiplied with.
// A sink joins maximum and sum. A row that saw nothing gets -infinity and 0, with a sink too.
DEVICE float finish_row(float top, float sum, const float* sink, float& factor) {
  factor = 0.f;
  if (top == -infinity()) return top;
  if (sink) {
    const float joint = fmaxf(top, *sink);
    const float weight = exp2_fast((top - joint) * (float)LOG2E);
    sum = sum * weight + exp2_fast((*sink - joint) * (float)LOG2E);
    factor = weight / sum;
    return joint + logf(sum);
  }
  factor = 1.f / sum;
  return top + logf(sum);
}

#if DROPOUT
// Zeroes the dropped weights of accumulator columns 8 n .. 8 n + 31, which are columns `column` .. (a multiple of 32) of
// the problem; `row` is the thread's first row.
template <int M, int N>
DEVICE void apply_dropout(Acc<M, N>& weights, const Params& p, const Scores& s, int row, int column, int n, int lane) {
  const u32 threshold = (u32)p.dropout_threshold;
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const Philox4 words =
          dropout_words(s.dropout, row + 16 * m + 8 * r, column + 2 * (lane & 3));
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (dropout_draw(words, 8 * t + j) >= threshold) weights.x[m][n + t][2 * r + j] = 0.f;
        }
    }
}
#endif

#if SCATTERED
// Per k step of 16 keys: AND masks for the two B registers of V, which drop keys that none of the warp's rows sees, so
// that what lies there (NaN, infinity) cannot reach the product as 0 * NaN. Stored scores in, before the softmax.
template <int M, int N>
struct SeenKeys {
  u32 keep[N / 2][2];

  DEVICE void find(const Acc<M, N>& s) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        bool seen[2] = {false, false};
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) seen[i & 1] = seen[i & 1] || s.x[m][2 * k + half][i] != -infinity();
        const u32 lanes = 0x11111111u << (threadIdx.x & 3);  // those that hold the same columns
        const u32 low = __ballot_sync(0xffffffffu, seen[0]) & lanes;
        const u32 high = __ballot_sync(0xffffffffu, seen[1]) & lanes;
        keep[k][half] = (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
      }
  }
};
#endif
