// What the rungs of FlashAttention-3 share: the tiles, a row's statistics, the mask, the way out of the registers.
//
// A consumer warpgroup owns 64 rows of Q; of them a lane holds rows g and g + 8 of its warp's 16 (wgmma.cuh), so that each
// statistic is a pair.
#pragma once

#include "mask.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

#ifndef E4M3
#define E4M3 0  // operands of 8 bits: flash3_fp8
#endif

constexpr int CONSUMERS = BR / 64;  // warpgroups that compute
constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;
static_assert(BR % 64 == 0 && BC % 16 == 0 && HEAD_DIM % 64 == 0, "64 rows a warpgroup, whole fragments, whole panels");

#if E4M3  // elements of a byte, tiles in pairs of them; V lies transposed, head_dim x keys
using QTile = PanelTile<BR, HEAD_DIM / 2>;
using KTile = PanelTile<BC, HEAD_DIM / 2>;
using VTile = PanelTile<HEAD_DIM, round_up(BC, 128) / 2>;  // what a panel has beyond BC keys is loaded, not used
constexpr int P_REGISTERS = BC / 32, ONES_BYTES = 8 * 128;  // behind each tile of V 8 rows of ones
static_assert(BC <= 128, "one panel of V, so that the ones are its next rows");
constexpr float TAU = 3.8f, LARGEST_P = 5;  // exp2(3.8 + 5) is just within e4m3's 448
#else
using QTile = PanelTile<BR, HEAD_DIM>;
using KTile = PanelTile<BC, HEAD_DIM>;
using VTile = PanelTile<BC, HEAD_DIM>;
constexpr int P_REGISTERS = BC / 16, ONES_BYTES = 0;
constexpr float TAU = 8, LARGEST_P = 0;
#endif

// SRAM: Q | STAGES x K | STAGES x V (in e4m3 each with its ones) | mbarriers.
struct Sram {
  static constexpr int MBARRIERS = 16, V_BYTES = VTile::BYTES + ONES_BYTES;
  static constexpr int BYTES = QTile::BYTES + STAGES * (KTile::BYTES + V_BYTES) + MBARRIERS * MBARRIER_BYTES;

  unsigned base = sram_base();

  DEVICE QTile q() const { return {base}; }
  DEVICE KTile k(int slot) const { return {base + QTile::BYTES + slot * KTile::BYTES}; }
  DEVICE VTile v(int slot) const { return {k(STAGES).base + slot * V_BYTES}; }
  DEVICE unsigned mbarrier(int i) const { return v(STAGES).base + i * MBARRIER_BYTES; }

  // "Full" counts the bytes of a tile that has come, "empty" the consumer warps that are done with it.
  DEVICE unsigned q_full() const { return mbarrier(0); }
  DEVICE unsigned q_empty() const { return mbarrier(1); }
  DEVICE unsigned k_full(int slot) const { return mbarrier(2 + slot); }
  DEVICE unsigned v_full(int slot) const { return mbarrier(2 + STAGES + slot); }
  DEVICE unsigned k_empty(int slot) const { return mbarrier(2 + 2 * STAGES + slot); }
  DEVICE unsigned v_empty(int slot) const { return mbarrier(2 + 3 * STAGES + slot); }
};
static_assert(2 + 4 * STAGES <= Sram::MBARRIERS, "the ring has its mbarriers");

#if E4M3
// The ones behind each slot of V, which nothing overwrites.
DEVICE void write_ones(const Sram& sram) {
  constexpr int CHUNKS = ONES_BYTES / CHUNK_BYTES;
  constexpr unsigned FOUR = 0x38383838;
  for (int i = threadIdx.x; i < STAGES * CHUNKS; i += (CONSUMERS + 1) * WARPGROUP)
    store_shared(sram.v(i / CHUNKS).base + VTile::BYTES + i % CHUNKS * CHUNK_BYTES, make_uint4(FOUR, FOUR, FOUR, FOUR));
  fence_async();
}
#endif

