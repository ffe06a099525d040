// After bwd_sm90.cu: the float32 sums of dQ, which lie as wgmma's accumulator left them (transposed up to 128 head dims), times the
// softmax scale, into dQ; zeros where a row sees no key. One CTA for each query block of a head, and for each block of zeros.
#include "bwd_sm90.cuh"

#define THREADS 256
#define SPLIT_DIM (HEAD_DIM == 128)               // the two halves of a tile are head dims; otherwise query rows
#define PART_ROWS (SPLIT_DIM ? BLOCK_M : BLOCK_M / 2)
#define PIECES_OF_PART (HEAD_DIM > 128 ? HEAD_DIM / 16 : PART_ROWS / 8)  // float4s of a thread
#define PITCH (HEAD_DIM + 8)                      // elements; keeps the transposing stores free of bank conflicts
#define PIECES (HEAD_DIM / 8)

extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_sm90_convert(const __grid_constant__ Params p) {
  __shared__ alignas(16) u16 tile[BLOCK_M * PITCH];
  const int head_index = blockIdx.x / (int)p.aux1, m = blockIdx.x - head_index * (int)p.aux1;
  const int batch = head_index / (int)p.heads_q, head = head_index - batch * (int)p.heads_q;
  const Visible v = load_visible(p, batch);
  dependency_wait();
  if (m * BLOCK_M >= v.rows) {
    u16* dq = (u16*)p.dq + (VARLEN ? 0 : batch * p.dq_stride_b) + head * p.dq_stride_h;
    zero_hidden<THREADS>(dq + v.entry.start_q * p.dq_stride_s, p.dq_stride_s, (int)p.head_dim, m - ceil_div(v.rows, BLOCK_M), BLOCK_M,
                         v.row_begin, v.rows, VARLEN ? v.entry.seqlen_q : (int)p.seqlen_q, threadIdx.x);
#if VARLEN
    if (m == p.aux1 - 1)
      zero_unowned<THREADS>(p, dq, p.dq_stride_s, (int)p.head_dim, batch, p.cu_seqlens_q, p.aux5, threadIdx.x);
#endif
    return;
  }
  const int part = threadIdx.x >> 7, thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const float scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  const float4* sums =
      (const float4*)(p.dq_accum + (first_sum(p, v, head) + m * BLOCK_M) * HEAD_DIM + part * (BLOCK_M * HEAD_DIM / 2)) + thread;
  float4 x[PIECES_OF_PART];
#pragma unroll
  for (int i = 0; i < PIECES_OF_PART; i++) x[i] = sums[i * 128];
#if HEAD_DIM > 128
  u32* to = (u32*)(tile + (warp * 16 + (lane >> 2)) * PITCH + part * (HEAD_DIM / 2) + 2 * (lane & 3));
#pragma unroll
  for (int i = 0; i < PIECES_OF_PART; i++) {
    to[4 * i] = pack_half2(x[i].x * scale, x[i].y * scale);
    to[4 * i + 4 * PITCH] = pack_half2(x[i].z * scale, x[i].w * scale);
  }
#else
  u16* to = tile + ((SPLIT_DIM ? 0 : part * PART_ROWS) + 2 * (lane & 3)) * PITCH + (SPLIT_DIM ? part * 64 : 0) + warp * 16 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < PART_ROWS / 8; i++) {
    const u32 low = pack_half2(x[i].x * scale, x[i].y * scale), high = pack_half2(x[i].z * scale, x[i].w * scale);
    to[8 * i * PITCH] = (u16)low;
    to[(8 * i + 1) * PITCH] = (u16)(low >> 16);
    to[8 * i * PITCH + 8] = (u16)high;
    to[(8 * i + 1) * PITCH + 8] = (u16)(high >> 16);
  }
#endif
  __syncthreads();
  u16* dq = (u16*)p.dq + first_row(v, head, p.dq_stride_b, p.dq_stride_h, p.dq_stride_s);
#pragma unroll
  for (int i = 0; i < BLOCK_M * PIECES / THREADS; i++) {
    const int r = (i * THREADS + threadIdx.x) / PIECES, piece = threadIdx.x % PIECES;
    const i64 row = m * BLOCK_M + r;
    if (row < v.rows && piece * 8 < (int)p.head_dim)
      *(uint4*)(dq + row * p.dq_stride_s + piece * 8) = *(const uint4*)(tile + r * PITCH + piece * 8);
  }
}
