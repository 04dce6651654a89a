// FlashAttention-2, backward: Algorithm 2 of Dao 2023 (arXiv 2307.08691), with masks, windows, GQA and any lengths.
//
//   q, out, dout, dq (batch, heads, len_q, head_dim)    k, v, dk, dv (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse, delta (batch, heads, len_q)    dq_sum (batch, heads, len_q, head_dim)    float32; delta and dq_sum are workspaces
//   rows padded to 16 bytes
//
// Three launches. The first computes D = rowsum(dO · O) and sets dq_sum to 0. The last one rounds dq_sum to dQ. In the main launch
// a thread block owns BC keys of a KV head, and walks the query tiles that see them, of all query heads that share the KV head.
// So dK and dV never leave its registers, and GQA needs neither a workspace nor a sum over heads. It computes S transposed, with
// keys as rows. dQ is spread over the blocks, which add to it in HBM (red: nothing comes back, so nobody waits).
//
// The warps form a grid of KEY_WARPS x ACROSS. For S and dP a warp has WARP_KEYS keys and every ACROSS-th 16 queries. For dV and
// dK it has the same keys, and for dQ its share of the queries, with every ACROSS-th 16 columns. Hence P and dS pass through SRAM.
//
//   SRAM        K, V  BC x D | P, dS  BC x BR | Q, dO  STAGES x (BR x D)     D = HEAD_DIM, head_dim rounded up to 16
//   registers   dK and dV (BC x D), S and dP (BC x BR) in float32, spread over the warps; then dQ (BR x D) in place of the last two
//
// Expected: HBM reads K, V once, Q and dO once per column of tiles, and as many times adds to dq_sum. SRAM binds: with 32 x 32 scores
// per warp, a fragment that is read feeds two products.
#include "elements.cuh"
#include "mma.cuh"
#include "scores.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ACROSS = WARPS / KEY_WARPS;
constexpr int WARP_KEYS = BC / KEY_WARPS, WARP_ROWS = BR / KEY_WARPS;  // of S; of dQ
constexpr int KEY_FRAGMENTS = WARP_KEYS / 16, ROW_FRAGMENTS = WARP_ROWS / 16;
constexpr int QUERY_PAIRS = BR / 16 / ACROSS;                    // of S, pairs of fragments: 16 queries
constexpr int COLUMN_PAIRS = ceil_div(HEAD_DIM / 16, ACROSS);    // of dK, dV, dQ: 16 columns
constexpr int TURN = 16 * ACROSS;                                // columns that all warps across take together
constexpr int STATISTICS = ceil_div(16 * QUERY_PAIRS, 32);       // a lane's share of the LSE of a warp's queries
static_assert(BR % (16 * KEY_WARPS) == 0 && BC % (16 * KEY_WARPS) == 0 && BR % (16 * ACROSS) == 0 && HEAD_DIM % 16 == 0 &&
              WARPS % KEY_WARPS == 0 && (ACROSS == 1 || ACROSS == 2), "tiles are made of whole fragments");
static_assert(STAGES == 1 || STAGES == 2, "one buffer for Q and dO, or two");

using KVTile = Tile<BC, HEAD_DIM>;
using QTile = Tile<BR, HEAD_DIM>;
using PTile = Tile<BC, BR>;
using Transposed = float[KEY_FRAGMENTS][QUERY_PAIRS][2][4];  // keys x queries
using Gradient = float[KEY_FRAGMENTS][COLUMN_PAIRS][2][4];   // keys x columns

constexpr int DELTA_ROWS = 16, DELTA_THREADS = 128;  // of the first and the last launch
DEVICE constexpr int lanes_for(int chunks) { return chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : chunks > 2 ? 4 : chunks; }

// The row tile of a block of the first and the last launch.
struct Rows { int batch, head, first, end; };

DEVICE Rows rows_of(const Shape& shape) {
  const int row_tiles = ceil_div(shape.len_q, DELTA_ROWS), flat_head = blockIdx.x / row_tiles;
  const int first = blockIdx.x % row_tiles * DELTA_ROWS;
  return {flat_head / shape.heads, flat_head % shape.heads, first, min(first + DELTA_ROWS, shape.len_q)};
}

