// FlashAttention-3, rung 2: a producer and its consumers. Section 3.1 of Shah et al. 2024 (arXiv 2407.08608): warp
// specialisation.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, len_q) float32         rows padded to 16 bytes
//
// One warpgroup loads, the others compute. K and V go round a ring of STAGES slots. Each slot has two mbarriers: "full" when
// the bytes have come, "empty" when every consumer warp is done with them. So nothing waits for the whole block any more.
// The producer needs few registers and leaves its own to the consumers (setmaxnreg).
//
// NEW marks what this kernel adds to rung 1.
//
// Expected: warpgroups drift apart, so that one multiplies while the other takes exponentials. Loads run a whole ring ahead.
// But the drift is left to chance, and within a warpgroup softmax and products still alternate (docs/flash3.md).
#include "flash3.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;  // NEW

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_2(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const Tensor out, float* lse, const Shape shape) {
  const Sram sram;
  open(sram);

  if (warpgroup_id() == 0) {  // NEW
    become_producer();  // NEW
    if (threadIdx.x == 0) {
      const Work work = work_in_order(shape);
      const int kv = kv_head(shape, work.head);
      // step: load_q (producer)
      load_tile(sram.q(), q, work.batch, work.head, work.first_row, sram.q_full(), EVICT_FIRST);
      Ring ring;
      for (int j = work.tiles.last; j >= work.tiles.first; --j, ring.advance()) {
        // step: load_k (producer)
        mbarrier_wait(sram.k_empty(ring.slot), ring.parity ^ 1);  // NEW
        load_tile(sram.k(ring.slot), k, work.batch, kv, j * BC, sram.k_full(ring.slot), EVICT_LAST);
        // step: load_v (producer)
        mbarrier_wait(sram.v_empty(ring.slot), ring.parity ^ 1);  // NEW
        load_tile(sram.v(ring.slot), v, work.batch, kv, j * BC, sram.v_full(ring.slot), EVICT_LAST);
      }
    }
    return;
  }

  become_consumer();  // NEW
  const Work work = work_in_order(shape);
  const int consumer = warpgroup_id() - 1, last_row = min(work.first_row + BR, shape.len_q) - 1;
  const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;

  // step: load_q
  mbarrier_wait(sram.q_full(), 0);

  Softmax softmax(shape);
  const Keys full = full_tiles(shape, work.first_row, last_row, BC);  // need no mask
  float o[O_FRAGMENTS][4] = {};
  Ring ring;
  for (int j = work.tiles.last; j >= work.tiles.first; --j, ring.advance()) {
    // step: load_k
    mbarrier_wait(sram.k_full(ring.slot), ring.parity);

    // step: scores
    float s[S_FRAGMENTS][4];
    settle(s);
    wgmma_fence();
    multiply_qk(s, sram.q(), consumer * 64, sram.k(ring.slot));
    wgmma_wait<0>();
    settle(s);
    release(sram.k_empty(ring.slot));  // NEW

    // step: mask
    softmax.mask(s, shape, lane_row, j, full);

    // step: softmax
    float alpha[2];
    softmax.raise(s, alpha);
    softmax.exponentials(s);
    unsigned p[P_REGISTERS][4];
    round_p(p, s);

    // step: rescale
    rescale(o, alpha);

    // step: load_v
    mbarrier_wait(sram.v_full(ring.slot), ring.parity);

    // step: output
    settle(o);
    settle(p);
    wgmma_fence();
    multiply_pv(o, p, sram.v(ring.slot));
    wgmma_wait<0>();
    settle(o);
    release(sram.v_empty(ring.slot));  // NEW
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;

    // step: normalize
    const float sum = quad_sum(softmax.l[half]);  // a row without keys has l = 0 and gets 0
    const float factor = sum > 0 ? reciprocal(sum) : 0;

    // step: store_o
    store_o(out, shape, work, row, o, half, factor);

    // step: store_lse
    store_lse(lse, shape, work, row, softmax.m[half], sum);
  }
}
