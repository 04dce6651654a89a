// What flash_decoding.cu has in SRAM, and where its warps find their keys: in pages, or one behind the other.
#pragma once

#include "cache.cuh"
#include "partial.cuh"

constexpr int THREADS = WARPS * 32;  // that compute; as many again merge
constexpr int WARP_KEYS = BC / WARPS;
constexpr int KEY_FRAGMENTS = WARP_KEYS / 16, QUERY_FRAGMENTS = BR / 8, O_FRAGMENTS = HEAD_DIM / 16;
constexpr int JOINING = 1, FREE = 2, FILLED = 3;  // named barriers
static_assert(BR % 8 == 0 && WARP_KEYS % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");

using QTile = Tile<BR, HEAD_DIM>;
using WarpTile = CacheTile<WARP_KEYS, HEAD_DIM>;  // a warp's keys of a tile
constexpr int Q_SLOTS = STAGES + 1;  // a warp may be STAGES units ahead of another that still reads its queries
constexpr int RING_BYTES = STAGES * WARPS * WarpTile::BYTES;  // of K, and of V

// The outputs of the warps in SRAM, float32. Chunks of 32 bytes change places by the row, against bank conflicts: lanes write eight
// columns of every other row at once.
struct Outputs {
  unsigned base;
  static constexpr int BYTES = BR * HEAD_DIM * 4;  // of a warp
  DEVICE unsigned at(int warp, int row, int column) const {
    const int turned = HEAD_DIM % 32 == 0 ? column ^ row / 2 % 4 * 8 : column ^ row / 2 % 2 * 8;
    return base + warp * BYTES + (row * HEAD_DIM + turned) * 4;
  }
};

constexpr int TOLD = STAGES <= 5 ? 8 : 16;  // units that a warp is ahead of itself, a power of two

// Where the warps tell themselves their units: four numbers of each unit, and where its keys begin.
struct ToldUnits {
  static constexpr int UNIT_BYTES = WARPS * TOLD * 16, BYTES = PAGED ? UNIT_BYTES : RAGGED ? UNIT_BYTES + WARPS * TOLD * 4 : 0;

  unsigned base;

  DEVICE unsigned at(int number) const { return base + (warp_id() * TOLD + number % TOLD) * 16; }
  DEVICE unsigned first_key_at(int number) const { return base + UNIT_BYTES + (warp_id() * TOLD + number % TOLD) * 4; }
};

struct Sram {
  unsigned base = sram_base();

  DEVICE QTile q(int slot) const { return {base + slot * QTile::BYTES}; }
  DEVICE WarpTile k(int stage) const { return {q(Q_SLOTS).base + (stage * WARPS + warp_id()) * WarpTile::BYTES}; }
  DEVICE WarpTile v(int stage) const { return {k(stage).base + RING_BYTES}; }
  DEVICE Outputs o() const { return {q(Q_SLOTS).base + 2 * RING_BYTES}; }
  DEVICE unsigned m_of(int warp, int row) const { return o().base + WARPS * Outputs::BYTES + (warp * BR + row) * 4; }
  DEVICE unsigned l_of(int warp, int row) const { return m_of(WARPS + warp, row); }
  DEVICE unsigned m(int row) const { return l_of(WARPS, row); }
  // The scales of this warp's keys, and of its values; the scales of the channels of K that queries are multiplied with.
  static constexpr int SCALE_BYTES = STAGES * BC * 4, OF_K = K_SCALE == TOKEN ? SCALE_BYTES : 0, OF_V = V_SCALE == TOKEN ? SCALE_BYTES : 0;
  DEVICE unsigned k_scale(int stage) const { return m(BR) + (stage * BC + warp_id() * WARP_KEYS) * 4; }
  DEVICE unsigned v_scale(int stage) const { return k_scale(stage) + OF_K; }
  static constexpr int CHANNEL_BYTES = K_SCALE == CHANNEL ? Q_SLOTS * HEAD_DIM * 4 : 0;
  DEVICE unsigned channels(int slot) const { return m(BR) + OF_V + slot * HEAD_DIM * 4; }
  DEVICE ToldUnits told() const { return {m(BR) + OF_K + OF_V + CHANNEL_BYTES}; }

  DEVICE void name() const {
    name_sram("q", base, Q_SLOTS * QTile::BYTES);
    name_sram("k", q(Q_SLOTS).base, RING_BYTES);
    name_sram("v", q(Q_SLOTS).base + RING_BYTES, RING_BYTES);
    name_sram("o_warps", o().base, WARPS * Outputs::BYTES);
    name_sram("m_warps", m_of(0, 0), WARPS * BR * 4);
    name_sram("l_warps", l_of(0, 0), WARPS * BR * 4);
    name_sram("m", m(0), BR * 4);
    if (K_SCALE == TOKEN) name_sram("k_scale", m(BR), OF_K);
    if (V_SCALE == TOKEN) name_sram("v_scale", m(BR) + OF_K, OF_V);
    if (K_SCALE == CHANNEL) name_sram("k_scale", channels(0), CHANNEL_BYTES);
    if (PAGED || RAGGED) name_sram("units", told().base, ToldUnits::BYTES);
  }
};

// A tile of queries as operands. With Q_IN_REGISTERS all of them stay there. Else those of a step of the product are read into `here`.
using QueryOperands = QueryFragment[QUERY_FRAGMENTS];
#if Q_IN_REGISTERS
struct Queries {
  QueryOperands all[HEAD_DIM / K_STEP];
  const QueryFactors<QUERY_FRAGMENTS> factors;

  DEVICE Queries(QTile tile, unsigned channels, float c) : factors(tile, channels, c, all) {}
  DEVICE const QueryOperands& at(int step, QueryOperands&) const { return all[step]; }
};
#else
struct Queries {
  const QTile tile;
  const unsigned channels;
  const QueryFactors<QUERY_FRAGMENTS> factors;

  DEVICE Queries(QTile tile, unsigned channels, float c) : tile(tile), channels(channels), factors(tile, channels, c) {}
  DEVICE const QueryOperands& at(int step, QueryOperands& here) const {
    load_queries(here, tile, step * K_STEP, channels, factors);
    return here;
  }
};
#endif

// S becomes its tanh. The factors bring queries back to their own size, so they come first.
template <int M, int N>
DEVICE void cap(float (&s)[M][N][4], const QueryFactors<N>& factors) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] *= factors.c(n, e % 2);
    Tanh::apply(s[i], 1);
  }
}

// What the warps that compute have of row `row` of a chunk.
DEVICE Part of_all_warps(const Sram& sram, int row) {
  Part x;
  lanes_meet();
  x.m = load_shared<float>(sram.m(row)), x.l = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) x.l += load_shared<float>(sram.l_of(w, row));
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 128 * turn + 4 * lane_id();
    x.o[turn] = make_float4(0, 0, 0, 0);
    lanes_meet();
    if (column < HEAD_DIM)
#pragma unroll
      for (int w = 0; w < WARPS; ++w) x.o[turn] = plus(x.o[turn], load_shared<float4>(sram.o().at(w, row, column)));
  }
  return x;
}

#include "found_units.cuh"
#if PAGED
#include "keys_in_pages.cuh"
#else
#include "keys_in_rows.cuh"
#endif
