// Which keys a query sees: causal masks, windows and the end of the sequence are all one interval of keys.
#pragma once

#include "params.cuh"

struct Keys { int first, last; };  // inclusive; empty if last < first

// The keys that query `row` sees. Both ends never fall as `row` grows.
DEVICE Keys visible_keys(const Shape& shape, int row) {
  int diagonal = row + shape.len_kv - shape.len_q;
  return {max(0, diagonal - shape.left), min(shape.len_kv - 1, diagonal + shape.right)};
}

// The key tiles that queries first_row..last_row need: tiles first..last of `columns` keys each, none if last < first.
DEVICE Keys visible_tiles(const Shape& shape, int first_row, int last_row, int columns) {
  Keys keys = {visible_keys(shape, first_row).first, visible_keys(shape, last_row).last};
  if (keys.last < keys.first) return {0, -1};
  return {keys.first / columns, keys.last / columns};
}

// Whether each of the queries first_row..last_row sees all keys from..to.
DEVICE bool all_visible(const Shape& shape, int first_row, int last_row, int from, int to) {
  return visible_keys(shape, last_row).first <= from && to <= visible_keys(shape, first_row).last;
}

// Sets what its query doesn't see to -INF, in one row of accumulators (mma.cuh) whose first row is query `row` - g and
// whose first column is key `key`; `row` is this lane's upper row, t its place in the quad.
template <int N>
DEVICE void mask_scores(float (&s)[N][4], const Shape& shape, int row, int key, int t) {
  Keys upper = visible_keys(shape, row), lower = visible_keys(shape, row + 8);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int column = key + 8 * n + 2 * t + i % 2;
      Keys keys = i < 2 ? upper : lower;
      if (column < keys.first || column > keys.last) s[n][i] = -INF;
    }
}
