// cuda::atomic, cuda::barrier and cuda::pipeline, as kernels have them.
#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/std/limits>
#include <cuda/std/type_traits>

namespace cg = cooperative_groups;

__global__ void atomics(int* sums, float* most, const float* x) {
  __shared__ cuda::atomic<int, cuda::thread_scope_block> inside;
  if (threadIdx.x == 0) inside.store(0, cuda::memory_order_relaxed);
  __syncthreads();
  inside.fetch_add(threadIdx.x, cuda::memory_order_relaxed);
  __syncthreads();
  cuda::atomic_ref<int, cuda::thread_scope_device> total(sums[0]);
  if (threadIdx.x == 0) total += inside.load();
  cuda::atomic_ref<float, cuda::thread_scope_device>(*most).fetch_max(x[blockIdx.x * blockDim.x + threadIdx.x]);
  cuda::atomic_ref<int> one(sums[1]);
  int expected = 0;
  if (one.compare_exchange_strong(expected, 7)) sums[2] = cuda::std::numeric_limits<int>::max();
}

// y = x in reverse, tile by tile; each tile is copied while the one before is read.
template <int STAGES>
__global__ void pipelined(const float* x, float* y, int tiles) {
  __shared__ __align__(16) float s[STAGES][128];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
  auto block = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  for (int tile = 0, next = 0; tile < tiles; ++tile) {
    for (; next < tiles && next < tile + STAGES; ++next) {
      pipe.producer_acquire();
      cuda::memcpy_async(block, s[next % STAGES], x + 128 * next, cuda::aligned_size_t<16>(128 * 4), pipe);
      pipe.producer_commit();
    }
    pipe.consumer_wait();
    for (int i = threadIdx.x; i < 128; i += blockDim.x) y[128 * tile + i] = s[tile % STAGES][127 - i];
    pipe.consumer_release();
  }
}

__global__ void alone(const float4* x, float4* y) {
  __shared__ float4 s[2][64];
  auto pipe = cuda::make_pipeline();
  for (int i = 0; i < 2; ++i) {
    pipe.producer_acquire();
    cuda::memcpy_async(&s[i][threadIdx.x], &x[64 * i + threadIdx.x], sizeof(float4), pipe);
    pipe.producer_commit();
  }
  cuda::pipeline_consumer_wait_prior<1>(pipe);
  y[threadIdx.x] = s[0][threadIdx.x];
  pipe.consumer_release();
  pipe.consumer_wait();
  y[64 + threadIdx.x] = s[1][threadIdx.x];
  pipe.consumer_release();
}

__global__ void barriers(const int* x, int* y) {
  using barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ __align__(16) int s[256], t[64];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ barrier bar, copied;
  if (threadIdx.x == 0) {
    init(&bar, blockDim.x);
    init(&copied, blockDim.x);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  barrier::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::device::memcpy_async_tx(s, x, cuda::aligned_size_t<16>(sizeof s), bar);
    token = cuda::device::barrier_arrive_tx(bar, 1, sizeof s);
  } else {
    token = bar.arrive();
  }
  bar.wait(std::move(token));
  cuda::memcpy_async(cg::this_thread_block(), t, x, sizeof t, copied);
  copied.arrive_and_wait();
  y[threadIdx.x] = s[255 - threadIdx.x] + t[63 - threadIdx.x];
  copied.arrive_and_wait();
}
