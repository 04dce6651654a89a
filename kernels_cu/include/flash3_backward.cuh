// What flash3_backward is made of, beside what it shares (hopper_backward.cuh): SRAM and its mbarriers, the order of work, dropout,
// the products and sums of dQ.
#pragma once

constexpr int QUERIES = BR;

#include "clear.cuh"
#include "hopper_backward.cuh"
#include "longest_first.cuh"
#include "philox.cuh"
#include "sum_tiles.cuh"

constexpr int CONSUMERS = BC / 64;  // warpgroups that compute
constexpr int PART_ROWS = 16;       // of a block of the launch that adds up parts
// Where wide heads or random bytes leave no registers for a list of key tiles, each has a block of its own. So has each where blocks
// take turns.
constexpr bool ONE_TILE = DROPOUT || COLUMNS > 64 || IN_TURN;
constexpr bool TOLD = RAGGED || IN_TURN;  // a block is told its first key tile, too
static_assert(!(RAGGED && IN_TURN), "sequences have no turns here");
static_assert(RAGGED || !ORDERED, "only sequences are put in an order");
constexpr int ABOVE = BR / 64, ASIDE = CONSUMERS / ABOVE;  // the warpgroups form a grid over dQ's rows and columns
static_assert(CONSUMERS == 2 && BR % 64 == 0 && CONSUMERS % ABOVE == 0 && COLUMNS / ASIDE % 64 == 0, "64 keys per warpgroup, whole panels of dQ");

using KVTile = PanelTile<BC, COLUMNS>;
using DSTile = PanelTile<BC, BR>;
using Kept = KeptWeights<BR / 8, true>;           // 64 keys x queries, for dropout
using QueryGradient = float[COLUMNS / ASIDE / 8][4];  // 64 queries x this warpgroup's columns

// SRAM: K | V | STAGES x (Q, dO) | 2 x dS | STAGES x (LSE, D) | mbarriers | what is next.
struct Sram {
  static constexpr int MBARRIERS = IN_TURN ? 24 : 16, NUMBERS = BR * 4, WORK = RAGGED ? 32 : 16;
  unsigned base = sram_base();

  DEVICE KVTile k() const { return {base}; }
  DEVICE KVTile v() const { return {base + KVTile::BYTES}; }
  DEVICE QTile q(int slot) const { return {base + 2 * KVTile::BYTES + slot * QTile::BYTES}; }
  DEVICE QTile dout(int slot) const { return {q(STAGES).base + slot * QTile::BYTES}; }
  DEVICE DSTile ds(int side) const { return {dout(STAGES).base + side * DSTile::BYTES}; }
  DEVICE unsigned lse(int slot) const { return ds(2).base + slot * NUMBERS; }
  DEVICE unsigned delta(int slot) const { return lse(STAGES) + slot * NUMBERS; }
  DEVICE unsigned mbarrier(int i) const { return delta(STAGES) + i * MBARRIER_BYTES; }

  // "Full" counts the bytes of a tile that have come, and the producer's warp that loads its LSE or D. "Empty" counts the consumer
  // warps that are done with it, as does `ds_full`, when they have written their part.
  DEVICE unsigned kv_full() const { return mbarrier(0); }
  DEVICE unsigned kv_empty() const { return mbarrier(1); }
  DEVICE unsigned ds_full(int side) const { return mbarrier(2 + side); }
  DEVICE unsigned q_full(int slot) const { return mbarrier(4 + slot); }
  DEVICE unsigned do_full(int slot) const { return mbarrier(4 + STAGES + slot); }
  DEVICE unsigned q_empty(int slot) const { return mbarrier(4 + 2 * STAGES + slot); }
  DEVICE unsigned do_empty(int slot) const { return mbarrier(4 + 3 * STAGES + slot); }

  // Where one thread tells all other warps what is next.
  DEVICE unsigned work_full() const { return mbarrier(4 + 4 * STAGES); }
  DEVICE unsigned work_empty() const { return mbarrier(5 + 4 * STAGES); }
  DEVICE unsigned work() const { return mbarrier(MBARRIERS - 2); }

  // That it is this block's turn to add a tile of dQ: two neighbours have two of them.
  DEVICE unsigned turn(int side) const { return mbarrier(6 + 4 * STAGES + side); }

  // Where in the order this block comes at its n-th tile of queries (Place). It is told with Q, and needed until a tile later.
  DEVICE unsigned place(unsigned n) const { return mbarrier(10 + 4 * STAGES) + n % (2 * STAGES) * 4; }

