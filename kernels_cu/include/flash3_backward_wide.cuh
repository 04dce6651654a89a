// What the two main launches of flash3_backward_wide are made of: SRAM and mbarriers, the order of work, products, what one warpgroup
// tells the other.
#pragma once

constexpr int QUERIES = BC;

#include "clear.cuh"
#include "hopper_backward.cuh"

// Columns of K or V that stay in registers. Of narrow heads none do: where all of an operand is held, ptxas (CUDA 12.9, 13.0)
// gives its registers to others within the loop. `flashlab verify` found that on an H200.
constexpr int HELD = COLUMNS < 128 ? 0 : HEAD_DIM < 128 ? HEAD_DIM : 128;
constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int V_SLOTS = COLUMNS > 192 ? 1 : STAGES;  // of the launch for dQ
static_assert(BR == 64 * CONSUMERS && BC == 64, "a warpgroup has 64 rows of S or of its transpose");

using KVTile = PanelTile<BC, COLUMNS>;
using RowTile = PanelTile<BR, COLUMNS>;  // queries of a block for dQ
using Held = unsigned[HELD > 0 ? HELD / 16 : 1][4];

DEVICE void become_producer() { release_registers<24>(); }
DEVICE void become_consumer() { claim_registers<240>(); }

// The block's named barriers, beside barrier().
enum NamedBarrier { CLEARED = 1 };

// Room for the mbarriers. In a ragged batch the last four leave theirs to what a thread tells the other warps.
constexpr int MBARRIERS = 16;

// SRAM of the launch for dK and dV: K | V | STAGES x (Q, dO) | STAGES x P | STAGES x (LSE, D) | mbarriers.
struct SramOfKeys {
  static constexpr int NUMBERS = QUERIES * 4, WEIGHTS = BC * QUERIES * 4;
  unsigned base = sram_base();

  DEVICE KVTile k() const { return {base}; }
  DEVICE KVTile v() const { return {base + KVTile::BYTES}; }
  DEVICE QTile q(int slot) const { return {base + 2 * KVTile::BYTES + slot * QTile::BYTES}; }
  DEVICE QTile dout(int slot) const { return {q(STAGES).base + slot * QTile::BYTES}; }
  DEVICE unsigned p(int slot) const { return dout(STAGES).base + slot * WEIGHTS; }
  DEVICE unsigned lse(int slot) const { return p(STAGES) + slot * NUMBERS; }
  DEVICE unsigned delta(int slot) const { return lse(STAGES) + slot * NUMBERS; }
  DEVICE unsigned mbarrier(int i) const { return delta(STAGES) + i * MBARRIER_BYTES; }
  DEVICE unsigned work() const { return mbarrier(MBARRIERS - 4); }

  // "Full" counts the bytes of a tile that have come, and the producer's warp that loads its LSE or D. "Empty" counts the consumer
  // warps that are done with it. The first warpgroup's warps fill a slot of P. It is empty when Q's slot is.
  DEVICE unsigned k_full() const { return mbarrier(0); }
  DEVICE unsigned v_full() const { return mbarrier(1); }
  DEVICE unsigned q_full(int slot) const { return mbarrier(2 + slot); }
  DEVICE unsigned do_full(int slot) const { return mbarrier(2 + STAGES + slot); }
  DEVICE unsigned p_full(int slot) const { return mbarrier(2 + 2 * STAGES + slot); }
  DEVICE unsigned q_empty(int slot) const { return mbarrier(2 + 3 * STAGES + slot); }
  DEVICE unsigned do_empty(int slot) const { return mbarrier(2 + 4 * STAGES + slot); }
};
static_assert(2 + 5 * STAGES <= MBARRIERS - 4 && 2 + 2 * STAGES + 2 * V_SLOTS <= MBARRIERS - 4, "they leave room for 32 bytes");

