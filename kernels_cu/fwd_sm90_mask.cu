// Ahead of fwd_sm90.cu: mask and segments of each tile. Whether something may be left to see (bit n % 32 of word n / 32 of the
// tile's row of words, which start as zeros) and whether nothing is hidden (as many words further on); and the mask itself, a
// bit a score, in the order in which the consumers' threads hold scores: 4 words a row and block of 128 keys, of which word q has
// bit 2 x + z for column 8 x + 2 q + z. One warp a tile, or two whose keys are 64.
// Tiles that positions hide are left out, else positions are not looked at. V_CHUNKS: further warps look for NaN and infinity in
// V's rows, one a key block of a KV head.
//
// Defines: MASK, SEGMENTS, BLOCK_M, BLOCK_N, WIDE (16 columns of the mask lie on 16 bytes), HAS_LEFT and HAS_RIGHT (0 where lengths
// or offsets vary), DTYPE, V_CHUNKS (16 bytes of a V row each; 0: none are looked at). Params: aux0-2 strides of the bitmap, aux3 =
// first word of V's bits, aux4 heads, aux5 query blocks and aux6 key blocks of it (of KEYS each), aux7 warps of these;
// live_tiles, and scratch for the packed mask, which has no axis along which the mask's stride is 0.
#include "params.cuh"

#define WARPS 4
#define AT_ONCE 8  // loads in flight a lane
#define KEYS (MASK ? 128 : BLOCK_N)  // that a warp looks at
#define PARTS (KEYS / BLOCK_N)       // tiles that these are
static_assert(BLOCK_N == 128 || BLOCK_N == 64 || !MASK, "a row of a warp's is 128 bits");
static_assert(BLOCK_M % (4 * AT_ONCE) == 0 && BLOCK_N % AT_ONCE == 0, "no rest");

// The bits 7 of the bytes that are not 0.
__device__ __forceinline__ u32 truths(u32 bytes) { return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u; }

