// Cascade attention (FlashInfer, arXiv 2501.01005): requests that begin with the same keys, with causal masks, windows, a soft cap,
// sinks, GQA and any lengths. Each request may have a length of its own.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype, 16 bits
//   k_prefix, v_prefix (1, kv_heads, len_prefix, head_dim)    lse (batch, heads, len_q) float32, or NULL    rows padded to 16 bytes
//   partial (batch, heads, parts, len_q, head_dim), partial_lse (batch, heads, parts, len_q)    float32
//   seq_lens (batch) int32, own keys of each request, if these differ: len_kv is then the room for them
//
// Three launches. The first two do the same work: one over the prefix, one over each request's own keys. A block has a tile of rows
// and a chunk of keys. A chunk has 2,048 keys of the prefix, or 512 own ones, and begins at a multiple of its size. Rows are
// queries of the heads of a group: row r is head r % G of token r / G. To the prefix the queries of all requests are tokens of one
// request. So their tiles are full, and the prefix is read once for up to 128 rows. In a full tile a warp has 32 rows, and a
// fragment of K or V feeds two products. A row's output over a chunk goes to HBM with its LSE. In the third launch a warp has a
// row, and merges its partial results, the prefix first. A row has the same bits in every batch, because warps split rows and no
// row's sums depend on another row.
//
// With a window (WINDOW) or own lengths (LENGTHS) a row has a partial result for a chunk only if it sees a key of that chunk. A
// block ends at once if none of its rows does. A window counts back from a request's last keys. So in the prefix it begins
// elsewhere for each request. A block reads its chunk from the first key that one of its rows sees.
//
//   SRAM        Q  ROWS x D | K, V  2 x (BC x D) each
//   registers   of a warp with 16 or 32 rows: O  rows x D and S  rows x BC in float32
//
// Expected: over the requests' own keys the bandwidth of DRAM binds. It also binds over the prefix, up to about 100 rows. From
// there on the tensor cores bind. One launch for a row's own keys and the merge would save a partial result's way to HBM and back.
#include "cascade.cuh"
#include "elements.cuh"

