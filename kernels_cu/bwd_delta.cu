// Before the backward's main kernel: delta = rowsum(dout * out) - dlse for every query row, the zeros that dq_accum
// starts from, and each block's share of the sinks' gradient. It reads no key and no value.
//
// One block of threads serves BLOCK_M rows of one (batch entry, q head); its share of the sink's gradient goes to
// scratch[(batch, head, block)].
#include "bwd.cuh"

#define THREADS 128
#define LANES (HEAD_DIM_V > 128 ? 32 : HEAD_DIM_V > 64 ? 16 : HEAD_DIM_V > 32 ? 8 : 4)  // share a row, 8 columns each

DEVICE float chunk_dot(const u16* a, const u16* b, int columns) {
  float sum = 0.f;
#if ALIGNED
  if (columns <= 0) return 0.f;
  const uint4 x = *(const uint4*)a, y = *(const uint4*)b;
  const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum += to_accum((u16)xs[i]) * to_accum((u16)ys[i]);
    sum += to_accum((u16)(xs[i] >> 16)) * to_accum((u16)(ys[i] >> 16));
  }
#else
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < columns) sum += to_accum(a[i]) * to_accum(b[i]);
#endif
  return sum;
}

DEVICE void zero_dq_accum(const Params& p, const Entry& entry, int head, int block) {
  float4* tile = (float4*)dq_tile(p, entry, head, block);
#pragma unroll
  for (int i = 0; i < BLOCK_M * HEAD_DIM / 4 / THREADS; i++)
    tile[i * THREADS + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
}

extern "C" __global__ void __launch_bounds__(THREADS) bwd_delta(const __grid_constant__ Params p) {
  const int blocks = (int)p.aux3, block = (int)(blockIdx.x % blocks);
  const int head = (int)(blockIdx.x / blocks % p.heads_q), batch = (int)(blockIdx.x / blocks / p.heads_q);
  const Entry entry = load_entry(p, batch);
  const int chunk = threadIdx.x % LANES, columns = (int)p.head_dim_v - 8 * chunk;
#if SINKS
  float sink_sum = 0.f;
  const float sink = ((const float*)p.sinks)[head];
#endif
  if (block * BLOCK_M < rows_q(p, entry)) {
#if WANT_DQ
    zero_dq_accum(p, entry, head, block);
#endif
    const i64 lse_row = base_q(entry, head, p.lse_stride_b, p.lse_stride_h, 1);
    const u16* out = (const u16*)p.out + base_q(entry, head, p.out_stride_b, p.out_stride_h, p.out_stride_s) + 8 * chunk;
    const u16* dout = (const u16*)p.dout + base_q(entry, head, p.dout_stride_b, p.dout_stride_h, p.dout_stride_s) + 8 * chunk;
#pragma unroll
    for (int r = 0; r < BLOCK_M; r += THREADS / LANES) {
      const int row = block * BLOCK_M + r + threadIdx.x / LANES;
      const bool inside = r + threadIdx.x / LANES < BLOCK_M && row < rows_q(p, entry);
      const float lse = inside && row < entry.seqlen_q ? ((const float*)p.lse)[lse_row + row] : -infinity();
      const bool live = lse != -infinity();  // an empty row's dout may be anything
      float sum = 0.f;
      if (live) sum = chunk_dot(out + row * p.out_stride_s, dout + row * p.dout_stride_s, columns);
#pragma unroll
      for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
#if DLSE
      if (live) sum -= ((const float*)p.dlse)[lse_row + row];
#endif
#if SINKS
      if (live && chunk == 0) sink_sum -= exp2_fast((sink - lse) * (float)LOG2E) * sum;
#endif
      if (inside && chunk == 0) ((float*)p.delta)[lse_row + row] = sum;
    }
  }
#if SINKS
  __shared__ float partial[THREADS];
  partial[threadIdx.x] = sink_sum;
  __syncthreads();
#pragma unroll
  for (int i = THREADS / 2; i > 0; i /= 2) {
    if (threadIdx.x < i) partial[threadIdx.x] += partial[threadIdx.x + i];
    __syncthreads();
  }
  if (threadIdx.x == 0) ((float*)p.scratch)[blockIdx.x] = partial[0];
#endif
}

// One block a head: its sink's gradient out of scratch, in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS) bwd_dsinks(const __grid_constant__ Params p) {
  __shared__ float partial[THREADS];
  const int head = blockIdx.x;
  float sum = 0.f;
  for (i64 i = threadIdx.x; i < p.batch * p.aux3; i += THREADS)
    sum += ((const float*)p.scratch)[(i / p.aux3 * p.heads_q + head) * p.aux3 + i % p.aux3];
  partial[threadIdx.x] = sum;
  __syncthreads();
#pragma unroll
  for (int i = THREADS / 2; i > 0; i /= 2) {
    if (threadIdx.x < i) partial[threadIdx.x] += partial[threadIdx.x + i];
    __syncthreads();
  }
  if (threadIdx.x == 0) ((float*)p.dsinks)[head] = partial[0];
}
