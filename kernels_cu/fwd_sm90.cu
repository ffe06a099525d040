// Attention forward for Hopper (sm_90a), float16 and bfloat16: TMA, wgmma, warp specialisation. One persistent block per SM:
// a producer warpgroup (one thread of it issues TMA) and BLOCK_M / 64 consumer warpgroups of 64 query rows each.
// Software pipeline without bubbles: S(b) = Q K(b)^T runs beside O += P(b-1) V(b-1), and the first S of the next tile beside
// the last P V of this one. Never here: host code, assembly (ptx_sm90.cuh), other architectures.
//
// Configuration: DTYPE, HEAD_DIM, HEAD_DIM_V (rounded up: 64, 96, 128, 192, 256), BLOCK_M, BLOCK_N, STAGES (of K and V each), and
//   Q_BUFFERS  2: the next tile's Q is loaded early and O leaves through the finished tile's Q buffer (stmatrix, TMA store)
//              1: where shared memory has no room: Q is reloaded after its last use and O leaves from the registers
//   PINGPONG   1: named barriers let the warpgroups issue their products in turn
//   POLL       1: the wait for the next K tile stands just behind the row maximum. It is needed anyway; there it keeps ptxas from
//              hoisting the wait for P V over the shuffles, so that exps, packing and rescaling overlap with P V
//   SCHEDULE   0: tile = block index + i * grid; 1: the same, every other round reversed; 2: handed out by an atomic counter
//   LPT        1: heaviest tiles (last rows) first, inside sections of aux1 heads whose keys and values fit in L2
//   HAS_LEFT, HAS_RIGHT, VARIABLE, VARLEN, SOFTCAP, ALIBI, SINKS: features, 0 or 1
// Params: aux0 = query blocks of an entry, aux1 = heads of a section, aux2 = tiles, aux3 = first row that the K and V maps hold.
// Tensor maps: (column, row, head, batch), boxes of 64 columns by BLOCK_M rows of Q, BLOCK_N of K and V, 64 of out, swizzle 128.
#include "ptx_sm90.cuh"

#define NUM_WG (BLOCK_M / 64)
#define NUM_THREADS (128 * (NUM_WG + 1))
#define SLABS ((HEAD_DIM + 63) / 64)
#define SLABS_V ((HEAD_DIM_V + 63) / 64)
#define K_BYTES (BLOCK_N * 128 * SLABS)
#define V_BYTES (BLOCK_N * 128 * SLABS_V)
#define Q_LOAD_BYTES (BLOCK_M * 128 * SLABS)
#define Q_BYTES (BLOCK_M * 128 * (Q_BUFFERS == 2 && SLABS_V > SLABS ? SLABS_V : SLABS))
#define SLOT_BYTES 48
#define NEG_INF __int_as_float(0xff800000)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
// A key block that no map holds: arrives as zeros. Stands for the key range of rows that see nothing.
#define EMPTY_BLOCK ((1 << 30) / BLOCK_N + 1)

static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0 && BLOCK_N <= 256, "tile");

// ---------------------------------------------------------------------------------------------- shared memory
struct Shared {  // addresses
  u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, slot;
};

__device__ __forceinline__ Shared shared_layout(u32 base) {
  Shared sh;
  sh.q = (base + 1023) & ~1023u;
  sh.k = sh.q + Q_BUFFERS * Q_BYTES;
  sh.v = sh.k + STAGES * K_BYTES;
  sh.slot = sh.v + STAGES * V_BYTES;  // what the producer says about the tile in each Q buffer
  sh.q_full = sh.slot + SLOT_BYTES * Q_BUFFERS;
  sh.q_empty = sh.q_full + 8 * Q_BUFFERS;
  sh.k_full = sh.q_empty + 8 * Q_BUFFERS;
  sh.k_empty = sh.k_full + 8 * STAGES;
  sh.v_full = sh.k_empty + 8 * STAGES;
  sh.v_empty = sh.v_full + 8 * STAGES;
  return sh;
}

