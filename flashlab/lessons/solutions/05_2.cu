// sums[row] = the sum of row `row` of x, (rows, cols). One block of 128 threads for each row.
__global__ void row_sum(const float* x, float* sums, int cols) {
  __shared__ float part[128];
  const int t = threadIdx.x;
  float mine = 0;
  for (int c = t; c < cols; c += 128) mine += x[blockIdx.x * cols + c];
  part[t] = mine;
  __syncthreads();  // solution
  for (int half = 64; half > 0; half /= 2) {  // 128 parts become 64, then 32, …, then 1
    if (t < half) part[t] += part[t + half];
    __syncthreads();  // solution
  }
  if (t == 0) sums[blockIdx.x] = part[0];
}
