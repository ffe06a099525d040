// What fwd_sm90.cu's two kinds of warps share: shared memory, tiles and who gets them; and the producer, which loads.
// Nothing of products and softmax. Configuration: see fwd_sm90.cu.
#pragma once
#include "ptx_sm90.cuh"

// A key in a visited block may be hidden from every row, wherever it lies.
#define SCATTERED (MASK || SEGMENTS || BIAS)
// Key blocks in which mask and segments leave nothing are left out, by fwd_sm90_mask.cu's bitmap.
#define SKIPPING (MASK || SEGMENTS)

// ALIBI without a window: a tile's key blocks are walked from the diagonal down, then from the last one down to it. From
// the last one on scores would rise as the penalty falls, and outgrow their reference again and again.
#define ROTATE (ALIBI && !HAS_LEFT && !HAS_RIGHT && !VARIABLE && !SCATTERED && !SPLIT)

// Each warpgroup walks over the key blocks that its own rows can see: of a tile's first and last one some see nothing.
#define NARROW ((HAS_LEFT || HAS_RIGHT) && BLOCK_M > BLOCK_N && STAGED && !SCATTERED && !SPLIT)

#define NUM_WG (BLOCK_M / 64)
#define NUM_THREADS (128 * (NUM_WG + 1))
#define SLABS ((HEAD_DIM + 63) / 64)
#define SLABS_V ((HEAD_DIM_V + 63) / 64)
#define K_BYTES (BLOCK_N * 128 * SLABS)
#define V_BYTES (BLOCK_N * 128 * SLABS_V)
#define Q_LOAD_BYTES (BLOCK_M * 128 * SLABS)
#define Q_BYTES (BLOCK_M * 128 * (STAGED && SLABS_V > SLABS ? SLABS_V : SLABS))
#define BIAS_BYTES (BIAS_TILES ? BLOCK_M * BLOCK_N * 2 * BIAS : 0)
// BIAS_TILES of float32: one buffer, in which each warpgroup's rows have barriers of their own.
#define BIAS_APART (BIAS_TILES && BIAS == 2)
#define BIAS_STAGES (BIAS_APART ? 1 : STAGES)
#define K_MORE_BYTES (BIAS_APART ? 0 : BIAS_BYTES)  // that come with a block of K
#define SLOT_BYTES 48
#define M_BITS 24  // NARROW: behind a slot's query block come two bits for each warpgroup, see unseen_ends
#define LOOKAHEAD 3  // blocks before a tile's end at which the next is fetched; its request goes out one block earlier
#define STAGED (Q_BUFFERS > 1)
// Q_APART: each warpgroup's rows of Q have barriers of their own. A tile's words then stay for one that is a tile behind.
#define Q_PARTS (Q_APART ? NUM_WG : Q_BUFFERS)
#define SLOTS (Q_APART ? 2 : Q_BUFFERS)
#define LISTED 32  // VARLEN: up to so many sequences are listed by each block itself, which need not wait for the pass ahead then
#define LIST_BYTES (4 * (2 * LISTED + 1) + 4)
#define SEEN_SLOTS (STAGES + 1)  // no warp comes back to a slot before all are done with it: V's stages hold it back
#define ALL_SEEN (~0u >> (32 - BLOCK_N / 4))
#define NEG_INF __int_as_float(0xff800000)
// Query rows of one head in a tile. SPLIT: a power of two, and the tile holds several heads of a group, one below the other.
#define TILE_ROWS (SPLIT ? 1 << (int)p.aux5 : BLOCK_M)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
// A key block that no map holds: arrives as zeros. Stands for the key range of rows that see nothing.
#define EMPTY_BLOCK ((1 << 30) / BLOCK_N + 1)

static_assert(Q_BUFFERS == 1 || Q_BUFFERS == 3, "the last output may still be leaving when the next Q comes");
static_assert(!Q_APART || (Q_BUFFERS == 1 && !SPLIT), "one Q, whose rows are loaded by 64");
static_assert(!SPLIT || !(STAGED || VARLEN || SCATTERED || DROPOUT || LPT), "parts leave from the registers; rows of one head each");
static_assert(!NARROW || (NUM_WG == 3 && BLOCK_N >= 128), "at most one block less at each end; bits of an int");
static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile");

// ---------------------------------------------------------------------------------------------- shared memory
struct Shared {  // addresses
  u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, slot, block, seen, seen_full, bias, bias_full, bias_empty, list;
};