__device__ __forceinline__ void init_barriers(const Shared& sh) {
  for (int i = 0; i < Q_BUFFERS; i++) {
    mbarrier_init(sh.q_full + 8 * i, 1);
    mbarrier_init(sh.q_empty + 8 * i, Q_BUFFERS == 2 ? NUM_WG : 4 * NUM_WG);
  }
  for (int i = 0; i < STAGES; i++) {
    mbarrier_init(sh.k_full + 8 * i, 1);
    mbarrier_init(sh.v_full + 8 * i, 1);
    mbarrier_init(sh.k_empty + 8 * i, 4 * NUM_WG);
    mbarrier_init(sh.v_empty + 8 * i, 4 * NUM_WG);
  }
  mbarrier_init_fence();
}

// ---------------------------------------------------------------------------------------------- tiles
struct Tile {
  int m, head, batch;          // query block (-1: no more tiles), query head, entry
  int q_start, k_start;        // first row of the entry in the maps
  int first, last;             // key blocks, walked downward from first to last
  int q_len, kv_len, offset;   // of the entry; row i's diagonal is key i + offset
  __device__ __forceinline__ int blocks() const { return first - last + 1; }
  // keys that the tile's rows can see: [low_key, high_key)
  __device__ __forceinline__ int high_key(const Params& p) const {
    int rows = min((m + 1) * BLOCK_M, q_len);
    return HAS_RIGHT ? min(kv_len, rows + offset + (int)p.window_right) : kv_len;
  }
  __device__ __forceinline__ int low_key(const Params& p) const {
    return HAS_LEFT ? max(0, m * BLOCK_M + offset - (int)p.window_left) : 0;
  }
};

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

__device__ __forceinline__ void decode_tile(const Params& p, int t, Tile& tile) {
  const int blocks = (int)p.aux0, heads = (int)p.heads_q;
  int entry;  // batch and head
#if LPT
  const int section = (int)p.aux1, s = t / (section * blocks), r = t - s * (section * blocks);
  const int width = min(section, heads * (int)p.batch - s * section);
  tile.m = blocks - 1 - r / width;
  entry = s * section + r % width;
#else
  entry = t / blocks;
  tile.m = t - entry * blocks;
#endif
  tile.batch = entry / heads;
  tile.head = entry - tile.batch * heads;
  read_entry(p, tile);
  const int high = tile.high_key(p), low = tile.low_key(p);
  const bool empty = high <= low || tile.m * BLOCK_M >= tile.q_len;
  tile.first = empty ? EMPTY_BLOCK : (high - 1) / BLOCK_N;
  tile.last = empty ? EMPTY_BLOCK : low / BLOCK_N;
}

// Hands tiles out; only the producer's issuing thread has one.
struct Scheduler {
  int next;
#if SCHEDULE == 1
  int round;
#endif
  __device__ __forceinline__ void start() {
    next = blockIdx.x;
#if SCHEDULE == 1
    round = 0;
#endif
  }
  __device__ __forceinline__ bool fetch(const Params& p, Tile& tile) {
    for (;;) {
      const int t = next;
#if SCHEDULE == 2
      if (t >= (int)p.aux2) return false;
      next = atomicAdd(p.semaphore, 1) + gridDim.x;
#elif SCHEDULE == 1
      round++;
      next = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      if (t >= (int)p.aux2) return false;
#else
      if (t >= (int)p.aux2) return false;
      next = t + gridDim.x;
#endif
      decode_tile(p, t, tile);
      if (!VARLEN || tile.m * BLOCK_M < tile.q_len) return true;
    }
  }
};

// ---------------------------------------------------------------------------------------------- producer
struct Producer {
  const Params& p;
  const Shared& sh;
  const TMap *map_q, *map_k, *map_v;
  int group;

