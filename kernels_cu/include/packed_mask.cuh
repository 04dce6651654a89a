// A mask that an array says, as mask.cu packs it: for each row tile a list of the key tiles that it sees, and for each pair a
// bit. Causal mask, window and the end of the sequence are in the bits, too. MASK says which form the array has: 1 of booleans,
// 2 of bits. 0: the problem has none.
//
//   tiles (row tiles, 1 + key tiles, rounded up to 4) int      how many tiles, then 2 j + 1 for a tile that needs its bits and
//                                                              2 j for one whose pairs are all visible, with j ascending
//   bits (row tiles, key tiles, BR / 16, MASK_WORDS, 32)       a word for each lane, as it holds 16 rows of accumulators
//                                                              (mma.cuh): bit 16 h + 2 n + e is row g + 8 h, column 8 n + 2 t + e
//
// In a ragged batch a row tile's number is its place (sequences.cuh), and each has room for the keys of the longest sequence.
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef MASK
#define MASK 0
#endif

constexpr int MASK_FRAGMENTS = BR / 16;        // of 16 rows
constexpr int MASK_WORDS = (BC + 63) / 64;     // of 64 columns of a fragment, so of 32 bits of a lane
constexpr int MASK_TILE = MASK_FRAGMENTS * MASK_WORDS * 32;  // words of a tile

// The first number of a row tile's list, and the lane's first word of 16 rows of a tile: how many numbers lie before them.
DEVICE long long list_of(const Shape& shape, int row_tile) {
  return static_cast<long long>(row_tile) * round_up(1 + ceil_div(shape.longest, BC), 4);
}
DEVICE long long words_of(const Shape& shape, int row_tile, int key_tile, int fragment) {
  const long long tile = static_cast<long long>(row_tile) * ceil_div(shape.longest, BC) + key_tile;
  return tile * MASK_TILE + fragment * MASK_WORDS * 32 + lane_id();
}

// An entry of a list. Without a mask it stays 0.
struct Visit {
  int entry = 0;

  DEVICE int tile() const { return entry >> 1; }
  DEVICE bool mixed() const { return entry & 1; }
};

// The key tile at place `j` of a walk, which a mask's list gives as `visit`.
DEVICE int key_tile(int j, Visit visit) { return MASK ? visit.tile() : j; }

// The list of a row tile. `at` counts from 0 to length() - 1.
struct Visits {
  const int* list;

  DEVICE Visits(const int* tiles, const Shape& shape, int row_tile) : list(tiles + list_of(shape, row_tile)) {}

  DEVICE int length() const { return load_global<int>(list); }
  DEVICE Visit at(int place) const { return {load_global<int>(list + 1 + place)}; }
};

// A lane's bits of 16 rows of a tile. Only those of a mixed tile are loaded and looked at.
struct MaskBits {
  unsigned words[MASK_WORDS];

  DEVICE void load(const unsigned* bits, const Shape& shape, int row_tile, Visit visit, int fragment) {
    if (!visit.mixed()) return;
    const unsigned* from = bits + words_of(shape, row_tile, visit.tile(), fragment);
#pragma unroll
    for (int w = 0; w < MASK_WORDS; ++w) words[w] = load_global<unsigned>(from + 32 * w);
  }

  template <int N>
  DEVICE void hide(float (&s)[N][4], Visit visit, float value) const {
    if (!visit.mixed()) return;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(words[n / 8] >> (16 * (e / 2) + 2 * (n % 8) + e % 2) & 1)) s[n][e] = value;
  }
};
