// out[i] = a x[i] + y[i] for i = 0 … n − 1. The grid has enough blocks for n threads, rounded up to whole blocks.
__global__ void axpy(const float* x, const float* y, float* out, float a, int n) {
  // the number of this thread in the whole grid
  const int i = blockIdx.x * blockDim.x + threadIdx.x;  // solution
  // the last block may reach past the end
  if (i < n)  // solution
    out[i] = a * x[i] + y[i];  // solution
}
