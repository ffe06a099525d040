// Products of float32 and float64 whose operands are rounded, if at all, on the way from shared memory to registers; what
// wide.cuh includes for WIDE 0 to 2. No attention here.
//
// Fragments have the places of an m16n8k8 product, with g = lane / 4 and t = lane % 4: A (g, t), (g + 8, t), (g, t + 4),
// (g + 8, t + 4); B (t, g), (t + 4, g). A step of 16 along k is two such products, or one m16n8k16. The order of k is free
// as long as A and B share it, which saves all shuffles: a thread reads 16 contiguous bytes of a row as its k's, and an
// accumulator's columns 2t, 2t + 1 serve as A's k = t, t + 4 against rows 2t, 2t + 1 of B.
#pragma once

// ---- tiles in shared memory ---------------------------------------------------------------------------------------

// ROWS x COLS, row-major; rows are whole multiples of 128 bytes. The XOR on a row's chunks makes both ways of reading
// free of bank conflicts: eight consecutive rows, 64 bytes of each (two rows a phase); rows 2t + e or t + 4e, 32 bytes.
template <int ROWS, int COLS>
struct WideTile {
  static constexpr int kRows = ROWS, kCols = COLS;
  static constexpr int kRowBytes = COLS * (int)sizeof(Element);
  static constexpr int kBytes = ROWS * kRowBytes;
  static_assert(kRowBytes % 128 == 0 && ROWS % 8 == 0, "whole lines, whole groups of rows");

  static DEVICE u32 swizzle(int row) { return (((row >> 1) & 3) << 1) ^ ((row & 1) << 2); }
  static DEVICE u32 offset(int row, int chunk) { return row * kRowBytes + ((u32)chunk ^ swizzle(row)) * 16; }

  // The lane's part of an address, by what the lanes read: 64 bytes of each of rows g; 32 bytes of rows 2t or of rows t.
  static DEVICE u32 lane_a(int lane) { return offset(lane / 4, lane % 4); }
  static DEVICE u32 lane_b(int lane) { return lane_a(lane); }
  static DEVICE u32 lane_b_rows(int lane) { return offset(2 * (lane % 4), lane / 4); }
  static DEVICE u32 lane_b_rows_apart(int lane) { return offset(lane % 4, lane / 4); }

  // With `base` a tile's address plus one of these: `row` rows further down (8 n, or the step from a lane's row to its
  // partner: pairs 1, else 4) and `half` lines of 64 bytes to the right. `flip` is 1 at a partner row.
  static DEVICE u32 at(u32 base, int row, int half, int flip = 0) {
    return (base ^ (((half ^ flip) & 1) * 64)) + row * kRowBytes + (half >> 1) * 128;
  }
};

DEVICE void unpack(Element (&x)[kVector], uint4 bits) {
#if DTYPE == F32
  x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
  x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
#else
  x[0] = __hiloint2double(bits.y, bits.x), x[1] = __hiloint2double(bits.w, bits.z);
#endif
}

// Starts copying rows [first, last) of the tile (its own numbering) from `from` + row * stride, `columns` of each; all else
// becomes zero and is never read.
template <typename T, int THREADS>
DEVICE void load_wide(u32 to, const Element* from, i64 stride, int first, int last, int columns, int thread) {
  constexpr int STEP = THREADS / 8, PAGES = T::kRowBytes / 128;
  const int chunk = thread % 8;
  const Element* source = from + (i64)(thread / 8) * stride + chunk * kVector;
#pragma unroll
  for (int pass = 0; pass < (T::kRows + STEP - 1) / STEP; pass++) {
    const int row = pass * STEP + thread / 8;
    if (T::kRows % STEP == 0 || row < T::kRows) {
      const bool inside = row >= first && row < last;
#pragma unroll
      for (int page = 0; page < PAGES; page++) {
        const int left = inside ? columns - (page * 8 + chunk) * kVector : 0;  // columns from this chunk on
        const u32 address = to + T::offset(row, page * 8 + chunk);
#if ALIGNED
        cp_async16_partial(address, source + page * 8 * kVector, min(max(left, 0), kVector) * (int)sizeof(Element));
#else
#pragma unroll
        for (int i = 0; i < kVector; i++) {
          cp_async_element(address + i * (int)sizeof(Element), source + page * 8 * kVector + i, i < left);
        }
#endif
      }
    }
    source += STEP * stride;
  }
}

