// How a warp copies keys from their pages.
#pragma once

#include "params.cuh"
#include "tile.cuh"

// The address `n` units of `unit` bytes behind `base`, in one instruction. The compiler would make a product of 64 bits.
DEVICE const char* address_of(const char* base, int n, int unit) {
#ifdef EMULATOR
  return base + static_cast<long long>(n) * unit;
#else
  const char* there;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(there) : "r"(n), "r"(unit), "l"(base));
  return there;
#endif
}

// Copies a warp's rows from their pages into its tile. Each lane knows where one row lies, and tells the others. LANES lanes
// copy a row, so that one exchange of a number serves CHUNKS / LANES copies, and a copy still has whole lines. A warp that has few
// registers computes anew for each tile what follows from a lane's number (FEW_REGISTERS), but not where rows have whole panels.
template <class TileT, bool FEW_REGISTERS = false>
struct PageLoader {
  static constexpr int ROWS = TileT::ROWS, CHUNKS = TileT::CHUNKS;
  static constexpr int LANES = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;
  static_assert(ROWS <= 32, "a lane for each row");

  const char* head;     // of page 0
  int page, row, unit;  // from one to the next, counted in `unit` bytes: so a number of 32 bits says where a row lies
  int row_bytes;

  // The unit is a power of two. The host has seen to it that no row lies 2^31 units away.
  DEVICE PageLoader(const char* head, const Tensor& x, int row_bytes) : head(head), row_bytes(row_bytes) {
    const int shift = trailing_zeros(static_cast<int>(x.batch | x.row) | 1 << 20);
    page = static_cast<int>(x.batch >> shift), row = static_cast<int>(x.row >> shift), unit = 1 << shift;
  }

  // Where row `place` of page `at` lies.
  DEVICE int row_of(int at, int place) const { return at * page + place * row; }

  // This lane's row lies at `own`. Rows from `rows` on and bytes past `row_bytes` become zeros.
  DEVICE void load(TileT tile, int own, int rows) const {
    if (row_bytes != TileT::ROW_BYTES)
      copy<false, false>(tile, own, rows);
    else if (rows < ROWS)
      copy<false, true>(tile, own, rows);
    else
      copy<true, true>(tile, own, rows);
  }

  // Copies a tile. All of its rows are there (WHOLE), or some. Rows with padding have a chunk that isn't WIDE enough. A lane's next
  // row is PASS rows down. There the swizzle is that of its first row, or (8 lanes a row) it has the other half of a line first.
  template <bool WHOLE, bool WIDE>
  DEVICE void copy(TileT tile, int own, int rows) const {
    constexpr int PASS = 32 / LANES;
    const int lane = FEW_REGISTERS && LANES < 8 ? opaque(lane_id()) : lane_id();
    const unsigned to = tile.at(lane / LANES, lane % LANES);  // of the first pass
    const char* lane_head = opaque(head + lane % LANES * CHUNK_BYTES);
#pragma unroll(WHOLE ? (FEW_REGISTERS ? 4 : ROWS / PASS) : WIDE ? 4 : 1)
    for (int first = 0; first < ROWS; first += PASS) {
      const int r = first + lane / LANES;
      const char* from = address_of(lane_head, shuffle(own, r), unit);
      const unsigned row_to = (to ^ first % 8 * CHUNK_BYTES) + first * TileT::APART;
#pragma unroll((WHOLE || WIDE) && !(FEW_REGISTERS && CHUNKS / LANES > 4) ? CHUNKS / LANES : 1)
      for (int c = 0; c < CHUNKS; c += LANES) {
        if (!WHOLE || ROWS % PASS) lanes_meet();
        if (r >= ROWS) continue;
        const int behind = row_bytes - (c + lane % LANES) * CHUNK_BYTES;  // bytes of the row from here on
        if (WIDE)
          copy_async_inside(TileT::right(row_to, c), from + c * CHUNK_BYTES, WHOLE || r < rows);
        else
          copy_async(TileT::right(row_to, c), from + c * CHUNK_BYTES, r < rows ? min(max(behind, 0), CHUNK_BYTES) : 0);
      }
    }
  }
};
