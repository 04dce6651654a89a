// Decoding, rung 1: one query per sequence against all its keys. The query heads that share a KV head are rows of one tile.
// (FlashAttention-2, Dao 2023, arXiv 2307.08691, with heads in place of queries; groups of heads: Ainslie et al., arXiv 2305.13245.)
//
//   q, out (batch, heads, 1, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, 1) float32, or NULL    rows padded to 16 bytes
//
// A block is a single warp. It has a KV head, and BR = 16 of the query heads that share it, or as many as there are: a product of the
// tensor cores has 16 rows anyway. It walks over all keys, BC at a time. While it computes, the next STAGES - 1 tiles are on their way.
//
//   SRAM        Q  BR x D | K  STAGES x (BC x D) | V  STAGES x (BC x D)     D = HEAD_DIM, head_dim rounded up to 16
//   registers   O (BR x D) and S (BR x BC) in float32; m, l of each row
//
// Expected: HBM reads K and V once for a group of up to 16 heads, where flash2 reads them once per query head. But there are only as
// many blocks as KV heads. With 8 of them, 124 of 132 SMs are idle. flash_decoding_2 gives them work.
#include "decoding_rungs.cuh"

extern "C" __global__ void __launch_bounds__(32)
flash_decoding_1(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const Shape shape) {
  const Heads heads(shape, blockIdx.x);
  const int tiles = ceil_div(shape.len_kv, BC);
  const Sram sram;
  TileLoader<32, KVTile> k_loader(row_address(k, heads.batch, heads.kv_head, 0), k.row, row_bytes(shape));
  TileLoader<32, KVTile> v_loader(row_address(v, heads.batch, heads.kv_head, 0), v.row, row_bytes(shape));
  auto load = [&](int j) {
    // step: load_k (prefetch)
    if (j < tiles) k_loader.load(sram.k(j), shape.len_kv - j * BC);
    // step: load_v (prefetch)
    if (j < tiles) v_loader.load(sram.v(j), shape.len_kv - j * BC);
    copy_commit();  // a group of copies, even if there is no tile any more
  };

  // step: load_q
  load_tile<32>(sram.q, row_address(q, heads.batch, heads.first, 0), q.head, heads.rows, row_bytes(shape));
#pragma unroll 1
  for (int j = 0; j < STAGES - 1; ++j) load(j);

  float o[O_FRAGMENTS][4] = {};
  Softmax softmax;
  for (int j = 0; j < tiles; ++j) {
    // step: load_k
    copy_wait<STAGES - 2>();
    barrier();  // the queries, K_j and V_j are there, and no lane still reads the tiles before
    load(j + STAGES - 1);

    // step: scores
    float s[S_FRAGMENTS][4] = {};
    multiply_qk(s, sram.q, sram.k(j), shape.scale * LOG2E);

    // step: mask
    if (shape.len_kv - j * BC < BC) hide_beyond(s, shape.len_kv - j * BC);

    // step: softmax
    float alpha[2];
    softmax.raise(s, alpha);
    softmax.exponentials(s);

    // step: rescale
    rescale(o, alpha);

    // step: load_v
    const KVTile v_j = sram.v(j);

    // step: output
    multiply_pv(o, s, v_j);
  }
  copy_wait<0>();  // without keys the queries are still on their way

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_id() / 4 + 8 * half, head = heads.first + row;
    const bool inside = row < heads.rows;

    // step: normalize
    const float sum = quad_sum(softmax.l[half]), factor = sum > 0 ? reciprocal(sum) : 0;  // without keys the output is 0

    // step: store_o
    store_row(row_address(out, heads.batch, head, 0), o, half, factor, inside ? padded_row_bytes(shape) : 0);

    // step: store_lse
    lanes_meet();
    if (inside && lane_id() % 4 == 0 && lse)
      store_global(lse + heads.batch * shape.heads + head, (softmax.m[half] + log2_approx(sum)) * LN2);
  }
}