  // That all consumers have added a tile of dQ, and that the thread that passes turns on knows. Before that, not two more are added.
  DEVICE unsigned added(int side) const { return mbarrier(12 + 4 * STAGES + side); }
  DEVICE unsigned known(int side) const { return mbarrier(8 + 4 * STAGES + side); }
};
static_assert(!IN_TURN || STAGES == 2, "four places: two tiles are loaded, one is computed, one is added");
static_assert(6 + 8 * IN_TURN + 4 * STAGES <= Sram::MBARRIERS - 2, "the ring has its mbarriers, and leaves room for 16 bytes");

// The block's named barriers, beside barrier().
enum NamedBarrier { CLEARED = 1 };

// Makes the block's mbarriers ready. All threads call it.
DEVICE void open(const Sram& sram) {
  name_sram("k", sram.k().base, KVTile::BYTES);
  name_sram("v", sram.v().base, KVTile::BYTES);
  name_sram("q", sram.q(0).base, STAGES * QTile::BYTES);
  name_sram("dout", sram.dout(0).base, STAGES * QTile::BYTES);
  name_sram("ds", sram.ds(0).base, 2 * DSTile::BYTES);
  name_sram("lse", sram.lse(0), STAGES * Sram::NUMBERS);
  name_sram("delta", sram.delta(0), STAGES * Sram::NUMBERS);
  name_sram("work", sram.work(), Sram::WORK);
  if (IN_TURN) name_sram("place", sram.place(0), 16);
  if (threadIdx.x == 0) {
    mbarrier_init(sram.kv_full(), 2);
    mbarrier_init(sram.kv_empty(), 4 * CONSUMERS);
    mbarrier_init(sram.work_full(), 1);
    mbarrier_init(sram.work_empty(), 4 * CONSUMERS + 3);
    for (int side = 0; side < 2; ++side) {
      mbarrier_init(sram.ds_full(side), 4 * CONSUMERS);
      if (IN_TURN) {
        mbarrier_init(sram.turn(side), 1);
        mbarrier_init(sram.added(side), 4 * CONSUMERS);
        mbarrier_init(sram.known(side), 1);
      }
    }
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(sram.q_full(slot), 2);
      mbarrier_init(sram.do_full(slot), 2);
      mbarrier_init(sram.q_empty(slot), 4 * CONSUMERS);
      mbarrier_init(sram.do_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();
}

// Warps that load LSE and D, and take tile after tile of sequences, need more registers than others.
DEVICE void become_producer() { release_registers<RAGGED && !ONE_TILE ? 40 : 24>(); }
DEVICE void become_consumer() { claim_registers<RAGGED && !ONE_TILE ? 232 : 240>(); }

// The key tiles of one persistent block, by number. The first of each head come first: under a causal mask most queries see them.
// The block begins with its own number, and takes every gridDim-th one, or with DYNAMIC the next one that no block has drawn yet. One
// thread knows the numbers. It tells all other warps what they stand for, because those have no registers to work that out.
//
// In a ragged batch it also tells the first one, and does so in a block that has no other (ONE_TILE): one thread looks for the
// sequence, and not all warps. Where the first launch has put all key tiles in an order (ORDERED), the thread looks there instead.
// So it tells the first one where blocks take turns. There each block draws its key tile. A block with a lower number has
// begun, and blocks wait for lower numbers only. So nothing hangs.
//
// The KV heads of a group run side by side before the next ones start, so that what their blocks share (Q, dO and the sums of dQ)
// stays in the L2.
struct Agenda {
  const Shape& shape;
  const Sram& sram;
  Offsets offsets;
  Origin origin = {};
  Work work = TOLD ? Work{} : work_of(blockIdx.x, origin);
  unsigned parity = 0;  // of this round, of K and V, too

  DEVICE int last() const { return key_tiles(shape) * shape.batch * shape.kv_heads * PARTS - 1; }
  DEVICE Work work_of(int number, Origin& own) const { return number > last() ? Work{} : key_tile(shape, offsets, number, own); }

  // Tells what is next when all have taken what was told before. All blocks together draw once for each key tile (or place), so the
  // counter ends at 0, where it began.
  DEVICE void tell(unsigned* counter) {
    if constexpr (RAGGED) {
      for (int number = blockIdx.x;; number = gridDim.x + (DYNAMIC ? draw_from(counter, last()) : number)) {
        Origin own = {};
        const Work told = work_of(number, own);
        if (!ONE_TILE && number <= last() && told.end == 0) continue;  // an empty place
        mbarrier_wait(sram.work_empty(), parity ^ 1);
        store_shared(sram.work(), told);
        store_shared(sram.work() + sizeof(Work), own);
        mbarrier_arrive(sram.work_full());
        if (ONE_TILE || number > last()) return;
        parity ^= 1;
      }
    } else if constexpr (IN_TURN) {
      work = work_of(draw_from(counter, last()), origin);
      mbarrier_wait(sram.work_empty(), parity ^ 1);
      store_shared(sram.work(), work);
      mbarrier_arrive(sram.work_full());
    } else if constexpr (!ONE_TILE) {
      for (int number = blockIdx.x; number <= last(); parity ^= 1) {
        mbarrier_wait(sram.work_empty(), parity ^ 1);
        number = gridDim.x + (DYNAMIC ? draw_from(counter, last()) : number);
        store_shared(sram.work(), work_of(number, origin));
        mbarrier_arrive(sram.work_full());
      }
    }
  }

  // Hears what was told in the round of this parity, as all other warps do.
  DEVICE void hear(unsigned round) {
    mbarrier_wait(sram.work_full(), round);
    work = told_work(sram.work());
    if constexpr (RAGGED) origin = told_origin(sram.work() + sizeof(Work));
    release(sram.work_empty());
  }

  // Hears of the first key tile, where that is told.
  DEVICE void begin() {
    if constexpr (TOLD) hear(0);
  }

  // Goes on to what was told.
  DEVICE void take() {
    if constexpr (ONE_TILE) {
      work = {};
      return;
    }
    hear(RAGGED ? parity ^ 1 : parity);
    parity ^= 1;
  }
};

// Rows of dQ that see no key.
DEVICE void clear_rows_of(const Tensor& dq, const Shape& shape, const Rows& rows) {
  const int chunks = padded_row_bytes(shape) / CHUNK_BYTES;
  for (int i = threadIdx.x; i < (rows.end - rows.first) * chunks; i += DELTA_THREADS)
    store_global(row_address(dq, rows.batch, rows.head, rows.first + i / chunks) + i % chunks * CHUNK_BYTES, make_uint4(0, 0, 0, 0));
}

// Blocks add to a tile of dQ in the order of their key tiles. A counter in HBM, at the tile's first row, says which block's turn it
// is. The first launch has set it to the first key tile that these queries see. One thread of the producer waits for this block's
// turn, and another one passes it on, so that no warp that multiplies waits for HBM.
//
// So no launch has to set the sum to 0: the first block writes its part. The last block adds its own to the sum, and writes dQ.
enum Place { FIRST = 1, LAST = 2 };
struct Turns {
  unsigned* counters;
  const Shape& shape;

  DEVICE unsigned* counter(Visit at) const { return counters + static_cast<long long>(at.head) * shape.len_q + at.i * BR; }
  DEVICE Keys seen(int first_row) const { return visible_tiles(shape, first_row, min(first_row + BR, shape.len_q) - 1, BC); }

  // Whose turn is first. dQ of queries that see no key is 0.
  DEVICE void begin(const Tensor& dq, const Rows& rows) const {
    const Keys tiles = seen(rows.first);
    if (threadIdx.x == 0) store_global<int>(counter({rows.batch * shape.heads + rows.head, rows.first / BR}), tiles.first);
    if (tiles.last < tiles.first) clear_rows_of(dq, shape, rows);
  }

  DEVICE void wait(Visit at, int key_tile) const { wait_for(counter(at), key_tile); }
  DEVICE int place(Visit at, int key_tile) const {
    const Keys tiles = seen(at.i * BR);
    return (key_tile == tiles.first ? FIRST : 0) | (key_tile == tiles.last ? LAST : 0);
  }
  DEVICE void pass(Visit at) const { pass_on(counter(at)); }
};

// c += A Bᵀ for this warpgroup's 64 keys, from `key` on, as a group of its own: A has the block's keys as rows, B the queries.
DEVICE void multiply_by_queries(Transposed& c, KVTile a, int key, QTile b, int add) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) wgmma_ss(c, rows_operand(a, key, d), rows_operand(b, 0, d), add || d > 0);
  wgmma_commit();
}

