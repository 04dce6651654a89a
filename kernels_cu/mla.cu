// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): few queries of many heads against one row per token, split
// as Flash-Decoding, with causal masks, windows, a soft cap, sinks and any lengths.
//
//   q (batch, heads, len_q, HEAD_DIM)    latent (batch, 1, len_kv, HEAD_DIM)    out (batch, heads, len_q, VALUE_DIM)
//   lse (batch, heads, len_q) float32, or NULL    sinks (heads) float32    q, latent and out in the storage dtype, 16 bits
//   partial (batch, places, rows, VALUE_DIM), partial_m, partial_l (batch, places, rows)    float32
//   arrivals (batch, nodes, row tiles, warps)    zeros
//
// In a ragged batch the rows of a batch of 1 are sequences, with equally many queries. Sequence s has rows offsets_kv[s] ..
// offsets_kv[s + 1] - 1 of latent, and partial results as if it were batch s.
//
// A latent row is the key of every head, and its first VALUE_DIM numbers are the value. So a tile of rows is loaded once and serves
// as K and as V. All heads and queries are rows of one tile: row r is query r / heads of head r % heads. A unit of work is BR of
// these rows and a chunk of keys. A chunk has 512 keys unless callers say how many. A block takes one unit after the other.
//
// An output of 512 columns doesn't fit into a warp's registers. So the warps split the output by columns, and S by rows and keys.
// Maxima and P pass through SRAM. While a tile is in work, the next one is on its way. When a block's units are done, its warps
// merge what lies in several units: the warp that comes last to a node of the tree (tree.cuh) merges that node.
//
//   SRAM        Q  BR x HEAD_DIM | latent  2 x (BC x HEAD_DIM) | P  BR x BC | m, l  KEY_WARPS x BR each
//   registers   O  BR x VALUE_DIM / WARPS and S  BR x BC / WARPS, in float32 per warp
//
// Expected: with few heads the bandwidth of DRAM binds, for each row is read once. From about 100 heads and queries on, the tensor
// cores and their operands from SRAM bind.
#include "divisor.cuh"
#include "mma.cuh"
#include "partial.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROW_FRAGMENTS = BR / 16, ROW_WARPS = ROW_FRAGMENTS, KEY_WARPS = WARPS / ROW_WARPS;  // S: 16 rows each
constexpr int WARP_KEYS = BC / KEY_WARPS, WARP_COLUMNS = VALUE_DIM / WARPS, WARP_ROWS = BC / WARPS;  // WARP_ROWS: that it copies
constexpr int S_FRAGMENTS = WARP_KEYS / 8, O_FRAGMENTS = WARP_COLUMNS / 8;
static_assert(FL_DTYPE != 0 && STAGES == 2, "16 bits, and two tiles");
static_assert(WARPS % ROW_WARPS == 0 && WARP_KEYS % 16 == 0 && WARP_COLUMNS % 64 == 0, "tiles are made of whole fragments");

using QTile = Tile<BR, HEAD_DIM>;
using LatentTile = Tile<BC, HEAD_DIM>;
using PTile = Tile<BR, BC>;

struct Sram {
  unsigned base = sram_base();

  DEVICE QTile q() const { return {base}; }
  DEVICE LatentTile latent(int stage) const { return {base + QTile::BYTES + stage * LatentTile::BYTES}; }
  DEVICE PTile p() const { return {latent(STAGES).base}; }
  DEVICE unsigned m_of(int warp, int row) const { return p().base + PTile::BYTES + (warp * BR + row) * 4; }
  DEVICE unsigned l_of(int warp, int row) const { return m_of(KEY_WARPS + warp, row); }

  DEVICE void name() const {
    name_sram("q", base, QTile::BYTES);
    name_sram("latent", latent(0).base, STAGES * LatentTile::BYTES);
    name_sram("p", p().base, PTile::BYTES);
    name_sram("m_warps", m_of(0, 0), KEY_WARPS * BR * 4);
    name_sram("l_warps", l_of(0, 0), KEY_WARPS * BR * 4);
  }
};