__device__ __forceinline__ Shared shared_layout(u32 base) {
  Shared sh;
  sh.q = (base + 1023) & ~1023u;
  sh.k = sh.q + Q_BUFFERS * Q_BYTES;
  sh.v = sh.k + STAGES * K_BYTES;
  sh.bias = sh.v + STAGES * V_BYTES;      // BIAS_TILES: slabs of 128 bytes; of 16 bits in K's stages
  sh.slot = sh.bias + BIAS_STAGES * BIAS_BYTES;  // what the producer says about the tiles
  sh.seen = sh.slot + SLOT_BYTES * SLOTS;  // SCATTERED: in each slot, a word for each lane of a quad and warp
  sh.list = sh.seen;                           // VARLEN: see list_sequences
  sh.seen_full = sh.seen + (SCATTERED ? SEEN_SLOTS * 4 * NUM_WG * 16 : VARLEN ? LIST_BYTES : 0);
  sh.q_full = sh.seen_full + (SCATTERED ? 8 * SEEN_SLOTS : 0);
  sh.q_empty = sh.q_full + 8 * Q_PARTS;
  sh.k_full = sh.q_empty + 8 * Q_PARTS;
  sh.k_empty = sh.k_full + 8 * STAGES;
  sh.v_full = sh.k_empty + 8 * STAGES;
  sh.v_empty = sh.v_full + 8 * STAGES;
  sh.bias_full = sh.v_empty + 8 * STAGES;
  sh.bias_empty = sh.bias_full + (BIAS_APART ? 8 * NUM_WG : 0);
  sh.block = sh.bias_empty + (BIAS_APART ? 8 * NUM_WG : 0);  // SKIPPING: which key block each stage of K holds
  return sh;
}

__device__ __forceinline__ void init_barriers(const Shared& sh) {
  for (int i = 0; i < Q_PARTS; i++) {
    mbarrier_init(sh.q_full + 8 * i, 1);
    mbarrier_init(sh.q_empty + 8 * i, Q_APART ? 4 : 4 * NUM_WG);
  }
  for (int i = 0; i < STAGES; i++) {
    mbarrier_init(sh.k_full + 8 * i, 1);
    mbarrier_init(sh.v_full + 8 * i, 1);
    mbarrier_init(sh.k_empty + 8 * i, 4 * NUM_WG);
    mbarrier_init(sh.v_empty + 8 * i, 4 * NUM_WG);
  }
  for (int i = 0; BIAS_APART && i < NUM_WG; i++) {
    mbarrier_init(sh.bias_full + 8 * i, 1);
    mbarrier_init(sh.bias_empty + 8 * i, 4);
  }
  for (int i = 0; SCATTERED && i < SEEN_SLOTS; i++) mbarrier_init(sh.seen_full + 8 * i, 4 * NUM_WG);
  mbarrier_init_fence();
}

// ---------------------------------------------------------------------------------------------- tiles
struct Tile {
  int m, head, batch;          // query block (-1: no more tiles), query head, entry
  int q_start, k_start;        // first row of the entry in the maps
  int first, last;             // key blocks, walked downward from first to last
  int live;                    // SKIPPING: how many of them are visited
  int q_len, kv_len, offset;   // of the entry; row i's diagonal is key i + offset
  int part;                    // SPLIT: which of the parts that the key blocks are cut into
  __device__ __forceinline__ int blocks() const { return SKIPPING ? live : first - last + 1; }
  // The key block visited as number b, without SKIPPING.
  __device__ __forceinline__ int block(int b) const {
    if (!ROTATE) return first - b;
    const int start = max(last, min(first, (m * BLOCK_M + BLOCK_M / 2 + offset) / BLOCK_N)), n = start - b;
    return n < last ? n + blocks() : n;
  }
  // keys that the tile's rows can see: [low_key, high_key)
  __device__ __forceinline__ int high_key(const Params& p) const {
    int rows = min((m + 1) * TILE_ROWS, q_len);
    return HAS_RIGHT ? min(kv_len, rows + offset + (int)p.window_right) : kv_len;
  }
  __device__ __forceinline__ int low_key(const Params& p) const {
    return HAS_LEFT ? max(0, m * TILE_ROWS + offset - (int)p.window_left) : 0;
  }
};

