// FlashAttention-2, backward: Algorithm 2 of Dao 2023 (arXiv 2307.08691), with masks, windows, GQA, any lengths,
// ragged batches and a soft cap.
//
//   q, out, dout, dq (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse, dlse, delta (batch, heads, len_q)    dq_sum    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes; dq_sum lies as the accumulators of dQ do (sum_tiles.cuh); PARTIAL leaves dk and dv in float32
//
// Three launches. The first computes D = rowsum(dO · O) - dLSE and sets dq_sum to 0. The last one rounds dq_sum to dQ. In the main
// launch a block owns BC keys of a KV head. It walks the query tiles that see them, of all query heads that share the KV head. So
// dK and dV never leave its registers, and GQA needs neither a workspace nor a sum over heads. The block computes S transposed:
// keys are rows. dQ is spread over the blocks, which add to it in HBM. They do so by red. Nothing comes back, so no warp waits.
// flash2_backward adds in any order (dq_in_any_order.cuh). flash2_backward_deterministic is the same launch with turns
// (dq_in_turn.cuh): its blocks draw their keys, walk from the last query to the first, and wait before they add.
//
// How the warps share the work: backward.cuh.
//
//   SRAM        K, V  BC x D | P, dS  BC x BR | Q, dO  STAGES x (BR x D)     D = HEAD_DIM, head_dim rounded up to 16
//   registers   dK and dV (BC x D), S and dP (BC x BR) in float32, spread over the warps; then dQ (BR x D) in place of the last two
//
// Expected: HBM reads K and V once. It reads Q and dO, and adds to dq_sum, once per column of tiles. SRAM binds. A warp has 32 x 32
// scores, and each fragment that is read feeds two products. Up to head dim 64 a warp has 32 x 64 scores: a fragment of Q or dO
// feeds two products, and one of K or V feeds four.
#include "flash2_backward.cuh"
#if DETERMINISTIC
#include "dq_in_turn.cuh"
#else
#include "dq_in_any_order.cuh"
#endif

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash2_backward_delta(const Tensor out, const Tensor dout, const float* dlse, float* delta, float* dq_sum, const int* offsets_q,
                      const Shape shape) {
  // step: delta (which rows)
  const Rows rows = rows_of_tile(shape, offsets_q);
  if (RAGGED && rows.first >= rows.end) return;  // an empty place

  // step: delta
  delta_of_rows<BR>(out, dout, dlse, delta, shape, rows);

  // step: zero_dq
  clear_sums<HEAD_DIM>(dq_sum, shape, rows);
}