constexpr int TURNS = (HEAD_DIM + 127) / 128;  // a lane has four columns of each 128
constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;
static_assert(FL_DTYPE != 0 && STAGES == 2, "16 bits, and two tiles");
static_assert(BR % PREFIX_WARP_ROWS == 0 && SUFFIX_ROWS % SUFFIX_WARP_ROWS == 0, "warps share out all rows");
static_assert(BC % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");

DEVICE int part_columns(const Shape& shape) { return round_up(shape.head_dim, 4); }  // with padding

// A tile of ROWS rows, OF_WARP for each warp, and a chunk of the keys of `own`: the problem that this side is by itself.
template <int ROWS, int OF_WARP, bool PREFIX>
DEVICE void attend(const Tensor& q, const Tensor& k, const Tensor& v, const int* seq_lens, float* partial, float* partial_lse,
                   const Shape& shape, const Shape& own, int first_part, int chunks) {
  constexpr int THREADS = ROWS / OF_WARP * 32, ROW_FRAGMENTS = OF_WARP / 16;
  using QTile = Tile<ROWS, HEAD_DIM>;
  using WarpTile = Tile<OF_WARP, HEAD_DIM>;
  using KVTile = Tile<BC, HEAD_DIM>;
  constexpr bool COUNTS_BACK = PREFIX && WINDOW;
  const Place place(shape, own, ROWS, chunks);
  Keys tiles = place.tiles(own, PREFIX ? PREFIX_TILES : SUFFIX_TILES), begin = {};
  const int warp_row = warp_id() * OF_WARP, t = lane_id() % 4;
  int first[ROW_FRAGMENTS][2];  // where the windows of this lane's rows begin
  if constexpr (COUNTS_BACK) {
    // step: load_q (lengths)
    const Windows<ROWS> windows(shape, place, seq_lens);
    begin = windows.begin();
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * i + 8 * half + lane_id() / 4;
        first[i][half] = windows.first_key(place.at(row < place.rows ? row : 0));
      }
    tiles.first = max(tiles.first, begin.first / BC);
    if (begin.first >= own.len_kv) tiles.last = tiles.first - 1;
  }
  if (UNEVEN && tiles.last < tiles.first) return;  // no row has this part

  const QTile q_tile{sram_base()};
  const WarpTile q_rows{q_tile.base + warp_row * QTile::ROW_BYTES};
  auto k_tile = [&](int j) { return KVTile{q_tile.base + QTile::BYTES + j % STAGES * KVTile::BYTES}; };
  auto v_tile = [&](int j) { return KVTile{k_tile(j).base + STAGES * KVTile::BYTES}; };
  name_sram("q", q_tile.base, QTile::BYTES);
  name_sram(PREFIX ? "k_prefix" : "k", k_tile(0).base, STAGES * KVTile::BYTES);
  name_sram(PREFIX ? "v_prefix" : "v", v_tile(0).base, STAGES * KVTile::BYTES);

  const int first_key = max(tiles.first, 0) * BC;
  TileLoader<THREADS, KVTile> k_loader(row_address(k, place.batch, place.kv_head, first_key), k.row, row_bytes(shape));
  TileLoader<THREADS, KVTile> v_loader(row_address(v, place.batch, place.kv_head, first_key), v.row, row_bytes(shape));

  if (tiles.first <= tiles.last) {
    // step: load_q (prefetch)
#pragma unroll 1  // as in TileLoader
    for (int i = threadIdx.x; i < ROWS * QTile::CHUNKS; i += THREADS) {
      lanes_meet();
      const int row = i / QTile::CHUNKS, piece = i % QTile::CHUNKS;
      const Row from = place.at(row < place.rows ? row : 0);
      const int bytes = row < place.rows ? min(max(row_bytes(shape) - piece * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
      copy_async(q_tile.at(row, piece), row_address(q, from.request, from.head, from.query) + piece * CHUNK_BYTES, bytes);
    }

    // step: load_k (prefetch)
    k_loader.load(k_tile(tiles.first), own.len_kv - tiles.first * BC);

    // step: load_v (prefetch)
    v_loader.load(v_tile(tiles.first), own.len_kv - tiles.first * BC);
    copy_commit();
  }

  const Scores scores(shape);
  const float c = scores.c;
  const int first_query = place.first_row / place.group, last_query = (place.first_row + place.rows - 1) / place.group;
  const int last_full = scores.sign != 1 ? -1 : full_tiles(own, first_query, last_query, BC).last;  // tiles up to it need no mask
  const int first_full = COUNTS_BACK ? ceil_div(begin.last, BC) : WINDOW ? full_tiles(own, first_query, last_query, BC).first : 0;
  float o[ROW_FRAGMENTS][O_FRAGMENTS][4] = {}, m[ROW_FRAGMENTS][2], l[ROW_FRAGMENTS][2] = {};
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i) m[i][0] = m[i][1] = LOWEST;

  for (int j = tiles.first; j <= tiles.last; ++j) {
    // step: load_q
    copy_wait<0>();

    // step: load_k
    barrier();  // the tiles are there, and no warp still reads those before
    if (j < tiles.last) k_loader.load(k_tile(j + 1), own.len_kv - (j + 1) * BC);

    // step: load_v
    if (j < tiles.last) v_loader.load(v_tile(j + 1), own.len_kv - (j + 1) * BC);
    copy_commit();

    // step: scores
    float s[ROW_FRAGMENTS][S_FRAGMENTS][4] = {};
#pragma unroll(HEAD_DIM > 128 ? 4 : HEAD_DIM / K_STEP)
    for (int d = 0; d < HEAD_DIM; d += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = load_a(q_rows, 16 * i, d);
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; n += 2) {
        const FragmentB b = load_b_rows(k_tile(j), 8 * n, d);
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(s[i][n], s[i][n + 1], a[i], b);
      }
    }

    if constexpr (SOFT_CAP)
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) Tanh::apply(s[i], shape.scale / shape.soft_cap);

    // step: mask
    if (j > last_full || (WINDOW && j < first_full)) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
        scores.flip(s[i]);
        const int row = place.first_row + warp_row + 16 * i + lane_id() / 4;
        mask_scores(s[i], own, row, j * BC, 2 * (opaque(lane_id()) % 4), place.group);
        if constexpr (COUNTS_BACK) hide_before(s[i], first[i], j * BC + 2 * t);
      }
    }

    // step: softmax
    float alpha[ROW_FRAGMENTS][2];
    bool risen = false;
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = s[i][0][2 * half];
#pragma unroll
        for (int n = 0; n < S_FRAGMENTS; ++n) top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        top = fmaxf(m[i][half], c * quad_max(top));
        alpha[i][half] = exp2_approx(m[i][half] - top);
        risen |= top > m[i][half];
        m[i][half] = top;
      }

    // step: rescale
    if (any_lane(risen)) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
        l[i][0] *= alpha[i][0], l[i][1] *= alpha[i][1];
#pragma unroll
        for (int n = 0; n < O_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][n][e] *= alpha[i][e / 2];
      }
    }

    // step: softmax (P)
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[i][n][e] = exp2_approx(c * s[i][n][e] - m[i][e / 2]);
          l[i][e / 2] += s[i][n][e];
        }

    // step: output
