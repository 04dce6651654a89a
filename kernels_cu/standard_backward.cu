// Standard attention, backward: Algorithm 3 of FlashAttention (arXiv 2205.14135), with P, dP and dS in HBM. A first launch computes
// P again, and five launches follow: P = exp(scale · Q Kᵀ - LSE), dV = Pᵀ dO, dP = dO Vᵀ, dS = P (dP - D), dQ = scale · dS K,
// dK = scale · dSᵀ Q.
//
// q, out, dout, dq: (batch, heads, len_q, head_dim); k, v, dk, dv: (batch, kv_heads, len_kv, head_dim), in the storage dtype;
// p and dp float32, ds in the storage dtype: (batch, heads, len_q, len_kv); lse, dlse: (batch, heads, len_q) float32.
// Rows of all tensors are padded to 16 bytes. Tiles: BR queries x BC keys.
#include "elements.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "scores.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = BR / WARPS, ROW_FRAGMENTS = WARP_ROWS / 16;  // in some launches the warps split the rows of a tile,
constexpr int WARP_KEYS = BC / WARPS, KEY_FRAGMENTS = WARP_KEYS / 16;  // in others its keys
constexpr int DS_ROWS = 4;                                             // of a block of the launch of dS: one a warp
constexpr int LANE_COLUMNS = 4, WARP_COLUMNS = 32 * LANE_COLUMNS;      // of P and dP, which a lane and a warp read at a time

using QTile = Tile<BR, HEAD_DIM>;
using KVTile = Tile<BC, HEAD_DIM>;
using PTile = Tile<BR, BC>;

// A tile of P or dP: which, and this warp's rows of it.
struct Square {
  int batch, head, first_row, first_key, warp_row;

  DEVICE explicit Square(const Shape& shape) {
    const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = ceil_div(shape.len_kv, BC);
    const int flat_head = blockIdx.x / key_tiles / row_tiles;
    batch = flat_head / shape.heads, head = flat_head % shape.heads;
    first_row = blockIdx.x / key_tiles % row_tiles * BR, first_key = blockIdx.x % key_tiles * BC;
    warp_row = warp_id() * WARP_ROWS;
  }

  // X Yᵀ for this warp's rows.
  DEVICE void multiply(float (&c)[ROW_FRAGMENTS][BC / 8][4], QTile x, KVTile y) const {
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a(x, warp_row + 16 * f, d);
#pragma unroll
      for (int n = 0; n < BC / 8; n += 2) {
        const FragmentB b = load_b_rows(y, 8 * n, d);
#pragma unroll
        for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(c[f][n], c[f][n + 1], a[f], b);
      }
    }
  }

  // This warp's rows to HBM, in float32.
  DEVICE void store(const Tensor& to, const Shape& shape, const float (&c)[ROW_FRAGMENTS][BC / 8][4]) const {
    const int padded_keys = round_up(shape.len_kv, LANE_COLUMNS);
#pragma unroll
    for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lanes_meet();
        const int row = first_row + warp_row + 16 * f + 8 * half + lane_id() / 4;
        char* to_row = row_address(to, batch, head, row);
#pragma unroll
        for (int n = 0; n < BC / 8; ++n) {
          const int key = first_key + 8 * n + 2 * (lane_id() % 4);
          if (row < shape.len_q && key < padded_keys)
            store_global(to_row + key * 4LL, make_float2(c[f][n][2 * half], c[f][n][2 * half + 1]));
        }
      }
  }
};

