// FlashAttention-3, forward: the top rung, with rung 3's overlaps and an order of work. (Shah et al. 2024, arXiv 2407.08608.)
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, len_q) float32         rows padded to 16 bytes
//
// Rung 3 computes a tile as fast as this one. What is left is which block computes what, and when (scheduler.cuh):
//   - Blocks are persistent: there is one per SM, which takes row tile after row tile. While the consumers finish one tile, the
//     producer loads the next.
//   - Under a causal mask a tile at the end of a head takes longer than one at its start. So blocks draw tiles from a counter, the
//     longest first (DYNAMIC): a block that is free takes the next one. It draws while it loads its last keys. If it drew sooner, it
//     would hold a tile that another block could begin before it.
//   - Where sequences have different lengths, or a mask of an array takes the registers, each row tile has a block of its own, and
//     the longest comes first.
//   - Heads run in groups whose K and V stay in the L2 while all their rows pass.
//
// NEW marks what this kernel adds to rung 3.
//
// Expected: the cost of a tile's start and end is hidden, most of all in short sequences. No block is left alone with long
// rows.
// What binds (docs/flash3.md): the power limit lowers the clock, once calls follow each other without a pause. Within the clocks the
// tensor cores bind at D = 128 and 256, and no unit does at D = 64. With few keys the first scores and the last output of each tile
// bind.
#include "flash3.cuh"
#include "philox.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

// Where sequences leave a wide head no registers for a list of row tiles, each has a block of its own.
constexpr bool ONE_TILE = RAGGED && HEAD_DIM > 128;

