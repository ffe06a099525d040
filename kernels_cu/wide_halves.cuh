// Products of float32 as three f16 products of halves: x = scale * (big + small), both f16, 22 bits together; what wide.cuh
// includes for WIDE 4. No attention here.
//
// Each row of a tile is multiplied by a power of two that brings its largest element to [2^14, 2^15), so that neither range
// nor rounding differ from float32's until an element is 2^-28 of its row's largest. The halves replace the float32s in
// place, once for all warps: of each 8 columns one 16-byte chunk of bigs and one of smalls. Which 8 of a row's 16 columns
// meet in a chunk is what lets each thread split what it loaded itself: 4 c .. 4 c + 3 and 8 more, c = 0, 1.
#pragma once

constexpr int kHalfExponent = 14;  // of a row's largest element, scaled

// ---- powers of two as bits ----------------------------------------------------------------------------------------

// The biased exponent to go by: of 0 and the smallest a small one, of infinity and NaN one that leaves finite elements be.
DEVICE u32 exponent_field(float largest) {
  const u32 field = __float_as_uint(largest) >> 23;
  return field == 255 ? 127 + kHalfExponent : max(field, 16u);
}
DEVICE float scale_up(u32 field) { return __uint_as_float((254 + kHalfExponent - field) << 23); }
DEVICE float scale_back(u32 field) { return __uint_as_float((field - kHalfExponent) << 23); }
DEVICE float power_inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

DEVICE float warp_max(float x) {  // x >= 0
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

// Two scaled elements -> their bigs and their smalls.
DEVICE void halve(float x, float y, u32& big, u32& small) {
  float big_x, big_y;
  big = pack_half(x, y);
  unpack_half(big, big_x, big_y);
  small = pack_half(x - big_x, y - big_y);
}

// ---- tiles in shared memory ---------------------------------------------------------------------------------------

// ROWS x COLS, row-major. Chunk 2 c of a row holds the bigs of columns "8 c ..", chunk 2 c + 1 the smalls. The XOR with the
// row lets ldmatrix read any chunk column of 8 rows without bank conflicts.
template <int ROWS, int COLS>
struct WideTile {
  static constexpr int kRows = ROWS, kCols = COLS;
  static constexpr int kRowBytes = COLS * 4;
  static constexpr int kBytes = ROWS * kRowBytes;
  static_assert(COLS % 32 == 0 && ROWS % 8 == 0, "whole lines, whole groups of rows");

  static DEVICE u32 offset(int row, int chunk) { return row * kRowBytes + ((u32)chunk ^ (row & 7)) * 16; }

  // The lane's part of an ldmatrix.x4 address: A (16 rows, two chunk columns, one half); B whose rows are n (8 rows, two
  // chunk columns, both halves); B whose rows are k (16 rows, one chunk column, both halves), and A likewise (two chunk
  // columns, one half).
  static DEVICE u32 lane_a(int lane) { return offset(lane & 15, 2 * (lane >> 4)); }
  static DEVICE u32 lane_b(int lane) { return offset(lane & 7, 2 * ((lane >> 3) & 1) + (lane >> 4)); }
  static DEVICE u32 lane_b_rows(int lane) { return offset(lane & 15, lane >> 4); }
  static DEVICE u32 lane_b_rows_apart(int lane) { return lane_b_rows(lane); }
  static DEVICE u32 lane_a_rows(int lane) { return offset((lane & 7) + 8 * (lane >> 4), 2 * ((lane >> 3) & 1)); }

  // With `base` a tile's address plus one of these: `row` rows (8 n) down and `chunk` chunks right.
  static DEVICE u32 at(u32 base, int row, int chunk) {
    return (base ^ ((chunk & 7) * 16)) + row * kRowBytes + (chunk >> 3) * 128;
  }
};

// How a tile's rows are shared out: LANES threads a row; thread j of a row owns chunk columns j + LANES * i.
template <typename T, int THREADS>
struct Share {
  static constexpr int LANES = T::kCols % 64 == 0 ? 8 : 4, STEP = THREADS / LANES;
  static constexpr int PASSES = (T::kRows + STEP - 1) / STEP, COUNT = T::kCols / (8 * LANES);
};

// Starts copying rows [first, last) of the tile (its own numbering) from `from` + row * stride, `columns` of each; all else
// becomes zero and is never read. split_tile() follows in the same threads once the copies have arrived.
template <typename T, int THREADS>
DEVICE void load_wide(u32 to, const float* from, i64 stride, int first, int last, int columns, int thread) {
  typedef Share<T, THREADS> S;
  const int j = thread % S::LANES;
  const int column = 16 * (j >> 1) + 4 * (j & 1);  // and 8 more
  const float* source = from + (i64)(thread / S::LANES) * stride + column;
#pragma unroll
  for (int pass = 0; pass < S::PASSES; pass++) {
    const int row = pass * S::STEP + thread / S::LANES;
    if (T::kRows % S::STEP == 0 || row < T::kRows) {
      const bool inside = row >= first && row < last;
#pragma unroll
      for (int i = 0; i < S::COUNT; i++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
          const int right = 8 * S::LANES * i + 8 * part;
          const int left = inside ? columns - column - right : 0;  // columns from here on
          const u32 address = to + T::offset(row, 2 * (S::LANES * i + j) + part);
#if ALIGNED
          cp_async16_partial(address, source + right, min(max(left, 0), 4) * 4);
#else
#pragma unroll
          for (int k = 0; k < 4; k++) cp_async_element(address + 4 * k, source + right + k, k < left);
#endif
        }
      }
    }
    source += S::STEP * stride;
  }
}