// Copies the tiles of a unit, each warp its own rows. Each lane knows where one row lies, and tells it the others.
struct Latent {
  const Tensor& latent;
  const int* table;
  const Shape& batch;
  const Sram& sram;
  const Divisor& page_size;  // 1 without pages
  int request, keys, last;  // keys that there are, and the unit's last tile
  int first_key;             // where they begin
  int page = 0;              // of this lane's row of the next tile

  DEVICE int key(int j) const { return j * BC + warp_id() * WARP_ROWS + lane_id(); }

  DEVICE void look_up(int j) {
    if constexpr (!PAGED) return;
    // step: load_latent (pages)
    lanes_meet();
    if (j <= last && lane_id() < WARP_ROWS && key(j) < keys)
      page = load_global<int>(table + static_cast<long long>(request) * batch.table_pages + key(j) / page_size);
  }

  // Copies tile j, for its pages have been looked up, and looks up the pages of the next one. That is a group of copies, even if
  // it is empty.
  DEVICE void load(int j) {
    if (j <= last) {
      const long long own = PAGED ? page * latent.batch + key(j) % page_size * latent.row : key(j) * latent.row;
      const int left = keys - j * BC - warp_id() * WARP_ROWS;
      if (left >= WARP_ROWS)
        copy<true>(sram.latent(j % STAGES), own, left);
      else
        copy<false>(sram.latent(j % STAGES), own, left);
    }
    copy_commit();
    look_up(j + 1);
  }

  template <bool WHOLE>
  DEVICE void copy(LatentTile tile, long long own, int left) const {
    // step: load_latent (prefetch)
    const char* rows = row_address(latent, PAGED || RAGGED ? 0 : request, 0, first_key);
#pragma unroll(WHOLE ? 4 : 1)
    for (int i = lane_id(); i < WARP_ROWS * LatentTile::CHUNKS; i += 32) {
      const int row = i / LatentTile::CHUNKS, piece = i % LatentTile::CHUNKS;
      const char* from = rows + shuffle(own, row) + piece * CHUNK_BYTES;
      if (!WHOLE) lanes_meet();
      copy_async(tile.at(warp_id() * WARP_ROWS + row, piece), from, WHOLE || row < left ? CHUNK_BYTES : 0);
    }
  }
};

DEVICE void load_queries(const Tensor& q, const Unit& unit, const Place& place, const Divisor& group, QTile tile) {
  // step: load_q (prefetch)
#pragma unroll 1  // as in TileLoader
  for (int i = threadIdx.x; i < BR * QTile::CHUNKS; i += THREADS) {
    lanes_meet();
    const int row = i / QTile::CHUNKS, piece = i % QTile::CHUNKS, packed = place.first_row + row;
    const char* from = row_address(q, unit.batch, packed % group, packed / group) + piece * CHUNK_BYTES;
    copy_async(tile.at(row, piece), from, row < place.rows ? CHUNK_BYTES : 0);
  }
}

// What a block has of its rows: this warp's columns of the output, and maxima and sums of all rows. Base 2, as in Part.
struct Output {
  float o[ROW_FRAGMENTS][O_FRAGMENTS][4] = {};
  float m[ROW_FRAGMENTS][2], l[ROW_FRAGMENTS][2];  // l: while tiles come, [0] has what this warp sees of its 16 rows

  DEVICE Output() {
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i) m[i][0] = m[i][1] = LOWEST, l[i][0] = l[i][1] = 0;
  }
};

DEVICE int row_warp() { return warp_id() % ROW_WARPS; }
DEVICE int key_warp() { return warp_id() / ROW_WARPS; }
// The row of an accumulator's half (mma.cuh).
DEVICE int row_of(int fragment, int half) { return 16 * fragment + 8 * half + lane_id() / 4; }

