// Pages of a pool copied to other pages, for copy-on-write. (PagedAttention: Kwon et al. 2023, arXiv 2309.06180.)
//
//   k_pool, v_pool (pages, kv_heads, page_size, head_dim)    rows padded to 16 bytes
//   k_scale, v_scale (pages, kv_heads, page_size) float32, or NULL    pairs (len_q, 2) int32: a page, and the page it is copied to
//
// A block has a page of a head, and neighbouring blocks have the heads of the same page. Rows are moved as bytes, whatever they
// hold. Rows of K and of V are under way together. No page is written that another block reads: the caller sees to it.
#include "rows.cuh"

constexpr int POOL_BYTES = CACHE ? 1 : ELEMENT_BYTES;  // of an element
using Lanes = RowLanes<ceil_div(HEAD_DIM * POOL_BYTES, CHUNK_BYTES)>;
constexpr int ROWS_AT_ONCE = WARPS * Lanes::ROWS;
// How often rows are asked for before any is written: as often as a page of 16 keys needs. K and V together have enough on the way.
constexpr int UNDER_WAY = ROWS_AT_ONCE * Lanes::UNDER_WAY < 16 ? Lanes::UNDER_WAY : ceil_div(16, ROWS_AT_ONCE);
constexpr int TOGETHER = ROWS_AT_ONCE * UNDER_WAY;  // rows of a block

struct Pair { int from, to; };

// This lane's parts of the rows that are under way. The lane with a row's first chunk has its scale.
struct Rows {
  uint4 chunk[UNDER_WAY][Lanes::TURNS];
  float scale[UNDER_WAY];
};

// A row of this lane: warps take turns.
DEVICE int row_at(int begin, int i) { return begin + (i * WARPS + warp_id()) * Lanes::ROWS + Lanes::row(); }
DEVICE int bytes_of(const Shape& shape) { return round_up(shape.head_dim * POOL_BYTES, CHUNK_BYTES); }

// Asks for a head's rows of a page, and for their scales where there are some.
DEVICE void load_rows(Rows& rows, const Tensor& pool, float* scales, const Shape& shape, int head, int page, int begin) {
#pragma unroll
  for (int i = 0; i < UNDER_WAY; ++i) {
    const int row = row_at(begin, i);
    const char* from = place_in(pool, page, head, row);
#pragma unroll
    for (int turn = 0; turn < Lanes::TURNS; ++turn) {
      const int at = Lanes::chunk(turn) * CHUNK_BYTES;
      lanes_meet();
      if (row < shape.page_size && at < bytes_of(shape)) rows.chunk[i][turn] = load_global<uint4>(from + at);
    }
    lanes_meet();
    if (scales != nullptr && row < shape.page_size && Lanes::chunk(0) == 0)
      rows.scale[i] = load_global<float>(scale_in(scales, shape, page, head, row));
  }
}

// Writes them to another page.
DEVICE void store_rows(const Tensor& pool, float* scales, const Shape& shape, int head, int page, int begin, const Rows& rows) {
#pragma unroll
  for (int i = 0; i < UNDER_WAY; ++i) {
    const int row = row_at(begin, i);
    char* to = place_in(pool, page, head, row);
#pragma unroll
    for (int turn = 0; turn < Lanes::TURNS; ++turn) {
      const int at = Lanes::chunk(turn) * CHUNK_BYTES;
      lanes_meet();
      if (row < shape.page_size && at < bytes_of(shape)) store_global(to + at, rows.chunk[i][turn]);
    }
    lanes_meet();
    if (scales != nullptr && row < shape.page_size && Lanes::chunk(0) == 0)
      store_global(scale_in(scales, shape, page, head, row), rows.scale[i]);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
copy_pages(const Tensor k_pool, const Tensor v_pool, const int* pairs, float* k_scale, float* v_scale, const Shape shape) {
  const int head = blockIdx.x % shape.kv_heads;

  // step: load_pair
  const uint2 both = load_global<uint2>(pairs + 2ll * (blockIdx.x / shape.kv_heads));
  const Pair pair{static_cast<int>(both.x), static_cast<int>(both.y)};

#pragma unroll 1
  for (int begin = 0; begin < shape.page_size; begin += TOGETHER) {
    Rows k, v;

    // step: load_k
    load_rows(k, k_pool, k_scale, shape, head, pair.from, begin);

    // step: load_v
    load_rows(v, v_pool, v_scale, shape, head, pair.from, begin);

    // step: store_k
    store_rows(k_pool, k_scale, shape, head, pair.to, begin, k);

    // step: store_v
    store_rows(v_pool, v_scale, shape, head, pair.to, begin, v);
  }
}
