// What softcap, ALiBi, bias, mask, segments and dropout do to the scores of the Hopper backward's threads, and how rows and keys
// that see nothing are kept out of its products. A thread has N scores s[i], of keys row + 8 (i / 2 & 1) and queries column +
// 8 (i / 4) + (i & 1) of a tile. No products here.
#pragma once
#include "bwd_sm90_block.cuh"

#ifndef BIAS_OF_KEYS  // the bias is the same for all queries
#define BIAS_OF_KEYS 0
#endif
#define NEG_INF __int_as_float(0xff800000)
#define BITS ((N + 31) / 32)  // words of a bit a score

template <int N>
struct Features {
  const Params& p;
  const Work& w;
  const int row, column, keys;  // `keys` of the block, of which there may be more
#if MASK
  const u32* bits;
  u32 shown[BITS];
#endif
#if SEGMENTS
  const int* row_ids;
  int id0, id1;
#endif
#if BIAS && !BIAS_TILES
  const BiasElement* bias;
  i64 bias0, bias1;  // of the two keys
#endif
  float scale;  // of raw products
#if SOFTCAP
  float cap;
  u32 grades[N / 2];  // halves: the softcap's derivative
#endif
#if ALIBI
  const float* slopes;
  int distance;  // of this thread's first query of block 0 from its first key
#endif

  __device__ __forceinline__ Features(const Params& p_, const Work& w_, int row_, int column_, int thread, float softmax_scale)
      : p(p_), w(w_), row(row_), column(column_), keys(w_.seen.keys - w_.n * BLOCK_N) {
    [[maybe_unused]] const int batch = w.seen.entry.batch, key0 = w.seen.key_begin + w.n * BLOCK_N;
#if MASK
    bits = (const u32*)p.mask + batch * p.k_stride_b + w.n * (256 * WORDS) + thread;
#endif
#if SEGMENTS
    const int* key_ids = p.kv_segment_ids + batch * p.seqlen_kv + key0;
    row_ids = p.q_segment_ids + batch * p.seqlen_q + w.seen.row_begin;
    id0 = row < keys ? key_ids[row] : 0;
    id1 = row + 8 < keys ? key_ids[row + 8] : 0;
#endif
#if BIAS && !BIAS_TILES
    bias = (const BiasElement*)p.bias + batch * p.bias_stride_b + w.seen.row_begin * p.bias_stride_q + key0 * p.bias_stride_k;
    bias0 = min(row, keys - 1) * p.bias_stride_k;
    bias1 = min(row + 8, keys - 1) * p.bias_stride_k;
#endif
    scale = NATURAL || SOFTCAP ? softmax_scale : softmax_scale * (float)LOG2E;
#if SOFTCAP
    scale /= (float)p.softcap;
    cap = (float)(NATURAL ? p.softcap : p.softcap * LOG2E);
#endif
#if ALIBI
    slopes = (const float*)p.alibi_slopes + batch * p.alibi_slopes_stride_b;
    distance = w.seen.entry.offset + w.seen.row_begin + column - key0 - row;
#endif
  }

  // What the packed mask says, while products run.
  __device__ __forceinline__ void load_mask([[maybe_unused]] int head, [[maybe_unused]] int m) {
#if MASK
#pragma unroll
    for (int x = 0; x < BITS; x++) shown[x] = bits[head * p.k_stride_h + m * p.k_stride_s + 256 * x];
#endif
  }
  // What mask and segments hide becomes -infinity. `whole`: they hide nothing.
  __device__ __forceinline__ void hide(float (&s)[N], [[maybe_unused]] int m, [[maybe_unused]] bool whole) const {
#if MASK
    constexpr u32 ALL = N % 32 ? (1u << N % 32) - 1 : ~0u;
    bool some = false;
#pragma unroll
    for (int x = 0; x < BITS; x++) some |= (shown[x] & ALL) != ALL;
    if (__any_sync(~0u, some)) {
#pragma unroll
      for (int i = 0; i < N; i++)
        if (!(shown[i / 32] >> (i % 32) & 1)) s[i] = NEG_INF;
    }
#endif
#if SEGMENTS
    if (!whole) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int x = 0; x < 2; x++) {
          const int id = row_ids[min(m * BLOCK_M + column + 2 * i + x, w.seen.rows - 1)];
          if (id != id0) s[i + x] = NEG_INF;
          if (id != id1) s[i + 2 + x] = NEG_INF;
        }
      }
    }
#endif
  }
