// The two-pass online softmax, Algorithm 3 of Milakov and Gimelshein (arXiv 1805.02867), as the middle launch of standard
// attention: P = softmax(S) row by row, with maximum and sum found in one pass. The first and last launch are standard.cu's.
//
// s float32 and p in the storage dtype: (batch, heads, len_q, len_kv), rows padded to 16 bytes; lse: (batch, heads, len_q)
// float32, or null.
#include "elements.cuh"
#include "params.cuh"
#include "warp.cuh"

constexpr int SOFTMAX_ROWS = 4;  // of a block: one a warp
constexpr int LANE_COLUMNS = 4;  // of S, 16 bytes: what a lane reads at a time
constexpr int WARP_COLUMNS = 32 * LANE_COLUMNS;

// Block x = head · ⌈len_q / 4⌉ + i: one warp a row, two passes over it. No SRAM.
extern "C" __global__ void __launch_bounds__(SOFTMAX_ROWS * 32)
online_softmax(const Tensor s, const Tensor p, float* lse, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, SOFTMAX_ROWS);
  const int flat_head = blockIdx.x / row_tiles, row = blockIdx.x % row_tiles * SOFTMAX_ROWS + warp_id();
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads;
  if (row >= shape.len_q) return;
  const char* s_row = row_address(s, batch, head, row);
  char* p_row = row_address(p, batch, head, row);
  const int first = lane_id() * LANE_COLUMNS;

  // step: online_pass
  float lane_m = -INF, lane_l = 0;  // of the columns that this lane has seen
#pragma unroll 4
  for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {
    float4 x = load_global<float4>(s_row + key * 4LL);
    float m_new = fmaxf(lane_m, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
    float base = finite(m_new);
    lane_l = lane_l * exp_approx(lane_m - base) + exp_approx(x.x - base) + exp_approx(x.y - base) +
             exp_approx(x.z - base) + exp_approx(x.w - base);
    lane_m = m_new;
  }
  const float m = warp_max(lane_m);
  const float base = finite(m);
  const float l = warp_sum(lane_l * exp_approx(lane_m - base));

  // step: store_p
  const float factor = l > 0 ? reciprocal(l) : 0;
#pragma unroll 4
  for (int key = first; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {
    float4 x = make_float4(-INF, -INF, -INF, -INF);  // P's padding may reach past S's
    if (key < shape.len_kv) x = load_global<float4>(s_row + key * 4LL);
    store_elements(p_row + static_cast<long long>(key) * ELEMENT_BYTES,
                   make_float4(exp_approx(x.x - base) * factor, exp_approx(x.y - base) * factor,
                               exp_approx(x.z - base) * factor, exp_approx(x.w - base) * factor));
  }

  // step: store_lse
  if (lse && lane_id() == 0) store_global(lse + static_cast<long long>(flat_head) * shape.len_q + row, m + log_approx(l));
}
