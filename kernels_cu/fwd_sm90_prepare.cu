// Runs ahead of fwd_sm90.cu: zeroes its tile counter and, for packed sequences, lists them for it: those with most keys
// first, each with the number of its first tile. One block. No attention here.
//
// Defines: BLOCK_M, VARLEN. Params: semaphore (2 words); VARLEN: cu_seqlens, batch, heads_q, and scratch, which becomes
// int order[batch], start[batch + 1] (start[batch]: tiles in all).
#include "ptx_sm90.cuh"

#define THREADS 1024
#define SORTED 2048  // more sequences than these stay in their order: ranks are counted, batch / THREADS * batch steps

__device__ __forceinline__ int length(const int* cu_seqlens, int i) { return cu_seqlens[i + 1] - cu_seqlens[i]; }

// Sum over this thread and those before it; `total` over all. `warp_sums` holds 32 words.
__device__ __forceinline__ int scan(int x, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int y = __shfl_up_sync(~0u, x, i);
    if (lane >= i) x += y;
  }
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  int sum = warp_sums[lane];
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int y = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += y;
  }
  total = __shfl_sync(~0u, sum, 31);
  const int before = __shfl_sync(~0u, sum, (warp + 31) % 32);
  __syncthreads();
  return x + (warp ? before : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fwd_sm90_prepare(const __grid_constant__ Params p) {
  dependency_launch();
  if (threadIdx.x < 2) p.semaphore[threadIdx.x] = 0;
#if VARLEN
  __shared__ int warp_sums[32];
  const int batch = (int)p.batch;
  int* order = (int*)p.scratch;
  int* start = order + batch;
  for (int i = threadIdx.x; i < batch; i += THREADS) {
    int rank = i;
    if (batch <= SORTED) {
      const int mine = length(p.cu_seqlens_k, i);
      rank = 0;
      for (int j = 0; j < batch; j++) {
        const int other = length(p.cu_seqlens_k, j);
        rank += other > mine || (other == mine && j < i);
      }
    }
    order[rank] = i;
  }
  __syncthreads();
  int before = 0;
  for (int base = 0; base < batch; base += THREADS) {
    const int i = base + threadIdx.x;
    int tiles = 0, total;
    if (i < batch) tiles = (length(p.cu_seqlens_q, order[i]) + BLOCK_M - 1) / BLOCK_M * (int)p.heads_q;
    const int upto = before + scan(tiles, warp_sums, total);
    if (i < batch) start[i] = upto - tiles;
    before += total;
  }
  if (threadIdx.x == 0) start[batch] = before;
#endif
}