#if TRANSFORM
  // Raw products become scores before the masks, in base 2 or (NATURAL) natural units. `tile`: get_bias's.
  __device__ __forceinline__ void transform(float (&s)[N], [[maybe_unused]] int head, [[maybe_unused]] int m,
                                            [[maybe_unused]] u32 tile) {
#if ALIBI
    const float far = (float)(m * BLOCK_M + distance), slope = NATURAL ? slopes[head] : slopes[head] * (float)LOG2E;
#endif
#pragma unroll
    for (int x = 0; x < N / 8; x++) {
#if BIAS
      float values[8];
      get_bias(values, x, head, m, tile);
#endif
      [[maybe_unused]] float derivative[2];
#pragma unroll
      for (int i = 8 * x; i < 8 * x + 8; i++) {
#if SOFTCAP
        const float t = tanh_approx(s[i] * scale);
        derivative[i & 1] = fmaf(-t, t, 1.f);
        if (i & 1) grades[i / 2] = pack_f16(derivative[0], derivative[1]);
        float score = t * cap;
#else
        float score = s[i] * scale;
#endif
#if BIAS
        score += values[i % 8];
#endif
#if ALIBI
        score -= slope * fabsf(far + (float)(8 * (i >> 2) + (i & 1) - 4 * (i & 2)));
#endif
#if BIAS  // a select: where the bias hides, the score may be anything
        s[i] = values[i % 8] == NEG_INF ? values[i % 8] : score;
#else
        s[i] = score;
#endif
      }
    }
  }
#endif
  __device__ __forceinline__ float grade([[maybe_unused]] int i) const {
#if SOFTCAP
    const float2 pair = unpack_f16(grades[i / 2]);
    return i & 1 ? pair.y : pair.x;
#else
    return 1.f;
#endif
  }
#if BIAS
  // Of s[8 x .. 8 x + 7], in natural units. BIAS_TILES: out of the tile at `tile` of shared memory, of 64 keys.
  __device__ __forceinline__ void get_bias(float (&values)[8], int x, int head, int m, [[maybe_unused]] u32 tile) const {
#if BIAS_TILES
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, tile + x * 2048);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 pair = unpack_half2(pairs[j]);
      values[2 * j] = pair.x, values[2 * j + 1] = pair.y;
    }
#else
    const BiasElement* b = bias + head * p.bias_stride_h;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int query = min(m * BLOCK_M + column + 16 * x + 2 * (j & 4) + (j & 1), w.seen.rows - 1);
      values[j] = to_accum(b[(BIAS_OF_KEYS ? 0 : query * p.bias_stride_q) + (j & 2 ? bias1 : bias0)]);
    }
#endif
  }
#endif
};

#if CLEANS_KEYS
// What is not finite in this warpgroup's half of K or V becomes zeros. A key that some row sees has made that row's LSE or delta
// infinite or NaN already; one that no row sees must not reach dQ as 0 * NaN. A barrier follows.
template <int SLABS>
__device__ __forceinline__ void clean_keys(u32 tile, int part, int thread) {
  constexpr u32 EXPONENT = DTYPE == F16 ? 0x7c00u : 0x7f80u;
  constexpr int ROUNDS = BLOCK_N / 32;  // of 16 bytes a thread, in half a slab
#pragma unroll 1
  for (int i = 0; i < SLABS * ROUNDS; i++) {
    const u32 at = tile + i / ROUNDS * (BLOCK_N * 128) + part * (BLOCK_N * 64) + i % ROUNDS * 2048 + thread * 16;
    u32 word[4];
    shared_load_v4(at, word[0], word[1], word[2], word[3]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if ((word[j] & EXPONENT) == EXPONENT) word[j] &= 0xffff0000u;
      if ((word[j] >> 16 & EXPONENT) == EXPONENT) word[j] &= 0xffffu;
    }
    shared_store_v4(at, word[0], word[1], word[2], word[3]);
  }
  proxy_fence();
}
#endif

#if SCATTERED
// Rows of Q and dO that see no key, as their LSE at `lse` tells, become zeros. Each warpgroup writes them all, before its own reads.
__device__ __forceinline__ void clean_rows(u32 q, u32 dout, u32 lse, int rows, int part, int thread) {
  constexpr u32 NONE = 0x7f800000u;
  bool none = false;
#pragma unroll
  for (int row = thread & 31; row < BLOCK_M; row += 32) none |= row < rows && shared_load(lse + 4 * row) == NONE;
  if (!__any_sync(~0u, none)) return;  // all warps look at the same
#pragma unroll 1
  for (int row = thread >> 3; row < BLOCK_M; row += 16) {
    if (shared_load(lse + 4 * row) != NONE) continue;
#pragma unroll
    for (int x = 0; x < D / 64; x++) shared_store_v4(q + (x * BLOCK_M + row) * 128 + (thread & 7) * 16, 0, 0, 0, 0);
#pragma unroll
    for (int x = 0; x < DV / 64; x++) shared_store_v4(dout + (x * BLOCK_M + row) * 128 + (thread & 7) * 16, 0, 0, 0, 0);
  }
  proxy_fence();
  barrier_sync(ID_WARPGROUP + part, 128);
}
#endif

