// What the Hopper backward does to query rows before and after its products: delta = rowsum(dout * out) - dlse with LSE in base 2
// (NATURAL: as it is);
// the float32 sums of dQ into dQ. The kernels before and after use it, and CTAs of the main kernel beside the products. No products
// here.
#pragma once
#include "bwd_sm90.cuh"

#define TILE_BYTES (BLOCK_M * HEAD_DIM * 4)  // of a query block's sums
#define SHARE_SLOTS ((1 << 20) / TILE_BYTES)  // query slots of a CTA of the main kernel
#define CLEARED (WANT_DQ && HEAD_DIM > 128)   // the main kernel only adds to sums; otherwise whoever comes first stores
#ifndef WANT_DELTA
#define WANT_DELTA NEED_DS
#endif

// ------------------------------------------------------------------------------------------------ row sums
#define ROW_LANES (HEAD_DIM_V / 8)  // that share a row, 16 bytes each
#define ROWS_AT_ONCE (32 / ROW_LANES)
#define PASSES 8
#define PIECE_ROWS (PASSES * ROWS_AT_ONCE)
#define SUM_PIECES (BLOCK_M / PIECE_ROWS)  // of a query block
static_assert(BLOCK_M % PIECE_ROWS == 0, "whole pieces");

DEVICE float dot2(u32 a, u32 b) {
  const float2 x = unpack_half2(a), y = unpack_half2(b);
  return x.x * y.x + x.y * y.y;
}

