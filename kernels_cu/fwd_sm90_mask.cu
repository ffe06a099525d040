// Ahead of fwd_sm90.cu: mask and segments of each tile. Whether something is left to see (bit n % 32 of word n / 32 of the
// tile's row of words, which start as zeros) and whether nothing is hidden (as many words further on); and the mask itself,
// a bit a score, in the order in which the consumers' threads hold scores: 4 words a row, of which word q has bit 2 x + z for
// column 8 x + 2 q + z. One block a tile. Positions (window, lengths) are not looked at.
//
// Defines: MASK, SEGMENTS, BLOCK_M, BLOCK_N, QUADS (4 columns of the mask are an aligned word). Params: aux0-2 strides of the
// bitmap, aux4 heads, aux5 query blocks and aux6 key blocks of it; live_tiles, and scratch for the packed mask, which has no
// axis along which the mask's stride is 0.
#include "params.cuh"

#define WARPS 8
#define PER_LANE (BLOCK_N / 32)
static_assert(PER_LANE == 4 || !MASK, "four ballots make a row's words");

extern "C" __global__ void __launch_bounds__(32 * WARPS) fwd_sm90_mask(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks_m = (int)p.aux5, blocks_n = (int)p.aux6;
  const int n = blockIdx.x % blocks_n;
  const int m = blockIdx.x / blocks_n % blocks_m;
  const int head_of_all = blockIdx.x / blocks_n / blocks_m, batch = head_of_all / (int)p.aux4, head = head_of_all - batch * (int)p.aux4;
  const int column = n * BLOCK_N + PER_LANE * lane;

  const int bits_rows = p.mask_stride_q ? BLOCK_M : 1;
  const i64 per_m = (i64)blocks_n * bits_rows * 4, per_head = p.mask_stride_q ? blocks_m * per_m : per_m;
  u32* bits = (u32*)p.scratch + n * bits_rows * 4;
  if (p.mask_stride_q) bits += m * per_m;
  if (p.mask_stride_h) bits += head * per_head;
  if (p.mask_stride_b) bits += batch * (p.mask_stride_h ? p.aux4 * per_head : per_head);
  const u8* mask = MASK ? p.mask + batch * p.mask_stride_b + head * p.mask_stride_h + column * p.mask_stride_k : nullptr;
  int ids[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; k++)
    ids[k] = SEGMENTS && column + k < p.seqlen_kv ? p.kv_segment_ids[batch * p.seqlen_kv + column + k] : 0;

  bool live = false, whole = true;
#pragma unroll 4
  for (int r = warp; r < BLOCK_M; r += WARPS) {
    const int row = m * BLOCK_M + r;
    const bool inside = row < p.seqlen_q;
    u32 four = 0;
    if (MASK && QUADS && inside && column < p.seqlen_kv) four = *(const u32*)(mask + row * p.mask_stride_q);
    const int id = SEGMENTS && inside ? p.q_segment_ids[batch * p.seqlen_q + row] : 0;
    [[maybe_unused]] u32 words[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
      const bool real = inside && column + k < p.seqlen_kv;
      bool shown = real;
      if (MASK && shown) shown = QUADS ? four >> (8 * k) & 0xff : mask[row * p.mask_stride_q + k * p.mask_stride_k];
      words[k] = MASK ? __ballot_sync(~0u, shown) : 0;
      if (SEGMENTS && id != ids[k]) shown = false;
      live |= shown;
      whole &= shown || !real;
    }
#if MASK
    if (lane < 4 && (bits_rows > 1 || row == 0)) {
      const u32 even = lane & 1 ? words[2] : words[0], odd = lane & 1 ? words[3] : words[1];
      bits[r * 4 + lane] = (even >> (lane >> 1) & 0x55555555u) | (odd >> (lane >> 1) & 0x55555555u) << 1;
    }
#endif
  }
  live = __syncthreads_or(live);
  whole = __syncthreads_and(whole);
  u32* words = p.live_tiles + batch * p.aux0 + head * p.aux1 + m * p.aux2 + n / 32;
  if (threadIdx.x == 0 && live) atomicOr(words, 1u << (n % 32));
  if (threadIdx.x == 0 && whole) atomicOr(words + p.aux2 / 2, 1u << (n % 32));
}
