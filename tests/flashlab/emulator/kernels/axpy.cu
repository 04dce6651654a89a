// y = a · x + y, four elements a thread; n a multiple of 4.
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (4 * i >= n) return;

  // step: load
  const float4 left = reinterpret_cast<const float4*>(x)[i];
  float4 right = reinterpret_cast<const float4*>(y)[i];

  // step: store
  right.x += a * left.x, right.y += a * left.y, right.z += a * left.z, right.w += a * left.w;
  reinterpret_cast<float4*>(y)[i] = right;
}