// Makes the block's mbarriers ready, and what else is written once; all threads call it.
DEVICE void open(const Sram& sram) {
  name_sram("q", sram.q().base, QTile::BYTES);
  name_sram("k", sram.k(0).base, STAGES * KTile::BYTES);
  name_sram(E4M3 ? "v_t" : "v", sram.v(0).base, STAGES * Sram::V_BYTES);
#if E4M3
  write_ones(sram);
#endif
  if (threadIdx.x == 0) {
    mbarrier_init(sram.q_full(), 1);
    mbarrier_init(sram.q_empty(), 4 * CONSUMERS);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(sram.k_full(slot), 1);
      mbarrier_init(sram.v_full(slot), 1);
      mbarrier_init(sram.k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(sram.v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();
}

// Shares out an SM's 65,536 registers anew, which a launch gives to all warpgroups alike: few to the one that loads.
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

// A place in a ring of STAGES slots, and the parity of the round: a consumer waits for `parity`, a producer for its opposite.
struct Ring {
  int slot = 0;
  unsigned parity = 0;

  DEVICE void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// One thread asks for a whole tile, panel by panel; `full` will know when it has come.
template <class TileT>
DEVICE void load_tile(TileT tile, const TensorMap& map, int batch, int head, int first_row, unsigned full,
                      unsigned long long hint, int first_column = 0) {
  constexpr int PANEL_ELEMENTS = TileT::PANEL_COLUMNS * (E4M3 ? 2 : 1);
  mbarrier_arrive_expect(full, TileT::BYTES);
#pragma unroll
  for (int i = 0; i < TileT::PANELS; ++i)
    tma_load(tile.panel(i), map, batch, head, first_row, first_column + i * PANEL_ELEMENTS, full, hint);
}

// A row tile of a head, and the key tiles that its rows see.
struct Work {
  int batch, head, first_row;
  Keys tiles;
};

DEVICE Work work_of(const Shape& shape, int flat_head, int row_tile) {
  const int first_row = row_tile * BR, last_row = min(first_row + BR, shape.len_q) - 1;
  const Keys tiles = visible_tiles(shape, first_row, last_row, BC);
  return {flat_head / shape.heads, flat_head % shape.heads, first_row, {uniform(tiles.first), uniform(tiles.last)}};
}

// The work of this block where blocks take the row tiles in their order, head after head.
DEVICE Work work_in_order(const Shape& shape) {
  const int row_tiles = ceil_div(shape.len_q, BR), block = opaque(static_cast<int>(blockIdx.x));
  return work_of(shape, block / row_tiles, block % row_tiles);
}

// Issues S = Q K_jᵀ of this warpgroup's 64 rows, and O += P V_j, or of e4m3 T = P V_j of the head dims from `dim` on; each is a
// group of its own.
DEVICE void multiply_qk(float (&s)[S_FRAGMENTS][4], QTile q, int row, KTile k) {
#if E4M3
  const unsigned long long rows = rows_operand(QTile{q.base + row * 128}, 0, 0), keys = rows_operand(k, 0, 0);
#endif
#pragma unroll
  for (int d = 0; d < QTile::COLUMNS; d += 16) {
#if E4M3
    wgmma_e4m3_ss(s, rows + operand_step<QTile>(0, d), keys + operand_step<KTile>(0, d), d > 0);
#else
    wgmma_ss(s, rows_operand(q, row, d), rows_operand(k, 0, d), d > 0);
#endif
  }
  wgmma_commit();
}
#if E4M3
template <int N8>
DEVICE void multiply_pv(float (&t)[N8][4], const unsigned (&p)[P_REGISTERS][4], VTile v, int dim) {
  const unsigned long long values = rows_operand(v, 0, 0);
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) wgmma_e4m3_rs(t, p[i], values + operand_step<VTile>(dim, 16 * i), i > 0);
  wgmma_commit();
}
#else
DEVICE void multiply_pv(float (&o)[O_FRAGMENTS][4], const unsigned (&p)[P_REGISTERS][4], VTile v) {
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) wgmma_rs(o, p[i], columns_operand(v, 16 * i));
  wgmma_commit();
}
#endif

// S = Q K_jᵀ, waited for: nothing of this warpgroup runs beside it.
DEVICE void multiply_qk_alone(float (&s)[S_FRAGMENTS][4], QTile q, int row, KTile k) {
  settle(s);
  wgmma_fence();
  multiply_qk(s, q, row, k);
  wgmma_wait<0>();
  settle(s);
}

#if !E4M3
// O += P V_j, waited for.
DEVICE void multiply_pv_alone(float (&o)[O_FRAGMENTS][4], unsigned (&p)[P_REGISTERS][4], VTile v) {
  settle(o);
  settle(p);
  wgmma_fence();
  multiply_pv(o, p, v);
  wgmma_wait<0>();
  settle(o);
}
#endif

// P in the storage dtype, as the operand of the second product.
DEVICE void round_p(unsigned (&p)[P_REGISTERS][4], const float (&s)[S_FRAGMENTS][4]) {
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) {
#if E4M3
    // a lane's accumulators are columns 2t, 2t + 1 of four fragments, its operand is k 4t..4t+3 of two halves: so k stands
    // for other keys than it says, and V's keys come in that order (flash3_fp8_transpose)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float (&a)[4] = s[4 * i + r / 2 * 2], (&b)[4] = s[4 * i + r / 2 * 2 + 1];
      p[i][r] = pack_e4m3(a[r % 2 * 2], a[r % 2 * 2 + 1], b[r % 2 * 2], b[r % 2 * 2 + 1]);
    }
#else
    const FragmentA a = operand_a(s, 16 * i);
#pragma unroll
    for (int r = 0; r < 4; ++r) p[i][r] = a.r[r];
#endif
  }
}