// The keys of a unit.
DEVICE void attend(Output& x, Latent& copies, const Place& place, const Shape& shape, const Divisor& group, const Sram& sram) {
  const Scores scores(shape);
  const float c = scores.c;
  const Keys tiles = place.tiles_of(place.chunks.first);
  const Keys full = scores.sign != 1 ? Keys{0, -1} : full_tiles(shape, place.first_query, place.last_query, BC);  // need no mask
  float l[2] = {};  // of this warp's rows and keys

  for (int j = tiles.first; j <= tiles.last; ++j) {
    // step: load_q
    copy_wait<0>();

    // step: load_latent
    barrier();  // the tile is there, and no warp still reads the one before
    copies.load(j + 1);
    const LatentTile tile = sram.latent(j % STAGES);

    // step: scores
    float s[S_FRAGMENTS][4] = {};
#pragma unroll 4
    for (int d = 0; d < HEAD_DIM; d += K_STEP) {
      const FragmentA a = load_a(sram.q(), 16 * row_warp(), d);
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; n += 2) mma(s[n], s[n + 1], a, load_b_rows(tile, key_warp() * WARP_KEYS + 8 * n, d));
    }

    if constexpr (SOFT_CAP) Tanh::apply(s, shape.scale / shape.soft_cap);

    // step: mask
    if (j < full.first || j > full.last) {
      scores.flip(s);
      mask_scores(s, shape, place.first_row + row_of(row_warp(), 0), j * BC + key_warp() * WARP_KEYS, 2 * (opaque(lane_id()) % 4),
                  group);
    }

    // step: softmax
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[0][2 * half];
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = product(c, quad_max(top));
      lanes_meet();
      if (lane_id() % 4 == 0) store_shared(sram.m_of(key_warp(), row_of(row_warp(), half)), top);
    }
    barrier();  // all maxima are there
    float alpha[ROW_FRAGMENTS][2], m[2] = {};
    bool risen = false;
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = x.m[i][half];
#pragma unroll
        for (int w = 0; w < KEY_WARPS; ++w) top = fmaxf(top, load_shared<float>(sram.m_of(w, row_of(i, half))));
        alpha[i][half] = exp2_approx(x.m[i][half] - top);
        risen |= top > x.m[i][half];
        x.m[i][half] = top;
        if (i == row_warp()) m[half] = top, l[half] *= alpha[i][half];
      }
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = exp2_approx(product(c, s[n][e]) - m[e / 2]);  // the largest is 1 to the bit, however large the scores
        l[e / 2] += s[n][e];
      }
    store_fragments(sram.p(), 16 * row_warp(), 0, key_warp() * WARP_KEYS, s);
    barrier();  // P is there

    // step: rescale
    if (any_lane(risen)) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
        for (int n = 0; n < O_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) x.o[i][n][e] *= alpha[i][e / 2];
    }

    // step: output
#pragma unroll 1
    for (int key = 0; key < BC; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = load_a(sram.p(), 16 * i, key);
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; n += 2) {
        const FragmentB b = load_b_columns(tile, key, 8 * n, warp_id() * WARP_COLUMNS);  // the same tile
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(x.o[i][n], x.o[i][n + 1], a[i], b);
      }
    }
  }

  // step: join
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(l[half]);
    lanes_meet();
    if (lane_id() % 4 == 0) store_shared(sram.l_of(key_warp(), row_of(row_warp(), half)), sum);
  }
  barrier();
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int w = 0; w < KEY_WARPS; ++w) x.l[i][half] += load_shared<float>(sram.l_of(w, row_of(i, half)));
}

// What a unit has, from there up the tree to out and lse.
struct Results : UnitRows {
  const Divisor& group;

  DEVICE char* out_row(int row) const {
    const int packed = first_row + row;
    return row_address(out, unit.batch, packed % group, packed / group);
  }
  DEVICE void store_lse(int row, float m, float l) const {
    const int packed = first_row + row;
    UnitRows::store_lse(packed % group, packed / group, m, l);
  }
  DEVICE float sink_of(int row) const { return of_head<SINKS>(sinks, (first_row + row) % group, -INF); }

