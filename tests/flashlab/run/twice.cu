// y = 2 x + n: what test_any_array.py hands arrays of every framework to.

__global__ void twice(const float* x, const unsigned char* n, float* y) {
  y[threadIdx.x] = 2 * x[threadIdx.x] + n[threadIdx.x];
}
