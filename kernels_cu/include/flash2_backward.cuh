// What flash2_backward.cu needs apart from its steps: which keys a block owns, what lies in SRAM, and the queries that it walks.
#pragma once

#include "backward.cuh"
#include "sequences.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0  // do blocks add to dQ in an order?
#endif

static_assert(STAGES == 1 || STAGES == 2, "one buffer for Q and dO, or two");

// The KV head of a block, and its key tile there. Blocks start in the order of their number. So under a causal mask the keys that most
// queries see (the first) come first. The KV heads of a group run side by side before the next ones start. So what their blocks share
// (Q, dO and the sums of dQ) stays in the L2.
struct Place { int flat_head, key_tile; };

DEVICE Place place_of(const Shape& shape, int block) {
  const int key_tiles = row_tiles_of<BC>(transposed(shape)), group = shape.group / (shape.heads / shape.kv_heads);
  const int first_head = block / (group * key_tiles) * group;  // of the group
  const int heads = min(group, shape.batch * shape.kv_heads - first_head);
  const int place = block - first_head * key_tiles;
  return {first_head + place % heads, place / heads};
}

// The keys of a block, from `first` on, in the problem that their sequence is alone. `before` rows of the head lie in front of key 0.
struct OwnKeys {
  Shape shape;
  int first, before;
};

struct Sram {
  KVTile k{sram_base()}, v{k.base + KVTile::BYTES};
  PTile p{v.base + KVTile::BYTES}, ds{p.base + PTile::BYTES};

  DEVICE QTile q(int stage) const { return {ds.base + PTile::BYTES + stage * QTile::BYTES}; }
  DEVICE QTile dout(int stage) const { return {q(STAGES).base + stage * QTile::BYTES}; }

  DEVICE void name() const {
    name_sram("k", k.base, KVTile::BYTES);
    name_sram("v", v.base, KVTile::BYTES);
    name_sram("p", p.base, PTile::BYTES);
    name_sram("ds", ds.base, PTile::BYTES);
    name_sram("q", q(0).base, STAGES * QTile::BYTES);
    name_sram("dout", dout(0).base, STAGES * QTile::BYTES);
  }
};

// A tile of queries of one of the heads that share a block's KV head.
struct Visit { int head, i; };

// The tiles of queries that a block visits, head after head: from the first query to the last, or (BACKWARDS) from the last to the first.
template <bool BACKWARDS>
struct Visits {
  const Keys tiles;

  DEVICE int begin() const { return BACKWARDS ? tiles.last : tiles.first; }
  DEVICE Visit after(Visit at) const {
    if constexpr (BACKWARDS) return at.i > tiles.first ? Visit{at.head, at.i - 1} : Visit{at.head + 1, tiles.last};
    return at.i < tiles.last ? Visit{at.head, at.i + 1} : Visit{at.head + 1, tiles.first};
  }
};
