// The bias's gradient: dS summed over the axes along which the bias is broadcast, in registers and in one fixed order, so
// that it is deterministic and needs no more memory than the bias. Scores are recomputed from LSE, transposed as in bwd.cu.
//
// A block of threads owns one tile of the bias (a broadcast axis counts 1) and one of aux0 parts of the tiles of S that
// add to it; with several parts, part i writes float32 to scratch + i * (elements of the bias), and bwd_dbias_sum adds them
// up. aux1, aux2: batches and heads of the bias; aux4: its elements.
#include "bwd.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define MT (BLOCK_N / WARPS / 16)
#define NT (BLOCK_M / 8)

using QTile = Tile<BLOCK_M, HEAD_DIM>;
using DoTile = Tile<BLOCK_M, HEAD_DIM_V>;
using KTile = Tile<BLOCK_N, HEAD_DIM>;
using VTile = Tile<BLOCK_N, HEAD_DIM_V>;

#define SMEM_K 0
#define SMEM_V (SMEM_K + KTile::kBytes)
#define SMEM_Q (SMEM_V + VTile::kBytes)
#define SMEM_DO (SMEM_Q + QTile::kBytes)
#define SMEM_LSE (SMEM_DO + DoTile::kBytes)  // and delta

static_assert(BIAS, "compiled only with a bias");
static_assert(BLOCK_N % (16 * WARPS) == 0, "warps own whole strips of 16 keys");

extern __shared__ __align__(128) u8 shared[];

// Adds dS of queries m and keys n of one entry and head.
DEVICE void add_tile(Acc<MT, NT>& sum, const Params& p, const Entry& entry, int head, int m, int n) {
  const u32 smem = smem_address(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int row0 = m * BLOCK_M, key0 = n * BLOCK_N, head_kv = head / (int)(p.heads_q / p.heads_kv);
  const Range rows = query_range(entry, key0, min(key0 + BLOCK_N, entry.seqlen_kv));
  const Range keys = key_range(entry, 0, entry.seqlen_q);
  if (rows.first >= row0 + BLOCK_M || rows.last <= max(row0, rows.first)) return;
  const u16* q = (const u16*)p.q + base_q(entry, head, p.q_stride_b, p.q_stride_h, p.q_stride_s) + row0 * p.q_stride_s;
  const u16* dout = (const u16*)p.dout + base_q(entry, head, p.dout_stride_b, p.dout_stride_h, p.dout_stride_s) +
                    row0 * p.dout_stride_s;
  const u16* k = (const u16*)p.k + base_kv(entry, head_kv, p.k_stride_b, p.k_stride_h, p.k_stride_s) + key0 * p.k_stride_s;
  const u16* v = (const u16*)p.v + base_kv(entry, head_kv, p.v_stride_b, p.v_stride_h, p.v_stride_s) + key0 * p.v_stride_s;
  const int first_row = rows.first - row0, last_row = rows.last - row0;
  const int first_key = keys.first - key0, last_key = max(first_key, min(keys.last, entry.seqlen_kv) - key0);
  __syncthreads();  // the tile before is done with
  load_tile<QTile, THREADS, true, WHOLE_D>(smem + SMEM_Q, q, p.q_stride_s, first_row, last_row, (int)p.head_dim, threadIdx.x);
  load_tile<DoTile, THREADS, true, WHOLE_D>(smem + SMEM_DO, dout, p.dout_stride_s, first_row, last_row, (int)p.head_dim_v,
                                           threadIdx.x);
  load_tile<KTile, THREADS, true, WHOLE_D>(smem + SMEM_K, k, p.k_stride_s, first_key, last_key, (int)p.head_dim, threadIdx.x);
  load_tile<VTile, THREADS, true, WHOLE_D>(smem + SMEM_V, v, p.v_stride_s, first_key, last_key, (int)p.head_dim_v,
                                          threadIdx.x);
  const i64 at = base_q(entry, head, p.lse_stride_b, p.lse_stride_h, 1) + row0;
  for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) {
    const bool inside = i >= first_row && i < last_row;
    cp_async4(smem + SMEM_LSE + i * 4, (const float*)p.lse + at + i, inside);
    cp_async4(smem + SMEM_LSE + (BLOCK_M + i) * 4, (const float*)p.delta + at + i, inside);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const float* lse = (const float*)(shared + SMEM_LSE);
  clean_keys<(KTile::kBytes + VTile::kBytes) / 16, THREADS>(smem + SMEM_K);
  clean_queries<QTile, DoTile, THREADS>(smem + SMEM_Q, smem + SMEM_DO, lse);
  __syncthreads();

  Acc<MT, NT> s, dp;
  s.zero();
  dp.zero();
  const u32 k_rows = KTile::patch(smem + SMEM_K + KTile::lane_down(lane), warp * 16 * MT, 0);
  const u32 v_rows = VTile::patch(smem + SMEM_V + VTile::lane_down(lane), warp * 16 * MT, 0);
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    mma_step_nt<QTile>(s, load_a<KTile, MT>(k_rows, 0, i), smem + SMEM_Q + QTile::lane_across(lane), 0, i);
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 16; i++)
    mma_step_nt<DoTile>(dp, load_a<VTile, MT>(v_rows, 0, i), smem + SMEM_DO + DoTile::lane_across(lane), 0, i);
  Scores scores = load_scores(p, entry, head);
  scores.flip = false;
  const int row = 2 * (lane & 3), key = key0 + warp * 16 * MT + lane / 4;
  weights<true, false>(s, dp, p, scores, rows.last, key, row0 + row, lse + row, lse + BLOCK_M + row);
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum.x[i][j][e] += dp.x[i][j][e];
}

