// Which block computes what, and in which order.
#pragma once

#include "mask.cuh"
#include "sequences.cuh"
#include "warp.cuh"

// A row tile of a head, and the key tiles that its rows see.
struct Work : SequenceRows {
  int batch, head;
  Keys tiles;
};

DEVICE Work work_of(const Shape& batches, const Offsets& offsets, int flat_head, int row_tile) {
  const SequenceRows own = row_tile_at(batches, offsets, row_tile);
  const Shape shape = own.alone(batches);
  const Keys tiles = visible_tiles(shape, own.first_row, min(own.first_row + BR, shape.len_q) - 1, BC);
  return {own, flat_head / shape.heads, flat_head % shape.heads, {uniform(tiles.first), uniform(tiles.last)}};
}

// One row tile per block: the blocks take them in their order, head after head.
DEVICE Work work_in_order(const Shape& shape) {
  const int row_tiles = ceil_div(shape.len_q, BR), block = opaque(static_cast<int>(blockIdx.x));
  return work_of(shape, {}, block / row_tiles, block % row_tiles);
}

// The row tiles of one persistent block (CUTLASS: a static tile scheduler). The block takes every gridDim-th unit. A unit is
// a row tile of a head, or with PAIRS two: one from the end of the head and one from its start.
//
// `group` heads run side by side before the next ones start (a swizzle of the heads for the L2): few enough that their K
// and V stay in the L2 while all their rows pass.
struct Agenda {
  const Shape& shape;
  Offsets offsets = {};
  int unit = blockIdx.x, half = 0;

  DEVICE bool next(Work& work) {
    const int row_tiles = row_tiles_of(shape), units = PAIRS ? ceil_div(row_tiles, 2) : row_tiles;  // of a head
    const int all_heads = shape.batch * shape.heads;
    do {
      if (unit >= units * all_heads) return false;
      const int first_head = unit / (shape.group * units) * shape.group;  // of the group
      const int heads = min(shape.group, all_heads - first_head), place = unit - first_head * units;
      const int front = place / heads, back = row_tiles - 1 - front;
      work = work_of(shape, offsets, first_head + place % heads, half ? front : back);
      half = PAIRS && half == 0 && front != back;
      if (half == 0) unit += gridDim.x;
    } while (RAGGED && work.first_row >= work.keys);  // an empty place
    return true;
  }
};