// Makes the block's mbarriers ready. All threads call it.
DEVICE void open(const SramOfKeys& sram) {
  name_sram("k", sram.k().base, KVTile::BYTES);
  name_sram("v", sram.v().base, KVTile::BYTES);
  name_sram("q", sram.q(0).base, STAGES * QTile::BYTES);
  name_sram("dout", sram.dout(0).base, STAGES * QTile::BYTES);
  name_sram("p", sram.p(0), STAGES * SramOfKeys::WEIGHTS);
  name_sram("lse", sram.lse(0), STAGES * SramOfKeys::NUMBERS);
  name_sram("delta", sram.delta(0), STAGES * SramOfKeys::NUMBERS);
  if (RAGGED) name_sram("work", sram.work(), sizeof(Work) + sizeof(Origin));
  if (threadIdx.x == 0) {
    mbarrier_init(sram.k_full(), 1);
    mbarrier_init(sram.v_full(), 1);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(sram.q_full(slot), 2);
      mbarrier_init(sram.do_full(slot), 2);
      mbarrier_init(sram.p_full(slot), 4);
      mbarrier_init(sram.q_empty(slot), 4 * CONSUMERS);
      mbarrier_init(sram.do_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();
}

// SRAM of the launch for dQ: Q | dO | STAGES x K | V_SLOTS x V | mbarriers.
struct SramOfQueries {
  unsigned base = sram_base();

  DEVICE RowTile q() const { return {base}; }
  DEVICE RowTile dout() const { return {base + RowTile::BYTES}; }
  DEVICE KVTile k(int slot) const { return {base + 2 * RowTile::BYTES + slot * KVTile::BYTES}; }
  DEVICE KVTile v(int slot) const { return {k(STAGES).base + slot * KVTile::BYTES}; }
  DEVICE unsigned mbarrier(int i) const { return v(V_SLOTS).base + i * MBARRIER_BYTES; }
  DEVICE unsigned work() const { return mbarrier(MBARRIERS - 4); }

  DEVICE unsigned q_full() const { return mbarrier(0); }
  DEVICE unsigned do_full() const { return mbarrier(1); }
  DEVICE unsigned k_full(int slot) const { return mbarrier(2 + slot); }
  DEVICE unsigned k_empty(int slot) const { return mbarrier(2 + STAGES + slot); }
  DEVICE unsigned v_full(int slot) const { return mbarrier(2 + 2 * STAGES + slot); }
  DEVICE unsigned v_empty(int slot) const { return mbarrier(2 + 2 * STAGES + V_SLOTS + slot); }
};

// Makes the block's mbarriers ready. All threads call it.
DEVICE void open(const SramOfQueries& sram) {
  name_sram("q", sram.q().base, RowTile::BYTES);
  name_sram("dout", sram.dout().base, RowTile::BYTES);
  name_sram("k", sram.k(0).base, STAGES * KVTile::BYTES);
  name_sram("v", sram.v(0).base, V_SLOTS * KVTile::BYTES);
  if (RAGGED) name_sram("work", sram.work(), sizeof(Work) + sizeof(Origin));
  if (threadIdx.x == 0) {
    mbarrier_init(sram.q_full(), 1);
    mbarrier_init(sram.do_full(), 1);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(sram.k_full(slot), 1);
      mbarrier_init(sram.k_empty(slot), 4 * CONSUMERS);
    }
    for (int slot = 0; slot < V_SLOTS; ++slot) {
      mbarrier_init(sram.v_full(slot), 1);
      mbarrier_init(sram.v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();
}

// The queries of a block, and the key tiles that they see.
struct QueryRows {
  int batch, head, first;
  Keys tiles;
};

// The row tile of a number. The last of each head come first: under a causal mask they see most keys. The heads of a group run side
// by side before the next ones start, so that their K and V stay in the L2.
DEVICE QueryRows query_rows(const Shape& shape, int number) {
  const int row_tiles = ceil_div(shape.len_q, BR), all_heads = shape.batch * shape.heads;
  const int first_head = number / (shape.group * row_tiles) * shape.group;  // of the group
  const int heads = min(shape.group, all_heads - first_head), place = number - first_head * row_tiles;
  const int head = first_head + place % heads, first = (row_tiles - 1 - place / heads) * BR;
  const Keys seen = visible_tiles(shape, first, min(first + BR, shape.len_q) - 1, BC);
  return {head / shape.heads, head % shape.heads, first, seen};
}

// The row tile of a number in a ragged batch, with its sequence. `first_key` is its first row, `end` comes after its head, and its
// `tiles` are those of keys. Rows are numbered as the keys that they are aligned with (sequences.cuh): row i is row `query + i` of a
// head of Q, key i row `key + i` of one of K, and `queries` counts the keys. Of an empty place, `end` is 0.
DEVICE Work row_tile(const Shape& shape, const Offsets& offsets, int number, Origin& own) {
  const int row_tiles = row_tiles_of(shape), first_head = number / (shape.group * row_tiles) * shape.group;
  const int heads = min(shape.group, shape.heads - first_head), place = number - first_head * row_tiles;
  const int at = row_tiles - 1 - place / heads;
  const Sequence rows = sequence_at(shape, offsets.q, at);
  own.key = load_global<int>(offsets.kv + rows.number);
  own.queries = load_global<int>(offsets.kv + rows.number + 1) - own.key;
  const int aligned = own.queries - (rows.end - rows.first), first = aligned + rows.before(at);  // aligned: of the first row
  own.query = rows.first - aligned;
  if (first >= own.queries) return {};  // an empty place
  const Keys seen = visible_tiles(own.alone(shape), first, min(first + BR, own.queries) - 1, BC);
  return {first, first_head + place % heads + 1, {seen.first, seen.last}};
}

// In a ragged batch one thread looks for what a block has, and tells all warps: `find` is key_tile or row_tile.
template <class F>
DEVICE Work found_for_all(unsigned at, const Shape& shape, const Offsets& offsets, Origin& origin, F&& find) {
  if (threadIdx.x == 0) {
    Origin own = {};
    store_shared(at, find(shape, offsets, blockIdx.x, own));
    store_shared(at + sizeof(Work), own);
  }
  barrier();
  origin = told_origin(at + sizeof(Work));
  return told_work(at);
}

// The first columns of K or V, as an operand A in registers. The tensor cores read it from SRAM as often as B, and SRAM's bytes bind.
DEVICE void hold(Held& held, KVTile tile) {
  const int row = 16 * (warp_id() % 4) + lane_id() % 16;
#pragma unroll
  for (int k = 0; k < HELD; k += 16) {
    const int chunk = (k % 64 / 8 + lane_id() / 16) ^ (row % 8);
    ldmatrix(held[k / 16], tile.panel(k / 64) + row * 128 + chunk * CHUNK_BYTES);
  }
}

// c += A Bᵀ as a group of its own: A has this warpgroup's 64 keys as rows and `held` of its columns, B has 64 queries as rows.
DEVICE void multiply_by_queries(Transposed& c, const Held& held, KVTile a, QTile b, int add) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16)
    if (d < HELD)
      wgmma_rows_rs(c, held[d / 16], rows_operand(b, 0, d), add || d > 0);
    else
      wgmma_ss(c, rows_operand(a, 0, d), rows_operand(b, 0, d), add || d > 0);
  wgmma_commit();
}

// P in float32 for the other warpgroup. It lies as accumulators do, so a warp writes 512 bytes in a row, and reads them.
DEVICE void store_weights(unsigned weights, const Transposed& p) {
  const unsigned own = weights + threadIdx.x % WARPGROUP * 16;
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n)
    store_shared(own + n * WARPGROUP * 16, make_float4(p[n][0], p[n][1], p[n][2], p[n][3]));
}

// dS = P (dP - D), where the other warpgroup wrote P.
DEVICE void multiply_by_weights(Transposed& dp, unsigned weights) {
  const unsigned own = weights + threadIdx.x % WARPGROUP * 16;
#pragma unroll
  for (int n = 0; n < QUERIES / 8; ++n) {
    const float4 p = load_shared<float4>(own + n * WARPGROUP * 16);
    dp[n][0] *= p.x, dp[n][1] *= p.y, dp[n][2] *= p.z, dp[n][3] *= p.w;
  }
}

// c += A Bᵀ as a group of its own. A has the block's queries as rows, and this warpgroup's begin at `row`. B has 64 keys as rows.
DEVICE void multiply_by_keys(float (&c)[BC / 8][4], RowTile a, int row, KVTile b, int add) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) wgmma_ss(c, rows_operand(a, row, d), rows_operand(b, 0, d), add || d > 0);
  wgmma_commit();
}