// A lane's 16 columns, a nibble for each word of the row: of words 0 and 1, or of 2 and 3, in the low bits of either half.
struct Nibbles {
  u32 x, y;
};
// From 4 bytes a word: columns 0-3, 8-11 go to words 0 and 1, columns 4-7, 12-15 to words 2 and 3.
__device__ __forceinline__ Nibbles nibbles(uint4 bytes) {
  const u32 x = truths(bytes.x) >> 2 | truths(bytes.z), y = truths(bytes.y) >> 2 | truths(bytes.w);
  return {(x | x >> 7) >> 5 & 0x000f000fu, (y | y >> 7) >> 5 & 0x000f000fu};
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

// The 8 lanes of a row hand each other their nibbles; lane l < 4 gets word 2 (l & 1) + (l >> 1).
__device__ __forceinline__ u32 gather(Nibbles n) {
  const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
  u32 mine = odd ? n.y : n.x, other = __shfl_xor_sync(~0u, odd ? n.x : n.y, 1);
  mine = odd ? mine << 4 | other : mine | other << 4;
  other = __shfl_xor_sync(~0u, mine, 2);
  mine = __byte_perm(mine, other, second ? 0x0026 : 0x0040);
  return __byte_perm(mine, __shfl_xor_sync(~0u, mine, 4), 0x5410);
}

__device__ __forceinline__ uint4 first_columns(int count) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int here = max(0, min(4, count - 4 * i));
    words[i] = here ? 0x01010101u >> (8 * (4 - here)) : 0;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// The lane's columns of a row, 16 bytes; those that are not there are 0.
__device__ __forceinline__ uint4 load_columns(const Params& p, const u8* from, int real) {
  if (WIDE && real == 16) return __ldg((const uint4*)from);
  u32 words[4] = {};
#pragma unroll
  for (int k = 0; k < 16; k++)
    if (k < real && from[k * p.mask_stride_k]) words[k / 4] |= 1u << (8 * (k % 4));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Packs the warp's part of the mask: 8 lanes a row, 16 columns a lane.
__device__ __forceinline__ void pack_mask(const Params& p, int n, int m, int head, int batch, bool (&live)[PARTS],
                                          bool (&whole)[PARTS]) {
  const int lane = threadIdx.x % 32, blocks_m = (int)p.aux5, blocks_n = (int)p.aux6;
  const int rows = p.mask_stride_q ? BLOCK_M : 1, column = n * KEYS + 16 * (lane & 7);
  const i64 per_m = (i64)blocks_n * rows, per_head = p.mask_stride_q ? blocks_m * per_m : per_m;
  const i64 at = (p.mask_stride_b ? batch * (p.mask_stride_h ? p.aux4 * per_head : per_head) : 0) +
                 (p.mask_stride_h ? head * per_head : 0) + (p.mask_stride_q ? m * per_m : 0) + n * rows;
  u32* bits = (u32*)p.scratch + 4 * at + 2 * (lane & 1) + (lane >> 1 & 1);
  const u8* mask = p.mask + batch * p.mask_stride_b + head * p.mask_stride_h + column * p.mask_stride_k;
  const int real = max(0, min(16, (int)p.seqlen_kv - column));  // columns that there are
  const Nibbles full = nibbles(first_columns(real));
  u32 some = 0, missing = 0;
  for (int top = 0; top < rows; top += 4 * AT_ONCE) {
    uint4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int r = top + (lane >> 3) + 4 * i, row = m * BLOCK_M + r;
      x[i] = make_uint4(0, 0, 0, 0);
      if (r < rows && row < p.seqlen_q) x[i] = load_columns(p, mask + row * p.mask_stride_q, real);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int r = top + (lane >> 3) + 4 * i;
      const Nibbles n = nibbles(x[i]);
      const u32 word = gather(n);
      some |= n.x | n.y;
      if (r < rows && m * BLOCK_M + r < p.seqlen_q) missing |= (full.x & ~n.x) | (full.y & ~n.y);
      if (r < rows && !(lane & 4)) bits[4 * r] = word;
    }
  }
#if PARTS == 1
  live[0] = __any_sync(~0u, some != 0);
  whole[0] = __all_sync(~0u, missing == 0);
#else
  const u32 lives = __ballot_sync(~0u, some != 0), broken = __ballot_sync(~0u, missing != 0);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const u32 lanes = 0x0f0f0f0fu << (4 * part);  // whose columns lie in the part
    live[part] = lives & lanes;
    whole[part] = !(broken & lanes);
  }
#endif
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
    const int of_all = tile / (PARTS * blocks_n), n = tile % (PARTS * blocks_n), heads = (int)p.heads_kv;
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
    if (HAS_RIGHT && n * KEYS > bottom + p.window_right) return;
    if (HAS_LEFT && (n + 1) * KEYS <= top - p.window_left) return;
  }
  bool live[PARTS], whole[PARTS];
  if (MASK) pack_mask(p, n, m, head, batch, live, whole);
#if SEGMENTS
  const Span q = span<BLOCK_M>(p.q_segment_ids + batch * p.seqlen_q, m * BLOCK_M, p.seqlen_q);
#endif
  u32* words = p.live_tiles + batch * p.aux0 + head * p.aux1 + m * p.aux2;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int block = PARTS * n + part;
    if (!MASK) live[part] = whole[part] = true;
#if SEGMENTS
    const Span k = span<BLOCK_N>(p.kv_segment_ids + batch * p.seqlen_kv, block * BLOCK_N, p.seqlen_kv);
    live[part] &= q.low <= k.high && k.low <= q.high;
    whole[part] &= q.low == q.high && k.low == k.high && q.low == k.low;
#endif
    if (live[part]) set_bit(words, block);
    if (whole[part]) set_bit(words + p.aux2 / 2, block);
  }
}
