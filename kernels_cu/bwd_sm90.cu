// Attention backward for Hopper (sm_90a), fp16 and bf16: dK and dV of one key block per CTA, dQ added up in float32.
// One producer warp (TMA), two warps that add finished dQ tiles to global memory, two consumer warpgroups of 64 keys each.
// Scores are kept transposed (keys by queries): P^T and dS^T are then wgmma's A operand as they lie in registers, and only
// dS passes through shared memory. Steps: bwd_sm90_delta.cu before, bwd_sm90_convert.cu after.
//
// Shared memory: K and V (128 keys), rings of Q with LSE and of dO with delta, two dS tiles, one float32 dQ tile.
// Rows and keys are counted among the visible ones (bwd_sm90.cuh).
#define BLOCK_N 128
#ifndef PINGPONG  // the warpgroups take turns in issuing S^T and dP^T
#define PINGPONG 0
#endif
#ifndef V_REGS  // steps of 16 columns of V that stay in registers: less shared memory traffic
#define V_REGS 0
#endif
#ifndef LSE_AHEAD  // pairs of LSE that a thread fetches before its scores are there
#define LSE_AHEAD 0
#endif
#ifndef DBIAS_TILES  // dS is the bias's gradient as well: it leaves by TMA, with dQ
#define DBIAS_TILES 0
#endif
#ifndef DBIAS_ZEROS  // a warp of its own writes zeros above the key block's first query block
#define DBIAS_ZEROS 0
#endif
#ifndef DBIAS_SUMS  // dS of a key's queries is summed, for the gradient of a bias of keys
#define DBIAS_SUMS 0
#endif
#define DS_TILES (WANT_DQ ? 2 : 0)
#define DQ_BYTES (WANT_DQ ? BLOCK_M * HEAD_DIM * 4 : 0)
#include "bwd_sm90_scores.cuh"

#if DBIAS_TILES
#define MAP_DBIAS &map_dbias
#define AND_MAP_DBIAS , const __grid_constant__ TMap map_dbias
static_assert(BIAS == 1 && WANT_DQ && DQ_TILES == 1, "dS stays where it is until dQ's only tile is free");
#else
#define MAP_DBIAS nullptr
#define AND_MAP_DBIAS
#endif

#define DQ_SPLIT (D == 128)                      // dQ^T's warpgroups split its head dims; otherwise its query rows
#define DQ_N (DQ_SPLIT ? BLOCK_M : BLOCK_M / 2)  // query rows of a warpgroup's part of dQ^T

// Where a tile's first 64 query rows see no key of the second warpgroup, as on a causal diagonal, those scores are cut out.
#ifndef CUT
#define CUT 0
#endif
static_assert(!CUT || BLOCK_M == 64 || (BLOCK_M == 128 && !DQ_SPLIT), "dQ's part of a cut tile has all of its keys, or 64");
static_assert(!CUT || !(SKIPPING || DROPOUT || BIAS || TRANSFORM), "whole tiles");
enum Cut { WHOLE, CUT_FIRST, CUT_SECOND };  // for the first warpgroup, for the second

// ------------------------------------------------------------------------------------------------ dQ writers
#define STORED (1 << 20)  // in a block's turns: its first sum is there

// Whether nobody has added to a block before; otherwise waits until one may. Deterministic: key blocks take turns in their order.
// `before` is what claim_turn found.
__device__ __forceinline__ bool may_store([[maybe_unused]] const Params& p, const Work& w, [[maybe_unused]] int head, int m,
                                          int* turns, int before) {
#if DETERMINISTIC
  const int turn = turn_of(p, w, head, m);
  if (turn > 0) wait_for_turn(turns, turn);
  return turn == 0;
#else
  if (before > 0 && before < STORED) wait_for_turn(turns, STORED);
  proxy_fence_global();
  return before == 0;
#endif
}

