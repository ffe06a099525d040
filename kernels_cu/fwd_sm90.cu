// Attention forward for Hopper (sm_90a), float16 and bfloat16: TMA, wgmma, warp specialisation. One persistent block per SM:
// a producer warpgroup (one thread of it issues TMA) and BLOCK_M / 64 consumer warpgroups of 64 query rows each.
// Software pipeline without bubbles: S(b) = Q K(b)^T runs beside O += P(b-1) V(b-1), and the first S of the next tile beside
// the last P V of this one. Never here: host code, assembly (ptx_sm90.cuh), other architectures.
//
// Configuration: DTYPE, HEAD_DIM, HEAD_DIM_V (rounded up: 64, 96, 128, 192, 256), BLOCK_M, BLOCK_N, STAGES (of K and V each), and
//   Q_BUFFERS  3: the next tile's Q is loaded early and O leaves through the finished tile's Q buffer (stmatrix, TMA store)
//              1: where shared memory has no room: Q is reloaded after its last use, O leaves from the registers, and the
//                 next tile's first S comes after this tile's end, by when its Q has arrived
//   Q_APART    1: each warpgroup's rows of the one Q are loaded again as soon as that warpgroup is done with them (boxes of 64 rows)
//   PINGPONG   1: named barriers let the warpgroups issue their products in turn
//   EARLY_EXPS groups of 8 exponentials of a thread that stand before the wait for P V. That wait stands behind the one for the
//              next K tile, which is needed anyway and keeps ptxas from moving exponentials over it
//   SCHEDULE   0: tile = block index + i * grid; 1: handed out by an atomic counter
//   LPT        1: heaviest tiles (last rows) first, inside sections of aux1 heads whose keys and values fit in L2
//   LOOP_MASKS 0: only the first block of a tile is ever crossed by a mask's edge
//   MASK_FIRST 1: where an edge crosses a later one, positions are compared before weights are made; 0: they are made again then
//   SPLIT      1: few rows against many keys. A tile's rows are those of aux6 query heads of a group, 2^aux5 of each, and its
//              key blocks are cut into aux4 parts, a tile each; fwd_merge.cu makes out and lse of what they leave in scratch
//   HAS_LEFT, HAS_RIGHT, VARIABLE, VARLEN, SOFTCAP, ALIBI, SINKS, MASK, SEGMENTS, DROPOUT: features, 0 or 1
//   ALIBI_SIDED 1: of the key blocks that a warpgroup visits only the first can be crossed by its rows' diagonals
//   CAP_TERMS  SOFTCAP: 3 or 5 terms of the polynomial that takes tanh's place, or 0
//   KEYS_ONLY  the mask is the same for all queries;  BIAS_OF_KEYS: the bias is
//   BIAS       0 none, 1 of DTYPE, 2 float32;  PAIRS 1: it can be read two columns at once;  BIAS_TILES 1: it comes by TMA
// Params: aux0 = query blocks of an entry (SPLIT: of a KV head, of aux6 heads each), aux1 = heads of a section, aux2 = tiles,
// aux3 = first row that the K and V maps hold; aux4-6 = strides of fwd_sm90_mask.cu's bitmap (SPLIT: see there); semaphore from
// fwd_sm90_prepare.cu; scratch, from that or (MASK) fwd_sm90_mask.cu or (SPLIT) for the parts. MASK: mask_stride_b, h, q, k =
// the strides, in words, of an entry, a head, a query block and 128 keys of the packed mask, aux7 = a row's.
// Tensor maps: (column, row, head, batch), boxes of 64 columns by BLOCK_M rows of Q, BLOCK_N of K and V, 16 of out, swizzle 128.
#include "fwd_sm90.cuh"
#include "philox.cuh"

// Positions are compared only where weights are computed again. (Where V rows that nobody sees are looked for: before.)
#define MASK_AGAIN ((LOOP_MASKS || ROTATE) && !SCATTERED && !MASK_FIRST)

#define FAR 16384.f  // a thread's weights of a block sum up to no more than this; within float16, too

// CAP_TERMS: of each 8 scores those (bits) whose tanh is a polynomial where that is good enough; see settle.
#define CAP_LATE (CAP_TERMS && !ALIBI && !SCATTERED && !SPLIT)
#if CAP_TERMS == 3  // tanh to 4e-4 of itself, as the instruction, up to 0.85
#define CAP_SHARE 0xff
#define CAP_COEFFICIENTS 0.9995825f, -0.32261626f, 0.089788253f
#define CAP_MOST 0.69107f
#elif CAP_TERMS == 5  // to 1.6e-4 up to 1.5
#define CAP_SHARE 0x55
#define CAP_COEFFICIENTS 0.99983713f, -0.3295488f, 0.1183421f, -0.030935207f, 0.0038410767f
#define CAP_MOST 0.90515f
#endif
#if CAP_LATE
#define FAR0 far0
#define FAR1 far1
#else
#define FAR0 FAR
#define FAR1 FAR
#endif
// From a thread's first row of the entry to its second one.
#define ROW_GAP (SPLIT && TILE_ROWS < 16 ? 0 : 8)

// BIAS: of how many rows a thread holds it; one if it is the same for all.
#define BIAS_ROWS (BIAS && BIAS_OF_KEYS ? 1 : 2)
// Scores are kept in units of q.k; with a bias in natural units, where finfo.min does not overflow.
#define NATURAL (BIAS > 0)
static_assert(!SCATTERED || (BLOCK_N % 8 == 0 && BLOCK_N <= 128), "what a row sees of a thread's columns are bits of one word");
// MASK: key blocks of a block of the packed mask.
#define PACKED_BLOCKS (128 / BLOCK_N)
static_assert(!MASK || BLOCK_N == 128 || BLOCK_N == 64, "as fwd_sm90_mask.cu packs it");
static_assert(!DROPOUT || BLOCK_N % 32 == 0, "random words serve 32 columns");
static_assert(!(SCATTERED && VARLEN), "packed sequences have none of these");