// The product of two chunks of a row, of whose elements from `left` on none counts: they are padding.
DEVICE float dot(uint4 a, uint4 b, int left) {
  const unsigned x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if FL_DTYPE == 0
    if (i < left) sum += float_of(x[i]) * float_of(y[i]);
#else
    const float2 p = unpack(x[i]), r = unpack(y[i]);
    if (2 * i < left) sum += p.x * r.x;
    if (2 * i + 1 < left) sum += p.y * r.y;
#endif
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash2_backward_delta(const Tensor out, const Tensor dout, float* delta, const Tensor dq_sum, const Shape shape) {
  const auto [batch, head, first_row, end_row] = rows_of(shape);
  constexpr int LANES = lanes_for(HEAD_DIM / CHUNK_ELEMENTS);  // that share a row
  const int lane = threadIdx.x % LANES;

  // step: delta
#pragma unroll
  for (int r = 0; r < DELTA_ROWS; r += DELTA_THREADS / LANES) {
    const int row = first_row + r + threadIdx.x / LANES;
    const bool inside = r + threadIdx.x / LANES < DELTA_ROWS && row < end_row;
    float sum = 0;
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += LANES * CHUNK_ELEMENTS) {
      const int own = column + lane * CHUNK_ELEMENTS;
      lanes_meet();
      if (inside && own < shape.head_dim) {
        const uint4 a = load_global<uint4>(row_address(dout, batch, head, row) + own * ELEMENT_BYTES);
        const uint4 b = load_global<uint4>(row_address(out, batch, head, row) + own * ELEMENT_BYTES);
        sum += dot(a, b, shape.head_dim - own);
      }
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (inside && lane == 0)
      store_global(delta + (static_cast<long long>(batch) * shape.heads + head) * shape.len_q + row, sum);
  }

  // step: zero_dq
  constexpr int SUM_LANES = lanes_for(HEAD_DIM / 4);
  for (int row = first_row + threadIdx.x / SUM_LANES; row < end_row; row += DELTA_THREADS / SUM_LANES)
    for (int column = threadIdx.x % SUM_LANES * 4; column < shape.head_dim; column += SUM_LANES * 4)
      store_global(row_address(dq_sum, batch, head, row) + column * 4, make_float4(0, 0, 0, 0));
}

// Which keys of which KV head a block owns. Blocks start in the order of their number, so under a causal mask the keys that most
// queries see (the first) come first. The KV heads of a group run side by side before the next ones start, so that what their
// blocks share (Q, dO and the sums of dQ) stays in the L2.
struct Place { int flat_head, key_tile; };

DEVICE Place place_of(const Shape& shape, int block) {
  const int key_tiles = ceil_div(shape.len_kv, BC), group = shape.group / (shape.heads / shape.kv_heads);
  const int first_head = block / (group * key_tiles) * group;  // of the group
  const int heads = min(group, shape.batch * shape.kv_heads - first_head);
  const int place = block - first_head * key_tiles;
  return {first_head + place % heads, place / heads};
}

// Does this warp have columns in a turn? If the pairs of fragments don't divide, the last turn has none for the last warps.
DEVICE bool has_columns(int turn, int across) {
  return HEAD_DIM / 16 % ACROSS == 0 || turn < COLUMN_PAIRS - 1 || turn * TURN + 16 * across < HEAD_DIM;
}

// c += A Bᵀ for this warp's keys and queries: A has the block's keys as rows, B the queries of a tile.
DEVICE void multiply_by_queries(Transposed& c, KVTile a_tile, QTile b_tile, int warp_key, int across) {
  const QTile own{b_tile.base + 16 * across * QTile::ROW_BYTES};
#pragma unroll(FL_DTYPE == 0 ? 1 : HEAD_DIM / K_STEP)
  for (int d = 0; d < HEAD_DIM; d += K_STEP) {
    FragmentA a[KEY_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f) a[f] = load_a(a_tile, warp_key + 16 * f, d);
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m) {
      const FragmentB b = load_b_rows(own, m * TURN, d);
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) mma(c[f][m][0], c[f][m][1], a[f], b);
    }
  }
}

