// Around the backward's main kernel, in float32 and float64: delta = rowsum(dout * out) - dlse for every query row, and the
// sinks' gradient out of it. Neither reads a key or a value.
//
// Rows are counted over whole arrays: aux4 of them in one (batch entry, head), aux5 batch entries (1 when packed).
#include "ptx.cuh"

#ifndef DLSE
#define DLSE 0
#endif

constexpr int THREADS = 128;

// One warp a row.
extern "C" __global__ void __launch_bounds__(THREADS) bwd_wide_delta(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  const i64 index = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const i64 row = index % p.aux4, head = index / p.aux4 % p.heads_q, batch = index / p.aux4 / p.heads_q;
  if (batch >= p.aux5) return;
  const i64 at = batch * p.lse_stride_b + head * p.lse_stride_h + row;
  Accum sum = 0;
  if (((const Accum*)p.lse)[at] != -(Accum)infinity()) {  // an empty row's dout may be anything
    const Element* out = (const Element*)p.out + batch * p.out_stride_b + head * p.out_stride_h + row * p.out_stride_s;
    const Element* dout =
        (const Element*)p.dout + batch * p.dout_stride_b + head * p.dout_stride_h + row * p.dout_stride_s;
    for (int d = lane; d < p.head_dim_v; d += 32) sum += out[d] * dout[d];
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (DLSE) sum -= ((const Accum*)p.dlse)[at];
  }
  if (lane == 0) ((Accum*)p.delta)[at] = sum;
}

// One block a head; a fixed order of summation.
extern "C" __global__ void __launch_bounds__(THREADS) bwd_wide_dsinks(const __grid_constant__ Params p) {
  __shared__ Accum partial[THREADS];
  const int head = blockIdx.x;
  const Accum sink = ((const Accum*)p.sinks)[head];
  Accum sum = 0;
  for (i64 i = threadIdx.x; i < p.aux4 * p.aux5; i += THREADS) {
    const i64 at = i / p.aux4 * p.lse_stride_b + head * p.lse_stride_h + i % p.aux4;
    const Accum lse = ((const Accum*)p.lse)[at];
    if (lse != -(Accum)infinity()) sum -= exp(sink - lse) * ((const Accum*)p.delta)[at];
  }
  partial[threadIdx.x] = sum;
#pragma unroll
  for (int i = THREADS / 2; i > 0; i /= 2) {
    __syncthreads();
    if (threadIdx.x < i) partial[threadIdx.x] += partial[threadIdx.x + i];
  }
  if (threadIdx.x == 0) ((Accum*)p.dsinks)[head] = partial[0];
}
