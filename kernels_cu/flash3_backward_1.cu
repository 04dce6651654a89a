// The backward pass on Hopper, rung 1: TMA loads and WGMMA. (The algorithm: FlashAttention-2's Algorithm 2, Dao 2023, arXiv
// 2307.08691. The engines: Shah et al. 2024, arXiv 2407.08608.)
//
//   q, dout (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse, delta (batch, heads, len_q)    dq_sum    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes; dq_sum lies as the accumulators of dQ do (SumTile). First and last launch are flash3_backward's.
//
// This is flash2_backward with Hopper's two engines. One thread asks for whole tiles (TMA), and a warpgroup multiplies 64 rows at
// once, with operands straight from SRAM (WGMMA). A block has BC keys, 64 for each warpgroup. It computes S and dP transposed, with
// keys as rows. So P and dS already lie in its registers as dV += Pᵀ dO and dK += dSᵀ Q want them. Only dQ = dS K sums over the keys
// of all warpgroups: for it alone dS passes through SRAM. Each warpgroup has a share of dQ, and adds it to HBM from its registers.
//
// One barrier per tile says two things. All of dS is there. And all warps are done with the tile before, so its place is free: what
// comes next is loaded there.
//
// Expected: no instructions that copy, P no more in SRAM, and half of dS's reads. But while a warpgroup takes exponentials, nothing
// is multiplied for it, and all of them wait for each other once per tile.
//
//   SRAM        K, V  BC x D | Q, dO  2 x (BR x D) | dS  2 x (BC x BR) | LSE, D  2 x BR | mbarriers
//   registers   dK and dV (64 x D), S and dP (64 x BR) in float32; then dQ in place of the last two
//
#include "flash3_backward_rungs.cuh"

constexpr int THREADS = CONSUMERS * WARPGROUP;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward_1(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                  const float* lse, const __grid_constant__ TensorMap dout, const float* delta, float* dq_sum, const Tensor dk,
                  const Tensor dv, const Shape shape) {
  const Sram sram;
  open(sram);
  const Work work = work_in_order(shape);
  const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads, consumer = warpgroup_id();
  auto load_queries = [&](Visit at, Ring ring) {
    if (threadIdx.x == 0) {
      const int head = at.head - batch * shape.heads;
      // step: load_q (ahead)
      load_tile(sram.q(ring.slot), q, batch, head, at.i * BR, sram.q_full(ring.slot), EVICT_LAST);
      // step: load_do (ahead)
      load_tile(sram.dout(ring.slot), dout, batch, head, at.i * BR, sram.do_full(ring.slot), EVICT_LAST);
    }
    if (warp_id() == 1) {
      // step: load_q (ahead: the LSE to the base 2; without a query it is INF, so that P is 0)
      Numbers(lse, shape, Origin{}, at, INF).store(sram.lse(ring.slot), [](float x) { return lse_of(x); });
      release(sram.q_full(ring.slot));
    }
    if (warp_id() == 2) {
      // step: load_do (ahead: D)
      Numbers(delta, shape, Origin{}, at, 0).store(sram.delta(ring.slot), [](float x) { return x; });
      release(sram.do_full(ring.slot));
    }
  };

  Visit here = work.first(shape);
  Ring ring;
  if (work.left(here)) load_queries(here, ring);
  if (threadIdx.x == 0) {
    // step: load_kv (ahead)
    load_tile(sram.k(), k, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
    load_tile(sram.v(), v, batch, kv_head % shape.kv_heads, work.first_key, sram.kv_full(), EVICT_FIRST);
  }

  // step: load_kv
  mbarrier_wait(sram.kv_full(), 0);

  const int lane_key = work.first_key + warp_id() * 16 + lane_id() / 4;
  const Mask mask(shape, work.first_key + 64 * consumer, lane_key);
  Gradient dk_sum = {}, dv_sum = {};
  while (work.left(here)) {
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
    store_operand(sram.ds(slot), 16 * warp_id(), ds);
    fence_async();

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
    barrier();  // all of dS is there, and all warps are done with the tile before
    QueryGradient dq;
    settle(dq);
    wgmma_fence();
    multiply_for_queries(dq, sram.ds(slot), sram.k(), consumer);  // dQ_i += dS K_j
    const int sums = sum_tile_of(shape, here.head, here.i);
    here.advance(work.tiles);
    ring.advance();
    if (work.left(here)) load_queries(here, ring);  // into the place that has become free, beside the products

    // step: dq (done: add it to HBM)
    wgmma_wait<0>();
    settle(dv_sum);
    settle(dk_sum);
    settle(dq);
    add_gradient(dq_sum, sums, dq, consumer);
  }

  // step: store_dkv
  store_gradient(dk, shape, kv_head, lane_key, dk_sum, shape.scale);
  store_gradient(dv, shape, kv_head, lane_key, dv_sum, 1);
}