// Sums over the tile's queries or keys where the bias is broadcast along them: the sums replace all of what was summed.
DEVICE void sum_queries(Acc<MT, NT>& c) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x = 0.f;
#pragma unroll
      for (int j = 0; j < NT; j++) x += c.x[i][j][2 * r] + c.x[i][j][2 * r + 1];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
#pragma unroll
      for (int j = 0; j < NT; j++) c.x[i][j][2 * r] = c.x[i][j][2 * r + 1] = x;
    }
}

DEVICE void sum_keys(Acc<MT, NT>& c) {
  float* partial = (float*)shared;  // WARPS x BLOCK_M
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = 0.f;
#pragma unroll
      for (int i = 0; i < MT; i++) x += c.x[i][j][e] + c.x[i][j][2 + e];
      x += __shfl_xor_sync(~0u, x, 4);
      x += __shfl_xor_sync(~0u, x, 8);
      x += __shfl_xor_sync(~0u, x, 16);
      if (lane < 4) partial[warp * BLOCK_M + 8 * j + 2 * lane + e] = x;
    }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < NT; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float x = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) x += partial[i * BLOCK_M + 8 * j + 2 * (lane & 3) + e % 2];
#pragma unroll
      for (int i = 0; i < MT; i++) c.x[i][j][e] = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) bwd_dbias(const __grid_constant__ Params p) {
  const bool whole_q = p.dbias_stride_q == 0, whole_k = p.dbias_stride_k == 0;  // broadcast along queries, keys
  const int blocks_m = (int)((p.seqlen_q + BLOCK_M - 1) / BLOCK_M), blocks_n = (int)((p.seqlen_kv + BLOCK_N - 1) / BLOCK_N);
  const int tiles_m = whole_q ? 1 : blocks_m, tiles_n = whole_k ? 1 : blocks_n;
  i64 rest = blockIdx.x;
  const int part = (int)(rest % p.aux0);
  rest /= p.aux0;
  const int tile_n = (int)(rest % tiles_n), tile_m = (int)(rest / tiles_n % tiles_m);
  rest /= (i64)tiles_n * tiles_m;
  const int bias_head = (int)(rest % p.aux2), bias_batch = (int)(rest / p.aux2);

  // The tiles of S that add to this one, key blocks fastest.
  const int count_n = whole_k ? blocks_n : 1, count_m = whole_q ? blocks_m : 1;
  const int count_h = (int)(p.heads_q / p.aux2), count_b = (int)(p.batch / p.aux1);
  const i64 count = (i64)count_n * count_m * count_h * count_b;
  const i64 last = count * (part + 1) / p.aux0;
  Acc<MT, NT> sum;
  sum.zero();
  for (i64 i = count * part / p.aux0; i < last; i++) {
    const int n = (int)(i % count_n) + tile_n;
    const i64 outer = i / count_n;
    const int m = (int)(outer % count_m) + tile_m;
    const int head = (int)(outer / count_m % count_h) + bias_head, batch = (int)(outer / count_m / count_h) + bias_batch;
    add_tile(sum, p, load_entry(p, batch), head, m, n);
  }
  if (whole_q) sum_queries(sum);
  if (whole_k) sum_keys(sum);

  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const i64 at = bias_batch * p.dbias_stride_b + bias_head * p.dbias_stride_h;
  const int rows = whole_q ? 1 : (int)p.seqlen_q, keys = whole_k ? 1 : (int)p.seqlen_kv;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = tile_m * BLOCK_M + 8 * j + 2 * (lane & 3) + e % 2;
        const int key = tile_n * BLOCK_N + warp * 16 * MT + 16 * i + lane / 4 + 8 * (e / 2);
        if (row >= rows || key >= keys) continue;
        const i64 element = at + row * p.dbias_stride_q + key * p.dbias_stride_k;
        if (p.aux0 == 1) {
          ((BiasElement*)p.dbias)[element] = from_accum<BiasElement>(sum.x[i][j][e]);
        } else {
          ((float*)p.scratch)[part * p.aux4 + element] = sum.x[i][j][e];
        }
      }
}
