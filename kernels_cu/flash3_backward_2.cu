// The backward pass on Hopper, rung 2: a producer and its consumers. Section 3.1 of Shah et al. 2024 (arXiv 2407.08608): warp
// specialisation.
//
//   q, dout (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse, delta (batch, heads, len_q)    dq_sum    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes; dq_sum lies as the accumulators of dQ do (SumTile). First and last launch are flash3_backward's.
//
// One warpgroup loads, two compute. A thread asks for Q and dO, a warp fetches the LSE, and another one D. They go round a ring of
// STAGES slots. Each slot has mbarriers: "full" when all of it has come, "empty" when every consumer warp is done with it. The
// producer needs few registers and leaves its own to the consumers (setmaxnreg).
//
// So nothing waits for the whole block any more. Only for dQ a warpgroup waits for the other one's dS (`ds_full`), in the middle of
// a tile. There are two buffers of dS. A warp that has seen all of one tile's dS knows that no warp reads that of the tile before.
//
// NEW marks what this kernel adds to rung 1.
//
// Expected: loads run a whole ring ahead, and no warp that multiplies waits for what it fetches itself. But dQ keeps the two
// warpgroups in step, and within each of them exponentials and products still alternate.
//
//   SRAM        K, V  BC x D | Q, dO  STAGES x (BR x D) | dS  2 x (BC x BR) | LSE, D  STAGES x BR | mbarriers
//   registers   dK and dV (64 x D), S and dP (64 x BR) in float32; then dQ in place of the last two
//
#include "flash3_backward_rungs.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;  // NEW

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward_2(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                  const float* lse, const __grid_constant__ TensorMap dout, const float* delta, float* dq_sum, const Tensor dk,
                  const Tensor dv, const Shape shape) {
  const Sram sram;
  open(sram);
  const Work work = work_in_order(shape);
  const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads;
  Visit here = work.first(shape);
  Ring ring;

  if (warpgroup_id() == 0) {  // NEW
    become_producer();  // NEW
    if (threadIdx.x == 0) {
      // step: load_kv (producer)
      load_tile(sram.k(), k, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
      load_tile(sram.v(), v, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        const int head = here.head - batch * shape.heads;
        // step: load_q (producer)
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);  // NEW
        load_tile(sram.q(ring.slot), q, batch, head, here.i * BR, sram.q_full(ring.slot), EVICT_LAST);
        // step: load_do (producer)
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);  // NEW
        load_tile(sram.dout(ring.slot), dout, batch, head, here.i * BR, sram.do_full(ring.slot), EVICT_LAST);
      }
    }
    if (warp_id() == 1)
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_q (producer: the LSE to the base 2; without a query it is INF, so that P is 0)
        const Numbers numbers(lse, shape, Origin{}, here, INF);
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);  // NEW
        numbers.store(sram.lse(ring.slot), [](float x) { return lse_of(x); });
        release(sram.q_full(ring.slot));
      }
    if (warp_id() == 2)
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_do (producer: D)
        const Numbers numbers(delta, shape, Origin{}, here, 0);
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);  // NEW
        numbers.store(sram.delta(ring.slot), [](float x) { return x; });
        release(sram.do_full(ring.slot));
      }
    return;
  }

  become_consumer();  // NEW
  const int consumer = warpgroup_id() - 1, own_row = (warp_id() - 4) * 16, lane_key = work.first_key + own_row + lane_id() / 4;

  // step: load_kv
  mbarrier_wait(sram.kv_full(), 0);

  const Mask mask(shape, work.first_key + 64 * consumer, lane_key);
  Gradient dk_sum = {}, dv_sum = {};
  for (; work.left(here); here.advance(work.tiles), ring.advance()) {
    const int slot = ring.slot;
    // step: load_q
    mbarrier_wait(sram.q_full(slot), ring.parity);

    // step: load_do
    mbarrier_wait(sram.do_full(slot), ring.parity);

    // step: scores
    Transposed s, dp;
    settle(s);
    settle(dp);
    wgmma_fence();
    multiply_by_queries(s, sram.k(), 64 * consumer, sram.q(slot), 0);  // Sᵀ = K_j Q_iᵀ

    // step: dp
    multiply_by_queries(dp, sram.v(), 64 * consumer, sram.dout(slot), 0);  // dPᵀ = V_j dO_iᵀ
    wgmma_wait<0>();
    settle(s);
    settle(dp);

    // step: mask
    mask.hide(s, here.i);

    // step: exp
    exponentials(s, Scores(shape).c, sram.lse(slot));  // P = exp(S - LSE)

    // step: load_do (D, which is needed only here)
    take_away(dp, sram.delta(slot));

    // step: ds
    unsigned p[QUERY_STEPS][4], ds[QUERY_STEPS][4];
    multiply_into(dp, s);  // dS = P (dP - D)
    round_operand(p, s);
    round_operand(ds, dp);
    store_operand(sram.ds(slot), own_row, ds);
    fence_async();
    release(sram.ds_full(slot));  // NEW

    // step: dv
    settle(dv_sum);
    settle(dk_sum);
    settle(p);
    settle(ds);
    wgmma_fence();
    multiply_by_columns(dv_sum, p, sram.dout(slot));  // dV_j += Pᵀ dO_i

    // step: dk
    multiply_by_columns(dk_sum, ds, sram.q(slot));  // dK_j += dSᵀ Q_i

    // step: dq
    mbarrier_wait(sram.ds_full(slot), ring.parity);  // NEW: the other warpgroup's dS
    QueryGradient dq;
    settle(dq);
    wgmma_fence();
    multiply_for_queries(dq, sram.ds(slot), sram.k(), consumer);  // dQ_i += dS K_j

    // step: dk (done)
    wgmma_wait<1>();  // NEW: dV and dK
    settle(dv_sum);
    settle(dk_sum);
    release(sram.do_empty(slot));  // NEW
    release(sram.q_empty(slot));  // NEW

    // step: dq (done: add it to HBM)
    wgmma_wait<0>();
    settle(dq);
    add_gradient(dq_sum, sum_tile_of(shape, here.head, here.i), dq, consumer);
  }

  // step: store_dkv
  store_gradient(dk, shape, kv_head, lane_key, dk_sum, shape.scale);
  store_gradient(dv, shape, kv_head, lane_key, dv_sum, 1);
}