using Kept = KeptWeights<S_FRAGMENTS, false>;  // of a key tile, for dropout

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
       const Tensor out, float* lse, const float* sinks, const float* alibi_slopes, const int* offsets_q, const int* offsets_kv,
       const unsigned* mask_bits, const int* mask_tiles, const long long* rng_state, unsigned* drawn, const Shape shape) {
  const Sram sram;
  open(sram);
  if (warpgroup_id() == 0) {
    become_producer();
    if (threadIdx.x == 0) {
      Agenda agenda{shape, {offsets_q, offsets_kv}};  // NEW
      Work work;
      Ring k_ring, v_ring;
      unsigned q_parity = 0;  // NEW
      while (true) {
        // step: load_q (producer: which rows)
        if (!agenda.next(work)) break;  // NEW

        // step: load_q (producer: how many key tiles its rows see)
        const Visits visits(mask_tiles, shape, work.mask_tile());
        if constexpr (MASK) work.tiles = {0, visits.length() - 1};
        const int kv = kv_head(shape, work.head);
        Visit here, next;  // of V's key tile and of K's, which is one ahead
        auto load_k = [&](int j) {
          if constexpr (MASK) next = visits.at(j);
          mbarrier_wait(sram.k_empty(k_ring.slot), k_ring.parity ^ 1);
          const int row = work.kv + key_tile(j, next) * BC;
          load_tile(sram.k(k_ring.slot), k, work.batch, kv, row, sram.k_full(k_ring.slot), EVICT_LAST);
          k_ring.advance();
        };

        // step: load_k (producer: the first, into a slot that is free before Q's)
        if (work.tiles.first <= work.tiles.last) load_k(work.tiles.last);  // NEW

        // step: load_q (producer)
        mbarrier_wait(sram.q_empty(), q_parity ^ 1);  // NEW
        if (DYNAMIC && agenda.number >= gridDim.x) store_shared(sram.number(), agenda.number);  // NEW
        load_tile(sram.q(), q, work.batch, work.head, work.q + work.first_row, sram.q_full(), EVICT_FIRST);
        q_parity ^= 1;  // NEW

        // step: load_q (producer: draws the next rows, with no time to spare)
        if (DYNAMIC && work.tiles.first >= work.tiles.last) agenda.draw(drawn);  // NEW

        for (int j = work.tiles.last; j >= work.tiles.first; --j) {
          here = next;

          // step: load_k (producer: the next)
          if (j > work.tiles.first) load_k(j - 1);  // NEW

          // step: load_q (producer: draws the next rows, a key tile ahead)
          if (DYNAMIC && j == work.tiles.first + 1) agenda.draw(drawn);  // NEW

          // step: load_v (producer)
          mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);
          const int row = work.kv + key_tile(j, here) * BC;
          load_tile(sram.v(v_ring.slot), v, work.batch, kv, row, sram.v_full(v_ring.slot), EVICT_LAST);
          v_ring.advance();
        }
        if (ONE_TILE) break;

        // step: load_q (producer: which rows are next)
        if constexpr (DYNAMIC) agenda.take();  // NEW
      }

      // step: load_q (producer: no rows are left)
      if constexpr (DYNAMIC) {  // NEW
        mbarrier_wait(sram.q_empty(), q_parity ^ 1);
        store_shared(sram.number(), agenda.number);
        mbarrier_arrive(sram.q_full());
      }
    }
    return;
  }

  become_consumer();
  Agenda agenda{shape, {offsets_q, offsets_kv}};  // NEW
  Work work;
  const int consumer = warpgroup_id() - 1, lane_column = 2 * (lane_id() % 4);
  const Turns turns{consumer};
  turns.start();
  Softmax softmax(shape);
  unsigned p[P_REGISTERS][4], q_parity = 0;
  Ring k_ring, v_ring;
  while (true) {
    // step: load_q (which rows)
    if (!agenda.next(work)) break;  // NEW
    const Shape alone = work.alone(shape);
    const Shape& own = RAGGED ? alone : shape;  // else no copy, for which the compiler would take registers

    // step: load_q (how many key tiles its rows see)
    const int row_tile = work.mask_tile();
    const Visits visits(mask_tiles, shape, row_tile);
    if constexpr (MASK) work.tiles = {0, uniform(visits.length()) - 1};
    const int last_row = min(work.first_row + BR, own.len_q) - 1;
    const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;
    const Keys full = full_tiles(own, work.first_row, last_row, BC);  // need no mask
    float o[O_FRAGMENTS][4] = {}, s[S_FRAGMENTS][4], alpha[2];
    softmax.begin();  // NEW

    // step: normalize (its sink, ahead)
    const float sink = of_head<SINKS>(sinks, work.head, -INF);

    // step: load_q
    const float slope = of_head<ALIBI>(alibi_slopes, work.head, 0);
    const Dropout dropout = Dropout(rng_state, shape.kept).of_head(work.batch * shape.heads + work.head);
    const int rows_16 = work.first_row / 16 + warp_id() - 4;  // this warp's, of the head
    mbarrier_wait(sram.q_full(), q_parity);  // NEW
    q_parity ^= 1;  // NEW
    if (RAGGED && work.first_row + BR > own.len_q) clear_rows<CONSUMERS>(sram.q(), own.len_q - work.first_row, CLEARED);

    if (work.tiles.first > work.tiles.last) {
      release(sram.q_empty());  // NEW
    } else {
      // step: load_k (first: which it is, and which is next)
      Visit here, next;
      if constexpr (MASK) here = visits.at(work.tiles.last);
      if (MASK && work.tiles.last > work.tiles.first) next = visits.at(work.tiles.last - 1);

      // step: mask (first: its bits, ahead)
      MaskBits hidden;
      if constexpr (MASK) hidden.load(mask_bits, shape, row_tile, here, warp_id() - 4);

      // step: load_k (first)
      mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

      // step: scores (first)
      multiply_qk_alone(s, sram.q(), consumer * 64, sram.k(k_ring.slot));
      release(sram.k_empty(k_ring.slot));
      k_ring.advance();
      if (work.tiles.first == work.tiles.last) release(sram.q_empty());  // NEW

      softmax.bend(s, own, lane_row, key_tile(work.tiles.last, here) * BC + lane_column, slope);

      // step: mask (first)
      if constexpr (MASK)
        softmax.mask(s, hidden, here);
      else
        softmax.mask(s, own, lane_row, work.tiles.last, full);

      // step: softmax (first)
      softmax.raise(s, alpha);
      if constexpr (!CAP_LATE)
        softmax.exponentials(s);
      else if constexpr (MASK)
        softmax.exponentials(s, hidden, here);
      else
        softmax.exponentials(s, own, lane_row, work.tiles.last, full);
      round_p(p, s);
      if constexpr (DROPOUT) {
        Kept kept;
        kept.draw(dropout, rows_16, key_tile(work.tiles.last, here) * (BC / 16));
        kept.drop(p);
      }

      // step: load_v (of the last tile, if it isn't full)
      const int last_key = key_tile(work.tiles.last, here) * BC;
      if (RAGGED && last_key + BC > own.len_kv) {
        mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);
        clear_rows<CONSUMERS>(sram.v(v_ring.slot), own.len_kv - last_key, CLEARED);
      }

      bool risen = false;
      for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) {
        // step: load_k (which is next)
        here = next;
        if (MASK && j > work.tiles.first) next = visits.at(j - 1);

        // step: mask (its bits, ahead)
        if constexpr (MASK) hidden.load(mask_bits, shape, row_tile, here, warp_id() - 4);

        // step: load_k
        mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);
        turns.take();

        // step: scores
        settle(s);
        settle(o);
        settle(p);
        wgmma_fence();
        multiply_qk(s, sram.q(), consumer * 64, sram.k(k_ring.slot));

        // step: load_v (of the tile before)
        mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

        // step: rescale (of the tile before, beside Q Kᵀ)
        if (RESCALE_LATE && risen) rescale(o, alpha);

        // step: output (of the tile before, in the background)
        settle(o);
        wgmma_fence();
        multiply_pv(o, p, sram.v(v_ring.slot));
        turns.pass();

        // step: output (which weights are kept, while the tensor cores are busy)
        Kept kept;
        if constexpr (DROPOUT) kept.draw(dropout, rows_16, key_tile(j, here) * (BC / 16));

        // step: scores (done)
        wgmma_wait<1>();
        settle(s);
        release(sram.k_empty(k_ring.slot));
        k_ring.advance();
        if (j == work.tiles.first) release(sram.q_empty());  // NEW

        softmax.bend(s, own, lane_row, key_tile(j, here) * BC + lane_column, slope);

        // step: mask
        if constexpr (MASK)
          softmax.mask(s, hidden, here);
        else
          softmax.mask(s, own, lane_row, j, full);

        // step: softmax
        risen = any_lane(softmax.risen(s));
        if (risen) softmax.raise(s, alpha);

        // step: output (of the tile before: done)
        wgmma_wait<0>();
        settle(o);
        release(sram.v_empty(v_ring.slot));
        v_ring.advance();

        // step: rescale (at once)
        if (!RESCALE_LATE && risen) rescale(o, alpha);

        // step: softmax (P)
        if constexpr (!CAP_LATE)
          softmax.exponentials(s);
        else if constexpr (MASK)
          softmax.exponentials(s, hidden, here);
        else
          softmax.exponentials(s, own, lane_row, j, full);
        round_p(p, s);
        if constexpr (DROPOUT) kept.drop(p);
      }

      // step: rescale
      if (RESCALE_LATE && risen) rescale(o, alpha);

      // step: load_v
      mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

      // step: output
      multiply_pv_alone(o, p, sram.v(v_ring.slot));
      release(sram.v_empty(v_ring.slot));
      v_ring.advance();
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;

      // step: normalize
      float sum = quad_sum(softmax.l[half]);  // a row without keys has l = 0 and gets 0
      const float alpha_of_sink = join_sink(softmax.m[half], sum, sink);
      const float factor = sum > 0 ? of_kept(alpha_of_sink * reciprocal(sum), shape.kept) : 0;

      // step: store_o
      store_o(out, shape, work, row, o, half, factor);

      // step: store_lse
      store_lse(lse, shape, work, row, softmax.m[half], sum);
    }
    if (ONE_TILE) break;

    // step: load_q (which rows the producer has drawn)
    if constexpr (DYNAMIC) agenda.number = told(sram, q_parity);  // NEW
  }
}