// Delta and LSE of rows [row0, row0 + PIECE_ROWS), padded to whole query blocks so that a padded or empty row has weight
// exp2(s - inf) = 0; the block's turns set to zero, and its sums where `clear` says so. WANT_DELTA: 0 leaves delta alone.
DEVICE void sum_rows(const Params& p, const Visible& v, int head, int row0, bool clear, int lane) {
#if WANT_DELTA
  const int column = lane % ROW_LANES * 8;
  const bool live = column < (int)p.head_dim_v;
  const u16* out = (const u16*)p.out + first_row(v, head, p.out_stride_b, p.out_stride_h, p.out_stride_s) + column;
  const u16* dout = (const u16*)p.dout + first_row(v, head, p.dout_stride_b, p.dout_stride_h, p.dout_stride_s) + column;
  uint4 a[PASSES], b[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const i64 row = row0 + i * ROWS_AT_ONCE + lane / ROW_LANES;
    a[i] = b[i] = make_uint4(0, 0, 0, 0);
    if (row < v.rows && live) {
      a[i] = *(const uint4*)(out + row * p.out_stride_s);
      b[i] = *(const uint4*)(dout + row * p.dout_stride_s);
    }
  }
#endif
  const int own = lane % PIECE_ROWS;  // the row that this lane writes
  float lse = (float)infinity();
  [[maybe_unused]] float dlse = 0.f;
  if (row0 + own < v.rows) {
    const i64 at = first_row(v, head, p.lse_stride_b, p.lse_stride_h, 1) + row0 + own;
    const float natural = ((const float*)p.lse)[at];
    if (natural != -infinity()) lse = NATURAL ? natural : natural * (float)LOG2E;
    if (p.dlse) dlse = ((const float*)p.dlse)[at];
  }
  const i64 sums = first_sum(p, v, head) + row0;
  if (CLEARED && clear) {
    float4* dq = (float4*)(p.dq_accum + sums * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < PIECE_ROWS * HEAD_DIM / 128; i++) dq[i * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (WANT_DQ && row0 % BLOCK_M == 0 && lane < 2) p.semaphore[sums / BLOCK_M * 2 + lane] = 0;
#if WANT_DELTA
  float delta = 0.f;
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    float x = dot2(a[i].x, b[i].x) + dot2(a[i].y, b[i].y) + dot2(a[i].z, b[i].z) + dot2(a[i].w, b[i].w);
#pragma unroll
    for (int step = ROW_LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    x = __shfl_sync(~0u, x, lane % ROWS_AT_ONCE * ROW_LANES);
    if (own / ROWS_AT_ONCE == i) delta = x;
  }
  if (lane < PIECE_ROWS) ((float*)p.delta)[sums + lane] = delta - dlse;
#endif
  if (lane < PIECE_ROWS) ((float*)p.scratch)[sums + lane] = lse;
}

// ------------------------------------------------------------------------------------------------ dQ
// A query block of a section: slot `index` of its heads.
struct Place {
  Visible v;
  int head, slot, m;
  DEVICE bool hidden() const { return m * BLOCK_M >= v.rows; }
  // Whether nobody has added to its sums, which then hold anything.
  DEVICE bool untouched(const Params& p) const {
    return SKIPPING && !CLEARED && look_at_turn(p.semaphore + 2 * (first_sum(p, v, head) / BLOCK_M + m)) == 0;
  }
};
DEVICE Place place_of(const Params& p, int section, int index) {
  const int h = index / (int)p.aux1, heads = section * (int)p.aux3 * group_of(p) + h, batch = VARLEN ? 0 : heads / (int)p.heads_q;
  Place x;
  x.head = heads - batch * (int)p.heads_q;
  x.slot = index - h * (int)p.aux1;
  const Slot s = slot_of(p, p.cu_seqlens_q, batch, x.slot, BLOCK_M);
  x.v = load_visible(p, s.batch);
  x.m = s.block;
  return x;
}

// A tile of sums lies as wgmma's accumulators left it, transposed up to 128 head dims: two parts (warpgroups), which are halves of
// the head dims (D 64: of the rows). It is taken in pieces of a part, each by a warpgroup.
#define SPLIT_DIM (HEAD_DIM >= 128)
#define TURNED (HEAD_DIM <= 128)
#define PART_ROWS (SPLIT_DIM ? BLOCK_M : BLOCK_M / 2)
#define PIECES (TURNED ? 2 : 4)                 // of a tile
#define PIECE_BYTES (TILE_BYTES / PIECES)
#define VECTORS (PIECE_BYTES / 2048)            // float4s of a thread
static_assert(VECTORS % 2 == 0 && (TURNED || VECTORS == 8), "pieces that stmatrix can take");

// Piece `piece` of a query block, which lies at `stage` in shared memory and is overwritten, times `scale` into dQ. SKIPPING: zeros
// if it was never touched.
DEVICE void convert_piece(const Params& p, const Place& at, int piece, u32 stage, float scale) {
  const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, part = piece / (PIECES / 2), sub = piece % (PIECES / 2);
  const u32 own = stage + warp * 512;  // this warp's 512 bytes of each 2048
  float4 x[VECTORS];
#if SKIPPING
  const bool untouched = at.untouched(p);
#endif
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    u32 a, b, c, d;
    shared_load_v4(own + i * 2048 + lane * 16, a, b, c, d);
#if SKIPPING
    if (untouched) a = b = c = d = 0;
#endif
    x[i] = make_float4(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d));
  }
  __syncwarp();
  const int r = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
#pragma unroll
  for (int j = 0; j < VECTORS; j += 2) {
    const float4 &s = x[j], &t = x[j + 1];
    const u32 s0 = pack_half2(s.x * scale, s.y * scale), s1 = pack_half2(s.z * scale, s.w * scale);
    const u32 t0 = pack_half2(t.x * scale, t.y * scale), t1 = pack_half2(t.z * scale, t.w * scale);
    if (TURNED)  // 8 rows of 16 columns, 48 bytes apart
      stmatrix_x4_trans(own + (j + high) * 2048 + r * 48 + low * 16, s0, s1, t0, t1);
    else  // 16 rows of 8 columns, turned round by j to spread them over the banks
      stmatrix_x4(own + (j + high) * 2048 + ((8 * low + r + j + high) & 15) * 16, s0, s1, t0, t1);
  }
  __syncwarp();
  constexpr int LANES = TURNED ? 2 : 8, AT_ONCE = 32 / LANES, ROWS = TURNED ? 8 * VECTORS : 16;  // lanes of a row; rows at once, in all
  const int c = lane % LANES, row0 = at.m * BLOCK_M + (TURNED ? (SPLIT_DIM ? 0 : part * PART_ROWS) : warp * 16);
  const int column = (SPLIT_DIM ? part * (HEAD_DIM / 2) : 0) + (TURNED ? warp * 16 : sub * 64) + c * 8;
  u16* dq = (u16*)p.dq + first_row(at.v, at.head, p.dq_stride_b, p.dq_stride_h, p.dq_stride_s) + column;
#pragma unroll
  for (int i = 0; i < ROWS / AT_ONCE; i++) {
    const int row = i * AT_ONCE + lane / LANES;
    uint4 y;
    shared_load_v4(own + (TURNED ? row / 8 * 2048 + row % 8 * 48 + c * 16 : c * 2048 + ((row + c) & 15) * 16), y.x, y.y, y.z, y.w);
    if (row0 + row < at.v.rows && column < (int)p.head_dim) *(uint4*)(dq + (i64)(row0 + row) * p.dq_stride_s) = y;
  }
}