  template <int SLAB_COUNT>
  __device__ __forceinline__ void load(const TMap* map, u32 base, u32 full, u32 empty, int count, const Tile& tile, int n) {
    const int stage = count % STAGES, head = tile.head / group, batch = VARLEN ? 0 : tile.batch;
    mbarrier_wait(empty + 8 * stage, ((count / STAGES) & 1) ^ 1);
    mbarrier_expect(full + 8 * stage, BLOCK_N * 128 * SLAB_COUNT);
#pragma unroll
    for (int x = 0; x < SLAB_COUNT; x++)
      tma_load(base + stage * (BLOCK_N * 128 * SLAB_COUNT) + x * BLOCK_N * 128, map, 64 * x, tile.k_start + n * BLOCK_N, head, batch,
               full + 8 * stage);
  }
  __device__ __forceinline__ void load_k(int count, const Tile& tile, int n) {
    load<SLABS>(map_k, sh.k, sh.k_full, sh.k_empty, count, tile, n);
  }
  __device__ __forceinline__ void load_v(int count, const Tile& tile, int n) {
    load<SLABS_V>(map_v, sh.v, sh.v_full, sh.v_empty, count, tile, n);
  }
  // Tile number i of this block: say what it is, load its Q.
  __device__ __forceinline__ void issue_q(int i, bool any, const Tile& tile) {
    const int buffer = i % Q_BUFFERS;
    const u32 slot = sh.slot + SLOT_BYTES * buffer, full = sh.q_full + 8 * buffer;
    mbarrier_wait(sh.q_empty + 8 * buffer, ((i / Q_BUFFERS) & 1) ^ 1);
    shared_store_v4(slot, any ? tile.m : -1, tile.head, tile.batch, tile.q_start);
    shared_store_v4(slot + 16, tile.first, tile.last, 0, 0);
#if VARIABLE
    shared_store_v4(slot + 32, tile.q_len, tile.kv_len, tile.offset, 0);
#endif
    if (!any) return mbarrier_arrive(full);
    mbarrier_expect(full, Q_LOAD_BYTES);
#pragma unroll
    for (int x = 0; x < SLABS; x++)
      tma_load(sh.q + buffer * Q_BYTES + x * BLOCK_M * 128, map_q, 64 * x, tile.q_start + tile.m * BLOCK_M, tile.head,
               VARLEN ? 0 : tile.batch, full);
  }
  // K(0) of the next tile, or, after the last tile, the arrival that ends the consumers' last poll.
  __device__ __forceinline__ void begin(int count, bool any, const Tile& tile) {
    if (any) return load_k(count, tile, tile.first);
    mbarrier_wait(sh.k_empty + 8 * (count % STAGES), ((count / STAGES) & 1) ^ 1);
    mbarrier_arrive(sh.k_full + 8 * (count % STAGES));
  }

  // K(0) K(1) V(0) K(2) V(1) next-Q ... K(n-1) V(n-2) next-K(0) V(n-1)
  // NOTE: nothing that the consumers wait for may stand behind a wait for what they release later; see Consumer::boundary.
  __device__ __forceinline__ void run() {
    Scheduler scheduler;
    Tile tile, following;
    int count = 0, i = 0;
    scheduler.start();
    bool any = scheduler.fetch(p, tile);
    issue_q(0, any, tile);
    if (any) begin(0, true, tile);
    while (any) {
      const int blocks = tile.blocks(), early = Q_BUFFERS == 2 ? min(2, blocks - 1) : 0;
      const bool more = scheduler.fetch(p, following);
#pragma unroll 1
      for (int b = 1; b < blocks; b++) {
        load_k(count + b, tile, tile.first - b);
        load_v(count + b - 1, tile, tile.first - b + 1);
        if (Q_BUFFERS == 2 && b == early) issue_q(i + 1, more, following);
      }
      begin(count + blocks, more, following);
      load_v(count + blocks - 1, tile, tile.last);
      if (early == 0) issue_q(i + 1, more, following);
      count += blocks;
      i++;
      tile = following;
      any = more;
    }
#if SCHEDULE == 2
    if (atomicAdd(p.semaphore + 1, 1) == gridDim.x - 1) p.semaphore[0] = 0, p.semaphore[1] = 0;  // ready for the next launch
#endif
  }
};

// ---------------------------------------------------------------------------------------------- consumers
// A thread holds, of two rows 8 apart, 2 of every 8 columns (see Wgmma); suffixes 0 and 1 name the rows.
struct Consumer {
  const Params& p;
  const Shared& sh;
  const TMap* map_out;
  int wg, tid;        // warpgroup, thread in it
  u64 q_desc, k_desc, v_desc;
  float scale;        // of scores, log2(e) included
  float cap_scale;    // SOFTCAP: scores to tanh's argument
  float o[HEAD_DIM_V / 2], s[BLOCK_N / 2];
  u32 probs[BLOCK_N / 4];
  float max0, max1, sum0, sum1, sub0, sub1, shrink0, shrink1;
  Tile tile;
  int count, index;   // key blocks before this tile; tiles before it
  float slope;        // ALIBI: of this head, over scale

