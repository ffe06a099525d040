// Products of tiles on the tensor cores through mma.sync: accumulators in registers, operands from shared memory or
// registers. No attention here.
//
// Acc<M, N> is a warp's accumulator of 16 M rows by 8 N columns: thread (g = lane / 4, t = lane % 4) holds in
// x[m][n][2 r + c] the element of row 16 m + 8 r + g and column 8 n + 2 t + c.
#pragma once
#include "tile.cuh"

template <int M, int N>
struct Acc {
  float x[M][N][4];

  DEVICE void zero() {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[m][n][i] = 0.f;
  }
};

// A operands of one k step of 16: 16 M rows.
template <int M>
struct FragmentA {
  u32 r[M][4];
};

// Rounds columns 16 k .. 16 k + 15 of an accumulator to DTYPE, which is the A operand of k step k as it stands.
template <int M, int N>
DEVICE FragmentA<M> to_a(const Acc<M, N>& c, int k) {
  FragmentA<M> a;
#pragma unroll
  for (int m = 0; m < M; m++) {
    a.r[m][0] = pack(c.x[m][2 * k][0], c.x[m][2 * k][1]);
    a.r[m][1] = pack(c.x[m][2 * k][2], c.x[m][2 * k][3]);
    a.r[m][2] = pack(c.x[m][2 * k + 1][0], c.x[m][2 * k + 1][1]);
    a.r[m][3] = pack(c.x[m][2 * k + 1][2], c.x[m][2 * k + 1][3]);
  }
  return a;
}

// A operand of k step k: rows row0 .. row0 + 16 M of tile TA, columns 16 k ... `base` is its address + TA::lane_down.
template <typename TA, int M>
DEVICE FragmentA<M> load_a(u32 base, int row0, int k) {
  FragmentA<M> a;
#pragma unroll
  for (int m = 0; m < M; m++) ldmatrix_x4(a.r[m], TA::patch(base, row0 + 16 * m, 16 * k));
  return a;
}

// c += a bT for one k step, where tile TB holds the n's as rows and k as columns (K in Q KT). `base`: TB::lane_across.
template <typename TB, int M, int N>
DEVICE void mma_step_nt(Acc<M, N>& c, const FragmentA<M>& a, u32 base, int n0, int k) {
#pragma unroll
  for (int n = 0; n < N / 2; n++) {
    u32 b[4];
    ldmatrix_x4(b, TB::patch(base, n0 + 16 * n, 16 * k));
#pragma unroll
    for (int m = 0; m < M; m++) {
      mma_m16n8k16(c.x[m][2 * n], a.r[m], b[0], b[1]);
      mma_m16n8k16(c.x[m][2 * n + 1], a.r[m], b[2], b[3]);
    }
  }
}

// c += a b for one k step, where tile TB holds k as rows and the n's as columns (V in P V). `base`: TB::lane_down.
// `keep` ANDs with the two B registers: a k row can be dropped bit by bit.
template <typename TB, int M, int N, bool FILTER = false>
DEVICE void mma_step_nn(Acc<M, N>& c, const FragmentA<M>& a, u32 base, int k, int n0, u32 keep0 = ~0u, u32 keep1 = ~0u) {
#pragma unroll
  for (int n = 0; n < N / 2; n++) {
    u32 b[4];
    ldmatrix_x4_trans(b, TB::patch(base, 16 * k, n0 + 16 * n));
    if (FILTER) {
      b[0] &= keep0;
      b[2] &= keep0;
      b[1] &= keep1;
      b[3] &= keep1;
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      mma_m16n8k16(c.x[m][2 * n], a.r[m], b[0], b[1]);
      mma_m16n8k16(c.x[m][2 * n + 1], a.r[m], b[2], b[3]);
    }
  }
}