// Adds warpgroup `part`'s half of each dQ tile to global memory. Who comes first stores, so that nothing needs to be zeroed.
// NOTE: waits for others only when its own sums are there and others know it, so that nobody waits for who waits.
__device__ __forceinline__ void write_dq(const Params& p, const Work& w, [[maybe_unused]] const TMap* map_dbias, u32 base, int part,
                                         int lane) {
  const int group = group_of(p);
  const u32 src = base + S_DQ + part * (DQ_BYTES / 2);
  int left = steps_of(p, w, group);
  if (left > 0) barrier_arrive(DQ_EMPTY(part, 0), 160);
  if (DQ_TILES > 1 && left > 1) barrier_arrive(DQ_EMPTY(part, 1), 160);
  dependency_wait();
  int tile = 0;  // of dQ in shared memory
  [[maybe_unused]] u32 ds = base + S_DS + part * (BLOCK_M * 128);
  int* pass = nullptr;  // turns to hand on when the last sum is there
  for (int g = 0; g < group; g++) {
    const int block = (int)(first_sum(p, w.seen, w.head_kv * group + g) / BLOCK_M);
    const Walk walk(p, w, w.head_kv * group + g);
    for (int i = 0, m = walk.first(), blocks = walk.blocks(); i < blocks; i++, m = walk.after(m)) {
      const int half = 2 * (block + m) + part;
      int* turns = p.semaphore + half;
      bool store = false;
      if (lane == 0) {
        if (pass) {
          const int before = DETERMINISTIC ? 0 : claim_turn(turns);  // comes while the last sum is awaited
          bulk_wait<0>();
          pass_turn(pass, DETERMINISTIC ? 1 : STORED);
          store = may_store(p, w, w.head_kv * group + g, m, turns, before);
        } else {
          store = may_store(p, w, w.head_kv * group + g, m, turns, DETERMINISTIC ? 0 : claim_turn(turns));
        }
        pass = DETERMINISTIC || store ? turns : nullptr;
      }
      barrier_sync(DQ_FULL(part, tile), 160);
      if (lane == 0) {
        float* dst = p.dq_accum + (i64)half * (BLOCK_M * D / 2);
        proxy_fence();
        if (store)
          bulk_store(dst, src + tile * DQ_BYTES, DQ_BYTES / 2);
        else
          bulk_reduce_add_f32(dst, src + tile * DQ_BYTES, DQ_BYTES / 2);
#if DBIAS_TILES
        tma_store(map_dbias, w.seen.key_begin + w.n * BLOCK_N + 64 * part, w.seen.row_begin + m * BLOCK_M, w.head_kv * group + g,
                  w.seen.entry.batch, ds);
#endif
        bulk_commit();
        bulk_wait_read<0>();
      }
      if (DBIAS_TILES) ds = 2 * (base + S_DS + part * (BLOCK_M * 128)) + DS_BYTES - ds;
      __syncwarp();
      if (--left >= DQ_TILES) barrier_arrive(DQ_EMPTY(part, tile), 160);
      if (DQ_TILES > 1) tile ^= 1;
    }
  }
  if (lane == 0 && (pass || p.aux4 > 0)) {
    bulk_wait<0>();
    if (pass) pass_turn(pass, DETERMINISTIC ? 1 : STORED);
    if (p.aux4 > 0) pass_turn(slots_done(p, w.section), 1);
  }
}

#if DBIAS_ZEROS
// Zeros where no query of the heads sees this key block's keys.
__device__ __forceinline__ void zero_dbias(const Params& p, const Work& w, int lane) {
  const int key = w.n * BLOCK_N + lane % 16 * 8, rows = min(w.seen.row_begin + w.m_begin * BLOCK_M, (int)p.seqlen_q);
  if (key >= p.seqlen_kv) return;
  for (int g = 0; g < group_of(p); g++) {
    u16* to = (u16*)p.dbias + w.seen.entry.batch * p.dbias_stride_b + (w.head_kv * group_of(p) + g) * p.dbias_stride_h + key;
    to += lane / 16 * p.dbias_stride_q;
    for (int row = lane / 16; row < rows; row += 2, to += 2 * p.dbias_stride_q) *(uint4*)to = make_uint4(0, 0, 0, 0);
  }
}
#endif

