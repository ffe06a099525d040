// Ahead of fwd_sm90.cu: mask and segments of each tile. Whether something may be left to see (bit n % 32 of word n / 32 of the
// tile's row of words, which start as zeros) and whether nothing is hidden (as many words further on); and the mask itself, a
// bit a score, in the order in which the consumers' threads hold scores: 4 words a row and block of 128 keys, of which word q has
// bit 2 x + z for column 8 x + 2 q + z. One warp a tile. Tiles that positions hide are left out, else positions
// are not looked at. V_CHUNKS: further warps look for NaN and infinity in V's rows, one a key block of a KV head.
//
// Defines: MASK, SEGMENTS, BLOCK_M, BLOCK_N, WIDE (16 columns of the mask lie on 16 bytes), HAS_LEFT and HAS_RIGHT (0 where lengths
// or offsets vary), DTYPE, V_CHUNKS (16 bytes of a V row each; 0: none are looked at). Params: aux0-2 strides of the bitmap, aux3 =
// first word of V's bits, aux4 heads, aux5 query blocks and aux6 key blocks of it, aux7 tiles; live_tiles, and scratch for the
// packed mask, which has no axis along which the mask's stride is 0.
#include "params.cuh"

#define WARPS 4
#define AT_ONCE 8  // loads in flight a lane
static_assert(BLOCK_N == 128 || !MASK, "a row of a tile is 128 bits");
static_assert(BLOCK_M % (4 * AT_ONCE) == 0 && BLOCK_N % AT_ONCE == 0, "no rest");

// Four bytes' truth as bits 28 to 31.
__device__ __forceinline__ u32 truths(u32 bytes) {
  const u32 flags = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return flags * 0x00204081u;
}

struct Span {
  int low, high;
};

// The least and greatest of ids[first .. end), of which a warp looks at COUNT.
template <int COUNT> __device__ __forceinline__ Span span(const int* ids, int first, i64 end) {
  Span s = {0x7fffffff, -0x7fffffff - 1};
#pragma unroll
  for (int i = 0; i < COUNT; i += 32) {
    const int at = first + i + threadIdx.x % 32;
    if (at < end) s.low = min(s.low, ids[at]), s.high = max(s.high, ids[at]);
  }
  return {__reduce_min_sync(~0u, s.low), __reduce_max_sync(~0u, s.high)};
}

__device__ __forceinline__ void set_bit(u32* words, int n) {
  if (threadIdx.x % 32 == 0) atomicOr(words + n / 32, 1u << (n % 32));
}

// Of a row's 128 bits the lanes l of 8 have columns 16 l to 16 l + 15; lane q < 4 gets word q, in the consumers' order.
__device__ __forceinline__ u32 spread(u32 x) {
  const int lane = threadIdx.x % 32;
  // bit 8 a + 2 q + z to 4 q + 2 a + z: nibble q is the lane's part of word q
  x = (x & 0xc003u) | (x & 0x000cu) << 2 | (x & 0x0030u) << 4 | (x & 0x00c0u) << 6 | (x & 0x0300u) >> 6 | (x & 0x0c00u) >> 4 |
      (x & 0x3000u) >> 2;
  // with the neighbour: bytes, of words 2 (l & 1) and 2 (l & 1) + 1
  u32 y = __shfl_xor_sync(~0u, lane & 1 ? x : x >> 8, 1);
  x = lane & 1 ? x >> 8 : x & 0xffu;
  const u32 low = lane & 1 ? y & 0xffu : x, high = lane & 1 ? x : y & 0xffu;
  x = ((low & 0x0fu) | (high & 0x0fu) << 4) | ((low & 0xf0u) << 4 | (high & 0xf0u) << 8);
  // with the next pair: halves, of word 2 (l & 1) + (l >> 1 & 1)
  y = __shfl_xor_sync(~0u, lane & 2 ? x : x >> 8, 2);
  x = lane & 2 ? (y & 0xffu) | (x & 0xff00u) : (x & 0xffu) | (y & 0xffu) << 8;
  y = __shfl_xor_sync(~0u, x, 4);
  return lane & 4 ? y | x << 16 : x | y << 16;
}

