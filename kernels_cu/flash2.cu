// FlashAttention-2, forward: Algorithm 1 of Dao 2023 (arXiv 2307.08691), with masks, windows, GQA and any lengths.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse (batch, heads, len_q) float32         rows padded to 16 bytes
//
// A block owns BR rows of Q and walks the key tiles that they see. The paper swaps FlashAttention-1's loops: Q is outside, K and V are
// inside. So O, m and l never leave the registers. Split-Q: a warp owns BR / WARPS of the rows and all BC columns of a tile. No warp
// needs another's scores, but each reads all of K and V from SRAM. With 32 rows a warp, a fragment of K or V feeds two products.
//
//   SRAM        Q  BR x D | K  STAGES x (BC x D) | V  STAGES x (BC x D)     D = HEAD_DIM, head_dim rounded up to 16
//   registers   O (BR x D) and S (BR x BC) in float32, spread over the warps; m, l of each row
//
// Expected: HBM reads Q once, and K and V once per row of tiles. O and the LSE are written once. The tensor cores bind.
//
// 255 registers leave two warps to a scheduler. While both are in their softmax, nothing is multiplied. So no branch stands between
// the exponentials and P V, and the compiler mixes them. Two stages pay where two blocks per SM still fit.
#include "mma.cuh"
#include "scheduler.cuh"
#include "softmax.cuh"
#include "variant.cuh"