// c += A B for this warp's keys and columns: A is P or dS, B has the queries of a tile as rows.
DEVICE void multiply_by_columns(Gradient& c, PTile a_tile, QTile b_tile, int warp_key, int across) {
#pragma unroll(FL_DTYPE == 0 ? 1 : BR / K_STEP)
  for (int query = 0; query < BR; query += K_STEP) {
    FragmentA a[KEY_FRAGMENTS];
#pragma unroll
    for (int f = 0; f < KEY_FRAGMENTS; ++f) a[f] = load_a(a_tile, warp_key + 16 * f, query);
#pragma unroll
    for (int m = 0; m < COLUMN_PAIRS; ++m)
      if (has_columns(m, across)) {
        if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
        const FragmentB b = load_b_columns(b_tile, query, m * TURN, 16 * across);
#pragma unroll
        for (int f = 0; f < KEY_FRAGMENTS; ++f) mma(c[f][m][0], c[f][m][1], a[f], b);
      }
  }
}

// Of the numbers of a warp's queries, 32 a register: those of the two columns that this lane has in a fragment.
DEVICE void of_columns(float (&two)[2], const float (&numbers)[STATISTICS], int fragment) {
  const int query = 8 * fragment + 2 * (lane_id() % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e) two[e] = shuffle(numbers[8 * fragment / 32], query % 32 + e);
}

// The rows of dK or dV, times `factor`.
DEVICE void store_gradient(const Tensor& to, const Shape& shape, Place place, const Gradient& c, int warp_key, int across, float factor) {
#pragma unroll
  for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = place.key_tile * BC + warp_key + 16 * f + 8 * half + lane_id() / 4, begin = 16 * across * ELEMENT_BYTES;
      const int bytes = key < shape.len_kv ? padded_row_bytes(shape) - begin : 0;
      char* own = row_address(to, place.flat_head / shape.kv_heads, place.flat_head % shape.kv_heads, key) + begin;
#pragma unroll
      for (int m = 0; m < COLUMN_PAIRS; ++m)
        store_row(own + m * TURN * ELEMENT_BYTES, c[f][m], half, factor, bytes - m * TURN * ELEMENT_BYTES);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash2_backward(const Tensor q, const Tensor k, const Tensor v, const float* lse, const Tensor dout, const float* delta,
                const Tensor dq_sum, const Tensor dk, const Tensor dv, const Shape shape) {
  const Place place = place_of(shape, blockIdx.x);
  const int batch = place.flat_head / shape.kv_heads, group = shape.heads / shape.kv_heads;
  const int first_key = place.key_tile * BC, end_key = min(first_key + BC, shape.len_kv);
  const int warp_key = warp_id() / ACROSS * WARP_KEYS, across = warp_id() % ACROSS;
  const int lane_row = lane_id() / 4, t = lane_id() % 4;

  const Shape keys_first = transposed(shape);
  const Keys walk = visible_tiles(keys_first, first_key, end_key - 1, BR);  // tiles of queries
  const Keys tiles = {uniform(walk.first), uniform(walk.last)};

  const KVTile k_tile{sram_base()}, v_tile{k_tile.base + KVTile::BYTES};
  const PTile p_tile{v_tile.base + KVTile::BYTES}, ds_tile{p_tile.base + PTile::BYTES};
  auto q_tile = [&](int stage) { return QTile{ds_tile.base + PTile::BYTES + stage * QTile::BYTES}; };
  auto do_tile = [&](int stage) { return QTile{q_tile(STAGES).base + stage * QTile::BYTES}; };
  name_sram("k", k_tile.base, KVTile::BYTES);
  name_sram("v", v_tile.base, KVTile::BYTES);
  name_sram("p", p_tile.base, PTile::BYTES);
  name_sram("ds", ds_tile.base, PTile::BYTES);
  name_sram("q", q_tile(0).base, STAGES * QTile::BYTES);
  name_sram("dout", do_tile(0).base, STAGES * QTile::BYTES);

  // step: load_kv
  const int kv_head = place.flat_head % shape.kv_heads;
  load_tile<THREADS>(k_tile, row_address(k, batch, kv_head, first_key), k.row, end_key - first_key, row_bytes(shape));
  load_tile<THREADS>(v_tile, row_address(v, batch, kv_head, first_key), v.row, end_key - first_key, row_bytes(shape));

  struct Visit { int head, i; };                    // a tile of queries of one of the group's heads
  Visit ahead{kv_head * group, tiles.first};        // the one to be loaded next
  const int end_head = tiles.first <= tiles.last ? ahead.head + group : ahead.head;
  float lse_ahead[STATISTICS], delta_ahead[STATISTICS];

  auto load = [&](int stage) {  // `ahead`, and on to the next one
    const int first_query = ahead.i * BR, rows = shape.len_q - first_query;
    const long long statistics = (static_cast<long long>(batch) * shape.heads + ahead.head) * shape.len_q + first_query;
    auto query = [&](int r) { return (lane_id() / 16 + 2 * r) * TURN + 16 * across + lane_id() % 16; };  // of this lane
    auto asked = [&](int r) { return lane_id() + 32 * r < 16 * QUERY_PAIRS && query(r) < rows; };

    // step: load_q (prefetch)
    load_tile<THREADS>(q_tile(stage), row_address(q, batch, ahead.head, first_query), q.row, rows, row_bytes(shape));
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) {
      lse_ahead[r] = INF;  // so P = 0 beyond the last query
      if (asked(r)) lse_ahead[r] = load_global<float>(lse + statistics + query(r));
    }

    // step: load_do (prefetch)
    load_tile<THREADS>(do_tile(stage), row_address(dout, batch, ahead.head, first_query), dout.row, rows, row_bytes(shape));
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) {
      delta_ahead[r] = 0;
      if (asked(r)) delta_ahead[r] = load_global<float>(delta + statistics + query(r));
    }
    if (++ahead.i > tiles.last) ahead = {ahead.head + 1, tiles.first};
  };

  Visit here = ahead;
  if (here.head < end_head) load(0);
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
    for (int r = 0; r < STATISTICS; ++r) lse_here[r] = lse_ahead[r] == -INF ? INF : lse_ahead[r] * LOG2E;  // an empty row: P = 0

    // step: load_do
