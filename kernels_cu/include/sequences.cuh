// Ragged batches (RAGGED): the rows of a batch of 1 are sequences of any lengths, one behind the other. Sequence s has the queries
// offsets_q[s] .. offsets_q[s + 1] - 1 and the keys offsets_kv[s] .. offsets_kv[s + 1] - 1; the first offsets are 0.
//
// Its row tiles begin at its first query, and only the offsets say where that is. So that no list of tiles is needed, each
// sequence has places for its tiles: place `first / BR + s` is that of its first tile, where `first` is its first query. The
// places suffice, and at most one of each sequence stays empty.
//
// A backward pass has key tiles for row tiles: in the transposed problem (mask.cuh), with the two offsets exchanged, all of this
// holds for them.
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef RAGGED
#define RAGGED 0
#endif

struct OrderedTile;
struct Offsets {  // NULL unless RAGGED
  const int *q, *kv;
  const OrderedTile* order = nullptr;  // that of a backward pass's key tiles, if they are ORDERED
};

// A row tile of a sequence. Rows of a ragged batch are numbered as the keys that they are aligned with, from len_kv - len_q on:
// so `keys` is all that is left of both lengths, which saves registers. Row `row` is row q + row of its head, key `key` is kv + key.
struct SequenceRows {
  int first_row, q, kv, keys;
  int place, sequence, aligned;  // the tile among those of its head, its sequence, and the number of that sequence's first row

  // Its number among the row tiles of a mask (packed_mask.cuh). Without sequences it is computed, for no register has to keep it.
  DEVICE int mask_tile() const { return RAGGED ? place : first_row / BR; }

  // The problem that the sequence is alone.
  DEVICE Shape alone(const Shape& batches) const {
    Shape own = batches;
    if constexpr (RAGGED) own.len_q = own.len_kv = keys;
    return own;
  }
};

// The row tiles of a head, empty ones included.
template <int ROWS = BR>
DEVICE int row_tiles_of(const Shape& shape) {
  return RAGGED ? shape.len_q / ROWS + shape.sequences : ceil_div(shape.len_q, ROWS);
}

// A sequence, and which rows of a head are its own.
struct Sequence {
  int number, first, end;

  // How many of its rows lie before its tile at `place`. It has them all before an empty place.
  template <int ROWS = BR>
  DEVICE int before(int place) const { return (place - first / ROWS - number) * ROWS; }
};

// The sequence that has the tile at `place`: the last one that begins at this place or before it. It is found by halves.
template <int ROWS = BR>
DEVICE Sequence sequence_at(const Shape& shape, const int* offsets, int place) {
  int low = 0, high = shape.sequences, first = 0, end = shape.len_q;
  while (high - low > 1) {
    const int middle = (low + high) / 2, begin = load_global<int>(offsets + middle);
    if (begin / ROWS + middle <= place)
      low = middle, first = begin;
    else
      high = middle, end = begin;
  }
  return {low, first, end};
}

// Row tile `place` of a head.
template <int ROWS = BR>
DEVICE SequenceRows row_tile_at(const Shape& shape, const Offsets& offsets, int place) {
  if constexpr (!RAGGED) return {place * ROWS, 0, 0, shape.len_kv, place, 0, 0};
  const Sequence own = sequence_at<ROWS>(shape, offsets.q, place);
  const int kv = load_global<int>(offsets.kv + own.number), keys = load_global<int>(offsets.kv + own.number + 1) - kv;
  const int aligned = keys - (own.end - own.first);  // the key that the first row is aligned with
  return {uniform(aligned + own.before<ROWS>(place)), uniform(own.first - aligned), uniform(kv), uniform(keys),
          place, own.number, aligned};
}