constexpr int THREADS = WARPS * 32, WARP_ROWS = BR / WARPS;
constexpr int ROW_FRAGMENTS = WARP_ROWS / 16;  // 16 rows of a warp
static_assert(BR % (16 * WARPS) == 0 && BC % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");
static_assert(STAGES == 1 || STAGES == 2, "one buffer for K and V, or two");

using QTile = Tile<BR, HEAD_DIM>;
using WarpTile = Tile<WARP_ROWS, HEAD_DIM>;  // a warp's rows of Q
using KVTile = Tile<BC, HEAD_DIM>;

extern "C" __global__ void __launch_bounds__(THREADS)
flash2(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const float* sinks,
       const float* alibi_slopes, const int* offsets_q, const int* offsets_kv, const unsigned* mask_bits, const int* mask_tiles,
       const long long* rng_state, const Shape batches) {
  const auto [flat_head, row_tile] = head_tile_at(batches, row_tiles_of(batches), blockIdx.x);  // blocks start in this order
  const int batch = flat_head / batches.heads, head = flat_head % batches.heads;

  // step: load_q (which rows)
  const SequenceRows own = row_tile_at(batches, {offsets_q, offsets_kv}, row_tile);
  const Shape shape = own.alone(batches);
  const int first_row = own.first_row;
  if (RAGGED && first_row >= shape.len_q) return;  // an empty place
  const int rows = min(BR, shape.len_q - first_row);  // of the problem, in this tile
  const Visits visits(mask_tiles, shape, own.mask_tile());

  // step: load_q (how many key tiles its rows see)
  const Keys walk = MASK ? Keys{0, visits.length() - 1} : visible_tiles(shape, first_row, first_row + rows - 1, BC);
  const Keys tiles = {uniform(walk.first), uniform(walk.last)};  // places in the walk: key tiles, or entries of the mask's list
  const int warp_row = warp_id() * WARP_ROWS;         // of the tile
  const int lane_row = first_row + warp_row + lane_id() / 4;  // of Q: of a fragment, a lane holds rows g and g + 8,
  const int t = lane_id() % 4;                                // columns 2t and 2t + 1 (mma.cuh)

  const QTile q_tile{sram_base()};
  const WarpTile q_rows{q_tile.base + warp_row * QTile::ROW_BYTES};
  auto k_tile = [&](int j) { return KVTile{q_tile.base + QTile::BYTES + (j & (STAGES - 1)) * KVTile::BYTES}; };
  auto v_tile = [&](int j) { return KVTile{k_tile(j).base + STAGES * KVTile::BYTES}; };
  name_sram("q", q_tile.base, QTile::BYTES);
  name_sram("k", k_tile(0).base, STAGES * KVTile::BYTES);
  name_sram("v", v_tile(0).base, STAGES * KVTile::BYTES);

  const char* k_rows = row_address(k, batch, kv_head(shape, head), own.kv) + tiles.first * BC * k.row;
  const char* v_rows = row_address(v, batch, kv_head(shape, head), own.kv) + tiles.first * BC * v.row;
  TileLoader<THREADS, KVTile> k_loader(k_rows, k.row, row_bytes(shape)), v_loader(v_rows, v.row, row_bytes(shape));
  Visit here, next;  // at this place of the mask's list, and at the next
  auto load = [&](TileLoader<THREADS, KVTile>& loader, KVTile to, int j, Visit visit) {
    if constexpr (MASK) return loader.at(visit.tile()).load(to, shape.len_kv - visit.tile() * BC);
    loader.load(to, shape.len_kv - j * BC);
  };
  auto load_k = [&](int j, Visit visit) { load(k_loader, k_tile(j), j, visit); };
  auto load_v = [&](int j, Visit visit) { load(v_loader, v_tile(j), j, visit); };

  // step: load_q
  load_tile<THREADS>(q_tile, row_address(q, batch, head, own.q + first_row), q.row, rows, row_bytes(shape));  // line 4
  copy_commit();
  const Variant variant(alibi_slopes, rng_state, batches, flat_head);

  // step: load_k (prefetch)
  if (MASK && tiles.first <= tiles.last) next = visits.at(tiles.first);
  if (tiles.first <= tiles.last) load_k(tiles.first, next);  // line 7, ahead of its turn

  // step: load_v (prefetch)
  if (STAGES == 2 && tiles.first <= tiles.last) load_v(tiles.first, next);
  copy_commit();

  FragmentA q_fragments[Q_IN_REGISTERS ? HEAD_DIM / K_STEP : 1][ROW_FRAGMENTS];
  if constexpr (Q_IN_REGISTERS) {
    // step: load_q (to registers, for all key tiles)
    copy_wait<1>();
    barrier();
#pragma unroll
    for (int d = 0; d < HEAD_DIM / K_STEP; ++d)
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) q_fragments[d][i] = load_a(q_rows, 16 * i, d * K_STEP);
  }

  const Scores scores(shape);
  const auto [c, sign] = scores;
  const Keys full = sign != 1 ? Keys{0, -1} : full_tiles(shape, first_row, first_row + rows - 1, BC);  // need no mask

  float o[ROW_FRAGMENTS][O_FRAGMENTS][4] = {};     // line 5: O = 0, l = 0, m = -inf. LOWEST serves as -inf:
  float m[ROW_FRAGMENTS][2], l[ROW_FRAGMENTS][2];  // no score is below it, and m - m is 0, not NaN
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i) m[i][0] = m[i][1] = LOWEST, l[i][0] = l[i][1] = 0;

  for (int j = tiles.first; j <= tiles.last; ++j) {  // line 6
    // step: load_k
    copy_wait<0>();
    barrier();  // K_j is there (with two stages V_j too), and no warp still reads the tiles before
    here = next;
    if (MASK && j < tiles.last) next = visits.at(j + 1);
    if (STAGES == 1) {
      // step: load_v (prefetch, during the scores)
      load_v(j, here);
    } else if (j < tiles.last) {
      // step: load_k (prefetch, a whole tile ahead)
      load_k(j + 1, next);
      // step: load_v (prefetch, a whole tile ahead)
      load_v(j + 1, next);
    }
    copy_commit();

    // step: mask (its bits, ahead)
    MaskBits hidden[ROW_FRAGMENTS];
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
      if (MASK) hidden[i].load(mask_bits, shape, own.mask_tile(), here, warp_row / 16 + i);

    // step: scores
    float s[ROW_FRAGMENTS][S_FRAGMENTS][4] = {};  // line 8: S = Q K_jᵀ
#pragma unroll
    for (int d = 0; d < HEAD_DIM / K_STEP; ++d) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = Q_IN_REGISTERS ? q_fragments[d][i] : load_a(q_rows, 16 * i, d * K_STEP);
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; n += 2) {
        const FragmentB b = load_b_rows(k_tile(j), 8 * n, d * K_STEP);
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(s[i][n], s[i][n + 1], a[i], b);
      }
    }

    // step: load_k (prefetch, during softmax and output)
    if (STAGES == 1) {
      barrier();  // all warps are done with K_j
      if (j < tiles.last) load_k(j + 1, next);
      copy_commit();
    }

    variant.bend(s, scores, shape, lane_row, key_tile(j, here) * BC);

    // step: mask
    if constexpr (MASK) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) scores.flip(s[i]), hidden[i].hide(s[i], here, -INF);
    } else if (j < full.first || j > full.last) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
