// The sums of dQ in float32, in tiles of BR rows that lie as the accumulators of dQ do: for every 8 columns a float4 of each lane. An
// instruction of a warp then adds to 512 bytes in a row, and not to 16 pieces of 32 bytes: a quarter of the load-store unit's time,
// and no shuffles. The launch before the main one sets them to 0, and the launch behind it puts dQ into rows. A block of these has
// the rows of one tile. Below them: a row of dK or dV that stays in float32.
#pragma once

#include "backward_rows.cuh"
#include "mma.cuh"

#ifndef PARTIAL
#define PARTIAL 0  // are dK and dV left unrounded, in float32?
#endif

// A tile's number among those of all heads. `head` counts over all batches, and `first` is the number of its sequence's first tile.
DEVICE int sum_tile_of(const Shape& shape, int head, int i, int first = 0) { return head * row_tiles_of(shape) + first + i; }

DEVICE int sum_tile_of(const Shape& shape, const Rows& rows) {
  if constexpr (RAGGED) return blockIdx.x;  // a block has a place
  return sum_tile_of(shape, rows.batch * shape.heads + rows.head, rows.first / BR);
}

// A block's rows, of a sequence if there are any. None are in an empty place.
DEVICE Rows rows_of_tile(const Shape& shape, const int* offsets_q) {
  if constexpr (!RAGGED) return rows_of<BR>(shape);
  const int places = row_tiles_of(shape), place = blockIdx.x % places, head = blockIdx.x / places;
  const Sequence own = sequence_at(shape, offsets_q, place);
  const int first = own.first + own.before(place);
  return {0, head, first, min(first + BR, own.end)};
}

// 16 rows of a tile, from `row` on. Where a tile begins is the same for all lanes. The rest fits into 32 bits, which takes a register
// less, and the compiler puts the sum beside products, not before them.
template <int COLUMNS>
struct SumTile {
  float4* begin;
  unsigned own;

  DEVICE SumTile(float* sums, int tile, int row)
      : begin(reinterpret_cast<float4*>(sums + static_cast<long long>(tile) * (BR * COLUMNS))), own(row * (COLUMNS / 4) + lane_id()) {}

  DEVICE float4* part(int fragment) const { return begin + (own + fragment * 32); }
};

template <int COLUMNS>
DEVICE void clear_sums(float* dq_sum, const Shape& shape, const Rows& rows) {
  const SumTile<COLUMNS> sums(dq_sum, sum_tile_of(shape, rows), 0);
  for (int i = threadIdx.x; i < BR * COLUMNS / 4; i += DELTA_THREADS) store_global(sums.begin + i, make_float4(0, 0, 0, 0));
}

// dQ from its sums, rounded to the storage dtype.
template <int COLUMNS>
DEVICE void convert_sums(float* dq_sum, const Tensor& dq, const Shape& shape, const Rows& rows) {
  const int end = RAGGED ? rows.end : shape.len_q;
#pragma unroll 1
  for (int first = rows.first + warp_id() * 16; first < rows.first + BR; first += DELTA_THREADS / 32 * 16) {
    float sum[COLUMNS / 8][4];
    const SumTile<COLUMNS> sums(dq_sum, sum_tile_of(shape, rows), first - rows.first);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      const float4 part = load_global<float4>(sums.part(n));
      sum[n][0] = part.x, sum[n][1] = part.y, sum[n][2] = part.z, sum[n][3] = part.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half + lane_id() / 4, bytes = row < end ? padded_row_bytes(shape) : 0;
      store_row(row_address(dq, rows.batch, rows.head, row), sum, half, of_kept(shape.scale, shape.kept), bytes);
    }
  }
}

// A row of 8 N columns in HBM, float32, from accumulators times `factor`: row g in even lanes, row g + 8 in odd ones. Writes the
// columns before `columns`. (The factor spares registers: ptxas would move the accumulators to store them as they are.)
template <int N>
DEVICE void store_float_row(char* row, const float (&c)[N][4], float factor, int columns) {
  const int own = opaque(lane_id()) % 4 / 2 * 4;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float four[4] = {c[n][0] * factor, c[n][1] * factor, c[n][2] * factor, c[n][3] * factor};
    const float4 x = four_columns(four);
    if (8 * n + own < columns) store_global(row + (8 * n + own) * 4, x);
  }
}
