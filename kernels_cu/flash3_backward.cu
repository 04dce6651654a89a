// FlashAttention-2's backward pass on Hopper: TMA, WGMMA, a producer and its consumers. Ragged batches, too.
//
//   q, out, dout, dq (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse, dlse, delta (batch, heads, len_q)    dq_sum    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes; dq_sum lies as the accumulators of dQ do (SumTile)
//
// Rung 3 (flash3_backward_3.cu) computes a tile as this one does. This one adds which block computes what, and when. It also adds
// ragged batches, dropout, sinks and parts of a group's heads.
//
// The launches are those of flash2_backward. So is a piece of work: BC keys of a KV head, against the query tiles that see them, in
// all query heads that share the KV head. A warpgroup has 64 of the keys. Its dK and dV leave its registers once, at the end.
// Where there are fewer key tiles than SMs, blocks take those heads in PARTS. Then each writes what its part gives dK and dV, in
// float32, and a launch of its own adds the parts up in their order. So each run gives the same bits. PARTIAL leaves dK and dV in
// float32, too: they are parts of sums that others add up.
// It computes S and dP transposed, with keys as rows. So P and dS already lie in its registers as dV += Pᵀ dO and dK += dSᵀ Q want
// them. For dQ = dS K all warpgroups' keys count: dS passes through SRAM, and each warpgroup computes a share of dQ, which it adds
// to HBM straight from its registers.
//
// A tile's dQ is computed one tile later, beside the next dV and dK. So no warpgroup waits for the other's dS in the middle of a
// tile. The two drift apart: one multiplies while the other takes exponentials.
//
// Up to head dim 64, blocks are persistent: there is one per SM, which takes key tile after key tile (Agenda). While the consumers
// end one, and write its gradients, the producer loads the next one's first queries, then its K and V. Under a causal mask the
// first keys take longer than the last ones. So blocks draw key tiles from a counter, the longest first (DYNAMIC): a block that is
// free takes the next one. Wider heads leave no registers for that, nor does dropout: each key tile has a block of its own
// (ONE_TILE).
//
// For the same bits in each run (IN_TURN: flash3_backward_deterministic) the blocks of a query tile add to its dQ in the order of
// their key tiles. The thread that loads Q and dO waits for the block's turn, a tile ahead. Another thread, which does nothing
// else, passes it on. So the warps that multiply wait for mbarriers only. As there is a first one and a last one, the sums need no
// zeros, and no launch of their own: the first one writes its part, and the last one writes dQ.
//
// In a ragged batch each sequence has places for its key tiles, and for the tiles of its sums of dQ (sequences.cuh). A box that
// reaches beyond its sequence is cleared there: of K and V, too, for dQ sums over all keys of a tile. Where blocks have different
// work, the first launch puts the key tiles of all sequences in an order, the longest first (ORDERED: longest_first.cuh).
//
//   SRAM        K, V  BC x D | Q, dO  STAGES x (BR x D) | dS  2 x (BC x BR) | LSE, D  STAGES x BR | mbarriers | work
//   registers   dK and dV (64 x D), S and dP (64 x BR) in float32; then dQ in place of the last two
//
#include "flash3_backward.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash3_backward_delta(const Tensor out, const Tensor dout, const float* dlse, float* delta, float* dq_sum, const Tensor dq,
                      const int* offsets_q, const int* offsets_kv, void* order, const Shape shape) {
  if constexpr (ORDERED) {
    // step: delta (in which order key tiles come)
    put_in_order(shape, {offsets_q, offsets_kv}, static_cast<OrderedTile*>(order));
  }

  // step: delta (which rows)
  const Rows rows = rows_of_tile(shape, offsets_q);
  if (RAGGED && rows.first >= rows.end) return;  // an empty place

  // step: delta
  delta_of_rows<BR>(out, dout, dlse, delta, shape, rows);

  // step: zero_dq
  if constexpr (IN_TURN)
    Turns{static_cast<unsigned*>(order), shape}.begin(dq, rows);
  else
    clear_sums<COLUMNS>(dq_sum, shape, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                const float* lse, const __grid_constant__ TensorMap dout, const float* delta, float* dq_sum, const Tensor dq_in_turn,
                const Tensor dk, const Tensor dv, const int* offsets_q, const int* offsets_kv, const long long* rng_state,
                unsigned* drawn, void* order, const Shape shape) {
  const Turns turns{static_cast<unsigned*>(order), shape};  // or that is the order of key tiles
  const Sram sram;
  open(sram);
  Agenda agenda{shape, sram, {offsets_q, offsets_kv, static_cast<const OrderedTile*>(order)}};
  const Work& work = agenda.work;
  const Origin& origin = agenda.origin;

  if (warpgroup_id() == 0) {
    become_producer();
    Ring ring;
    if (warp_id() == 0) {
      // step: load_kv (which keys)
      agenda.begin();
      while (work.end > 0) {
        if (lane_id() == 0) {
          const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads;
          Visit at = work.first(shape), last = at;
          unsigned n = 0;  // tiles of queries so far
          auto wait_for_turn = [&] {  // at the tile before, when all warps know of the last turn on its side
            mbarrier_wait(sram.known((n - 1) & 1), (n + 1) / 2 & 1);
            turns.wait(last, work.first_key / BC);
            mbarrier_arrive(sram.turn((n - 1) & 1));
          };
          auto load_queries = [&] {
            // step: load_q (producer)
            const int head = at.head - batch * shape.heads;
            mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
            load_tile(sram.q(ring.slot), q, batch, head, origin.query + at.i * BR, sram.q_full(ring.slot), EVICT_LAST);

            // step: load_do (producer)
            mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
            load_tile(sram.dout(ring.slot), dout, batch, head, origin.query + at.i * BR, sram.do_full(ring.slot), EVICT_LAST);
            if constexpr (IN_TURN) {
              // step: dq (producer: this block's turn at the tile before)
              if (n > 0) wait_for_turn();
              last = at, ++n;
            }
            at.advance(work.tiles);
            ring.advance();
          };
          if (work.left(at)) load_queries();  // their slots are free before K's and V's

          // step: load_kv (producer: while the consumers write the gradients of the keys before)
          const int own_head = kv_head - batch * shape.kv_heads, first_row = origin.key + work.first_key;
          mbarrier_wait(sram.kv_empty(), agenda.parity ^ 1);
          load_tile(sram.k(), k, batch, own_head, first_row, sram.kv_full(), EVICT_FIRST);
          load_tile(sram.v(), v, batch, own_head, first_row, sram.kv_full(), EVICT_FIRST);
          while (work.left(at)) load_queries();
          if constexpr (IN_TURN) {
            // step: dq (producer: this block's turn at the last tile)
            if (n > 0) wait_for_turn();
          }
        }

        // step: load_kv (which keys are next)
        agenda.take();
      }
    }
    if (warp_id() == 1) {
      // step: load_kv (which keys)
      agenda.begin();
      while (work.end > 0) {
        for (Visit at = work.first(shape); work.left(at); at.advance(work.tiles), ring.advance()) {
          // step: load_q (producer: where in the order this block adds)
          if (IN_TURN && lane_id() == 0) store_shared(sram.place(ring.slot + STAGES * ring.parity), turns.place(at, work.first_key / BC));

          // step: load_q (producer: the LSE to the base 2; without a query it is INF, so that P is 0)
          const Numbers numbers(lse, shape, origin, at, INF);
          mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1);
          numbers.store(sram.lse(ring.slot), [](float x) { return lse_of(x); });
          release(sram.q_full(ring.slot));
        }

        // step: load_kv (which keys are next)
        agenda.take();
      }
    }
    if (warp_id() == 2) {
      // step: load_kv (which keys)
      agenda.begin();
      while (work.end > 0) {
        for (Visit at = work.first(shape); work.left(at); at.advance(work.tiles), ring.advance()) {
          // step: load_do (producer: D, below which the sums of dP begin)
          const Numbers numbers(delta, shape, origin, at, 0);
          mbarrier_wait(sram.do_empty(ring.slot), ring.parity ^ 1);
          numbers.store(sram.delta(ring.slot), [&](float x) { return kept_part(-x, shape.kept); });
          release(sram.do_full(ring.slot));
        }

        // step: load_kv (which keys are next)
        agenda.take();
      }
    }
    if (warp_id() == 3 && lane_id() == 0) {
      // step: load_kv (producer: tells which keys are next, ahead)
      agenda.tell(drawn);
      if constexpr (IN_TURN) {
        // step: dq (producer: passes the turn on)
        unsigned n = 0;  // tiles of queries so far
        for (Visit at = work.first(shape); work.left(at); at.advance(work.tiles), ++n) {
          mbarrier_wait(sram.added(n & 1), n / 2 & 1);
          mbarrier_arrive(sram.known(n & 1));
          turns.pass(at);
        }
      }
    }
    return;
  }

  become_consumer();
  const int consumer = warpgroup_id() - 1;
  const Scores scores(shape);
  unsigned n = 0;  // tiles of queries so far
  Ring ring;

  // step: load_kv (which keys)
  agenda.begin();
  while (work.end > 0) {
    const Shape own = origin.alone(shape), keys_first = transposed(own);
    const int own_key = work.first_key + 64 * consumer, lane_key = work.first_key + (warp_id() - 4) * 16 + lane_id() / 4;
    const Keys full = full_tiles(keys_first, own_key, own_key + 63, BR);  // need no mask
    const bool masked = scores.sign != 1 || own_key + 64 > own.len_kv;
    Gradient dk_sum = {}, dv_sum = {};
    Visit here = work.first(shape);
    int before = 0;
    unsigned p[QUERY_STEPS][4], ds[QUERY_STEPS][4];

    // step: load_kv
    mbarrier_wait(sram.kv_full(), agenda.parity);
    if (RAGGED && work.first_key + BC > own.len_kv) {
      clear_rows<CONSUMERS>(sram.k(), own.len_kv - work.first_key, CLEARED);
      clear_rows<CONSUMERS>(sram.v(), own.len_kv - work.first_key, CLEARED);
    }
    const Dropout dropout(rng_state, shape.kept);

    auto compute_ds = [&] {  // P and dS in registers, and dS in SRAM
      // step: load_q
      mbarrier_wait(sram.q_full(ring.slot), ring.parity);
      const int rows = own.len_q - here.i * BR;
      if (RAGGED && rows < BR) clear_rows<CONSUMERS>(sram.q(ring.slot), rows, CLEARED);

      // step: load_do
      mbarrier_wait(sram.do_full(ring.slot), ring.parity);
      if (RAGGED && rows < BR) clear_rows<CONSUMERS>(sram.dout(ring.slot), rows, CLEARED);
      Transposed s, dp;
      if constexpr (!DROPOUT) begin_at(dp, sram.delta(ring.slot));

      // step: scores
      settle(s);
      settle(dp);
      wgmma_fence();
      multiply_by_queries(s, sram.k(), 64 * consumer, sram.q(ring.slot), 0);  // Sᵀ = K_j Q_iᵀ

      // step: dp
      multiply_by_queries(dp, sram.v(), 64 * consumer, sram.dout(ring.slot), !DROPOUT);  // dPᵀ = V_j dO_iᵀ, less D

      // step: exp (which weights are kept, while the tensor cores are busy)
      Kept kept;
      if constexpr (DROPOUT)
        kept.draw(dropout.of_head(here.head), opaque(lane_key) / 16, here.i * (BR / 16));

      // step: scores (done)
      wgmma_wait<1>();
      settle(s);

      // step: mask
      if (masked || here.i < full.first || here.i > full.last) {
        scores.flip(s);
        mask_scores(s, keys_first, lane_key, here.i * BR, 2 * (opaque(lane_id()) % 4));
        mask_rows(s, lane_key, own.len_kv);
      }

      // step: exp
      exponentials(s, scores.c, sram.lse(ring.slot));  // P = exp(S - LSE)

      // step: dp (done)
      wgmma_wait<0>();
      settle(dp);
      if constexpr (DROPOUT) {
        // step: load_do (D, which is needed only here)
        drop_gradient(dp, kept, sram.delta(ring.slot));
      }

      // step: ds
      multiply_into(dp, s);  // dS = P (dP - D)
      round_operand(p, s);
      if constexpr (DROPOUT) kept.drop(p);
      round_operand(ds, dp);
      mbarrier_wait(sram.ds_full((n - 1) & 1), ((n + 1) / 2 & 1) ^ 1);
      store_operand(sram.ds(n & 1), 16 * (warp_id() - 4), ds);
      fence_async();
    };
    auto issue_dkv = [&] {
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
      release(sram.ds_full(n++ & 1));
      before = sum_tile_of(shape, here.head, here.i, origin.tile);
      here.advance(work.tiles);
      ring.advance();
    };
    auto add_dq = [&](QueryGradient& dq) {
      if constexpr (IN_TURN) {
        mbarrier_wait(sram.turn((n - 1) & 1), ((n + 1) / 2 & 1) ^ 1);
        add_in_turn(dq_sum, before, dq, consumer, uniform(load_shared<int>(sram.place(n - 1))), dq_in_turn, shape);
        release(sram.added((n - 1) & 1));
      } else {
        add_gradient(dq_sum, before, dq, consumer);
      }
    };
    auto ready = [&] {
      settle(dv_sum);
      settle(dk_sum);
      settle(p);
      settle(ds);
      wgmma_fence();
    };

    if (work.left(here)) {
      compute_ds();
      ready();
      issue_dkv();
      finish_dkv();
    }
    while (work.left(here)) {
      compute_ds();

      // step: dq (of the tile before)
      QueryGradient dq;
      settle(dq);
      ready();
      multiply_for_queries(dq, sram.ds((n - 1) & 1), sram.k(), consumer);
      issue_dkv();

      // step: dq (of the tile before: add it to HBM)
      wgmma_wait<2>();
      settle(dq);
      add_dq(dq);

      // step: dk (done)
      finish_dkv();
    }
    if (work.seen()) {
      // step: dq
      mbarrier_wait(sram.ds_full((n - 1) & 1), ((n + 1) / 2 & 1) ^ 1);
      QueryGradient dq;
      settle(dq);
      wgmma_fence();
      multiply_for_queries(dq, sram.ds((n - 1) & 1), sram.k(), consumer);
      wgmma_wait<0>();
      settle(dq);
      add_dq(dq);
    }

    // step: load_kv (the next ones may come)
    release(sram.kv_empty());

    // step: store_dkv
    const int kv_head = work.kv_head(shape), batch = kv_head / shape.kv_heads, head = kv_head % shape.kv_heads;
    if constexpr (PARTS > 1 || PARTIAL) {
      const int part = work.part(shape) - batch * shape.kv_heads * PARTS, key = lane_key + opaque(lane_id()) % 2 * 8;
      const int columns = key < own.len_kv ? round_up(shape.head_dim, 4) : 0;
      store_float_row(row_address(dk, batch, part, origin.key + key), dk_sum, of_kept(shape.scale, shape.kept), columns);
      store_float_row(row_address(dv, batch, part, origin.key + key), dv_sum, of_kept(1, shape.kept), columns);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = lane_key + 8 * half, bytes = key < own.len_kv ? padded_row_bytes(shape) : 0;
        store_row(row_address(dk, batch, head, origin.key + key), dk_sum, half, of_kept(shape.scale, shape.kept), bytes);
        store_row(row_address(dv, batch, head, origin.key + key), dv_sum, half, of_kept(1, shape.kept), bytes);
      }
    }

    // step: load_kv (which keys are next)
    agenda.take();
  }
}

#if !IN_TURN
extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash3_backward_convert(float* dq_sum, const Tensor dq, const int* offsets_q, const Shape shape) {
  // step: convert_dq (which rows)
  const Rows rows = rows_of_tile(shape, offsets_q);
  if (RAGGED && rows.first >= rows.end) return;  // an empty place

  // step: convert_dq
  convert_sums<COLUMNS>(dq_sum, dq, shape, rows);
}

#endif

#if PARTS > 1
extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash3_backward_parts(const Tensor dk_parts, const Tensor dv_parts, const Tensor dk, const Tensor dv, const Shape shape) {
  Shape keys = transposed(shape);
  keys.heads = shape.kv_heads;
  const Rows rows = rows_of<PART_ROWS>(keys);

  // step: add_parts
  add_parts(dk_parts, dk, shape, rows);
  add_parts(dv_parts, dv, shape, rows);
}
#endif

extern "C" __global__ void __launch_bounds__(32)
flash3_backward_sinks(const float* sinks, const float* lse, const float* delta, float* dsinks, const int* offsets_q,
                      const Shape shape) {
  // step: dsinks
  sink_gradient(sinks, lse, delta, dsinks, offsets_q, shape);
}