// ------------------------------------------------------------------------------------------------ consumers
__device__ __forceinline__ void consume(const Params& p, [[maybe_unused]] const TMap* map_dk, [[maybe_unused]] const TMap* map_dv,
                                        const Work& w, u32 base, int part) {
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const int group = group_of(p), steps = steps_of(p, w, group);
  const float softmax_scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  [[maybe_unused]] const float scale_log2 = softmax_scale * (float)LOG2E;
  const float unit = NATURAL ? (float)LOG2E : TRANSFORM ? 1.f : scale_log2;
  float dk[D / 2], dv[DV / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dk[i] = 0.f;
#pragma unroll
  for (int i = 0; i < DV / 2; i++) dv[i] = 0.f;
  if (WANT_DK) touch(dk);
  if (WANT_DV) touch(dv);
#if DBIAS_SUMS
  static_assert(BIAS_OF_KEYS && NEED_DS, "the bias is alike for all queries");
  float of_keys[2] = {0.f, 0.f};  // this thread's keys
#endif

  const int key0 = w.n * BLOCK_N, row = part * 64 + warp * 16 + (lane >> 2);  // this thread's keys: row, row + 8
  const int keys = w.seen.keys - key0;  // of this block; may be more than BLOCK_N
  [[maybe_unused]] const u32 ds_to = base + S_DS + part * (BLOCK_M * 128) + ((lane >> 4) * 8 + (lane & 7)) * 128 +
                    (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  [[maybe_unused]] const u32 dq_to = base + S_DQ + part * (DQ_BYTES / 2) + thread * 16;
  const u32 row_from = (lane & 3) * 8;

  // First and last query row, less this thread's first column, that see its two keys
  int low0 = row < keys ? -0x40000000 : 0x40000000, low1 = row + 8 < keys ? -0x40000000 : 0x40000000;
#if HAS_RIGHT
  const int right = key0 + row - w.seen.right - 2 * (lane & 3);
  low0 = max(low0, right);
  low1 = max(low1, right + 8);
#endif
#if HAS_LEFT
  const int high0 = key0 + row - w.seen.left - 2 * (lane & 3);
#endif
  int clean_begin = w.m_begin, clean_end = w.m_end;  // these query blocks need no mask
#if HAS_RIGHT
  clean_begin = max(clean_begin, ceil_div(max(key0 + BLOCK_N - 1 - w.seen.right, 0), BLOCK_M));
#endif
#if HAS_LEFT
  clean_end = min(clean_end, (key0 - w.seen.left + 1) / BLOCK_M);
#endif
  if (keys < BLOCK_N) clean_end = clean_begin;

  const u32 base16 = (base & 0x3FFFF) >> 4;
  auto issue_s = [&](auto& s, int stage) INLINE {  // S^T = K Q^T, of a tile's last query rows
    constexpr int rows = sizeof(s) / 2, from = BLOCK_M - rows;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      Wgmma<rows>::ss(s, operand(base16 + part * 512, S_K + (k >> 2) * (BLOCK_N * 128) + 32 * (k & 3), 16),
                      operand(base16 + stage * (Q_BYTES >> 4), S_Q + (k >> 2) * (BLOCK_M * 128) + from * 128 + 32 * (k & 3), 16),
                      k > 0);
    wgmma_commit();
  };
  u32 v_rows[4 * V_REGS + 1];  // the first columns of this warpgroup's V as A operand
  [[maybe_unused]] auto issue_dp = [&](auto& dp, int stage) INLINE {  // dP^T = V dO^T
    constexpr int rows = sizeof(dp) / 2, from = BLOCK_M - rows;
#pragma unroll
    for (int k = 0; k < DV / 16; k++) {
      const u64 g = operand(base16 + stage * (DO_BYTES >> 4), S_DO + (k >> 2) * (BLOCK_M * 128) + from * 128 + 32 * (k & 3), 16);
      if (k < V_REGS)
        Wgmma<rows>::rs(dp, v_rows[4 * k], v_rows[4 * k + 1], v_rows[4 * k + 2], v_rows[4 * k + 3], g, k > 0);
      else
        Wgmma<rows>::ss(dp, operand(base16 + part * 512, S_V + (k >> 2) * (BLOCK_N * 128) + 32 * (k & 3), 16), g, k > 0);
    }
    wgmma_commit();
  };

  auto wait_q = [&](const Ring& r, int m) INLINE {
    mbarrier_wait(base + BAR_Q_FULL + 8 * r.stage, r.parity);
#if VARIABLE
    zero_tail<D / 64, BLOCK_M>(base + S_Q + r.stage * Q_BYTES, w.seen.rows - m * BLOCK_M, part, thread);
#endif
  };
  auto wait_do = [&](const Ring& r, int m) INLINE {
    mbarrier_wait(base + BAR_DO_FULL + 8 * r.stage, r.parity);
#if VARIABLE
    zero_tail<DV / 64, BLOCK_M>(base + S_DO + r.stage * DO_BYTES, w.seen.rows - m * BLOCK_M, part, thread);
#endif
  };

  [[maybe_unused]] Features<BLOCK_M / 2> features(p, w, row, 2 * (lane & 3), part * 128 + thread, softmax_scale);
#if DROPOUT
  const DropoutKey dropout = dropout_key(p, w.seen.entry.batch, 0);
  const float dropout_scale = (float)p.dropout_scale;
#endif

  Ring rq{0, 0}, rdo{0, 0};
  int m = w.m_first, left = steps;
  [[maybe_unused]] int head = 0;  // in the group
  auto step = [&](int ds_buffer, auto is_last, auto is_cut) INLINE {
    constexpr bool last = decltype(is_last)::value;
    constexpr Cut cut = decltype(is_cut)::value;
    constexpr int FROM = cut == CUT_SECOND ? 64 : 0, ROWS = BLOCK_M - FROM;  // this warpgroup's scores
    constexpr bool SCORES = ROWS > 0;
    // Where dQ's rows end, and its keys: of those cut out none
    [[maybe_unused]] constexpr int DQ_END = cut == CUT_FIRST || DQ_SPLIT ? DQ_N : 2 * DQ_N;
    [[maybe_unused]] constexpr int DQ_KEYS = cut != WHOLE && DQ_END <= 64 ? 64 : BLOCK_N;
    [[maybe_unused]] float s[SCORES ? ROWS / 2 : 1], dp[SCORES ? ROWS / 2 : 1];
    const int q_stage = rq.stage;
#if SKIPPING
    mbarrier_wait(base + BAR_Q_FULL + 8 * rq.stage, rq.parity);
    u32 block, of_head, whole, none;  // what the stage holds
    shared_load_v4(base + S_SLOT + 16 * rq.stage, block, of_head, whole, none);
    m = (int)block;
    head = (int)of_head - w.head_kv * group;
#else
    const int next_m = w.after(m);
#endif
    wait_q(rq, m);
#if SCATTERED
    wait_do(rdo, m);
    clean_rows(base + S_Q + rq.stage * Q_BYTES, base + S_DO + rdo.stage * DO_BYTES, base + S_LSE + rq.stage * ROW_BYTES,
               w.seen.rows - m * BLOCK_M, part, thread);
#endif
    if (PINGPONG) barrier_sync(ID_TURN + part, 256);
    wgmma_fence();
    if constexpr (SCORES) issue_s(s, rq.stage);
#if !SCATTERED
    wait_do(rdo, m);
#endif
#if NEED_DS
    wgmma_fence();
    if constexpr (SCORES) issue_dp(dp, rdo.stage);
#endif
    if (PINGPONG && !(last && part == 1)) barrier_arrive(ID_TURN + 1 - part, 256);
    features.load_mask(w.head_kv * group + head, m);
#if DROPOUT
    u32 kept[WORDS];
    DropoutKey key = dropout;
    key.head += w.head_kv * group + head;
    kept_weights(kept, p, key, w.seen.row_begin + m * BLOCK_M, (w.seen.key_begin + key0) / 32 + 2 * part + (warp >> 1),
                 base + S_KEPT + ds_buffer * KEPT_BYTES, part, warp, lane);
#endif
    const u32 lse_at = base + S_LSE + q_stage * ROW_BYTES + row_from + FROM * 4;
    [[maybe_unused]] float2 ahead[LSE_AHEAD + 1];
#pragma unroll
    for (int i = 0; i < (SCORES ? LSE_AHEAD : 0); i++) ahead[i] = shared_load_f2(lse_at + i * 32);
    if constexpr (SCORES) {
      wgmma_wait<NEED_DS>();
      touch(s);
    }
#if TRANSFORM
    features.transform(s, w.head_kv * group + head, m, ds_to - S_DS + S_BIAS + q_stage * BIAS_BYTES);
#endif
    if (SCORES && (m < clean_begin || m >= clean_end)) {
      const int shift = m * BLOCK_M + FROM;
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) {
        const int column = 8 * (i >> 2) + (i & 1) + shift;
        bool seen = column >= ((i & 2) ? low1 : low0);
#if HAS_LEFT
        seen = seen && column <= high0 + ((i & 2) ? 8 : 0);
#endif
        if (!seen) s[i] = __int_as_float(0xff800000);
      }
    }
#if SKIPPING
    features.hide(s, m, whole);
#endif
    rq.next(STAGES);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {  // S^T -> P^T
      const float2 l = i / 4 < LSE_AHEAD ? ahead[min(i / 4, LSE_AHEAD)] : shared_load_f2(lse_at + i * 8);
#if NATURAL
#pragma unroll
      for (int x = i; x < i + 4; x++) s[x] = exp2_approx((s[x] - (x & 1 ? l.y : l.x)) * unit);
#else
      s[i] = exp2_approx(s[i] * unit - l.x);
      s[i + 1] = exp2_approx(s[i + 1] * unit - l.y);
      s[i + 2] = exp2_approx(s[i + 2] * unit - l.x);
      s[i + 3] = exp2_approx(s[i + 3] * unit - l.y);
#endif
    }
#if NEED_DS
    if constexpr (SCORES) {
      wgmma_wait<0>();
      touch(dp);
    }
#endif
    [[maybe_unused]] u32 pp[SCORES ? ROWS / 4 : 1], ds[SCORES ? ROWS / 4 : 1];
    [[maybe_unused]] const u32 delta_at = base + S_DELTA + rdo.stage * ROW_BYTES + row_from + FROM * 4;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 4) {
#if NEED_DS
      float2 d = shared_load_f2(delta_at + i * 8);
#endif
#if DROPOUT
      float w4[4];
#pragma unroll
      for (int x = 0; x < 4; x++) {
        w4[x] = is_kept(kept, i + x) ? s[i + x] : 0.f;
        if (NEED_DS) dp[i + x] = is_kept(kept, i + x) ? dp[i + x] : 0.f;
      }
      pp[i / 2] = pack_half2(w4[0], w4[1]);
      pp[i / 2 + 1] = pack_half2(w4[2], w4[3]);
#else
      pp[i / 2] = pack_half2(s[i], s[i + 1]);
      pp[i / 2 + 1] = pack_half2(s[i + 2], s[i + 3]);
#endif
#if NEED_DS
#if SCATTERED || DROPOUT || SOFTCAP
#pragma unroll
      for (int x = i; x < i + 4; x++) {  // where nothing is seen, dP and delta may be anything
#if DROPOUT
        dp[x] = fmaf(dp[x], dropout_scale, x & 1 ? -d.y : -d.x);
#else
        dp[x] -= x & 1 ? d.y : d.x;
#endif
        if (SOFTCAP) dp[x] *= features.grade(x);
        s[x] = SCATTERED && s[x] == 0.f ? 0.f : s[x] * dp[x];
      }
#if DBIAS_SUMS
      of_keys[0] += s[i] + s[i + 1];
      of_keys[1] += s[i + 2] + s[i + 3];
#endif
      ds[i / 2] = pack_half2(s[i], s[i + 1]);
      ds[i / 2 + 1] = pack_half2(s[i + 2], s[i + 3]);
#else
      ds[i / 2] = pack_half2(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
      ds[i / 2 + 1] = pack_half2(s[i + 2] * (dp[i + 2] - d.x), s[i + 3] * (dp[i + 3] - d.y));
#endif
#endif
    }
#if WANT_DQ
#pragma unroll
    for (int j = 0; j < ROWS / 16; j++)
      stmatrix_x4_trans(ds_to + ds_buffer * DS_BYTES + FROM * 128 + j * 2048, ds[4 * j], ds[4 * j + 1], ds[4 * j + 2],
                        ds[4 * j + 3]);
#endif
    auto add_dk = [&]() INLINE {  // dK += dS^T Q
#if WANT_DK
      if constexpr (!SCORES) return;
      touch(dk);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < ROWS / 16; k++)
        Wgmma<D>::template rs<1>(dk, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3],
                                 operand(base16 + q_stage * (Q_BYTES >> 4), S_Q + FROM * 128 + k * 2048, BLOCK_M * 128), 1);
      wgmma_commit();
#endif
    };
#if WANT_DV
    if constexpr (SCORES) {
      touch(dv);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < ROWS / 16; k++)  // dV += P^T dO
        Wgmma<DV>::template rs<1>(dv, pp[4 * k], pp[4 * k + 1], pp[4 * k + 2], pp[4 * k + 3],
                                  operand(base16 + rdo.stage * (DO_BYTES >> 4), S_DO + FROM * 128 + k * 2048, BLOCK_M * 128), 1);
      wgmma_commit();
    }
