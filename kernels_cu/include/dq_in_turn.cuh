// How the blocks of flash2_backward.cu add to dQ if each run is to give the same bits (DETERMINISTIC): the sums of dQ have one order.
//
//   drawn (batch * kv_heads, or of a ragged batch kv_heads, sequences), turns (batch * heads, len_q)    zeros before and after
//   number (batch * kv_heads, len_kv)    the key tile that each block has drawn
//   turns and number have something for each tile, which lies at its first row
//
// The blocks of a query tile add to its dQ in the order of their key tiles. Each block waits for its turn. When a block begins, it
// draws its key tile from a counter of its KV head (or of its sequence there). So it waits only for blocks that have begun. Nothing
// hangs, whatever the grid is and in whichever order blocks start.
//
// All blocks walk from the last query to the first. Under a causal mask, key tiles then begin together, at the queries that all of
// them see, and the longest begin first. In a window, each comes to a query tile after those before it have left. So a block is
// late by the adding of those before it, which run side by side with it, and not by their tiles. From then on it waits for no other
// block.
//
// Two other ways were not taken. A block might begin at a query tile of its own, and wrap. Then blocks would wait for higher numbers,
// and if those found no room, all would hang. A launch whose blocks own query tiles would need no order. But it computes S and dP
// again: seven products in place of five.
// Expected: as fast as in any order, but for two barriers and a fence per tile.
#pragma once

#include "flash2_backward.cuh"

// Whose turn it is to add to the dQ of a query tile: its counter, and the key tiles that its queries see. `begin` is the first row
// of the head, of all batches and sequences.
struct Turn {
  long long counter;
  Keys tiles;

  DEVICE Turn(const Shape& shape, long long begin, int i)
      : counter(begin + i * BR),
        tiles(visible_tiles(shape, i * BR, min(i * BR + BR, shape.len_q) - 1, BC)) {}
};

struct Turns {
  unsigned* drawn;
  int* number;
  unsigned* turns;
  static constexpr bool ORDERED = true, BACKWARDS = true;

  // One thread draws the block's key tile, and tells the other warps. Keys are numbered from the first of the sequence, for turns
  // count whole tiles of them.
  DEVICE OwnKeys draw(int flat_head, const SequenceRows& place, const Shape& batches) const {
    Shape shape = batches;  // the problem that the sequence is alone
    if constexpr (RAGGED) shape.len_q = place.keys, shape.len_kv = place.keys - place.aligned;
    const int key_tiles = ceil_div(shape.len_kv, BC), before = RAGGED ? place.q + place.aligned : 0;
    const int counter = RAGGED ? flat_head * batches.sequences + place.sequence : flat_head;
    int* own = number + static_cast<long long>(flat_head) * batches.len_kv + place.q + place.first_row;
    if (threadIdx.x == 0) store_global<int>(own, count_up(drawn + counter, key_tiles - 1));
    barrier();
    return {shape, uniform(load_global<int>(own)) * BC, before};
  }

  DEVICE int first_key(const Place&, int kept) const { return kept; }

  // Waits until all key tiles before this one have added their parts.
  DEVICE void wait(const Shape& shape, long long begin, int i, int key_tile) const {
    const Turn turn(shape, begin, i);
    if (threadIdx.x == 0) wait_for(turns + turn.counter, key_tile - turn.tiles.first);
    barrier();
  }

  // Lets the next key tile add, once all warps have added theirs.
  DEVICE void pass_on(const Shape& shape, long long begin, int i) const {
    barrier();
    const Turn same(shape, begin, opaque(i));  // computed once more: cheaper than registers
    if (threadIdx.x == 0) count_up(turns + same.counter, same.tiles.last - same.tiles.first);
  }
};