// The softmax of a lane's two rows. Exponentials are taken to the base 2: exp(scale (s - max)) = exp2(c s - m), one FMA and
// one ex2. m is c times a maximum; l is this lane's part of the row's sum. LOWEST serves as -inf: no score is below it, and
// m - m is 0, not NaN. A negative scale flips S instead, so that the largest s stays the largest exponent; scale 0 makes it 0.
struct Softmax {
  float c, sign;
  float m[2], l[2];

  DEVICE explicit Softmax(const Shape& shape)
      : c((shape.scale != 0 ? fabsf(shape.scale) : 1.f) * LOG2E),
        sign(shape.scale > 0 ? 1.f : shape.scale < 0 ? -1.f : 0.f) {
    begin();
  }

  DEVICE void begin() { m[0] = m[1] = LOWEST, l[0] = l[1] = 0; }

  // Hides what the mask hides in key tile j, of the warp whose lane's upper row is `row`; `full` are the tiles that it spares.
  DEVICE void mask(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int j, Keys full) const {
    if (j >= full.first && j <= full.last && sign == 1) return;
    if (sign != 1) {
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= sign;
    }
    const int key = j * BC + 2 * (opaque(lane_id()) % 4);
    if (j > full.last) hide_scores<true>(s, shape, row, key);
    if (j < full.first) hide_scores<false>(s, shape, row, key);
  }

  // The largest score of a row, of those that the lane holds, as an integer: floats above 0 are in its order, three at a time; below
  // 0, where the order is another one, it is below 0 as well.
  static DEVICE int largest(const float (&s)[S_FRAGMENTS][4], int half) {
    int a = bits(s[0][2 * half]), b = bits(s[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < S_FRAGMENTS; n += 2) {
      a = max(max(a, bits(s[n][2 * half])), bits(s[n][2 * half + 1]));
      if (n + 1 < S_FRAGMENTS) b = max(max(b, bits(s[n + 1][2 * half])), bits(s[n + 1][2 * half + 1]));
    }
    return max(a, b);
  }

  // Does a score exceed the row's m by more than TAU? Until then exp2(c s - m) stays small enough as it is, and neither O nor
  // l need be rescaled. Where that limit is below 0: yes.
  DEVICE bool risen(const float (&s)[S_FRAGMENTS][4]) const {
    bool any = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float limit = (m[half] + TAU) * reciprocal(c);
      any |= largest(s, half) >= (limit < 0 ? static_cast<int>(0x80000000) : bits(limit));
    }
    return any;
  }

  // m becomes the maximum so far; alpha: what O, like l, is to be multiplied with.
  DEVICE void raise(const float (&s)[S_FRAGMENTS][4], float (&alpha)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a = s[0][2 * half], b = s[0][2 * half + 1];
#pragma unroll
      for (int n = 1; n < S_FRAGMENTS; ++n) a = fmaxf(a, s[n][2 * half]), b = fmaxf(b, s[n][2 * half + 1]);
      const float top = fmaxf(m[half], c * quad_max(fmaxf(a, b)));
      alpha[half] = exp2_approx(m[half] - top);
      l[half] *= alpha[half];
      m[half] = top;
    }
  }

  // S becomes P = exp2(c S - m), and l grows by its sum.
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4]) {
    float sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = exp2_approx(c * s[n][e] - m[e / 2]);
        sum[e / 2][e % 2] += s[n][e];
      }
    l[0] += sum[0][0] + sum[0][1];
    l[1] += sum[1][0] + sum[1][1];
  }
};

template <int N>
DEVICE void rescale(float (&o)[N][4], const float (&alpha)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
}

// A lane's part of a row of O, times `factor`: row `half` of its two. Nothing, if the row lies outside.
DEVICE void store_o(const Tensor& out, const Shape& shape, const Work& work, int row, const float (&o)[O_FRAGMENTS][4], int half,
                    float factor) {
  store_row(row_address(out, work.batch, work.head, row), o, half, factor, row < shape.len_q ? padded_row_bytes(shape) : 0);
}

// A row's LSE: m + log(l), and -inf for a row without keys.
DEVICE void store_lse(float* lse, const Shape& shape, const Work& work, int row, float m, float sum) {
  float* row_lse = lse + (static_cast<long long>(work.batch) * shape.heads + work.head) * shape.len_q + row;
  if (row < shape.len_q && lane_id() % 4 == 0) store_global(row_lse, (m - LARGEST_P + log2_approx(sum)) * LN2);
}

// The consumers take turns at the tensor cores: one issues its products, then the next. Turns go round, the first to consumer 0.
// Named barrier 1 + i is the turn of consumer i, of whom takes it and who passes it on.
struct Turns {
  int consumer;

  DEVICE explicit Turns(int consumer) : consumer(consumer) {
    if (consumer == CONSUMERS - 1) pass();
  }
  DEVICE void take() const {
    if constexpr (CONSUMERS > 1) named_barrier_sync(1 + consumer, 2 * WARPGROUP);
  }
  DEVICE void pass() const {
    if constexpr (CONSUMERS > 1) named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
  }
};
