// What the backward passes for Hopper share: a warpgroup has 64 keys, and computes S and dP with keys as rows. Before it comes how many
// QUERIES they meet at a time.
#pragma once

#include "mbarrier.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "scores.cuh"
#include "sequences.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

#ifndef PARTS
#define PARTS 1  // in which blocks take the query heads of a group
#endif
#ifndef IN_TURN
#define IN_TURN 0  // do blocks add to dQ in the order of their key tiles?
#endif
#ifndef ORDERED
#define ORDERED 0  // are the key tiles of all sequences taken the longest first, and which are (longest_first.cuh)?
#endif

// Columns of whole panels, as TMA's boxes have them. Products go over HEAD_DIM columns, unless they say otherwise: those that pad it
// are zeros.
constexpr int COLUMNS = round_up(HEAD_DIM, 64);
constexpr int QUERY_STEPS = QUERIES / 16;

using QTile = PanelTile<QUERIES, COLUMNS>;
using Transposed = float[QUERIES / 8][4];  // 64 keys x queries
using Gradient = float[HEAD_DIM / 8][4];   // 64 keys x columns
static_assert(HEAD_DIM % 16 == 0, "whole steps of a product");

// One thread asks for a whole tile, panel by panel. `full` is told when the bytes have come.
template <class TileT>
DEVICE void load_tile(TileT tile, const TensorMap& map, int batch, int head, int first_row, unsigned full, unsigned long long hint) {
  mbarrier_arrive_expect(full, TileT::BYTES);
#pragma unroll
  for (int i = 0; i < TileT::PANELS; ++i)
    tma_load(tile.panel(i), map, batch, head, first_row, i * TileT::PANEL_COLUMNS, full, hint);
}

// A tile of queries of one of the group's heads, which is numbered among those of all batches. A block visits them from the first to
// the last. But blocks that take turns go from the last to the first. Under a causal mask all of them see the last queries. So they
// begin together, and no block waits while another walks a long way.
struct Visit {
  int head, i;

  DEVICE void advance(Keys tiles) {
    if constexpr (IN_TURN) {
      if (--i < tiles.first) ++head, i = tiles.last;
    } else {
      if (++i > tiles.last) ++head, i = tiles.first;
    }
  }
};

// Query heads that a block has: those that share a KV head, or a part of them.
DEVICE int members_of(const Shape& shape) { return shape.heads / shape.kv_heads / PARTS; }

// A key tile, and the tiles of queries that see it, of the heads before `end`: those that share the KV head, or a part of them. `end`
// is 0 if no key tile is left.
struct alignas(16) Work {
  int first_key, end;
  Keys tiles;

  DEVICE bool left(Visit at) const { return at.head < end; }
  DEVICE bool seen() const { return tiles.first <= tiles.last; }
  DEVICE Visit first(const Shape& shape) const { return {seen() ? end - members_of(shape) : end, IN_TURN ? tiles.last : tiles.first}; }
  DEVICE int kv_head(const Shape& shape) const { return (end - 1) / (shape.heads / shape.kv_heads); }
  DEVICE int part(const Shape& shape) const { return (end - 1) / members_of(shape); }  // among those of all KV heads
};

// The sequence of a ragged batch that a key tile is of. Its keys are numbered as the queries that they are aligned with (sequences.cuh):
// key i is row `key + i` of a head of K, query i is row `query + i` of one of Q, and the first tile of `queries` is number `tile`.
// Without sequences all of it is 0.
struct alignas(16) Origin {
  int key, query, queries, tile;

  // The problem that the sequence is alone.
  DEVICE Shape alone(const Shape& batches) const {
    Shape own = batches;
    if constexpr (RAGGED) own.len_q = own.len_kv = queries;
    return own;
  }
};

// What the order of key tiles has of each: `end` is 1, or 0 of an empty place.
struct OrderedTile {
  Work work;
  Origin sequence;
};

// What one thread told all warps in SRAM: a key tile, and its sequence.
DEVICE Work told_work(unsigned at) {
  const Work told = lane_id() == 0 ? load_shared<Work>(at) : Work{};
  return {uniform(told.first_key), uniform(told.end), {uniform(told.tiles.first), uniform(told.tiles.last)}};
}
DEVICE Origin told_origin(unsigned at) {
  const Origin own = lane_id() == 0 ? load_shared<Origin>(at) : Origin{};
  return {uniform(own.key), uniform(own.query), uniform(own.queries), uniform(own.tile)};
}

DEVICE int key_tiles(const Shape& shape) { return row_tiles_of<BC>(transposed(shape)); }

// The first key of the tile at a place, and its sequence, which has these `keys`.
DEVICE int first_key_at(const Sequence& keys, const Offsets& offsets, int place, Origin& own) {
  own.query = load_global<int>(offsets.q + keys.number);
  own.queries = load_global<int>(offsets.q + keys.number + 1) - own.query;
  own.tile = own.query / QUERIES + keys.number;
  const int aligned = own.queries - (keys.end - keys.first);  // the query that the first key is aligned with
  own.key = keys.first - aligned;
  return aligned + keys.before<BC>(place);
}

