// FlashAttention-1, backward: Algorithm 4 of arXiv 2205.14135, as printed; the LSE stands for its l and m. One block a (batch, KV
// head): K and V outside, Q inside. dQ lies in HBM and is read and written at every j; masked tiles are walked too.
//
// q, out, dout, dq: (batch, heads, len_q, head_dim); k, v, dk, dv: (batch, kv_heads, len_kv, head_dim), in the storage dtype;
// dq_sum: workspace like dq, but float32; lse, dlse: (batch, heads, len_q) float32. Rows of all tensors are padded to 16 bytes.
// Tiles: Br = BR queries x Bc = BC keys. How the warps share the work: backward.cuh.
#include "backward.cuh"

constexpr int LANES = lanes_for(HEAD_DIM / CHUNK_ELEMENTS);  // that compute a D together
constexpr int SUM_LANES = lanes_for(HEAD_DIM / 4), CHUNKS = HEAD_DIM / CHUNK_ELEMENTS;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash1_backward(const Tensor q, const Tensor k, const Tensor v, const Tensor out, const float* lse, const Tensor dout,
                const float* dlse, const Tensor dq_sum, const Tensor dq, const Tensor dk, const Tensor dv,
                const long long* rng_state, const Shape shape) {
  const int batch = blockIdx.x / shape.kv_heads, kv_head = blockIdx.x % shape.kv_heads, group = shape.heads / shape.kv_heads;
  const int row_tiles = ceil_div(shape.len_q, BR), key_tiles = max(1, ceil_div(shape.len_kv, BC));
  const Warp warp;

  const KVTile k_tile{sram_base()}, v_tile{k_tile.base + KVTile::BYTES};
  const PTile p_tile{v_tile.base + KVTile::BYTES}, ds_tile{p_tile.base + PTile::BYTES};
  const QTile q_tile{ds_tile.base + PTile::BYTES}, do_tile{q_tile.base + QTile::BYTES}, o_tile{do_tile.base + QTile::BYTES};
  const unsigned d_of_rows = o_tile.base + QTile::BYTES;
  name_sram("k", k_tile.base, KVTile::BYTES);
  name_sram("v", v_tile.base, KVTile::BYTES);
  name_sram("p", p_tile.base, PTile::BYTES);
  name_sram("ds", ds_tile.base, PTile::BYTES);
  name_sram("q", q_tile.base, QTile::BYTES);
  name_sram("dout", do_tile.base, QTile::BYTES);
  name_sram("out", o_tile.base, QTile::BYTES);
  name_sram("d", d_of_rows, 4 * BR);

  // step: init
  const Dropout dropout(rng_state, shape.kept);
  for (int member = 0; member < group; ++member)
    for (int row = threadIdx.x / SUM_LANES; row < shape.len_q; row += THREADS / SUM_LANES)
      for (int column = threadIdx.x % SUM_LANES * 4; column < shape.head_dim; column += SUM_LANES * 4)
        store_global(row_address(dq_sum, batch, kv_head * group + member, row) + column * 4, make_float4(0, 0, 0, 0));
  for (int key = threadIdx.x / LANES; key < shape.len_kv; key += THREADS / LANES)
    for (int place = threadIdx.x % LANES * CHUNK_BYTES; place < padded_row_bytes(shape); place += LANES * CHUNK_BYTES) {
      store_global(row_address(dk, batch, kv_head, key) + place, make_uint4(0, 0, 0, 0));
      store_global(row_address(dv, batch, kv_head, key) + place, make_uint4(0, 0, 0, 0));
    }

  for (int j = 0; j < key_tiles; ++j) {
    const int first_key = j * BC, keys = shape.len_kv - first_key;
    Gradient dk_sum = {}, dv_sum = {};

    // step: load_kv
    barrier();  // no warp still reads the tile before
    load_tile<THREADS>(k_tile, row_address(k, batch, kv_head, first_key), k.row, keys, row_bytes(shape));
    load_tile<THREADS>(v_tile, row_address(v, batch, kv_head, first_key), v.row, keys, row_bytes(shape));
    copy_commit();

    for (int visit = 0; visit < group * row_tiles; ++visit) {
      const int head = kv_head * group + visit / row_tiles, first_row = visit % row_tiles * BR, rows = shape.len_q - first_row;

      // step: load_q
      barrier();  // no warp still reads the tiles before
      load_tile<THREADS>(q_tile, row_address(q, batch, head, first_row), q.row, rows, row_bytes(shape));
      const long long statistics = (static_cast<long long>(batch) * shape.heads + head) * shape.len_q + first_row;
      float lse_here[STATISTICS], delta_here[STATISTICS];
#pragma unroll
      for (int r = 0; r < STATISTICS; ++r) {
        lse_here[r] = INF;  // so P = 0 beyond the last query
        if (warp.holds(r, rows)) lse_here[r] = lse_of(load_global<float>(lse + statistics + warp.query(r)));
      }

      // step: load_do
      load_tile<THREADS>(do_tile, row_address(dout, batch, head, first_row), dout.row, rows, row_bytes(shape));
      load_tile<THREADS>(o_tile, row_address(out, batch, head, first_row), out.row, rows, row_bytes(shape));
      copy_commit();
      copy_wait<0>();
      barrier();

      // step: delta
      for (int first = 0; first < BR; first += THREADS / LANES) {
        const int row = first + threadIdx.x / LANES;
        float sum = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += LANES) {
          const int own = chunk + threadIdx.x % LANES;
          if (row < BR && own < CHUNKS)
            sum += dot(load_shared<uint4>(do_tile.at(row, own)), load_shared<uint4>(o_tile.at(row, own)), CHUNK_ELEMENTS);
        }
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        if (row < BR && threadIdx.x % LANES == 0) {
          if (row < rows) sum = less_dlse(sum, dlse, statistics + row);
          store_shared(d_of_rows + 4 * row, kept_part(sum, shape.kept));
        }
      }
      barrier();

      // step: scores
      Transposed s = {};
      multiply_by_queries(s, k_tile, q_tile, warp);

      // step: mask
      const Scores scores(shape);  // here, for else they would take registers all the time
      mask_transposed(s, scores, transposed(shape), warp, first_key, first_row);

      // step: exp
      const Dropout of_head = dropout.of_head(batch * shape.heads + head);
      exponentials(s, scores.c, lse_here, p_tile, warp, of_head, first_key, first_row);

      // step: dp
#pragma unroll
      for (int r = 0; r < STATISTICS; ++r) {
        delta_here[r] = 0;
        if (warp.holds(r, BR)) delta_here[r] = load_shared<float>(d_of_rows + 4 * warp.query(r));
      }
      Transposed dp;
      begin_below(dp, delta_here);
      multiply_by_queries(dp, v_tile, do_tile, warp);

      // step: ds
      if constexpr (DROPOUT) drop_gradient(dp, s, delta_here);
      scores_gradient(dp, s, ds_tile, warp);
      barrier();  // P and dS are there

      // step: dv
      multiply_by_columns(dv_sum, p_tile, do_tile, warp);

      // step: dk
      multiply_by_columns(dk_sum, ds_tile, q_tile, warp);

      // step: dq
      QueryGradient part = {};
      multiply_for_queries(part, ds_tile, k_tile, warp);

      // step: update_dq
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) {
        const int row = first_row + warp.row + 16 * f + lane_id() / 4 + lane_id() % 2 * 8;
#pragma unroll
        for (int m = 0; m < COLUMN_PAIRS; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            warp_barrier();  // or the compiler reads ahead until registers spill
            const float4 here = four_columns(part[f][m][n]);
            const int column = m * TURN + 16 * warp.across + 8 * n + lane_id() % 4 / 2 * 4;
            char* sums = row_address(dq_sum, batch, head, row) + column * 4;
            float4 x = make_float4(0, 0, 0, 0);
            if (row < shape.len_q && column < shape.head_dim) x = load_global<float4>(sums);
            const float scale = of_kept(shape.scale, shape.kept);
            x.x += here.x * scale, x.y += here.y * scale, x.z += here.z * scale, x.w += here.w * scale;
            if (j < key_tiles - 1) {
              if (row < shape.len_q && column < shape.head_dim) store_global(sums, x);
            } else if (row < shape.len_q && column < round_up(shape.head_dim, CHUNK_ELEMENTS)) {
              store_elements(row_address(dq, batch, head, row) + column * ELEMENT_BYTES, x);
            }
          }
      }
    }

    // step: store_dkv
    copy_wait<0>();  // without queries K and V are still on their way
    store_gradient(row_address(dk, batch, kv_head, first_key), dk.row, shape, first_key, dk_sum, warp, of_kept(shape.scale, shape.kept));
    store_gradient(row_address(dv, batch, kv_head, first_key), dv.row, shape, first_key, dv_sum, warp, of_kept(1, shape.kept));
  }
}
