// The first launch of a backward pass whose main launch adds dQ up by atomics. A block has ROWS rows of queries. Here is also the
// last launch of a problem with sinks.
#pragma once

#include "elements.cuh"
#include "warp.cuh"
#include "params.cuh"
#include "scores.cuh"
#include "sequences.cuh"

constexpr int DELTA_THREADS = 128;

// The rows of a block.
struct Rows { int batch, head, first, end; };

template <int ROWS>
DEVICE Rows rows_of(const Shape& shape) {
  const int row_tiles = ceil_div(shape.len_q, ROWS), flat_head = blockIdx.x / row_tiles;
  const int first = blockIdx.x % row_tiles * ROWS;
  return {flat_head / shape.heads, flat_head % shape.heads, first, min(first + ROWS, shape.len_q)};
}

// D = rowsum(dO · O), less the gradient of the LSE.
template <int ROWS>
DEVICE void delta_of_rows(const Tensor& out, const Tensor& dout, const float* dlse, float* delta, const Shape& shape,
                          const Rows& rows) {
  const auto [batch, head, first_row, end_row] = rows;
  constexpr int LANES = lanes_for(HEAD_DIM / CHUNK_ELEMENTS);  // that share a row
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int r = 0; r < ROWS; r += DELTA_THREADS / LANES) {
    const int row = first_row + r + threadIdx.x / LANES;
    const bool inside = r + threadIdx.x / LANES < ROWS && row < end_row;
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
    if (inside && lane == 0) {
      const long long place = (static_cast<long long>(batch) * shape.heads + head) * shape.len_q + row;
      store_global(delta + place, less_dlse(sum, dlse, place));
    }
  }
}

// dsink = -sum of exp(sink - LSE) D over the rows of a head: a sink is a key whose value is 0. A warp has a head. In a ragged batch
// it has a head of a sequence: (sequences, heads) then stand for batches and heads.
DEVICE void sink_gradient(const float* sinks, const float* lse, const float* delta, float* dsinks, const int* offsets_q,
                          const Shape& shape) {
  constexpr int EACH = 8;  // loads of a lane that are on their way together
  const int head = blockIdx.x % shape.heads, batch = blockIdx.x / shape.heads;
  const int begin = RAGGED ? load_global<int>(offsets_q + batch) : 0;
  const int rows = RAGGED ? load_global<int>(offsets_q + batch + 1) - begin : shape.len_q;
  const long long first = static_cast<long long>(RAGGED ? head : blockIdx.x) * shape.len_q + begin;
  const float sink = rows > 0 ? of_head<SINKS>(sinks, head, -INF) : -INF;  // the compiler asks no earlier, either
  float sum = 0;
  for (int first_row = 0; first_row < rows; first_row += 32 * EACH) {
    const int row = first_row + lane_id();
    float logs[EACH], deltas[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const bool inside = row + 32 * e < rows;
      logs[e] = inside ? load_global<float>(lse + first + row + 32 * e) : INF;
      deltas[e] = inside ? load_global<float>(delta + first + row + 32 * e) : 0;
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) sum += exp2_approx((sink - (logs[e] == -INF ? 0 : logs[e])) * LOG2E) * deltas[e];
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) store_global(dsinks + blockIdx.x, -sum);
}