// dQ = dS K for this warpgroup's share of dQ, as a group of its own. Shares are whole panels.
DEVICE void multiply_for_queries(QueryGradient& dq, DSTile ds, KVTile k, int consumer) {
  const unsigned rows = ds.panel(consumer / ASIDE), columns = k.panel(consumer % ASIDE * (COLUMNS / ASIDE / 64));
#pragma unroll
  for (int key = 0; key < BC; key += 16)
    wgmma_columns_ss(dq, wgmma_descriptor(rows + key * 128, DSTile::PANEL_BYTES, 1024),
                     wgmma_descriptor(columns + key * 128, KVTile::PANEL_BYTES, 1024), key > 0);
  wgmma_commit();
}

// dP - D, where dP is 0 for what dropout drops. D's numbers have its part of the scale, and a minus.
DEVICE void drop_gradient(Transposed& dp, const Kept& kept, unsigned numbers) {
#pragma unroll
  for (int n = 0; n < BR / 8; ++n) {
    const float2 d = of_queries(numbers, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[n][e] = float_of(bits(dp[n][e]) & kept.one(n, e)) + (e % 2 ? d.y : d.x);
  }
}

// The same into a tile in SRAM, from row `row` on.
DEVICE void store_operand(DSTile tile, int row, const unsigned (&a)[QUERY_STEPS][4]) {
  const int g = lane_id() / 4;
  const unsigned own = tile.base + (row + g) * 128 + lane_id() % 4 * 4;
#pragma unroll
  for (int i = 0; i < QUERY_STEPS; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int chunk = (16 * i % 64 / 8 + r / 2) ^ g;
      store_shared(own + 16 * i / 64 * DSTile::PANEL_BYTES + r % 2 * 1024 + chunk * CHUNK_BYTES, a[i][r]);
    }
}

// Adds this warpgroup's share of a tile's dQ to the sums in HBM.
DEVICE void add_gradient(float* dq_sum, int tile, const QueryGradient& dq, int consumer) {
  const SumTile<COLUMNS> sums(dq_sum, tile, consumer / ASIDE * 64 + warp_id() % 4 * 16);
  float4* const first = sums.part(consumer % ASIDE * (COLUMNS / ASIDE / 8));
#pragma unroll
  for (int n = 0; n < COLUMNS / ASIDE / 8; ++n) {
    const float4 part = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
    add_global(first + 32 * n, part);
  }
}

// The same at this block's place in the order. It comes in turn.
DEVICE void add_in_turn(float* dq_sum, int tile, QueryGradient& dq, int consumer, int place, const Tensor& gradient, const Shape& shape) {
  constexpr int FRAGMENTS = COLUMNS / ASIDE / 8;
  const int row = consumer / ASIDE * 64 + warp_id() % 4 * 16, column = consumer % ASIDE * (COLUMNS / ASIDE);
  float4* const first = SumTile<COLUMNS>(dq_sum, tile, row).part(column / 8);
  if (place == FIRST) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n) store_global(first + 32 * n, make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
  } else if (place == 0) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n) add_in_turn(first + 32 * n, make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]));
  } else {
    if (place == LAST) {
#pragma unroll
      for (int n = 0; n < FRAGMENTS; ++n) {
        const float4 before = load_global<float4>(first + 32 * n);
        dq[n][0] += before.x, dq[n][1] += before.y, dq[n][2] += before.z, dq[n][3] += before.w;
      }
    }
    const int head = tile / row_tiles_of(shape), own = tile % row_tiles_of(shape) * BR + row + lane_id() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int bytes = own + 8 * half < shape.len_q ? padded_row_bytes(shape) - column * ELEMENT_BYTES : 0;
      char* const to = row_address(gradient, head / shape.heads, head % shape.heads, own + 8 * half) + column * ELEMENT_BYTES;
      store_row(to, dq, half, of_kept(shape.scale, shape.kept), bytes);
    }
  }
}

