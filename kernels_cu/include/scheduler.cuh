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

// The row tile that has a number, and its head among those of all batches. The last of each head come first: under a causal mask they
// take longest. `group` heads run side by side before the next ones start (a swizzle of the heads for the L2): few enough that their K
// and V stay in the L2 while all their rows pass.
struct HeadTile { int head, row_tile; };

DEVICE HeadTile head_tile_at(const Shape& shape, int row_tiles, int number) {
  const int first_head = number / (shape.group * row_tiles) * shape.group;  // of the group
  const int heads = min(shape.group, shape.batch * shape.heads - first_head), place = number - first_head * row_tiles;
  return {first_head + place % heads, row_tiles - 1 - place / heads};
}

// The row tiles of one persistent block, by number. The block begins with its own number, and takes every gridDim-th one (CUTLASS: a
// static tile scheduler), or with DYNAMIC the next one that no block has drawn yet (a dynamic one).
struct Agenda {
  const Shape& shape;
  Offsets offsets = {};
  int number = blockIdx.x;
  unsigned drawn = 0;

  DEVICE bool next(Work& work) {
    const int row_tiles = row_tiles_of(shape), all_heads = shape.batch * shape.heads;
    do {
      if (number >= row_tiles * all_heads) return false;
      const HeadTile own = head_tile_at(shape, row_tiles, number);
      work = work_of(shape, offsets, own.head, own.row_tile);
      if constexpr (!DYNAMIC) number += gridDim.x;
    } while (RAGGED && work.first_row >= work.keys);  // an empty place
    return true;
  }

  // Draws the next number, which take() waits for. All blocks together draw once for each row tile, so the counter ends at 0,
  // where it began.
  DEVICE void draw(unsigned* counter) {
    drawn = draw_from(counter, row_tiles_of(shape) * shape.batch * shape.heads - 1);
  }
  DEVICE void take() { number = gridDim.x + drawn; }
};