// Packs the tile's part of the mask: 8 lanes a row, 16 columns a lane.
__device__ __forceinline__ void pack_mask(const Params& p, int n, int m, int head, int batch, bool& live, bool& whole) {
  const int lane = threadIdx.x % 32, blocks_m = (int)p.aux5, blocks_n = (int)p.aux6;
  const int rows = p.mask_stride_q ? BLOCK_M : 1, column = n * BLOCK_N + 16 * (lane & 7);
  const i64 per_m = (i64)blocks_n * rows, per_head = p.mask_stride_q ? blocks_m * per_m : per_m;
  const i64 at = (p.mask_stride_b ? batch * (p.mask_stride_h ? p.aux4 * per_head : per_head) : 0) +
                 (p.mask_stride_h ? head * per_head : 0) + (p.mask_stride_q ? m * per_m : 0) + n * rows;
  const int word = (lane & 1) * 2 + (lane >> 1 & 1);  // the lane's after `spread`
  u32* bits = (u32*)p.scratch + 4 * at + word;
  const u8* mask = p.mask + batch * p.mask_stride_b + head * p.mask_stride_h + column * p.mask_stride_k;
  const int real = min(16, (int)p.seqlen_kv - column);  // columns that there are
  const u32 all = real > 0 ? 0xffffu >> (16 - real) : 0;
  live = false;
  for (int top = 0; top < rows; top += 4 * AT_ONCE) {
    uint4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int r = top + (lane >> 3) + 4 * i, row = m * BLOCK_M + r;
      if (WIDE && r < rows && row < p.seqlen_q && real == 16) x[i] = __ldg((const uint4*)(mask + row * p.mask_stride_q));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int r = top + (lane >> 3) + 4 * i, row = m * BLOCK_M + r;
      const bool inside = r < rows && row < p.seqlen_q;
      u32 shown = 0;
      if (WIDE && inside && real == 16)
        shown = truths(x[i].x) >> 28 | (truths(x[i].y) >> 24 & 0xf0u) | (truths(x[i].z) >> 20 & 0xf00u) |
                (truths(x[i].w) >> 16 & 0xf000u);
      else if (inside)
        for (int k = 0; k < real; k++) shown |= (u32)(mask[row * p.mask_stride_q + k * p.mask_stride_k] != 0) << k;
      live |= shown != 0;
      whole &= shown == all || !inside;
      shown = spread(shown);
      if (r < rows && !(lane & 4)) bits[4 * r] = shown;
    }
  }
  live = __any_sync(~0u, live);
  whole = __all_sync(~0u, whole);
}

#if V_CHUNKS
// Whether V's rows of key block n hold neither NaN nor infinity; not looked at where the mask hides none or all of them.
__device__ __forceinline__ bool tame(const Params& p, int n, int head, int batch) {
  const int lane = threadIdx.x % 32, first = n * BLOCK_N, rows = min(BLOCK_N, (int)p.seqlen_kv - first);
  if (p.mask_stride_h == 0) {
    bool any = false, all = true;
    for (int r = lane; r < rows; r += 32) {
      const bool shown = p.mask[batch * p.mask_stride_b + (first + r) * p.mask_stride_k];
      any |= shown, all &= shown;
    }
    if (!__any_sync(~0u, any) || __all_sync(~0u, all)) return false;
  }
  const u32 exponents = DTYPE == 1 ? 0x7f807f80u : 0x7c007c00u, one = DTYPE == 1 ? 0x00800080u : 0x04000400u;
  const u16* v = (const u16*)p.v + batch * p.v_stride_b + head * p.v_stride_h + first * p.v_stride_s;
  u32 found = 0;  // bits 15 and 31: an exponent was all ones
  for (int start = lane; start < rows * V_CHUNKS; start += 32 * AT_ONCE) {
    uint4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = start + 32 * i;
      x[i] = make_uint4(0, 0, 0, 0);
      if (at < rows * V_CHUNKS) x[i] = __ldg((const uint4*)(v + at / V_CHUNKS * p.v_stride_s) + at % V_CHUNKS);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      found |= ((x[i].x & exponents) + one) | ((x[i].y & exponents) + one) | ((x[i].z & exponents) + one) |
               ((x[i].w & exponents) + one);
  }
  return !__any_sync(~0u, found & 0x80008000u);
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS) fwd_sm90_mask(const __grid_constant__ Params p) {
  const int blocks_m = (int)p.aux5, blocks_n = (int)p.aux6;
  u32 tile = blockIdx.x * WARPS + threadIdx.x / 32;
#if V_CHUNKS
  if (tile >= p.aux7) {
    tile -= (u32)p.aux7;
    const int of_all = tile / blocks_n, n = tile % blocks_n, heads = (int)p.heads_kv;
    if (of_all < p.batch * heads && tame(p, n, of_all % heads, of_all / heads))
      set_bit(p.live_tiles + p.aux3 + of_all * (p.aux2 / 2), n);
    return;
  }
#endif
  if (tile >= p.aux7) return;
  const int n = tile % blocks_n, m = tile / blocks_n % blocks_m, head_of_all = tile / blocks_n / blocks_m;
  const int batch = head_of_all / (int)p.aux4, head = head_of_all - batch * (int)p.aux4;
  if (!MASK || p.mask_stride_q) {  // the one row of a mask of keys is packed with the first tiles
    const i64 top = m * BLOCK_M + p.q_offset_value, bottom = min(top + BLOCK_M, p.seqlen_q + p.q_offset_value) - 1;
    if (HAS_RIGHT && n * BLOCK_N > bottom + p.window_right) return;
    if (HAS_LEFT && (n + 1) * BLOCK_N <= top - p.window_left) return;
  }
  bool live = true, whole = true;
  if (MASK) pack_mask(p, n, m, head, batch, live, whole);
#if SEGMENTS
  const Span q = span<BLOCK_M>(p.q_segment_ids + batch * p.seqlen_q, m * BLOCK_M, p.seqlen_q);
  const Span k = span<BLOCK_N>(p.kv_segment_ids + batch * p.seqlen_kv, n * BLOCK_N, p.seqlen_kv);
  live &= q.low <= k.high && k.low <= q.high;
  whole &= q.low == q.high && k.low == k.high && q.low == k.low;
#endif
  u32* words = p.live_tiles + batch * p.aux0 + head * p.aux1 + m * p.aux2;
  if (live) set_bit(words, n);
  if (whole) set_bit(words + p.aux2 / 2, n);
}