// Block x = (head · row tiles + i) · key tiles + j computes P_ij; its warps split the rows and each reads all of K_j.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_p(const Tensor q, const Tensor k, const float* lse, const Tensor p, const Shape shape) {
  const Square here(shape);
  const QTile q_tile{sram_base()};
  const KVTile k_tile{q_tile.base + QTile::BYTES};
  name_sram("q", q_tile.base, QTile::BYTES);
  name_sram("k", k_tile.base, KVTile::BYTES);

  // step: load_q
  load_tile<THREADS>(q_tile, row_address(q, here.batch, here.head, here.first_row), q.row, shape.len_q - here.first_row,
                     row_bytes(shape));
  const long long statistics = (static_cast<long long>(here.batch) * shape.heads + here.head) * shape.len_q;
  float l[ROW_FRAGMENTS][2];
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = here.first_row + here.warp_row + 16 * f + 8 * half + lane_id() / 4;
      l[f][half] = INF;
      lanes_meet();
      if (row < shape.len_q) l[f][half] = load_global<float>(lse + statistics + row);
      l[f][half] = l[f][half] == -INF ? INF : l[f][half] * LOG2E;  // an empty row: P = 0
    }

  // step: load_k
  load_tile<THREADS>(k_tile, row_address(k, here.batch, kv_head(shape, here.head), here.first_key), k.row,
                     shape.len_kv - here.first_key, row_bytes(shape));
  copy_commit();
  copy_wait<0>();
  barrier();

  // step: scores
  float s[ROW_FRAGMENTS][BC / 8][4] = {};
  here.multiply(s, q_tile, k_tile);

  // step: mask
  const Scores scores(shape);
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f) {
    scores.flip(s[f]);
    mask_scores(s[f], shape, here.first_row + here.warp_row + 16 * f + lane_id() / 4, here.first_key, 2 * (lane_id() % 4));
  }

  // step: exp
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
    for (int n = 0; n < BC / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[f][n][e] = exp2_approx(scores.c * s[f][n][e] - l[f][e / 2]);

  // step: store_p
  here.store(p, shape, s);
}

// What the sums of dQ and dK are multiplied with: computed at the end, or it would take a register all the time.
DEVICE float sum_factor(const Shape& shape) { return of_kept(shape.scale, DROPOUT ? opaque(shape.kept) : 256); }

// In a launch block x = KV head · key tiles + j sums up Xᵀ Y for key tile j. This says which KV head, which keys, and which keys
// are this warp's.
struct Columns {
  int batch, kv_head, first_key, warp_key;

  DEVICE explicit Columns(const Shape& shape) {
    const int key_tiles = ceil_div(shape.len_kv, BC), flat_head = blockIdx.x / key_tiles;
    batch = flat_head / shape.kv_heads, kv_head = flat_head % shape.kv_heads;
    first_key = blockIdx.x % key_tiles * BC, warp_key = warp_id() * WARP_KEYS;
  }

  // c += Xᵀ Y for this warp's keys: X is a tile of P or dS, Y has the same queries.
  DEVICE void multiply(float (&c)[KEY_FRAGMENTS][HEAD_DIM / 8][4], PTile x, QTile y) const {
#pragma unroll(FL_DTYPE == 0 ? 1 : 4)
    for (int query = 0; query < BR; query += K_STEP) {
      FragmentA a[KEY_FRAGMENTS];
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) a[f] = load_a_columns(x, warp_key + 16 * f, query);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
        const FragmentB b = load_b_columns(y, query, 8 * n);
#pragma unroll
        for (int f = 0; f < KEY_FRAGMENTS; ++f) mma(c[f][n], c[f][n + 1], a[f], b);
      }
    }
  }

  DEVICE void store(const Tensor& to, const Shape& shape, const float (&c)[KEY_FRAGMENTS][HEAD_DIM / 8][4], float factor) const {
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + warp_key + 16 * f + 8 * half + lane_id() / 4;
        store_row(row_address(to, batch, kv_head, key), c[f], half, factor, key < shape.len_kv ? padded_row_bytes(shape) : 0);
      }
  }
};

