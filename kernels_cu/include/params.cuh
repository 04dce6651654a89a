// What a launch passes, by value; the launcher reads these structs and builds the same in NumPy (natural alignment).
#pragma once

#include "types.cuh"

// A (batch, head, row, column) array; columns are contiguous. Base and strides are multiples of 16 bytes.
struct Tensor {
  void* data;
  long long batch, head, row;  // strides in bytes
};

// The problem. A member that is called as a field of `Problem` has its value, 0 where the problem has none.
struct Shape {
  int batch, heads, kv_heads, len_q, len_kv, head_dim;
  int left, right;  // query i sees keys i + len_kv - len_q - left .. + right; 2^30 stands for "no bound"
  int group;        // (batch, head) pairs that run side by side before the next ones start
  float scale;
  float soft_cap;
  int sequences;  // of a ragged batch
  int kept;       // dropout: how many of 256 weights are kept
  int page_size, table_pages;  // K and V in pages: keys of each, and how many a request's line of the block table has
  int longest;    // keys of the longest sequence; of a plain batch, len_kv
  int len_prefix; // keys that all requests share, beside len_kv of their own
};

// Address of one row. `head` counts the tensor's own heads (for K and V: kv_head).
DEVICE char* row_address(const Tensor& t, int batch, int head, int row) {
  return static_cast<char*>(t.data) + batch * t.batch + head * t.head + row * t.row;
}

// The KV head that a query head reads (GQA: heads / kv_heads query heads share one).
DEVICE int kv_head(const Shape& shape, int head) { return head / (shape.heads / shape.kv_heads); }

// Bytes of a row of head_dim elements: as it is, and padded to 16 bytes as it lies in HBM.
DEVICE int row_bytes(const Shape& shape) { return shape.head_dim * ELEMENT_BYTES; }
DEVICE int padded_row_bytes(const Shape& shape) { return round_up(row_bytes(shape), CHUNK_BYTES); }
