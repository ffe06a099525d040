// Before bwd_sm90.cu: row sums, the sections' progress set to zero. And the sinks' gradient out of delta and LSE, in a fixed order.
#include "bwd_sm90_rows.cuh"

#define THREADS 256
#define SUM_WARPS 4

extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS) attention_backward_sm90_delta(const __grid_constant__ Params p) {
  dependency_launch();
#if WANT_DQ
  const int progress = 2 * (last_section(p) + 1), threads = 32 * SUM_WARPS;
  for (int i = blockIdx.x * threads + threadIdx.x; i < progress; i += gridDim.x * threads) shares_cleared(p, 0)[i] = 0;
#endif
  const int piece = blockIdx.x * SUM_WARPS + (threadIdx.x >> 5), slot = piece / SUM_PIECES, h = slot / (int)p.aux1;
  const int batch = VARLEN ? 0 : h / (int)p.heads_q, head = h - batch * (int)p.heads_q;
  if (h >= (VARLEN ? p.heads_q : p.batch * p.heads_q)) return;
  const Slot s = slot_of(p, p.cu_seqlens_q, batch, slot - h * (int)p.aux1, BLOCK_M);
  const Visible v = load_visible(p, s.batch);
  if (s.block * BLOCK_M < v.rows)
    sum_rows(p, v, head, s.block * BLOCK_M + (piece - slot * SUM_PIECES) * PIECE_ROWS, h < p.aux3 * group_of(p), threadIdx.x & 31);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_dsinks(const __grid_constant__ Params p) {
  __shared__ float parts[THREADS];
  const int head = blockIdx.x;
  // NOTE: of LSE as it was given, since in base 2 that of a huge sink is infinite. A row that sees nothing may have any delta.
  const float sink = ((const float*)p.sinks)[head];
  float sum = 0.f;
  for (int batch = 0; batch < p.batch; batch++) {
    const Visible v = load_visible(p, batch);
    const float* lse = (const float*)p.lse + first_row(v, head, p.lse_stride_b, p.lse_stride_h, 1);
    const float* delta = (const float*)p.delta + first_sum(p, v, head);
    for (int row = threadIdx.x; row < v.rows; row += THREADS)
      if (lse[row] != -infinity()) sum -= exp2_approx((sink - lse[row]) * (float)LOG2E) * delta[row];
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