#if DROPOUT
#define DRAWS (BLOCK_M == 128 ? 2 : 4)  // Philox calls that a thread makes side by side
// Bits of the eight weights that a Philox call decides, kept or not, taken in: those of odd and even keys in the lower and the upper
// 16 keys of the group.
__device__ __forceinline__ void take_draws(u32 (&found)[4], const Philox4& call, u32 threshold) {
#pragma unroll
  for (int t = 3; t >= 0; t--) {
    u32 &even = found[t & 2], &odd = found[(t & 2) + 1];
    even = __funnelshift_l((call.word[t] & 0xffffu) - threshold, even, 1);
    odd = __funnelshift_l((call.word[t] >> 16) - threshold, odd, 1);
  }
}
__device__ __forceinline__ Philox4 draw(const DropoutKey& key, int row, int group, int j) {
  return philox4x32_7(key.group + 4 * group + j, key.row + row, key.head, key.batch, (u32)key.seed, (u32)(key.seed >> 32));
}

#if BLOCK_N == 128
// Which of a thread's weights are kept: of s[i] bit 8 (2 (i & 1) + (x & 1)) + 2 (x / 2) + (i / 2 & 1) of word i / 32, where
// x = i / 4 % 8. A Philox call serves 8 of 32 keys, which four lanes of two warps hold two of each: each of them makes the calls of
// a quarter of their queries and tells the others through shared memory. `row` is the tile's first, `group` counts 32 keys.
__device__ __forceinline__ void kept_weights(u32 (&kept)[WORDS], const Params& p, const DropoutKey& key, int row, int group, u32 at,
                                             int part, int warp, int lane) {
  const int pair = 2 * part + (warp >> 1), high = warp & 1, odd = lane >> 2 & 1, j = lane >> 3, c = lane & 3;
  const u32 quad = at + ((pair * 4 + j) * 4 + c) * 16;
#pragma unroll
  for (int word = 0; word < WORDS; word++) {
    u32 found[4] = {0, 0, 0, 0};
#pragma unroll DRAWS
    for (int x = 3; x >= 0; x--)
      take_draws(found, draw(key, row + 64 * word + 16 * x + 8 * high + 2 * c + odd, group, j), (u32)p.dropout_threshold);
    const u32 all = __byte_perm(__byte_perm(found[0], found[1], 0x0040), __byte_perm(found[2], found[3], 0x0040), 0x5410);
    shared_store(quad + word * 1024 + (2 * odd + high) * 4, all);
  }
  barrier_sync(ID_PAIR + pair, 64);
  const u32 own = 2 * high + odd, pick = own | (own + 4) << 4;
#pragma unroll
  for (int word = 0; word < WORDS; word++) {
    u32 from[4];
    shared_load_v4(quad + word * 1024, from[0], from[1], from[2], from[3]);
    kept[word] = __byte_perm(__byte_perm(from[0], from[1], pick), __byte_perm(from[2], from[3], pick), 0x5410);
    asm volatile("" : "+r"(kept[word]));  // now: while the products run
  }
}
__device__ __forceinline__ bool is_kept(const u32 (&kept)[WORDS], int i) {
  const int x = i / 4 % 8;
  return kept[i / 32] >> (8 * (2 * (i & 1) + (x & 1)) + 2 * (x / 2) + (i / 2 & 1)) & 1;
}
#else
// Which of a thread's 16 weights are kept: of s[i] bit 8 (i & 1) + 2 (i / 4) + (i / 2 & 1). Of the two lanes that a Philox call serves
// in a warp each makes the calls of half their queries.
__device__ __forceinline__ void kept_weights(u32 (&kept)[1], const Params& p, const DropoutKey& key, int row, int group, int warp,
                                             int lane) {
  const int high = warp & 1, odd = lane >> 2 & 1;
  u32 found[4] = {0, 0, 0, 0};
#pragma unroll
  for (int x = 3; x >= 0; x--) take_draws(found, draw(key, row + 8 * x + odd, group, lane >> 3), (u32)p.dropout_threshold);
  const u32 even_keys = high ? found[2] : found[0], odd_keys = high ? found[3] : found[1];
  const u32 mine = odd ? odd_keys : even_keys, theirs = __shfl_xor_sync(~0u, odd ? even_keys : odd_keys, 4);
  kept[0] = odd ? theirs | mine << 8 : mine | theirs << 8;
}
__device__ __forceinline__ bool is_kept(const u32 (&kept)[1], int i) {
  return kept[0] >> (8 * (i & 1) + 2 * (i / 4) + (i / 2 & 1)) & 1;
}
#endif
#endif