// NARROW: bits 0 and 1: the warpgroup's rows see nothing of the tile's first key block, of its last one.
__device__ __forceinline__ int unseen_ends(const Params& p, const Tile& tile, int wg) {
  const int row = tile.m * BLOCK_M + 64 * wg, rows = min(row + 64, tile.q_len);
  const int high = HAS_RIGHT ? min(tile.kv_len, rows + tile.offset + (int)p.window_right) : tile.kv_len;
  const int low = HAS_LEFT ? max(0, row + tile.offset - (int)p.window_left) : 0;
  if (tile.first == EMPTY_BLOCK || rows <= row || high <= low) return 0;
  return (high <= tile.first * BLOCK_N ? 1 : 0) + (low >= (tile.last + 1) * BLOCK_N ? 2 : 0);
}

__device__ __forceinline__ void read_entry(const Params& p, Tile& tile) {
  tile.q_len = (int)p.seqlen_q;
  tile.kv_len = (int)p.seqlen_kv;
  tile.offset = (int)p.q_offset_value;
  tile.q_start = 0;
  tile.k_start = VARIABLE ? 0 : -(int)p.aux3;
#if VARIABLE
  const int b = tile.batch;
#if VARLEN
  tile.q_start = p.cu_seqlens_q[b];
  tile.k_start = p.cu_seqlens_k[b];
  tile.q_len = p.cu_seqlens_q[b + 1] - tile.q_start;
  tile.kv_len = p.cu_seqlens_k[b + 1] - tile.k_start;
#endif
  if (p.q_seqlens) tile.q_len = p.q_seqlens[b];
  if (p.kv_seqlens) tile.kv_len = p.kv_seqlens[b];
  if (p.q_offset_mode == OFFSET_ARRAY) tile.offset = p.q_offset[b];
  if (p.q_offset_mode == OFFSET_BOTTOM_RIGHT) tile.offset = tile.kv_len - tile.q_len;
#endif
}

// The words of a tile's row of the bitmap (fwd_sm90_mask.cu): bit n % 32 of word n / 32 for key block n. Behind those of blocks
// with something to see come as many of blocks in which nothing is hidden.
__device__ __forceinline__ const u32* live_row(const Params& p, const Tile& tile) {
  return p.live_tiles + tile.batch * p.aux4 + tile.head * p.aux5 + tile.m * p.aux6;
}
__device__ __forceinline__ bool whole_block(const Params& p, const Tile& tile, int n) {
  return live_row(p, tile)[(int)p.aux6 / 2 + (n >> 5)] >> (n & 31) & 1;
}
// KEYS_ONLY: whether V has no NaN and no infinity in rows of key block n that may be hidden, by the words behind all others.
__device__ __forceinline__ bool tame_block(const Params& p, const Tile& tile, int n, int group) {
  const i64 rows = p.aux0 * (p.aux4 ? p.batch : 1) * (p.aux5 ? p.heads_q : 1);
  const i64 head = tile.batch * p.heads_kv + tile.head / group;
  return p.live_tiles[p.aux6 * rows + p.aux6 / 2 * head + (n >> 5)] >> (n & 31) & 1;
}
// The next key block to visit below n.
__device__ __forceinline__ int block_below(const Params& p, const Tile& tile, int n) {
  if (!SKIPPING) return n - 1;
  const u32* row = live_row(p, tile);
  int i = (n - 1) >> 5;
  u32 word = row[i] & (~0u >> (31 - ((n - 1) & 31)));
  while (word == 0) word = row[--i];
  return 32 * i + 31 - __clz(word);
}
__device__ __forceinline__ void skip_dead(const Params& p, Tile& tile) {
  tile.live = 1;
  if (tile.first == EMPTY_BLOCK) return;
  const u32* row = live_row(p, tile);
  int live = 0, top = -1;
  for (int i = tile.last >> 5; i <= tile.first >> 5; i++) {
    u32 word = row[i];
    if (i == tile.last >> 5) word &= ~0u << (tile.last & 31);
    if (i == tile.first >> 5) word &= ~0u >> (31 - (tile.first & 31));
    live += __popc(word);
    if (word) top = 32 * i + 31 - __clz(word);
  }
  if (live == 0)
    tile.first = tile.last = EMPTY_BLOCK;
  else
    tile.first = top, tile.live = live;
}

