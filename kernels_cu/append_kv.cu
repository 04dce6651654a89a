// New keys and values into their slots of a pool of pages. (PagedAttention: Kwon et al. 2023, arXiv 2309.06180.)
//
//   k, v (1, kv_heads, len_q, head_dim)    slot_mapping (len_q) int64, below 0 for a token that is skipped    rows padded to 16 bytes
//   k_pool, v_pool (pages, kv_heads, page_size, head_dim)    k_scale, v_scale (pages, kv_heads, page_size) float32, of a pool of 8 bits
//
// A block has BR tokens of a head, and neighbouring blocks have the heads of the same tokens. Lanes share a row. A warp asks for
// several rows of K and of V before it writes the first, so that the wait for a slot and the wait for a row overlap with those
// of other warps. Nobody else writes a slot, so nothing has to be ordered.
#if defined(CACHE) && CACHE
#include "quantize.cuh"
#else
#include "rows.cuh"
#endif

constexpr int TOKENS = BR / WARPS;  // of a warp
using Lanes = RowLanes<HEAD_DIM / CHUNK_ELEMENTS>;

struct Place { long long page; int row; bool is_there; };

// Where a token's row goes.
DEVICE Place place_of(const long long* slot_mapping, const Shape& shape, int token, bool inside) {
  long long slot = -1;
  lanes_meet();
  if (inside) slot = load_global<long long>(slot_mapping + token);
  const long long page = slot >> 31 == 0 ? static_cast<unsigned>(slot) / static_cast<unsigned>(shape.page_size)
                                         : slot / shape.page_size;
  return {page, static_cast<int>(slot - page * shape.page_size), slot >= 0};
}

// Asks for this lane's chunks of a row; zeros where there is none.
DEVICE void load_row(uint4 (&x)[Lanes::TURNS], const Tensor& from, const Shape& shape, int head, int token, bool is_there) {
  const char* row = row_address(from, 0, head, token);
#pragma unroll
  for (int turn = 0; turn < Lanes::TURNS; ++turn) {
    const int at = Lanes::chunk(turn) * CHUNK_BYTES;
    x[turn] = make_uint4(0, 0, 0, 0);
    lanes_meet();
    if (is_there && at < padded_row_bytes(shape)) x[turn] = load_global<uint4>(row + at);
  }
}

// Writes this lane's chunks of a row to its place.
DEVICE void store_row(const Tensor& pool, float* scales, const Shape& shape, int head, const Place& place,
                      const uint4 (&x)[Lanes::TURNS]) {
  char* row = place_in(pool, place.page, head, place.row);
#if CACHE
  static_assert(Lanes::TURNS == 1, "a lane has one chunk of a row of 16 bits");
  const int first = Lanes::chunk(0) * CHUNK_ELEMENTS;
  float elements[8];
  elements_of(elements, x[0], shape.head_dim - first);
  unsigned top = largest_bits(elements);
#pragma unroll
  for (int mask = Lanes::LANES / 2; mask > 0; mask /= 2) top = max(top, shuffle_xor(top, mask));
  const float scale = scale_for(top);
  lanes_meet();
  if (place.is_there && first < round_up(shape.head_dim, CHUNK_BYTES)) store_global(row + first, quantized(elements, scale, top));
  lanes_meet();
  if (place.is_there && first == 0) store_global(scale_in(scales, shape, place.page, head, place.row), scale);
#else
#pragma unroll
  for (int turn = 0; turn < Lanes::TURNS; ++turn) {
    const int at = Lanes::chunk(turn) * CHUNK_BYTES;
    lanes_meet();
    if (place.is_there && at < padded_row_bytes(shape)) store_global(row + at, x[turn]);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
append_kv(const Tensor k, const Tensor v, const Tensor k_pool, const Tensor v_pool, const long long* slot_mapping, float* k_scale,
          float* v_scale, const Shape shape) {
  const int head = blockIdx.x % shape.kv_heads, first = blockIdx.x / shape.kv_heads * BR + warp_id() * TOKENS;
  constexpr int PASSES = ceil_div(TOKENS, Lanes::ROWS), TOGETHER = PASSES < Lanes::UNDER_WAY ? PASSES : Lanes::UNDER_WAY;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass += TOGETHER) {
    Place places[TOGETHER];
    uint4 new_k[TOGETHER][Lanes::TURNS], new_v[TOGETHER][Lanes::TURNS];

    // step: load_slots
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int row = (pass + i) * Lanes::ROWS + Lanes::row();
      places[i] = place_of(slot_mapping, shape, first + row, row < TOKENS && first + row < shape.len_q);
    }

    // step: load_k
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      load_row(new_k[i], k, shape, head, first + (pass + i) * Lanes::ROWS + Lanes::row(), places[i].is_there);

    // step: load_v
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      load_row(new_v[i], v, shape, head, first + (pass + i) * Lanes::ROWS + Lanes::row(), places[i].is_there);

    // step: store_k
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) store_row(k_pool, k_scale, shape, head, places[i], new_k[i]);

    // step: store_v
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) store_row(v_pool, v_scale, shape, head, places[i], new_v[i]);
  }
}
