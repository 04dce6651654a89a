// y = softmax of each row of x, (rows, cols), cols at most 256. One warp for each row, four warps in a block.
__global__ void row_softmax(const float* x, float* y, int rows, int cols) {
  const int lane = threadIdx.x % 32;
  const int row = 4 * blockIdx.x + threadIdx.x / 32;
  if (row >= rows) return;  // the whole warp leaves, or none of it

  float v[8];  // this lane's columns: lane, lane + 32, lane + 64, …
  float top = -INFINITY;
  for (int i = 0; i < 8; ++i) {
    const int c = lane + 32 * i;
    v[i] = c < cols ? x[row * cols + c] : -INFINITY;
    top = fmaxf(top, v[i]);
  }
  // top: the maximum over all lanes
  for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, mask));  // solution

  float sum = 0;
  // v: exponentials; sum: theirs, over all lanes
  for (int i = 0; i < 8; ++i) {  // solution
    v[i] = expf(v[i] - top);  // solution
    sum += v[i];  // solution
  }  // solution
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);  // solution

  for (int i = 0; i < 8; ++i) {
    const int c = lane + 32 * i;
    if (c < cols) y[row * cols + c] = v[i] / sum;
  }
}
