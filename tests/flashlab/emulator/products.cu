// What one matrix product makes of chosen operands: d = c + sum of a_k b_k for each case, with 64 cases per block.
// Case i has row i of A, row i of B and the accumulators of row i; its sum lies on the diagonal. Up to four products
// of a chain, which is `steps` long, are issued at once.
//
//   a, b (blocks, steps, 64, 32 bytes)    c, d (blocks, 64) float32
#include "memory.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int SIDE = 64, STEP = 32, ROW = 128, AT_ONCE = ROW / STEP;  // cases; bytes of a product's row, of a row in SRAM

struct Place { int row, column; };
// Where accumulator c[n][e] of this thread lies in the block's 64 x 64 sums.
DEVICE Place place(int n, int e) {
  return {warp_id() * 16 + lane_id() / 4 + e / 2 * 8, 8 * n + lane_id() % 4 * 2 + e % 2};
}

DEVICE void load_c(float (&s)[SIDE / 8][4], const float* c) {
#pragma unroll
  for (int n = 0; n < SIDE / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = load_global<float>(c + blockIdx.x * SIDE + place(n, e).row);
}

DEVICE void store_d(float* d, const float (&s)[SIDE / 8][4]) {
#pragma unroll
  for (int n = 0; n < SIDE / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto [row, column] = place(n, e);
      if (row == column) store_global(d + blockIdx.x * SIDE + row, s[n][e]);
    }
}

// The four words of A that a thread holds in registers, from 64 rows of 32 bytes.
DEVICE void load_a(unsigned (&r)[4], const char* rows) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    r[i] = load_global<unsigned>(rows + (place(0, 0).row + i % 2 * 8) * STEP + lane_id() % 4 * 4 + i / 2 * 16);
}

// Copies `steps` steps from HBM into swizzled rows of 128 bytes.
DEVICE void stage(unsigned base, const char* from, int steps) {
  for (int i = threadIdx.x; i < steps * SIDE * 2; i += WARPGROUP) {
    const int row = i / 2 % SIDE, piece = i / 2 / SIDE * 2 + i % 2;
    store_shared(base + row * ROW + (piece ^ row % 8) * 16, load_global<uint4>(from + i * 16));
  }
}

// multiply(sums, operand A in SRAM, its rows in HBM, operand B)
template <class Multiply>
DEVICE void run(const char* a, const char* b, const float* c, float* d, int steps, Multiply multiply) {
  const unsigned a_base = sram_base(), b_base = a_base + SIDE * ROW;
  a += static_cast<long long>(blockIdx.x) * steps * SIDE * STEP;
  b += static_cast<long long>(blockIdx.x) * steps * SIDE * STEP;
  float s[SIDE / 8][4];
  load_c(s, c);
  for (int first = 0; first < steps; first += AT_ONCE) {
    const int count = min(AT_ONCE, steps - first);
    const char* rows = a + first * SIDE * STEP;
    barrier();
    stage(a_base, rows, count);
    stage(b_base, b + first * SIDE * STEP, count);
#ifdef EMULATOR
    emu_fence_async();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    barrier();
    settle(s);
    wgmma_fence();
    for (int k = 0; k < count; ++k)
      multiply(s, wgmma_descriptor(a_base + k * STEP, 16, 1024), rows + k * SIDE * STEP,
               wgmma_descriptor(b_base + k * STEP, 16, 1024));
    wgmma_commit();
    wgmma_wait<0>();
    settle(s);
  }
  store_d(d, s);
}

extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_e4m3(const char* a, const char* b, const float* c, float* d, int steps) {
  run(a, b, c, d, steps, [](auto& s, unsigned long long a, const char*, unsigned long long b) { wgmma_e4m3_ss(s, a, b, 1); });
}

extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_e4m3_registers(const char* a, const char* b, const float* c, float* d, int steps) {
  unsigned r[4];
  run(a, b, c, d, steps, [&](auto& s, unsigned long long, const char* rows, unsigned long long b) {
    load_a(r, rows);
    wgmma_fence();
    wgmma_e4m3_rs(s, r, b);
    wgmma_commit();
    wgmma_wait<0>();
    settle(s);
  });
}

// 16-bit operands: float16 or bfloat16, by FL_DTYPE.
extern "C" __global__ void __launch_bounds__(WARPGROUP)
wgmma_16(const char* a, const char* b, const float* c, float* d, int steps) {
  run(a, b, c, d, steps, [](auto& s, unsigned long long a, const char*, unsigned long long b) { wgmma_ss(s, a, b, 1); });
}

extern "C" __global__ void __launch_bounds__(WARPGROUP)
mma_16(const char* a, const char* b, const float* c, float* d, int steps) {
  float s[SIDE / 8][4];
  load_c(s, c);
  for (int k = 0; k < steps; ++k) {
    const long long step = (static_cast<long long>(blockIdx.x) * steps + k) * SIDE * STEP;
    unsigned r[4];
    load_a(r, a + step);
#pragma unroll
    for (int n = 0; n < SIDE / 8; ++n) {
      const char* column = b + step + (8 * n + lane_id() / 4) * STEP + lane_id() % 4 * 4;
      mma_16x8x16(s[n], r, load_global<unsigned>(column), load_global<unsigned>(column + 16));
    }
  }
  store_d(d, s);
}