// ---- operands: 16 steps of k --------------------------------------------------------------------------------------

// One operand of two m16n8k8 products: PLACES is 4 for A (16 rows), 2 for B (8 columns).
template <int PLACES>
struct Operand {
#if WIDE == 2
  u32 pair[PLACES];
#elif WIDE == 1
  u32 big[2][PLACES];
#else
  Element x[2][PLACES];
#endif

  // Whether k = t (e 0) or t + 4 (1) of product s meets something other than zero in the thread's places of A.
  DEVICE bool occupied(int s, int e) const {
#if WIDE == 2
    return ((pair[2 * s] | pair[2 * s + 1]) >> (16 * e) & 0x7fff) != 0;
#elif WIDE == 0
    return x[s][2 * e] != 0 || x[s][2 * e + 1] != 0;
#else
    return ((big[s][2 * e] | big[s][2 * e + 1]) & 0x7fffffff) != 0;
#endif
  }

  DEVICE void set(const Element (&value)[2][PLACES]) {
#if WIDE == 2
    // k = 2t, 2t + 1 (+ 8) of the m16n8k16 product stand for k = t, t + 4 of the first (second) m16n8k8.
    constexpr int ROWS = PLACES / 2;
#pragma unroll
    for (int i = 0; i < PLACES; i++) pair[i] = pack_bf16(value[i / ROWS][i % ROWS], value[i / ROWS][i % ROWS + ROWS]);
#else
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int i = 0; i < PLACES; i++) {
#if WIDE == 1
        big[step][i] = to_tf32(value[step][i]);
#else
        x[step][i] = value[step][i];
#endif
      }
    }
#endif
  }
};

using OperandA = Operand<4>;
using OperandB = Operand<2>;

// The thread's four of columns 16 * step .. of a row: k = t, t + 4 of two products. `base`: T::lane_a.
template <typename T>
DEVICE void load_row(Element (&x)[4], u32 base, int row, int step) {
#pragma unroll
  for (int i = 0; i < 4 / kVector; i++) {
    Element chunk[kVector];
    unpack(chunk, load_shared16(T::at(base, row, step * (4 / kVector) + i)));
#pragma unroll
    for (int j = 0; j < kVector; j++) x[i * kVector + j] = chunk[j];
  }
}

// A: 16 tile rows from `row` on along m, tile columns 16 * step .. along k. `base`: T::lane_a.
template <typename T>
DEVICE OperandA load_a(u32 base, int row, int step) {
  Element x[4], y[4];
  load_row<T>(x, base, row, step);
  load_row<T>(y, base, row + 8, step);
  const Element value[2][4] = {{x[0], y[0], x[1], y[1]}, {x[2], y[2], x[3], y[3]}};
  OperandA a;
  a.set(value);
  return a;
}

// B: 8 tile rows from `row` on along n, tile columns 16 * step .. along k. `base`: T::lane_a.
template <typename T>
DEVICE OperandB load_b(u32 base, int row, int step) {
  Element x[4];
  load_row<T>(x, base, row, step);
  const Element value[2][2] = {{x[0], x[1]}, {x[2], x[3]}};
  OperandB b;
  b.set(value);
  return b;
}

// kVector B operands side by side: tile rows row .. row + 15 along k, tile columns 8 * kVector * group .. along n, where
// column g of operand i is tile column 8 * kVector * group + kVector * g + i. PAIRED: k = t, t + 4 of product s are rows
// 8 s + 2t, 8 s + 2t + 1, as from_accumulator() has it; otherwise rows 8 s + t, 8 s + t + 4. `base`: T::lane_b_rows or
// T::lane_b_rows_apart.
template <typename T, bool PAIRED>
DEVICE void load_b_rows(OperandB (&b)[kTiles], u32 base, int row, int group, const Live& live) {
  Element value[kVector][2][2];
#pragma unroll
  for (int s = 0; s < 2; s++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#if SCATTERED
      const bool alive = live.row[s][e];
#else
      const bool alive = true;
#endif
      Element x[kVector];
      unpack(x, load_shared16(T::at(base, row + 8 * s + (PAIRED ? e : 4 * e), 2 * group, e)));
#pragma unroll
      for (int i = 0; i < kVector; i++) value[i][s][e] = alive ? x[i] : (Element)0;
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; i++) b[i].set(value[i]);
}

