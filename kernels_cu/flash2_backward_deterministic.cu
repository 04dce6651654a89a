// FlashAttention-2, backward, with the same bits in each run: the sums of dQ have one order. The first and the last launch are
// those of flash2_backward.cu.
//
//   drawn (batch * kv_heads, or of a ragged batch kv_heads, sequences), turns (batch * heads, len_q)    zeros before and after
//   number (batch * kv_heads, len_kv)    the key tile that each block has drawn
//   turns and number have something for each tile, which lies at its first row
//
// The blocks of a query tile add to its dQ in the order of their key tiles. Each block waits for its turn. When a block begins, it
// draws its key tile from a counter of its KV head (or of its sequence there). So it waits only for blocks that have begun. Nothing
// hangs, whatever the grid is and in whichever order blocks start.
//
// All blocks walk from the last query to the first. Under a causal mask, key tiles then begin together, at the queries that all of
// them see, and the longest begin first. In a window, each comes to a query tile after those before it have left. So a block is
// late by the adding of those before it, which run side by side with it, and not by their tiles. From then on it waits for no other
// block.
//
// Two other ways were not taken. A block might begin at a query tile of its own, and wrap. Then blocks would wait for higher numbers,
// and if those found no room, all would hang. A launch whose blocks own query tiles would need no order. But it computes S and dP
// again: seven products in place of five.
// SRAM and registers are those of flash2_backward.cu. Expected: as fast, but for two barriers and a fence per tile.
#include "flash2_backward.cuh"

// Whose turn it is to add to the dQ of a query tile: its counter, and the key tiles that its queries see. `begin` is the first row
// of the head, of all batches and sequences.
struct Turn {
  long long counter;
  Keys tiles;

  DEVICE Turn(const Shape& shape, long long begin, int i)
      : counter(begin + i * BR),
        tiles(visible_tiles(shape, i * BR, min(i * BR + BR, shape.len_q) - 1, BC)) {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash2_backward_deterministic(const Tensor q, const Tensor k, const Tensor v, const float* lse, const Tensor dout,
                              const float* delta, float* dq_sum, const Tensor dk, const Tensor dv,
                              const int* offsets_q, const int* offsets_kv, const long long* rng_state, unsigned* drawn,
                              int* number, unsigned* turns, const Shape batches) {
  const Place place = place_of(batches, blockIdx.x);
  const int flat_head = place.flat_head, batch = RAGGED ? 0 : flat_head / batches.kv_heads, group = batches.heads / batches.kv_heads;

  // step: load_kv (which sequence)
  const SequenceRows own = row_tile_at<BC>(transposed(batches), {offsets_kv, offsets_q}, place.key_tile);
  Shape shape = batches;  // the problem that the sequence is alone
  if constexpr (RAGGED) shape.len_q = own.keys, shape.len_kv = own.keys - own.aligned;
  if (RAGGED && own.first_row >= own.keys) return;  // an empty place
  const int keys_before = RAGGED ? own.q + own.aligned : 0, queries_before = own.kv;  // rows of a head in front of it
  const int key_tiles = ceil_div(shape.len_kv, BC);

  // step: draw
  const int counter = RAGGED ? flat_head * batches.sequences + own.sequence : flat_head;
  int* own_number = number + static_cast<long long>(flat_head) * batches.len_kv + own.q + own.first_row;
  if (threadIdx.x == 0) store_global<int>(own_number, count_up(drawn + counter, key_tiles - 1));
  barrier();
  const Shape keys_first = transposed(shape);
  const int first_key = uniform(load_global<int>(own_number)) * BC, end_key = min(first_key + BC, shape.len_kv);
  const Warp warp;

  const Keys walk = visible_tiles(keys_first, first_key, end_key - 1, BR);  // tiles of queries
  const Keys tiles = {uniform(walk.first), uniform(walk.last)};

  const Sram sram;
  sram.name();

  // step: load_kv
  const int kv_head = flat_head % shape.kv_heads;
  load_tile<THREADS>(sram.k, row_address(k, batch, kv_head, keys_before + first_key), k.row, end_key - first_key, row_bytes(shape));
  load_tile<THREADS>(sram.v, row_address(v, batch, kv_head, keys_before + first_key), v.row, end_key - first_key, row_bytes(shape));
  const Dropout dropout(rng_state, shape.kept);

  const Visits<true> visits{tiles};
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
    const Turn turn(shape, row_of(here.head, queries_before), here.i);
    if (threadIdx.x == 0) wait_for(turns + turn.counter, first_key / BC - turn.tiles.first);
    barrier();  // all key tiles before have added their parts
    const int first_tile = RAGGED ? queries_before / BR + own.sequence : 0;
    add_gradient<true>(dq_sum, sum_tile_of(batches, batch * shape.heads + here.head, here.i, first_tile), dq, warp);
    barrier();  // all warps have added theirs
    const Turn same(shape, row_of(here.head, queries_before), opaque(here.i));  // computed once more: cheaper than registers
    if (threadIdx.x == 0) count_up(turns + same.counter, same.tiles.last - same.tiles.first);
    here = visits.after(here);
  }

  // step: store_dkv
  copy_wait<0>();  // without queries K and V are still on their way
  const int again = place_of(batches, opaque(static_cast<int>(blockIdx.x))).flat_head;  // once more: cheaper than registers
  auto rows = [&](const Tensor& x) {
    return row_address(x, again / shape.kv_heads, again % shape.kv_heads, keys_before + first_key);
  };
  store_gradient(rows(dk), dk.row, shape, first_key, dk_sum, warp, of_kept(shape.scale, shape.kept));
  store_gradient(rows(dv), dv.row, shape, first_key, dv_sum, warp, of_kept(1, shape.kept));
}