#endif
#if WANT_DQ
    proxy_fence();
    barrier_sync(ID_DS, 256);
    float dq[DQ_N / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DQ_KEYS / 16; k++)  // dQ^T = K^T dS^T
      Wgmma<DQ_N>::template ss<1, 0>(
          dq, operand(base16 + (DQ_SPLIT ? part * (BLOCK_N * 8) : 0), S_K + k * 2048, BLOCK_N * 128),
          operand(base16 + ds_buffer * (DS_BYTES >> 4) + (DQ_SPLIT ? 0 : part * (DQ_N * 8)),
                  S_DS + (k >> 2) * (BLOCK_M * 128) + 32 * (k & 3), 16),
          k > 0);
    wgmma_commit();
#else
    add_dk();
#endif
#if WANT_DV
    if constexpr (SCORES) {
      wgmma_wait<NEED_DS>();
      touch(dv);
    }
#endif
    if (lane == 0) mbarrier_arrive(base + BAR_DO_EMPTY + 8 * rdo.stage);
#if WANT_DQ
    add_dk();
    wgmma_wait<WANT_DK && SCORES>();
    touch(dq);
    const int dq_tile = DQ_TILES > 1 ? ds_buffer : 0;
    barrier_sync(DQ_EMPTY(part, dq_tile), 160);
