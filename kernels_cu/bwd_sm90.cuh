// What the three kernels of the Hopper backward share: which rows and keys of a batch entry matter, and where their sums lie.
// Rows that see no key and keys that no row sees are left out of all tiles, so that what they hold cannot matter: the kernels
// count visible rows and keys from 0 and write zeros for the others. No products, no shared memory here.
//
// The kernels' own integers: aux0 rows of delta, LSE and dQ sums a head has; aux1 query blocks and aux2 key blocks in the grid
// for a head, those of zeros included; aux3 heads scheduled together; aux4 key blocks that take turns (deterministic);
// aux5, aux6 rows of packed q and k.
#pragma once
#include "mask.cuh"
#include "ptx_sm90.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif

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
  v.rows = some ? rows.last - rows.first : 0;
  v.keys = some ? keys.last - keys.first : 0;
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

// Zeros into rows [first, last) of a gradient, columns below `columns` (a multiple of 8), with THREADS threads.
template <int THREADS>
DEVICE void zero_rows(u16* to, i64 stride, i64 first, i64 last, int columns, int thread) {
  const int pieces = columns / 8;
  for (i64 i = thread; i < (last - first) * pieces; i += THREADS) {
    const i64 row = i / pieces;
    *(uint4*)(to + (first + row) * stride + (i - row * pieces) * 8) = make_uint4(0, 0, 0, 0);
  }
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

// Zeros where a packed array's rows belong to no sequence; the first and the last sequence see to it. `to` is row 0 of all.
template <int THREADS>
DEVICE void zero_unowned(const Params& p, u16* to, i64 stride, int columns, int batch, const int* starts, i64 total, int thread) {
  if (batch == 0) zero_rows<THREADS>(to, stride, 0, starts[0], columns, thread);
  if (batch == p.batch - 1) zero_rows<THREADS>(to, stride, starts[p.batch], total, columns, thread);
}