// ---------------------------------------------------------------------------------------------- consumers
// A thread holds, of two rows 8 apart, 2 of every 8 columns (see Wgmma); suffixes 0 and 1 name the rows.
struct Consumer {
  const Params& p;
  const Shared& sh;
  const TMap* map_out;
  int wg, warp, tid;  // warpgroup, warp and thread in it
  u64 q_desc, k_desc, v_desc;
  float unit;         // natural units of a raw score (SOFTCAP: of tanh's value)
  float scale;        // of kept scores, log2(e) included
  float cap_scale;    // SOFTCAP: raw scores to tanh's argument
#if CAP_LATE
  bool raw;           // a step's scores stay what they are, else they become tanh's values
  float far0, far1, terms[CAP_TERMS];  // see settle
#endif
  float o[HEAD_DIM_V / 2], s[BLOCK_N / 2];
  u32 probs[BLOCK_N / 4];
  float max0, max1, sum0, sum1, sub0, sub1, shrink0, shrink1, inverse0, inverse1, lse0, lse1;
  Tile tile;
  int count, index;   // key blocks before this tile; tiles before it
  int ends;           // NARROW: unseen_ends of the tile that was awaited last
  int idle, next_idle;  // NARROW: turns that another warpgroup has more in the tile; in the one that was awaited last
  bool trail;         // NARROW: after the tile's key blocks comes one that the warpgroup leaves out
  float slope0, slope1, shift0, shift1;  // ALIBI: of the rows' heads, over unit; what the thread's scores still lack
  int block;          // SKIPPING: the key block of s
  bool whole;         // SKIPPING: mask and segments hide nothing of it
#if SKIPPING
  bool harmless;      // no V row of it needs to become zeros
  int meetings;       // how many blocks were not
#endif
  u32 shown0, shown1, seen;  // SCATTERED: bit 2 x + z: the row (some row of the thread) sees its column 8 x + z
  u32 bias[BLOCK_N / 8 * BIAS_ROWS * (BIAS == 2 ? 2 : 1)];  // BIAS without BIAS_TILES
  DropoutKey key;

  __device__ __forceinline__ int lane() const { return tid & 31; }
  __device__ __forceinline__ int line() const { return wg * 64 + (tid >> 5) * 16 + ((tid & 31) >> 2); }  // first row in the tile
  __device__ __forceinline__ int row(const Tile& t) const {  // and in the entry
    if (SPLIT) return t.m * TILE_ROWS + (line() & (TILE_ROWS - 1));
    return t.m * BLOCK_M + wg * 64 + (tid >> 5) * 16 + ((tid & 31) >> 2);
  }
  // The warpgroup's first diagonal, and how far down its last one is.
  __device__ __forceinline__ int top_of(const Tile& t) const {
    return t.m * TILE_ROWS + (SPLIT ? wg * 64 & (TILE_ROWS - 1) : wg * 64) + t.offset;
  }
  __device__ __forceinline__ int height() const { return SPLIT ? min(63, TILE_ROWS - 1) : 63; }
  __device__ __forceinline__ void wait_k(int i) { mbarrier_wait(sh.k_full + 8 * (i % STAGES), (i / STAGES) & 1); }
  __device__ __forceinline__ void wait_v(int i) { mbarrier_wait(sh.v_full + 8 * (i % STAGES), (i / STAGES) & 1); }
  __device__ __forceinline__ void release_k(int i) { mbarrier_arrive_if(sh.k_empty + 8 * (i % STAGES), lane() == 0); }
  __device__ __forceinline__ void release_v(int i) { mbarrier_arrive_if(sh.v_empty + 8 * (i % STAGES), lane() == 0); }
  // Q_BUFFERS == 1: Q is free once its last product is done.
  __device__ __forceinline__ void release_q(bool last) {
    if (Q_BUFFERS == 1) mbarrier_arrive_if(sh.q_empty + (Q_APART ? 8 * wg : 0), last && lane() == 0);
  }
  // STAGED: the warp's store of tile i has read the buffer.
  __device__ __forceinline__ void release_out(int i) {
    if (STAGED && i >= 0 && lane() == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive(sh.q_empty + 8 * (i % Q_BUFFERS));
    }
  }

  // NARROW: of a key block of which the warpgroup's rows see nothing.
  __device__ __forceinline__ void skip_k(int i) {
    wait_k(i);
    release_k(i);
  }
  __device__ __forceinline__ void skip_v(int i) {
    wait_v(i);
    release_v(i);
  }

  __device__ __forceinline__ void turn_begin() {
    if (PINGPONG) barrier_sync(1 + wg, 256);
  }
  __device__ __forceinline__ void turn_end() {
    if (PINGPONG) barrier_arrive(1 + (wg + 1) % NUM_WG, 256);
  }

  // ---- products
  __device__ __forceinline__ void issue_qk(int i, int buffer) {
    u64 q = q_desc + buffer * (Q_BYTES >> 4);
    const u64 k = k_desc + (u64)((i % STAGES) * (K_BYTES >> 4));
    // fresh in each step: ptxas would keep every slab's descriptor in uniform registers, more than there are
    if (HEAD_DIM > 128) q = (q & 0xffffffff00000000ull) | (u32)uniform((int)(u32)q);
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
#if CAP_LATE
  // Where the warp's references lie well between, steps leave scores raw. An exponent then has tanh by the special-function
  // units or, for CAP_SHARE, x P(x^2), which is tanh while |tanh| < CAP_MOST, rises beyond, so that too large a score shows in the
  // sum of the weights, and falls without end below: there weights are less than rounding errors. Elsewhere the latter's scores
  // become tanh's values and P is `scale`.
  __device__ __forceinline__ void settle() {
    const float found[CAP_TERMS] = {CAP_COEFFICIENTS};
    const float least = (10.f + log2_approx((float)p.seqlen_kv)) / scale - CAP_MOST;  // what is below weighs 2^-10 in all
    raw = __all_sync(~0u, fminf(max0, max1) >= least && fmaxf(max0, max1) <= CAP_MOST - 7.f / scale);
    far0 = raw ? fminf(FAR, exp2_approx(CAP_MOST * scale - sub0)) : FAR;
    far1 = raw ? fminf(FAR, exp2_approx(CAP_MOST * scale - sub1)) : FAR;
    float power = cap_scale;
#pragma unroll
    for (int i = 0; i < CAP_TERMS; i++, power *= cap_scale * cap_scale)
      terms[i] = raw ? found[i] * scale * power : i == 0 ? scale : 0.f;
  }
  __device__ __forceinline__ void cap_shared() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++)
      if (CAP_SHARE >> (i & 7) & 1) s[i] = tanh_approx(s[i] * cap_scale);
  }
  __device__ __forceinline__ float capped_weight(int i) const {
    const float x = s[i], sub = i & 2 ? sub1 : sub0;
    if (!(CAP_SHARE >> (i & 7) & 1)) return weight(tanh_approx(x * cap_scale), sub);
    const float square = x * x;
    float factor = terms[CAP_TERMS - 1];
#pragma unroll
    for (int j = CAP_TERMS - 2; j >= 0; j--) factor = __fmaf_rn(factor, square, terms[j]);
    return exp2_approx(__fmaf_rn(x, factor, -sub));
  }