// Rows of dK or dV: the sum over the parts, in their order.
DEVICE void add_parts(const Tensor& parts, const Tensor& gradient, const Shape& shape, const Rows& rows) {
  constexpr int LANES = lanes_for(HEAD_DIM / 4);
  constexpr int BYTES = PARTIAL ? 4 : ELEMENT_BYTES;                      // of an element
  const int columns = round_up(shape.head_dim, CHUNK_BYTES / BYTES);  // padding, which is written as well
  for (int row = rows.first + threadIdx.x / LANES; row < rows.end; row += DELTA_THREADS / LANES)
    for (int column = threadIdx.x % LANES * 4; column < columns; column += LANES * 4) {
      float4 x[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {  // all are on their way before one is needed
        x[part] = make_float4(0, 0, 0, 0);
        const char* const from = row_address(parts, rows.batch, rows.head * PARTS + part, row);
        if (column < shape.head_dim) x[part] = load_global<float4>(from + column * 4);
      }
      float4 sum = x[0];
#pragma unroll
      for (int part = 1; part < PARTS; ++part)
        sum = make_float4(sum.x + x[part].x, sum.y + x[part].y, sum.z + x[part].z, sum.w + x[part].w);
      char* const to = row_address(gradient, rows.batch, rows.head, row) + column * BYTES;
      if constexpr (PARTIAL)
        store_global(to, sum);
      else
        store_elements(to, sum);
    }
}