#pragma unroll
    for (int r = 0; r < STATISTICS; ++r) delta_here[r] = delta_ahead[r];
    const Visit next = ahead;
    if (STAGES == 2) {
      if (next.head < end_head) load(stage ^ 1);
      copy_commit();
    }

    // step: scores
    Transposed s = {};  // line 11: Sᵀ = K_j Q_iᵀ
    multiply_by_queries(s, k_tile, q_tile(stage), warp_key, across);

    // step: mask
    const int own_key = opaque(first_key);  // what follows from it is computed once more: cheaper than registers
    const Keys full = full_tiles(keys_first, own_key, own_key + BC - 1, BR);  // need no mask
    if (sign != 1 || own_key + BC > shape.len_kv || here.i < full.first || here.i > full.last) {
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
        for (int m = 0; m < QUERY_PAIRS; ++m) {
          const int key = first_key + warp_key + 16 * f + opaque(lane_id()) / 4;
          scores.flip(s[f][m]);
          mask_scores(s[f][m], keys_first, key, here.i * BR + m * TURN + 16 * across, 2 * (opaque(lane_id()) % 4));
          mask_rows(s[f][m], key, shape.len_kv);
        }
    }

    // step: exp
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float l[2];
        of_columns(l, lse_here, 2 * m + n);
#pragma unroll
        for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[f][m][n][e] = exp2_approx(c * s[f][m][n][e] - l[e % 2]);  // line 12: P = exp(S - L)
      }
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) store_fragments(p_tile, warp_key + 16 * f, m * TURN, 16 * across, s[f][m]);
    }

    // step: dp
    Transposed dp;  // line 14: dP = dO_i V_jᵀ, from which D is taken at once
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float d[2];
        of_columns(d, delta_here, 2 * m + n);