#pragma unroll
    for (int i = 0; i < DQ_N / 8; i++)
      shared_store_v4(dq_to + dq_tile * DQ_BYTES + i * 2048, __float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]), __float_as_uint(dq[4 * i + 2]),
                      __float_as_uint(dq[4 * i + 3]));
    barrier_arrive(DQ_FULL(part, dq_tile), 160);
#endif
    rdo.next(STAGES_DO);
#if WANT_DK
    if constexpr (SCORES) {
      wgmma_wait<0>();
      touch(dk);
    }
#endif
    if (lane == 0) mbarrier_arrive(base + BAR_Q_EMPTY + 8 * q_stage);
#if !SKIPPING
    m = next_m;
    if ((ALIBI || BIAS || DROPOUT) && m == w.m_first) head++;
#endif
    left--;
  };

  mbarrier_wait(base + BAR_K, 0);  // also without steps: the loads must land before this CTA leaves
  if (NEED_DS) mbarrier_wait(base + BAR_V, 0);
#if VARIABLE
  zero_tail<D / 64, BLOCK_N>(base + S_K, keys, part, thread);
  zero_tail<DV / 64, BLOCK_N>(base + S_V, keys, part, thread);
#endif
#if CLEANS_KEYS
  clean_keys<D / 64>(base + S_K, part, thread);
  if (NEED_DS) clean_keys<DV / 64>(base + S_V, part, thread);
  barrier_sync(ID_WARPGROUP + part, 128);
