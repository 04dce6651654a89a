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
  static constexpr int ROW_BYTES = COLUMNS * ELEMENT_BYTES, BYTES = ROWS * ROW_BYTES;
  static constexpr int BITS = CHUNKS % 8 == 0 ? 3 : CHUNKS % 4 == 0 ? 2 : CHUNKS % 2 == 0 ? 1 : 0;
  static constexpr unsigned GROUP = 1 << BITS;  // chunks that change places with each other
  static_assert(COLUMNS % 16 == 0, "a tile's rows are cut into fragments of 16 columns");

  unsigned base;  // shared address, a multiple of 128

  // Address of a chunk. The pattern repeats after 8 rows: 8 rows down is 8 ROW_BYTES further.
  DEVICE unsigned at(unsigned row, unsigned chunk) const {
    unsigned place = (chunk ^ row >> (3 - BITS)) % GROUP;
    return base + row * ROW_BYTES + (chunk / GROUP * GROUP + place) * CHUNK_BYTES;
  }

  // Address of the chunk `chunks` to the right of chunk 0 (or 1, if `chunks` is even) at `address`. This way a lane keeps
  // one address per tile, and each fragment costs at most one XOR with a constant.
  static DEVICE unsigned right(unsigned address, unsigned chunks) {
    return (address ^ chunks % GROUP * CHUNK_BYTES) + chunks / GROUP * GROUP * CHUNK_BYTES;
  }
};

// All THREADS threads of the block copy rows of `row_bytes` bytes, `stride` apart, into the whole tile: neighbouring threads
// take neighbouring chunks. Rows from `rows` on and bytes past `row_bytes` become zeros and aren't read from HBM (which is
// read in chunks of 16 bytes). The copies are this thread's newest: copy_commit, copy_wait, barrier make them usable.
template <int THREADS, class TileT>
DEVICE void load_tile(TileT tile, const char* from, long long stride, int rows, int row_bytes) {
  constexpr unsigned CHUNKS = TileT::CHUNKS, STEP = THREADS / CHUNKS;  // rows that the block copies at a time
  if (THREADS % CHUNKS == 0 && rows >= TileT::ROWS && row_bytes == TileT::ROW_BYTES) {  // nothing to cut off: the common case
    const unsigned row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, to = tile.at(row, chunk);
    from += row * stride + chunk * CHUNK_BYTES;
#pragma unroll
    for (unsigned i = 0; i < TileT::ROWS; i += max(STEP, 1), from += STEP * stride)
      copy_async(STEP % 8 ? tile.at(row + i, chunk) : to + i * TileT::ROW_BYTES, from, CHUNK_BYTES);
  } else {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < TileT::ROWS * CHUNKS; i += THREADS) {
      const unsigned row = i / CHUNKS, chunk = i % CHUNKS;
      const int bytes = static_cast<int>(row) < rows ? min(max(row_bytes - static_cast<int>(chunk) * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
      copy_async(tile.at(row, chunk), from + row * stride + chunk * CHUNK_BYTES, bytes);
    }
  }
}
