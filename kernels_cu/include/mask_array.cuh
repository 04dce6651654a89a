// The array by which a caller says a mask, as mask.cu reads it.
//
//   MASK 1 (len_q, len_kv) bytes, 0 hides a pair, any other shows it    rows padded to 16 bytes
//   MASK 2 a bit for each pair, query by query, the lowest of a byte first; each sequence of a ragged batch begins with a byte
//   MASK 3 (row blocks, 1 + key blocks) int. A block has BLOCK_ROWS x BLOCK_COLS pairs. A row of blocks has the number of its visible
//          blocks, then these, then anything. A tile of the kernel lies in one block
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "sequences.cuh"
#include "warp.cuh"

#ifndef BLOCK_ROWS
#define BLOCK_ROWS BR
#define BLOCK_COLS BC
#endif

#if MASK == 1
using MaskArray = Tensor;
#else
using MaskArray = const unsigned char*;
#endif
#if MASK == 3
using BlockLists = Tensor;
#else
using BlockLists = const int*;
#endif

DEVICE Tensor as_tensor(const void* address) { return {const_cast<void*>(address), 0, 0, 0}; }
DEVICE Tensor as_tensor(const Tensor& array) { return array; }

// The list of a row of blocks. All lanes of a warp ask together.
struct BlockList {
  const char* from;
  int length;

  DEVICE BlockList(const Tensor& lists, const Shape& shape, int row)
      : from(row_address(lists, 0, 0, row)), length(MASK == 3 ? min(max(load_global<int>(from), 0), ceil_div(shape.len_kv, BLOCK_COLS)) : 0) {}

  DEVICE bool has(int block) const {
    bool found = false;
    for (int first = 0; first < length; first += 32) {
      const int at = first + lane_id();
      lanes_meet();
      if (at < length) found |= load_global<int>(from + 4 + 4 * at) == block;
    }
    return any_lane(found);
  }
};

// Where a row's keys from `key` on lie: their first byte, and how many bits of it are of keys before them. Bits of a sequence lie
// from byte `begin` on.
struct MaskRow {
  const char* from;
  int before;

  DEVICE MaskRow(const Tensor& mask, long long begin, const SequenceRows& own, int row, int key) {
    const long long bit = static_cast<long long>(row - own.aligned) * own.keys + key;
    from = MASK == 2 ? row_address(mask, 0, 0, 0) + begin + bit / 8 : row_address(mask, 0, 0, own.q + row) + own.kv + key;
    before = MASK == 2 ? bit % 8 : 0;
  }
};
