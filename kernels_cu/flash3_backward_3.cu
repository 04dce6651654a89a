// The backward pass on Hopper, rung 3: products beside everything else.
//
//   q, dout (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse, delta (batch, heads, len_q)    dq_sum    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes; dq_sum lies as the accumulators of dQ do (SumTile). First and last launch are flash3_backward's.
//
// The tensor cores must not wait for exponentials. There are two overlaps:
//   - Within a warpgroup: the exponentials of S run beside the product for dP, and dQ is added to HBM beside those for dV and dK.
//   - Between warpgroups: a tile's dQ is computed one tile later, beside the next dV and dK. The other warpgroup's dS has long been
//     there by then. So no warpgroup waits in the middle of a tile, and the two drift apart: one multiplies while the other takes
//     exponentials.
// And what isn't computed at all runs beside nothing: the sums of dP begin at -D, not at 0, so that nothing takes D away.
//
// NEW marks what this kernel adds to rung 2.
//
// Expected: much more for the tensor cores to do at a time. What is left is the order of the work: which blocks run side by side, and
// which come last (flash3_backward).
//
//   SRAM        K, V  BC x D | Q, dO  STAGES x (BR x D) | dS  2 x (BC x BR) | LSE, D  STAGES x BR | mbarriers
//   registers   dK and dV (64 x D), S and dP (64 x BR) in float32; then dQ in place of the last two
//
#include "flash3_backward_rungs.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward_3(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                  const float* lse, const __grid_constant__ TensorMap dout, const float* delta, float* dq_sum, const Tensor dk,
                  const Tensor dv, const Shape shape) {
  const Sram sram;
  open(sram);
  const Work work = work_in_order(shape);
  const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads;
  Visit here = work.first(shape);
  Ring ring;

  if (warpgroup_id() == 0) {
    become_producer();
    if (threadIdx.x == 0) {
      // step: load_kv (producer)
      load_tile(sram.k(), k, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
      load_tile(sram.v(), v, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        const int head = here.head - batch * shape.heads;
        // step: load_q (producer)
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
        load_tile(sram.q(ring.slot), q, batch, head, here.i * BR, sram.q_full(ring.slot), EVICT_LAST);
        // step: load_do (producer)
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
        load_tile(sram.dout(ring.slot), dout, batch, head, here.i * BR, sram.do_full(ring.slot), EVICT_LAST);
      }
    }
    if (warp_id() == 1)
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_q (producer: the LSE to the base 2; without a query it is INF, so that P is 0)
        const Numbers numbers(lse, shape, Origin{}, here, INF);
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
        numbers.store(sram.lse(ring.slot), [](float x) { return lse_of(x); });
        release(sram.q_full(ring.slot));
      }
    if (warp_id() == 2)
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_do (producer: D, below which the sums of dP begin)
        const Numbers numbers(delta, shape, Origin{}, here, 0);
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
        numbers.store(sram.delta(ring.slot), [](float x) { return -x; });  // NEW
        release(sram.do_full(ring.slot));
      }
    return;
  }

  become_consumer();
  const int consumer = warpgroup_id() - 1, own_row = (warp_id() - 4) * 16, lane_key = work.first_key + own_row + lane_id() / 4;

  // step: load_kv
  mbarrier_wait(sram.kv_full(), 0);

  const Mask mask(shape, work.first_key + 64 * consumer, lane_key);
  Gradient dk_sum = {}, dv_sum = {};
  unsigned p[QUERY_STEPS][4], ds[QUERY_STEPS][4];
  Ring before = {STAGES - 1, 1};  // NEW: the tile before, or here that there is none
  int sums = 0;                   // NEW: where its dQ belongs
  auto compute_ds = [&] {
    const int slot = ring.slot;
    // step: load_q
    mbarrier_wait(sram.q_full(slot), ring.parity);

    // step: load_do
    mbarrier_wait(sram.do_full(slot), ring.parity);
    Transposed s, dp;
    begin_at(dp, sram.delta(slot));  // NEW: -D

    // step: scores
    settle(s);
    settle(dp);
    wgmma_fence();
    multiply_by_queries(s, sram.k(), 64 * consumer, sram.q(slot), 0);  // Sᵀ = K_j Q_iᵀ

    // step: dp
    multiply_by_queries(dp, sram.v(), 64 * consumer, sram.dout(slot), 1);  // dPᵀ = V_j dO_iᵀ - D

    // step: scores (done)
    wgmma_wait<1>();  // NEW: S
    settle(s);

    // step: mask
    mask.hide(s, here.i);

    // step: exp
    exponentials(s, Scores(shape).c, sram.lse(slot));  // P = exp(S - LSE), beside dP

    // step: dp (done)
    wgmma_wait<0>();
    settle(dp);

    // step: ds
    multiply_into(dp, s);  // dS = P (dP - D)
    round_operand(p, s);
    round_operand(ds, dp);
    mbarrier_wait(sram.ds_full(before.slot), before.parity);  // NEW: all are done with the dS that lay here
    store_operand(sram.ds(slot), own_row, ds);
    fence_async();
  };
  auto multiply_dkv = [&] {
    // step: dv
    multiply_by_columns(dv_sum, p, sram.dout(ring.slot));  // dV_j += Pᵀ dO_i

    // step: dk
    multiply_by_columns(dk_sum, ds, sram.q(ring.slot));  // dK_j += dSᵀ Q_i
  };
  auto finish_dkv = [&] {
    wgmma_wait<1>();
    settle(dv_sum);
    release(sram.do_empty(ring.slot));
    wgmma_wait<0>();
    settle(dk_sum);
    release(sram.q_empty(ring.slot));
    release(sram.ds_full(ring.slot));
    sums = sum_tile_of(shape, here.head, here.i);
    before = ring;
    here.advance(work.tiles);
    ring.advance();
  };
  auto ready = [&] {
    settle(dv_sum);
    settle(dk_sum);
    settle(p);
    settle(ds);
    wgmma_fence();
  };

  if (work.left(here)) {  // NEW: the first tile has none before it
    compute_ds();
    ready();
    multiply_dkv();
    finish_dkv();
  }
  while (work.left(here)) {
    compute_ds();

    // step: dq (of the tile before, beside dV and dK)
    QueryGradient dq;
    settle(dq);
    ready();
    multiply_for_queries(dq, sram.ds(before.slot), sram.k(), consumer);  // NEW
    multiply_dkv();

    // step: dq (of the tile before: add it to HBM, beside dV and dK)
    wgmma_wait<2>();  // NEW: dQ
    settle(dq);
    add_gradient(dq_sum, sums, dq, consumer);

    // step: dk (done)
    finish_dkv();
  }
  if (work.seen()) {
    // step: dq
    mbarrier_wait(sram.ds_full(before.slot), before.parity);  // NEW
    QueryGradient dq;
    settle(dq);
    wgmma_fence();
    multiply_for_queries(dq, sram.ds(before.slot), sram.k(), consumer);  // dQ_i += dS K_j
    wgmma_wait<0>();
    settle(dq);
    add_gradient(dq_sum, sums, dq, consumer);
  }

  // step: store_dkv
  store_gradient(dk, shape, kv_head, lane_key, dk_sum, shape.scale);
  store_gradient(dv, shape, kv_head, lane_key, dv_sum, 1);
}