#pragma unroll
        for (int f = 0; f < KEY_FRAGMENTS; ++f)
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[f][m][n][e] = -d[e % 2];
      }
    multiply_by_queries(dp, v_tile, do_tile(stage), warp_key, across);

    // step: ds
#pragma unroll
    for (int m = 0; m < QUERY_PAIRS; ++m)
#pragma unroll
      for (int f = 0; f < KEY_FRAGMENTS; ++f) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[f][m][n][e] *= s[f][m][n][e];  // line 15: dS = P (dP - D)
        store_fragments(ds_tile, warp_key + 16 * f, m * TURN, 16 * across, dp[f][m]);
      }
    barrier();  // P and dS are there

    // step: dv
    multiply_by_columns(dv_sum, p_tile, do_tile(stage), warp_key, across);  // line 13: dV_j += Pᵀ dO_i

    // step: dk
    multiply_by_columns(dk_sum, ds_tile, q_tile(stage), warp_key, across);  // line 17: dK_j += dSᵀ Q_i

    if (STAGES == 1) {
      barrier();  // all warps are done with Q_i and dO_i
      if (next.head < end_head) load(0);
      copy_commit();
    }

    // step: dq
    const int warp_row = warp_id() / ACROSS * WARP_ROWS;
    float dq[ROW_FRAGMENTS][COLUMN_PAIRS][2][4] = {};  // line 16: dQ_i += dS K_j
#pragma unroll(FL_DTYPE == 0 ? 1 : BC / K_STEP)
    for (int key = 0; key < BC; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int f = 0; f < ROW_FRAGMENTS; ++f) a[f] = load_a_columns(ds_tile, warp_row + 16 * f, key);
#pragma unroll
      for (int m = 0; m < COLUMN_PAIRS; ++m)
        if (has_columns(m, across)) {
          if (FL_DTYPE == 0) warp_barrier();
          const FragmentB b = load_b_columns(k_tile, key, m * TURN, 16 * across);
#pragma unroll
          for (int f = 0; f < ROW_FRAGMENTS; ++f) mma(dq[f][m][0], dq[f][m][1], a[f], b);
        }
    }
#pragma unroll
    for (int f = 0; f < ROW_FRAGMENTS; ++f) {
      const int row = here.i * BR + warp_row + 16 * f + lane_row + t % 2 * 8;
      char* sums = row_address(dq_sum, batch, here.head, row);
#pragma unroll
      for (int m = 0; m < COLUMN_PAIRS; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float4 part = four_columns(dq[f][m][n]);
          const int column = m * TURN + 16 * across + 8 * n + t / 2 * 4;
          if (row < shape.len_q && column < shape.head_dim) add_global(sums + column * 4, part);
        }
    }
    here = next;
  }

  // step: store_dkv
  copy_wait<0>();  // without queries K and V are still on their way
  const Place once_more = place_of(shape, opaque(static_cast<int>(blockIdx.x)));  // cheaper than registers
  store_gradient(dk, shape, once_more, dk_sum, warp_key, across, shape.scale);
  store_gradient(dv, shape, once_more, dv_sum, warp_key, across, 1);
}

extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
flash2_backward_convert(const Tensor dq_sum, const Tensor dq, const Shape shape) {
  const auto [batch, head, first_row, end_row] = rows_of(shape);
  constexpr int LANES = lanes_for(HEAD_DIM / 4);
  const int columns = round_up(shape.head_dim, CHUNK_ELEMENTS);  // padding, which is written as well

  // step: convert_dq
  for (int row = first_row + threadIdx.x / LANES; row < end_row; row += DELTA_THREADS / LANES)
    for (int column = threadIdx.x % LANES * 4; column < columns; column += LANES * 4) {
      float4 x = make_float4(0, 0, 0, 0);
      if (column < shape.head_dim) x = load_global<float4>(row_address(dq_sum, batch, head, row) + column * 4);
      const float4 scaled = make_float4(x.x * shape.scale, x.y * shape.scale, x.z * shape.scale, x.w * shape.scale);
      store_elements(row_address(dq, batch, head, row) + column * ELEMENT_BYTES, scaled);
    }
}
