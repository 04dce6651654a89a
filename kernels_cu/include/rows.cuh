// Rows that are moved whole, without SRAM: several lanes share a row, and a warp has several rows under way.
#pragma once

#include "elements.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef CACHE
#define CACHE 0  // of a pool: 0 the storage dtype, 1 e4m3, 2 int8
#endif

// How the lanes of a warp share out rows of up to CHUNKS chunks: LANES lanes have a row, so that ROWS rows are moved at once, and
// a lane has TURNS chunks of its row.
template <int CHUNKS>
struct RowLanes {
  static constexpr int LANES = lanes_for(CHUNKS), ROWS = 32 / LANES, TURNS = ceil_div(CHUNKS, LANES);
  static constexpr int UNDER_WAY = TURNS >= 4 ? 1 : 4 / TURNS;  // how often ROWS rows are asked for before any is written

  // This lane's row of those that are moved at once, and its chunk of it in a turn.
  static DEVICE int row() { return lane_id() / LANES; }
  static DEVICE int chunk(int turn) { return turn * LANES + lane_id() % LANES; }
};

// Address of a row in a pool beyond 2^31 elements: every product has 64 bits.
DEVICE char* place_in(const Tensor& pool, long long page, int head, int row) {
  return static_cast<char*>(pool.data) + page * pool.batch + head * pool.head + row * pool.row;
}

// The scale of a row in a pool (pages, kv_heads, page_size).
DEVICE float* scale_in(float* scales, const Shape& shape, long long page, int head, int row) {
  return scales + (page * shape.kv_heads + head) * shape.page_size + row;
}
