// A tile in SRAM: ROWS x COLUMNS elements of the storage dtype, rows without padding, swizzled against bank conflicts.
//
// A row is cut into 16-byte chunks. Eight lanes that read the same chunk of eight rows would all hit the same banks
// wherever a row is a multiple of 128 bytes. So chunk c of row r lies at place c ^ s(r), where s runs through as many
// values as the row length leaves conflicts: eight (rows of 8 chunks, D = 64 in 16 bit), four, two or none.
#pragma once

#include "memory.cuh"

template <int ROWS_, int COLUMNS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int CHUNKS = COLUMNS * ELEMENT_BYTES / CHUNK_BYTES;  // of a row
  static constexpr int BYTES = ROWS * CHUNKS * CHUNK_BYTES;
  static constexpr int BITS = CHUNKS % 8 == 0 ? 3 : CHUNKS % 4 == 0 ? 2 : CHUNKS % 2 == 0 ? 1 : 0;
  static_assert(COLUMNS % 16 == 0, "a tile's rows are cut into fragments of 16 columns");

  unsigned base;  // shared address, a multiple of 128

  // Address of a chunk.
  DEVICE unsigned at(int row, int chunk) const {
    int swizzle = (row >> (3 - BITS)) & ((1 << BITS) - 1);
    return base + (row * CHUNKS + (chunk ^ swizzle)) * CHUNK_BYTES;
  }
};

// All THREADS threads of the block copy rows of `row_bytes` bytes, `stride` apart, into the whole tile: neighbouring threads
// take neighbouring chunks. Rows from `rows` on and bytes past `row_bytes` become zeros and aren't read from HBM (which is
// read in chunks of 16 bytes). The copies are this thread's newest: copy_commit, copy_wait, barrier make them usable.
template <int THREADS, class TileT>
DEVICE void load_tile(TileT tile, const char* from, long long stride, int rows, int row_bytes) {
  constexpr int CHUNKS = TileT::CHUNKS;
#pragma unroll
  for (int i = 0; i < ceil_div(TileT::ROWS * CHUNKS, THREADS); ++i) {
    int index = threadIdx.x + i * THREADS, row = index / CHUNKS, chunk = index % CHUNKS;
    if constexpr (THREADS % CHUNKS == 0)  // the compiler then sees that only the row depends on i
      row = threadIdx.x / CHUNKS + i * (THREADS / CHUNKS), chunk = threadIdx.x % CHUNKS;
    if (TileT::ROWS * CHUNKS % THREADS == 0 || row < TileT::ROWS) {
      int bytes = row < rows ? min(max(row_bytes - chunk * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
      copy_async(tile.at(row, chunk), from + row * stride + chunk * CHUNK_BYTES, bytes);
    }
  }
}
