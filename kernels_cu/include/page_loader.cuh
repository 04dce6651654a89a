// How a warp copies keys from their pages.
#pragma once

#include "tile.cuh"

// Copies under a predicate, which a loop that is unrolled has: the counters misread them (ncu 2025.3).
#ifdef COUNTED
constexpr int IN_PART_AT_ONCE = 1;
#else
constexpr int IN_PART_AT_ONCE = 4;
#endif

// Copies a warp's rows from their pages into its tile. Each lane knows the address of one row, and tells it the others. LANES lanes
// copy a row, so that one exchange of an address serves CHUNKS / LANES copies, and a copy still has whole lines. A warp that has few
// registers computes anew for each tile what follows from a lane's number (FEW_REGISTERS), but not where rows have whole panels.
template <class TileT, bool FEW_REGISTERS = false>
struct PageLoader {
  static constexpr int ROWS = TileT::ROWS, CHUNKS = TileT::CHUNKS;
  static constexpr int LANES = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
  static_assert(ROWS <= 32, "a lane for each row");

  const char* head;  // of page 0
  long long page, row;  // from one to the next, in bytes
  int row_bytes;

  // This lane's row is row `place` of page `at`. Rows from `rows` on and bytes past `row_bytes` become zeros.
  DEVICE void load(TileT tile, int at, int place, int rows) const {
    const long long own = at * page + place * row;
    if (row_bytes != TileT::ROW_BYTES)
      copy<false, false>(tile, own, rows);
    else if (rows < ROWS)
      copy<false, true>(tile, own, rows);
    else
      copy<true, true>(tile, own, rows);
  }

  // A tile of which all rows are there (WHOLE), or some; rows with padding have a chunk that isn't WIDE enough.
  template <bool WHOLE, bool WIDE>
  DEVICE void copy(TileT tile, long long own, int rows) const {
    const int lane = FEW_REGISTERS && LANES < 8 ? opaque(lane_id()) : lane_id();
#pragma unroll(WHOLE ? 4 : WIDE ? IN_PART_AT_ONCE : 1)
    for (int first = 0; first < ROWS; first += 32 / LANES) {
      const int r = first + lane / LANES;
      const char* from = head + shuffle(own, r);
#pragma unroll((WHOLE || (WIDE && IN_PART_AT_ONCE > 1)) && !(FEW_REGISTERS && CHUNKS / LANES > 4) ? CHUNKS / LANES : 1)
      for (int c = 0; c < CHUNKS; c += LANES) {
        const int chunk = c + lane % LANES;
        if (!WHOLE || ROWS % (32 / LANES)) lanes_meet();
        if (r >= ROWS) continue;
        if (WIDE)
          copy_async_inside(tile.at(r, chunk), from + chunk * CHUNK_BYTES, WHOLE || r < rows);
        else
          copy_async(tile.at(r, chunk), from + chunk * CHUNK_BYTES, r < rows ? min(max(row_bytes - chunk * CHUNK_BYTES, 0), CHUNK_BYTES) : 0);
      }
    }
  }
};
