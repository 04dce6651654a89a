// The toy of test_operations.py: z = x + y and total = count * rowsum(z), then out = gain * z. float32, a lane per row.
#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

// Copies or combines a row in chunks of 16 bytes, all but the last lanes' rows switched off.
struct Row {
  const float* at;
  DEVICE float4 chunk(int c) const { return load_global<float4>(at + 4 * c); }
};

DEVICE float* row_of(const Tensor& t, int batch, int head, int row) {
  return reinterpret_cast<float*>(row_address(t, batch, head, row));
}

extern "C" __global__ void toy_add(const Tensor x, const Tensor y, const int* count, const Tensor z, float* total, const Shape shape) {
  const int tiles = ceil_div(shape.len_q, BR), flat = blockIdx.x / tiles, row = blockIdx.x % tiles * BR + threadIdx.x;
  const int batch = flat / shape.heads, head = flat % shape.heads, chunks = round_up(shape.head_dim, 4) / 4;
  if (row >= shape.len_q) return;
  float sum = 0;
  const Row a{row_of(x, batch, head, row)}, b{row_of(y, batch, head, row)};
  float* to = row_of(z, batch, head, row);
  for (int c = 0; c < chunks; ++c) {
    // step: add
    float4 v = a.chunk(c), w = b.chunk(c);
    v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
    for (int e = 0; e < 4; ++e)
      if (4 * c + e < shape.head_dim) sum += (&v.x)[e];
    // step: store_z
    store_global(to + 4 * c, v);
  }
  // step: total
  const long long place = static_cast<long long>(flat) * shape.len_q + row;
  store_global(total + place, sum * static_cast<float>(load_global<int>(count + place)));
}

extern "C" __global__ void toy_scale(const Tensor z, const float* gain, const Tensor out, const Shape shape) {
  const int tiles = ceil_div(shape.len_q, BR), flat = blockIdx.x / tiles, row = blockIdx.x % tiles * BR + threadIdx.x;
  const int batch = flat / shape.heads, head = flat % shape.heads, chunks = round_up(shape.head_dim, 4) / 4;
  if (row >= shape.len_q) return;
  // step: scale
  const float by = load_global<float>(gain + static_cast<long long>(flat) * shape.len_q + row);
  const Row from{row_of(z, batch, head, row)};
  float* to = row_of(out, batch, head, row);
  for (int c = 0; c < chunks; ++c) {
    // step: scale
    float4 v = from.chunk(c);
    v.x *= by, v.y *= by, v.z *= by, v.w *= by;
    // step: store
    store_global(to + 4 * c, v);
  }
}
