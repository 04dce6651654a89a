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

// The tiles among them in which every query sees every key. They need no mask.
DEVICE Keys full_tiles(const Shape& shape, int first_row, int last_row, int columns) {
  return {ceil_div(visible_keys(shape, last_row).first, columns), (visible_keys(shape, first_row).last + 1) / columns - 1};
}

// Sets the scores that the mask hides to -INF, in one row of accumulators (mma.cuh) whose first column is key `key`. `row`
// is the query of this lane's upper row, `lane_column` (2t) its first column. Where heads are packed, `heads` rows are of a query.
template <int N, class Heads = int>
DEVICE void mask_scores(float (&s)[N][4], const Shape& shape, int row, int key, int lane_column, Heads heads = 1) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Keys keys = visible_keys(shape, (opaque(row) + 8 * half) / heads);
    const int first = keys.first - key - lane_column, last = keys.last - key - lane_column;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * n + e < first || 8 * n + e > last) s[n][2 * half + e] = -INF;
  }
}

// The same for one side of what a row sees, with half of the comparisons: the keys before its first, or after its last.
// `column` is the key of this lane's first column. What is hidden becomes `value`.
enum class Side { BEFORE, AFTER };
template <Side SIDE, int N>
DEVICE void mask_side(float (&s)[N][4], const Shape& shape, int row, int column, float value) {
  constexpr bool AFTER = SIDE == Side::AFTER;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Keys keys = visible_keys(shape, opaque(row) + 8 * half);
    const int bound = (AFTER ? keys.last : keys.first) - column;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (AFTER ? 8 * n + e > bound : 8 * n + e < bound) s[n][2 * half + e] = value;
  }
}

// Hides the rows from `rows` on. `row` is this lane's upper row.
template <int N>
DEVICE void mask_rows(float (&s)[N][4], int row, int rows) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (row + e / 2 * 8 >= rows) s[n][e] = -INF;
}

// The problem in which queries and keys have changed places: which queries a key sees.
DEVICE Shape transposed(const Shape& shape) {
  Shape other = shape;
  other.len_q = shape.len_kv, other.len_kv = shape.len_q, other.left = shape.right, other.right = shape.left;
  return other;
}