  // A unit's rows. Each warp has its own columns of them.
  DEVICE void store(const Level& level, int rows, const Output& x) const {
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(i, half);
        const bool inside = row < rows;
        if (level.is_root()) {
          // step: store_o (its sink)
          lanes_meet();
          float m = x.m[i][half], l = x.l[i][half];
          const float alpha = join_sink(m, l, inside ? sink_of(row) : -INF), factor = l > 0 ? alpha * reciprocal(l) : 0;
          char* to = out_row(inside ? row : 0) + warp_id() * WARP_COLUMNS * ELEMENT_BYTES;
          // step: store_o (of a unit)
          ::store_row(to, x.o[i], half, factor, inside ? WARP_COLUMNS * ELEMENT_BYTES : 0);

          // step: store_lse (of a unit)
          lanes_meet();
          if (warp_id() == 0 && lane_id() % 4 == 0 && inside && lse)
            store_lse(row, m, l);
        } else {
          const long long at = part_at(level.place_of(level.node), row);
          // step: store_partial
          lanes_meet();
          if (warp_id() == 0 && lane_id() % 4 == 0 && inside) store_part_statistics(at, x.m[i][half], x.l[i][half]);
#pragma unroll
          for (int n = 0; n < O_FRAGMENTS; ++n) {
            float* to = partial + at * VALUE_DIM + warp_id() * WARP_COLUMNS + 8 * n + 2 * (lane_id() % 4);
            lanes_meet();
            if (inside) store_global(to, make_float2(x.o[i][n][2 * half], x.o[i][n][2 * half + 1]));
          }
        }
      }
  }

  // What lies in several units, as far up as this warp is the last one.
  DEVICE void climb(const Place& place) const {
    for (Level level = place.level(); !level.is_root(); level = level.above()) {
      // step: arrive
      if (!last_of_siblings(level, warp_id())) return;
      merge_siblings(level, place.rows);
    }
  }

  // The partial results of all siblings, which are there.
  DEVICE void merge_siblings(const Level& level, int rows) const {
    const Keys siblings = level.siblings();
    const int child = level.parent() * CHILDREN, lane = lane_id(), place = level.place_of(child);  // were all of them there
    auto is_there = [&](int n) { return child + n >= siblings.first && child + n <= siblings.last; };
    const long long apart = static_cast<long long>(units.all_rows) * VALUE_DIM;  // from one to the next
#pragma unroll 1
    for (int row = warp_id(); row < rows; row += WARPS) {
      // step: merge
      float m = LOWEST, l = 0;
      lanes_meet();
      if (is_there(lane)) {
        m = load_global<float>(partial_m + part_at(place + lane, row));
        l = load_global<float>(partial_l + part_at(place + lane, row));
      }
      const Weights weights(m, l);
      const Level above = level.above();
      float factor = 1;
      m = weights.m, l = weights.l;
      if (above.is_root()) {
        // step: store_o (the row's sink)
        lanes_meet();
        factor = join_sink(m, l, sink_of(row));
        factor = l > 0 ? factor * reciprocal(l) : 0;
      }
#pragma unroll 1  // or what is asked for at once fills the registers
      for (int turn = 0; turn < TURNS; ++turn) {
        const int column = 128 * turn + 4 * lane;
        const float* from = partial + part_at(place, row) * VALUE_DIM + column;
        float4 sides[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          // step: merge (columns)
          float4 o[CHILDREN / 2];
          lanes_meet();
#pragma unroll
          for (int n = 0; n < CHILDREN / 2; ++n, from += opaque(apart)) {  // or its multiples wait in registers
            o[n] = make_float4(0, 0, 0, 0);
            if (is_there(side * CHILDREN / 2 + n)) o[n] = load_global<float4>(from);
          }
          sides[side] = weights.merged<Weights::LEVELS - 1>(o, side, side * CHILDREN / 2);
        }
        store_columns(above, row, column, weights.whole(sides[0], sides[1]), factor);
      }
      store_statistics(above, row, m, l);
    }
  }

  // What has been merged of a row: four columns of each lane, and the statistics.
  DEVICE void store_columns(const Level& level, int row, int column, float4 o, float factor) const {
    lanes_meet();
    if (level.is_root()) {
      // step: store_o
      store_elements(out_row(row) + column * ELEMENT_BYTES, times(o, factor));
    } else {
      // step: store_partial (of a node)
      store_global(partial + part_at(level.place_of(level.node), row) * VALUE_DIM + column, o);
    }
  }
  DEVICE void store_statistics(const Level& level, int row, float m, float l) const {
    if (lane_id() != 0) return;
    if (level.is_root()) {
      // step: store_lse
      if (lse) store_lse(row, m, l);
    } else {
      const long long at = part_at(level.place_of(level.node), row);
      // step: store_partial (statistics of a node)
      store_part_statistics(at, m, l);
    }
  }
};

