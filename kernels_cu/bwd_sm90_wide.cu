// Attention backward for Hopper (sm_90a) with head dims above 128, fp16 and bf16. As bwd_sm90.cu, but a CTA owns 64 keys and its two
// warpgroups share all of them: each makes half the query columns of S^T and dP^T, hands P and dS to both through shared memory,
// and keeps half the head dims of dK, dV and dQ. dQ goes to global memory straight from the registers, as vector reductions.
//
// Shared memory: K and V (64 keys), rings of Q with LSE and of dO with delta, two pairs of P and dS tiles.
#define BLOCK_N 64
#define RED_EARLY 8  // reductions of dQ before the next products are issued: those after need registers beside them
#define PAIR (WANT_DV + NEED_DS)  // tiles of P and dS that a step needs
#define DS_TILES (2 * PAIR)
#define DQ_BYTES 0
#include "bwd_sm90_scores.cuh"

#define HALF (BLOCK_M / 2)  // query rows of a warpgroup's S^T
#if SKIPPING  // what a stage of Q is told to hold, or known to
#define BLOCK_HELD m
#else
#define BLOCK_HELD block
#endif
static_assert(D == 256 && DV == 256 && BLOCK_M == 64, "the only tile");

// dV or dK += X^T Y: X (P or dS) lies as queries by keys, Y is dO or Q; head dims `part` of two.
__device__ __forceinline__ void add_gradient(float (&x)[64], u32 base16, u32 left, u32 right, int part) {
#pragma unroll
  for (int k = 0; k < BLOCK_M / 16; k++)
    Wgmma<128>::ss<1, 1>(x, operand(base16, left + k * 2048, 16),
                         operand(base16 + part * (2 * BLOCK_M * 8), right + k * 2048, BLOCK_M * 128), 1);
  wgmma_commit();
}

