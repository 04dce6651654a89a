// FlashAttention-1, forward: Algorithm 1 of arXiv 2205.14135, as printed. There is one block per (batch, head). Its outer loop
// walks over K and V, the inner one over Q. O, l and m lie in HBM. They are read and written at every j. Masked tiles are walked,
// too.
//
// q, out: (batch, heads, len_q, head_dim); k, v: (batch, kv_heads, len_kv, head_dim), in the storage dtype;
// o: workspace like out, but float32; l, m: workspace, and lse (or null): (batch, heads, len_q) float32.
// Rows of all tensors are padded to 16 bytes. Tiles: Br = BR queries x Bc = BC keys.
//
// The warps split the keys of a tile (split-K). Each has all BR rows against BC / WARPS keys. So its maxima, sums and P·V are
// partial, and the warps meet in SRAM. They add up partial outputs one chunk of columns at a time.
#include "elements.cuh"
#include "mask.cuh"
#include "mma.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WARP_KEYS = BC / WARPS;
constexpr int ROW_FRAGMENTS = BR / 16;
constexpr int CHUNK_COLUMNS = HEAD_DIM < 64 ? HEAD_DIM : 64;     // of O: two a lane
constexpr int UPDATE_ROWS = BR / WARPS;                          // rows of O that a warp updates,
constexpr int UPDATE_BATCH = UPDATE_ROWS < 8 ? UPDATE_ROWS : 8;  // and loads of them that are on their way together

static_assert(WARP_KEYS % 16 == 0, "a warp takes whole fragments of 16 keys");
static_assert(UPDATE_ROWS % UPDATE_BATCH == 0, "a warp updates whole batches of rows");

