// Pages of a pool copied to other pages, for copy-on-write. (PagedAttention: Kwon et al. 2023, arXiv 2309.06180.)
//
//   k_pool, v_pool (pages, kv_heads, page_size, head_dim)    rows padded to 16 bytes
//   k_scale, v_scale (pages, kv_heads, page_size) float32, or NULL    pairs (len_q, 2) int32: a page, and the page it is copied to
//
// A block has a page of a head, and neighbouring blocks have the heads of the same page. Rows are moved as bytes, whatever they
// hold. No page is written that another block reads: the caller sees to it.
#include "rows.cuh"

constexpr int POOL_BYTES = CACHE ? 1 : ELEMENT_BYTES;  // of an element
using Lanes = RowLanes<ceil_div(HEAD_DIM * POOL_BYTES, CHUNK_BYTES)>;

struct Pair { int from, to; };

// Copies a head's rows of a page. Each warp has every WARPS-th group of rows.
DEVICE void copy_rows(const Tensor& pool, const Shape& shape, int head, const Pair& pair) {
  const int bytes = round_up(shape.head_dim * POOL_BYTES, CHUNK_BYTES);
#pragma unroll 1
  for (int begin = 0; begin < shape.page_size; begin += WARPS * Lanes::ROWS * Lanes::UNDER_WAY) {
    uint4 x[Lanes::UNDER_WAY][Lanes::TURNS];
#pragma unroll
    for (int i = 0; i < Lanes::UNDER_WAY; ++i) {
      const int row = begin + (i * WARPS + warp_id()) * Lanes::ROWS + Lanes::row();
      const char* from = place_in(pool, pair.from, head, row);
#pragma unroll
      for (int turn = 0; turn < Lanes::TURNS; ++turn) {
        const int at = Lanes::chunk(turn) * CHUNK_BYTES;
        lanes_meet();
        if (row < shape.page_size && at < bytes) x[i][turn] = load_global<uint4>(from + at);
      }
    }
#pragma unroll
    for (int i = 0; i < Lanes::UNDER_WAY; ++i) {
      const int row = begin + (i * WARPS + warp_id()) * Lanes::ROWS + Lanes::row();
      char* to = place_in(pool, pair.to, head, row);
#pragma unroll
      for (int turn = 0; turn < Lanes::TURNS; ++turn) {
        const int at = Lanes::chunk(turn) * CHUNK_BYTES;
        lanes_meet();
        if (row < shape.page_size && at < bytes) store_global(to + at, x[i][turn]);
      }
    }
  }
}

// Copies a head's scales of a page, if there are any. A thread has one.
DEVICE void copy_scales(float* scales, const Shape& shape, int head, const Pair& pair) {
  if (scales == nullptr) return;
  for (int begin = 0; begin < shape.page_size; begin += WARPS * 32) {
    const int row = begin + static_cast<int>(threadIdx.x);
    lanes_meet();
    if (row < shape.page_size)
      store_global(scale_in(scales, shape, pair.to, head, row), load_global<float>(scale_in(scales, shape, pair.from, head, row)));
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
copy_pages(const Tensor k_pool, const Tensor v_pool, const int* pairs, float* k_scale, float* v_scale, const Shape shape) {
  const int head = blockIdx.x % shape.kv_heads;

  // step: load_pair
  const uint2 both = load_global<uint2>(pairs + 2ll * (blockIdx.x / shape.kv_heads));
  const Pair pair{static_cast<int>(both.x), static_cast<int>(both.y)};

  // step: copy_k
  copy_rows(k_pool, shape, head, pair);
  copy_scales(k_scale, shape, head, pair);

  // step: copy_v
  copy_rows(v_pool, shape, head, pair);
  copy_scales(v_scale, shape, head, pair);
}