// The main launch. The steps are those of Algorithm 2, and `turns` says in which order blocks add to dQ.
DEVICE void backward(const Tensor& q, const Tensor& k, const Tensor& v, const float* lse, const Tensor& dout, const float* delta,
                     float* dq_sum, const Tensor& dk, const Tensor& dv, const int* offsets_q, const int* offsets_kv,
                     const long long* rng_state, const Turns& turns, const Shape& batches) {
  const Place place = place_of(batches, blockIdx.x);
  const int batch = RAGGED ? 0 : place.flat_head / batches.kv_heads, group = batches.heads / batches.kv_heads;

  // step: load_kv (which keys)
  const SequenceRows key_tile = row_tile_at<BC>(transposed(batches), {offsets_kv, offsets_q}, place.key_tile);
  if (RAGGED && key_tile.first_row >= key_tile.keys) return;  // an empty place

  // step: draw
  const OwnKeys own = turns.draw(place.flat_head, key_tile, batches);
  const Shape shape = own.shape, keys_first = transposed(shape);
  const int first_key = own.first, end_key = min(first_key + BC, shape.len_kv);
  const int keys_before = own.before, queries_before = key_tile.kv;  // rows of a head in front of key 0 and of query 0
  const Warp warp;

  const Keys walk = visible_tiles(keys_first, first_key, end_key - 1, BR);  // tiles of queries
  const Keys tiles = {uniform(walk.first), uniform(walk.last)};

  const Sram sram;
  sram.name();

  // step: load_kv
  const int kv_head = place.flat_head % shape.kv_heads;
  load_tile<THREADS>(sram.k, row_address(k, batch, kv_head, keys_before + first_key), k.row, end_key - first_key, row_bytes(shape));
  load_tile<THREADS>(sram.v, row_address(v, batch, kv_head, keys_before + first_key), v.row, end_key - first_key, row_bytes(shape));
  const Dropout dropout(rng_state, shape.kept);

  const Visits<Turns::BACKWARDS> visits{tiles};
  Visit here{kv_head * group, visits.begin()};
  const int end_head = tiles.first <= tiles.last ? here.head + group : here.head;
  float lse_ahead[STATISTICS], delta_ahead[STATISTICS];

  auto row_of = [&](int head, int row) { return (static_cast<long long>(batch) * shape.heads + head) * batches.len_q + row; };

  auto load = [&](Visit at, int stage) {
    const int first_query = at.i * BR, rows = shape.len_q - first_query, first_row = queries_before + first_query;

    // step: load_q (prefetch)
    load_tile<THREADS>(sram.q(stage), row_address(q, batch, at.head, first_row), q.row, rows, row_bytes(shape));

    // step: load_do (prefetch)
    load_tile<THREADS>(sram.dout(stage), row_address(dout, batch, at.head, first_row), dout.row, rows, row_bytes(shape));
  };
  auto load_statistics = [&](Visit at) {
    const int first_query = at.i * BR, rows = shape.len_q - first_query;
    const long long own = row_of(at.head, queries_before + first_query);

    // step: load_q (prefetch: the LSE)
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) {
      lse_ahead[r] = INF;  // so P = 0 beyond the last query
      if (warp.holds(r, rows)) lse_ahead[r] = load_global<float>(lse + own + warp.query(r));
    }

    // step: load_do (prefetch: D)
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) {
      delta_ahead[r] = 0;
      if (warp.holds(r, rows)) delta_ahead[r] = load_global<float>(delta + own + warp.query(r));
    }
  };

  if (here.head < end_head) load(here, 0), load_statistics(here);
  copy_commit();

  const Scores scores(shape);
  const auto [c, sign] = scores;
  Gradient dk_sum = {}, dv_sum = {};

  for (int stage = 0; here.head < end_head; stage ^= STAGES - 1) {
    // step: load_q
    copy_wait<0>();
    barrier();  // Q_i and dO_i are there (at first K and V, too), and no warp still reads the tiles before, or dS
    float lse_here[STATISTICS], delta_here[STATISTICS];
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) lse_here[r] = lse_of(lse_ahead[r]);

    // step: load_do
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) delta_here[r] = kept_part(delta_ahead[r], shape.kept);
    if (STAGES == 2) {
      if (const Visit next = visits.after(here); next.head < end_head) load(next, stage ^ 1);
      copy_commit();
    }

    // step: scores
    Transposed s = {};  // line 11: Sᵀ = K_j Q_iᵀ
    multiply_by_queries(s, sram.k, sram.q(stage), warp);
    bend(s, scores, shape);

    // step: mask
    const int own_key = opaque(first_key);  // what follows from it is computed once more: cheaper than registers
    const Keys full = full_tiles(keys_first, own_key, own_key + BC - 1, BR);  // need no mask
    if (sign != 1 || own_key + BC > shape.len_kv || here.i < full.first || here.i > full.last)
      mask_transposed(s, scores, keys_first, warp, first_key, here.i * BR);

    // step: exp
    const Dropout of_head = dropout.of_head(batch * shape.heads + here.head);
    exponentials(s, c, lse_here, sram.p, warp, of_head, first_key, here.i * BR);  // line 12: P = exp(S - L)

    // step: dp
    Transposed dp;  // line 14: dP = dO_i V_jᵀ, from which D is taken at once
    begin_below(dp, delta_here);
    multiply_by_queries(dp, sram.v, sram.dout(stage), warp);

    // step: ds
    if constexpr (DROPOUT) drop_gradient(dp, s, delta_here);
    scores_gradient(dp, s, sram.ds, warp);  // line 15: dS = P (dP - D)
    if (const Visit next = visits.after(here); next.head < end_head) load_statistics(next);  // not earlier: S and dP need the registers
    barrier();  // P and dS are there

    // step: dv
    multiply_by_columns(dv_sum, sram.p, sram.dout(stage), warp);  // line 13: dV_j += Pᵀ dO_i

    // step: dk
    multiply_by_columns(dk_sum, sram.ds, sram.q(stage), warp);  // line 17: dK_j += dSᵀ Q_i

    if (STAGES == 1) {
      barrier();  // all warps are done with Q_i and dO_i
      if (const Visit next = visits.after(here); next.head < end_head) load(next, 0);
      copy_commit();
    }

    // step: dq
    QueryGradient dq = {};  // line 16: dQ_i += dS K_j
    multiply_for_queries(dq, sram.ds, sram.k, warp);
    turns.wait(shape, row_of(here.head, queries_before), here.i, first_key / BC);
    const int first_tile = RAGGED ? queries_before / BR + key_tile.sequence : 0;
    add_gradient<Turns::ORDERED>(dq_sum, sum_tile_of(batches, batch * shape.heads + here.head, here.i, first_tile), dq, warp);
    turns.pass_on(shape, row_of(here.head, queries_before), here.i);
    here = visits.after(here);
  }

  // step: store_dkv
  copy_wait<0>();  // without queries K and V are still on their way
  const Place again = place_of(batches, opaque(static_cast<int>(blockIdx.x)));  // once more: cheaper than registers
  const int stored_key = turns.first_key(again, first_key);
  auto rows = [&](const Tensor& x) {
    return row_address(x, again.flat_head / shape.kv_heads, again.flat_head % shape.kv_heads, keys_before + stored_key);
  };
  store_gradient(rows(dk), dk.row, shape, stored_key, dk_sum, warp, of_kept(shape.scale, shape.kept));
  store_gradient(rows(dv), dv.row, shape, stored_key, dv_sum, warp, of_kept(1, shape.kept));
}

