// The tree over the chunks of keys that a row tile sees: where the partial results of its nodes lie in HBM, and how they merge.
//
// Nodes have numbers along the keys: chunk c is a child of node c / 16, whatever the grid is. Only the nodes that a row tile sees
// exist. A level with n nodes at most has n places, from the chunks on. See Splits in simulator/programs/flash_decoding.py.
#pragma once

#include "elements.cuh"
#include "mask.cuh"

constexpr int CHILDREN = 16;
constexpr int TILES_PER_CHUNK = 4;

// A partial result of one row: four columns of the output, the maximum and the sum that they are relative to. Base 2.
struct Part { float4 o; float m, l; };

DEVICE float4 weighed(float4 x, float a, float4 y, float b) {
  return make_float4(x.x * a + y.x * b, x.y * a + y.y * b, x.z * a + y.z * b, x.w * a + y.w * b);
}

// Two neighbours in one. One that isn't there, or has seen no key, changes no bit of the other.
DEVICE Part joined(const Part& x, const Part& y) {
  const float m = fmaxf(x.m, y.m), a = exp2_approx(x.m - finite(m)), b = exp2_approx(y.m - finite(m));
  return {weighed(x.o, a, y.o, b), m, x.l * a + y.l * b};
}

// Neighbours two by two, and so on.
template <int N>
DEVICE Part merged(const Part* first) {
  if constexpr (N == 1)
    return *first;
  else
    return joined(merged<N / 2>(first), merged<N / 2>(first + N / 2));
}

// The output, and the natural LSE: 0 and -INF for a row that saw no key.
DEVICE float4 output_of(const Part& x) {
  const float factor = x.l > 0 ? reciprocal(x.l) : 0;
  return make_float4(x.o.x * factor, x.o.y * factor, x.o.z * factor, x.o.w * factor);
}
DEVICE float lse_of(const Part& x) { return (x.m + log2_approx(x.l)) * LN2; }

// The level of the tree that a block is at: its own node, the nodes that exist there, and where the level's places and the
// parents' counters begin.
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

// How many places a head's nodes have in all, and how many counters each of its row tiles. `most` is the most chunks of a row tile.
struct Room {
  int places = 0, counters = 1;

  DEVICE Room(int most, int len_kv) {
    for (int n = most, chunks = n > 1 ? ceil_div(len_kv, TILES_PER_CHUNK * BC) : 1; chunks > 1; n = (n - 2) / CHILDREN + 2) {
      if (places) counters += n;
      places += n;
      chunks = ceil_div(chunks, CHILDREN);
    }
  }
};
