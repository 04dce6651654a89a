// Copies in the background, warps with roles of their own, tensor cores.
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

constexpr int TILE = 128;

// Two buffers: while one is worked on, the next tile is on its way.
__global__ void twice(const float* x, float* y, int tiles) {
  __shared__ __align__(16) float buffer[2][TILE];
  const int t = threadIdx.x;
  auto fetch = [&](int tile) {
    if (tile < tiles) __pipeline_memcpy_async(&buffer[tile % 2][4 * t], x + tile * TILE + 4 * t, 16);
    __pipeline_commit();
  };
  fetch(0);
  for (int tile = 0; tile < tiles; ++tile) {
    fetch(tile + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int i = t; i < TILE; i += blockDim.x) y[tile * TILE + i] = 2 * buffer[tile % 2][TILE - 1 - i];
    __syncthreads();
  }
}

// 4 and 8 bytes, and zeros in place of what lies past the end.
__global__ void narrow(const float* x, float* y, int n) {
  __shared__ __align__(8) float fours[32], eights[64];
  const int t = threadIdx.x;
  __pipeline_memcpy_async(&fours[t], x + t, 4, t < n ? 0 : 4);
  __pipeline_memcpy_async(&eights[2 * t], x + 2 * t, 8, 2 * t + 2 <= n ? 0 : 2 * t + 1 == n ? 4 : 8);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  y[t] = fours[31 - t];
  y[32 + t] = eights[63 - t];
  y[64 + t] = eights[31 - t];
}

// A lock that threads of several blocks take in turns.
__global__ void locked(int* lock, int* value) {
  for (bool done = false; !done;) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      atomicAdd(value, 2);
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
