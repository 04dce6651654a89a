// y += the sum of x[0..n): each block sums its part in a tree, and adds it to y.
extern "C" __global__ void block_sum(const float* x, float* y, int n) {
  __shared__ float part[128];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  // step: load
  part[threadIdx.x] = i < n ? x[i] : 0;
  __syncthreads();

  // step: tree
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }

  // step: add
  if (threadIdx.x == 0) atomicAdd(y, part[0]);
}
