// A warp: 32 lanes in lockstep. In the accumulator layout (mma.cuh) a quad, four neighbouring lanes, holds a row,
// so the statistics of a row are a quad's reduction.
#pragma once

#include "types.cuh"

DEVICE int lane_id() { return threadIdx.x % 32; }
DEVICE int warp_id() { return threadIdx.x / 32; }

// The value that lane (own lane ^ mask) holds.
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// The value that lane `source` holds.
DEVICE float shuffle(float x, int source) { return __shfl_sync(0xffffffffu, x, source); }
DEVICE int shuffle(int x, int source) { return __shfl_sync(0xffffffffu, x, source); }
DEVICE long long shuffle(long long x, int source) { return __shfl_sync(0xffffffffu, x, source); }
DEVICE unsigned shuffle(unsigned x, int source) { return __shfl_sync(0xffffffffu, x, source); }

// x of lane 0: tells the compiler that all lanes hold the same, so that it needn't be kept in a register of each.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Waits for the lanes of the warp; neither lanes nor the compiler move loads across.
DEVICE void warp_barrier() { __syncwarp(); }

// All lanes of the warp are here, and will part. This is for the emulator, which runs lanes one after the other: it takes
// those accesses for one instruction that the lanes reach equally often after they met. On a GPU it is nothing.
DEVICE void lanes_meet() {
#ifdef EMULATOR
  __any_sync(0xffffffffu, true);
#endif
}

// True in one lane of the warp, which all lanes call. The compiler knows that it is one, so what this lane hands to the copy engine
// needs no loop over lanes that differ.
DEVICE bool elected() {
#ifdef EMULATOR
  return lane_id() == 0;
#else
  unsigned one;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
  return one;
#endif
}

// True in every lane if it is in any.
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// The lanes in which x is true, a bit each. Then how many bits are set, and how many in lanes below this one.
DEVICE unsigned ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int count_bits(unsigned x) { return __popc(x); }
DEVICE int count_below(unsigned lanes) { return count_bits(lanes & (1u << lane_id()) - 1); }

DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
DEVICE unsigned warp_sum(unsigned x) {
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