using PartialO = Tile<BR, CHUNK_COLUMNS * 4 / ELEMENT_BYTES>;  // rows of CHUNK_COLUMNS floats

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1(const Tensor q, const Tensor k, const Tensor v, const Tensor o, float* l, float* m, const Tensor out, float* lse,
       const Shape shape) {
  const int batch = blockIdx.x / shape.heads, head = blockIdx.x % shape.heads;
  const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = max(1, ceil_div(shape.len_kv, BC));
  const long long statistics = static_cast<long long>(blockIdx.x) * shape.len_q;  // this head's first l, m, lse
  const int o_columns = round_up(shape.head_dim, 4), out_columns = round_up(shape.head_dim, CHUNK_ELEMENTS);
  const int warp = warp_id(), g = lane_id() / 4, t = lane_id() % 4;

  const Tile<BC, HEAD_DIM> k_tile{sram_base()};
  const Tile<BC, HEAD_DIM> v_tile{k_tile.base + k_tile.BYTES};
  const Tile<BR, HEAD_DIM> q_tile{v_tile.base + v_tile.BYTES};
  auto partial_o = [&](int w) { return PartialO{q_tile.base + q_tile.BYTES + w * PartialO::BYTES}; };
  auto row_max = [&](int w, int row) { return partial_o(WARPS).base + (w * BR + row) * 4; };
  auto row_sum = [&](int w, int row) { return row_max(WARPS, 0) + (w * BR + row) * 4; };
  auto coefficients = [&](int row) { return row_sum(WARPS, 0) + row * 8; };
  name_sram("k", k_tile.base, k_tile.BYTES);
  name_sram("v", v_tile.base, v_tile.BYTES);
  name_sram("q", q_tile.base, q_tile.BYTES);
  name_sram("partial_o", partial_o(0).base, WARPS * PartialO::BYTES);
  name_sram("row_max", row_max(0, 0), WARPS * BR * 4);
  name_sram("row_sum", row_sum(0, 0), WARPS * BR * 4);
  name_sram("a+b", coefficients(0), BR * 8);  // a row's two factors side by side

  // step: init
  for (int row = warp; row < shape.len_q; row += WARPS)
    for (int column = 4 * lane_id(); column < o_columns; column += 128)
      store_global(row_address(o, batch, head, row) + column * 4, make_float4(0, 0, 0, 0));
#pragma unroll 1  // else a warp stores in two parts where its lanes have different numbers of rows: more sectors
  for (int row = threadIdx.x; row < shape.len_q; row += THREADS) {
    store_global(l + statistics + row, 0.f);
    store_global(m + statistics + row, -INF);
  }

  for (int j = 0; j < key_tiles; ++j) {
    // step: load_k
    const int keys = shape.len_kv - j * BC;
    load_tile<THREADS>(k_tile, row_address(k, batch, kv_head(shape, head), j * BC), k.row, keys, row_bytes(shape));

    // step: load_v
    load_tile<THREADS>(v_tile, row_address(v, batch, kv_head(shape, head), j * BC), v.row, keys, row_bytes(shape));

    for (int i = 0; i < row_tiles; ++i) {
      const int rows = shape.len_q - i * BR;

      // step: load_q
      load_tile<THREADS>(q_tile, row_address(q, batch, head, i * BR), q.row, rows, row_bytes(shape));
      copy_commit();
      copy_wait<0>();
      barrier();

      // step: scores
      float p[ROW_FRAGMENTS][WARP_KEYS / 8][4] = {};  // S, then P
#pragma unroll 4
      for (int d = 0; d < HEAD_DIM; d += K_STEP) {
        FragmentB b[WARP_KEYS / 16];
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 16; ++n) b[n] = load_b_rows(k_tile, warp * WARP_KEYS + 16 * n, d);
#pragma unroll
        for (int f = 0; f < ROW_FRAGMENTS; ++f) {
          FragmentA a = load_a(q_tile, 16 * f, d);
#pragma unroll
          for (int n = 0; n < WARP_KEYS / 16; ++n) mma(p[f][2 * n], p[f][2 * n + 1], a, b[n]);
        }
      }

      // step: mask
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) {
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[f][n][e] *= shape.scale;
        mask_scores(p[f], shape, i * BR + 16 * f + g, j * BC + warp * WARP_KEYS, 2 * t);
      }

      // step: row_max
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float top = -INF;
#pragma unroll
          for (int n = 0; n < WARP_KEYS / 8; ++n) top = fmaxf(top, fmaxf(p[f][n][2 * half], p[f][n][2 * half + 1]));
          top = quad_max(top);
          if (t == 0) store_shared(row_max(warp, 16 * f + 8 * half + g), top);
        }
      barrier();
      float m_tile[ROW_FRAGMENTS][2];
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m_tile[f][half] = -INF;
#pragma unroll
          for (int w = 0; w < WARPS; ++w)
            m_tile[f][half] = fmaxf(m_tile[f][half], load_shared<float>(row_max(w, 16 * f + 8 * half + g)));
        }

      // step: exp
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[f][n][e] = exp_approx(p[f][n][e] - finite(m_tile[f][e / 2]));

      // step: row_sum
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = 0;
#pragma unroll
          for (int n = 0; n < WARP_KEYS / 8; ++n) sum += p[f][n][2 * half] + p[f][n][2 * half + 1];
          sum = quad_sum(sum);
          if (t == 0) store_shared(row_sum(warp, 16 * f + 8 * half + g), sum);
        }
      barrier();

      // step: stats
      for (int row = threadIdx.x; row < BR; row += THREADS) {
        const long long place = statistics + i * BR + row;
        float top = -INF, sum = 0, m_old = -INF, l_old = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          top = fmaxf(top, load_shared<float>(row_max(w, row)));
          sum += load_shared<float>(row_sum(w, row));
        }
        if (row < rows) {
          m_old = load_global<float>(m + place);
          l_old = load_global<float>(l + place);
        }
        const float m_new = fmaxf(m_old, top), base = finite(m_new);
        const float old_factor = exp_approx(m_old - base), new_factor = exp_approx(top - base);
        const float l_new = old_factor * l_old + new_factor * sum;
        const float divisor = l_new > 0 ? l_new : 1;
        if (row < rows) {
          store_global(l + place, l_new);
          store_global(m + place, m_new);
          if (lse && j == key_tiles - 1) store_global(lse + place, m_new + log_approx(l_new));
        }
        // divided exactly: O is divided anew at every j, and errors would add up
        store_shared(coefficients(row), make_float2(l_old * old_factor / divisor, new_factor / divisor));
      }

      for (int chunk = 0; chunk < HEAD_DIM; chunk += CHUNK_COLUMNS) {
        const int width = min(CHUNK_COLUMNS, HEAD_DIM - chunk);

        // step: output
        for (int column = 0; column < width; column += 16) {
          float pv[ROW_FRAGMENTS][2][4] = {};
#pragma unroll
          for (int key = 0; key < WARP_KEYS; key += K_STEP) {
            FragmentB b = load_b_columns(v_tile, warp * WARP_KEYS + key, chunk + column);
#pragma unroll
            for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(pv[f][0], pv[f][1], operand_a(p[f], key), b);
          }
#pragma unroll
          for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int sram_chunk = column / 4 + 2 * n + t / 2;  // 16 bytes: four floats
                store_shared(partial_o(warp).at(16 * f + 8 * half + g, sram_chunk) + t % 2 * 8,
                             make_float2(pv[f][n][2 * half], pv[f][n][2 * half + 1]));
              }
        }
        barrier();

        // step: update_o
        const int column = chunk + 2 * lane_id();  // and the next one
        if (2 * lane_id() < width) {
          for (int first = warp * UPDATE_ROWS; first < (warp + 1) * UPDATE_ROWS; first += UPDATE_BATCH) {
            float2 o_old[UPDATE_BATCH];
#pragma unroll
            for (int r = 0; r < UPDATE_BATCH; ++r) {
              o_old[r] = make_float2(0, 0);
              if (first + r < rows && column < o_columns)
                o_old[r] = load_global<float2>(row_address(o, batch, head, i * BR + first + r) + column * 4);
            }
#pragma unroll
            for (int r = 0; r < UPDATE_BATCH; ++r) {
              const int row = first + r;
              const float2 ab = load_shared<float2>(coefficients(row));
              float2 sum = make_float2(0, 0);
#pragma unroll
              for (int w = 0; w < WARPS; ++w) {
                float2 pv = load_shared<float2>(partial_o(w).at(row, lane_id() / 2) + lane_id() % 2 * 8);
                sum.x += pv.x, sum.y += pv.y;
              }
              const float2 o_new = make_float2(ab.x * o_old[r].x + ab.y * sum.x, ab.x * o_old[r].y + ab.y * sum.y);
              if (row < rows && j == key_tiles - 1 && column < out_columns)
                store_elements(row_address(out, batch, head, i * BR + row) + column * ELEMENT_BYTES, o_new);
              if (row < rows && j < key_tiles - 1 && column < o_columns)
                store_global(row_address(o, batch, head, i * BR + row) + column * 4, o_new);
            }
          }
        }
        barrier();
      }
    }
  }
}
