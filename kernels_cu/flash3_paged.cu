// FlashAttention-3, forward, over K and V in pages: for requests with many new queries each. (Shah et al. 2024, arXiv 2407.08608;
// pages: Kwon et al. 2023, arXiv 2309.06180.)
//
//   q, out (batch, heads, len_q, head_dim)    k, v (pages, kv_heads, page_size, head_dim)    float16 or bfloat16
//   block_table (batch, table_pages), seq_lens (batch) int32    lse (batch, heads, len_q) float32    rows padded to 16 bytes
//
// The consumers are flash3's: 64 rows of a head per warpgroup, turns at the tensor cores, V a tile behind K. What differs is how
// keys come, and which rows come when:
//   - A page may lie anywhere. Where a tile is made of whole pages, or a page of whole tiles, TMA brings boxes of a page
//     (PAGE_BOX). A warp asks for those of K, and one for those of V. Each lane asks for one box, and has looked up its page a tile
//     ahead. A box is whole: it also brings what lies behind the last key. In K that is masked. In V it is cleared, for 0 times a
//     NaN is NaN.
//   - From other pages four warps copy row by row, 16 bytes at a time, into the swizzled tiles that the tensor cores read. Two of
//     them copy K, two V. Each lane looks the page of one key up, a tile ahead, and tells the other lanes where that key lies. It
//     makes no difference how large a page is, and whether heads or keys lie next to each other. Rows behind the last key become
//     zeros, and aren't read from HBM.
//   - A copy doesn't count its bytes, as TMA does. A warp waits for its copies of a tile and says so, before it waits for the next
//     slot. The ring has one free slot at a time, so nothing is lost by that.
//   - Requests may have different numbers of queries (VARLEN): q and out are then (1, heads, len_q of all, head_dim), and cu_seqlens_q
//     (requests + 1) int32 says where each one's begin. A box of Q may reach into the next request. Those rows are cleared, for a
//     row of Q may make its warp rescale, and a request's bits don't depend on others.
//   - The lengths of requests lie in HBM. So blocks draw row tiles from a counter, and those of long requests come first
//     (requests.cuh). One warp works out what a number stands for, before it copies its last keys, and tells the other warps.
//
// Measured: docs/decoding.md, beside flash3 on as many keys in one piece. Boxes cost less than copies.
#define RAGGED 1  // a request is a sequence, in a batch of its own
#include "requests.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_paged(const __grid_constant__ TensorMap q, const __grid_constant__ Pool k, const __grid_constant__ Pool v, const Tensor out,
             float* lse, const float* sinks, const int* block_table, const int* seq_lens, const int* cu_seqlens_q,
             unsigned* drawn, const Shape shape) {
  const RequestSram sram;
  open_requests(sram);
  RequestAgenda agenda{shape, sram};
  Work work;
  Ring k_ring, v_ring;
  unsigned q_parity = 0;

  if (warpgroup_id() == 0) {
    become_copier();
    if (warp_id() >= PRODUCERS) return;
    const Requests requests{shape, seq_lens, cu_seqlens_q};
    const Divisor page_size(shape.page_size);
    Ring ring;  // of K or of V
    Told told = {};

    // step: load_q (producer: which rows)
    if (warp_id() == 0) told = requests.from(blockIdx.x, drawn);
    while (true) {
      // step: load_q (producer: tells which rows)
      if (warp_id() == 0)
        agenda.tell(told);
      else
        told = agenda.hear();
      if (!agenda.next(work, told)) break;

      const int kv = kv_head(shape, work.head);
      Copies copies{shape, page_size, work.sequence, work.keys};
      Copies::Pages here, next;
      if (warp_id() < PRODUCERS / 2) {
        // step: load_k (producer: pages of the first)
        next = copies.look_up(block_table, work.tiles.last);

        unsigned number = 0;
        if (threadIdx.x == 0) {
          // step: load_q (producer)
          mbarrier_wait(sram.q_empty(), q_parity ^ 1);
          load_tile(sram.q(), q, work.batch, work.head, work.q + work.first_row, sram.q_full(), EVICT_FIRST);
          // step: load_q (producer: draws the next rows, with no time to spare)
          if (DYNAMIC && work.tiles.first >= work.tiles.last) number = draw_from(drawn, requests.last());
        }
        q_parity ^= 1;
#pragma unroll 1
        for (int j = work.tiles.last;; --j) {
          here = next;
          if (warp_id() == 0) {
            // step: load_q (producer: which rows are next, while nothing can be copied yet)
            if (DYNAMIC && j <= work.tiles.first) told = requests.from(gridDim.x + uniform(number), drawn);
            // step: load_q (producer: draws the next rows, a key tile ahead)
            if (DYNAMIC && threadIdx.x == 0 && j == work.tiles.first + 1) number = draw_from(drawn, requests.last());
            warp_barrier();  // or lane 0 asks for its page alone
          }
          if (j < work.tiles.first) break;

          // step: load_k (producer: pages of the next)
          if (j > work.tiles.first) next = copies.look_up(block_table, j - 1);

          // step: load_k (producer)
          mbarrier_wait(sram.k_empty(ring.slot), ring.parity ^ 1);
          copies.load(sram.k(ring.slot), k, kv, j, here, sram.k_full(ring.slot));
          ring.advance();
          if (j == work.tiles.first) break;
        }
        copies.finish();
      } else {
        // step: load_v (producer: pages of the first)
        next = copies.look_up(block_table, work.tiles.last);
#pragma unroll 1
        for (int j = work.tiles.last; j >= work.tiles.first; --j) {
          here = next;

          // step: load_v (producer: pages of the next)
          if (j > work.tiles.first) next = copies.look_up(block_table, j - 1);

          // step: load_v (producer)
          mbarrier_wait(sram.v_empty(ring.slot), ring.parity ^ 1);
          copies.load(sram.v(ring.slot), v, kv, j, here, sram.v_full(ring.slot));
          ring.advance();
        }
        copies.finish();
      }
      if (ONE_TILE) break;
    }
    return;
  }

  become_consumer_of_copies();
  const int consumer = warpgroup_id() - 1;
  const Turns turns{consumer};
  turns.start();
  Softmax softmax(shape);
  unsigned p[P_REGISTERS][4];
  while (true) {
    // step: load_q (which rows)
    if (!agenda.next(work, agenda.hear())) break;
    const Shape own = work.alone(shape);
    const int last_row = min(work.first_row + BR, own.len_q) - 1;
    const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;
    const Keys full = full_tiles(own, work.first_row, last_row, BC);  // need no mask
    float o[O_FRAGMENTS][4] = {}, s[S_FRAGMENTS][4], alpha[2];
    softmax.begin();

    // step: normalize (its sink, ahead)
    const float sink = of_head<SINKS>(sinks, work.head, -INF);

    // step: load_q
    mbarrier_wait(sram.q_full(), q_parity);
    q_parity ^= 1;
    if (VARLEN && work.first_row + BR > own.len_q) clear_rows<CONSUMERS>(sram.q(), own.len_q - work.first_row, CLEARED);

    if (work.tiles.first > work.tiles.last) {
      release(sram.q_empty());
    } else {
      // step: load_k (first)
      mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

      // step: scores (first)
      multiply_qk_alone(s, sram.q(), consumer * 64, sram.k(k_ring.slot));
      release(sram.k_empty(k_ring.slot));
      k_ring.advance();
      if (work.tiles.first == work.tiles.last) release(sram.q_empty());

      // step: mask (first)
      softmax.mask(s, own, lane_row, work.tiles.last, full);

      // step: softmax (first)
      softmax.raise(s, alpha);
      if constexpr (CAP_LATE)
        softmax.exponentials(s, own, lane_row, work.tiles.last, full);
      else
        softmax.exponentials(s);
      round_p(p, s);

      // step: load_v (of the last tile, if it isn't full)
      const int last_key = work.tiles.last * BC;
      if (PAGE_BOX && last_key + BC > own.len_kv) {
        mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);
        clear_rows<CONSUMERS>(sram.v(v_ring.slot), own.len_kv - last_key, CLEARED);
      }

      bool risen = false;
      for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) {
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

        // step: scores (done)
        wgmma_wait<1>();
        settle(s);
        release(sram.k_empty(k_ring.slot));
        k_ring.advance();
        if (j == work.tiles.first) release(sram.q_empty());

        // step: mask
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
        if constexpr (CAP_LATE)
          softmax.exponentials(s, own, lane_row, j, full);
        else
          softmax.exponentials(s);
        round_p(p, s);
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
      float sum = quad_sum(softmax.l[half]);
      const float alpha = join_sink(softmax.m[half], sum, sink);
      const float factor = sum > 0 ? alpha * reciprocal(sum) : 0;  // a row without keys has a sum of 0 and gets 0

      // step: store_o
      store_o(out, shape, work, row, o, half, factor);

      // step: store_lse
      store_lse(lse, shape, work, row, softmax.m[half], sum);
    }
    if (ONE_TILE) break;
  }
}