// SPLIT: the blocks of a tile's part, of the n that the parts share evenly.
__device__ __forceinline__ void take_part(const Params& p, Tile& tile) {
  if (tile.first == EMPTY_BLOCK) return;
  const int n = tile.first - tile.last + 1, parts = (int)p.aux4, from = n * tile.part / parts, to = n * (tile.part + 1) / parts;
  tile.last = tile.first - to + 1;
  tile.first -= from;
  if (from == to) tile.first = tile.last = EMPTY_BLOCK;
}

// Tile r of an entry or, without VARLEN, of all entries. LPT: rows from the last one on, inside sections of aux1 heads.
// SPLIT: tiles of the same keys follow each other.
__device__ __forceinline__ void decode_tile(const Params& p, int r, Tile& tile) {
  const int heads = (int)p.heads_q;
#if VARLEN
  read_entry(p, tile);
  const int blocks = (tile.q_len + BLOCK_M - 1) / BLOCK_M;
#else
  const int blocks = (int)p.aux0;
#endif
  int head;  // of this entry, or of all
#if LPT || VARLEN
  const int section = (int)p.aux1, s = r / (section * blocks), x = r - s * (section * blocks);
  const int width = min(section, (VARLEN ? heads : heads * (int)p.batch) - s * section);
  tile.m = blocks - 1 - x / width;
  head = s * section + x % width;
#else
  head = r / blocks;
  tile.m = r - head * blocks;
#endif
#if SPLIT
  const int group = heads / (int)p.heads_kv, width = (int)p.aux6, head_blocks = (group + width - 1) / width;
  const int parts = (int)p.aux4, all = head / parts;  // KV head of all entries
  tile.part = head - all * parts;
  tile.batch = all / (int)p.heads_kv;
  head = (all - tile.batch * (int)p.heads_kv) * group + tile.m % head_blocks * width;
  tile.m /= head_blocks;
  read_entry(p, tile);
#elif !VARLEN
  tile.batch = head / heads;
  head -= tile.batch * heads;
  read_entry(p, tile);
#endif
  tile.head = head;
  const int high = tile.high_key(p), low = tile.low_key(p);
  const bool empty = high <= low || tile.m * TILE_ROWS >= tile.q_len;
  tile.first = empty ? EMPTY_BLOCK : (high - 1) / BLOCK_N;
  tile.last = empty ? EMPTY_BLOCK : low / BLOCK_N;
  if (SKIPPING) skip_dead(p, tile);
  if (SPLIT) take_part(p, tile);
}

// VARLEN: the list of fwd_sm90_prepare.cu, of at most LISTED sequences; by a warp.
__device__ __forceinline__ void list_sequences(const Params& p, u32 list) {
#if VARLEN
  const int lane = threadIdx.x & 31, batch = (int)p.batch;
  int keys = -1, tiles = 0, rank = lane;
  if (lane < batch) {
    keys = p.cu_seqlens_k[lane + 1] - p.cu_seqlens_k[lane];
    tiles = (p.cu_seqlens_q[lane + 1] - p.cu_seqlens_q[lane] + BLOCK_M - 1) / BLOCK_M * (int)p.heads_q;
    rank = 0;
  }
  for (int j = 0; j < batch; j++) {
    const int other = __shfl_sync(~0u, keys, j);
    if (lane < batch) rank += other > keys || (other == keys && j < lane);
  }
  if (lane < batch) shared_store(list + 4 * rank, lane);
  __syncwarp();
  int upto = __shfl_sync(~0u, tiles, lane < batch ? (int)shared_load(list + 4 * lane) : lane);
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int before = __shfl_up_sync(~0u, upto, i);
    if (lane >= i) upto += before;
  }
  if (lane < batch) shared_store(list + 4 * (batch + 1 + lane), upto);
  if (lane == 0) shared_store(list + 4 * batch, 0);
  __syncwarp();
#endif
}

