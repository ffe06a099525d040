// Before bwd_sm90.cu: delta = rowsum(dout * out) - dlse and LSE in base 2, both padded to whole query blocks so that a
// padded or empty row has weight exp2(s - inf) = 0, and the float32 dQ sums set to zero. One CTA for each query block of a head.
// Aux words as in bwd_sm90.cu.
#include "config.cuh"
#include "ptx_sm90.cuh"

#define THREADS 256
#define LANES (HEAD_DIM_V / 8)  // that share a row, 16 bytes each
#define ROWS (THREADS / LANES)  // rows at a time
#define PASSES (BLOCK_M / ROWS)
static_assert(BLOCK_M % ROWS == 0, "whole passes");
#define LOG2E 1.4426950408889634f
#define INF __int_as_float(0x7f800000)

__device__ __forceinline__ float dot2(u32 a, u32 b) {
  float2 x = unpack_half2(a), y = unpack_half2(b);
  return x.x * y.x + x.y * y.y;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_delta(const __grid_constant__ Params p) {
  const int blocks = (int)p.aux1, head_index = blockIdx.x / blocks, m = blockIdx.x - head_index * blocks;
  const int batch = head_index / (int)p.heads_q, head = head_index - batch * (int)p.heads_q;
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
  const bool live = lane * 8 < (int)p.head_dim_v;
  const u16* out = (const u16*)p.out + batch * p.out_stride_b + head * p.out_stride_h + lane * 8;
  const u16* dout = (const u16*)p.dout + batch * p.dout_stride_b + head * p.dout_stride_h + lane * 8;
  const i64 lse_at = batch * p.lse_stride_b + head * p.lse_stride_h;
  const int row0 = (int)p.aux4 + m * BLOCK_M, end = (int)p.aux5;
  uint4 a[PASSES], b[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int row = row0 + i * ROWS + first;
    a[i] = b[i] = make_uint4(0, 0, 0, 0);
    if (row < end && live) {
      a[i] = *(const uint4*)(out + row * p.out_stride_s);
      b[i] = *(const uint4*)(dout + row * p.dout_stride_s);
    }
  }
  float4* sums = (float4*)(p.dq_accum + (i64)blockIdx.x * (BLOCK_M * HEAD_DIM));
#pragma unroll
  for (int i = 0; i < BLOCK_M * HEAD_DIM / 4 / THREADS; i++) sums[i * THREADS + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    float x = dot2(a[i].x, b[i].x) + dot2(a[i].y, b[i].y) + dot2(a[i].z, b[i].z) + dot2(a[i].w, b[i].w);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    const int row = row0 + i * ROWS + first;
    if (lane == 0) {
      float lse = INF;
      if (row < end) {
        const float natural = ((const float*)p.lse)[lse_at + row];
        if (natural != -INF) lse = natural * LOG2E;
        if (p.dlse) x -= ((const float*)p.dlse)[lse_at + row];
      }
      const i64 to = head_index * p.aux0 + m * BLOCK_M + i * ROWS + first;
      ((float*)p.delta)[to] = x;
      ((float*)p.scratch)[to] = lse;
    }
  }
}
