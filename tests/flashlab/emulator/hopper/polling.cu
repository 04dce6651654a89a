// A thread asks an mbarrier now and then, and does between what the other waits for; then they meet at a named barrier.
#include "mbarrier.cuh"
#include "memory.cuh"
#include "warpgroup.cuh"

extern "C" __global__ void polling(int* count) {
  const unsigned first = sram_base(), second = first + MBARRIER_BYTES;
  if (threadIdx.x == 0) {
    mbarrier_init(first, 1);
    mbarrier_init(second, 2);
  }
  barrier();
  if (threadIdx.x == 0) {
    int asked = 0;
    while (!mbarrier_try_wait(first, 0))
      if (++asked <= 2) mbarrier_arrive(second);
    store_global(count, asked >= 2 ? 1 : 0);
  } else if (threadIdx.x == 32) {
    mbarrier_wait(second, 0);
    mbarrier_arrive(first);
  }
  named_barrier_sync(1, 64);
}