#endif
  // A key at distance d from the row's diagonal loses slope * |d|. Where all of the warpgroup's rows have a block on one side,
  // |d| is a row's distance to the thread's first column, `shift0` and `shift1`, and a constant: one instruction a score.
  __device__ __forceinline__ void add_alibi(int n, bool first) {
#if ALIBI
    const float d0 = (float)(row(tile) + tile.offset - n * BLOCK_N - 2 * (lane() & 3)), d1 = d0 + (float)ROW_GAP;
    const int above = top_of(tile) - n * BLOCK_N;  // the first diagonal, from the block's first key
    shift0 = shift1 = 0.f;
    if (!NATURAL && ((ALIBI_SIDED && !first) || above >= BLOCK_N - 1 || above <= -height())) {
      const float sign = above >= 0 ? 1.f : -1.f, a = sign * slope0, b = sign * slope1;
      shift0 = -a * d0, shift1 = -b * d1;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; i++) s[i] += (i & 2 ? b : a) * (float)(8 * (i >> 2) + (i & 1));
    } else {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; i++) s[i] -= (i & 2 ? slope1 : slope0) * fabsf((i & 2 ? d1 : d0) - (8 * (i >> 2) + (i & 1)));
    }
#endif
  }
  __device__ __forceinline__ void hide(int n) {
    const int base = n * BLOCK_N + 2 * (lane() & 3), diagonal = row(tile) + tile.offset;
    int high0 = tile.kv_len - 1 - base, high1 = high0;
    if (HAS_RIGHT) {
      high0 = min(high0, diagonal + (int)p.window_right - base);
      high1 = min(high1, diagonal + ROW_GAP + (int)p.window_right - base);
    }
    const int low0 = diagonal - (int)p.window_left - base, low1 = low0 + ROW_GAP;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) {
      const int column = 8 * (i >> 2) + (i & 1);
      if (column > (i & 2 ? high1 : high0)) s[i] = NEG_INF;
      if (HAS_LEFT && column < (i & 2 ? low1 : low0)) s[i] = NEG_INF;
    }
  }
  // What bias, mask and segments say of the thread's scores of block n: into `bias`, `shown0` and `shown1`, while products run.
  __device__ __forceinline__ void load_operands(const Tile& t, int n) {
#if SCATTERED
    const int i = row(t), column = n * BLOCK_N + 2 * (lane() & 3);
    [[maybe_unused]] const int columns = t.kv_len - column;  // from the thread's first on
    shown0 = i < t.q_len ? ALL_SEEN : 0;
    shown1 = i + 8 < t.q_len ? ALL_SEEN : 0;
#if BIAS && !BIAS_TILES
    const BiasElement* b = (const BiasElement*)p.bias + t.batch * p.bias_stride_b + t.head * p.bias_stride_h +
                           i * p.bias_stride_q + column * (PAIRS ? 1 : p.bias_stride_k);
#pragma unroll
    for (int x = 0; x < BLOCK_N / 8; x++) {
      load_bias(b, x, 0, shown0 && 8 * x < columns, shown0 && 8 * x + 1 < columns);
      if (BIAS_ROWS == 2)
        load_bias(b + 8 * p.bias_stride_q, x, 1, shown1 && 8 * x < columns, shown1 && 8 * x + 1 < columns);
    }
#endif
#if SKIPPING
    if (whole) return;
#endif
#if MASK
    const u32* bits = (const u32*)p.scratch + t.batch * p.mask_stride_b + t.head * p.mask_stride_h + t.m * p.mask_stride_q +
                      n / PACKED_BLOCKS * p.mask_stride_k + line() * (int)p.aux7 + (lane() & 3);
    const int shift = BLOCK_N / 4 * (n % PACKED_BLOCKS);
    shown0 &= bits[0] >> shift;
    shown1 &= bits[8 * (int)p.aux7] >> shift;
#endif
#if SEGMENTS
    const int mine0 = shown0 ? p.q_segment_ids[t.batch * p.seqlen_q + i] : 0;
    const int mine1 = shown1 ? p.q_segment_ids[t.batch * p.seqlen_q + i + 8] : 0;
    const int* ids = p.kv_segment_ids + t.batch * p.seqlen_kv + column;
#pragma unroll
    for (int x = 0; x < BLOCK_N / 8; x++) {
#pragma unroll
      for (int z = 0; z < 2; z++) {
        if (8 * x + z >= columns) continue;
        const int id = ids[8 * x + z];
        if (id != mine0) shown0 &= ~(1u << (2 * x + z));
        if (id != mine1) shown1 &= ~(1u << (2 * x + z));
      }
    }
#endif
#endif
  }
#if BIAS == 1
  typedef u16 BiasElement;
  __device__ __forceinline__ void load_bias(const u16* b, int x, int half, bool first, bool second) {
    u32& pair = bias[BIAS_ROWS * x + half];
    pair = 0;
    if (PAIRS) {
      if (first) pair = *(const u32*)(b + 8 * x);
    } else {
      if (first) pair = b[8 * x * p.bias_stride_k];
      if (second) pair |= (u32)b[(8 * x + 1) * p.bias_stride_k] << 16;
    }
  }
#elif BIAS
  typedef float BiasElement;
  __device__ __forceinline__ void load_bias(const float* b, int x, int half, bool first, bool second) {
    float2 pair = make_float2(0.f, 0.f);
    if (PAIRS) {
      if (first) pair = *(const float2*)(b + 8 * x);
    } else {
      if (first) pair.x = b[8 * x * p.bias_stride_k];
      if (second) pair.y = b[(8 * x + 1) * p.bias_stride_k];
    }
    bias[2 * (BIAS_ROWS * x + half)] = __float_as_uint(pair.x);
    bias[2 * (BIAS_ROWS * x + half) + 1] = __float_as_uint(pair.y);
  }
#endif
#if BIAS
  // Of s[4 x .. 4 x + 7], columns 8 x to 8 x + 15. BIAS_TILES: out of shared memory, of 16 bits stage i of K; what ldmatrix
  // hands out lies as scores do. `least` becomes -infinity where a bias is.
  __device__ __forceinline__ void get_bias(int i, int x, float (&values)[8], u32 (&least)[2]) const {
#if BIAS == 1
    u32 pairs[4];
#if BIAS_TILES
    const int chunk = x + (lane() >> 4);  // of 8 columns
    ldmatrix_x4(sh.bias + (i % STAGES) * BIAS_BYTES + (x >> 3) * (BLOCK_M * 128) + (wg * 64 + warp * 16 + (lane() & 15)) * 128 +
                    (((chunk & 7) ^ (lane() & 7)) << 4),
                pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!BIAS_TILES) pairs[j] = bias[BIAS_ROWS == 2 ? 2 * x + j : x + j / 2];
      least[j & 1] = min_half2(least[j & 1], pairs[j]);
      const float2 pair = unpack_half2(pairs[j]);
      values[2 * j] = pair.x, values[2 * j + 1] = pair.y;
    }
