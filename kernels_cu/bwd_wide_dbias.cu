// The bias's gradient in float32 and float64: dS summed over the axes along which the bias is broadcast, in registers and in
// one fixed order, so that it is deterministic and needs no more memory than the bias. Scores are recomputed from LSE.
//
// A CTA owns one tile of the bias (a broadcast axis counts 1) and one of aux0 parts of the score tiles that add to it; with
// several parts, part i writes to scratch + i * (elements of the bias), and bwd_dbias_sum adds them up. aux1, aux2:
// batches and heads of the bias; aux4: its elements. Defines: those of bwd_wide.cuh with STAGES 1, and WIDE.
#include "bwd_wide.cuh"

static_assert(BIAS && STAGES == 1, "compiled only with a bias; one buffer");

namespace {

// Adds dS of queries m and keys n of one entry and head.
DEVICE void add_tile(Accum (&sum)[N][4], const Params& p, int batch, int head, int m, int n, u8* shared) {
  Tiles w = {p};
  w.start(load_entry(p, batch), head, n * BLOCK_N, shared);
  if (w.rows.first >= (m + 1) * BLOCK_M || w.rows.last <= max(m * BLOCK_M, w.rows.first)) return;
  __syncthreads();  // the tile before is done with
  w.load_keys(head / (int)(p.heads_q / p.heads_kv), n * BLOCK_N);
  w.load_queries(head, m, 0);
  cp_async_commit();
  cp_async_wait<0>();
  w.split_keys();
  w.split_queries(0);
  __syncthreads();
  Accum s[N][4], ds[N][4];
  u32 seen;
  score_gradients<true>(s, ds, w, m, 0, seen);
#pragma unroll
  for (int j = 0; j < N; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[j][i] += ds[j][i];
  }
}

// Sums over the tile's queries or keys where the bias is broadcast along them: the sums replace all of what was summed.
DEVICE void sum_queries(Accum (&c)[N][4]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    Accum x = 0;
#pragma unroll
    for (int j = 0; j < N; j++) x += c[j][2 * r] + c[j][2 * r + 1];
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
#pragma unroll
    for (int j = 0; j < N; j++) c[j][2 * r] = c[j][2 * r + 1] = x;
  }
}

DEVICE void sum_keys(Accum (&c)[N][4], Accum* partial) {  // partial: NUM_WARPS x BLOCK_M
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < N; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      Accum x = c[j][e] + c[j][2 + e];
#pragma unroll
      for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
      if (lane < 4) partial[warp * BLOCK_M + 8 * j + 2 * lane + e] = x;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < N; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      Accum x = 0;
      for (int i = 0; i < NUM_WARPS; i++) x += partial[i * BLOCK_M + 8 * j + 2 * (lane % 4) + e];
      c[j][e] = c[j][2 + e] = x;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) bwd_wide_dbias(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  const bool whole_q = p.dbias_stride_q == 0, whole_k = p.dbias_stride_k == 0;  // broadcast along queries, keys
  const int blocks_m = (int)((p.seqlen_q + BLOCK_M - 1) / BLOCK_M), blocks_n = (int)((p.seqlen_kv + BLOCK_N - 1) / BLOCK_N);
  const int tiles_m = whole_q ? 1 : blocks_m, tiles_n = whole_k ? 1 : blocks_n;
  i64 rest = blockIdx.x;
  const int part = (int)(rest % p.aux0);
  rest /= p.aux0;
  const int tile_n = (int)(rest % tiles_n), tile_m = (int)(rest / tiles_n % tiles_m);
  rest /= (i64)tiles_n * tiles_m;
  const int bias_head = (int)(rest % p.aux2), bias_batch = (int)(rest / p.aux2);

  // The score tiles that add to this one, key blocks fastest.
  const int count_n = whole_k ? blocks_n : 1, count_m = whole_q ? blocks_m : 1;
  const int count_h = (int)(p.heads_q / p.aux2), count_b = (int)(p.batch / p.aux1);
  const i64 count = (i64)count_n * count_m * count_h * count_b;
  const i64 last = count * (part + 1) / p.aux0;
  Accum sum[N][4];
  zero(sum);
  for (i64 i = count * part / p.aux0; i < last; i++) {
    const i64 outer = i / count_n;
    const int head = (int)(outer / count_m % count_h) + bias_head, batch = (int)(outer / count_m / count_h) + bias_batch;
    add_tile(sum, p, batch, head, (int)(outer % count_m) + tile_m, (int)(i % count_n) + tile_n, shared);
  }
  if (whole_q) sum_queries(sum);
  if (whole_k) sum_keys(sum, (Accum*)shared);

  const int lane = threadIdx.x % 32;
  const i64 at = bias_batch * p.dbias_stride_b + bias_head * p.dbias_stride_h;
  const int rows = whole_q ? 1 : (int)p.seqlen_q, keys = whole_k ? 1 : (int)p.seqlen_kv;
#pragma unroll
  for (int j = 0; j < N; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = tile_m * BLOCK_M + 8 * j + 2 * (lane % 4) + i % 2;
      const int key = tile_n * BLOCK_N + (threadIdx.x / 32) * 16 + lane / 4 + 8 * (i / 2);
      if (row >= rows || key >= keys) continue;
      const i64 element = at + row * p.dbias_stride_q + key * p.dbias_stride_k;
      if (p.aux0 == 1) {
        ((BiasElement*)p.dbias)[element] = (BiasElement)sum[j][i];
      } else {
        ((Accum*)p.scratch)[part * p.aux4 + element] = sum[j][i];
      }
    }
  }
}