// Zeros where rows see no key, a piece of those that fall to a hidden slot.
DEVICE void zero_piece(const Params& p, const Place& at, int piece) {
  constexpr int ALL = 128 * PIECES;
  const int thread = piece * 128 + (threadIdx.x & 127), columns = (int)p.head_dim;
  u16* dq = (u16*)p.dq + (VARLEN ? 0 : at.v.entry.batch * p.dq_stride_b) + at.head * p.dq_stride_h;
  zero_hidden<ALL>(dq + at.v.entry.start_q * p.dq_stride_s, p.dq_stride_s, columns, at.m - ceil_div(at.v.rows, BLOCK_M), BLOCK_M,
                   at.v.row_begin, at.v.rows, VARLEN ? at.v.entry.seqlen_q : (int)p.seqlen_q, thread);
#if VARLEN
  if (at.slot == p.aux1 - 1) zero_unowned<ALL>(p, dq, p.dq_stride_s, columns, p.cu_seqlens_q, p.aux5, thread);
#endif
}

// dQ of a section's query slots [first, last), by GROUPS warpgroups that each have a ring of DEPTH pieces at `stages` in shared
// memory, filled by bulk copies; barriers at `bars`.
template <int GROUPS, int DEPTH>
DEVICE void convert_slots(const Params& p, int section, int first, int last, u32 stages, u32 bars) {
  const int group = threadIdx.x >> 7, end = last * PIECES;
  const float scale = p.softmax_scale ? *p.softmax_scale : (float)p.softmax_scale_value;
  if (threadIdx.x == 0) {
    for (int i = 0; i < GROUPS * DEPTH; i++) mbarrier_init(bars + 8 * i, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  stages += group * DEPTH * PIECE_BYTES;
  bars += 8 * group * DEPTH;
  auto load = [&](int index, int stage) {  // by the group's first warp
    const Place at = place_of(p, section, index / PIECES);
    if ((threadIdx.x & 127) != 0) return;
    const bool hidden = at.hidden();
    mbarrier_expect(bars + 8 * stage, hidden ? 0 : PIECE_BYTES);
    if (hidden) return;
    const float* sums = p.dq_accum + (first_sum(p, at.v, at.head) + at.m * BLOCK_M) * HEAD_DIM;
    bulk_load(stages + stage * PIECE_BYTES, sums + index % PIECES * (PIECE_BYTES / 4), PIECE_BYTES, bars + 8 * stage);
  };
  const bool loads = (threadIdx.x & 127) < 32;
  int index = first * PIECES + group;
  if (loads)
    for (int i = 0; i < DEPTH; i++)
      if (index + i * GROUPS < end) load(index + i * GROUPS, i);
  for (int stage = 0, parity = 0; index < end; index += GROUPS) {
    const Place at = place_of(p, section, index / PIECES);
    mbarrier_wait(bars + 8 * stage, parity);
    if (at.hidden())
      zero_piece(p, at, index % PIECES);
    else
      convert_piece(p, at, index % PIECES, stages + stage * PIECE_BYTES, scale);
    const int next = index + DEPTH * GROUPS;
    if (next < end) {
      proxy_fence();
      barrier_sync(1 + group, 128);
      if (loads) load(next, stage);
    }
    if (++stage == DEPTH) stage = 0, parity ^= 1;
  }
}
