// Where a sequence of a ragged batch ends, a box of TMA's may bring rows of the next one.
#pragma once

#include "memory.cuh"
#include "warpgroup.cuh"

// The warpgroups that multiply write zeros over such rows, from `first` on. There are CONSUMERS of them, they come after a
// producer's, and all of their threads call this. `barrier` is a named barrier of theirs. The rows would weigh 0. But 0 times a NaN
// is NaN, and in a forward pass a row of Q may make its warp rescale.
template <int CONSUMERS, class TileT>
DEVICE void clear_rows(TileT tile, int first, int barrier) {
  for (int i = 0; i < TileT::PANELS; ++i)
    for (int at = first * 128 + (threadIdx.x - WARPGROUP) * CHUNK_BYTES; at < TileT::PANEL_BYTES; at += CONSUMERS * WARPGROUP * CHUNK_BYTES)
      store_shared(tile.panel(i) + at, make_uint4(0, 0, 0, 0));
  fence_async();
  named_barrier_sync(barrier, CONSUMERS * WARPGROUP);
}
