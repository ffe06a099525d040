// Tiles of 16-bit elements in shared memory: where an element lies, and how rows come in from global memory.
//
// A tile of ROWS x COLS is cut into pages of 64 columns (32 when COLS is no multiple of 64), one after the other; a page
// holds its rows back to back. Inside a page the 16-byte chunks of a row are permuted by an XOR with the row, so that
// eight rows of one chunk column fall on all 32 banks. No attention here.
#pragma once
#include "ptx.cuh"

template <int ROWS, int COLS>
struct Tile {
  static constexpr int kRows = ROWS, kCols = COLS;
  static constexpr int kPage = COLS % 64 == 0 ? 64 : 32;  // columns
  static constexpr int kChunks = kPage / 8;               // 16-byte chunks of a page's row
  static constexpr int kRowBytes = kPage * 2;
  static constexpr int kPageBytes = ROWS * kRowBytes;
  static constexpr int kBytes = ROWS * COLS * 2;
  static_assert(COLS % 32 == 0 && ROWS % 8 == 0, "tiles are made of 8 rows by 32 columns");

  // What the row does to the chunk inside a page.
  static DEVICE int swizzle(int row) { return kChunks == 8 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of 16-byte chunk `chunk` (column / 8) of `row`.
  static DEVICE u32 offset(int row, int chunk) {
    return (chunk / kChunks) * kPageBytes + row * kRowBytes + ((chunk % kChunks) ^ swizzle(row)) * 16;
  }

  // The lane's part of an ldmatrix.x4 address that covers 16 rows by 16 columns (two chunks), in two orders of the four
  // 8x8 matrices: down first (rows 0-7, rows 8-15 of the left chunk, then of the right one), or across first.
  // A operands, and B operands read by .trans, go down; B operands whose rows are n go across.
  static DEVICE u32 lane_down(int lane) { return offset(lane & 15, lane >> 4); }
  static DEVICE u32 lane_across(int lane) { return offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1); }

  // The address of the 16 x 16 patch at (row, column), multiples of 16, for a lane whose `base` is the tile's address
  // plus lane_down or lane_across. The tile's address is a multiple of 128.
  static DEVICE u32 patch(u32 base, int row, int column) {
    const int chunk = column / 8;
    return (base ^ ((chunk % kChunks) * 16)) + row * kRowBytes + (chunk / kChunks) * kPageBytes;
  }
};

// One 16-byte chunk of which `left` columns exist (any number; only without WHOLE).
template <bool BOUNDED, bool WHOLE>
DEVICE void load_chunk(u32 to, const u16* from, bool inside, int left) {
#if ALIGNED
  if (!WHOLE) {
    cp_async16_partial(to, from, inside ? 2 * min(max(left, 0), 8) : 0);
  } else if (BOUNDED) {
    cp_async16_or_zero(to, from, inside);
  } else {
    cp_async16(to, from);
  }
#else
  u32 word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (inside && (WHOLE || i < left)) word[i / 2] |= (u32)from[i] << (16 * (i & 1));
  }
  store_shared16(to, make_uint4(word[0], word[1], word[2], word[3]));
#endif
}

// Starts copying tile rows [first, last) (of the tile's own numbering) from `from` + row * stride (elements), `columns`
// of each, by THREADS threads; other rows, and columns past `columns`, become zeros and are never read. BOUNDED: some row
// may be outside; WHOLE: columns is COLS. Whoever takes part commits and waits; without ALIGNED the call itself copies.
template <typename T, int THREADS, bool BOUNDED, bool WHOLE>
DEVICE void load_tile(u32 to, const u16* from, i64 stride, int first, int last, int columns, int thread) {
  constexpr int STEP = THREADS / T::kChunks;
  static_assert(THREADS % T::kChunks == 0, "a pass covers whole rows");
  const int chunk = thread % T::kChunks;
  const u16* source = from + (thread / T::kChunks) * stride + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < (T::kRows + STEP - 1) / STEP; pass++) {
    const int row = pass * STEP + thread / T::kChunks;
    if (T::kRows % STEP == 0 || row < T::kRows) {
      const bool inside = !BOUNDED || (u32)(row - first) < (u32)(last - first);
#pragma unroll
      for (int page = 0; page < T::kCols / T::kPage; page++) {
        const u32 address = to + T::offset(row, page * T::kChunks + chunk);
        load_chunk<BOUNDED, WHOLE>(address, source + page * T::kPage, inside, columns - (page * T::kPage + chunk * 8));
      }
    }
    source += STEP * stride;
  }
}

// Writes rows [0, rows) of a tile to `to` + row * stride, `columns` of each; WARPS warps' worth of rows, each warp its own
// strip of ROWS_PER_WARP starting at row `row0`, after a __syncwarp. Vector stores when a row is a multiple of 8 columns.
template <typename T, int ROWS_PER_WARP>
DEVICE void store_tile_rows(u16* to, i64 stride, u32 from, int row0, int rows, int columns, int lane) {
  constexpr int CHUNKS = T::kCols / 8;
  const bool whole = (columns & 7) == 0 && (stride & 7) == 0;
#pragma unroll 4
  for (int i = lane; i < ROWS_PER_WARP * CHUNKS; i += 32) {
    const int row = row0 + i / CHUNKS, chunk = i % CHUNKS;
    if (row >= rows || chunk * 8 >= columns) continue;
    const uint4 x = load_shared16(from + T::offset(row, chunk));
    u16* target = to + row * stride + chunk * 8;
    if (whole) {
      *(uint4*)target = x;
    } else {
      const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (chunk * 8 + j < columns) target[j] = (u16)(word[j / 2] >> (16 * (j & 1)));
      }
    }
  }
}
