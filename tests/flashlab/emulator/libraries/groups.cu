// Cooperative groups, as kernels have them.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

// Sums of each block: tiles of N, then the tiles' sums.
template <int N>
__device__ float block_sum(float x) {
  __shared__ float sums[1024 / N];
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<N> tile = cg::tiled_partition<N>(block);
  x = cg::reduce(tile, x, cg::plus<float>{});
  if (tile.thread_rank() == 0) sums[tile.meta_group_rank()] = x;
  cg::sync(block);
  float total = 0;
  for (int i = 0; i < tile.meta_group_size(); ++i) total += sums[i];
  block.sync();
  return total;
}
__global__ void sums(const float* x, float* y) {
  auto grid = cg::this_grid();
  float v = x[grid.thread_rank()];
  float a = block_sum<32>(v), b = block_sum<8>(v);
  if (cg::this_thread_block().thread_rank() == 0) y[2 * blockIdx.x] = a, y[2 * blockIdx.x + 1] = b;
}

struct Pair { double value; int index; int other; };

// Each result in a row of its own, for one block of (32, 2).
__global__ void lanes(const int* x, int* y) {
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  auto tile = cg::tiled_partition<4>(warp);
  cg::thread_group part = cg::tiled_partition(block, 16);
  const int t = block.thread_rank(), v = x[t];
#define ROW(i, value) y[64 * (i) + t] = value
  ROW(0, tile.shfl(v, 2));
  ROW(1, tile.shfl_down(v, 1));
  ROW(2, tile.shfl_xor(v, 3));
  ROW(3, tile.any(v > 90) + 2 * tile.all(v > 10));
  ROW(4, tile.ballot(v % 2));
  ROW(5, tile.meta_group_rank() + 100 * tile.meta_group_size());
  ROW(6, part.thread_rank() + 100 * part.size());
  ROW(7, cg::reduce(warp, v, cg::greater<int>()));
  ROW(8, cg::inclusive_scan(tile, v));
  ROW(9, cg::exclusive_scan(warp, v, cg::plus<int>()));
  Pair p = cg::reduce(warp, Pair{double(v), t, 0}, [](Pair a, Pair b) { return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a; });
  ROW(10, p.index);
  int got = -1;
  if (v % 3 == 0) {
    cg::coalesced_group active = cg::coalesced_threads();
    got = active.thread_rank() + 100 * active.size() + 10000 * (active.shfl(t, active.size() - 1) % 32);
  }
  ROW(11, got);
  auto same = cg::labeled_partition(warp, v % 3);
  ROW(12, cg::reduce(same, v, cg::plus<int>()) + 10000 * same.meta_group_size());
  ROW(13, warp.match_any(v % 3));
}

__global__ void copies(const float* x, float* y, int n) {
  extern __shared__ __align__(16) float s[];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, s, x, sizeof(float) * n);
  cg::wait(block);
  for (int i = block.thread_rank(); i < n; i += block.size()) y[i] = s[n - 1 - i];
}

// Each element becomes the sum of those around it, again and again, from one array into the other.
template <int MISTAKE>
__global__ void rounds(float* x, float* y, int n, int count) {
  const cg::grid_group grid = cg::this_grid();
  const int i = grid.thread_rank();
  for (int round = 0; round < count; ++round) {
    y[i] = x[(i + n - 1) % n] + x[(i + 1) % n];  // reads
    if (MISTAKE == 1) __syncthreads();
    else if (MISTAKE == 2) __threadfence();
    else if (MISTAKE != 3 || blockIdx.x != 1 || round == 0) grid.sync();
    float* const other = x;
    x = y, y = other;
  }
}

// The last block to come sums what all have left in SRAM and memory, in the middle of the kernel.
__global__ void middle(const float* x, float* parts, float* y) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, x[blockIdx.x * blockDim.x + threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
  cg::sync(cg::this_grid());
  float all = sum;  // a block's SRAM outlives it
  for (int i = 0; i < gridDim.x; ++i) all += parts[i];
  y[blockIdx.x * blockDim.x + threadIdx.x] = all;
}

__global__ void stuck(int* flag) {
  if (blockIdx.x == 0)
    while (atomicAdd(flag, 0) == 0) continue;
  cg::this_grid().sync();
}

// Many blocks read before the barrier. Behind it one reads and one writes.
__global__ void readers(float4* x, float* y) {
  const float4 before = x[0];
  cg::this_grid().sync();
  y[blockIdx.x] = blockIdx.x + 2 == gridDim.x ? x[0].x : before.x;
  if (blockIdx.x + 1 == gridDim.x) x[0].x = 1;  // writes
}
