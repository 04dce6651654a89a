// What the rungs below flash_decoding share: which heads a block has, and what its only warp does with 16 rows and a tile of keys.
#pragma once

#include "mma.cuh"
#include "params.cuh"

static_assert(FL_DTYPE != 0 && WARPS == 1 && BR == 16, "one warp, whose 16 rows are those of a product of the tensor cores");
static_assert(BC % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");

constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;  // of 8 columns
using QTile = Tile<BR, HEAD_DIM>;
using KVTile = Tile<BC, HEAD_DIM>;

// A block's SRAM: its queries, and two rings of STAGES tiles.
struct Sram {
  QTile q{sram_base()};

  DEVICE Sram() {
    name_sram("q", q.base, QTile::BYTES);
    name_sram("k", k(0).base, STAGES * KVTile::BYTES);
    name_sram("v", v(0).base, STAGES * KVTile::BYTES);
  }

  DEVICE KVTile k(int j) const { return {q.base + QTile::BYTES + j % STAGES * KVTile::BYTES}; }
  DEVICE KVTile v(int j) const { return {k(j).base + STAGES * KVTile::BYTES}; }
};

// The rows of a block: up to BR of the query heads that share a KV head. Of one query, they lie one behind the other.
struct Heads {
  int batch, kv_head, first, rows;

  // `place` is the block's number among the row tiles of all KV heads.
  DEVICE Heads(const Shape& shape, int place) {
    const int group = shape.heads / shape.kv_heads, row_tiles = ceil_div(group, BR), first_row = place % row_tiles * BR;
    batch = place / row_tiles / shape.kv_heads, kv_head = place / row_tiles % shape.kv_heads;
    first = kv_head * group + first_row, rows = min(BR, group - first_row);
  }
};

// S = c Q Kᵀ. With c = scale · log2(e), exp(S - m) is a power of two.
DEVICE void multiply_qk(float (&s)[S_FRAGMENTS][4], QTile q, KVTile k, float c) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += K_STEP) {
    const FragmentA a = load_a(q, 0, d);
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; n += 2) mma(s[n], s[n + 1], a, load_b_rows(k, 8 * n, d));
  }
#pragma unroll
  for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] *= c;
}

// Hides the columns of S from `keys` on: there are no such keys. A lane has columns 2t and 2t + 1 of each fragment (mma.cuh).
DEVICE void hide_beyond(float (&s)[S_FRAGMENTS][4], int keys) {
#pragma unroll
  for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (8 * n + 2 * (lane_id() % 4) + e % 2 >= keys) s[n][e] = -INF;
}

// The online softmax of a lane's two rows: their maxima so far, and this lane's parts of their sums. LOWEST serves as -INF: m - m is
// 0, not NaN.
struct Softmax {
  float m[2] = {LOWEST, LOWEST}, l[2] = {0, 0};

  // m becomes the maximum so far. What was summed up before has to be multiplied by alpha.
  DEVICE void raise(const float (&s)[S_FRAGMENTS][4], float (&alpha)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = LOWEST;
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(m[half], quad_max(top));
      alpha[half] = exp2_approx(m[half] - top);
      m[half] = top, l[half] *= alpha[half];
    }
  }

  // S becomes P, and l grows by its sum.
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4]) {
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) l[e / 2] += s[n][e] = exp2_approx(s[n][e] - m[e / 2]);
  }
};

DEVICE void rescale(float (&o)[O_FRAGMENTS][4], const float (&alpha)[2]) {
#pragma unroll
  for (int n = 0; n < O_FRAGMENTS; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
}

// O += P V. P is rounded to the storage dtype.
DEVICE void multiply_pv(float (&o)[O_FRAGMENTS][4], const float (&p)[S_FRAGMENTS][4], KVTile v) {
#pragma unroll
  for (int key = 0; key < BC; key += K_STEP) {
    const FragmentA a = operand_a(p, key);
#pragma unroll
    for (int n = 0; n < O_FRAGMENTS; n += 2) mma(o[n], o[n + 1], a, load_b_columns(v, key, 8 * n));
  }
}

// The first `columns` of an accumulator's row in HBM, in float32: row g if `half` is 0, row g + 8 if it is 1 (mma.cuh). All lanes call
// it; those whose row isn't there pass 0 columns.
DEVICE void store_part(float* row, const float (&o)[O_FRAGMENTS][4], int half, int columns) {
#pragma unroll
  for (int n = 0; n < O_FRAGMENTS; ++n) {
    const int column = 8 * n + 2 * (lane_id() % 4);
    lanes_meet();
    if (column < columns) store_global(row + column, make_float2(o[n][2 * half], o[n][2 * half + 1]));
  }
}