#elif BIAS_TILES
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int y = x + j / 4, chunk = 2 * (y & 3) + (lane() >> 1 & 1);  // of 4 columns
      const float2 pair = shared_load_f2(sh.bias + (y >> 2) * (BLOCK_M * 128) + (line() + 4 * (j & 2)) * 128 +
                                         ((chunk ^ (line() & 7)) << 4) + 8 * (lane() & 1));
      values[j] = pair.x, values[j + 1] = pair.y;
      float low = __uint_as_float(least[j / 2 & 1]);
      least[j / 2 & 1] = __float_as_uint(fminf(low, fminf(pair.x, pair.y)));
    }
#else
#pragma unroll
    for (int j = 0; j < 8; j++) {
      values[j] = __uint_as_float(bias[BIAS_ROWS == 2 ? 4 * x + j : 2 * x + j / 4 * 2 + j % 2]);
      least[j & 1] = __float_as_uint(fminf(__uint_as_float(least[j & 1]), values[j]));
    }
#endif
  }
  __device__ __forceinline__ static bool is_low(u32 least) {
    if (BIAS == 2) return __uint_as_float(least) == NEG_INF;
    const float2 pair = unpack_half2(least);
    return fminf(pair.x, pair.y) == NEG_INF;
  }
  // Scores in natural units with the bias. Where it is -infinity it hides whatever the score is (NaN, too).
  __device__ __forceinline__ void add_bias(int i) {
    if (BIAS_APART) mbarrier_wait(sh.bias_full + 8 * wg, i & 1);
    float values[8];
    u32 least[2] = {0, 0};
#pragma unroll
    for (int x = 0; x < BLOCK_N / 8; x += 2) {
      get_bias(i, x, values, least);
#pragma unroll
      for (int j = 0; j < 8; j++) s[4 * x + j] = s[4 * x + j] * unit + values[j];
    }
    if (!__any_sync(~0u, is_low(least[0]) || is_low(least[1]))) return;
#pragma unroll
    for (int x = 0; x < BLOCK_N / 8; x += 2) {
      get_bias(i, x, values, least);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (values[j] == NEG_INF) (j & 2 ? shown1 : shown0) &= ~(1u << (2 * x + (j >> 2) * 2 + (j & 1)));
    }
  }
#endif
  // What is hidden becomes -infinity. Returns whether anything of the warp's is.
  __device__ __forceinline__ bool hide_scattered() {
    bool some = false;
#if SCATTERED
    some = __any_sync(~0u, (shown0 & shown1) != ALL_SEEN);
    if (some) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; i++)
        if (!((i & 2 ? shown1 : shown0) >> (i / 4 * 2 + i % 2) & 1)) s[i] = NEG_INF;
    }
#endif
    return some;
  }
  // The scores of key block n, which is in stage i.
  __device__ __forceinline__ void transform(int i, int n, bool edge, bool first = false) {
#if CAP_LATE
    if (first) cap();
    else if (!raw) cap_shared();
#else
    cap();
#endif
    add_alibi(n, first);
#if BIAS
    add_bias(i);
#endif
    if (BIAS_APART) mbarrier_arrive_if(sh.bias_empty + 8 * wg, lane() == 0);
    else if (BIAS_TILES) release_k(i);
    const bool some = hide_scattered();
    if (edge) hide(n);
    note_seen(edge, some);
  }

  // SCATTERED: a V row that no row of the tile sees becomes zeros: 0 * NaN is NaN. Every warp notes which keys its rows
  // see. One that sees all need not wait for the others: there is nothing to clean, and they find that out as well.
  // Otherwise, once all have, each warpgroup writes the zeros, the same ones, before its own reads.
  __device__ __forceinline__ u32 over_rows(u32 x) const {
    x |= __shfl_xor_sync(~0u, x, 4);
    x |= __shfl_xor_sync(~0u, x, 8);
    return x | __shfl_xor_sync(~0u, x, 16);
  }
  __device__ __forceinline__ void note_seen(bool edge, bool some) {
#if SKIPPING
    if (harmless) return;
#endif
#if SCATTERED
    seen = some ? shown0 | shown1 : ALL_SEEN;
    if (edge) {
      seen = 0;
#pragma unroll
      for (int x = 0; x < BLOCK_N / 8; x++) {
        if (s[4 * x] != NEG_INF || s[4 * x + 2] != NEG_INF) seen |= 1u << (2 * x);
        if (s[4 * x + 1] != NEG_INF || s[4 * x + 3] != NEG_INF) seen |= 2u << (2 * x);
      }
    }
#endif
  }
  __device__ __forceinline__ void clean_unseen(int i) {
#if SCATTERED
#if SKIPPING
    if (harmless) return;  // alike in all warps
    const int meeting = meetings++;
#else
    const int meeting = i;
#endif
    const int slot = meeting % SEEN_SLOTS;
    const u32 words = sh.seen + slot * (4 * NUM_WG * 16), full = sh.seen_full + 8 * slot;
    const u32 mine = over_rows(seen);
    if (lane() < 4) shared_store(words + (wg * 4 + warp) * 16 + 4 * lane(), mine);
    __syncwarp();
    mbarrier_arrive_if(full, lane() == 0);
    if (__all_sync(~0u, mine == ALL_SEEN)) return;
    mbarrier_wait(full, (meeting / SEEN_SLOTS) & 1);
    u32 word = 0;
    for (int x = lane() >> 2; x < 4 * NUM_WG; x += 8) word |= shared_load(words + x * 16 + 4 * (lane() & 3));
    word = over_rows(word);
    if (__all_sync(~0u, word == ALL_SEEN)) return;
    wait_v(i);
    const u32 base = sh.v + (i % STAGES) * V_BYTES + (lane() >> 3) * (BLOCK_N * 128) + (lane() & 7) * 16;
#pragma unroll 1
    for (int column = warp; column < BLOCK_N; column += 4) {
      const u32 of_quad = __shfl_sync(~0u, word, (column >> 1) & 3);
      if (!(of_quad >> (2 * (column >> 3) + (column & 1)) & 1) && (lane() >> 3) < SLABS_V)
        shared_store_v4(base + column * 128, 0, 0, 0, 0);
    }
    proxy_fence();
    barrier_sync(8 + wg, 128);
#endif
  }

  // Zeroes dropped weights, rounded already; the sums keep them.
  __device__ __forceinline__ void drop(int n) {
#if DROPOUT
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int x = 0; x < BLOCK_N / 8; x += 4) {
        const Philox4 words = dropout_words(key, row(tile) + 8 * half, n * BLOCK_N + 8 * x + 2 * (lane() & 3));
#pragma unroll
        for (int y = 0; y < 4; y++)
#pragma unroll
          for (int z = 0; z < 2; z++)
            if (dropout_draw(words, 8 * y + z) >= (u32)p.dropout_threshold) probs[2 * (x + y) + half] &= z ? 0xffffu : 0xffff0000u;
      }
