// Which rows and keys a block of cascade.cu has, where a window begins in the prefix, and which partial results a row has.
#pragma once

#include "mma.cuh"
#include "scores.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef LENGTHS
#define LENGTHS 0
#endif

// With LENGTHS requests have own lengths: a kernel takes OWN_LENGTHS among its parameters, and hands GIVEN_LENGTHS on.
#if LENGTHS
#define OWN_LENGTHS const int *seq_lens,
#define GIVEN_LENGTHS seq_lens
#else
#define OWN_LENGTHS
#define GIVEN_LENGTHS nullptr
#endif

constexpr bool UNEVEN = WINDOW || LENGTHS;  // rows don't have all partial results

// How many keys a request has of its own: at most len_kv, for which there is room.
DEVICE int own_keys(const Shape& shape, const int* seq_lens, int request) {
  if constexpr (!LENGTHS) return shape.len_kv;
  return min(max(load_global<int>(seq_lens + request), 0), shape.len_kv);
}

// The first key of the prefix that a query sees, or len_prefix. No sum is beyond 32 bits in this order.
DEVICE int first_of_prefix(const Shape& shape, int own, int query) {
  if constexpr (!WINDOW) return 0;
  return min(max(shape.len_prefix - shape.left + (own - shape.len_q + query), 0), shape.len_prefix);
}

struct Span { int begin, end; };

// The partial results of a row: of the prefix's chunks, and of its own chunks. There is one of its own even without keys.
struct Parts {
  int of_prefix, all;

  DEVICE explicit Parts(const Shape& shape)
      : of_prefix(ceil_div(shape.len_prefix, PREFIX_TILES * BC)), all(of_prefix + max(1, ceil_div(shape.len_kv, SUFFIX_TILES * BC))) {}

  DEVICE long long at(const Shape& shape, int flat_head, int part, int query) const {
    return (static_cast<long long>(flat_head) * all + part) * shape.len_q + query;
  }

  // Which partial results a query has. If it sees a key of the prefix, it sees its own keys from the first one on. So there is no
  // gap.
  DEVICE Span of_query(const Shape& shape, int own_keys, int query) const {
    if constexpr (!UNEVEN) return {0, all};
    Shape own = shape;
    own.len_kv = own_keys;
    const Keys seen = visible_keys(own, query);
    const int first = first_of_prefix(shape, own_keys, query);
    const int end = of_prefix + (seen.first <= seen.last ? seen.last / (SUFFIX_TILES * BC) + 1 : 0);
    return {first < shape.len_prefix ? first / (PREFIX_TILES * BC) : of_prefix + seen.first / (SUFFIX_TILES * BC), end};
  }
};

// The prefix as a problem of its own: one request, with the queries of all.
DEVICE Shape prefix_of(const Shape& shape) {
  Shape own = shape;
  own.batch = 1, own.len_q = shape.batch * shape.len_q, own.len_kv = shape.len_prefix;
  own.left = own.right = 1 << 30;
  return own;
}

// Where a row of a tile lies: a head and a query of a request.
struct Row { int request, head, query; };

// Which rows a block has, and which keys. Blocks that share keys follow one another.
struct Place {
  int group, first_row, rows, chunk, kv_head, batch, len_q, own_len_q;

  DEVICE Place(const Shape& shape, const Shape& own, int tile_rows, int chunks)
      : group(shape.heads / shape.kv_heads), len_q(shape.len_q), own_len_q(own.len_q) {
    const int all_rows = own.len_q * group, row_tiles = ceil_div(all_rows, tile_rows);
    const unsigned rest = blockIdx.x / row_tiles, heads = rest / chunks;
    first_row = (blockIdx.x - rest * row_tiles) * tile_rows, rows = min(tile_rows, all_rows - first_row);
    chunk = rest - heads * chunks, kv_head = heads % shape.kv_heads, batch = heads / shape.kv_heads;
  }

  DEVICE Row at(int row) const {
    const int token = batch * own_len_q + (first_row + row) / group;
    return {token / len_q, kv_head * group + (first_row + row) % group, token % len_q};
  }
  // The key tiles of the chunk that these rows see.
  DEVICE Keys tiles(const Shape& own, int of_chunk) const {
    const Keys seen = visible_tiles(own, first_row / group, (first_row + rows - 1) / group, BC);
    return {max(seen.first, chunk * of_chunk), min(seen.last, chunk * of_chunk + of_chunk - 1)};
  }
};

// What a block's request has of its own.
DEVICE Shape suffix_of(const Shape& shape, const int* seq_lens, int chunks) {
  Shape own = shape;
  if constexpr (LENGTHS) own.len_kv = own_keys(shape, seq_lens, Place(shape, shape, SUFFIX_ROWS, chunks).batch);
  return own;
}

// Where windows begin in the prefix, for the rows of a tile. Each lane of a warp has the number of own keys of some of the tile's
// requests: lane n has request n, request n + 32, and so on.
template <int ROWS>
struct Windows {
  static constexpr int HELD = ceil_div(ROWS, 32);
  const Shape& shape;
  const Row first, last;
  int own[HELD];

  DEVICE Windows(const Shape& shape, const Place& place, const int* seq_lens)
      : shape(shape), first(place.at(0)), last(place.at(place.rows - 1)) {
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      lanes_meet();
      own[n] = request(n) <= last.request ? own_keys(shape, seq_lens, request(n)) : 0;
    }
  }

  DEVICE int request(int n) const { return first.request + 32 * n + lane_id(); }

  // The first key that a row sees.
  DEVICE int first_key(const Row& row) const {
    const int place = row.request - first.request;
    int keys = 0;
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      const int there = shuffle(own[n], place % 32);
      if (place / 32 == n) keys = there;
    }
    return first_of_prefix(shape, keys, row.query);
  }

  // The first of the keys that rows see, and the last one at which a window begins.
  DEVICE Keys begin() const {
    Keys ends = {shape.len_prefix, 0};
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      if (request(n) > last.request) continue;
      ends.first = min(ends.first, first_of_prefix(shape, own[n], request(n) == first.request ? first.query : 0));
      ends.last = max(ends.last, first_of_prefix(shape, own[n], request(n) == last.request ? last.query : shape.len_q - 1));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      ends.first = min(ends.first, shuffle(ends.first, lane_id() ^ step));
      ends.last = max(ends.last, shuffle(ends.last, lane_id() ^ step));
    }
    return ends;
  }
};

// Sets the scores of keys before the first one that a row sees to -INF. `column` is the key of this lane's first column.
template <int N>
DEVICE void hide_before(float (&s)[N][4], const int (&first)[2], int column) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + 8 * n + e % 2 < first[e / 2]) s[n][e] = -INF;
}
