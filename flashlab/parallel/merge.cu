// A partial output joins another one of the same queries, each weighed by its LSE.
//
//   own (batch, heads, rows, columns) in the storage dtype, or float32 with OWN_FLOAT; rows may lie apart. It is written in place.
//   part (batch, heads, rows, columns) in the storage dtype, part_lse (batch, heads, rows) float32, both contiguous
//   own_lse (batch, heads, rows), whose heads may lie apart; lse like part_lse: that of both, natural logarithm
//
// A thread has 8 columns of a row, so columns are a multiple of 8. Strides count elements. A row that neither part has keys for is 0.
#include "memory.cuh"

constexpr int COLUMNS = 8;

DEVICE void read(float (&x)[COLUMNS], const void* address, bool wide) {
  if (wide) {
    const float4 low = load_global<float4>(address), high = load_global<float4>(static_cast<const float*>(address) + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    return;
  }
  const uint4 packed = load_global<uint4>(address);
  const float2 pairs[] = {unpack(packed.x), unpack(packed.y), unpack(packed.z), unpack(packed.w)};
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) x[2 * i] = pairs[i].x, x[2 * i + 1] = pairs[i].y;
}

extern "C" __global__ void merge(char* own, const char* part, const float* own_lse, const float* part_lse, float* lse,
                                 long long own_batch, long long own_head, long long own_row, long long lse_batch, long long lse_head,
                                 int heads, int rows, int columns, long long all_rows) {
  constexpr int OWN_BYTES = OWN_FLOAT ? 4 : ELEMENT_BYTES;
  const int chunks = columns / COLUMNS;
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= all_rows * chunks) return;
  const long long at = i / chunks, head = at / rows;
  const int column = static_cast<int>(i % chunks) * COLUMNS, row = static_cast<int>(at % rows);
  const long long batch = head / heads, own_number = head % heads;

  const float a = load_global<float>(own_lse + batch * lse_batch + own_number * lse_head + row);
  const float b = load_global<float>(part_lse + at);
  const float top = fmaxf(a, b), base = top == -INF ? 0 : top;
  const float u = exp2_approx((a - base) * LOG2E), w = exp2_approx((b - base) * LOG2E), sum = u + w;
  const float inverse = sum == 0 ? 0 : 1 / sum;
  if (column == 0) store_global(lse + at, base + log2_approx(sum) * LN2);

  char* const to = own + (batch * own_batch + own_number * own_head + row * own_row + column) * OWN_BYTES;
  float x[COLUMNS], y[COLUMNS];
  read(x, to, OWN_FLOAT);
  read(y, part + (at * columns + column) * ELEMENT_BYTES, false);
#pragma unroll
  for (int n = 0; n < COLUMNS; ++n) x[n] = x[n] * (u * inverse) + y[n] * (w * inverse);
#if OWN_FLOAT
  store_global(to, make_float4(x[0], x[1], x[2], x[3]));
  store_global(to + 16, make_float4(x[4], x[5], x[6], x[7]));
#else
  store_global(to, make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])));
#endif
}
