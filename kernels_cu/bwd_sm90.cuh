// What the three kernels of the Hopper backward share: which rows and keys of a batch entry matter, and where their sums lie.
// Rows that see no key and keys that no row sees are left out of all tiles, so that what they hold cannot matter: the kernels
// count visible rows and keys from 0 and write zeros for the others. No products, no shared memory here.
//
// A unit is a key/value head of one entry (of all packed sequences). The main kernel goes through the units a section at a time;
// CTAs of its own turn the float32 sums of dQ into dQ a section behind, beside the products and out of the L2 (bwd_sm90_rows.cuh).
// bwd_sm90_convert.cu does it for the last section.
//
// The kernels' own integers: aux0 rows of delta, LSE and dQ sums a head has; aux1 query slots of a head and aux2 key slots of a
// unit (a slot is a block, those of zeros included); aux3 units of a section; aux4 CTAs that share a section's dQ, 0 if all is
// left to the kernel after; aux5, aux6 rows of packed q and k; aux7 where the sections' progress lies behind the turns. With mask or segments:
// q_stride_b, h, s strides of live_tiles by entry, head and key block, v_stride_h where the words of query blocks begin and v_stride_s
// how many each has; k_stride_b, h, s strides of the packed mask by entry, head and query block (bwd_sm90_mask.cu). q, k and v come
// by tensor maps.
#pragma once
#include "mask.cuh"
#include "ptx_sm90.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
#ifndef WANT_DQ  // which gradients the kernels make; products, stores and sums for no other
#define WANT_DQ 1
#define WANT_DK 1
#define WANT_DV 1
#endif
#define NEED_DS (WANT_DQ || WANT_DK)
#define CLEANS_KEYS (SCATTERED || (DROPOUT && HAS_LEFT))  // a tile may hold keys that no row sees
#define SKIPPING (MASK || SEGMENTS)  // tiles in which they leave nothing are left out
#define NATURAL (BIAS > 0)           // scores and LSE in natural units, subtracted first: a bias of finfo.min must not overflow

struct Visible {
  Entry entry;
  int row_begin, key_begin;  // first visible ones
  int rows, keys;            // how many
  int left, right;           // visible row r sees visible keys r + left .. r + right
};

DEVICE Visible load_visible(const Params& p, int batch) {
  Visible v;
  v.entry = load_entry(p, batch);
  const Range rows = query_range(v.entry, 0, v.entry.seqlen_kv), keys = key_range(v.entry, 0, v.entry.seqlen_q);
  const bool some = rows.last > rows.first && keys.last > keys.first;
  v.row_begin = some ? rows.first : 0;
  v.key_begin = some ? keys.first : 0;
#if DROPOUT && HAS_LEFT  // a whole group of keys that Philox calls serve: up to 31 that no row sees
  v.key_begin &= ~31;
#endif
  v.rows = some ? rows.last - rows.first : 0;
  v.keys = some ? keys.last - v.key_begin : 0;
  v.left = v.entry.diagonal_left + v.row_begin - v.key_begin;
  v.right = v.entry.diagonal_right + v.row_begin - v.key_begin;
  return v;
}

// First visible row of (entry, head) in arrays with the given strides; keys likewise.
DEVICE i64 first_row(const Visible& v, int head, i64 stride_b, i64 stride_h, i64 stride_s) {
  return (VARLEN ? 0 : v.entry.batch * stride_b) + head * stride_h + (v.entry.start_q + v.row_begin) * stride_s;
}
DEVICE i64 first_key(const Visible& v, int head, i64 stride_b, i64 stride_h, i64 stride_s) {
  return (VARLEN ? 0 : v.entry.batch * stride_b) + head * stride_h + (v.entry.start_kv + v.key_begin) * stride_s;
}

// Where (entry, head) has its first row in delta, LSE and dQ sums. Packed sequences start on a block of their own.
DEVICE i64 first_sum(const Params& p, const Visible& v, int head) {
  if (VARLEN) return head * p.aux0 + (v.entry.start_q / BLOCK_M + v.entry.batch) * BLOCK_M;
  return (v.entry.batch * p.heads_q + head) * p.aux0;
}

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ------------------------------------------------------------------------------------------------ units, sections, slots
struct Unit {
  int batch, head_kv;  // batch is 0 with VARLEN
};
DEVICE int units(const Params& p) { return (int)(VARLEN ? p.heads_kv : p.batch * p.heads_kv); }
DEVICE Unit unit_of(const Params& p, int index) {
  const int batch = VARLEN ? 0 : index / (int)p.heads_kv;
  return {batch, index - batch * (int)p.heads_kv};
}
DEVICE int group_of(const Params& p) { return (int)p.heads_q / (int)p.heads_kv; }
DEVICE int last_section(const Params& p) { return (units(p) - 1) / (int)p.aux3; }

// How far a section is: shares of its sums set to zero (head dims above 128), and twice the key slots whose part of dQ is added.
// Set to zero by bwd_sm90_delta.cu. All this only where dQ is wanted.
DEVICE int* shares_cleared(const Params& p, int section) { return p.semaphore + p.aux7 + 2 * section; }
DEVICE int* slots_done(const Params& p, int section) { return shares_cleared(p, section) + 1; }

// The entry of a slot, and which of the entry's blocks it is.
struct Slot {
  int batch, block;
};
// Packed sequence b has the slots from starts[b] / block_rows + 2 b on (the first from 0): enough for visible rows and zeros, each
// cut into blocks. By a whole warp.
DEVICE Slot slot_of(const Params& p, const int* starts, int batch, int index, int block_rows) {
#if VARLEN
  int low = 0, high = (int)p.batch - 1;
  while (low < high) {
    const int step = ceil_div(high - low, 32), b = low + ((int)(threadIdx.x & 31) + 1) * step;
    const bool before = b <= high && starts[b] / block_rows + 2 * b <= index;
    low += step * __popc(__ballot_sync(~0u, before));
    high = min(high, low + step - 1);
  }
  return {low, index - (low > 0 ? starts[low] / block_rows + 2 * low : 0)};
#else
  return {batch, index};
#endif
}

// Zeros into rows [first, last) of a gradient, columns below `columns` (a multiple of 8), with THREADS threads.
template <int THREADS>
DEVICE void zero_rows(u16* to, i64 stride, i64 first, i64 last, int columns, int thread) {
  const int pieces = columns / 8, at_once = THREADS / pieces;
  if (thread >= at_once * pieces) return;
  for (i64 row = first + thread / pieces; row < last; row += at_once)
    *(uint4*)(to + row * stride + thread % pieces * 8) = make_uint4(0, 0, 0, 0);
}

// The zeros of the block that is number `block` of those with nothing visible. Of an entry's rows [0, total) the `visible` from
// `begin` on are not touched; `to` is its row 0.
template <int THREADS>
DEVICE void zero_hidden(u16* to, i64 stride, int columns, int block, int block_rows, int begin, int visible, int total,
                        int thread) {
  const int first = block * block_rows, last = min(first + block_rows, total - visible);
  if (first >= last) return;
  zero_rows<THREADS>(to, stride, first, min(last, begin), columns, thread);
  zero_rows<THREADS>(to, stride, max(first, begin) + visible, last + visible, columns, thread);
}

// Zeros where a packed array's rows belong to no sequence. `to` is row 0 of all.
template <int THREADS>
DEVICE void zero_unowned(const Params& p, u16* to, i64 stride, int columns, const int* starts, i64 total, int thread) {
  zero_rows<THREADS>(to, stride, 0, starts[0], columns, thread);
  zero_rows<THREADS>(to, stride, starts[p.batch], total, columns, thread);
}