DEVICE int first_key_at(const Shape& shape, const Offsets& offsets, int place, Origin& own) {
  return first_key_at(sequence_at<BC>(transposed(shape), offsets.kv, place), offsets, place, own);
}

// The key tile at a place of the order (longest_first.cuh), of the heads before `end`.
DEVICE Work ordered_tile(const OrderedTile* order, int place, int end, Origin& own) {
  own = load_global<Origin>(&order[place].sequence);
  Work work = load_global<Work>(&order[place].work);
  if (work.end > 0) work.end = end;
  return work;
}

// The key tile of a number, and its sequence. The first of each head come first: under a causal mask most queries see them. The KV
// heads of a group run side by side before the next ones start, so that what their blocks share (Q and dO, above all) stays in the
// L2. Of an empty place, and behind the last, `end` is 0. Where heads are taken in parts, each part counts as a KV head here.
DEVICE Work key_tile(const Shape& shape, const Offsets& offsets, int number, Origin& own) {
  const int members = members_of(shape), group = shape.group / members;
  const int first_head = number / (group * key_tiles(shape)) * group;  // of the group
  const int heads = min(group, shape.batch * shape.kv_heads * PARTS - first_head), place = number - first_head * key_tiles(shape);
  if constexpr (ORDERED) return ordered_tile(offsets.order, place / heads, (first_head + place % heads + 1) * members, own);
  const int first_key = RAGGED ? first_key_at(shape, offsets, place / heads, own) : place / heads * BC;
  const Shape keys_first = transposed(own.alone(shape));
  if (RAGGED && first_key >= keys_first.len_q) return {};  // an empty place
  const Keys seen = visible_tiles(keys_first, first_key, min(first_key + BC, keys_first.len_q) - 1, QUERIES);
  return {first_key, (first_head + place % heads + 1) * members, {seen.first, seen.last}};
}

// An LSE to the base 2. That of a row that sees no key becomes INF: its P is then 0, and not NaN.
DEVICE float lse_of(float natural) { return natural == -INF ? INF : natural * LOG2E; }

// A number for each query of a tile, in the registers of a warp: all are on their way before one is needed.
struct Numbers {
  float x[QUERIES / 32];

  // Without a query, the number is `without`.
  DEVICE Numbers(const float* of_rows, const Shape& shape, const Origin& origin, Visit at, float without) {
    const int first = at.i * QUERIES + lane_id(), left = origin.alone(shape).len_q - first;
    const float* own = of_rows + static_cast<long long>(at.head) * shape.len_q + origin.query + first;
#pragma unroll
    for (int r = 0; r < QUERIES / 32; ++r) {
      x[r] = without;
      if (32 * r < left) x[r] = load_global<float>(own + 32 * r);
    }
  }

  template <class F>
  DEVICE void store(unsigned to, F&& f) const {
#pragma unroll
    for (int r = 0; r < QUERIES / 32; ++r) store_shared(to + (32 * r + lane_id()) * 4, f(x[r]));
  }
};

// c += A B for this warpgroup's keys, as a group of its own: A is P or dS, B has the queries as rows.
DEVICE void multiply_by_columns(Gradient& c, const unsigned (&a)[QUERY_STEPS][4], QTile b) {
#pragma unroll
  for (int i = 0; i < QUERY_STEPS; ++i) wgmma_rs(c, a[i], columns_operand(b, 16 * i));
  wgmma_commit();
}

// Each query's number, negated sum or LSE, lies in SRAM; a lane has two neighbouring queries of each fragment.
DEVICE float2 of_queries(unsigned numbers, int fragment) {
  return load_shared<float2>(numbers + (8 * fragment + 2 * (lane_id() % 4)) * 4);
}

// -D, from which the sums of dP begin.
DEVICE void begin_at(Transposed& dp, unsigned numbers) {
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n) {
    const float2 d = of_queries(numbers, n);
    dp[n][0] = dp[n][2] = d.x, dp[n][1] = dp[n][3] = d.y;
  }
}

// S becomes P = exp(S - LSE).
DEVICE void exponentials(Transposed& s, float c, unsigned numbers) {
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n) {
    const float2 l = of_queries(numbers, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(c * s[n][e] - (e % 2 ? l.y : l.x));
  }
}

DEVICE void multiply_into(Transposed& dp, const Transposed& p) {
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[n][e] *= p[n][e];
}

// P or dS in the storage dtype, as an operand A.
DEVICE void round_operand(unsigned (&a)[QUERY_STEPS][4], const Transposed& c) {
#pragma unroll
  for (int i = 0; i < QUERY_STEPS; ++i) {
    const FragmentA operand = operand_a(c, 16 * i);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[i][r] = operand.r[r];
  }
}
