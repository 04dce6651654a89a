// C (64 x 32 tiles, float32) = A (64 x 64) · Bᵀ (32 tiles x 64), 16 bit: a producer brings tiles of B round a ring, a consumer
// warpgroup multiplies. What a pipeline on Hopper can do wrong, it can do wrong here.
#include "mbarrier.cuh"
#include "memory.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int STAGES = 2, KEYS = 32, DEPTH = 64;
using ATile = PanelTile<64, DEPTH>;
using BTile = PanelTile<KEYS, DEPTH>;

extern "C" __global__ void __launch_bounds__(256, 1)
ring(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* c, int tiles) {
  const unsigned base = sram_base();
  const ATile a{base};
  auto b = [&](int slot) { return BTile{base + ATile::BYTES + slot * BTile::BYTES}; };
  auto mbarrier = [&](int i) { return base + ATile::BYTES + STAGES * BTile::BYTES + i * MBARRIER_BYTES; };
  const unsigned a_full = mbarrier(0);
  auto full = [&](int slot) { return mbarrier(1 + slot); };
  auto empty = [&](int slot) { return mbarrier(1 + STAGES + slot); };
  name_sram("a", a.base, ATile::BYTES);
  name_sram("b", b(0).base, STAGES * BTile::BYTES);
  name_sram("mbarriers", a_full, (1 + 2 * STAGES) * MBARRIER_BYTES);

  if (threadIdx.x == 0) {
    mbarrier_init(a_full, 1);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(full(slot), 1);
      mbarrier_init(empty(slot), 4);
    }
    mbarrier_publish();
  }
  barrier();

  if (warpgroup_id() == 0) {
    if (threadIdx.x == 0) {
      // step: load_a
      mbarrier_arrive_expect(a_full, ATile::BYTES);
      tma_load(a.base, a_map, 0, 0, 0, 0, a_full, EVICT_FIRST);
      // step: load_b
      for (int j = 0; j < tiles; ++j) {
        const int slot = j % STAGES, round = j / STAGES;
        mbarrier_wait(empty(slot), round % 2 ^ 1);
        mbarrier_arrive_expect(full(slot), BTile::BYTES);
        tma_load(b(slot).base, b_map, 0, 0, j * KEYS, 0, full(slot), EVICT_LAST);
      }
    }
    return;
  }

  // step: load_a
  mbarrier_wait(a_full, 0);
  for (int j = 0; j < tiles; ++j) {
    const int slot = j % STAGES, round = j / STAGES;
    // step: load_b
    mbarrier_wait(full(slot), round % 2);

    // step: multiply
    float s[KEYS / 8][4];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16)
      wgmma_ss(s, rows_operand(a, 0, k), rows_operand(b(slot), 0, k), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (lane_id() == 0) mbarrier_arrive(empty(slot));

    // step: store
    for (int n = 0; n < KEYS / 8; ++n)
      for (int half = 0; half < 2; ++half) {
        const int row = (warp_id() - 4) * 16 + lane_id() / 4 + 8 * half, column = j * KEYS + 8 * n + 2 * (lane_id() % 4);
        store_global(c + row * tiles * KEYS + column, make_float2(s[n][2 * half], s[n][2 * half + 1]));
      }
  }
}
