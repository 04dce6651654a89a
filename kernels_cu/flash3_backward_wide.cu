// FlashAttention-2's backward pass on Hopper for wide heads: two launches, each for the gradients of its own rows.
//
//   q, out, dout, dq (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse, dlse, delta (batch, heads, len_q) float32; delta is a workspace    rows padded to 16 bytes
//
// Up to head dim 128 one launch computes all gradients, and blocks add to dQ in HBM. With 256 columns, dK and dV of 64 keys take all
// registers that there are, and adding to dQ would take as long as the products. So S and dP are computed twice: seven products in
// place of five. In return no sum is in HBM, nothing has to be zeroed or rounded afterwards, and each run gives the same bits.
//
// The launch for dK and dV: a block has 64 keys of a KV head, against the query tiles that see them, of all heads that share it. The
// first warpgroup computes P and dV, the second one dP, dS and dK. Only P crosses, in float32: dS needs it as it was before it was
// rounded. So one multiplies while the other takes exponentials or products of elements.
//
// The launch for dQ: a block has 64 queries for each of two warpgroups, which compute S, dP and dS with queries as rows. dS goes from
// registers to registers.
//
// In a ragged batch each sequence has places for its key tiles, and for its row tiles (sequences.cuh). What a block walks over is
// cleared where a box reaches beyond its sequence. Its own rows beyond the end needn't be: no other row meets them, and their
// gradients aren't stored.
//
//   SRAM        K, V  64 x D | Q, dO  STAGES x (64 x D) | P  STAGES x (64 x 64) float32 | LSE, D  STAGES x 64 | mbarriers
//               Q, dO  2 x (64 x D) | K  STAGES x (64 x D) | V  V_SLOTS x (64 x D) | mbarriers
//   registers   dV and S, or dK and dP; half of K or V. dQ, S and dP
//
#include "backward_rows.cuh"
#include "flash3_backward_wide.cuh"

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash3_backward_wide_delta(const Tensor out, const Tensor dout, const float* dlse, float* delta, const Shape shape) {
  const Rows rows = rows_of<QUERIES>(shape);

  // step: delta
  delta_of_rows<QUERIES>(out, dout, dlse, delta, shape, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward_wide_dkv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                         const __grid_constant__ TensorMap v, const float* lse, const __grid_constant__ TensorMap dout,
                         const float* delta, const Tensor dk, const Tensor dv, const int* offsets_q, const int* offsets_kv,
                         const Shape shape) {
  const SramOfKeys sram;
  open(sram);
  Origin origin = {};
  // step: load_kv (which keys)
  const Offsets offsets{offsets_q, offsets_kv};
  const Work work = RAGGED ? found_for_all(sram.work(), shape, offsets, origin, key_tile) : key_tile(shape, {}, blockIdx.x, origin);
  if (RAGGED && work.end == 0) return;  // an empty place
  const Shape alone = origin.alone(shape), &own = RAGGED ? alone : shape;  // a copy would take registers
  const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads, own_head = kv_head % shape.kv_heads;
  Visit here = work.first(shape);
  Ring ring;

  if (warpgroup_id() == 0) {
    become_producer();
    if (warp_id() == 0 && lane_id() == 0) {
      auto load_queries = [&] {
        // step: load_q (producer)
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
        const int head = here.head - batch * shape.heads;
        load_tile(sram.q(ring.slot), q, batch, head, origin.query + here.i * QUERIES, sram.q_full(ring.slot), EVICT_LAST);
      };

      // step: load_kv (producer: K, for the first scores)
      load_tile(sram.k(), k, batch, own_head, origin.key + work.first_key, sram.k_full(), EVICT_FIRST);
      if (work.left(here)) load_queries();

      // step: load_kv (producer: V, after the first queries)
      load_tile(sram.v(), v, batch, own_head, origin.key + work.first_key, sram.v_full(), EVICT_FIRST);
      while (work.left(here)) {
        // step: load_do (producer)
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
        const int head = here.head - batch * shape.heads;
        load_tile(sram.dout(ring.slot), dout, batch, head, origin.query + here.i * QUERIES, sram.do_full(ring.slot), EVICT_LAST);
        here.advance(work.tiles);
        ring.advance();
        if (work.left(here)) load_queries();
      }
    }
    if (warp_id() == 1) {
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_q (producer: the LSE to the base 2; without a query it is INF, so that P is 0)
        const Numbers numbers(lse, shape, origin, here, INF);
        mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
        numbers.store(sram.lse(ring.slot), [](float x) { return lse_of(x); });
        release(sram.q_full(ring.slot));
      }
    }
    if (warp_id() == 2) {
      for (; work.left(here); here.advance(work.tiles), ring.advance()) {
        // step: load_do (producer: D, below which the sums of dP begin)
        const Numbers numbers(delta, shape, origin, here, 0);
        mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
        numbers.store(sram.delta(ring.slot), [](float x) { return -x; });
        release(sram.do_full(ring.slot));
      }
    }
    return;
  }

  become_consumer();
  const int lane_key = work.first_key + warp_id() % 4 * 16 + lane_id() / 4;
  Gradient sum = {};
  Held held = {};
  unsigned rounded[QUERY_STEPS][4];
  auto clear_outside = [&] {  // both warpgroups together, for each needs both tiles
    const int rows = own.len_q - here.i * QUERIES;
    if (!RAGGED || rows >= QUERIES) return;
    // step: load_q (where a sequence ends)
    mbarrier_wait(sram.q_full(ring.slot), ring.parity);
    clear_rows<CONSUMERS>(sram.q(ring.slot), rows, CLEARED);

    // step: load_do (where a sequence ends)
    mbarrier_wait(sram.do_full(ring.slot), ring.parity);
    clear_rows<CONSUMERS>(sram.dout(ring.slot), rows, CLEARED);
  };
  if (warpgroup_id() == 1) {
    const Shape keys_first = transposed(own);
    const Scores scores(shape);
    const Keys full = full_tiles(keys_first, work.first_key, work.first_key + BC - 1, QUERIES);  // need no mask

    // step: load_kv
    mbarrier_wait(sram.k_full(), 0);
    hold(held, sram.k());
    for (; work.left(here); here.advance(work.tiles), ring.advance()) {
      // step: load_q
      clear_outside();
      mbarrier_wait(sram.q_full(ring.slot), ring.parity);

      // step: scores
      Transposed s;
      settle(s);
      settle(held);
      wgmma_fence();
      multiply_by_queries(s, held, sram.k(), sram.q(ring.slot), 0);  // Sᵀ = K_j Q_iᵀ
      wgmma_wait<0>();
      settle(s);

      // step: mask
      // Keys beyond the end don't matter: their gradients aren't stored.
      if (scores.sign != 1 || here.i < full.first || here.i > full.last) {
        scores.flip(s);
        mask_scores(s, keys_first, lane_key, here.i * QUERIES, 2 * (opaque(lane_id()) % 4));
      }

      // step: exp
      exponentials(s, scores.c, sram.lse(ring.slot));  // P = exp(S - LSE)
      release(sram.q_empty(ring.slot));
      store_weights(sram.p(ring.slot), s);  // its slot is free, because that of Q is, which the other warpgroup needs longer
      release(sram.p_full(ring.slot));
      round_operand(rounded, s);

      // step: load_do
      mbarrier_wait(sram.do_full(ring.slot), ring.parity);

      // step: dv
      settle(sum);
      settle(rounded);
      wgmma_fence();
      multiply_by_columns(sum, rounded, sram.dout(ring.slot));  // dV_j += Pᵀ dO_i
      wgmma_wait<0>();
      settle(sum);
      release(sram.do_empty(ring.slot));
    }
  } else {
    // step: load_kv (V)
    mbarrier_wait(sram.v_full(), 0);
    hold(held, sram.v());
    for (; work.left(here); here.advance(work.tiles), ring.advance()) {
      // step: load_do (for dP)
      clear_outside();
      mbarrier_wait(sram.do_full(ring.slot), ring.parity);
      Transposed dp;
      begin_at(dp, sram.delta(ring.slot));

      // step: dp
      settle(dp);
      settle(held);
      wgmma_fence();
      multiply_by_queries(dp, held, sram.v(), sram.dout(ring.slot), 1);  // dPᵀ = V_j dO_iᵀ - D
      wgmma_wait<0>();
      settle(dp);
      release(sram.do_empty(ring.slot));

      // step: ds
      mbarrier_wait(sram.p_full(ring.slot), ring.parity);
      multiply_by_weights(dp, sram.p(ring.slot));  // dS = P (dP - D)
      round_operand(rounded, dp);

      // step: load_q (for dK)
      mbarrier_wait(sram.q_full(ring.slot), ring.parity);

      // step: dk
      settle(sum);
      settle(rounded);
      wgmma_fence();
      multiply_by_columns(sum, rounded, sram.q(ring.slot));  // dK_j += dSᵀ Q_i
      wgmma_wait<0>();
      settle(sum);
      release(sram.q_empty(ring.slot));
    }
  }

  // step: store_dkv
  const bool first = warpgroup_id() == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = lane_key + 8 * half, bytes = key < own.len_kv ? padded_row_bytes(shape) : 0;
    store_row(row_address(first ? dv : dk, batch, own_head, origin.key + key), sum, half, first ? 1 : shape.scale, bytes);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward_wide_dq(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                        const __grid_constant__ TensorMap v, const float* lse, const __grid_constant__ TensorMap dout,
                        const float* delta, const Tensor dq, const int* offsets_q, const int* offsets_kv, const Shape shape) {
  const SramOfQueries sram;
  open(sram);
  Origin origin = {};
  QueryRows rows;
  if constexpr (RAGGED) {
    // step: load_q (which queries)
    const Work work = found_for_all(sram.work(), shape, {offsets_q, offsets_kv}, origin, row_tile);
    if (work.end == 0) return;  // an empty place
    rows = {0, work.end - 1, work.first_key, work.tiles};
  } else {
    rows = query_rows(shape, blockIdx.x);
  }
  const Shape alone = origin.alone(shape);
  Ring k_ring;
  RingOf<V_SLOTS> v_ring;

  if (warpgroup_id() == 0) {
    become_producer();
    if (threadIdx.x == 0) {
      const int own_head = kv_head(shape, rows.head);
      // step: load_q (for dQ)
      load_tile(sram.q(), q, rows.batch, rows.head, origin.query + rows.first, sram.q_full(), EVICT_FIRST);

      // step: load_do (for dQ)
      load_tile(sram.dout(), dout, rows.batch, rows.head, origin.query + rows.first, sram.do_full(), EVICT_FIRST);
      for (int j = rows.tiles.first; j <= rows.tiles.last; ++j) {
        // step: load_k (producer)
        mbarrier_wait(sram.k_empty(k_ring.slot), k_ring.parity ^ 1);
        load_tile(sram.k(k_ring.slot), k, rows.batch, own_head, origin.key + j * BC, sram.k_full(k_ring.slot), EVICT_LAST);
        k_ring.advance();

        // step: load_v (producer)
        mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);
        load_tile(sram.v(v_ring.slot), v, rows.batch, own_head, origin.key + j * BC, sram.v_full(v_ring.slot), EVICT_LAST);
        v_ring.advance();
      }
    }
    return;
  }

  become_consumer();
  const int own = 64 * (warpgroup_id() - 1), first_row = rows.first + own, lane_row = first_row + warp_id() % 4 * 16 + lane_id() / 4;
  const Scores scores(shape);
  const Keys full = full_tiles(alone, first_row, min(first_row + 64, alone.len_q) - 1, BC);  // need no mask
  float sum[HEAD_DIM / 8][4] = {}, own_lse[2] = {INF, INF}, own_delta[2] = {};
  const long long first = (static_cast<long long>(rows.batch) * shape.heads + rows.head) * shape.len_q + origin.query;

  // step: load_q (for dQ: LSE)
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (lane_row + 8 * half < alone.len_q) own_lse[half] = lse_of(load_global<float>(lse + first + lane_row + 8 * half));

  // step: load_do (for dQ: D)
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (lane_row + 8 * half < alone.len_q) own_delta[half] = load_global<float>(delta + first + lane_row + 8 * half);

  // step: load_q (for dQ: done)
  mbarrier_wait(sram.q_full(), 0);
  mbarrier_wait(sram.do_full(), 0);
  for (int j = rows.tiles.first; j <= rows.tiles.last; ++j) {
    float s[BC / 8][4], dp[BC / 8][4];
    unsigned ds[BC / 16][4];
    // step: load_k
    mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);
    if (const int keys = alone.len_kv - j * BC; RAGGED && keys < BC) {
      clear_rows<CONSUMERS>(sram.k(k_ring.slot), keys, CLEARED);

      // step: load_v (where a sequence ends)
      mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);
      clear_rows<CONSUMERS>(sram.v(v_ring.slot), keys, CLEARED);
    }

    // step: scores (for dQ)
