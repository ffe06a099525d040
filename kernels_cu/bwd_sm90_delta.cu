// Before bwd_sm90.cu: delta = rowsum(dout * out) - dlse and LSE in base 2 of the visible rows, both padded to whole query blocks so
// that a padded or empty row has weight exp2(s - inf) = 0; turns set to zero. One CTA for each query block of a head. And the sinks' gradient out of delta and LSE, in a fixed order.
#include "bwd_sm90.cuh"

#define THREADS 256
#define LANES (HEAD_DIM_V / 8)  // that share a row, 16 bytes each
#define ROWS (THREADS / LANES)  // rows at a time
#define PASSES (BLOCK_M / ROWS)
static_assert(BLOCK_M % ROWS == 0, "whole passes");

__device__ __forceinline__ float dot2(u32 a, u32 b) {
  float2 x = unpack_half2(a), y = unpack_half2(b);
  return x.x * y.x + x.y * y.y;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_delta(const __grid_constant__ Params p) {
  dependency_launch();
  const int head_index = blockIdx.x / (int)p.aux1, m = blockIdx.x - head_index * (int)p.aux1;
  const int batch = head_index / (int)p.heads_q, head = head_index - batch * (int)p.heads_q;
  const Visible v = load_visible(p, batch);
  if (m * BLOCK_M >= v.rows) return;
  const int lane = threadIdx.x % LANES, first = m * BLOCK_M + threadIdx.x / LANES;
  const bool live = lane * 8 < (int)p.head_dim_v;
  const u16* out = (const u16*)p.out + first_row(v, head, p.out_stride_b, p.out_stride_h, p.out_stride_s) + lane * 8;
  const u16* dout = (const u16*)p.dout + first_row(v, head, p.dout_stride_b, p.dout_stride_h, p.dout_stride_s) + lane * 8;
  const i64 lse_at = first_row(v, head, p.lse_stride_b, p.lse_stride_h, 1);
  uint4 a[PASSES], b[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const i64 row = first + i * ROWS;
    a[i] = b[i] = make_uint4(0, 0, 0, 0);
    if (row < v.rows && live) {
      a[i] = *(const uint4*)(out + row * p.out_stride_s);
      b[i] = *(const uint4*)(dout + row * p.dout_stride_s);
    }
  }
  const i64 sums = first_sum(p, v, head) + m * BLOCK_M;
#if HEAD_DIM > 128  // whose kernel only adds
  float4* dq = (float4*)(p.dq_accum + sums * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < BLOCK_M * HEAD_DIM / 4 / THREADS; i++) dq[i * THREADS + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
#endif
  if (threadIdx.x < 2) p.semaphore[sums / BLOCK_M * 2 + threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    float x = dot2(a[i].x, b[i].x) + dot2(a[i].y, b[i].y) + dot2(a[i].z, b[i].z) + dot2(a[i].w, b[i].w);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    const int row = first + i * ROWS;
    if (lane == 0) {
      float lse = (float)infinity();
      if (row < v.rows) {
        const float natural = ((const float*)p.lse)[lse_at + row];
        if (natural != -infinity()) lse = natural * (float)LOG2E;
        if (p.dlse) x -= ((const float*)p.dlse)[lse_at + row];
      }
      const i64 to = sums + i * ROWS + threadIdx.x / LANES;
      ((float*)p.delta)[to] = x;
      ((float*)p.scratch)[to] = lse;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_dsinks(const __grid_constant__ Params p) {
  __shared__ float parts[THREADS];
  const int head = blockIdx.x;
  const float sink = ((const float*)p.sinks)[head] * (float)LOG2E;
  float sum = 0.f;
  for (int batch = 0; batch < p.batch; batch++) {
    const Visible v = load_visible(p, batch);
    const i64 at = first_sum(p, v, head);
    for (int row = threadIdx.x; row < v.rows; row += THREADS)
      sum -= exp2_approx(sink - ((const float*)p.scratch)[at + row]) * ((const float*)p.delta)[at + row];
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll
  for (int i = THREADS / 2; i > 0; i /= 2) {
    if (threadIdx.x < i) parts[threadIdx.x] += parts[threadIdx.x + i];
    __syncthreads();
  }
  if (threadIdx.x == 0) ((float*)p.dsinks)[head] = parts[0];
}
