// CUB's primitives, as kernels have them.
#include <cub/cub.cuh>

constexpr int THREADS = 96, ITEMS = 3;

__global__ void reductions(const float* x, float* y, int valid) {
  using Reduce = cub::BlockReduce<float, THREADS>;
  __shared__ union { typename Reduce::TempStorage reduce; float other; } temp;
  __shared__ typename cub::WarpReduce<float>::TempStorage of_warps[THREADS / 32];
  const float v = x[threadIdx.x];
  float sum = Reduce(temp.reduce).Sum(v);
  __syncthreads();
  float most = Reduce(temp.reduce).Reduce(v, cub::Max(), valid);
  __syncthreads();
  float least = Reduce(temp.reduce).Reduce(v, [](float a, float b) { return a < b ? a : b; });
  float warp = cub::WarpReduce<float>(of_warps[threadIdx.x / 32]).Sum(v);
  if (threadIdx.x == 0) y[0] = sum, y[1] = most, y[2] = least;
  if (threadIdx.x % 32 == 0) y[3 + threadIdx.x / 32] = warp;
}

__global__ void scans(const int* x, int* y) {
  using Load = cub::BlockLoad<int, THREADS, ITEMS>;
  using Store = cub::BlockStore<int, THREADS, ITEMS>;
  using Scan = cub::BlockScan<int, THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Load::TempStorage load;
  __shared__ typename Scan::TempStorage scan;
  int v[ITEMS], w[ITEMS], total, one;
  Load(load).Load(x, v, THREADS * ITEMS - 5, 0);
  Scan(scan).InclusiveSum(v, w);
  Store().Store(y, w);
  __syncthreads();
  Scan(scan).ExclusiveSum(v, w, total);
  Store().Store(y + THREADS * ITEMS, w);
  __syncthreads();
  Scan(scan).ExclusiveSum(v[0], one, total);
  y[2 * THREADS * ITEMS + threadIdx.x] = one;
  __syncthreads();
  Scan(scan).ExclusiveScan(v[0], one, -100, cub::Max());
  y[2 * THREADS * ITEMS + THREADS + threadIdx.x] = one;
  cub::WarpScan<int>::TempStorage nothing;
  cub::WarpScan<int>(nothing).ExclusiveSum(v[0], one);
  y[2 * THREADS * ITEMS + 2 * THREADS + threadIdx.x] = one;
}

__global__ void sorts(const float* x, float* keys, int* values, int descending) {
  using Sort = cub::BlockRadixSort<float, THREADS, ITEMS, int>;
  __shared__ typename Sort::TempStorage temp;
  float k[ITEMS];
  int v[ITEMS];
  for (int i = 0; i < ITEMS; ++i) k[i] = x[threadIdx.x * ITEMS + i], v[i] = threadIdx.x * ITEMS + i;
  if (descending) Sort(temp).SortDescending(k, v);
  else Sort(temp).Sort(k, v);
  for (int i = 0; i < ITEMS; ++i) keys[threadIdx.x * ITEMS + i] = k[i], values[threadIdx.x * ITEMS + i] = v[i];
}
