// What may bend the scores and weights of flash2.cu: a soft cap, ALiBi, dropout and sinks. Each hook is nothing where the problem
// has none of them.
#pragma once

#include "philox.cuh"
#include "scores.cuh"
#include "warp.cuh"

struct Variant {
  const float slope;  // ALiBi's
  const Dropout dropout;

  DEVICE Variant(const float* alibi_slopes, const long long* rng_state, const Shape& batches, int flat_head)
      : slope(of_head<ALIBI>(alibi_slopes, flat_head % batches.heads, 0)),
        dropout(Dropout(rng_state, batches.kept).of_head(flat_head)) {}

  // S after the soft cap, and with ALiBi's bias. A warp has M x 16 rows (mma.cuh): `row` is the query of a lane's first row, `key`
  // the tile's first key.
  template <int M, int N>
  DEVICE void bend(float (&s)[M][N][4], const Scores& scores, const Shape& shape, int row, int key) const {
    if constexpr (SOFT_CAP || ALIBI) {
#pragma unroll
      for (int i = 0; i < M; ++i) scores.bend(s[i], shape, row + 16 * i, key + 2 * (opaque(lane_id()) % 4), slope);
    }
  }

  // P without the weights that are dropped. `row` and `key` count 16 rows and 16 keys.
  template <int M, int N>
  DEVICE void drop(float (&p)[M][N][4], int row, int key) const {
    if constexpr (DROPOUT) {
#pragma unroll
      for (int i = 0; i < M; ++i) dropout.drop(p[i], row + i, key);
    }
  }
};
