#define FL_DTYPE 1  // float16
#include <cuda_fp16.h>

#include "mma.cuh"

// s = q kᵀ with tensor cores. q (len_q, 64), k (len_kv, 64) in float16, s (len_q, len_kv) in float32; both lengths at most 16.
// One warp, one tile.
__global__ void fragments(const __half* q, const __half* k, float* s, int len_q, int len_kv) {
  using T = Tile<16, 64>;  // rows past the end become zeros
  __shared__ __align__(128) unsigned char sram[2 * T::BYTES];
  const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(sram));
  const T q_tile{base}, k_tile{base + T::BYTES};
  load_tile<32>(q_tile, reinterpret_cast<const char*>(q), T::ROW_BYTES, len_q, T::ROW_BYTES);
  load_tile<32>(k_tile, reinterpret_cast<const char*>(k), T::ROW_BYTES, len_kv, T::ROW_BYTES);
  copy_commit();
  copy_wait<0>();
  barrier();

  float c[2][4] = {};  // columns 0 to 7, and 8 to 15: four numbers of each are this lane's
  for (int d = 0; d < 64; d += K_STEP) {
    const FragmentA a = load_a(q_tile, 0, d);
    // 16 rows of K from column d on, and the product
    const FragmentB b = load_b_rows(k_tile, 0, d);  // solution
    mma(c[0], c[1], a, b);  // solution
  }

  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) {
      int row = 0, column = 0;
      // which element of S is c[n][e]?
      row = g + e / 2 * 8;  // solution
      column = 8 * n + 2 * t + e % 2;  // solution
      if (row < len_q && column < len_kv) s[row * len_kv + column] = c[n][e];
    }
}
