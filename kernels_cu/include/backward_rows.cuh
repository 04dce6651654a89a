// The first and the last launch of a backward pass whose main launch adds dQ up by atomics: a thread block per 16 rows of queries.
#pragma once

#include "elements.cuh"
#include "warp.cuh"
#include "params.cuh"

constexpr int DELTA_ROWS = 16, DELTA_THREADS = 128;

// The row tile of a block.
struct Rows { int batch, head, first, end; };

DEVICE Rows rows_of(const Shape& shape) {
  const int row_tiles = ceil_div(shape.len_q, DELTA_ROWS), flat_head = blockIdx.x / row_tiles;
  const int first = blockIdx.x % row_tiles * DELTA_ROWS;
  return {flat_head / shape.heads, flat_head % shape.heads, first, min(first + DELTA_ROWS, shape.len_q)};
}

// D = rowsum(dO · O).
DEVICE void delta_of_rows(const Tensor& out, const Tensor& dout, float* delta, const Shape& shape) {
  const auto [batch, head, first_row, end_row] = rows_of(shape);
  constexpr int LANES = lanes_for(HEAD_DIM / CHUNK_ELEMENTS);  // that share a row
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int r = 0; r < DELTA_ROWS; r += DELTA_THREADS / LANES) {
    const int row = first_row + r + threadIdx.x / LANES;
    const bool inside = r + threadIdx.x / LANES < DELTA_ROWS && row < end_row;
    float sum = 0;
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += LANES * CHUNK_ELEMENTS) {
      const int own = column + lane * CHUNK_ELEMENTS;
      lanes_meet();
      if (inside && own < shape.head_dim) {
        const uint4 a = load_global<uint4>(row_address(dout, batch, head, row) + own * ELEMENT_BYTES);
        const uint4 b = load_global<uint4>(row_address(out, batch, head, row) + own * ELEMENT_BYTES);
        sum += dot(a, b, shape.head_dim - own);
      }
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (inside && lane == 0)
      store_global(delta + (static_cast<long long>(batch) * shape.heads + head) * shape.len_q + row, sum);
  }
}

// dQ = 0 in float32, to which the main launch adds.
DEVICE void zero_rows(const Tensor& dq_sum, const Shape& shape) {
  const auto [batch, head, first_row, end_row] = rows_of(shape);
  constexpr int LANES = lanes_for(HEAD_DIM / 4);
  for (int row = first_row + threadIdx.x / LANES; row < end_row; row += DELTA_THREADS / LANES)
    for (int column = threadIdx.x % LANES * 4; column < shape.head_dim; column += LANES * 4)
      store_global(row_address(dq_sum, batch, head, row) + column * 4, make_float4(0, 0, 0, 0));
}

// dQ is the sum times the scale, rounded to the storage dtype.
DEVICE void convert_rows(const Tensor& dq_sum, const Tensor& dq, const Shape& shape) {
  const auto [batch, head, first_row, end_row] = rows_of(shape);
  constexpr int LANES = lanes_for(HEAD_DIM / 4);
  const int columns = round_up(shape.head_dim, CHUNK_ELEMENTS);  // padding, which is written as well
  for (int row = first_row + threadIdx.x / LANES; row < end_row; row += DELTA_THREADS / LANES)
    for (int column = threadIdx.x % LANES * 4; column < columns; column += LANES * 4) {
      float4 x = make_float4(0, 0, 0, 0);
      if (column < shape.head_dim) x = load_global<float4>(row_address(dq_sum, batch, head, row) + column * 4);
      const float4 scaled = make_float4(x.x * shape.scale, x.y * shape.scale, x.z * shape.scale, x.w * shape.scale);
      store_elements(row_address(dq, batch, head, row) + column * ELEMENT_BYTES, scaled);
    }
}
