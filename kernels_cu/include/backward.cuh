// What one tile of keys and one of queries do to each other in a backward pass, S transposed: keys are rows.
//
// The warps form a grid of KEY_WARPS x ACROSS. For S and dP a warp has WARP_KEYS keys and every ACROSS-th 16 queries. For dV and
// dK it has the same keys, and for dQ its share of the queries, with every ACROSS-th 16 columns. Hence P and dS pass through SRAM.
#pragma once

#include "elements.cuh"
#include "mma.cuh"
#include "philox.cuh"
#include "scores.cuh"
#include "sum_tiles.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ACROSS = WARPS / KEY_WARPS;
constexpr int WARP_KEYS = BC / KEY_WARPS, WARP_ROWS = BR / KEY_WARPS;  // of S; of dQ
constexpr int KEY_FRAGMENTS = WARP_KEYS / 16, ROW_FRAGMENTS = WARP_ROWS / 16;
constexpr int QUERY_PAIRS = BR / 16 / ACROSS;                    // of S, pairs of fragments: 16 queries
constexpr int COLUMN_PAIRS = ceil_div(HEAD_DIM / 16, ACROSS);    // of dK, dV, dQ: 16 columns
constexpr int TURN = 16 * ACROSS;                                // columns that all warps across take together
constexpr int STATISTICS = ceil_div(16 * QUERY_PAIRS, 32);       // a lane's share of the LSE of a warp's queries
// Steps of the products over the head dim that the compiler unrolls. With more it reads ahead until registers spill.
constexpr int UNROLLED = FL_DTYPE == 0 || BR > 64 ? 1 : DROPOUT || RAGGED ? 2 : 8;
static_assert(BR % (16 * KEY_WARPS) == 0 && BC % (16 * KEY_WARPS) == 0 && BR % (16 * ACROSS) == 0 && HEAD_DIM % 16 == 0 &&
              WARPS % KEY_WARPS == 0 && (ACROSS == 1 || ACROSS == 2), "tiles are made of whole fragments");

using KVTile = Tile<BC, HEAD_DIM>;
using QTile = Tile<BR, HEAD_DIM>;
using PTile = Tile<BC, BR>;
using Transposed = float[KEY_FRAGMENTS][QUERY_PAIRS][2][4];  // keys x queries
using Gradient = float[KEY_FRAGMENTS][COLUMN_PAIRS][2][4];   // keys x columns
using QueryGradient = float[ROW_FRAGMENTS][COLUMN_PAIRS][2][4];

// Which warp this is: its first key and row within a tile, and its place across.
struct Warp {
  int key, row, across;

  DEVICE Warp() : key(warp_id() / ACROSS * WARP_KEYS), row(warp_id() / ACROSS * WARP_ROWS), across(warp_id() % ACROSS) {}

  // The query of a tile whose LSE and D this lane holds in register r. And is that query among the first `rows`?
  DEVICE int query(int r) const { return (lane_id() / 16 + 2 * r) * TURN + 16 * across + lane_id() % 16; }
  DEVICE bool holds(int r, int rows) const { return lane_id() + 32 * r < 16 * QUERY_PAIRS && query(r) < rows; }
};

// Has this warp columns in every turn? If the pairs of fragments don't divide, the last turn has none for the last warps. They then
// take another loop: instructions that a predicate turns off keep the tensor cores busy all the same, and the counters say so.
DEVICE bool has_all_turns(Warp warp) { return HEAD_DIM / 16 % ACROSS == 0 || warp.across == 0; }

// c += A Bᵀ for this warp's keys and queries: A has the block's keys as rows, B the queries of a tile.
DEVICE void multiply_by_queries(Transposed& c, KVTile a_tile, QTile b_tile, Warp warp) {
  const QTile own{b_tile.base + 16 * warp.across * QTile::ROW_BYTES};
#pragma unroll(UNROLLED)
  for (int d = 0; d < HEAD_DIM; d += K_STEP) {
    FragmentA a[KEY_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f) a[f] = load_a(a_tile, warp.key + 16 * f, d);
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m) {
      const FragmentB b = load_b_rows(own, m * TURN, d);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) mma(c[f][m][0], c[f][m][1], a[f], b);
    }
  }
}

