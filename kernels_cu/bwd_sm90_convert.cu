// After bwd_sm90.cu: the float32 sums of dQ, which lie as wgmma's transposed accumulator left them, times the softmax scale,
// into dQ. One CTA for each query block of a head. Aux words as in bwd_sm90.cu.
#include "config.cuh"
#include "ptx_sm90.cuh"

#define THREADS 256
#define SPLIT_DIM (HEAD_DIM == 128)               // the two halves of a tile are head dims; otherwise query rows
#define PART_ROWS (SPLIT_DIM ? BLOCK_M : BLOCK_M / 2)
#define PITCH (HEAD_DIM + 8)                      // elements; keeps the transposing stores free of bank conflicts
#define PIECES (HEAD_DIM / 8)

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_convert(const __grid_constant__ Params p) {
  __shared__ alignas(16) u16 tile[BLOCK_M * PITCH];
  const int blocks = (int)p.aux1, head_index = blockIdx.x / blocks, m = blockIdx.x - head_index * blocks;
  const int batch = head_index / (int)p.heads_q, head = head_index - batch * (int)p.heads_q;
  const int part = threadIdx.x >> 7, thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const float scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  const float4* sums =
      (const float4*)(p.dq_accum + (i64)blockIdx.x * (BLOCK_M * HEAD_DIM) + part * (BLOCK_M * HEAD_DIM / 2)) + thread;
  float4 x[PART_ROWS / 8];
#pragma unroll
  for (int i = 0; i < PART_ROWS / 8; i++) x[i] = sums[i * 128];
  u16* to = tile + ((SPLIT_DIM ? 0 : part * PART_ROWS) + 2 * (lane & 3)) * PITCH + (SPLIT_DIM ? part * 64 : 0) + warp * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < PART_ROWS / 8; i++) {
    const u32 low = pack_half2(x[i].x * scale, x[i].y * scale), high = pack_half2(x[i].z * scale, x[i].w * scale);
    to[8 * i * PITCH] = (u16)low;
    to[(8 * i + 1) * PITCH] = (u16)(low >> 16);
    to[8 * i * PITCH + 8] = (u16)high;
    to[(8 * i + 1) * PITCH + 8] = (u16)(high >> 16);
  }
  __syncthreads();
  u16* dq = (u16*)p.dq + batch * p.dq_stride_b + head * p.dq_stride_h;
  const int row0 = (int)p.aux4 + m * BLOCK_M;
#pragma unroll
  for (int i = 0; i < BLOCK_M * PIECES / THREADS; i++) {
    const int r = (i * THREADS + threadIdx.x) / PIECES, piece = threadIdx.x % PIECES;
    if (row0 + r < (int)p.aux5 && piece * 8 < (int)p.head_dim)
      *(uint4*)(dq + (row0 + r) * p.dq_stride_s + piece * 8) = *(const uint4*)(tile + r * PITCH + piece * 8);
  }
}
