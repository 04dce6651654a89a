// Where a sequence of a ragged batch ends, a box of TMA's may bring rows of the next one.
#pragma once

#include "memory.cuh"
#include "warpgroup.cuh"

// Those who multiply write zeros over such rows, from `first` on: CONSUMERS warpgroups, which come after a producer's, all
// together. `barrier` is a named barrier of theirs. What those rows hold would weigh 0, but 0 times a NaN is NaN. And in a
// forward pass, rows of Q have a say in whether their warp rescales.
template <int CONSUMERS, class TileT>
DEVICE void clear_rows(TileT tile, int first, int barrier) {
  for (int i = 0; i < TileT::PANELS; ++i)
    for (int at = first * 128 + (threadIdx.x - WARPGROUP) * CHUNK_BYTES; at < TileT::PANEL_BYTES; at += CONSUMERS * WARPGROUP * CHUNK_BYTES)
      store_shared(tile.panel(i) + at, make_uint4(0, 0, 0, 0));
  fence_async();
  named_barrier_sync(barrier, CONSUMERS * WARPGROUP);
}