#endif
#if V_REGS
#pragma unroll
  for (int k = 0; k < V_REGS; k++) {
    const int r = part * 64 + warp * 16 + (lane & 15);
    ldmatrix_x4(base + S_V + (k >> 2) * (BLOCK_N * 128) + r * 128 + (((2 * (k & 3) + (lane >> 4)) ^ (r & 7)) << 4), v_rows[4 * k],
                v_rows[4 * k + 1], v_rows[4 * k + 2], v_rows[4 * k + 3]);
  }
#endif
  if (steps > 0) {
    if (PINGPONG && part == 1) barrier_arrive(ID_TURN, 256);
    int buffer = 0;
#if CUT  // only the first step, so that the others' code stays as it is
    if (left > 1 && m * BLOCK_M + 63 + w.seen.right < key0 + 64) {
      if (part == 0)
        step(buffer, False(), Constant<CUT_FIRST>());
      else
        step(buffer, False(), Constant<CUT_SECOND>());
      buffer ^= 1;
    }
#endif
#pragma unroll 1
    for (; left > 1; buffer ^= 1) step(buffer, False(), Constant<WHOLE>());
    step(buffer, True(), Constant<WHOLE>());
  }

  dependency_wait();
#if DBIAS_SUMS
  float* sums = (float*)p.dbias + w.seen.entry.batch * p.dbias_stride_b + w.head_kv * p.dbias_stride_h + w.seen.key_begin + key0 + row;
