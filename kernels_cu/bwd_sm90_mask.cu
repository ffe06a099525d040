// Ahead of the Hopper backward: mask and segments of each tile of BLOCK_M rows and BLOCK_N keys, both counted among the visible ones
// (bwd_sm90.cuh). Whether something is left to see (bit m % 32 of word m / 32 of the key block's words, which start as zeros) and
// whether nothing is hidden (as many words further on); and the mask itself, a bit a score, in the order in which the kernel's
// threads hold scores: bit i % 32 of word i / 32 for s[i], 256 threads' words together. One block of threads a tile. Behind the words
// of an entry's and head's key blocks lie those of its query blocks, which say by bits n whether something is left to see.
//
// Defines: BLOCK_M, BLOCK_N (128, or 64 for bwd_sm90_wide.cu), config.cuh's that matter, and QUADS (a lane's keys of the mask are an
// aligned word). Params as bwd_sm90.cuh says, but aux0 heads, aux1 query blocks and aux2 key blocks; scratch is the packed mask,
// which has no axis along which the mask's stride is 0.
#include "bwd_sm90.cuh"

#define WARPS 8
#define PER_LANE (BLOCK_N / 32)
#define STRIDE (BLOCK_N + 4)  // bytes of a row in shared memory: spread over the banks
#define ONES 0x01010101u

// Bytes of the mask from `column` on in a row, one a key; ones beyond the arrays' ends, which are not the mask's.
DEVICE u32 mask_bytes(const Params& p, const u8* mask, int row, int column) {
  if (!MASK || row >= p.seqlen_q || column >= p.seqlen_kv) return ONES;
  const u8* from = mask + row * p.mask_stride_q;
  if (QUADS) return PER_LANE == 4 ? *(const u32*)from : *(const u16*)from;
  u32 bytes = 0;
#pragma unroll
  for (int k = 0; k < PER_LANE; k++)
    bytes |= (column + k < p.seqlen_kv && !from[k * p.mask_stride_k] ? 0u : 1u) << (8 * k);
  return bytes;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_backward_sm90_mask(const __grid_constant__ Params p) {
  [[maybe_unused]] __shared__ alignas(4) u8 tile[BLOCK_M * STRIDE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = blockIdx.x % (int)p.aux2, m = blockIdx.x / (int)p.aux2 % (int)p.aux1;
  const int head_of_all = blockIdx.x / (int)p.aux2 / (int)p.aux1, batch = head_of_all / (int)p.aux0;
  const int head = head_of_all - batch * (int)p.aux0;
  const Visible v = load_visible(p, batch);
  const int seen_rows = v.rows - m * BLOCK_M, seen_keys = v.keys - n * BLOCK_N - PER_LANE * lane;
  if (seen_rows <= 0 || v.keys <= n * BLOCK_N) return;
  const int row0 = v.row_begin + m * BLOCK_M, column = v.key_begin + n * BLOCK_N + PER_LANE * lane;
  const u8* mask = MASK ? p.mask + batch * p.mask_stride_b + head * p.mask_stride_h + column * p.mask_stride_k : nullptr;
  // Bytes of this lane's keys that are visible
  const u32 visible = seen_keys >= PER_LANE ? ~0u >> (32 - 8 * PER_LANE) : seen_keys > 0 ? (1u << (8 * seen_keys)) - 1 : 0;
#if SEGMENTS
  int ids[PER_LANE];
#pragma unroll
  for (int k = 0; k < PER_LANE; k++)
    ids[k] = column + k < p.seqlen_kv ? p.kv_segment_ids[batch * p.seqlen_kv + column + k] : 0;
#endif

  bool live = false, whole = true;
#pragma unroll(QUADS ? 8 : 2)
  for (int r = warp; r < BLOCK_M; r += WARPS) {
    u32 shown = mask_bytes(p, mask, row0 + r, column);
#if MASK
    if (PER_LANE == 4)
      *(u32*)(tile + r * STRIDE + 4 * lane) = shown;
    else
      *(u16*)(tile + r * STRIDE + 2 * lane) = (u16)shown;
#endif
#if SEGMENTS
    const int id = row0 + r < p.seqlen_q ? p.q_segment_ids[batch * p.seqlen_q + row0 + r] : 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++)
      if (id != ids[k]) shown &= ~(0xffu << (8 * k));
#endif
    const u32 all = shown | ~visible;
    live |= r < seen_rows && (shown & visible);
    whole &= r >= seen_rows || !((all - ONES) & ~all & 0x80808080u);  // no byte is 0
  }
  live = __syncthreads_or(live);
  whole = __syncthreads_and(whole);
  u32* bitmap = p.live_tiles + batch * p.q_stride_b + head * p.q_stride_h + n * p.q_stride_s + m / 32;
  if (threadIdx.x == 0 && live) atomicOr(bitmap, 1u << (m % 32));
  if (threadIdx.x == 0 && whole) atomicOr(bitmap + p.q_stride_s / 2, 1u << (m % 32));
#if DETERMINISTIC
  u32* of_rows = p.live_tiles + batch * p.q_stride_b + head * p.q_stride_h + p.v_stride_h + m * p.v_stride_s + n / 32;
  if (threadIdx.x == 0 && live) atomicOr(of_rows, 1u << (n % 32));
#endif
#if MASK
  if (m > 0 && !p.k_stride_s) return;  // alike for all query blocks
  // Lane i finds bit i of all words of its warp: warpgroups share the keys of 128, the queries of 64.
  const int key = (BLOCK_N == 128 ? warp : warp % 4) * 16 + 4 * (lane & 2), query = 8 * (lane >> 2) + (lane & 1);
  const u8* from = tile + (query + (BLOCK_N == 128 ? 0 : warp / 4 * (BLOCK_M / 2))) * STRIDE + key;
  const bool counts = BLOCK_N == 128 || lane < BLOCK_M / 4;
  u32* bits = (u32*)p.scratch + batch * p.k_stride_b + head * p.k_stride_h + m * p.k_stride_s + n * (BLOCK_M * 4) + threadIdx.x;
#pragma unroll
  for (int word = 0; word < BLOCK_M / 64; word++) {
    u32 found = 0;
#pragma unroll
    for (int owner = 0; owner < 32; owner++) {
      const bool shown = counts && from[(64 * word + 2 * (owner & 3)) * STRIDE + (owner >> 2)];
      const u32 all = __ballot_sync(~0u, shown);
      if (lane == owner) found = all;
    }
    bits[256 * word] = found;
  }
#endif
}
