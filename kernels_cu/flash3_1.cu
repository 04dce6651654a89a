// FlashAttention-3, rung 1: TMA loads and WGMMA. (The algorithm: Shah et al. 2024, arXiv 2407.08608. Rungs 2 and 3 add the
// paper's ideas.)
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, len_q) float32         rows padded to 16 bytes
//
// This is flash2 with Hopper's two engines. One thread asks for whole tiles (TMA), and a warpgroup multiplies 64 rows at
// once, with K and V straight from SRAM (WGMMA). The rows are split as before (split-Q), now over warpgroups: warpgroup w
// owns rows 64 w .. 64 w + 63 of the block's BR.
//
// Expected: the tensor cores run at twice the rate of mma.sync, and copies cost no instructions. But while a warpgroup is
// in its softmax, nothing is multiplied for it, and all warpgroups wait for each other once per tile.
// So the wider the head, the more this rung gains over flash2 (docs/flash3.md).
#include "flash3.cuh"

constexpr int THREADS = CONSUMERS * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_1(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const Tensor out, float* lse, const Shape shape) {
  const Sram sram;
  open(sram);
  const Work work = work_in_order(shape);
  const int kv = kv_head(shape, work.head), last_row = min(work.first_row + BR, shape.len_q) - 1;
  const int lane_row = work.first_row + warp_id() * 16 + lane_id() / 4;
  const bool loader = threadIdx.x == 0;
  auto load_k = [&](Ring ring, int j) {
    load_tile(sram.k(ring.slot), k, work.batch, kv, j * BC, sram.k_full(ring.slot), EVICT_LAST);
  };
  auto load_v = [&](Ring ring, int j) {
    load_tile(sram.v(ring.slot), v, work.batch, kv, j * BC, sram.v_full(ring.slot), EVICT_LAST);
  };

  if (loader) {
    // step: load_q (ahead)
    load_tile(sram.q(), q, work.batch, work.head, work.first_row, sram.q_full(), EVICT_FIRST);
    Ring ring;
    for (int j = work.tiles.last; j >= work.tiles.first && j > work.tiles.last - STAGES; --j, ring.advance()) {
      // step: load_k (ahead)
      load_k(ring, j);
      // step: load_v (ahead)
      load_v(ring, j);
    }
  }

  // step: load_q
  mbarrier_wait(sram.q_full(), 0);

  Softmax softmax(shape);
  const Keys full = full_tiles(shape, work.first_row, last_row, BC);  // need no mask
  float o[O_FRAGMENTS][4] = {};
  Ring ring;
  for (int j = work.tiles.last; j >= work.tiles.first; --j) {
    // step: load_k
    mbarrier_wait(sram.k_full(ring.slot), ring.parity);

    // step: scores
    float s[S_FRAGMENTS][4];
    settle(s);
    wgmma_fence();
    multiply_qk(s, sram.q(), warpgroup_id() * 64, sram.k(ring.slot));
    wgmma_wait<0>();
    settle(s);

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

    barrier();  // all warps are done with K_j and V_j
    if (loader && j - STAGES >= work.tiles.first) {
      // step: load_k (into the slot that has become free)
      load_k(ring, j - STAGES);
      // step: load_v (into the slot that has become free)
      load_v(ring, j - STAGES);
    }
    ring.advance();
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