  __device__ __forceinline__ int lane() const { return tid & 31; }
  __device__ __forceinline__ int row(const Tile& t) const {  // the thread's first row in the entry
    return t.m * BLOCK_M + wg * 64 + (tid >> 5) * 16 + ((tid & 31) >> 2);
  }
  __device__ __forceinline__ void wait_k(int i) { mbarrier_wait(sh.k_full + 8 * (i % STAGES), (i / STAGES) & 1); }
  __device__ __forceinline__ void wait_v(int i) { mbarrier_wait(sh.v_full + 8 * (i % STAGES), (i / STAGES) & 1); }
  __device__ __forceinline__ void release_k(int i) { mbarrier_arrive_if(sh.k_empty + 8 * (i % STAGES), lane() == 0); }
  __device__ __forceinline__ void release_v(int i) { mbarrier_arrive_if(sh.v_empty + 8 * (i % STAGES), lane() == 0); }
  // Q_BUFFERS == 1: Q is free once its last product is done.
  __device__ __forceinline__ void release_q(bool last) {
    if (Q_BUFFERS == 1) mbarrier_arrive_if(sh.q_empty, last && lane() == 0);
  }
  // Q_BUFFERS == 2: the store of tile i has read the buffer.
  __device__ __forceinline__ void release_out(int i) {
    if (Q_BUFFERS == 2 && tid == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive(sh.q_empty + 8 * (i % Q_BUFFERS));
    }
  }

  __device__ __forceinline__ void turn_begin() {
    if (PINGPONG) barrier_sync(1 + wg, 256);
  }
  __device__ __forceinline__ void turn_end() {
    if (PINGPONG) barrier_arrive(1 + (wg + 1) % NUM_WG, 256);
  }