#pragma unroll
    for (int n = 0; n < BC / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[n][e] = -own_delta[e / 2];
    settle(s);
    settle(dp);
    wgmma_fence();
    multiply_by_keys(s, sram.q(), own, sram.k(k_ring.slot), 0);  // S = Q_i K_jᵀ

    // step: load_v
    mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

    // step: dp (for dQ)
    wgmma_fence();
    multiply_by_keys(dp, sram.dout(), own, sram.v(v_ring.slot), 1);  // dP = dO_i V_jᵀ - D
    wgmma_wait<1>();
    settle(s);

    // step: mask (for dQ)
    if (scores.sign != 1 || j < full.first || j > full.last) {
      scores.flip(s);
      mask_scores(s, alone, lane_row, j * BC, 2 * (opaque(lane_id()) % 4));
    }

    // step: exp (for dQ)
#pragma unroll
    for (int n = 0; n < BC / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(scores.c * s[n][e] - own_lse[e / 2]);

    // step: dp (for dQ: done)
    wgmma_wait<0>();
    settle(dp);
    release(sram.v_empty(v_ring.slot));
    v_ring.advance();

    // step: ds (for dQ)
    multiply_into(dp, s);
    round_operand(ds, dp);

    // step: dq
    settle(sum);
    settle(ds);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BC / 16; ++i) wgmma_rs(sum, ds[i], columns_operand(sram.k(k_ring.slot), 16 * i));  // dQ_i += dS K_j
    wgmma_commit();
    wgmma_wait<0>();
    settle(sum);
    release(sram.k_empty(k_ring.slot));
    k_ring.advance();
  }

  // step: store_dq
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half, bytes = row < alone.len_q ? padded_row_bytes(shape) : 0;
    store_row(row_address(dq, rows.batch, rows.head, origin.query + row), sum, half, shape.scale, bytes);
  }
}

extern "C" __global__ void __launch_bounds__(32)
flash3_backward_wide_sinks(const float* sinks, const float* lse, const float* delta, float* dsinks, const int* offsets_q,
                           const Shape shape) {
  // step: dsinks
  sink_gradient(sinks, lse, delta, dsinks, offsets_q, shape);
}
