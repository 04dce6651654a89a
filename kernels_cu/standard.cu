// Standard attention, Algorithm 0 of FlashAttention (arXiv 2205.14135), in three launches with S and P in HBM:
// S = scale · Q Kᵀ (masked), P = softmax(S) row by row, O = P V.
//
// q, out: (batch, heads, len_q, head_dim); k, v: (batch, kv_heads, len_kv, head_dim), in the storage dtype;
// s float32 and p in the storage dtype: (batch, heads, len_q, len_kv); lse: (batch, heads, len_q) float32, or null.
// Rows of all tensors are padded to 16 bytes. Tiles: BR queries x BC keys.
#include "elements.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "philox.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = BR / WARPS;  // the warps split the rows of a tile
constexpr int ROW_FRAGMENTS = WARP_ROWS / 16;
constexpr int SOFTMAX_ROWS = 4;  // of a block of the softmax launch: one a warp
constexpr int LANE_COLUMNS = 4;  // of S, 16 bytes: what a lane reads at a time
constexpr int WARP_COLUMNS = 32 * LANE_COLUMNS;

// Block x = (head · row tiles + i) · key tiles + j computes S_ij; its warps split the rows and each reads all of K_j.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_scores(const Tensor q, const Tensor k, const Tensor s, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = ceil_div(shape.len_kv, BC);
  const int j = blockIdx.x % key_tiles, i = blockIdx.x / key_tiles % row_tiles;
  const int flat_head = blockIdx.x / key_tiles / row_tiles;
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads;
  const int first_row = i * BR, first_key = j * BC;
  const int warp_row = warp_id() * WARP_ROWS;
  const int g = lane_id() / 4, t = lane_id() % 4;

  const Tile<BR, HEAD_DIM> q_tile{sram_base()};
  const Tile<BC, HEAD_DIM> k_tile{q_tile.base + q_tile.BYTES};
  name_sram("q", q_tile.base, q_tile.BYTES);
  name_sram("k", k_tile.base, k_tile.BYTES);

  // step: load_q
  load_tile<THREADS>(q_tile, row_address(q, batch, head, first_row), q.row, shape.len_q - first_row, row_bytes(shape));

  // step: load_k
  load_tile<THREADS>(k_tile, row_address(k, batch, kv_head(shape, head), first_key), k.row, shape.len_kv - first_key,
                     row_bytes(shape));
  copy_commit();
  copy_wait<0>();
  barrier();

  // step: scores
  float scores[ROW_FRAGMENTS][BC / 8][4] = {};
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM; d += K_STEP) {
    FragmentA a[ROW_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a(q_tile, warp_row + 16 * f, d);
#pragma unroll
    for (int n = 0; n < BC / 8; n += 2) {
      FragmentB b = load_b_rows(k_tile, 8 * n, d);
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(scores[f][n], scores[f][n + 1], a[f], b);
    }
  }

  const int padded_keys = round_up(shape.len_kv, LANE_COLUMNS);
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f) {
    // step: mask
    const int row = first_row + warp_row + 16 * f + g;
#pragma unroll
    for (int n = 0; n < BC / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[f][n][e] *= shape.scale;
    mask_scores(scores[f], shape, row, first_key, 2 * t);

    // step: store_s
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lanes_meet();
      char* s_row = row_address(s, batch, head, row + 8 * half);
#pragma unroll
      for (int n = 0; n < BC / 8; ++n) {
        const int key = first_key + 8 * n + 2 * t;
        if (row + 8 * half < shape.len_q && key < padded_keys)
          store_global(s_row + key * 4LL, make_float2(scores[f][n][2 * half], scores[f][n][2 * half + 1]));
      }
    }
  }
}

// Block x = head · ⌈len_q / 4⌉ + i: one warp a row, three passes over it. No SRAM.
extern "C" __global__ void __launch_bounds__(SOFTMAX_ROWS * 32)
standard_softmax(const Tensor s, const Tensor p, float* lse, const long long* rng_state, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, SOFTMAX_ROWS);
  const int flat_head = blockIdx.x / row_tiles, row = blockIdx.x % row_tiles * SOFTMAX_ROWS + warp_id();
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads;

  // step: store_p (seed and offset)
  const Dropout dropout = Dropout(rng_state, shape.kept).of_head(flat_head);
  if (row >= shape.len_q) return;
  const char* s_row = row_address(s, batch, head, row);
  char* p_row = row_address(p, batch, head, row);
  const int first = lane_id() * LANE_COLUMNS;

  // step: row_max
  float m = -INF;
