// The array by which a caller says a mask, as mask.cu reads it.
//
//   MASK 1 (len_q, len_kv) bytes, of which any but 0 shows a pair    rows padded to 16 bytes
//   MASK 2 a bit for each pair, query by query, the lowest of a byte first; each sequence of a ragged batch begins with a byte
#pragma once

#include "params.cuh"
#include "sequences.cuh"

#if MASK == 2
using MaskArray = const unsigned char*;
#else
using MaskArray = Tensor;
#endif

DEVICE Tensor as_tensor(const unsigned char* bits) { return {const_cast<unsigned char*>(bits), 0, 0, 0}; }
DEVICE Tensor as_tensor(const Tensor& booleans) { return booleans; }

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