// Hands tiles out; only the producer's issuing thread has one. `request` as late as its latency allows: tiles taken long
// before they are worked on end up on the wrong SM.
struct Scheduler {
  int next;
#if VARLEN
  int cursor, first, end;  // place in the order of fwd_sm90_prepare.cu, this sequence's first tile and the next one's
  const int* order;
#endif
  __device__ __forceinline__ void start(const Params& p, u32 list) {
    next = blockIdx.x;
#if VARLEN
    order = (const int*)p.scratch;
    if (p.batch <= LISTED)
      order = (const int*)__cvta_shared_to_generic(list);
    else
      dependency_wait();
    cursor = -1;
    first = end = 0;
#endif
  }
  __device__ __forceinline__ void request(const Params& p) {
#if SCHEDULE == 1
    next = atomicAdd(p.semaphore, 1) + gridDim.x;
#else
    next += gridDim.x;
#endif
  }
  // The tile asked for; false: there are no more.
  __device__ __forceinline__ bool fetch(const Params& p, Tile& tile) {
#if VARLEN
    const int* starts = order + p.batch;
    while (next >= end) {
      if (++cursor >= (int)p.batch) return false;
      first = end;
      end = starts[cursor + 1];
    }
    tile.batch = order[cursor];
    decode_tile(p, next - first, tile);
#else
    if (next >= (int)p.aux2) return false;
    decode_tile(p, next, tile);
#endif
    return true;
  }
};

// ---------------------------------------------------------------------------------------------- producer
struct Producer {
  const Params& p;
  const Shared& sh;
  const TMap *map_q, *map_k, *map_v, *map_bias;
  int group;

  template <int SLAB_COUNT, int MORE_BYTES = 0>
  __device__ __forceinline__ void load(const TMap* map, u32 base, u32 full, u32 empty, int count, const Tile& tile, int n) {
    const int stage = count % STAGES, head = tile.head / group, batch = VARLEN ? 0 : tile.batch;
    mbarrier_wait(empty + 8 * stage, ((count / STAGES) & 1) ^ 1);
    mbarrier_expect(full + 8 * stage, BLOCK_N * 128 * SLAB_COUNT + MORE_BYTES);
#pragma unroll
    for (int x = 0; x < SLAB_COUNT; x++)
      tma_load(base + stage * (BLOCK_N * 128 * SLAB_COUNT) + x * BLOCK_N * 128, map, 64 * x, tile.k_start + n * BLOCK_N, head, batch,
               full + 8 * stage);
  }
  __device__ __forceinline__ void load_k(int count, const Tile& tile, int n) {
    if (SKIPPING) {
      // before the wait: it takes as long
      const u32 facts = n == EMPTY_BLOCK ? 1 : whole_block(p, tile, n) + 2 * (KEYS_ONLY && tame_block(p, tile, n, group));
      mbarrier_wait(sh.k_empty + 8 * (count % STAGES), ((count / STAGES) & 1) ^ 1);
      shared_store(sh.block + 4 * (count % STAGES), 4 * n + facts);
    }
    load<SLABS, K_MORE_BYTES>(map_k, sh.k, sh.k_full, sh.k_empty, count, tile, n);
#if BIAS_TILES && !BIAS_APART
    const int head = p.bias_stride_h ? tile.head : 0, batch = p.bias_stride_b ? tile.batch : 0;
#pragma unroll
    for (int x = 0; x < BLOCK_N / 64; x++)
      tma_load(sh.bias + count % STAGES * BIAS_BYTES + x * (BLOCK_M * 128), map_bias, n * BLOCK_N + 64 * x, tile.m * BLOCK_M, head,
               batch, sh.k_full + 8 * (count % STAGES));
#endif
  }
  // Of block n, which is number `count`; the last to be loaded of what its step needs.
  __device__ __forceinline__ void load_bias(int count, const Tile& tile, int n) {
#if BIAS_APART
    const int head = p.bias_stride_h ? tile.head : 0, batch = p.bias_stride_b ? tile.batch : 0;
#pragma unroll
    for (int part = 0; part < NUM_WG; part++) {
      const u32 full = sh.bias_full + 8 * part;
      mbarrier_wait(sh.bias_empty + 8 * part, (count & 1) ^ 1);
      mbarrier_expect(full, BIAS_BYTES / NUM_WG);
#pragma unroll
      for (int x = 0; x < BLOCK_N / 32; x++)
        tma_load(sh.bias + x * (BLOCK_M * 128) + part * (64 * 128), map_bias, n * BLOCK_N + 32 * x, tile.m * BLOCK_M + 64 * part,
                 head, batch, full);
    }
#endif
  }
  __device__ __forceinline__ void load_v(int count, const Tile& tile, int n) {
    load<SLABS_V>(map_v, sh.v, sh.v_full, sh.v_empty, count, tile, n);
  }
  // Tile number i of this block: say what it is, load its Q.
  __device__ __forceinline__ void issue_q(int i, bool any, const Tile& tile) {
    const int buffer = i % Q_BUFFERS;
    const u32 slot = sh.slot + SLOT_BYTES * (i % SLOTS), full = sh.q_full + 8 * buffer;
    mbarrier_wait(sh.q_empty + 8 * buffer, ((i / Q_BUFFERS) & 1) ^ 1);
    int m = tile.m;
#pragma unroll
    for (int wg = 0; NARROW && wg < NUM_WG; wg++) m |= unseen_ends(p, tile, wg) << (M_BITS + 2 * wg);
    shared_store_v4(slot, any ? m : -1, tile.head, tile.batch, tile.q_start);
    shared_store_v4(slot + 16, tile.first, tile.last, tile.live, SPLIT ? tile.part : 0);
#if VARIABLE
    shared_store_v4(slot + 32, tile.q_len, tile.kv_len, tile.offset, 0);
#endif
#if Q_APART
#pragma unroll
    for (int part = 0; part < Q_PARTS; part++) {
      if (part > 0) mbarrier_wait(sh.q_empty + 8 * part, (i & 1) ^ 1);
      if (!any) {
        mbarrier_arrive(full + 8 * part);
        continue;
      }
      mbarrier_expect(full + 8 * part, Q_LOAD_BYTES / Q_PARTS);
#pragma unroll
      for (int x = 0; x < SLABS; x++)
        tma_load(sh.q + x * BLOCK_M * 128 + part * 64 * 128, map_q, 64 * x, tile.q_start + tile.m * BLOCK_M + part * 64, tile.head,
                 VARLEN ? 0 : tile.batch, full + 8 * part);
    }
    return;
#endif
    if (!any) return mbarrier_arrive(full);
    mbarrier_expect(full, SPLIT ? TILE_ROWS * (int)p.aux6 * 128 * SLABS : Q_LOAD_BYTES);
#pragma unroll
    for (int x = 0; x < SLABS; x++)
      tma_load(sh.q + buffer * Q_BYTES + x * BLOCK_M * 128, map_q, 64 * x, tile.q_start + tile.m * TILE_ROWS, tile.head,
               VARLEN ? 0 : tile.batch, full);
  }
  // K(0) of the next tile, or, after the last tile, the arrival that ends the consumers' last poll.
  __device__ __forceinline__ void begin(int count, bool any, const Tile& tile) {
    if (any) return load_k(count, tile, tile.block(0));
    mbarrier_wait(sh.k_empty + 8 * (count % STAGES), ((count / STAGES) & 1) ^ 1);
    mbarrier_arrive(sh.k_full + 8 * (count % STAGES));
  }

