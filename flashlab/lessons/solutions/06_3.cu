#define FL_DTYPE 0  // float32
#include "memory.cuh"

// y[c] = the sum of column c of x, (rows, 128). One block of 128 threads; tiles of 8 rows, two places for them.
constexpr int TILE = 8, COLUMNS = 128;

__global__ void column_sums(const float* x, float* y, int rows) {
  __shared__ __align__(128) float tile[2][TILE][COLUMNS];
  const int t = threadIdx.x, tiles = (rows + TILE - 1) / TILE;

  // Begins to copy tile j into place j % 2, 16 bytes at a time; rows past the end become zeros. One group of copies.
  auto load = [&](int j) {
    for (int i = t; i < TILE * COLUMNS / 4; i += 128) {
      const int row = i / 32, column = i % 32 * 4;
      const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&tile[j % 2][row][column]));
      copy_async(to, x + (j * TILE + row) * COLUMNS + column, j * TILE + row < rows ? 16 : 0);
    }
    copy_commit();
  };

  float sum = 0;
  load(0);
  for (int j = 0; j < tiles; ++j) {
    // begin to load the next tile, if there is one; then make sure that tile j is there, for all threads
    if (j + 1 < tiles) load(j + 1); else copy_commit();  // solution
    copy_wait<1>();  // solution
    barrier();  // solution
    for (int r = 0; r < TILE; ++r) sum += tile[j % 2][r][t];
    // the next round writes into the place that was just read
    barrier();  // solution
  }
  y[t] = sum;
}