// A tile of P, which is float32 in HBM, rounded to the storage dtype, without what is dropped. `first_row` and `first_key` are
// the tile's.
DEVICE void load_rounded(PTile tile, const char* rows, long long stride, int rows_left, int keys_left, const Dropout& dropout,
                         int first_row, int first_key) {
  for (int i = threadIdx.x; i < BR * BC / 4; i += THREADS) {
    lanes_meet();
    const int row = i / (BC / 4), column = i % (BC / 4) * 4;
    float4 x = make_float4(0, 0, 0, 0);
    if (row < rows_left && column < keys_left) x = load_global<float4>(rows + row * stride + column * 4);
    if constexpr (DROPOUT) x = dropout.dropped(x, first_row + row, first_key + column);
    const unsigned to = tile.at(row, column / CHUNK_ELEMENTS) + column % CHUNK_ELEMENTS * ELEMENT_BYTES;
#if FL_DTYPE == 0
    store_shared(to, x);
#else
    store_shared(to, make_uint2(pack(x.x, x.y), pack(x.z, x.w)));
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_dv(const Tensor p, const Tensor dout, const Tensor dv, const long long* rng_state, const Shape shape) {
  const Columns here(shape);
  const int group = shape.heads / shape.kv_heads, row_tiles = ceil_div(shape.len_q, BR);
  const PTile p_tile{sram_base()};
  const QTile do_tile{p_tile.base + PTile::BYTES};
  name_sram("p", p_tile.base, PTile::BYTES);
  name_sram("dout", do_tile.base, QTile::BYTES);

  // step: load_p (seed and offset)
  const Dropout dropout(rng_state, shape.kept);

  float sum[KEY_FRAGMENTS][HEAD_DIM / 8][4] = {};
  for (int visit = 0; visit < group * row_tiles; ++visit) {
    const int head = here.kv_head * group + visit / row_tiles, first_row = visit % row_tiles * BR;
    barrier();  // the previous tiles are read

    // step: load_p
    load_rounded(p_tile, row_address(p, here.batch, head, first_row) + here.first_key * 4LL, p.row, shape.len_q - first_row,
                 shape.len_kv - here.first_key, dropout.of_head(here.batch * shape.heads + head), first_row, here.first_key);

    // step: load_do
    load_tile<THREADS>(do_tile, row_address(dout, here.batch, head, first_row), dout.row, shape.len_q - first_row,
                       row_bytes(shape));
    copy_commit();
    copy_wait<0>();
    barrier();

    // step: dv
    here.multiply(sum, p_tile, do_tile);
  }

  // step: store_dv
  here.store(dv, shape, sum, of_kept(1, shape.kept));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_dp(const Tensor dout, const Tensor v, const Tensor dp, const Shape shape) {
  const Square here(shape);
  const QTile do_tile{sram_base()};
  const KVTile v_tile{do_tile.base + QTile::BYTES};
  name_sram("dout", do_tile.base, QTile::BYTES);
  name_sram("v", v_tile.base, KVTile::BYTES);

  // step: load_do (for dP)
  load_tile<THREADS>(do_tile, row_address(dout, here.batch, here.head, here.first_row), dout.row,
                     shape.len_q - here.first_row, row_bytes(shape));

  // step: load_v
  load_tile<THREADS>(v_tile, row_address(v, here.batch, kv_head(shape, here.head), here.first_key), v.row,
                     shape.len_kv - here.first_key, row_bytes(shape));
  copy_commit();
  copy_wait<0>();
  barrier();

  // step: dp
  float product[ROW_FRAGMENTS][BC / 8][4] = {};
  here.multiply(product, do_tile, v_tile);

  // step: store_dp
  here.store(dp, shape, product);
}

// One warp owns a row.
extern "C" __global__ void __launch_bounds__(DS_ROWS * 32)
standard_backward_ds(const Tensor out, const Tensor dout, const float* dlse, const Tensor p, const Tensor dp, const Tensor ds,
                     const long long* rng_state, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, DS_ROWS);
  const int flat_head = blockIdx.x / row_tiles, row = blockIdx.x % row_tiles * DS_ROWS + warp_id();
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads;

  // step: store_ds (seed and offset)
  const Dropout dropout = Dropout(rng_state, shape.kept).of_head(flat_head);
  if (row >= shape.len_q) return;

  // step: delta
  float delta = 0;
#pragma unroll
  for (int column = 0; column < HEAD_DIM; column += 32 * CHUNK_ELEMENTS) {
    const int own = column + lane_id() * CHUNK_ELEMENTS;
    lanes_meet();
    if (own < shape.head_dim)
      delta += dot(load_global<uint4>(row_address(dout, batch, head, row) + own * ELEMENT_BYTES),
                   load_global<uint4>(row_address(out, batch, head, row) + own * ELEMENT_BYTES), shape.head_dim - own);
  }
  delta = less_dlse(warp_sum(delta), dlse, static_cast<long long>(flat_head) * shape.len_q + row);
  delta = kept_part(delta, shape.kept);

  // step: store_ds
  for (int key = lane_id() * LANE_COLUMNS; key < round_up(shape.len_kv, CHUNK_ELEMENTS); key += WARP_COLUMNS) {
    float4 x = make_float4(0, 0, 0, 0), y = x;  // the padding of dS may reach past that of P
    if (key < shape.len_kv) {
      x = load_global<float4>(row_address(p, batch, head, row) + key * 4LL);
      y = load_global<float4>(row_address(dp, batch, head, row) + key * 4LL);
    }
    if constexpr (DROPOUT) y = dropout.dropped(y, row, key);
    store_elements(row_address(ds, batch, head, row) + static_cast<long long>(key) * ELEMENT_BYTES,
                   make_float4(x.x * (y.x - delta), x.y * (y.y - delta), x.z * (y.z - delta), x.w * (y.w - delta)));
  }
}

// Block x = head · row tiles + i computes dQ_i over all key tiles; its warps split the rows and each reads all of K_j.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_dq(const Tensor ds, const Tensor k, const Tensor dq, const Shape shape) {
  const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = ceil_div(shape.len_kv, BC);
  const int flat_head = blockIdx.x / row_tiles, first_row = blockIdx.x % row_tiles * BR;
  const int batch = flat_head / shape.heads, head = flat_head % shape.heads, warp_row = warp_id() * WARP_ROWS;
  const int columns = round_up(shape.len_kv, CHUNK_ELEMENTS);
  const PTile ds_tile{sram_base()};
  const KVTile k_tile{ds_tile.base + PTile::BYTES};
  name_sram("ds", ds_tile.base, PTile::BYTES);
  name_sram("k", k_tile.base, KVTile::BYTES);

  float sum[ROW_FRAGMENTS][HEAD_DIM / 8][4] = {};
  for (int j = 0; j < key_tiles; ++j) {
    barrier();  // the previous tiles are read

    // step: load_ds
    load_tile<THREADS>(ds_tile, row_address(ds, batch, head, first_row) + static_cast<long long>(j) * PTile::ROW_BYTES, ds.row,
                       shape.len_q - first_row, min(columns - j * BC, BC) * ELEMENT_BYTES);

    // step: load_k (for dQ)
    load_tile<THREADS>(k_tile, row_address(k, batch, kv_head(shape, head), j * BC), k.row, shape.len_kv - j * BC,
                       row_bytes(shape));
    copy_commit();
    copy_wait<0>();
    barrier();

    // step: dq
#pragma unroll(FL_DTYPE == 0 ? 2 : 4)
    for (int key = 0; key < BC; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a(ds_tile, warp_row + 16 * f, key);
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n += 2) {
        if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
        const FragmentB b = load_b_columns(k_tile, key, 8 * n);
#pragma unroll
        for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(sum[f][n], sum[f][n + 1], a[f], b);
      }
    }
  }

  // step: store_dq
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row + 16 * f + 8 * half + lane_id() / 4;
      store_row(row_address(dq, batch, head, row), sum[f], half, sum_factor(shape),
                row < shape.len_q ? padded_row_bytes(shape) : 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
standard_backward_dk(const Tensor ds, const Tensor q, const Tensor dk, const Shape shape) {
  const Columns here(shape);
  const int group = shape.heads / shape.kv_heads, row_tiles = ceil_div(shape.len_q, BR);
  const int columns = round_up(shape.len_kv, CHUNK_ELEMENTS);
  const PTile ds_tile{sram_base()};
  const QTile q_tile{ds_tile.base + PTile::BYTES};
  name_sram("ds", ds_tile.base, PTile::BYTES);
  name_sram("q", q_tile.base, QTile::BYTES);

  float sum[KEY_FRAGMENTS][HEAD_DIM / 8][4] = {};
  for (int visit = 0; visit < group * row_tiles; ++visit) {
    const int head = here.kv_head * group + visit / row_tiles, first_row = visit % row_tiles * BR;
    barrier();  // the previous tiles are read

    // step: load_ds (for dK)
    load_tile<THREADS>(ds_tile, row_address(ds, here.batch, head, first_row) + here.first_key * static_cast<long long>(ELEMENT_BYTES),
                       ds.row, shape.len_q - first_row, min(columns - here.first_key, BC) * ELEMENT_BYTES);

    // step: load_q (for dK)
    load_tile<THREADS>(q_tile, row_address(q, here.batch, head, first_row), q.row, shape.len_q - first_row, row_bytes(shape));
    copy_commit();
    copy_wait<0>();
    barrier();

    // step: dk
    here.multiply(sum, ds_tile, q_tile);
  }

  // step: store_dk
  here.store(dk, shape, sum, sum_factor(shape));
}