#endif
  }

  // ---- softmax
  // Weights are 2^(score - reference) of a row. The reference is the maximum of the tile's first block, and a later maximum only
  // where a thread's weights of a block sum up to more than FAR: a step that finds none needs no maximum and rescales nothing.
  // NOTE: natural units subtract first: of huge scores the product's rounding error would be huge.
  __device__ __forceinline__ float weight(float score, float subtrahend) const {
    return exp2_approx(NATURAL ? (score - subtrahend) * scale : __fmaf_rn(score, scale, -subtrahend));
  }
  // What the scores' weights take off: of a row that has seen nothing -infinity, so that its weights are infinite or NaN.
  __device__ __forceinline__ void aim() {
    sub0 = NATURAL ? max0 : max0 * scale;
    sub1 = NATURAL ? max1 : max1 * scale;
    if (ALIBI) sub0 -= shift0 * scale, sub1 -= shift1 * scale;
  }
  // Takes the maxima of the scores and of what was, as references of the rows that `far` names (bits 0 and 1).
  __device__ __forceinline__ void refer(bool masked, bool first, u32 far = 3) {
    const float old0 = max0, old1 = max1;
    float a = NEG_INF, b = NEG_INF;
    if (ALIBI || first) max0 = max1 = NEG_INF;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i += 8) {
      max0 = fmaxf(max0, fmaxf(s[i], s[i + 1]));
      max1 = fmaxf(max1, fmaxf(s[i + 2], s[i + 3]));
      a = fmaxf(a, fmaxf(s[i + 4], s[i + 5]));
      b = fmaxf(b, fmaxf(s[i + 6], s[i + 7]));
    }
    max0 = fmaxf(max0, a);
    max1 = fmaxf(max1, b);
    if (ALIBI) max0 += shift0, max1 += shift1;
    if (ALIBI && !first) max0 = fmaxf(max0, old0), max1 = fmaxf(max1, old1);
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 1));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 1));
    max0 = fmaxf(max0, __shfl_xor_sync(~0u, max0, 2));
    max1 = fmaxf(max1, __shfl_xor_sync(~0u, max1, 2));
    if (!first) {
      if (!(far & 1)) max0 = old0;
      if (!(far & 2)) max1 = old1;
    }
    aim();
    if (masked) {  // a row that has seen nothing yet: its weights become 2^-infinity
      if (max0 == NEG_INF) sub0 = 0.f;
      if (max1 == NEG_INF) sub1 = 0.f;
    }
    if (first) return;
    shrink0 = far & 1 ? weight(old0, sub0 + (ALIBI ? shift0 * scale : 0.f)) : 1.f;
    shrink1 = far & 2 ? weight(old1, sub1 + (ALIBI ? shift1 * scale : 0.f)) : 1.f;
  }
  // Weights of 8 scores: summed, and rounded into `probs`. The scores stay.
  __device__ __forceinline__ void take(const float (&w)[8], int i, float (&sums)[4]) {
    sums[0] += w[0] + w[1];
    sums[1] += w[2] + w[3];
    sums[2] += w[4] + w[5];
    sums[3] += w[6] + w[7];
#pragma unroll
    for (int j = 0; j < 4; j++) probs[i / 2 + j] = pack_half2(w[2 * j], w[2 * j + 1]);
  }
  // CAPPED: scores are tanh's values (SOFTCAP).
  template <bool CAPPED = false> __device__ __forceinline__ void weigh(int i, float (&w)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#if CAP_LATE
      if (!CAPPED) {
        w[j] = capped_weight(i + j);
        continue;
      }
#endif
      w[j] = weight(s[i + j], j & 2 ? sub1 : sub0);
    }
  }
  // Weights of scores from `from` on, a multiple of 8; the rows' sums of all in sums[0] and sums[1].
  template <bool CAPPED = false> __device__ __forceinline__ void weigh_from(int from, float (&sums)[4]) {
#pragma unroll
    for (int i = from; i < BLOCK_N / 2; i += 8) {
      float w[8];
      weigh<CAPPED>(i, w);
      take(w, i, sums);
    }
    sums[0] += sums[2];
    sums[1] += sums[3];
  }
  // Of a tile's first block.
  __device__ __forceinline__ void weigh_first() {
    float sums[4] = {};
    weigh_from<true>(0, sums);
    sum0 = sums[0];
    sum1 = sums[1];
    aim();
#if CAP_LATE
    settle();
#endif
  }
  // Weights beyond what they may be: again, with references that fit. Rows without any keep theirs, bit for bit.
  __device__ __forceinline__ void weigh_again(bool masked, float (&sums)[4]) {
    touch(s);  // else ptxas keeps what both ways compute
    u32 far = (sums[0] <= FAR0 ? 0 : 1) | (sums[1] <= FAR1 ? 0 : 2);
    far |= __shfl_xor_sync(~0u, far, 1);
    far |= __shfl_xor_sync(~0u, far, 2);
#if CAP_LATE
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++)
      if (raw || !(CAP_SHARE >> (i & 7) & 1)) s[i] = tanh_approx(s[i] * cap_scale);
#endif
    if (MASK_AGAIN && masked) hide(block), far = 3;  // whatever hidden scores may be
    refer(true, false, far);
    sum0 *= shrink0, sum1 *= shrink1;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) o[i] *= i & 2 ? shrink1 : shrink0;
    sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
    weigh_from<true>(0, sums);
    aim();
#if CAP_LATE
    settle();
