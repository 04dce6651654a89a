// What the rungs of FlashAttention-3 share: SRAM and its mbarriers, the ring, turns at the tensor cores, the way out of the
// registers.
#pragma once

#include "clear.cuh"
#include "mbarrier.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#if E4M3
#include "fp8.cuh"
#else
#include "fp16.cuh"
#endif
#include "mma.cuh"

constexpr int CONSUMERS = BR / 64;  // warpgroups that compute
static_assert(BR % 64 == 0 && BC % 16 == 0 && HEAD_DIM % 16 == 0, "64 rows per warpgroup, whole fragments");

// Where O is rescaled after a maximum has risen: a tile later, beside the next Q Kᵀ, or at once where D is so small that this
// product is over too soon to hide it.
constexpr bool RESCALE_LATE = HEAD_DIM > 64;

// SRAM: Q | STAGES x K | STAGES x V (each with its ones, where it has some) | mbarriers.
struct Sram {
  static constexpr int MBARRIERS = STAGES > 2 ? 24 : 16, V_BYTES = VTile::BYTES + ONES_BYTES;
  static constexpr int BYTES = QTile::BYTES + STAGES * (KTile::BYTES + V_BYTES) + MBARRIERS * MBARRIER_BYTES;

  unsigned base = sram_base();

  DEVICE QTile q() const { return {base}; }
  DEVICE KTile k(int slot) const { return {base + QTile::BYTES + slot * KTile::BYTES}; }
  DEVICE VTile v(int slot) const { return {k(STAGES).base + slot * V_BYTES}; }
  DEVICE unsigned mbarrier(int i) const { return v(STAGES).base + i * MBARRIER_BYTES; }

  // "Full" counts the bytes of a tile that have come. "Empty" counts the consumer warps that are done with it.
  DEVICE unsigned q_full() const { return mbarrier(0); }
  DEVICE unsigned q_empty() const { return mbarrier(1); }
  DEVICE unsigned k_full(int slot) const { return mbarrier(2 + slot); }
  DEVICE unsigned v_full(int slot) const { return mbarrier(2 + STAGES + slot); }
  DEVICE unsigned k_empty(int slot) const { return mbarrier(2 + 2 * STAGES + slot); }
  DEVICE unsigned v_empty(int slot) const { return mbarrier(2 + 3 * STAGES + slot); }

  // Where the producer tells the consumers what it has drawn. It is guarded as Q is.
  DEVICE unsigned number() const { return mbarrier(MBARRIERS) - sizeof(int); }
};
static_assert(2 + 4 * STAGES < Sram::MBARRIERS, "the ring has its mbarriers, and leaves room for a number");

// Makes the block's mbarriers ready. All threads call it. So many warps load a tile of K or V: one by TMA, or several that copy.
template <int LOADERS = 1>
DEVICE void open(const Sram& sram) {
  name_sram("q", sram.q().base, QTile::BYTES);
  name_sram("k", sram.k(0).base, STAGES * KTile::BYTES);
  name_sram(name_of_v(), sram.v(0).base, STAGES * Sram::V_BYTES);
  if constexpr (DYNAMIC) name_sram("number", sram.number(), sizeof(int));
  if (threadIdx.x == 0) {
    mbarrier_init(sram.q_full(), 1);
    mbarrier_init(sram.q_empty(), 4 * CONSUMERS);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(sram.k_full(slot), LOADERS);
      mbarrier_init(sram.v_full(slot), LOADERS);
      mbarrier_init(sram.k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(sram.v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();
}

// Named barriers of a block. Barrier 0 is barrier()'s. TURN + i is of consumer i, and of the one that passes its turn on to it.
enum NamedBarrier { TURN = 1, CLEARED = TURN + CONSUMERS };

// A launch gives all warpgroups the same share of an SM's 65,536 registers. These two share them out anew: the warpgroup
// that loads needs few.
DEVICE void become_producer() {
  static_assert(CONSUMERS <= 3, "with more consumers none has room for its accumulators");
  if constexpr (CONSUMERS == 2) release_registers<24>();
  if constexpr (CONSUMERS == 3) release_registers<32>();
}
DEVICE void become_consumer() {
  if constexpr (CONSUMERS == 2) claim_registers<240>();
  if constexpr (CONSUMERS == 3) claim_registers<160>();
}

// A consumer warp is done with the slot that `empty` guards.
DEVICE void release(unsigned empty) {
  if (lane_id() == 0) mbarrier_arrive(empty);
}

// What the producer has drawn: it comes with Q, or alone if no rows are left. Lane 0 reads it for its warp, as it also arrives for it.
DEVICE int told(const Sram& sram, unsigned q_parity) {
  mbarrier_wait(sram.q_full(), q_parity);
  return uniform(lane_id() == 0 ? load_shared<int>(sram.number()) : 0);
}

// A place in a ring of STAGES slots, and the parity of the round. A consumer waits for `parity`, a producer for its opposite.
// (CUTLASS: a pipeline state.)
struct Ring {
  int slot = 0;
  unsigned parity = 0;

  DEVICE void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// One thread asks for a whole tile, panel by panel. `full` is told when the bytes have come.
template <class TileT>
DEVICE void load_tile(TileT tile, const TensorMap& map, int batch, int head, int first_row, unsigned full,
                      unsigned long long hint, int first_column = 0) {
  constexpr int PANEL_ELEMENTS = TileT::PANEL_COLUMNS * PACKED;
  mbarrier_arrive_expect(full, TileT::BYTES);
#pragma unroll
  for (int i = 0; i < TileT::PANELS; ++i)
    tma_load(tile.panel(i), map, batch, head, first_row, first_column + i * PANEL_ELEMENTS, full, hint);
}

// S = Q K_jᵀ, waited for: nothing of this warpgroup runs beside it.
DEVICE void multiply_qk_alone(float (&s)[S_FRAGMENTS][4], QTile q, int row, KTile k) {
  settle(s);
  wgmma_fence();
  multiply_qk(s, q, row, k);
  wgmma_wait<0>();
  settle(s);
}

// Stores a lane's part of a row of O times `factor`. `half` says which of its two rows. Rows outside are left out.
DEVICE void store_o(const Tensor& out, const Shape& batches, const Work& work, int row, const float (&o)[O_FRAGMENTS][4], int half,
                    float factor) {
  const Shape shape = work.alone(batches);
  char* address = row_address(out, work.batch, work.head, work.q + row);
  store_row(address, o, half, factor, row < shape.len_q ? padded_row_bytes(shape) : 0);
}

// Stores a row's LSE: m + log(l), and -inf for a row without keys.
DEVICE void store_lse(float* lse, const Shape& batches, const Work& work, int row, float m, float sum) {
  const Shape shape = work.alone(batches);
  const long long flat_head = static_cast<long long>(work.batch) * shape.heads + work.head;
  float* row_lse = lse + flat_head * batches.len_q + work.q + row;
  if (row < shape.len_q && lane_id() % 4 == 0) store_global(row_lse, (m - LARGEST_P + log2_approx(sum)) * LN2);
}

// The consumers take turns at the tensor cores: one issues its products, then the next. (FlashAttention-3: ping-pong, by
// warp-scheduler barriers.) The turns go round. start() gives consumer 0 the first.
struct Turns {
  int consumer;

  DEVICE void start() const {
    if (consumer == CONSUMERS - 1) pass();
  }
  DEVICE void take() const {
    if constexpr (CONSUMERS > 1) named_barrier_sync(TURN + consumer, 2 * WARPGROUP);
  }
  DEVICE void pass() const {
    if constexpr (CONSUMERS > 1) named_barrier_arrive(TURN + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
  }
};