  // ---- products
  __device__ __forceinline__ void issue_qk(int i, int buffer) {
    const u64 q = q_desc + buffer * (Q_BYTES >> 4), k = k_desc + (u64)((i % STAGES) * (K_BYTES >> 4));
#pragma unroll
    for (int x = 0; x < HEAD_DIM / 16; x++)
      Wgmma<BLOCK_N>::ss<0, 0>(s, q + (x >> 2) * (BLOCK_M * 128 >> 4) + 2 * (x & 3), k + (x >> 2) * (BLOCK_N * 128 >> 4) + 2 * (x & 3),
                               x > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_pv(int i) {
    const u64 v = v_desc + (u64)((i % STAGES) * (V_BYTES >> 4));
#pragma unroll
    for (int x = 0; x < BLOCK_N / 16; x++)
      Wgmma<HEAD_DIM_V>::rs<1>(o, probs[4 * x], probs[4 * x + 1], probs[4 * x + 2], probs[4 * x + 3], v + x * 128, 1);
    wgmma_commit();
  }

  // ---- scores
  __device__ __forceinline__ void cap() {
#if SOFTCAP
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) s[i] = tanh_approx(s[i] * cap_scale);
#endif
  }
  __device__ __forceinline__ void add_alibi(int n) {
#if ALIBI
    const float d0 = (float)(row(tile) + tile.offset - n * BLOCK_N - 2 * (lane() & 3)), d1 = d0 + 8.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) s[i] -= slope * fabsf((i & 2 ? d1 : d0) - (8 * (i >> 2) + (i & 1)));
#endif
  }
  __device__ __forceinline__ void hide(int n) {
    const int base = n * BLOCK_N + 2 * (lane() & 3), diagonal = row(tile) + tile.offset;
    int high0 = tile.kv_len - 1 - base, high1 = high0;
    if (HAS_RIGHT) {
      high0 = min(high0, diagonal + (int)p.window_right - base);
      high1 = min(high1, diagonal + 8 + (int)p.window_right - base);
    }
    const int low0 = diagonal - (int)p.window_left - base, low1 = low0 + 8;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) {
      const int column = 8 * (i >> 2) + (i & 1);
      if (column > (i & 2 ? high1 : high0)) s[i] = NEG_INF;
      if (HAS_LEFT && column < (i & 2 ? low1 : low0)) s[i] = NEG_INF;
    }
  }
  __device__ __forceinline__ void transform(int n, bool masked) {
    cap();
    add_alibi(n);
    if (masked) hide(n);
  }

  // ---- softmax
  __device__ __forceinline__ void row_max(bool masked, bool first) {
    const float old0 = max0, old1 = max1;
    float a = NEG_INF, b = NEG_INF;
    if (first) max0 = max1 = NEG_INF, sum0 = sum1 = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i += 8) {
      max0 = fmaxf(max0, fmaxf(s[i], s[i + 1]));
      max1 = fmaxf(max1, fmaxf(s[i + 2], s[i + 3]));
      a = fmaxf(a, fmaxf(s[i + 4], s[i + 5]));
      b = fmaxf(b, fmaxf(s[i + 6], s[i + 7]));
    }
    max0 = fmaxf(max0, a);
    max1 = fmaxf(max1, b);
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 1));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 1));
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 2));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 2));
    sub0 = max0 * scale;
    sub1 = max1 * scale;
    if (!first) {
      shrink0 = exp2_approx(old0 * scale - sub0);
      shrink1 = exp2_approx(old1 * scale - sub1);
    }
    if (masked) {  // rows that have seen nothing yet
      if (max0 == NEG_INF) sub0 = 0.f, shrink0 = 1.f;
      if (max1 == NEG_INF) sub1 = 0.f, shrink1 = 1.f;
    }
    if (!first) sum0 *= shrink0, sum1 *= shrink1;
  }
  __device__ __forceinline__ void exponentials() {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i += 8) {
#pragma unroll
      for (int j = 0; j < 8; j++) s[i + j] = exp2_approx(s[i + j] * scale - (j & 2 ? sub1 : sub0));
      sum0 += s[i] + s[i + 1];
      sum1 += s[i + 2] + s[i + 3];
      a += s[i + 4] + s[i + 5];
      b += s[i + 6] + s[i + 7];
    }
    sum0 += a;
    sum1 += b;
  }
  __device__ __forceinline__ void round_probs() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) probs[i] = pack_half2(s[2 * i], s[2 * i + 1]);
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) o[i] *= i & 2 ? shrink1 : shrink0;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) o[i] = 0.f;
  }

  // ---- tiles
  // Waits for tile `index`; everything into uniform registers.
  __device__ __forceinline__ Tile receive() {
    const int buffer = index % Q_BUFFERS;
    const u32 slot = sh.slot + SLOT_BYTES * buffer;
    Tile t;
    u32 a, b, c, d;
    mbarrier_wait(sh.q_full + 8 * buffer, (index / Q_BUFFERS) & 1);
    shared_load_v4(slot, a, b, c, d);
    t.m = uniform(a), t.head = uniform(b), t.batch = uniform(c), t.q_start = uniform(d);
    shared_load_v4(slot + 16, a, b, c, d);
    t.first = uniform(a), t.last = uniform(b);
#if VARIABLE
    shared_load_v4(slot + 32, a, b, c, d);
    t.q_len = uniform(a), t.kv_len = uniform(b), t.offset = uniform(c);
#else
    t.q_len = (int)p.seqlen_q, t.kv_len = (int)p.seqlen_kv, t.offset = (int)p.q_offset_value;
#endif
    return t;
  }
  __device__ __forceinline__ void enter(const Tile& t) {
    tile = t;
#if ALIBI
    slope = ((const float*)p.alibi_slopes)[t.batch * p.alibi_slopes_stride_b + t.head] * LOG2E / scale;
#endif
  }

  // VARIABLE: V rows [from, to) of stage i's block become zeros: a neighbour's or padding's NaN times 0 is NaN.
  // Every warpgroup writes the same zeros, each before its own reads. No wgmma is in flight here.
  __device__ __forceinline__ void zero_v_rows(int i, int from, int to) {
    const u32 base = sh.v + (i % STAGES) * V_BYTES;
    for (int x = tid; x < (to - from) * 8 * SLABS_V; x += 128) {
      const int slab = x / ((to - from) * 8), y = x - slab * ((to - from) * 8);
      shared_store_v4(base + slab * BLOCK_N * 128 + from * 128 + y * 16, 0, 0, 0, 0);
    }
    proxy_fence();
    barrier_sync(8 + wg, 128);
  }
  __device__ __forceinline__ void clean_high_end() {
#if VARIABLE
    const int end = tile.high_key(p) - tile.first * BLOCK_N;
    if (tile.first != EMPTY_BLOCK && end < BLOCK_N) {
      wait_v(count);
      zero_v_rows(count, end, BLOCK_N);
    }
#endif
  }
  __device__ __forceinline__ void clean_low_end() {
#if VARIABLE && HAS_LEFT
    const int begin = tile.low_key(p) - tile.last * BLOCK_N;
    if (tile.last != EMPTY_BLOCK && begin > 0) {
      const int i = count + tile.blocks() - 1;
      wait_v(i);
      zero_v_rows(i, 0, begin);
    }
#endif
  }

  // Divides by the sums, writes out and lse of tile number i.
  __device__ __forceinline__ void finish(const Tile& t, int i, float m0, float m1, float l0, float l1) {
    l0 += __shfl_xor_sync(~0u, l0, 1);
    l1 += __shfl_xor_sync(~0u, l1, 1);
    l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 2);
    const int r = row(t);
    float inverse0, inverse1, lse0, lse1;
    normalise(t, r, m0, l0, inverse0, lse0);
    normalise(t, r + 8, m1, l1, inverse1, lse1);
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 4; x++) {  // rounded in place: the packed pair takes the first float's register
      const float inverse = x & 1 ? inverse1 : inverse0;
      o[x] = __uint_as_float(pack_half2(o[2 * x] * inverse, o[2 * x + 1] * inverse));
    }
    const int rows = VARLEN ? t.q_len : (int)p.seqlen_q;
    if (Q_BUFFERS == 2)
      store_staged(t, i, rows);
    else
      store_direct(t, r, rows);
    if ((lane() & 3) == 0) {
      float* lse = (float*)p.lse + t.batch * p.lse_stride_b + t.head * p.lse_stride_h + t.q_start;
      if (r < rows) lse[r] = lse0;
      if (r + 8 < rows) lse[r + 8] = lse1;
    }
  }
  __device__ __forceinline__ void normalise(const Tile& t, int r, float m, float l, float& inverse, float& lse) {
    m *= scale;
    float shrink = 1.f;
#if SINKS
    if (l > 0.f) {
      const float sink = ((const float*)p.sinks)[t.head] * LOG2E, top = fmaxf(m, sink);
      shrink = exp2_approx(m - top);
      l = l * shrink + exp2_approx(sink - top);
      m = top;
    }
#endif
    const bool empty = l == 0.f || (VARIABLE && r >= t.q_len);
    inverse = empty ? 0.f : __fdividef(shrink, l);
    lse = empty ? NEG_INF : (m + log2_approx(l)) * LN2;
    if (VARIABLE && r >= t.q_len) inverse = 0.f;
  }
  __device__ __forceinline__ u32 packed(int x) { return __float_as_uint(o[x]); }

  __device__ __forceinline__ void store_staged(const Tile& t, int i, int rows) {
    const u32 buffer = sh.q + (i % Q_BUFFERS) * Q_BYTES;
    const int line = wg * 64 + (tid >> 5) * 16 + (lane() & 15);
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 16; x++)
      stmatrix_x4(buffer + (x >> 2) * (BLOCK_M * 128) + line * 128 + (((2 * (x & 3) + (lane() >> 4)) ^ (line & 7)) << 4),
                  packed(4 * x), packed(4 * x + 1), packed(4 * x + 2), packed(4 * x + 3));
    proxy_fence();
    barrier_sync(8 + wg, 128);
    const int start = t.m * BLOCK_M + wg * 64;
