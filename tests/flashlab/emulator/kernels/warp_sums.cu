// y[i] = the sum of the 32 values of x around i, less x's mirror image in that group: a warp's lanes exchange words, once
// by shuffles and once through SRAM. Blocks of 64 threads.
extern "C" __global__ void warp_sums(const float* x, float* y) {
  __shared__ float words[64];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  const float mine = x[i];

  // step: sum
  float sum = mine;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);

  // step: mirror
  words[threadIdx.x] = mine;
  __syncwarp();
  const float mirrored = words[threadIdx.x - lane + 31 - lane];

  // step: store
  y[i] = sum - mirrored;
}
