// D = rowsum(dO * O), in float32. A block of 128 threads has four rows, one for each warp.
//   out, dout (rows, cols)   delta (rows)
__global__ void row_dots(const float* out, const float* dout, float* delta, int rows, int cols) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 4 + warp;
  if (row >= rows) return;
  // step: products
  float sum = 0;
  for (int c = lane; c < cols; c += 32) sum += dout[row * cols + c] * out[row * cols + c];  // solution
  // step: shuffles
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);  // solution
  // step: store
  if (lane == 0) delta[row] = sum;  // solution
}
