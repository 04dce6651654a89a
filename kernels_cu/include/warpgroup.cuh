// A warpgroup is four neighbouring warps, the unit of Hopper's matrix products. Warpgroups of a block talk to each other by
// named barriers, and one gives up registers that another takes.
#pragma once

#include "warp.cuh"

constexpr int WARPGROUP = 128;  // threads

// The warpgroup of this thread: the same in every lane, and the compiler knows it.
DEVICE int warpgroup_id() { return uniform(static_cast<int>(threadIdx.x) / WARPGROUP); }

// From here on each thread of this warpgroup has COUNT registers, a multiple of 8: release gives the rest back, claim waits until
// they are free. All warps of the warpgroup call it, in one place; ptxas wants __launch_bounds__(threads, 1) (else: C7508).
template <int COUNT>
DEVICE void release_registers() {
#ifdef EMULATOR
  emu_setmaxnreg(COUNT, false);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
DEVICE void claim_registers() {
#ifdef EMULATOR
  emu_setmaxnreg(COUNT, true);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Named barrier `id` (1..15; 0 is barrier()) for `threads` threads: sync waits for them all, arrive only counts.
DEVICE void named_barrier_sync(int id, int threads) {
#ifdef EMULATOR
  emu_named_barrier(id, threads);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
DEVICE void named_barrier_arrive(int id, int threads) {
#ifdef EMULATOR
  emu_named_arrive(id, threads);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