// c += A B for this warp's keys and its columns in TURNS turns. A is P or dS, B has the queries of a tile as rows.
template <int TURNS>
DEVICE void multiply_by_columns(Gradient& c, PTile a_tile, QTile b_tile, Warp warp) {
#pragma unroll(FL_DTYPE == 0 ? 1 : BR / K_STEP)
  for (int query = 0; query < BR; query += K_STEP) {
    FragmentA a[KEY_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f) a[f] = load_a(a_tile, warp.key + 16 * f, query);
#pragma unroll
    for (int m = 0; m < TURNS; ++m) {
      if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
      const FragmentB b = load_b_columns(b_tile, query, m * TURN, 16 * warp.across);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) mma(c[f][m][0], c[f][m][1], a[f], b);
    }
  }
}
DEVICE void multiply_by_columns(Gradient& c, PTile a_tile, QTile b_tile, Warp warp) {
  if (has_all_turns(warp))
    multiply_by_columns<COLUMN_PAIRS>(c, a_tile, b_tile, warp);
  else
    multiply_by_columns<COLUMN_PAIRS - 1>(c, a_tile, b_tile, warp);
}

// A register holds the numbers of 32 of a warp's queries. This takes those of the two columns that the lane has in a fragment.
DEVICE void of_columns(float (&two)[2], const float (&numbers)[STATISTICS], int fragment) {
  const int query = 8 * fragment + 2 * (lane_id() % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e) two[e] = shuffle(numbers[8 * fragment / 32], query % 32 + e);
}

// The soft cap.
DEVICE void bend(Transposed& s, const Scores& scores, const Shape& shape) {
#pragma unroll
  for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m) scores.bend(s[f][m], shape, 0, 0, 0);
}

// Hides what the mask hides, and the keys beyond the last one. `keys_first` is the transposed problem.
DEVICE void mask_transposed(Transposed& s, const Scores& scores, const Shape& keys_first, Warp warp, int first_key, int first_query) {
#pragma unroll
  for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m) {
      const int key = first_key + warp.key + 16 * f + opaque(lane_id()) / 4;
      scores.flip(s[f][m]);
      mask_scores(s[f][m], keys_first, key, first_query + m * TURN + 16 * warp.across, 2 * (opaque(lane_id()) % 4));
      mask_rows(s[f][m], key, keys_first.len_q);
    }
}

// An LSE to the base 2. That of a row that sees no key becomes INF: its P is then 0, and not NaN.
DEVICE float lse_of(float natural) { return natural == -INF ? INF : natural * LOG2E; }

// Turns the sign of the weights that dropout drops, in the `m`-th pairs of fragments. P is no less than 0, so its sign is free to
// say so until dS is computed. `words` are those of two pairs: the first of the two fills them.
DEVICE void mark_dropped(Transposed& p, RandomWords (&words)[KEY_FRAGMENTS], int m, const Dropout& dropout, int first_key,
                         int first_query, Warp warp) {
  const int first = first_query / 16 + m * ACROSS + warp.across, second = m + 1 < QUERY_PAIRS ? first + ACROSS : first;
#pragma unroll
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if (m % 2 == 0) words[f] = dropout.words<true>((first_key + warp.key) / 16 + f, first, second);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!dropout.keeps<true>(words[f], m % 2 * 2 + n, e)) p[f][m][n][e] = -p[f][m][n][e];
  }
}

// Where the sign of P is turned, dP is 0, so dP - D is -D. After this P is as it was.
DEVICE void drop_gradient(Transposed& dp, Transposed& p, const float (&delta)[STATISTICS]) {
#pragma unroll
  for (int m = 0; m < QUERY_PAIRS; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float d[2];
      of_columns(d, delta, 2 * m + n);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (p[f][m][n][e] < 0) dp[f][m][n][e] = -d[e % 2];
          p[f][m][n][e] = fabsf(p[f][m][n][e]);
        }
    }
}

// S becomes P = exp(S - LSE), and its rounded values go to SRAM, without those that are dropped: `first_key` and `first_query` are
// those of the tile. Under a soft cap S is the tanh, and P becomes P (1 - S^2): only dS still needs it, and needs it so.
DEVICE void exponentials(Transposed& s, float c, const float (&lse)[STATISTICS], PTile p_tile, Warp warp, const Dropout& dropout,
                         int first_key, int first_query) {
  RandomWords words[KEY_FRAGMENTS];
#pragma unroll
  for (int m = 0; m < QUERY_PAIRS; ++m) {
    float slope[KEY_FRAGMENTS][2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float l[2];
      of_columns(l, lse, 2 * m + n);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float tanh = fmaxf(s[f][m][n][e], -1);  // not the -INF of a hidden score, for P is 0 there and 0 INF isn't
          if constexpr (SOFT_CAP) slope[f][n][e] = 1 - tanh * tanh;
          s[f][m][n][e] = exp2_approx(c * s[f][m][n][e] - l[e % 2]);
        }
    }
    if constexpr (DROPOUT) {
      mark_dropped(s, words, m, dropout, first_key, first_query, warp);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) {
        float kept[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) kept[n][e] = fmaxf(s[f][m][n][e], 0);
        store_fragments(p_tile, warp.key + 16 * f, m * TURN, 16 * warp.across, kept);
      }
    } else {
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) store_fragments(p_tile, warp.key + 16 * f, m * TURN, 16 * warp.across, s[f][m]);
    }
    if constexpr (SOFT_CAP)
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[f][m][n][e] *= slope[f][n][e];
  }
}

