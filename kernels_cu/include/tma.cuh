// TMA: one thread asks, the copy engine moves a whole box of an array in HBM into SRAM and tells an mbarrier.
#pragma once

#include "types.cuh"

// What cuTensorMapEncodeTiled makes: base, extents, strides, box and swizzle of a (batch, head, row, column) array.
// Pass it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// How long a box stays in the L2 (as the copy engine's cache hints encode it).
constexpr unsigned long long EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000;

// Box of `map` with its corner at (batch, head, row, column) -> SRAM at `to`, 128-byte rows, 128-byte swizzle (1024-byte
// aligned). Rows and columns outside the array become zeros. The mbarrier `done` is told every byte of the box.
DEVICE void tma_load(unsigned to, const TensorMap& map, int batch, int head, int row, int column, unsigned done,
                     unsigned long long hint) {
#ifdef EMULATOR
  const int corner[] = {column, row, head, batch};
  emu_tma_load(to, &map, corner, 4, done);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(done), "l"(hint) : "memory");
#endif
}