// Two accumulator tiles side by side (16 columns) as the A operand of a product over those columns.
DEVICE OperandA from_accumulator(const Accum (&left)[4], const Accum (&right)[4], const RowFactor&) {
  Element value[2][4] = {{left[0], left[2], left[1], left[3]}, {right[0], right[2], right[1], right[3]}};
  OperandA a;
  a.set(value);
  return a;
}

// ---- products -----------------------------------------------------------------------------------------------------

#if WIDE == 0
// One product of 8 along k for each of N operands side by side.
template <int N>
DEVICE void multiply_step(Accum (&c)[N][4], const Element (&a)[4], const OperandB (&b)[N], int s) {
#if DTYPE == F64 && __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < N; i++) mma_m16n8k8_f64(c[i], a, b[i].x[s][0], b[i].x[s][1]);
#else
  // Each lane gathers its two rows of A and, operand by operand, its two columns of B.
  const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
  Element rows[8][2];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    rows[k][0] = __shfl_sync(~0u, a[k / 4 * 2], 4 * g + k % 4);
    rows[k][1] = __shfl_sync(~0u, a[k / 4 * 2 + 1], 4 * g + k % 4);
  }
#pragma unroll
  for (int i = 0; i < N; i++) {
    Accum sum[4] = {};  // of eight products, then one addition: one by one, long sums lose a bit
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const Element left = __shfl_sync(~0u, b[i].x[s][k / 4], 8 * t + k % 4);
      const Element right = __shfl_sync(~0u, b[i].x[s][k / 4], 8 * t + 4 + k % 4);
      sum[0] += rows[k][0] * left, sum[1] += rows[k][0] * right;
      sum[2] += rows[k][1] * left, sum[3] += rows[k][1] * right;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) c[i][j] += sum[j];
  }
#endif
}
#endif

// c[i] += a b[i]. Dependent products stand N apart.
template <int N>
DEVICE void add_product(Accum (&c)[N][4], const OperandA& a, const OperandB (&b)[N], const RowFactor&) {
#if WIDE == 2
#pragma unroll
  for (int i = 0; i < N; i++) mma_m16n8k16_bf16(c[i], a.pair, b[i].pair[0], b[i].pair[1]);
#elif WIDE == 0
#pragma unroll
  for (int s = 0; s < 2; s++) multiply_step<N>(c, a.x[s], b, s);
#else
#pragma unroll
  for (int s = 0; s < 2; s++) {
#pragma unroll
    for (int i = 0; i < N; i++) mma_m16n8k8_tf32(c[i], a.big[s], b[i].big[s][0], b[i].big[s][1]);
  }
#endif
}

#if SCATTERED
// The k's of an A operand that have something other than zero in one of the warp's rows.
DEVICE Live live_columns(const OperandA& a) {
  const u32 lanes = 0x11111111u << (threadIdx.x & 3);
  Live live;
#pragma unroll
  for (int s = 0; s < 2; s++) {
#pragma unroll
    for (int e = 0; e < 2; e++) live.row[s][e] = (__ballot_sync(~0u, a.occupied(s, e)) & lanes) != 0;
  }
  return live;
}
#endif

// Row r (0, 1) of kVector accumulator tiles whose B came from load_b_rows: 2 * kVector contiguous elements a thread. They
// are written, or ADDED, times `factor`, as far as they lie below `columns`; `row` is where group 0 starts. `pitch` is the
// true length of the array's rows: vectors need whole ones.
template <bool ADDED>
DEVICE void store_row(Element* row, const Accum (&c)[kTiles][4], int r, Accum factor, int group, int columns, int pitch,
                      int lane) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int column = 8 * kVector * group + kVector * (2 * (lane % 4) + e);
    Element x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; i++) x[i] = times(c[i][2 * r + e], factor);
    if (pitch % kVector == 0) {
      if (column >= columns) continue;
#if DTYPE == F32
      if (ADDED) {
        red_add4(row + column, x[0], x[1], x[2], x[3]);
      } else {
        *(float4*)(row + column) = make_float4(x[0], x[1], x[2], x[3]);
      }
#else
      if (ADDED) {
        red_add(row + column, x[0]), red_add(row + column + 1, x[1]);
      } else {
        *(double2*)(row + column) = make_double2(x[0], x[1]);
      }
#endif
    } else {
#pragma unroll
      for (int i = 0; i < kVector; i++) {
        if (column + i >= columns) continue;
        if (ADDED) {
          red_add(row + column + i, x[i]);
        } else {
          row[column + i] = x[i];
        }
      }
    }
  }
}