// -D, from which the sums of dP begin.
DEVICE void begin_below(Transposed& dp, const float (&delta)[STATISTICS]) {
#pragma unroll
  for (int m = 0; m < QUERY_PAIRS; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float d[2];
      of_columns(d, delta, 2 * m + n);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[f][m][n][e] = -d[e % 2];
    }
}

// dS = P (dP - D), which is all that is left of dP. Its rounded values go to SRAM.
DEVICE void scores_gradient(Transposed& dp, const Transposed& p, PTile ds_tile, Warp warp) {
#pragma unroll
  for (int m = 0; m < QUERY_PAIRS; ++m)
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[f][m][n][e] *= p[f][m][n][e];
      store_fragments(ds_tile, warp.key + 16 * f, m * TURN, 16 * warp.across, dp[f][m]);
    }
}

// dQ = dS K for this warp's queries and its columns in TURNS turns.
template <int TURNS>
DEVICE void multiply_for_queries(QueryGradient& dq, PTile ds_tile, KVTile k_tile, Warp warp) {
#pragma unroll(FL_DTYPE == 0 ? 1 : BC / K_STEP)
  for (int key = 0; key < BC; key += K_STEP) {
    FragmentA a[ROW_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a_columns(ds_tile, warp.row + 16 * f, key);
#pragma unroll
    for (int m = 0; m < TURNS; ++m) {
      if (FL_DTYPE == 0) warp_barrier();
      const FragmentB b = load_b_columns(k_tile, key, m * TURN, 16 * warp.across);
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(dq[f][m][0], dq[f][m][1], a[f], b);
    }
  }
}
DEVICE void multiply_for_queries(QueryGradient& dq, PTile ds_tile, KVTile k_tile, Warp warp) {
  if (has_all_turns(warp))
    multiply_for_queries<COLUMN_PAIRS>(dq, ds_tile, k_tile, warp);
  else
    multiply_for_queries<COLUMN_PAIRS - 1>(dq, ds_tile, k_tile, warp);
}

// Adds this warp's share of a tile's dQ to the sums. With IN_TURN the emulator checks that it is the block's turn.
template <bool IN_TURN = false>
DEVICE void add_gradient(float* dq_sum, int tile, const QueryGradient& dq, Warp warp) {
  float4* const first = SumTile<HEAD_DIM>(dq_sum, tile, warp.row).part(2 * warp.across);
#pragma unroll
  for (int f = 0; f < ROW_FRAGMENTS; ++f)
#pragma unroll
    for (int m = 0; m < COLUMN_PAIRS; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float (&part)[4] = dq[f][m][n];
        float4* const sum = first + 32 * ((f * HEAD_DIM + m * TURN) / 8 + n);
        if (m * TURN + 16 * warp.across >= HEAD_DIM) continue;  // of the last turn, if the pairs of fragments don't divide
        if constexpr (IN_TURN)
          add_in_turn(sum, make_float4(part[0], part[1], part[2], part[3]));
        else
          add_global(sum, make_float4(part[0], part[1], part[2], part[3]));
      }
}

// The rows of dK or dV from `first_key` on, times `factor`. `rows` is the address of that row.
DEVICE void store_gradient(char* rows, long long stride, const Shape& shape, int first_key, const Gradient& c, Warp warp, float factor) {
#pragma unroll
  for (int f = 0; f < KEY_FRAGMENTS; ++f) {
    if constexpr (PARTIAL) {
      const int row = warp.key + 16 * f + lane_id() % 2 * 8 + lane_id() / 4, begin = 16 * warp.across;
      const int columns = first_key + row < shape.len_kv ? round_up(shape.head_dim, 4) - begin : 0;
#pragma unroll
      for (int m = 0; m < COLUMN_PAIRS; ++m)
        store_float_row(rows + row * stride + (begin + m * TURN) * 4, c[f][m], factor, columns - m * TURN);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp.key + 16 * f + 8 * half + lane_id() / 4, begin = 16 * warp.across * ELEMENT_BYTES;
        const int bytes = first_key + row < shape.len_kv ? padded_row_bytes(shape) - begin : 0;
#pragma unroll
        for (int m = 0; m < COLUMN_PAIRS; ++m)
          store_row(rows + row * stride + begin + m * TURN * ELEMENT_BYTES, c[f][m], half, factor, bytes - m * TURN * ELEMENT_BYTES);
      }
    }
  }
}