template <class Work>
DEVICE void for_each_unit(Results results, Work work) {
  for (Unit unit = results.units.before_first();;) {
    // step: load_q (lengths)
    if (!results.units.next(unit)) return;
    const Place place(results.units, unit);
    results.take(unit, place);
    if (place.chunks.first <= place.chunks.last) work(results, place);
  }
}

DEVICE void decode(const Tensor& q, const Tensor& latent, const Tensor& out, float* lse, const float* sinks, const int* table, float* partial,
                   float* partial_m, float* partial_l, unsigned* arrivals, const Shape& batch, const Units& units) {
  const Sram sram;
  sram.name();
  const Divisor group(units.group), page_size(PAGED ? batch.page_size : 1);
  const Room room(units.most_runs(), RAGGED ? batch.longest : batch.len_kv);
  const Results results{{out, lse, sinks, partial, partial_m, partial_l, batch, units, arrivals, room}, group};
  for_each_unit(results, [&](const Results& here, const Place& place) {
    const Shape& shape = units.alone(here.unit);
    const Keys tiles = place.tiles_of(place.chunks.first);
    Latent copies{latent, table, batch, sram, page_size, here.unit.batch, shape.len_kv, tiles.last, here.unit.first_key};
    barrier();  // no warp still reads what the unit before has in SRAM
    if (place.has_keys()) {
      load_queries(q, here.unit, place, group, sram.q());
      copies.look_up(tiles.first);
      copies.load(tiles.first);
    }
    Output x;
    attend(x, copies, place, shape, group, sram);
    here.store(place.level(), place.rows, x);
  });

  barrier();  // now that nothing streams, all warps merge
  for_each_unit(results, [](const Results& here, const Place& place) { here.climb(place); });
}

#if PAGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_paged(const Tensor q, const Tensor latent, const Tensor out, float* lse, const float* sinks, const int* block_table,
          const int* seq_lens, float* partial, float* partial_m, float* partial_l, unsigned* arrivals, const Shape shape) {
  decode(q, latent, out, lse, sinks, block_table, partial, partial_m, partial_l, arrivals, shape, Units(shape, seq_lens));
}
#elif RAGGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla(const Tensor q, const Tensor latent, const Tensor out, float* lse, const float* sinks, const int* offsets_kv, float* partial,
    float* partial_m, float* partial_l, unsigned* arrivals, const Shape shape) {
  const Shape requests = requests_of(shape);
  decode(by_request(q, requests), latent, by_request(out, requests), lse, sinks, nullptr, partial, partial_m, partial_l, arrivals, shape,
         Units(requests, offsets_kv));
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla(const Tensor q, const Tensor latent, const Tensor out, float* lse, const float* sinks, float* partial, float* partial_m,
    float* partial_l, unsigned* arrivals, const Shape shape) {
  decode(q, latent, out, lse, sinks, nullptr, partial, partial_m, partial_l, arrivals, shape, Units(shape));
}
#endif