#if VARLEN
    if (start + 64 > rows) return store_lines(t, buffer, start, rows);
#endif
    if (tid == 0) {
#pragma unroll
      for (int x = 0; x < SLABS_V; x++)
        tma_store(map_out, 64 * x, t.q_start + start, t.head, VARLEN ? 0 : t.batch, buffer + x * BLOCK_M * 128 + wg * 64 * 128);
      bulk_commit();
    }
  }
  // VARLEN: the last rows of a sequence; a TMA box would run over the next sequence's.
  __device__ __forceinline__ void store_lines(const Tile& t, u32 buffer, int start, int rows) {
    u16* out = (u16*)p.out + (i64)(t.q_start + start) * p.out_stride_s + t.head * p.out_stride_h;
    for (int x = tid; x < 64 * 8 * SLABS_V; x += 128) {
      const int chunk = x & 7, line = (x >> 3) & 63, slab = x >> 9, column = 64 * slab + 8 * chunk;
      u32 a, b, c, d;
      if (start + line < rows && column < (int)p.head_dim_v) {
        shared_load_v4(buffer + slab * (BLOCK_M * 128) + (wg * 64 + line) * 128 + ((chunk ^ (line & 7)) << 4), a, b, c, d);
        *(uint4*)(out + line * p.out_stride_s + column) = make_uint4(a, b, c, d);
      }
    }
    barrier_sync(8 + wg, 128);
  }
  // From the registers: four lanes exchange so that each writes 16 contiguous bytes.
  __device__ __forceinline__ void store_direct(const Tile& t, int r, int rows) {
    u16* out = (u16*)p.out + (VARLEN ? 0 : t.batch * p.out_stride_b) + t.head * p.out_stride_h + (i64)(t.q_start + r) * p.out_stride_s;
    const int quad = lane() & 3;
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 4; x += 8) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a = packed(x + half), b = packed(x + half + 2), c = packed(x + half + 4), d = packed(x + half + 6);
        quad_transpose(quad, a, b, c, d);
        const int column = 2 * x + 8 * quad;
        if (r + 8 * half < rows && column < (int)p.head_dim_v)
          *(uint4*)(out + 8 * half * p.out_stride_s + column) = make_uint4(a, b, c, d);
      }
    }
  }
  // Lane q of four gets, in order, the q-th register of all four.
  static __device__ __forceinline__ void quad_transpose(int q, u32& a, u32& b, u32& c, u32& d) {
    const bool odd = q & 1, high = q & 2;
    u32 x = __shfl_xor_sync(~0u, odd ? a : b, 1), y = __shfl_xor_sync(~0u, odd ? c : d, 1);
    if (odd) a = x, c = y;
    else b = x, d = y;
    x = __shfl_xor_sync(~0u, high ? a : c, 2), y = __shfl_xor_sync(~0u, high ? b : d, 2);
    if (high) a = x, b = y;
    else c = x, d = y;
  }

  // ---- the pipeline
  // S of block `s_block` from Q buffer `buffer` beside P V of the block before it; returns with S complete.
  __device__ __forceinline__ void issue_both(int s_block, int buffer) {
    if (!POLL) wait_k(s_block);
    turn_begin();
    touch(s);
    touch(o);
    wgmma_fence();
    issue_qk(s_block, buffer);
    wait_v(s_block - 1);
    wgmma_fence();  // else ptxas injects it (C7519)
    issue_pv(s_block - 1);
    turn_end();
    wgmma_wait<1>();
    touch(s);
    release_k(s_block);
  }
  __device__ __forceinline__ void step(int b, bool masked) {
    const int i = count + b;
    if (Q_BUFFERS == 2 && b == 2 && index > 0) release_out(index - 1);  // here: a branch further down moves the wait for P V
    issue_both(i, index % Q_BUFFERS);
    release_q(b == tile.first - tile.last);
    transform(tile.first - b, masked);
    row_max(masked, false);
    touch(s);
    if (POLL) wait_k(i + 1);  // always comes: this tile's, the next one's first, or the producer's last arrival
    wgmma_wait<0>();
    touch(o);
    exponentials();
    release_v(i - 1);
    round_probs();
    rescale();
  }
  // First block of the first tile.
  __device__ __forceinline__ void prologue() {
    wait_k(0);
    touch(s);
    wgmma_fence();
    issue_qk(0, 0);
    wgmma_wait<0>();
    touch(s);
    release_k(0);
    release_q(tile.first == tile.last);
    transform(tile.first, true);
    row_max(true, true);
    exponentials();
    round_probs();
    if (POLL) wait_k(1);
    clear();
    clean_high_end();
  }
  // Blocks 1.. of the tile: those that a mask's upper edge crosses, those inside, those that its lower edge crosses.
  __device__ __forceinline__ void walk() {
    const int blocks = tile.blocks(), top = tile.m * BLOCK_M + wg * 64 + tile.offset;  // the warpgroup's first diagonal
    const int high = HAS_RIGHT ? min(tile.kv_len, top + (int)p.window_right + 1) : tile.kv_len;
    const int low = HAS_LEFT ? top + 63 - (int)p.window_left : 0;
#pragma unroll 1
    for (int b = 1; b < blocks; b++) {
      const int key = (tile.first - b) * BLOCK_N;
      step(b, (HAS_RIGHT && key + BLOCK_N > high) || (HAS_LEFT && key < low));
    }
  }
  // First S of the next tile with the last P V of this one. False: there is no next tile.
  __device__ __forceinline__ bool boundary() {
    index++;
    const Tile next = receive();
    if (__all_sync(~0u, next.m < 0)) return false;
    const int i = count + tile.blocks();
    const Tile old = tile;
    clean_low_end();
    issue_both(i, index % Q_BUFFERS);
    release_q(next.first == next.last);
    const float m0 = max0, m1 = max1, l0 = sum0, l1 = sum1;
    enter(next);
    transform(next.first, true);
    row_max(true, true);
    touch(s);
    if (POLL) wait_v(i);  // comes before the producer waits for anything that this step releases
    wgmma_wait<0>();
    touch(o);
    exponentials();
    release_v(i - 1);
    round_probs();
    finish(old, index - 1, m0, m1, l0, l1);
    if (next.first - next.last < 2) release_out(index - 1);
    if (POLL) wait_k(i + 1);  // NOTE: after release_out; before it, tiles of one block would wait for ever
    clear();
    count = uniform(i);       // the stores above make ptxas think that lanes differ
    clean_high_end();
    return true;
  }
  __device__ __forceinline__ void run() {
    index = count = 0;
    const Tile first = receive();
    if (__all_sync(~0u, first.m < 0)) return;
    enter(first);
    prologue();
#pragma unroll 1
    for (;;) {
      walk();
      if (!boundary()) break;
    }
    const int i = count + tile.blocks() - 1;
    clean_low_end();
    wait_v(i);
    touch(o);
    wgmma_fence();
    issue_pv(i);
    wgmma_wait<0>();
    touch(o);
    finish(tile, index - 1, max0, max1, sum0, sum1);
    if (Q_BUFFERS == 2 && tid == 0) bulk_wait_read<0>();
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    fwd_sm90(const __grid_constant__ Params p, const __grid_constant__ TMap map_q, const __grid_constant__ TMap map_k,
             const __grid_constant__ TMap map_v, const __grid_constant__ TMap map_out) {
  extern __shared__ unsigned char memory[];
  const Shared sh = shared_layout(shared_address(memory));
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // uniform
  if (threadIdx.x == 0) init_barriers(sh);
  __syncthreads();
  if (wg == 0) {
    registers_give<NUM_WG == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      Producer producer{p, sh, &map_q, &map_k, &map_v, (int)(p.heads_q / p.heads_kv)};
      producer.run();
    }
  } else {
    registers_take<NUM_WG == 2 ? 232 : 160>();
    const int w = wg - 1, tid = threadIdx.x & 127;
    if (PINGPONG && w == NUM_WG - 1) barrier_arrive(1, 256);  // the first warpgroup begins
    Consumer consumer{p, sh, &map_out, w, tid};
    consumer.q_desc = wgmma_descriptor(sh.q + w * 64 * 128, 16, 1024);
    consumer.k_desc = wgmma_descriptor(sh.k, 16, 1024);
    consumer.v_desc = wgmma_descriptor(sh.v, BLOCK_N * 128, 1024);
    const float softmax_scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
    consumer.scale = (SOFTCAP ? (float)p.softcap : softmax_scale) * LOG2E;
    consumer.cap_scale = SOFTCAP ? softmax_scale / (float)p.softcap : 0.f;
    consumer.run();
  }
}