// Replaces the float32s that this thread loaded by their halves; `scales` gets what each row is to be multiplied with.
template <typename T, int THREADS>
DEVICE void split_tile(u32 tile, float* scales, int thread) {
  typedef Share<T, THREADS> S;
  const int j = thread % S::LANES;
#pragma unroll
  for (int pass = 0; pass < S::PASSES; pass++) {
    const int row = pass * S::STEP + thread / S::LANES;
    if (T::kRows % S::STEP != 0 && row >= T::kRows) break;  // whole warps: a warp has 4 or 8 rows
    float x[S::COUNT][8], largest = 0;
#pragma unroll
    for (int i = 0; i < S::COUNT; i++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const uint4 bits = load_shared16(tile + T::offset(row, 2 * (S::LANES * i + j) + part));
        x[i][4 * part] = __uint_as_float(bits.x), x[i][4 * part + 1] = __uint_as_float(bits.y);
        x[i][4 * part + 2] = __uint_as_float(bits.z), x[i][4 * part + 3] = __uint_as_float(bits.w);
      }
#pragma unroll
      for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(x[i][k]));
    }
#pragma unroll
    for (int i = 1; i < S::LANES; i *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    const u32 field = exponent_field(largest);
    const float up = scale_up(field);
#pragma unroll
    for (int i = 0; i < S::COUNT; i++) {
      u32 big[4], small[4];
#pragma unroll
      for (int k = 0; k < 4; k++) halve(x[i][2 * k] * up, x[i][2 * k + 1] * up, big[k], small[k]);
      const int chunk = 2 * (S::LANES * i + j);
      store_shared16(tile + T::offset(row, chunk), make_uint4(big[0], big[1], big[2], big[3]));
      store_shared16(tile + T::offset(row, chunk + 1), make_uint4(small[0], small[1], small[2], small[3]));
    }
    if (j == 0) scales[row] = scale_back(field);
  }
}

// ---- operands: 16 steps of k --------------------------------------------------------------------------------------

struct OperandA {
  u32 big[4], small[4];
};
struct OperandB {
  u32 big[2], small[2];
};

// A: 16 tile rows from `row` on along m, tile columns 16 * step .. along k. `base`: T::lane_a.
template <typename T>
DEVICE OperandA load_a(u32 base, int row, int step) {
  OperandA a;
  ldmatrix_x4(a.big, T::at(base, row, 4 * step));
  ldmatrix_x4(a.small, T::at(base, row, 4 * step + 1));
  return a;
}

// A out of rows along k: tile rows row .. row + 15, tile columns 16 * group .. along m. `base`: T::lane_a_rows.
template <typename T>
DEVICE OperandA load_a_rows(u32 base, int row, int group) {
  OperandA a;
  ldmatrix_x4_trans(a.big, T::at(base, row, 4 * group));
  ldmatrix_x4_trans(a.small, T::at(base, row, 4 * group + 1));
  return a;
}

// B: 8 tile rows from `row` on along n, tile columns 16 * step .. along k. `base`: T::lane_b.
template <typename T>
DEVICE OperandB load_b(u32 base, int row, int step) {
  u32 r[4];
  ldmatrix_x4(r, T::at(base, row, 4 * step));
  return {{r[0], r[1]}, {r[2], r[3]}};
}

// kTiles B operands side by side: tile rows row .. row + 15 along k, tile columns 8 * kTiles * group .. along n: a chunk
// column each. `base`: T::lane_b_rows.
template <typename T, bool PAIRED>
DEVICE void load_b_rows(OperandB (&b)[kTiles], u32 base, int row, int group, const Live& live) {
  __syncwarp();  // or the compiler starts all groups at once, for which there are not enough registers
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    u32 r[4];
    ldmatrix_x4_trans(r, T::at(base, row, 2 * (kTiles * group + i)));
#if SCATTERED
#pragma unroll
    for (int s = 0; s < 4; s++) r[s] &= (live.row[s % 2][0] ? 0xffffu : 0) | (live.row[s % 2][1] ? 0xffff0000u : 0);
#endif
    b[i] = {{r[0], r[1]}, {r[2], r[3]}};
  }
}

// Two accumulator tiles side by side (16 columns), brought into the halves' range, as the A operand of a product over those
// columns.
DEVICE OperandA from_accumulator(const float (&left)[4], const float (&right)[4], const RowFactor& factor) {
  OperandA a;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float up = factor.up[r];
    halve(left[2 * r] * up, left[2 * r + 1] * up, a.big[r], a.small[r]);
    halve(right[2 * r] * up, right[2 * r + 1] * up, a.big[2 + r], a.small[2 + r]);
  }
  return a;
}

