// Finds the tiles in which mask and segments leave something to see, ahead of the kernels that skip the others. One warp a
// tile sets its bit in the bitmap of mask.cuh, which starts as zeros. Positions (window, lengths) are not looked at.
//
// Defines: BLOCK_M, BLOCK_N, and config.cuh's MASK and SEGMENTS. Params: aux0-2 bitmap strides, aux4 heads, aux5 query
// blocks and aux6 key blocks of the bitmap, aux7 tiles in all.
#include "mask.cuh"

constexpr int AT_ONCE = 8;  // loads in flight a lane

extern "C" __global__ void __launch_bounds__(128) live_tiles(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32;
  i64 tile = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  if (tile >= p.aux7) return;
  const int n = (int)(tile % p.aux6);
  tile /= p.aux6;
  const int m = (int)(tile % p.aux5);
  tile /= p.aux5;
  const int head = (int)(tile % p.aux4), batch = (int)(tile / p.aux4);
  const u8* mask = MASK ? p.mask + batch * p.mask_stride_b + head * p.mask_stride_h : nullptr;
  const int* q_segments = SEGMENTS ? p.q_segment_ids + batch * p.seqlen_q : nullptr;
  const int* kv_segments = SEGMENTS ? p.kv_segment_ids + batch * p.seqlen_kv : nullptr;
  for (int start = 0; start < BLOCK_M * BLOCK_N; start += 32 * AT_ONCE) {
    bool live = false;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int element = start + 32 * i + lane;
      const int row = m * BLOCK_M + element / BLOCK_N, column = n * BLOCK_N + element % BLOCK_N;
      if (element < BLOCK_M * BLOCK_N && row < p.seqlen_q && column < p.seqlen_kv) {
        live |= (!MASK || mask[row * p.mask_stride_q + column * p.mask_stride_k]) &&
                (!SEGMENTS || q_segments[row] == kv_segments[column]);
      }
    }
    if (__any_sync(0xffffffffu, live)) {
      u32* word = p.live_tiles + batch * p.aux0 + head * p.aux1 + m * p.aux2 + n / 32;
      if (lane == 0) atomicOr(word, 1u << (n % 32));
      return;
    }
  }
}
