// After the backward's main kernel: float32 accumulators become gradients of the operands' dtype. bwd_dq scales dq_accum
// into dq; bwd_reduce sums the partial dk and dv of a group of q heads in head order. No attention here.
#include "bwd.cuh"

#define THREADS 128

#if WANT_DQ
// One block of threads a block of rows of one (batch entry, q head).
extern "C" __global__ void __launch_bounds__(THREADS) bwd_dq(const __grid_constant__ Params p) {
  const int blocks = (int)p.aux3, block = (int)(blockIdx.x % blocks);
  const int head = (int)(blockIdx.x / blocks % p.heads_q), batch = (int)(blockIdx.x / blocks / p.heads_q);
  const Entry entry = load_entry(p, batch);
  if (block * BLOCK_M >= rows_q(p, entry)) return;
  const float* tile = dq_tile(p, entry, head, block);
  const float scale = softmax_scale(p);
  u16* dq = (u16*)p.dq + base_q(entry, head, p.dq_stride_b, p.dq_stride_h, p.dq_stride_s);
  // A thread's share: rows g and g + 8 of a 16x8 piece.
#pragma unroll 1
  for (int i = threadIdx.x; i < BLOCK_M / 16 * HEAD_DIM; i += THREADS) {
    const int chunk = i % (HEAD_DIM / 8), g = i / (HEAD_DIM / 8) % 8, strip = i / HEAD_DIM;
    const float* piece = tile + (strip * (HEAD_DIM / 8) + chunk) * 128;
    float x[2][8];
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
      for (int e = 0; e < 4; e++) x[e / 2][2 * t + e % 2] = scale * piece[accum_index(4 * g + t, e)];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = block * BLOCK_M + strip * 16 + g + 8 * half;
      if (row < rows_q(p, entry)) store_chunk(dq + row * p.dq_stride_s, 8 * chunk, (int)p.head_dim, x[half]);
    }
  }
}
#endif

// dst (batch, kv head, rows, columns) = sum over parts of accum (batch, kv head, part, rows, PITCH), rows of the whole array.
// aux3 blocks of threads serve one (batch, kv head), a thread 8 columns of a row.
template <int PITCH>
DEVICE void reduce_group(const Params& p, const float* accum, u16* dst, i64 stride_b, i64 stride_h, i64 stride_s, int columns) {
  const i64 rows = p.aux6;  // of the array: seqlen_kv, or of all sequences
  const int blocks = (int)p.aux3, entry = (int)blockIdx.x / blocks, parts = (int)(p.heads_q / p.heads_kv / p.aux7);
  const int head = entry % (int)p.heads_kv, batch = entry / (int)p.heads_kv;
  const i64 i = (i64)((int)blockIdx.x % blocks) * THREADS + threadIdx.x;
  const i64 row = i / (PITCH / 8);
  const int chunk = (int)(i % (PITCH / 8));
  if (row >= rows) return;
#if VARLEN
  if (row < p.cu_seqlens_k[0] || row >= p.cu_seqlens_k[p.batch]) return;  // belongs to no sequence
#endif
  float sum[8] = {};
  for (int part = 0; part < parts; part++) {
    const float4* from =
        (const float4*)(accum + (((i64)entry * parts + part) * rows + row) * PITCH + 8 * chunk);
    const float4 a = from[0], b = from[1];
    const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += x[j];
  }
  store_chunk(dst + batch * stride_b + head * stride_h + row * stride_s, 8 * chunk, columns, sum);
}

#if WANT_DK
extern "C" __global__ void __launch_bounds__(THREADS) bwd_reduce_dk(const __grid_constant__ Params p) {
  reduce_group<HEAD_DIM>(p, p.dk_accum, (u16*)p.dk, p.dk_stride_b, p.dk_stride_h, p.dk_stride_s, (int)p.head_dim);
}
#endif

#if WANT_DV
extern "C" __global__ void __launch_bounds__(THREADS) bwd_reduce_dv(const __grid_constant__ Params p) {
  reduce_group<HEAD_DIM_V>(p, p.dv_accum, (u16*)p.dv, p.dv_stride_b, p.dv_stride_h, p.dv_stride_s, (int)p.head_dim_v);
}
#endif
