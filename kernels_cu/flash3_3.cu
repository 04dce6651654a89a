// FlashAttention-3, rung 3: softmax beside the matrix products. Section 3.2 and Algorithm 2 of Shah et al. 2024 (arXiv
// 2407.08608).
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, len_q) float32         rows padded to 16 bytes
//
// The tensor cores must not wait for exponentials. There are two overlaps:
//   - Within a warpgroup: S_j = Q K_jᵀ is issued before O += P V of the tile before. While that product still runs, the
//     warpgroup looks for the maxima of S_j.
//   - Between warpgroups (ping-pong): they take turns at the tensor cores, so that the softmax of one runs beside the products
//     of another.
//
// Two choices keep the softmax short:
//   - m stays until a score exceeds it by 2^8 (TAU). A lane sees that by itself, so there are no shuffles and hardly a rescale.
//   - All four warps of a warpgroup execute the same wait for O: PTX leaves a wait in a branch undefined that only some of them
//     take. So the branch that raises the maximum comes before the wait, and O is rescaled behind it: beside the next Q Kᵀ, or
//     at D = 64, where that product is too short to hide it, at once.
//
// NEW marks what this kernel adds to rung 2.
//
// Expected: tensor cores that never wait, at D = 128 and 256; at D = 64 the exponentials take as long as the products.
// So this rung gains most where D and the length are large (docs/flash3.md).
#include "flash3.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_3(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const Tensor out, float* lse, const Shape shape) {
  const Sram sram;
  open(sram);

  if (warpgroup_id() == 0) {
    become_producer();
    if (threadIdx.x == 0) {
      const Work work = work_in_order(shape);
      const int kv = kv_head(shape, work.head);
      // step: load_q (producer)
      load_tile(sram.q(), q, work.batch, work.head, work.first_row, sram.q_full(), EVICT_FIRST);
      Ring ring;
      for (int j = work.tiles.last; j >= work.tiles.first; --j, ring.advance()) {
        // step: load_k (producer)
        mbarrier_wait(sram.k_empty(ring.slot), ring.parity ^ 1);
        load_tile(sram.k(ring.slot), k, work.batch, kv, j * BC, sram.k_full(ring.slot), EVICT_LAST);
        // step: load_v (producer)
        mbarrier_wait(sram.v_empty(ring.slot), ring.parity ^ 1);
        load_tile(sram.v(ring.slot), v, work.batch, kv, j * BC, sram.v_full(ring.slot), EVICT_LAST);
      }
    }
    return;
  }

  become_consumer();
  const Work work = work_in_order(shape);
  const int consumer = warpgroup_id() - 1, last_row = min(work.first_row + BR, shape.len_q) - 1;
  const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;
  const Turns turns{consumer};  // NEW
  turns.start();  // NEW

  // step: load_q
  mbarrier_wait(sram.q_full(), 0);

  Softmax softmax(shape);
  const Keys full = full_tiles(shape, work.first_row, last_row, BC);  // need no mask
  float o[O_FRAGMENTS][4] = {}, s[S_FRAGMENTS][4], alpha[2];
  unsigned p[P_REGISTERS][4];
  Ring k_ring, v_ring;  // NEW
  if (work.tiles.first <= work.tiles.last) {
    // step: load_k (first)
    mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

    // step: scores (first)
    multiply_qk_alone(s, sram.q(), consumer * 64, sram.k(k_ring.slot));  // NEW
    release(sram.k_empty(k_ring.slot));
    k_ring.advance();

    // step: mask (first)
    softmax.mask(s, shape, lane_row, work.tiles.last, full);

    // step: softmax (first)
    softmax.raise(s, alpha);
    softmax.exponentials(s);
    round_p(p, s);

    bool risen = false;  // NEW
    for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) {  // NEW
      // step: load_k
      mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);
      turns.take();  // NEW

      // step: scores
      settle(s);
      settle(o);
      settle(p);
      wgmma_fence();
      multiply_qk(s, sram.q(), consumer * 64, sram.k(k_ring.slot));

      // step: load_v (of the tile before)
      mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

      // step: rescale (of the tile before, beside Q Kᵀ)
      if (RESCALE_LATE && risen) rescale(o, alpha);  // NEW

      // step: output (of the tile before, in the background)
      settle(o);
      wgmma_fence();
      multiply_pv(o, p, sram.v(v_ring.slot));  // NEW
      turns.pass();  // NEW
      wgmma_wait<1>();  // NEW: S
      settle(s);
      release(sram.k_empty(k_ring.slot));
      k_ring.advance();

      // step: mask
      softmax.mask(s, shape, lane_row, j, full);

      // step: softmax
      risen = any_lane(softmax.risen(s));  // NEW
      if (risen) softmax.raise(s, alpha);  // NEW

      // step: output (of the tile before: done)
      wgmma_wait<0>();  // NEW
      settle(o);
      release(sram.v_empty(v_ring.slot));
      v_ring.advance();

      // step: rescale (at once)
      if (!RESCALE_LATE && risen) rescale(o, alpha);  // NEW

      // step: softmax (P)
      softmax.exponentials(s);
      round_p(p, s);
    }

    // step: rescale
    if (RESCALE_LATE && risen) rescale(o, alpha);  // NEW

    // step: load_v
    mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

    // step: output
    multiply_pv_alone(o, p, sram.v(v_ring.slot));  // NEW
    release(sram.v_empty(v_ring.slot));
    v_ring.advance();
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