#if DETERMINISTIC
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash2_backward_deterministic(const Tensor q, const Tensor k, const Tensor v, const float* lse, const Tensor dout,
                              const float* delta, float* dq_sum, const Tensor dk, const Tensor dv,
                              const int* offsets_q, const int* offsets_kv, const long long* rng_state, unsigned* drawn,
                              int* number, unsigned* turns, const Shape batches) {
  backward(q, k, v, lse, dout, delta, dq_sum, dk, dv, offsets_q, offsets_kv, rng_state, Turns{drawn, number, turns}, batches);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash2_backward(const Tensor q, const Tensor k, const Tensor v, const float* lse, const Tensor dout, const float* delta,
                float* dq_sum, const Tensor dk, const Tensor dv, const int* offsets_q, const int* offsets_kv,
                const long long* rng_state, const Shape batches) {
  backward(q, k, v, lse, dout, delta, dq_sum, dk, dv, offsets_q, offsets_kv, rng_state, Turns{}, batches);
}
#endif

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash2_backward_convert(float* dq_sum, const Tensor dq, const int* offsets_q, const Shape shape) {
  // step: convert_dq (which rows)
  const Rows rows = rows_of_tile(shape, offsets_q);
  if (RAGGED && rows.first >= rows.end) return;  // an empty place

  // step: convert_dq
  convert_sums<HEAD_DIM>(dq_sum, dq, shape, rows);
}

extern "C" __global__ void __launch_bounds__(32)
flash2_backward_sinks(const float* sinks, const float* lse, const float* delta, float* dsinks, const int* offsets_q,
                      const Shape shape) {
  // step: dsinks
  sink_gradient(sinks, lse, delta, dsinks, offsets_q, shape);
}
