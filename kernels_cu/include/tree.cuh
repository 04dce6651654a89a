// The tree over the chunks of keys that a row tile sees. Neighbours merge two by two, by their numbers along the keys. So the tree is
// the same, whichever warp computes what. A block computes units of it, and a unit has a place among the partial results in HBM.
//
// A unit has a run of chunks, and merges them in registers. Above the runs, a node has 32 children (five levels of the tree in one
// step). Run r is a child of node r / 32, whatever the grid is. Only the nodes that a row tile sees exist. A level with n nodes
// at most has n places, from the runs on. See Splits in simulator/programs/flash_decoding.py.
#pragma once

#include "elements.cuh"
#include "mask.cuh"
#include "warp.cuh"

#ifndef TILES_PER_CHUNK
#define TILES_PER_CHUNK 4
#endif
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM  // columns of the output
#endif
#ifndef ONE_KV_HEAD
#define ONE_KV_HEAD 0  // 1: there is no other, and no register needs to say so
#endif

constexpr int CHILDREN = 32;  // a lane each
constexpr int CHUNK_KEYS = TILES_PER_CHUNK * BC;
constexpr DEVICE int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }
constexpr int LEVELS_OF_RUN = log2_of(RUN);
constexpr int TURNS = (VALUE_DIM + 127) / 128;  // a warp's lanes have four columns of a row each, and again of the next 128

// A partial result of one row: this lane's columns of the output, the maximum and the sum that they are relative to. Base 2.
// One that isn't there has no output, a maximum of LOWEST and a sum of 0: it changes no bit of another.
struct Part { float4 o[TURNS]; float m, l; };

DEVICE float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

// Two neighbours in one.
DEVICE Part joined(const Part& x, const Part& y) {
  const float m = fmaxf(x.m, y.m), a = exp2_approx(x.m - m), b = exp2_approx(y.m - m);
  Part both;
  both.m = m, both.l = weighed(x.l, a, y.l, b);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) both.o[turn] = weighed(x.o[turn], a, y.o[turn], b);
  return both;
}

// Joins 32 partial results. Each lane has the maximum and the sum of one. This finds the maximum and the sum of all of them together,
// and the weight of each in each of the five levels.
struct Weights {
  static constexpr int LEVELS = log2_of(CHILDREN);
  float m, l, of_level[LEVELS];

  DEVICE Weights(float m, float l) : m(m), l(l) {
#pragma unroll
    for (int k = 0; k < LEVELS; ++k) {
      const float top = fmaxf(this->m, shuffle_xor(this->m, 1 << k)), own = exp2_approx(this->m - top);
      const float other = shuffle_xor(own, 1 << k), other_l = shuffle_xor(this->l, 1 << k);
      const bool left = (lane_id() >> k) % 2 == 0;
      this->l = left ? weighed(this->l, own, other_l, other) : weighed(other_l, other, this->l, own);
      this->m = top, of_level[k] = own;
    }
  }

  // Node n of level K. `children` begins with child `first`.
  template <int K>
  DEVICE float4 merged(const float4* children, int n, int first = 0) const {
    if constexpr (K == 0)
      return children[n - first];
    else
      return weighed(merged<K - 1>(children, 2 * n, first), shuffle(of_level[K - 1], 2 * n << (K - 1)),
                     merged<K - 1>(children, 2 * n + 1, first), shuffle(of_level[K - 1], (2 * n + 1) << (K - 1)));
  }
  // All children, of the two nodes below.
  DEVICE float4 whole(float4 left, float4 right) const {
    return weighed(left, shuffle(of_level[LEVELS - 1], 0), right, shuffle(of_level[LEVELS - 1], CHILDREN / 2));
  }
};

// The level of the tree that a unit is at, from the runs on: its own node, the nodes that exist there, and where the level's places
// and the parents' counters begin.
struct Level {
  int node, first, last, place, counter, room;