#endif
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) o[i] = 0.f;
  }

  // ---- tiles
  // Waits for this block's tile number i; whether there is one.
  __device__ __forceinline__ bool await_tile(int i) {
    const int buffer = i % Q_BUFFERS;
    mbarrier_wait(sh.q_full + 8 * (Q_APART ? wg : buffer), (i / Q_BUFFERS) & 1);
    const int word = (int)shared_load(sh.slot + SLOT_BYTES * (i % SLOTS));
    if (NARROW) {
      ends = uniform(word) >> (M_BITS + 2 * wg) & 3;
      const int all = uniform(word) >> M_BITS;
      next_idle = __popc(ends) - min(min(__popc(all & 3), __popc(all >> 2 & 3)), __popc(all >> 4 & 3));
    }
    return __all_sync(~0u, word >= 0);
  }
  // What was said of tile number i, which has come; everything into uniform registers.
  __device__ __forceinline__ Tile read_tile(int i) {
    const u32 slot = sh.slot + SLOT_BYTES * (i % SLOTS);
    Tile t;
    u32 a, b, c, d;
    shared_load_v4(slot, a, b, c, d);
    t.m = uniform(NARROW ? a & ((1 << M_BITS) - 1) : a), t.head = uniform(b), t.batch = uniform(c), t.q_start = VARLEN ? uniform(d) : 0;
    shared_load_v4(slot + 16, a, b, c, d);
    t.first = uniform(a), t.last = uniform(b), t.live = SKIPPING ? uniform(c) : 0, t.part = SPLIT ? uniform(d) : 0;
    if (NARROW) t.first -= ends & 1, t.last += ends >> 1;
#if VARIABLE
    shared_load_v4(slot + 32, a, b, c, d);
    t.q_len = uniform(a), t.kv_len = uniform(b), t.offset = uniform(c);
#else
    t.q_len = (int)p.seqlen_q, t.kv_len = (int)p.seqlen_kv, t.offset = (int)p.q_offset_value;
#endif
    return t;
  }
  // SPLIT: of a row of the tile; rows beyond the tile's heads take the last one.
  __device__ __forceinline__ int head_of(const Tile& t, int line) const {
    return min(t.head + (line >> (int)p.aux5), (int)p.heads_q - 1);
  }
  __device__ __forceinline__ void enter(const Tile& t) {
    tile = t;
    if (DROPOUT) key = dropout_key(p, t.batch, t.head);
#if ALIBI
    const float* slopes = (const float*)p.alibi_slopes + t.batch * p.alibi_slopes_stride_b;
    slope0 = slope1 = slopes[t.head] / unit;
    if (SPLIT) slope0 = slopes[head_of(t, line())] / unit, slope1 = slopes[head_of(t, line() + 8)] / unit;
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
#if VARIABLE && !SCATTERED
    const int end = tile.high_key(p) - tile.first * BLOCK_N;
    if (tile.first != EMPTY_BLOCK && end < BLOCK_N) {
      wait_v(count);
      zero_v_rows(count, end, BLOCK_N);
    }
#endif
  }
  __device__ __forceinline__ void clean_low_end() {
#if VARIABLE && HAS_LEFT && !SCATTERED
    const int begin = tile.low_key(p) - tile.last * BLOCK_N;
    if (tile.last != EMPTY_BLOCK && begin > 0) {
      const int i = count + tile.blocks() - 1;
      wait_v(i);
      zero_v_rows(i, 0, begin);
    }
#endif
  }

  // What sums and references come to, and the tile's lse. Before its O is complete: it need not wait for this.
  __device__ __forceinline__ void end_rows() {
    float l0 = sum0, l1 = sum1;
    l0 += __shfl_xor_sync(~0u, l0, 1);
    l1 += __shfl_xor_sync(~0u, l1, 1);
    l0 += __shfl_xor_sync(~0u, l0, 2);
    l1 += __shfl_xor_sync(~0u, l1, 2);
    const int r = row(tile), rows = VARLEN ? tile.q_len : (int)p.seqlen_q;
    normalise(tile, r, max0, l0, inverse0, lse0);
    normalise(tile, r + ROW_GAP, max1, l1, inverse1, lse1);
    if (SPLIT) return;
    float* lse = (float*)p.lse + tile.batch * p.lse_stride_b + tile.head * p.lse_stride_h + tile.q_start + r;
    store_if(lse, lse0, (lane() & 3) == 0 && r < rows);
    store_if(lse + 8, lse1, (lane() & 3) == 0 && r + 8 < rows);
  }
  // Divides by the sums, writes out of tile number i.
  __device__ __forceinline__ void leave(const Tile& t, int i) {
    const int r = row(t);
#if SPLIT
    store_part(t, line(), r, inverse0, lse0, 0);
    store_part(t, line() + 8, r + ROW_GAP, inverse1, lse1, 2);
#else
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 4; x++) {  // rounded in place: the packed pair takes the first float's register
      const float inverse = x & 1 ? inverse1 : inverse0;
      const u32 pair = pack_half2(o[2 * x] * inverse, o[2 * x + 1] * inverse);
      o[x] = __uint_as_float(VARIABLE && inverse == 0.f ? 0u : pair);  // a row beyond the length may be anything
    }
    const int rows = VARLEN ? t.q_len : (int)p.seqlen_q;
    if (STAGED)
      store_staged(t, i, rows);
    else
      store_direct(t, r, rows);
