// Kernels as a learner writes them: plain loads and stores, static and dynamic shared memory, templates, constants.
#include <cuda_fp16.h>

__global__ void add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

__global__ void scale4(const float4* x, float4* y, float factor, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float4 v = x[i];
    v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
    y[i] = v;
  }
}

// Every `stride`th element.
__global__ void strided(const float* x, float* y, int stride) {
  y[threadIdx.x] = x[threadIdx.x * stride];
}

template <int PAD>
__global__ void transpose(const float* __restrict__ in, float* __restrict__ out, int rows, int columns) {
  __shared__ float tile[32][32 + PAD];
  int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  for (int i = 0; i < 32; i += 8)
    if (row + i < rows && column < columns) tile[threadIdx.y + i][threadIdx.x] = in[(row + i) * columns + column];
  __syncthreads();
  column = blockIdx.y * 32 + threadIdx.x, row = blockIdx.x * 32 + threadIdx.y;
  for (int i = 0; i < 32; i += 8)
    if (row + i < columns && column < rows) out[(row + i) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
}

constexpr int T = 16;

template <class Value>
__device__ __forceinline__ Value inside(const Value* x, int row, int column, int rows, int columns) {
  return row < rows && column < columns ? x[row * columns + column] : Value(0.f);
}

template <class Value>
__global__ void __launch_bounds__(T * T) matmul(const Value* a, const Value* b, float* c, int m, int n, int k) {
  __shared__ Value as[T][T], bs[T][T];
  const int row = blockIdx.y * T + threadIdx.y, column = blockIdx.x * T + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < k; first += T) {
    as[threadIdx.y][threadIdx.x] = inside(a, row, first + threadIdx.x, m, k);
    bs[threadIdx.y][threadIdx.x] = inside(b, first + threadIdx.y, column, k, n);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < T; ++i) sum += static_cast<float>(as[threadIdx.y][i]) * static_cast<float>(bs[i][threadIdx.x]);
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = sum;
}

// Rows of x times a vector, two halves at a time, in half arithmetic.
__global__ void dot2(const __half2* x, const __half2* v, __half* out, int pairs) {
  __half2 sum = __float2half2_rn(0.f);
  for (int i = threadIdx.x; i < pairs; i += 32) sum = __hfma2(x[blockIdx.x * pairs + i], v[i], sum);
  for (int step = 16; step > 0; step /= 2) sum = __hadd2(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  if (threadIdx.x == 0) out[blockIdx.x] = __hadd(__low2half(sum), __high2half(sum));
}

#define RADIUS 3
__constant__ float weights[2 * RADIUS + 1] = {0.5f, 1.f, 2.f, 4.f, 2.f, 1.f, 0.5f};

__global__ void stencil(const float* x, float* y, int n) {
  extern __shared__ float line[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, at = threadIdx.x + RADIUS;
  line[at] = i < n ? x[i] : 0.f;
  if (threadIdx.x < RADIUS) {
    line[at - RADIUS] = i >= RADIUS && i - RADIUS < n ? x[i - RADIUS] : 0.f;
    line[at + blockDim.x] = i + static_cast<int>(blockDim.x) < n ? x[i + blockDim.x] : 0.f;
  }
  __syncthreads();
  if (i >= n) return;
  float sum = 0;
  for (int j = -RADIUS; j <= RADIUS; ++j) sum += weights[j + RADIUS] * line[at + j];
  y[i] = sum;
}

struct Point {
  float x, y, z;
};
struct Affine {
  Point scale, shift;
};

// Structs in memory and by value, in a grid of two dimensions.
__global__ void affine(const Point* in, Point* out, Affine map, int2 extent) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= extent.x || y >= extent.y) return;
  const Point p = in[y * extent.x + x];
  out[y * extent.x + x] = Point{p.x * map.scale.x + map.shift.x, p.y * map.scale.y + map.shift.y, p.z * map.scale.z + map.shift.z};
}

// Backwards, by blocks, through dynamic shared memory whose type is a parameter.
template <class T>
__global__ void reversed(const T* x, T* y) {
  extern __shared__ __align__(16) unsigned char raw[];
  T* shared = reinterpret_cast<T*>(raw);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = shared[blockDim.x - 1 - threadIdx.x];
}