  DEVICE bool is_root() const { return first == last; }
  DEVICE int parent() const { return node / CHILDREN; }
  DEVICE int place_of(int other) const { return place + other - first; }
  DEVICE int counter_of_parent() const { return counter + parent() - first / CHILDREN; }
  DEVICE Keys siblings() const {
    return {max(first, parent() * CHILDREN), min(last, parent() * CHILDREN + CHILDREN - 1)};
  }
  DEVICE Level above() const {
    const int wider = (room - 2) / CHILDREN + 2;
    return {parent(), first / CHILDREN, last / CHILDREN, place + room, counter + wider, wider};
  }
};

// The most chunks that a row tile sees. A stretch of n keys touches (n + c - 2) / c + 1 chunks of c keys at most.
DEVICE int most_chunks(const Shape& shape, int group) {
  const unsigned queries = min(shape.len_q, (BR - 2) / group + 2), stretch = shape.left + shape.right + queries;
  const int touched = (stretch + CHUNK_KEYS - 2) / CHUNK_KEYS + 1;
  return min(touched, max(1, ceil_div(shape.len_kv, CHUNK_KEYS)));
}

// The most runs of them: these begin at multiples of RUN chunks.
DEVICE int most_runs(const Shape& shape, int group) {
  const int runs = ceil_div(max(1, ceil_div(shape.len_kv, CHUNK_KEYS)), RUN);
  return min((most_chunks(shape, group) - 2 + RUN) / RUN + 1, runs);
}

#ifndef PAGED
#define PAGED 0
#endif
#ifndef RAGGED
#define RAGGED 0
#endif
#if PAGED || RAGGED
#include "units.cuh"
#else
#include "plain_units.cuh"
#endif

// Where the LSE of a row lies. `shape` is the launch's.
DEVICE long long lse_at(const Units& units, const Shape& shape, const Unit& unit, int head, int query) {
  if constexpr (RAGGED) return (static_cast<long long>(head) * units.batches + unit.batch) * units.batch.len_q + query;
  return (static_cast<long long>(unit.batch) * shape.heads + head) * shape.len_q + query;
}

// Which rows a unit has, which tiles and chunks they see, and the unit's own chunks. Rows that see no key have one chunk without.
struct Place {
  int first_row, rows, first_query, last_query, first_chunk, last_chunk, runs;
  Keys seen, chunks;

  DEVICE Place(const Units& units, const Unit& unit) : runs(units.runs_of(unit)) {
    const Shape& shape = units.alone(unit);
    first_row = unit.row_tile * BR, rows = min(BR, units.all_rows - first_row);
    const bool all = units.row_tiles == 1;
    first_query = all ? 0 : first_row / units.group, last_query = all ? shape.len_q - 1 : (first_row + rows - 1) / units.group;
    seen = visible_tiles(shape, first_query, last_query, BC);
    first_chunk = seen.first / TILES_PER_CHUNK, last_chunk = max(seen.last, 0) / TILES_PER_CHUNK;
    const int run = first_chunk / RUN + unit.run;
    chunks = {max(first_chunk, run * RUN), min(last_chunk, run * RUN + RUN - 1)};  // none, if this row tile sees fewer
  }

  DEVICE Keys tiles_of(int chunk) const {
    return {max(seen.first, chunk * TILES_PER_CHUNK), min(seen.last, chunk * TILES_PER_CHUNK + TILES_PER_CHUNK - 1)};
  }
  // The unit's run among the runs of its row tile.
  DEVICE Level level() const { return {chunks.last / RUN, first_chunk / RUN, last_chunk / RUN, 0, 0, runs}; }
  DEVICE bool has_keys() const { return chunks.first <= chunks.last && seen.first <= seen.last; }
};

// How many places a head's nodes have in all, and how many counters each of its row tiles.
struct Room {
  int places = 0, counters = 1;

  DEVICE Room(int most_runs, int len_kv) {
    int runs = most_runs > 1 ? ceil_div(len_kv, RUN * CHUNK_KEYS) : 1;
    for (int n = most_runs; runs > 1; n = (n - 2) / CHILDREN + 2) {
      if (places) counters += n;
      places += n;
      runs = ceil_div(runs, CHILDREN);
    }
  }
};
