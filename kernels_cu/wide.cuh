// Matrix products of float32 and float64, whatever the machine multiplies with: what is common to both ways, and the choice
// between them. WIDE picks:
//   4  three f16 products of halves (float32-accurate, wide_halves.cuh)
//   1  one TF32 product     2  one bfloat16 product     0  as the element is: DMMA, or plain FMA (wide_direct.cuh)
// No attention here.
//
// Accumulators: with g = lane / 4 and t = lane % 4 a thread holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each
// tile of 16 x 8. Work comes in steps of 16 along k.
#pragma once
#include "ptx.cuh"

#ifndef WIDE
#define WIDE 0
#endif
static_assert(DTYPE == F32 || DTYPE == F64, "16-bit types have mma.cuh");
static_assert(WIDE == 0 || DTYPE == F32, "only float32 is split or rounded");

#define SCALED (WIDE == 4)  // rows of tiles are scaled by powers of two

constexpr int kVector = 16 / sizeof(Element);  // elements of 16 bytes
#ifndef SIDE
#define SIDE 2
#endif
#ifndef TIE  // accumulator tiles from one tie() to the next; 0: none
#define TIE 0
#endif
constexpr int kTiles = SCALED ? SIDE : kVector;  // accumulator tiles that share an A operand and are worked on side by side

// Which of the thread's four rows along k (of products s = 0, 1: k = t, t + 4) count; the others are zero, whatever the
// tile holds there.
struct Live {
#if SCATTERED
  bool row[2][2];
#endif
};

// Powers of two for the thread's two rows of an accumulator: what they are multiplied with to serve as an operand, and what
// takes that back from the product. Nothing unless SCALED.
struct RowFactor {
#if SCALED
  float up[2] = {1, 1}, back[2] = {1, 1};
#endif
};

// To be called after the sums of `d` tiles. NOTE: otherwise ptxas sinks add_product()'s additions below all products of a
// loop, keeps what each product came to in registers of its own, and spills the sums.
DEVICE void tie(int d, Accum sum) {
#if SCALED && TIE
  if (d % TIE == 0) end_schedule(sum);
#endif
}

template <int N>
DEVICE void zero(Accum (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

// Tiles first .. first + N - 1 of an accumulator.
template <int N, int ALL>
DEVICE Accum (&part(Accum (&c)[ALL][4], int first))[N][4] {
  return *reinterpret_cast<Accum(*)[N][4]>(&c[first]);
}

// x * factor, 0 at factor 0 whatever x is.
DEVICE Accum times(Accum x, Accum factor) { return factor == 0 ? (Accum)0 : x * factor; }

#if SCATTERED
// Bit 2 n + e: whether some row of the warp has something in column 2t + e of accumulator tile n.
template <int N, typename Predicate>
DEVICE u32 occupied(const Accum (&c)[N][4], Predicate something) {
  static_assert(N <= 16, "two bits a tile");
  const u32 lanes = 0x11111111u << (threadIdx.x & 3);  // those that hold the same columns
  u32 bits = 0;
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const bool any = something(c[n][e]) || something(c[n][2 + e]);
      bits |= (__ballot_sync(~0u, any) & lanes ? 1u : 0u) << (2 * n + e);
    }
  }
  return bits;
}

// Step k's four bits of occupied(): rows of the other operand that nothing multiplies count as zero.
DEVICE Live live_rows(u32 bits, int k) {
  bits >>= 4 * k;
  return {{{(bits & 1) != 0, (bits & 2) != 0}, {(bits & 4) != 0, (bits & 8) != 0}}};
}

#endif

#if SCALED
#include "wide_halves.cuh"
#else
#include "wide_direct.cuh"
#endif