#pragma unroll
        for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][n][e] *= sign;
        mask_scores(s[i], shape, lane_row + 16 * i, j * BC, 2 * (opaque(lane_id()) % 4));
      }
    }

    // step: softmax
    float alpha[ROW_FRAGMENTS][2];  // line 9: m_new = max(m, rowmax(S)), alpha = exp(m - m_new)
    bool risen = false;
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        alpha[i][half] = raise(s[i], half, scores, m[i][half]);
        risen |= alpha[i][half] < 1;
      }

    // step: rescale
    if (any_lane(risen)) {  // line 10: diag(alpha) O. Where no maximum rose (ever more often), nothing changes.
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
        l[i][0] *= alpha[i][0], l[i][1] *= alpha[i][1];
        rescale(o[i], alpha[i]);
      }
    }

    // step: load_v
    if (STAGES == 1) {
      copy_wait<1>();  // all but the newest group, K_{j+1}
      barrier();
    }

    // step: softmax (P: behind that branch, so that the compiler mixes the exponentials with the products)
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[i][n][e] = exp2_approx(c * s[i][n][e] - m[i][e / 2]);  // line 9: P = exp(S - m_new), l = alpha l +
          l[i][e / 2] += s[i][n][e];                               // rowsum(P): the quad's parts are added at the end
        }
    variant.drop(s, (first_row + warp_row) / 16, key_tile(j, here) * (BC / 16));

    // step: output
#pragma unroll
    for (int key = 0; key < BC; key += K_STEP) {  // line 10: O += P V_j, P rounded to the storage dtype
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = operand_a(s[i], key);
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; n += 2) {
        if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
        const FragmentB b = load_b_columns(v_tile(j), key, 8 * n);
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(o[i][n], o[i][n + 1], a[i], b);
      }
    }
  }

  copy_wait<0>();  // without key tiles Q is still on its way
  const int block = opaque(static_cast<int>(blockIdx.x));
  const HeadTile place = head_tile_at(batches, row_tiles_of(batches), block);  // once more: cheaper than registers
  const int out_row = RAGGED ? lane_row : place.row_tile * BR + warp_row + lane_id() / 4;

  // step: normalize (its sink)
  const float sink = of_head<SINKS>(sinks, place.head % shape.heads, -INF);
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = out_row + 16 * i + 8 * half, packed_row = own.q + row;
      const bool inside = row < shape.len_q;

      // step: normalize
      float sum = quad_sum(l[i][half]);  // line 12: diag(l)⁻¹ O; a row without keys has l = 0 and gets 0
      const float alpha = join_sink(m[i][half], sum, sink);
      const float factor = sum > 0 ? of_kept(alpha * reciprocal(sum), batches.kept) : 0;

      // step: store_o
      char* address = row_address(out, place.head / shape.heads, place.head % shape.heads, packed_row);
      store_row(address, o[i], half, factor, inside ? padded_row_bytes(shape) : 0);

      // step: store_lse
      float* row_lse = lse + static_cast<long long>(place.head) * batches.len_q + packed_row;
      if (inside && t == 0)  // line 13: L = m + log(l), -inf for a row without keys
        store_global(row_lse, (m[i][half] + log2_approx(sum)) * LN2);
    }
}
