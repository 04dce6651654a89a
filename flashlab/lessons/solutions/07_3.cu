// y = A x: A (rows, cols), x (cols). One warp for four rows, one warp a block.
__global__ void four_rows(const float* a, const float* x, float* y, int rows, int cols) {
  const int lane = threadIdx.x, first = 4 * blockIdx.x;  // rows first … first + 3, as far as there are any
  float sum[4] = {0, 0, 0, 0};
  for (int c = lane; c < cols; c += 32) {
    // an element of x serves all four rows
    const float mine = x[c];  // solution
    for (int r = 0; r < 4; ++r)  // solution
      if (first + r < rows) sum[r] += a[(first + r) * cols + c] * mine;  // solution
  }
  for (int r = 0; r < 4; ++r)
    for (int mask = 16; mask > 0; mask /= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], mask);
  if (lane < 4 && first + lane < rows) y[first + lane] = lane == 0 ? sum[0] : lane == 1 ? sum[1] : lane == 2 ? sum[2] : sum[3];
}
