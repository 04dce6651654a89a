// Threads that work together: trees, shuffles, scans, histograms.

__global__ void sum_by_tree(const float* x, float* out, int n) {
  extern __shared__ float part[];
  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  part[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) atomicAdd(out, part[0]);
}

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step >>= 1) x += __shfl_down_sync(0xffffffffu, x, step);
  return x;
}

__device__ float block_sum(float x) {
  __shared__ float warps[32];
  const int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
  x = warp_sum(x);
  __syncthreads();  // whoever still reads the last sum
  if (lane == 0) warps[warp] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x / warpSize) ? warps[lane] : 0.f;
  return __shfl_sync(0xffffffffu, warp_sum(x), 0);
}

__global__ void sum_by_shuffles(const float* x, float* out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = sum;
}

__global__ void softmax(const float* x, float* y, int n) {
  __shared__ float greatest;
  x += blockIdx.x * n, y += blockIdx.x * n;
  float most = -INFINITY;
  for (int i = threadIdx.x; i < n; i += blockDim.x) most = fmaxf(most, x[i]);
  __shared__ float all[256];
  all[threadIdx.x] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < static_cast<int>(blockDim.x); ++i) most = fmaxf(most, all[i]);
    greatest = most;
  }
  __syncthreads();
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[i] - greatest);
  sum = block_sum(sum);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i] - greatest) / sum;
}

__global__ void histogram(const unsigned char* x, unsigned* counts, int n) {
  __shared__ unsigned mine[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x)
    if (mine[i]) atomicAdd(&counts[i], mine[i]);
}

// Inclusive, one block (Hillis and Steele), two buffers.
__global__ void scan(const int* x, int* y, int n) {
  extern __shared__ int buffer[];
  int *from = buffer, *to = buffer + blockDim.x;
  const int t = threadIdx.x;
  from[t] = t < n ? x[t] : 0;
  __syncthreads();
  for (int step = 1; step < static_cast<int>(blockDim.x); step *= 2) {
    to[t] = t >= step ? from[t] + from[t - step] : from[t];
    __syncthreads();
    int* last = from;
    from = to, to = last;
  }
  if (t < n) y[t] = from[t];
}

__device__ unsigned arrived = 0;

// The block that comes last adds up what the others left; fences and an atomic order it.
__global__ void count_up(unsigned* tickets, unsigned* total) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    tickets[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    if (last) *total = 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) atomicAdd(total, gridDim.x);
}

// What a warp's threads vote, match and reduce.
__global__ void votes(const int* x, unsigned* out) {
  const int lane = threadIdx.x, v = x[lane];
  const unsigned all = 0xffffffffu;
  out[lane] = __ballot_sync(all, v > 0);
  out[32 + lane] = __match_any_sync(all, v);
  out[64 + lane] = __any_sync(all, v > 2) | __all_sync(all, v > -4) << 1;
  out[96 + lane] = static_cast<unsigned>(__reduce_add_sync(all, v));
  out[128 + lane] = static_cast<unsigned>(__reduce_max_sync(all, v));
  out[160 + lane] = __shfl_up_sync(all, static_cast<unsigned>(v), 3, 8);
  out[192 + lane] = static_cast<unsigned>(__popc(__activemask()));
  out[224 + lane] = static_cast<unsigned>(__syncthreads_count(v > 0));
}
