// One box of a 4-D array to SRAM, and from there as it lies to `seen`; then, if asked, to another array by its own map.
#include "mbarrier.cuh"
#include "memory.cuh"
#include "tma.cuh"

extern "C" __global__ void box(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, unsigned* seen,
                               int batch, int head, int row, int column, int bytes, int store) {
  const unsigned base = sram_base(), full = base + bytes;
  name_sram("tile", base, bytes);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_publish();
    mbarrier_arrive_expect(full, bytes);
    tma_load(base, from, batch, head, row, column, full, EVICT_FIRST);
  }
  barrier();
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < bytes / 4; i += 32) store_global(seen + i, load_shared<unsigned>(base + 4 * i));
  if (!store) return;
  for (int i = threadIdx.x; i < bytes / 4; i += 32) store_shared(base + 4 * i, ~load_shared<unsigned>(base + 4 * i));
  emu_fence_async();
  barrier();
  if (threadIdx.x == 0) {
    const int corner[] = {column, row, head, batch};
    emu_tma_store(&to, base, corner, 4);
    emu_tma_commit();
    emu_tma_wait(0, true);
  }
}
