// bins[hash(key)] += 1 for each of n keys; the number of bins is a power of two.
extern "C" __global__ void histogram(const int* keys, int* bins, int n, int bin_count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  // step: count
  if (i < n) {
    const unsigned hash = keys[i] * 2654435761u;
    const int bin = hash % bin_count;
    atomicAdd(&bins[bin], 1);
  }
}