#endif
  }
  // NOTE: rounding is spelled out: a tile ends here or, as a block's last, in another copy of this code, and which of the
  // two is up to the counter; the same row must give the same bits.
  __device__ __forceinline__ void normalise(const Tile& t, int r, float m, float l, float& inverse, float& lse) {
    if (!NATURAL) m = __fmul_rn(m, __fmul_rn(scale, LN2));
    float shrink = DROPOUT ? (float)p.dropout_scale : 1.f;
#if SINKS && !SPLIT
    if (l > 0.f) {
      const float sink = ((const float*)p.sinks)[t.head], top = fmaxf(m, sink), weight = exp2_approx(__fmul_rn(m - top, LOG2E));
      l = __fmaf_rn(l, weight, exp2_approx(__fmul_rn(sink - top, LOG2E)));
      shrink = __fmul_rn(shrink, weight);
      m = top;
    }
#endif
    const bool empty = l == 0.f || (VARIABLE && r >= t.q_len);
    inverse = empty ? 0.f : __fdividef(shrink, l);
    lse = empty ? NEG_INF : __fmaf_rn(log2_approx(l), LN2, m);
  }
  // SPLIT: a row's share as float32, (part, batch, head, row, column) and, behind all of them, LSE.
  __device__ __forceinline__ void store_part(const Tile& t, int line, int r, float inverse, float lse, int register0) {
    const int group = (int)(p.heads_q / p.heads_kv), member = t.head % group + (line >> (int)p.aux5);
    if (line >> (int)p.aux5 >= (int)p.aux6 || member >= group || r >= (int)p.seqlen_q) return;
    const i64 rows = p.batch * p.heads_q * p.seqlen_q;
    const i64 at = t.part * rows + (t.batch * p.heads_q + t.head + (line >> (int)p.aux5)) * p.seqlen_q + r;
    float* to = (float*)p.scratch + at * p.head_dim_v + 2 * (lane() & 3);
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 8; x++) {
      const float a = o[4 * x + register0] * inverse, b = o[4 * x + register0 + 1] * inverse;
      if (8 * x < (int)p.head_dim_v) *(float2*)(to + 8 * x) = inverse == 0.f ? make_float2(0.f, 0.f) : make_float2(a, b);
    }
    if ((lane() & 3) == 0) ((float*)p.scratch)[p.aux4 * rows * p.head_dim_v + at] = lse;
  }
  __device__ __forceinline__ u32 packed(int x) { return __float_as_uint(o[x]); }

  // Through the tile's Q buffer; each warp by itself.
  __device__ __forceinline__ void store_staged(const Tile& t, int i, int rows) {
    const int first = wg * 64 + warp * 16, line = first + (lane() & 15);
    const u32 buffer = sh.q + (i % Q_BUFFERS) * Q_BYTES;
#pragma unroll
    for (int x = 0; x < HEAD_DIM_V / 16; x++)
      stmatrix_x4(buffer + (x >> 2) * (BLOCK_M * 128) + line * 128 + (((2 * (x & 3) + (lane() >> 4)) ^ (line & 7)) << 4),
                  packed(4 * x), packed(4 * x + 1), packed(4 * x + 2), packed(4 * x + 3));
    proxy_fence();
    __syncwarp();
    const int start = t.m * BLOCK_M + first;
#if VARLEN
    if (start + 16 > rows) return store_lines(t, buffer + first * 128, start, rows);
#endif
    if (lane() == 0) {
#pragma unroll
      for (int x = 0; x < SLABS_V; x++)
        tma_store(map_out, 64 * x, t.q_start + start, t.head, VARLEN ? 0 : t.batch, buffer + x * BLOCK_M * 128 + first * 128);
      bulk_commit();
    }
  }
  // VARLEN: the last rows of a sequence; a TMA box would run over the next sequence's.
  __device__ __forceinline__ void store_lines(const Tile& t, u32 from, int start, int rows) {
    u16* out = (u16*)p.out + (i64)(t.q_start + start) * p.out_stride_s + t.head * p.out_stride_h;
    for (int x = lane(); x < 16 * 8 * SLABS_V; x += 32) {
      const int chunk = x & 7, line = (x >> 3) & 15, slab = x >> 7, column = 64 * slab + 8 * chunk;
      u32 a, b, c, d;
      if (start + line < rows && column < (int)p.head_dim_v) {
        shared_load_v4(from + slab * (BLOCK_M * 128) + line * 128 + ((chunk ^ (line & 7)) << 4), a, b, c, d);
        *(uint4*)(out + line * p.out_stride_s + column) = make_uint4(a, b, c, d);
      }
    }
    __syncwarp();
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
        const int column = 4 * x + 8 * quad;
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
  // SKIPPING: the producer says which key block it is; else n. NOTE: before K is released.
  __device__ __forceinline__ void find_block(const Tile& t, int i, int n) {
    const u32 word = SKIPPING ? shared_load(sh.block + 4 * (i % STAGES)) : 4 * n;
    block = SKIPPING ? (int)(word >> 2) : n;
    whole = word & 1;
#if SKIPPING
    // beyond all lengths the maps give zeros
    const int end = VARIABLE ? (block + 1) * BLOCK_N : min((block + 1) * BLOCK_N, t.kv_len);
    harmless = word & 2 || (whole && t.high_key(p) >= end && t.low_key(p) <= block * BLOCK_N);
#endif
  }
  // S of block `s_block` from Q buffer `buffer` beside P V of block `v_block`, the one before it that the warpgroup sees.
  __device__ __forceinline__ void issue_both(int s_block, int v_block, int buffer) {
    turn_begin();
    touch(s);
    touch(o);
    wgmma_fence();
    issue_qk(s_block, buffer);
    wait_v(v_block);
    wgmma_fence();  // else ptxas injects it (C7519)
    issue_pv(v_block);
    turn_end();
  }
  // Until S, of tile t's block, is complete.
  __device__ __forceinline__ void await_s(int s_block, const Tile& t, int n) {
    find_block(t, s_block, n);
    load_operands(t, block);
    wgmma_wait<1>();
    touch(s);
    if (!BIAS_TILES || BIAS_APART) release_k(s_block);
  }
  __device__ __forceinline__ void step(int b, bool masked) {
    const int i = count + b;
    issue_both(i, i - 1, index % Q_BUFFERS);
    await_s(i, tile, tile.block(b));
    release_q(b == tile.blocks() - 1);
    if (SKIPPING && LOOP_MASKS) masked = crossed(block);
    transform(i, block, !MASK_AGAIN && masked);
    if (ALIBI) aim();
    float early[EARLY_EXPS + 1][8], sums[4] = {};
#pragma unroll
    for (int x = 0; x < EARLY_EXPS; x++) weigh(8 * x, early[x]);
    touch(s);
    // always comes: this tile's, the next one's first, or the producer's last arrival
    mbarrier_wait_before(sh.k_full + 8 * ((i + 1) % STAGES), ((i + 1) / STAGES) & 1, sub0, sub1);
    wgmma_wait<0>();
    touch(o);
#pragma unroll
    for (int x = 0; x < EARLY_EXPS; x++) take(early[x], 8 * x, sums);
    weigh_from(8 * EARLY_EXPS, sums);
    release_v(i - 1);
    if (__any_sync(~0u, (MASK_AGAIN && masked) || !(sums[0] <= FAR0 && sums[1] <= FAR1))) weigh_again(masked, sums);
    sum0 += sums[0];
    sum1 += sums[1];
    drop(block);
    clean_unseen(i);
  }
  // The tile's first block alone: its product, and what follows.
  __device__ __forceinline__ void open_product(const Tile& t, int i, int q) {
    wait_k(i);
    touch(s);
    wgmma_fence();
    issue_qk(i, q % Q_BUFFERS);
    find_block(t, i, t.block(0));
    load_operands(t, block);
  }
  __device__ __forceinline__ void open(const Tile& t) {
    enter(t);
    wgmma_wait<0>();
    touch(s);
    if (!BIAS_TILES || BIAS_APART) release_k(count);
    release_q(tile.blocks() == 1);
    transform(count, block, true, true);
    refer(true, true);
    weigh_first();
    drop(block);
    clean_unseen(count);
    wait_k(count + 1);
    clear();
    clean_high_end();
  }
  // The tile's last P V alone: the product, and what follows.
  __device__ __forceinline__ void close_product() {
    const int i = count + tile.blocks() - 1;
    clean_low_end();
    wait_v(i);
    touch(o);
    wgmma_fence();
    issue_pv(i);
    end_rows();
  }
  __device__ __forceinline__ void complete() {
    wgmma_wait<0>();
    touch(o);
    release_v(count + tile.blocks() - 1);
  }
  __device__ __forceinline__ void close() {
    complete();
    leave(tile, index);
  }
  // SKIPPING: whether a mask's edge crosses key block n of the warpgroup's rows.
  __device__ __forceinline__ bool crossed(int n) const {
    const int top = top_of(tile);
    if (HAS_RIGHT && (n + 1) * BLOCK_N > min(tile.kv_len, top + (int)p.window_right + 1)) return true;
    return HAS_LEFT && n * BLOCK_N < top + height() - (int)p.window_left;
  }
  __device__ __forceinline__ bool first_masked() const {
    return HAS_RIGHT || HAS_LEFT || VARIABLE || SCATTERED || p.seqlen_kv % BLOCK_N != 0;
  }
  // Blocks 1.. of the tile: those that a mask's upper edge crosses, those inside, those that its lower edge crosses.
  // NOTE: one loop; with a second one for the masked blocks ptxas runs out of registers and serialises the wgmmas (C7511).
  __device__ __forceinline__ void walk() {
    const int blocks = tile.blocks();
#if LOOP_MASKS
    const int top = top_of(tile);
    int clean = 1, low = blocks;  // first block below the upper edge, first that the lower edge crosses
    if (HAS_RIGHT) clean = tile.first + 1 - min(tile.kv_len, top + (int)p.window_right + 1) / BLOCK_N;
    if (HAS_LEFT) low = tile.first + 1 - (max(0, top + height() - (int)p.window_left) + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
    for (int b = 1; b < blocks; b++) step(b, b < clean || b >= low);
#elif ROTATE
    const bool uneven = p.seqlen_kv % BLOCK_N != 0;
#pragma unroll 1
    for (int b = 1; b < blocks; b++) step(b, uneven && tile.block(b) == tile.first);
#else
#pragma unroll 1
    for (int b = 1; b < blocks; b++) step(b, false);
#endif
  }
  // From this tile to the next: the next one's first S beside the last P V of this one.
  __device__ __forceinline__ void cross() {
    const int end = count + tile.blocks();
    const bool skipped = trail, skipping = NARROW && (ends & 1);
    const int i = end + skipped + skipping;
    const Tile old = tile;
    if (skipping) skip_k(i - 1);
    if (NARROW) wait_k(i);
    clean_low_end();
    issue_both(i, end - 1, (index + 1) % Q_BUFFERS);
    const Tile next = read_tile(index + 1);
    end_rows();
    await_s(i, next, next.block(0));
    enter(next);
    transform(i, block, first_masked(), true);
    refer(first_masked(), true);
    touch(s);
    // has come; here it keeps ptxas from hoisting the wait for P V over the shuffles
    mbarrier_wait_before(sh.q_full + 8 * ((index + 1) % Q_BUFFERS), ((index + 1) / Q_BUFFERS) & 1, sub0, sub1);
    wgmma_wait<0>();
    touch(o);
    weigh_first();
    release_v(end - 1);
    drop(block);
    leave(old, index);
    if (skipped) skip_v(end);
    if (skipping) skip_v(i - 1);
    trail = NARROW && ends >> 1;
    if (NARROW) idle = next_idle;
    wait_k(i + 1);
    clear();
    index++;
    count = uniform(i);  // the stores above make ptxas think that lanes differ
    clean_high_end();
    clean_unseen(i);
  }
  __device__ __forceinline__ void run() {
    index = count = 0;
#if SKIPPING
    meetings = 0;
#endif
    if (!await_tile(0)) return;
    const Tile first = read_tile(0);
    trail = NARROW && ends >> 1;
    if (NARROW) idle = next_idle;
    if (NARROW && (ends & 1)) skip_k(count++);
    open_product(first, count, 0);
    open(first);
    if (count) skip_v(0);
#pragma unroll 1
    for (;;) {
      walk();
      if (STAGED) {
        for (int x = 0; NARROW && PINGPONG && x < idle; x++) turn_begin(), turn_end();
        if (trail) skip_k(count + tile.blocks());
        release_out(index - 1);  // NOTE: before any wait for what the producer brings behind the Q that goes there
        if (!await_tile(index + 1)) break;
        cross();
      } else if (Q_APART) {  // the next Q has come by now: O leaves beside its first product
        close_product();
        complete();
        if (!await_tile(index + 1)) return leave(tile, index);
        const int i = count + tile.blocks();
        const Tile old = tile, next = read_tile(index + 1);
        open_product(next, i, index + 1);
        leave(old, index++);
        count = uniform(i);
        open(next);
      } else {
        close_product();
        close();
        count = uniform(count + tile.blocks());
        if (!await_tile(++index)) return;
        const Tile next = read_tile(index);
        open_product(next, count, index);
        open(next);
      }
    }
    close_product();
    close();
    if (lane() == 0) bulk_wait_read<0>();
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
    fwd_sm90(const __grid_constant__ Params p, const __grid_constant__ TMap map_q, const __grid_constant__ TMap map_k,
             const __grid_constant__ TMap map_v, const __grid_constant__ TMap map_out
#if BIAS_TILES
             ,
             const __grid_constant__ TMap map_bias
#endif
    ) {
  extern __shared__ unsigned char memory[];
  const Shared sh = shared_layout(shared_address(memory));
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0);  // uniform
  if (threadIdx.x == 0) init_barriers(sh);
  if (SPLIT) {  // lines that no row ever comes to: whatever they held, weights could outgrow their reference in each step
    for (int x = 16 * threadIdx.x; x < Q_BYTES; x += 16 * NUM_THREADS) shared_store_v4(sh.q + x, 0, 0, 0, 0);
    proxy_fence();
  }
  __syncthreads();
  if (wg == 0) {
    if (NUM_WG > 1) registers_give<NUM_WG == 3 ? 32 : SKIPPING || VARLEN ? 56 : 40>();
    if (VARLEN && threadIdx.x < 32 && p.batch <= LISTED) list_sequences(p, sh.list);
    if (threadIdx.x == 0) {
      tma_prefetch(&map_q), tma_prefetch(&map_k), tma_prefetch(&map_v), tma_prefetch(&map_out);
#if !BIAS_TILES
      const TMap& map_bias = map_q;  // not looked at
#endif
      Producer producer{p, sh, &map_q, &map_k, &map_v, &map_bias, (int)(p.heads_q / p.heads_kv)};
      producer.run();
    }
  } else {
    if (NUM_WG > 1) registers_take<NUM_WG == 3 ? 160 : SKIPPING || VARLEN ? 224 : 232>();
    const int w = wg - 1, tid = threadIdx.x & 127;
    if (PINGPONG && w == NUM_WG - 1) barrier_arrive(1, 256);  // the first warpgroup begins
    Consumer consumer{p, sh, &map_out, w, uniform(tid >> 5), tid};
    consumer.q_desc = wgmma_descriptor(sh.q + w * 64 * 128, 16, 1024);
    consumer.k_desc = wgmma_descriptor(sh.k, 16, 1024);
    consumer.v_desc = wgmma_descriptor(sh.v, BLOCK_N * 128, 1024);
    const float softmax_scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
    consumer.unit = SOFTCAP ? (float)p.softcap : softmax_scale;
    consumer.scale = NATURAL ? LOG2E : consumer.unit * LOG2E;
    consumer.cap_scale = SOFTCAP ? softmax_scale / (float)p.softcap : 0.f;
    consumer.run();
  }
}
