// The key tiles of all sequences of a ragged batch in one order, the longest first (ORDERED). Blocks take them in this order, so that
// what comes last is short. The launch before writes the order from the offsets: no CPU has to know them.
//
// The length of a tile is a number of queries: from the first one that sees it to the end of its sequence. Only the top three bits
// of this length count. All lengths from an ORDERED-th part of the longest sequence on count as alike. Tiles that are alike keep
// their order. So neighbours in a sequence stay side by side, and what they share (Q, dO and the sums of dQ) stays in the L2. Only
// what comes last has to be short. Empty places come at the end.
#pragma once

#include "hopper_backward.cuh"

// Lengths that count as the same: from `least` to before `next`.
struct Alike { int least, next; };

DEVICE Alike alike(const Shape& shape, int queries) {
  const int most = shape.longest / max(1, ORDERED);
  if (queries >= most) return {most, 0x7fffffff};
  int step = 1;
  while (queries / step >= 8) step *= 2;
  return {queries / step * step, min((queries / step + 1) * step, most)};
}

// How many key tiles of a sequence are at least `least` long. They are its first ones. Tile j is min(queries, keys + right - j BC)
// queries long.
DEVICE int tiles_as_long(const Shape& shape, int queries, int keys, int least) {
  return queries < least ? 0 : min(ceil_div(keys, BC), max(0, keys + shape.right - least + BC) / BC);
}

// Puts the key tiles in order. Each warp of the launch takes some of them, and counts those that come before. For that each lane
// goes through some sequences.
DEVICE void put_in_order(const Shape& shape, const Offsets& offsets, OrderedTile* order) {
  const int warps = blockDim.x / 32;
  for (int place = blockIdx.x * warps + warp_id(); place < key_tiles(shape); place += gridDim.x * warps) {
    const Sequence keys = sequence_at<BC>(transposed(shape), offsets.kv, place);
    Origin own = {};
    const int first_key = first_key_at(keys, offsets, place, own);
    const Shape keys_first = transposed(own.alone(shape));
    const bool empty = first_key >= keys_first.len_q;
    const Alike lengths = alike(shape, min(own.queries, own.queries + shape.right - first_key));
    unsigned before = 0;
    for (int first = 0; first < shape.sequences; first += 32) {
      const int other = first + lane_id();
      lanes_meet();
      if (other < shape.sequences) {
        const int q = load_global<int>(offsets.q + other), end_q = load_global<int>(offsets.q + other + 1);
        const int kv = load_global<int>(offsets.kv + other), end_kv = load_global<int>(offsets.kv + other + 1);
        const int least = empty ? 0 : other < keys.number ? lengths.least : lengths.next;
        int tiles = tiles_as_long(shape, end_q - q, end_kv - kv, least);
        if (empty && other < keys.number) tiles = end_kv / BC - kv / BC + 1;  // with an empty place
        if (other == keys.number) tiles = keys.before<BC>(place) / BC;
        before += tiles;
      }
    }
    before = warp_sum(before);
    if (lane_id() == 0) {
      const Keys seen = visible_tiles(keys_first, first_key, min(first_key + BC, keys_first.len_q) - 1, QUERIES);
      store_global(&order[before].work, empty ? Work{} : Work{first_key, 1, seen});
      store_global(&order[before].sequence, own);
    }
  }
}