  // K(0) K(1) V(0) K(2) V(1) ... K(n-1) V(n-2) next-K(0) V(n-1); next-Q three blocks before the end, or last.
  // NOTE: nothing that the consumers wait for may stand behind a wait for what they release later; see Consumer::run.
  __device__ __forceinline__ void run() {
    Scheduler scheduler;
    Tile tile, following;
    int count = 0, i = 0;
    scheduler.start(p, sh.list);
    bool any = scheduler.fetch(p, tile);
    issue_q(0, any, tile);
    if (any) begin(0, true, tile), load_bias(0, tile, tile.block(0));
    if (SCHEDULE == 1) dependency_wait();  // for the zeroed counter
    while (any) {
      const int blocks = tile.blocks();
      int n = tile.block(0);
      bool more = false;
      if (blocks <= LOOKAHEAD + 1) scheduler.request(p);
      if (blocks <= LOOKAHEAD) more = scheduler.fetch(p, following);
#pragma unroll 1
      for (int b = 1; b < blocks; b++) {
        const int above = n;
        n = ROTATE ? tile.block(b) : block_below(p, tile, n);
        load_k(count + b, tile, n);
        load_v(count + b - 1, tile, above);
        load_bias(count + b, tile, n);
        if (b == blocks - LOOKAHEAD - 1) scheduler.request(p);
        if (b == blocks - LOOKAHEAD) {
          more = scheduler.fetch(p, following);
          if (STAGED) issue_q(i + 1, more, following);
        }
      }
      begin(count + blocks, more, following);
      load_v(count + blocks - 1, tile, n);
      if (!STAGED || blocks <= LOOKAHEAD) issue_q(i + 1, more, following);
      if (more) load_bias(count + blocks, following, following.block(0));
      count += blocks;
      i++;
      tile = following;
      any = more;
    }
  }
};