__device__ __forceinline__ void consume(const Params& p, const Work& w, u32 base, int part) {
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const int group = group_of(p);
  const float softmax_scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  [[maybe_unused]] const float scale_log2 = softmax_scale * (float)LOG2E;
  float dk[64], dv[64];
#pragma unroll
  for (int i = 0; i < 64; i++) dk[i] = dv[i] = 0.f;
  if (WANT_DK) touch(dk);
  if (WANT_DV) touch(dv);

  const int key0 = w.n * BLOCK_N, row = warp * 16 + (lane >> 2), column0 = part * HALF + 2 * (lane & 3);
  const int keys = w.seen.keys - key0;  // of this block; may be more than BLOCK_N
  const u32 to = base + S_DS + (part * HALF + (lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  u32 base16 = (base & 0x3FFFF) >> 4;

  // First and last query row, less this thread's first column, that see its two keys
  int low0 = row < keys ? -0x40000000 : 0x40000000, low1 = row + 8 < keys ? -0x40000000 : 0x40000000;
#if HAS_RIGHT
  low0 = max(low0, key0 + row - w.seen.right - column0);
  low1 = max(low1, key0 + row - w.seen.right - column0 + 8);
#endif
#if HAS_LEFT
  const int high0 = key0 + row - w.seen.left - column0;
#endif
  int clean_begin = w.m_begin, clean_end = w.m_end;  // these query blocks need no mask
#if HAS_RIGHT
  clean_begin = max(clean_begin, ceil_div(max(key0 + BLOCK_N - 1 - w.seen.right, 0), BLOCK_M));
#endif
#if HAS_LEFT
  clean_end = min(clean_end, (key0 - w.seen.left + 1) / BLOCK_M);
#endif
  if (keys < BLOCK_N) clean_end = clean_begin;

  float s[HALF / 2], dp[HALF / 2];
  auto product = [&](float(&x)[HALF / 2], u32 left, u32 right) INLINE {  // keys by this warpgroup's queries
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      Wgmma<HALF>::ss(x, operand(base16, left + (k >> 2) * (BLOCK_N * 128) + 32 * (k & 3), 16),
                      operand(base16 + part * (HALF * 8), right + (k >> 2) * (BLOCK_M * 128) + 32 * (k & 3), 16), k > 0);
  };
  [[maybe_unused]] Features<HALF / 2> features(p, w, row, column0, part * 128 + thread, softmax_scale);
#if DROPOUT
  const DropoutKey dropout = dropout_key(p, w.seen.entry.batch, 0);
  const float dropout_scale = (float)p.dropout_scale;
#endif
  Ring ring{0, 0};
  int m = w.m_first, left = steps_of(p, w, group), head = w.head_kv * group;
  [[maybe_unused]] u32 whole = 0;
  auto load = [&](const Ring& r, [[maybe_unused]] int block) INLINE {  // waits for Q and dO, issues S^T and dP^T
    mbarrier_wait(base + BAR_Q_FULL + 8 * r.stage, r.parity);
    mbarrier_wait(base + BAR_DO_FULL + 8 * r.stage, r.parity);
#if SKIPPING
    u32 held, of_head, none;  // what the stage holds
    shared_load_v4(base + S_SLOT + 16 * r.stage, held, of_head, whole, none);
    m = (int)held;
    head = (int)of_head;
#endif
#if VARIABLE
    zero_tail<D / 64, BLOCK_M>(base + S_Q + r.stage * Q_BYTES, w.seen.rows - BLOCK_HELD * BLOCK_M, part, thread);
    zero_tail<DV / 64, BLOCK_M>(base + S_DO + r.stage * DO_BYTES, w.seen.rows - BLOCK_HELD * BLOCK_M, part, thread);
#endif
#if SCATTERED
    clean_rows(base + S_Q + r.stage * Q_BYTES, base + S_DO + r.stage * DO_BYTES, base + S_LSE + r.stage * ROW_BYTES,
               w.seen.rows - m * BLOCK_M, part, thread);
#endif
    base16 = uniform<0>(base16);  // new to ptxas, which else keeps the descriptors of all steps in registers
    wgmma_fence();
    product(s, S_K, S_Q + r.stage * Q_BYTES);
    if (NEED_DS) product(dp, S_V, S_DO + r.stage * DO_BYTES);
    wgmma_commit();
  };
#if DETERMINISTIC && WANT_DQ
  int* passed = nullptr;  // the turn that is still to be handed on
#endif
  auto step = [&](int buffer, auto is_last) INLINE {
    constexpr bool last = decltype(is_last)::value;
    features.load_mask(head, m);
#if DROPOUT
    u32 kept[1];
    DropoutKey key = dropout;
    key.head += head;
    kept_weights(kept, p, key, w.seen.row_begin + m * BLOCK_M + column0, (w.seen.key_begin + key0) / 32 + (warp >> 1), warp, lane);
#endif
    wgmma_wait<0>();
    touch(s);
    if (NEED_DS) touch(dp);
#if TRANSFORM
    features.transform(s, head, m, 0);
#endif
    if (m < clean_begin || m >= clean_end) {
      const int shift = m * BLOCK_M;
#pragma unroll
      for (int i = 0; i < HALF / 2; i++) {
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
    [[maybe_unused]] u32 pp[HALF / 4], ds[HALF / 4];
#pragma unroll
    for (int i = 0; i < HALF / 2; i += 4) {
      const float2 l = shared_load_f2(base + S_LSE + ring.stage * ROW_BYTES + column0 * 4 + i * 8);
#if NEED_DS
      const float2 d = shared_load_f2(base + S_DELTA + ring.stage * ROW_BYTES + column0 * 4 + i * 8);
#endif
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float lse = j & 1 ? l.y : l.x;
        x[j] = exp2_approx(NATURAL ? (s[i + j] - lse) * (float)LOG2E : TRANSFORM ? s[i + j] - lse : s[i + j] * scale_log2 - lse);
      }
#if DROPOUT
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        y[j] = is_kept(kept, i + j) ? x[j] : 0.f;
        if (NEED_DS) dp[i + j] = is_kept(kept, i + j) ? dp[i + j] : 0.f;
      }
      pp[i / 2] = pack_half2(y[0], y[1]);
      pp[i / 2 + 1] = pack_half2(y[2], y[3]);
#else
      pp[i / 2] = pack_half2(x[0], x[1]);
      pp[i / 2 + 1] = pack_half2(x[2], x[3]);
#endif
#if NEED_DS
#if SCATTERED || DROPOUT || SOFTCAP
#pragma unroll
      for (int j = 0; j < 4; j++) {  // where nothing is seen, dP and delta may be anything
#if DROPOUT
        dp[i + j] = fmaf(dp[i + j], dropout_scale, j & 1 ? -d.y : -d.x);
#else
        dp[i + j] -= j & 1 ? d.y : d.x;
#endif
        if (SOFTCAP) dp[i + j] *= features.grade(i + j);
        x[j] = SCATTERED && x[j] == 0.f ? 0.f : x[j] * dp[i + j];
      }
      ds[i / 2] = pack_half2(x[0], x[1]);
      ds[i / 2 + 1] = pack_half2(x[2], x[3]);
#else
      ds[i / 2] = pack_half2(x[0] * (dp[i] - d.x), x[1] * (dp[i + 1] - d.y));
      ds[i / 2 + 1] = pack_half2(x[2] * (dp[i + 2] - d.x), x[3] * (dp[i + 3] - d.y));
#endif
#endif
    }
#pragma unroll
    for (int j = 0; j < HALF / 16; j++) {
#if WANT_DV
      stmatrix_x4_trans(to + PAIR * buffer * DS_BYTES + j * 2048, pp[4 * j], pp[4 * j + 1], pp[4 * j + 2], pp[4 * j + 3]);
#endif
#if NEED_DS
      const u32 ds_to = to + (PAIR * buffer + WANT_DV) * DS_BYTES;
      stmatrix_x4_trans(ds_to + j * 2048, ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
#endif
    }
    proxy_fence();
    barrier_sync(ID_DS, 256);
    base16 = uniform<0>(base16);
#if DETERMINISTIC && WANT_DQ
    if (passed && thread == 0) pass_turn(passed, 1);  // all have made the last step's sums
#endif
    const u32 p_tile = S_DS + PAIR * buffer * DS_BYTES, ds_tile = p_tile + WANT_DV * DS_BYTES;
    if (WANT_DK) touch(dk);
    if (WANT_DV) touch(dv);
    wgmma_fence();
#if WANT_DQ
    float dq[64];
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; k++)  // dQ = dS K
      Wgmma<128>::ss<0, 1>(dq, operand(base16, ds_tile + 32 * k, 16),
                           operand(base16 + part * (2 * BLOCK_N * 8), S_K + k * 2048, BLOCK_N * 128), k > 0);
    wgmma_commit();
#endif
    if (WANT_DV) add_gradient(dv, base16, p_tile, S_DO + ring.stage * DO_BYTES, part);
    if (WANT_DK) add_gradient(dk, base16, ds_tile, S_Q + ring.stage * Q_BYTES, part);
#if WANT_DQ
    wgmma_wait<WANT_DK + WANT_DV>();
    touch(dq);
    float* sums = p.dq_accum + (first_sum(p, w.seen, head) + m * BLOCK_M) * D + part * (BLOCK_M * D / 2) + thread * 4;
#if DETERMINISTIC  // key blocks take turns in their order
    passed = p.semaphore + 2 * (first_sum(p, w.seen, head) / BLOCK_M + m) + part;
    if (thread == 0) wait_for_turn(passed, turn_of(p, w, head, m));
    barrier_sync(ID_WARPGROUP + part, 128);
#endif
#pragma unroll
    for (int i = 0; i < RED_EARLY; i++) reduce_add_f4(sums + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
#endif
    const Ring now = ring;
#if !SKIPPING
    m = w.after(m);
    if (m == w.m_first) head++;
#endif
    ring.next(STAGES);
    if (!last) load(ring, m);
#if WANT_DQ
#pragma unroll
    for (int i = RED_EARLY; i < 16; i++) reduce_add_f4(sums + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
#endif
    if (!last)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
    if (WANT_DK) touch(dk);
    if (WANT_DV) touch(dv);
    if (lane == 0) {
      mbarrier_arrive(base + BAR_Q_EMPTY + 8 * now.stage);
      mbarrier_arrive(base + BAR_DO_EMPTY + 8 * now.stage);
    }
    left--;
  };

  if (WANT_DQ && part == 0 && thread == 0) {  // no sum before all are zero
    dependency_wait();
    if (w.section > 0) wait_for_turn(shares_cleared(p, w.section), (int)p.aux4);
  }
  barrier_sync(ID_DS, 256);
  mbarrier_wait(base + BAR_K, 0);  // also without steps: the loads must land before this CTA leaves
  if (NEED_DS) mbarrier_wait(base + BAR_V, 0);
#if VARIABLE
  zero_tail<D / 64, BLOCK_N>(base + S_K, keys, part, thread);
  zero_tail<DV / 64, BLOCK_N>(base + S_V, keys, part, thread);
#endif
#if CLEANS_KEYS
  clean_keys<D / 64>(base + S_K, part, thread);
  if (NEED_DS) clean_keys<DV / 64>(base + S_V, part, thread);
  barrier_sync(ID_DS, 256);
#endif
  if (left > 0) {
    load(ring, m);
    int buffer = 0;
#pragma unroll 1
    for (; left > 1; buffer ^= 1) step(buffer, False());
    step(buffer, True());
  }

  dependency_wait();
  barrier_sync(ID_DS, 256);  // K and V are free
#if DETERMINISTIC && WANT_DQ
  if (passed && thread == 0) pass_turn(passed, 1);
#endif
  if (WANT_DQ && part == 0 && thread == 0) pass_turn(slots_done(p, w.section), 2);
  u16* dv_to = (u16*)p.dv + first_key(w.seen, w.head_kv, p.dv_stride_b, p.dv_stride_h, p.dv_stride_s) + key0 * p.dv_stride_s + part * 128;
  u16* dk_to = (u16*)p.dk + first_key(w.seen, w.head_kv, p.dk_stride_b, p.dk_stride_h, p.dk_stride_s) + key0 * p.dk_stride_s + part * 128;
  [[maybe_unused]] const u32 stage = part * (2 * BLOCK_N * 128);
#if WANT_DV
  store_gradient<128>(dv, DROPOUT ? (float)p.dropout_scale : 1.f, base + S_V + stage, BLOCK_N * 128, dv_to, p.dv_stride_s, keys,
                      (int)p.head_dim_v - part * 128, warp, lane);
#endif
#if WANT_DK
  store_gradient<128>(dk, softmax_scale, base + S_K + stage, BLOCK_N * 128, dk_to, p.dk_stride_s, keys, (int)p.head_dim - part * 128, warp,
                      lane);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_sm90_wide(const __grid_constant__ Params p, const __grid_constant__ TMap map_q,
                                 const __grid_constant__ TMap map_k, const __grid_constant__ TMap map_v,
                                 const __grid_constant__ TMap map_do) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  const Job job = job_of(p, blockIdx.x);
  dependency_launch();
  if (job.role != TILE) {
    if (WANT_DQ && job.role != NOTHING) do_share(p, job, base);
    return;
  }
  if (threadIdx.x == 0) init_barriers(base);
  __syncthreads();
  const Work w = work_of(p, job);
  if (w.n * BLOCK_N >= w.seen.keys) {
    hide(p, w);
    return;
  }
  if (warpgroup == 0) {
    registers_give<24>();
    if (threadIdx.x == 0) produce(p, &map_q, &map_k, &map_v, &map_do, nullptr, w, base);
  } else {
    registers_take<240>();
    consume(p, w, base, warpgroup - 1);
  }
}
