// Decoding, rung 2: Flash-Decoding as it was published (Dao, Haziza, Massa, Sizov 2023). The keys are split over blocks.
//
//   q, out (batch, heads, 1, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    float16 or bfloat16
//   lse (batch, heads, 1) float32, or NULL    rows padded to 16 bytes
//   partial (batch, heads, chunks, head_dim), partial_m, partial_l (batch, heads, chunks)    float32
//
// Two launches. In the first one a block does what it does in flash_decoding_1, but with one chunk of the keys. It leaves O, which isn't
// divided yet, m and l of each row in HBM. In the second launch a warp has a row, and merges what the chunks left of it.
//
// Expected: K and V are read once, and all SMs read. A chunk costs head_dim + 2 floats of a row, written and read. The second launch
// waits for the last block of the first one. (flash_decoding merges in the same launch.)
#include "decoding_rungs.cuh"
#include "elements.cuh"

// The chunks of a sequence: MOST_CHUNKS at most, and one even without keys.
struct Chunks {
  int tiles, size, count;  // key tiles, those of a chunk, and how many chunks there are

  DEVICE explicit Chunks(const Shape& shape)
      : tiles(ceil_div(shape.len_kv, BC)), size(max(LEAST_TILES, ceil_div(tiles, MOST_CHUNKS))), count(max(1, ceil_div(tiles, size))) {}
};

DEVICE int part_columns(const Shape& shape) { return round_up(shape.head_dim, 4); }  // with padding

extern "C" __global__ void __launch_bounds__(32)
flash_decoding_2(const Tensor q, const Tensor k, const Tensor v, float* partial, float* partial_m, float* partial_l, const Shape shape) {
  const Chunks chunks(shape);
  const int chunk = blockIdx.x % chunks.count, first = chunk * chunks.size, end = min(first + chunks.size, chunks.tiles);
  const Heads heads(shape, blockIdx.x / chunks.count);
  const Sram sram;
  TileLoader<32, KVTile> k_loader(row_address(k, heads.batch, heads.kv_head, first * BC), k.row, row_bytes(shape));
  TileLoader<32, KVTile> v_loader(row_address(v, heads.batch, heads.kv_head, first * BC), v.row, row_bytes(shape));
  auto load = [&](int j) {
    // step: load_k (prefetch)
    if (j < end) k_loader.load(sram.k(j), shape.len_kv - j * BC);
    // step: load_v (prefetch)
    if (j < end) v_loader.load(sram.v(j), shape.len_kv - j * BC);
    copy_commit();
  };

  // step: load_q
  load_tile<32>(sram.q, row_address(q, heads.batch, heads.first, 0), q.head, heads.rows, row_bytes(shape));
#pragma unroll 1
  for (int j = first; j < first + STAGES - 1; ++j) load(j);

  float o[O_FRAGMENTS][4] = {}, alpha[2];
  Softmax softmax;
  for (int j = first; j < end; ++j) {
    // step: load_k
    copy_wait<STAGES - 2>();
    barrier();
    load(j + STAGES - 1);
    // step: scores
    float s[S_FRAGMENTS][4] = {};
    multiply_qk(s, sram.q, sram.k(j), shape.scale * LOG2E);
    // step: mask
    if (shape.len_kv - j * BC < BC) hide_beyond(s, shape.len_kv - j * BC);
    // step: softmax
    softmax.raise(s, alpha);
    softmax.exponentials(s);
    // step: rescale
    rescale(o, alpha);
    // step: load_v
    const KVTile v_j = sram.v(j);
    // step: output
    multiply_pv(o, s, v_j);
  }
  copy_wait<0>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // step: store_partial
    const int row = lane_id() / 4 + 8 * half, columns = part_columns(shape);
    const bool inside = row < heads.rows;
    const long long at = static_cast<long long>(heads.batch * shape.heads + heads.first + row) * chunks.count + chunk;
    const float sum = quad_sum(softmax.l[half]);
    store_part(partial + at * columns, o, half, inside ? columns : 0);
    lanes_meet();
    if (inside && lane_id() % 4 == 0) store_global(partial_m + at, softmax.m[half]), store_global(partial_l + at, sum);
  }
}

extern "C" __global__ void __launch_bounds__(32)
flash_decoding_2_merge(const float* partial, const float* partial_m, const float* partial_l, const Tensor out, float* lse,
                       const Shape shape) {
  constexpr int TURNS = ceil_div(HEAD_DIM, 128);  // a lane has four columns of each 128
  const Chunks chunks(shape);
  const int row = blockIdx.x, columns = part_columns(shape);
  float4 o[TURNS] = {};
  float m = LOWEST, l = 0;
#pragma unroll 8  // so many loads are on their way
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    // step: load_partial
    const long long at = static_cast<long long>(row) * chunks.count + chunk;
    const float m_n = load_global<float>(partial_m + at), l_n = load_global<float>(partial_l + at);
    // step: merge
    const float top = fmaxf(m, m_n), alpha = exp2_approx(m - top), beta = exp2_approx(m_n - top);
    m = top, l = weighed(l, alpha, l_n, beta);
    // step: load_partial (its output: lanes beyond the last column read that one again, which costs no bytes)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const float4 x = load_global<float4>(partial + at * columns + min(128 * turn + 4 * lane_id(), columns - 4));
      o[turn] = weighed(o[turn], alpha, x, beta);
    }
  }

  // step: normalize
  const float factor = l > 0 ? reciprocal(l) : 0;
  // step: store_o
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 128 * turn + 4 * lane_id();
    char* to = row_address(out, row / shape.heads, row % shape.heads, 0) + column * ELEMENT_BYTES;
    lanes_meet();
    if (column < round_up(shape.head_dim, CHUNK_ELEMENTS)) store_elements(to, times(o[turn], column < columns ? factor : 0));
  }
  // step: store_lse
  lanes_meet();
  if (lane_id() == 0 && lse) store_global(lse + row, (m + log2_approx(l)) * LN2);
}
