// A tile in SRAM: ROWS x COLUMNS elements of the storage dtype, rows without padding, swizzled against bank conflicts.
//
// A row is cut into 16-byte chunks. Eight lanes that read the same chunk of eight rows would all hit the same banks
// wherever a row is a multiple of 128 bytes. So chunk c of row r lies at place c ^ s(r), where s runs through as many
// values as the row length leaves conflicts: eight (rows of 8 chunks, D = 64 in 16 bit), four, two or none.
#pragma once

#include "memory.cuh"
#include "warp.cuh"

template <int ROWS_, int COLUMNS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int CHUNKS = COLUMNS * ELEMENT_BYTES / CHUNK_BYTES;  // of a row
  static constexpr int ROW_BYTES = COLUMNS * ELEMENT_BYTES, BYTES = ROWS * ROW_BYTES;
  static constexpr int APART = ROW_BYTES;  // bytes from a row to the next
  static constexpr int BITS = CHUNKS % 8 == 0 ? 3 : CHUNKS % 4 == 0 ? 2 : CHUNKS % 2 == 0 ? 1 : 0;
  static constexpr unsigned GROUP = 1 << BITS;  // chunks that change places with each other
  static_assert(COLUMNS % CHUNK_ELEMENTS == 0, "a tile's rows are cut into chunks");

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

// One thread's share in copying rows from HBM into tiles: all THREADS threads of the block copy together, neighbours
// take neighbouring chunks of a row. Of 32 threads, each warp is a group with a tile of its own. Each load() takes the next ROWS
// rows, which lie `stride` bytes apart.
template <int THREADS, class TileT>
struct TileLoader {
  static constexpr int ROWS = TileT::ROWS, CHUNKS = TileT::CHUNKS;
  static constexpr bool EVEN = THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0;  // a thread keeps to its column
  static constexpr int STEP = EVEN ? THREADS / CHUNKS : 1;                             // and goes down in these steps

  // This thread among those that copy together.
  static DEVICE unsigned thread() { return THREADS == 32 ? threadIdx.x % 32 : threadIdx.x; }

  const char* from;  // the next tile, or this thread's first chunk of it
  long long stride;
  int row_bytes;

  // opaque: an address of its own that moves on costs less than one computed anew for each tile.
  DEVICE TileLoader(const char* rows, long long stride, int row_bytes)
      : from(opaque(rows + (EVEN ? static_cast<int>(thread()) / CHUNKS * stride + thread() % CHUNKS * CHUNK_BYTES : 0))),
        stride(stride), row_bytes(row_bytes) {}

  // Fills the whole tile. Rows from `rows` on and bytes past `row_bytes` become zeros and aren't read from HBM (which
  // is read in chunks). The copies are this thread's newest: copy_commit, copy_wait, barrier make them usable.
  DEVICE void load(TileT tile, int rows) {
    if (rows >= ROWS && row_bytes == TileT::ROW_BYTES)
      copy<true>(tile, rows);  // nothing to cut off: the common case, in fewer instructions
    else
      copy<false>(tile, rows);
    from += ROWS * stride;
  }

  // The loader of the rows that lie `tiles` tiles further on.
  DEVICE TileLoader at(int tiles) const {
    TileLoader there = *this;
    there.from += tiles * ROWS * stride;
    return there;
  }

  template <bool WHOLE>
  DEVICE void copy(TileT tile, int rows) const {
    if constexpr (EVEN) {
      const int row = thread() / CHUNKS, chunk = thread() % CHUNKS;
      const unsigned to = tile.at(row, chunk);
      const char* chunk_from = from;
#pragma unroll(WHOLE ? 8 : 1)
      for (int r = 0; r < ROWS; r += STEP, chunk_from += STEP * stride) {
        if (!WHOLE) lanes_meet();
        const unsigned place = STEP % 8 == 0 ? to + r * TileT::ROW_BYTES : tile.at(row + r, chunk);  // the swizzle's period
        copy_async(place, chunk_from, WHOLE ? CHUNK_BYTES : inside(row + r, chunk, rows));
      }
    } else {
#pragma unroll 1  // a loop, for ncu misreads copies under a predicate, too
      for (int i = thread(); i < round_up(ROWS * CHUNKS, 32); i += THREADS) {
        if (!WHOLE) lanes_meet();
        if (i >= ROWS * CHUNKS) continue;
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const int bytes = WHOLE ? CHUNK_BYTES : inside(row, chunk, rows);
        copy_async(tile.at(row, chunk), from + row * stride + chunk * CHUNK_BYTES, bytes);
      }
    }
  }

  // Bytes of a chunk that lie inside the problem.
  DEVICE int inside(int row, int chunk, int rows) const {
    return row < rows ? min(max(row_bytes - chunk * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
  }
};

// The same for a single tile.
template <int THREADS, class TileT>
DEVICE void load_tile(TileT tile, const char* from, long long stride, int rows, int row_bytes) {
  TileLoader<THREADS, TileT>(from, stride, row_bytes).load(tile, rows);
}