#pragma unroll
    for (int key = 0; key < BC; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = operand_a(s[i], key);
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; n += 2) {
        const FragmentB b = load_b_columns(v_tile(j), key, 8 * n);
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(o[i][n], o[i][n + 1], a[i], b);
      }
    }
  }

  const Parts parts(shape);
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // step: store_part
      const int row = warp_row + 16 * i + lane_id() / 4 + 8 * half;
      const bool inside = row < place.rows;
      const Row to = place.at(inside ? row : 0);
      const long long at = parts.at(shape, to.request * shape.heads + to.head, first_part + place.chunk, to.query);
      const float sum = quad_sum(l[i][half]), factor = sum > 0 ? reciprocal(sum) : 0;
      float* to_part = partial + at * part_columns(shape) + 2 * t;
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; ++n) {
        lanes_meet();
        if (inside && 8 * n + 2 * t < part_columns(shape))
          store_global(to_part + 8 * n, make_float2(o[i][n][2 * half] * factor, o[i][n][2 * half + 1] * factor));
      }
      lanes_meet();
      if (inside && t == 0) store_global(partial_lse + at, (m[i][half] + log2_approx(sum)) * LN2);  // -INF for a row without keys
    }
}

extern "C" __global__ void __launch_bounds__(BR / PREFIX_WARP_ROWS * 32)
cascade_prefix(const Tensor q, const Tensor k_prefix, const Tensor v_prefix, float* partial, float* partial_lse, OWN_LENGTHS
               const Shape shape) {
  attend<BR, PREFIX_WARP_ROWS, true>(q, k_prefix, v_prefix, GIVEN_LENGTHS, partial, partial_lse, shape, prefix_of(shape), 0,
                                     Parts(shape).of_prefix);
}

extern "C" __global__ void __launch_bounds__(SUFFIX_ROWS / SUFFIX_WARP_ROWS * 32)
cascade_suffix(const Tensor q, const Tensor k, const Tensor v, float* partial, float* partial_lse, OWN_LENGTHS const Shape shape) {
  const Parts parts(shape);
  const int chunks = parts.all - parts.of_prefix;
  // step: load_q (lengths)
  const Shape own = suffix_of(shape, GIVEN_LENGTHS, chunks);
  attend<SUFFIX_ROWS, SUFFIX_WARP_ROWS, false>(q, k, v, GIVEN_LENGTHS, partial, partial_lse, shape, own, parts.of_prefix, chunks);
}

extern "C" __global__ void __launch_bounds__(32)
cascade_merge(const float* partial, const float* partial_lse, const float* sinks, const Tensor out, float* lse, OWN_LENGTHS
              const Shape shape) {
  constexpr int AHEAD = 8 / TURNS;  // partial results that are asked for at once
  const int flat_head = blockIdx.x / shape.len_q, query = blockIdx.x % shape.len_q, head = flat_head % shape.heads;
  const Parts parts(shape);
  // step: load_part (lengths)
  const Span has = parts.of_query(shape, own_keys(shape, GIVEN_LENGTHS, flat_head / shape.heads), query);
  float4 o[TURNS];
  float m = LOWEST, l = 0;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) o[turn] = make_float4(0, 0, 0, 0);

#pragma unroll 1
  for (int first = has.begin; first < has.end; first += AHEAD) {
    // step: load_part
    float4 x[AHEAD][TURNS];
    float weight[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
      const long long at = parts.at(shape, flat_head, first + n, query);
      const bool is_there = first + n < has.end;
      weight[n] = is_there ? load_global<float>(partial_lse + at) : -INF;
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int column = 128 * turn + 4 * lane_id();
        x[n][turn] = make_float4(0, 0, 0, 0);
        lanes_meet();
        if (is_there && column < part_columns(shape)) x[n][turn] = load_global<float4>(partial + at * part_columns(shape) + column);
      }
    }

    // step: merge
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {  // one that isn't there or saw no key weighs 0, and changes no bit
      const float top = fmaxf(m, weight[n] * LOG2E), alpha = exp2_approx(m - top), beta = exp2_approx(weight[n] * LOG2E - top);
      m = top, l = weighed(l, alpha, 1, beta);
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) o[turn] = weighed(o[turn], alpha, x[n][turn], beta);
    }
  }

  // step: normalize
  const float alpha = join_sink(m, l, of_head<SINKS>(sinks, head, -INF)), factor = l > 0 ? alpha * reciprocal(l) : 0;

  // step: store_o
  char* to = row_address(out, flat_head / shape.heads, head, query);
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 128 * turn + 4 * lane_id();
    lanes_meet();
    if (column < round_up(shape.head_dim, CHUNK_ELEMENTS)) store_elements(to + column * ELEMENT_BYTES, times(o[turn], factor));
  }

  // step: store_lse
  lanes_meet();
  if (lane_id() == 0 && lse) store_global(lse + static_cast<long long>(flat_head) * shape.len_q + query, (m + log2_approx(l)) * LN2);
}
