// A ring of tiles in SRAM, which one side fills and the other empties. Each slot has mbarriers: "full" says that its tile is there,
// "empty" that no warp needs it any more.
#pragma once

#include "mbarrier.cuh"
#include "warp.cuh"

// All lanes of this warp have arrived.
DEVICE void release(unsigned mbarrier) {
  warp_barrier();
  if (lane_id() == 0) mbarrier_arrive(mbarrier);
}

// A place in a ring of STAGES slots, and the parity of the round. A consumer waits for `parity`, a producer for its opposite.
template <int SLOTS>
struct RingOf {
  int slot = 0;
  unsigned parity = 0;

  DEVICE void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }
};
using Ring = RingOf<STAGES>;