// What brings each of the thread's rows of an accumulator into the halves' range.
template <int N>
DEVICE RowFactor row_factor(const float (&x)[N][4]) {
  RowFactor factor;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(fabsf(x[n][2 * r]), fabsf(x[n][2 * r + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const u32 field = exponent_field(largest);
    factor.up[r] = scale_up(field);
    factor.back[r] = scale_back(field);
  }
  return factor;
}

// Multiplies an accumulator's columns by what `scales` says of them, and by `more`.
template <int N>
DEVICE void scale_columns(float (&x)[N][4], const float* scales, float more, int lane) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float2 scale = *(const float2*)(scales + 8 * n + 2 * (lane % 4));
    x[n][0] *= scale.x * more, x[n][1] *= scale.y * more, x[n][2] *= scale.x * more, x[n][3] *= scale.y * more;
  }
}

// Raw products of scaled tiles -> those of the elements. `row_scales` is at the thread's first row; the other is 8 below.
template <int N>
DEVICE void unscale(float (&x)[N][4], const float* row_scales, const float* column_scales, int lane) {
  const float upper = row_scales[0], lower = row_scales[8];
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float2 scale = *(const float2*)(column_scales + 8 * n + 2 * (lane % 4));
    x[n][0] = x[n][0] * upper * scale.x, x[n][1] = x[n][1] * upper * scale.y;
    x[n][2] = x[n][2] * lower * scale.x, x[n][3] = x[n][3] * lower * scale.y;
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

// c[i] += a b[i] * factor. Tensor cores truncate where an FPU rounds, so chains are short: the small products come first,
// while the sum is small, and an FMA adds what came of one step.
template <int N>
DEVICE void add_product(float (&c)[N][4], const OperandA& a, const OperandB (&b)[N], const RowFactor& factor) {
  float fresh[N][4];
  zero(fresh);
#pragma unroll
  for (int i = 0; i < N; i++) mma_m16n8k16_half(fresh[i], a.small, b[i].big);
#pragma unroll
  for (int i = 0; i < N; i++) mma_m16n8k16_half(fresh[i], a.big, b[i].small);
#pragma unroll
  for (int i = 0; i < N; i++) mma_m16n8k16_half(fresh[i], a.big, b[i].big);
#pragma unroll
  for (int i = 0; i < N; i++) {
#pragma unroll
    for (int e = 0; e < 4; e++) c[i][e] = fmaf(fresh[i][e], factor.back[e / 2], c[i][e]);
  }
}

#if SCATTERED
// The k's of an A operand that have something other than zero in one of the warp's rows.
DEVICE Live live_columns(const OperandA& a) {
  const u32 lanes = 0x11111111u << (threadIdx.x & 3);
  Live live;
#pragma unroll
  for (int s = 0; s < 2; s++) {
    const u32 any = (a.big[2 * s] | a.big[2 * s + 1] | a.small[2 * s] | a.small[2 * s + 1]) & 0x7fff7fffu;
    live.row[s][0] = (__ballot_sync(~0u, (any & 0xffffu) != 0) & lanes) != 0;
    live.row[s][1] = (__ballot_sync(~0u, (any >> 16) != 0) & lanes) != 0;
  }
  return live;
}
#endif

// Row r (0, 1) of kTiles accumulator tiles whose B came from load_b_rows: written, or ADDED, times `factor`, as far as they
// lie below `columns`; `row` is where group 0 starts. `pitch` is the true length of the array's rows: vectors need whole
// ones. All four lanes of a row take part: neighbours exchange halves, which makes vectors of four.
template <bool ADDED>
DEVICE void store_row(float* row, const float (&c)[kTiles][4], int r, float factor, int group, int columns, int pitch,
                      int lane) {
  const u32 quad = 0xfu << (lane & 28);
  const bool odd = lane & 1;
#pragma unroll
  for (int i = 0; i < kTiles / 2; i++) {
    const float *even_tile = c[2 * i] + 2 * r, *odd_tile = c[2 * i + 1] + 2 * r;
    const float got0 = __shfl_xor_sync(quad, odd ? even_tile[0] : odd_tile[0], 1);
    const float got1 = __shfl_xor_sync(quad, odd ? even_tile[1] : odd_tile[1], 1);
    const float own0 = odd ? odd_tile[0] : even_tile[0], own1 = odd ? odd_tile[1] : even_tile[1];
    const float x[4] = {times(odd ? got0 : own0, factor), times(odd ? got1 : own1, factor),
                        times(odd ? own0 : got0, factor), times(odd ? own1 : got1, factor)};
    const int column = 8 * kTiles * group + 16 * i + (odd ? 4 : 0) + (lane & 2 ? 8 : 0);
    if (pitch % 4 == 0) {
      if (column >= columns) continue;
      if (ADDED) {
        red_add4(row + column, x[0], x[1], x[2], x[3]);
      } else {
        *(float4*)(row + column) = make_float4(x[0], x[1], x[2], x[3]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (column + k >= columns) continue;
        if (ADDED) {
          red_add(row + column + k, x[k]);
        } else {
          row[column + k] = x[k];
        }
      }
    }
  }
}
