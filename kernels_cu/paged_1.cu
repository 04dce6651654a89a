// Paged attention, rung 1 (Kwon et al. 2023, arXiv 2309.06180): flash_decoding_1 over K and V in pages, for requests of any lengths.
//
//   q, out (batch, heads, 1, head_dim)    k, v (pages, kv_heads, page_size, head_dim)    float16 or bfloat16
//   lse (batch, heads, 1) float32, or NULL    block_table (batch, table_pages), seq_lens (batch) int32    rows padded to 16 bytes
//
// Key n of a request is row n % page_size of page block_table[request, n / page_size]. A block is a single warp. It has a request, a
// KV head, and BR = 16 of the query heads that share it. BC is at most 32: each lane looks up where one key of a tile lies, and tells
// the lanes that copy it (page_loader.cuh). Its value lies in the same place of the same page. The rest is flash_decoding_1.
//
// Expected: besides K and V, 4 bytes of the block table are read for each page that a tile's keys touch. The look-up comes before the
// copies, STAGES - 1 tiles ahead. A long request keeps its blocks busy when all others are done. paged splits it.
#include "decoding_rungs.cuh"
#include "divisor.cuh"
#include "page_loader.cuh"

static_assert(BC <= 32, "a lane for each key");

extern "C" __global__ void __launch_bounds__(32)
paged_1(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const int* block_table, const int* seq_lens,
        const Shape shape) {
  const Heads heads(shape, blockIdx.x);
  // step: load_q (how many keys the request has)
  const int keys = min(max(load_global<int>(seq_lens + heads.batch), 0), shape.len_kv);  // the table has room for no more
  const int tiles = ceil_div(keys, BC);
  const int* table = block_table + static_cast<long long>(heads.batch) * shape.table_pages;
  const Divisor page_size(shape.page_size);
  const Sram sram;
  const PageLoader<KVTile> k_loader(row_address(k, 0, heads.kv_head, 0), k, row_bytes(shape));
  const PageLoader<KVTile> v_loader(row_address(v, 0, heads.kv_head, 0), v, row_bytes(shape));
  auto load = [&](int j) {
    if (j < tiles) {
      // step: load_k (pages)
      const int key = j * BC + lane_id();
      const bool inside = lane_id() < BC && key < keys;
      lanes_meet();
      const int page = inside ? load_global<int>(table + key / page_size) : 0, place = key % page_size;
      // step: load_k (prefetch)
      k_loader.load(sram.k(j), k_loader.row_of(page, place), keys - j * BC);
      // step: load_v (prefetch)
      v_loader.load(sram.v(j), v_loader.row_of(page, place), keys - j * BC);
    }
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
    if (keys - j * BC < BC) hide_beyond(s, keys - j * BC);

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
