// C (64 x WIDTH, float32) = A (64 x DEPTH) · B, once, of any type: A from SRAM or registers, B's rows along the summed dimension (a
// tile WIDTH x DEPTH) or across it (DEPTH x WIDTH). Threads store both tiles, swizzled. EL is an EmuElement.
#include "memory.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int BYTES = EL == 3 ? 1 : 2, STEP = 32 / BYTES, PANEL = 128 / BYTES;  // elements
constexpr int tile_bytes(int rows, int columns) { return ceil_div(columns, PANEL) * rows * 128; }

// Rows x columns from HBM, packed, into panels of 128 bytes a row.
DEVICE void stage(unsigned base, const char* from, int rows, int columns) {
  const int chunks = columns * BYTES / 16;
  for (int i = threadIdx.x; i < rows * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks;
    store_shared(base + chunk / 8 * rows * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16, load_global<uint4>(from + i * 16));
  }
}

extern "C" __global__ void product(const char* a, const char* b, float* c) {
  const unsigned a_base = sram_base(), b_base = a_base + tile_bytes(64, DEPTH);
  name_sram("a", a_base, b_base - a_base);
  name_sram("b", b_base, ACROSS ? tile_bytes(DEPTH, WIDTH) : tile_bytes(WIDTH, DEPTH));
  stage(a_base, a, 64, DEPTH);
  stage(b_base, b, ACROSS ? DEPTH : WIDTH, ACROSS ? WIDTH : DEPTH);
  emu_fence_async();
  barrier();

  float s[WIDTH / 8][4];
  for (int n = 0; n < WIDTH / 8; ++n)
    for (int e = 0; e < 4; ++e) s[n][e] = 1;
  unsigned registers[DEPTH / STEP][4];
  const int g = threadIdx.x / 32 * 16 + lane_id() / 4, t = lane_id() % 4;
  for (int k = 0; k < DEPTH / STEP; ++k)
    for (int i = 0; i < 4; ++i)
      registers[k][i] = load_global<unsigned>(a + ((g + i % 2 * 8) * DEPTH + k * STEP) * BYTES + t * 4 + i / 2 * 16);
  // step: multiply
  wgmma_fence();
  for (int k = 0; k < DEPTH / STEP; ++k) {
    const unsigned along = k * STEP % PANEL * BYTES;
    const unsigned a_at = a_base + k * STEP / PANEL * 64 * 128 + along, b_at = b_base + k * STEP / PANEL * WIDTH * 128 + along;
    const auto b_operand = ACROSS ? wgmma_descriptor(b_base + k * STEP * 128, DEPTH * 128, 1024) : wgmma_descriptor(b_at, 16, 1024);
    if (RS) emu_wgmma_rs(&s[0][0], WIDTH / 8, registers[k], b_operand, k > 0 || KEEP, ACROSS, EL);
    else emu_wgmma_ss(&s[0][0], WIDTH / 8, wgmma_descriptor(a_at, 16, 1024), b_operand, k > 0 || KEEP, ACROSS, EL);
  }
  wgmma_commit();
  wgmma_wait<0>();
  // step: store
  for (int n = 0; n < WIDTH / 8; ++n)
    for (int half = 0; half < 2; ++half)
      store_global(c + (g + 8 * half) * WIDTH + 8 * n + 2 * t, make_float2(s[n][2 * half], s[n][2 * half + 1]));
}
