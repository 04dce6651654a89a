// y[i] = 2 x[i], i = 0 … n − 1, four floats at a time. The grid has enough threads for ⌈n / 4⌉.
__global__ void twice(const float* x, float* y, int n) {
  const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);  // this thread's first element
  if (i + 3 < n) {
    // four elements by one load and one store
    const float4 v = *reinterpret_cast<const float4*>(x + i);  // solution
    *reinterpret_cast<float4*>(y + i) = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);  // solution
  } else {
    // at the end there may be one, two or three
    for (int j = i; j < n; ++j) y[j] = 2 * x[j];  // solution
  }
}
