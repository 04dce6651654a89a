// mbarriers: 64-bit counters in SRAM that threads arrive at and copies complete on. Each round of arrivals is a phase. A
// wait names the phase's parity: the first phase has 0, the next 1, then 0 again. A wait for the phase before the first (1)
// returns at once, which is how a ring's slots start out empty.
#pragma once

#include "types.cuh"

constexpr int MBARRIER_BYTES = 8;

// Makes an mbarrier whose phases have `arrivals` arrivals each. One thread calls it; mbarrier_publish and barrier() must
// follow.
DEVICE void mbarrier_init(unsigned address, int arrivals) {
#ifdef EMULATOR
  emu_mbarrier_init(address, arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
#endif
}

// Makes this thread's initialised mbarriers visible to the copy engine.
DEVICE void mbarrier_publish() {
#ifdef EMULATOR
  emu_mbarrier_publish();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival.
DEVICE void mbarrier_arrive(unsigned address) {
#ifdef EMULATOR
  emu_mbarrier_arrive(address, 0);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
#endif
}

// One arrival. The phase also waits until `bytes` have been copied.
DEVICE void mbarrier_arrive_expect(unsigned address, int bytes) {
#ifdef EMULATOR
  emu_mbarrier_arrive(address, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}

// Whether the phase of that parity is over; waits a little before it says no.
DEVICE bool mbarrier_try_wait(unsigned address, unsigned parity) {
#ifdef EMULATOR
  return emu_mbarrier_try_wait(address, parity);
#else
  unsigned done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(address), "r"(parity) : "memory");
  return done;
#endif
}

// Waits until the phase of that parity is over. What its copies wrote and its arrivals released is visible then.
DEVICE void mbarrier_wait(unsigned address, unsigned parity) {
  while (!mbarrier_try_wait(address, parity)) {}
}