#pragma unroll 4
  for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {
    float4 x = load_global<float4>(s_row + key * 4LL);
    m = fmaxf(m, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  }
  m = warp_max(m);
  const float base = finite(m);

  // step: row_sum
  float l = 0;
#pragma unroll 4
  for (int key = first; key < shape.len_kv; key += WARP_COLUMNS) {
    float4 x = load_global<float4>(s_row + key * 4LL);
    l += exp_approx(x.x - base) + exp_approx(x.y - base) + exp_approx(x.z - base) + exp_approx(x.w - base);
  }
  l = warp_sum(l);

  // step: store_p
  const float factor = l > 0 ? of_kept(reciprocal(l), shape.kept) : 0;
#pragma unroll 4
  for (int key = first; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {
    float4 x = make_float4(-INF, -INF, -INF, -INF);  // P's padding may reach past S's
    if (key < shape.len_kv) x = load_global<float4>(s_row + key * 4LL);
    float4 weights = make_float4(exp_approx(x.x - base) * factor, exp_approx(x.y - base) * factor,
                                 exp_approx(x.z - base) * factor, exp_approx(x.w - base) * factor);
    if constexpr (DROPOUT) weights = dropout.dropped(weights, row, key);
    store_elements(p_row + static_cast<long long>(key) * ELEMENT_BYTES, weights);
  }

  // step: store_lse
  if (lse && lane_id() == 0) store_global(lse + static_cast<long long>(flat_head) * shape.len_q + row, m + log_approx(l));
}

// Block x = head · row tiles + i computes O_i over all key tiles; its warps split the rows and each reads all of V_j.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_output(const Tensor p, const Tensor v, const Tensor out, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = ceil_div(shape.len_kv, BC);
  const int flat_head = blockIdx.x / row_tiles, first_row = blockIdx.x % row_tiles * BR;
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads;
  const int warp_row = warp_id() * WARP_ROWS;

  const Tile<BR, BC> p_tile{sram_base()};
  const Tile<BC, HEAD_DIM> v_tile{p_tile.base + p_tile.BYTES};
  name_sram("p", p_tile.base, p_tile.BYTES);
  name_sram("v", v_tile.base, v_tile.BYTES);
  const char* p_rows = row_address(p, batch, head, first_row);
  const char* v_rows = row_address(v, batch, kv_head(shape, head), 0);
  const int p_columns = round_up(shape.len_kv, CHUNK_ELEMENTS);

  float o[ROW_FRAGMENTS][HEAD_DIM / 8][4] = {};
  for (int j = 0; j < key_tiles; ++j) {
    barrier();  // the previous tiles are read

    // step: load_p
    load_tile<THREADS>(p_tile, p_rows + static_cast<long long>(j) * p_tile.ROW_BYTES, p.row, shape.len_q - first_row,
                       min(p_columns - j * BC, BC) * ELEMENT_BYTES);

    // step: load_v
    load_tile<THREADS>(v_tile, v_rows + j * BC * v.row, v.row, shape.len_kv - j * BC, row_bytes(shape));
    copy_commit();
    copy_wait<0>();
    barrier();

    // step: output
#pragma unroll(FL_DTYPE == 0 ? 1 : 4)
    for (int key = 0; key < BC; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a(p_tile, warp_row + 16 * f, key);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        FragmentB b = load_b_columns(v_tile, key, 8 * n);
#pragma unroll
        for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(o[f][n], o[f][n + 1], a[f], b);
      }
    }
  }

  // Once more, from a number that the compiler takes for another: cheaper than a register held through the loop.
  const int out_head = opaque(static_cast<int>(blockIdx.x)) / row_tiles;

  // step: store_o
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row + 16 * f + 8 * half + lane_id() / 4;
      const int bytes = row < shape.len_q ? padded_row_bytes(shape) : 0;
      store_row(row_address(out, out_head / shape.heads, out_head % shape.heads, row), o[f], half, 1.f, bytes);
    }
}
