// Dropout's random numbers: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11), a function of (seed, batch, q head, row, column) alone. cuattn/philox.py is its twin. No attention here.
//
// One call serves the 8 columns {32 g + 8 t + 2 j + h : t < 4, h < 2} of one row, where j = (column / 2) % 4: just what
// a thread of an m16n8 accumulator owns of 32 columns. Word t holds column pair t; its low half is h = 0.
#pragma once
#include "params.cuh"

struct Philox4 {
  u32 word[4];
};

__device__ __forceinline__ Philox4 philox4x32_7(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 7; round++) {
    const u32 hi0 = __umulhi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const u32 hi1 = __umulhi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The seed and where this call's scores begin in the whole problem, of which a shard sees only a part.
struct DropoutKey {
  u64 seed;
  u32 batch, head;  // of the entry and head at hand, in the whole
  u32 row, group;   // of row 0 and column 0
};

// Params::dropout_seed points to seed, first batch, first head, first row, first column (a multiple of 32); a null
// pointer means dropout_seed_value and a problem that is whole.
__device__ __forceinline__ DropoutKey dropout_key(const Params& p, int batch, int head) {
  if (!p.dropout_seed) return {(u64)p.dropout_seed_value, (u32)batch, (u32)head, 0, 0};
  const i64* key = p.dropout_seed;
  return {(u64)key[0], (u32)(key[1] + batch), (u32)(key[2] + head), (u32)key[3], (u32)(key[4] >> 5) * 4};
}

// The call that holds `column` of `row`: its group of 32 columns and its place j in the quad.
__device__ __forceinline__ Philox4 dropout_words(const DropoutKey& key, int row, int column) {
  const u32 group = key.group + (u32)(column >> 5) * 4 + ((column >> 1) & 3);
  return philox4x32_7(group, key.row + (u32)row, key.head, key.batch, (u32)key.seed, (u32)(key.seed >> 32));
}

// The 16-bit draw of `column` out of its call; kept when below Params::dropout_threshold (0 .. 65536).
__device__ __forceinline__ u32 dropout_draw(const Philox4& words, int column) {
  // selects: an index that is not known at compile time would put the words into memory
  const u32 low = column & 8 ? words.word[1] : words.word[0], high = column & 8 ? words.word[3] : words.word[2];
  return ((column & 16 ? high : low) >> (16 * (column & 1))) & 0xFFFFu;
}
