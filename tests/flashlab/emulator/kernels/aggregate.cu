// count += how many of x[0..n) are positive, n a multiple of 32: one atomic a warp, by the first lane that has something.
extern "C" __global__ void aggregate(const float* x, int* count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  // step: count
  if (x[i] > 0) {
    const unsigned together = __activemask();
    if (threadIdx.x % 32 == __ffs(together) - 1) atomicAdd(count, __popc(together));
  }
}