#pragma unroll
  for (int x = 0; x < 2; x++) {
    of_keys[x] += __shfl_xor_sync(~0u, of_keys[x], 1);
    of_keys[x] += __shfl_xor_sync(~0u, of_keys[x], 2);
    if ((lane & 3) == 0 && row + 8 * x < keys) sums[8 * x] = of_keys[x];
  }
#endif
#if STORE_BOXES
#if WANT_DV
  store_boxes<DV>(dv, DROPOUT ? (float)p.dropout_scale : 1.f, base + S_V + part * 8192, BLOCK_N * 128, map_dv, w, part * 64, warp,
                  lane);
#endif
#if WANT_DK
  barrier_sync(ID_DS, 256);  // K is free: both warpgroups have their dQ
  store_boxes<D>(dk, softmax_scale, base + S_K + part * 8192, BLOCK_N * 128, map_dk, w, part * 64, warp, lane);
#endif
  bulk_wait_read<0>();
#else
  const i64 at = key0 + part * 64;
  u16* dv_to = (u16*)p.dv + first_key(w.seen, w.head_kv, p.dv_stride_b, p.dv_stride_h, p.dv_stride_s) + at * p.dv_stride_s;
  u16* dk_to = (u16*)p.dk + first_key(w.seen, w.head_kv, p.dk_stride_b, p.dk_stride_h, p.dk_stride_s) + at * p.dk_stride_s;
  [[maybe_unused]] const int rows = keys - part * 64;
#if WANT_DV
  store_gradient<DV>(dv, DROPOUT ? (float)p.dropout_scale : 1.f, base + S_V + part * 8192, BLOCK_N * 128, dv_to, p.dv_stride_s, rows,
                     (int)p.head_dim_v, warp, lane);
#endif
#if WANT_DK
  barrier_sync(ID_DS, 256);  // K is free: both warpgroups have their dQ
  store_gradient<D>(dk, softmax_scale, base + S_K + part * 8192, BLOCK_N * 128, dk_to, p.dk_stride_s, rows, (int)p.head_dim, warp,
                    lane);
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_sm90(const __grid_constant__ Params p, const __grid_constant__ TMap map_q,
                            const __grid_constant__ TMap map_k, const __grid_constant__ TMap map_v,
                            const __grid_constant__ TMap map_do AND_MAP_BIAS AND_MAP_DBIAS AND_MAP_DK AND_MAP_DV) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const Job job = job_of(p, blockIdx.x);
  dependency_launch();
  if (job.role != TILE) {
    if (WANT_DQ && job.role != NOTHING) do_share(p, job, base);
    return;
  }
  const Work w = work_of(p, job);
  if (w.n * BLOCK_N >= w.seen.keys) {
    hide(p, w);
    return;
  }
  if (threadIdx.x == 0) {
    init_barriers(base);
    load_keys(p, &map_k, &map_v, w, base);
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_give<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (warp == 0) {
      if (threadIdx.x == 0) produce(p, &map_q, nullptr, nullptr, &map_do, MAP_BIAS, w, base);
    } else if (WANT_DQ && warp <= CONSUMERS) {
      write_dq(p, w, MAP_DBIAS, base, warp - 1, threadIdx.x & 31);
    } else {
#if DBIAS_ZEROS
      zero_dbias(p, w, threadIdx.x & 31);
#endif
    }
  } else {
    registers_take<240>();
    consume(p, MAP_DK, MAP_DV, w, base, warpgroup - 1);
  }
}
