// What the rungs of the backward pass for Hopper share, beside what they have from flash3_backward (flash3_backward.cuh): a block has
// one key tile, and blocks come in plain order.
#pragma once

#include "flash3_backward.cuh"

static_assert(PARTS == 1 && !IN_TURN && !RAGGED && !DROPOUT, "that is what flash3_backward adds");
static_assert(STAGES == 2, "a tile of queries is loaded while another one is in use");

// The key tile of this block: those of a KV head come one after the other, the first ones first, and then those of the next head.
DEVICE Work work_in_order(const Shape& shape) {
  Origin whole = {};
  return key_tile(shape, {}, blockIdx.x, whole);
}

// What is hidden of a warpgroup's part of S: scores that the mask hides, and keys beyond the last one. Also gives S its sign.
struct Mask {
  Scores scores;
  Shape keys_first;
  int lane_key;     // of this lane's upper row
  Keys full;        // tiles of queries that need no mask
  bool everywhere;  // or none is without

  DEVICE Mask(const Shape& shape, int own_key, int lane_key)
      : scores(shape), keys_first(transposed(shape)), lane_key(lane_key), full(full_tiles(keys_first, own_key, own_key + 63, BR)),
        everywhere(scores.sign != 1 || own_key + 64 > shape.len_kv) {}

  DEVICE void hide(Transposed& s, int i) const {
    if (everywhere || i < full.first || i > full.last) {
      scores.flip(s);
      mask_scores(s, keys_first, lane_key, i * BR, 2 * (opaque(lane_id()) % 4));
      mask_rows(s, lane_key, keys_first.len_q);
    }
  }
};

// dP - D.
DEVICE void take_away(Transposed& dp, unsigned numbers) {
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n) {
    const float2 d = of_queries(numbers, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[n][e] -= e % 2 ? d.y : d.x;
  }
}

// A warpgroup's dK or dV, times `factor`, into the rows of its keys. `lane_key` is the key of this lane's upper row.
DEVICE void store_gradient(const Tensor& to, const Shape& shape, int kv_head, int lane_key, const Gradient& sum, float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = lane_key + 8 * half, bytes = key < shape.len_kv ? padded_row_bytes(shape) : 0;
    store_row(row_address(to, kv_head / shape.kv_heads, kv_head % shape.kv_heads, key), sum, half, factor, bytes);
  }
}
