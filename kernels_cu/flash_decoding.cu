// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): few queries against many keys, with causal masks, windows, a soft cap, sinks,
// GQA and any lengths.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse (batch, heads, len_q) float32, or NULL    sinks (heads) float32    rows padded to 16 bytes
//   partial (batch * kv_heads, places, rows, head_dim), partial_m, partial_l (batch * kv_heads, places, rows)    float32
//   arrivals (batch * kv_heads, nodes, row tiles, WARPS)    zeros
//
// Of a ragged batch the rows of a batch of 1 are sequences, which have as many queries each. Sequence s has keys offsets_kv[s] ..
// offsets_kv[s + 1] - 1, and partial results as if it were batch s.
//
// The query heads that share a KV head, and all queries, are the rows of one tile: row r is query r / G of head r % G. A unit of
// work is BR rows and a run of chunks of 4 BC keys. Chunks begin at multiples of their size. A block takes one unit after the other.
// For the tensor cores queries are columns, and keys rows (keys_as_rows.cuh): eight rows of Q are enough for a product.
//
// Split-K: each of the WARPS warps that compute has all rows and its own keys of each tile. It copies them for itself, STAGES tiles
// ahead and on into the next units, so bytes are on their way at all times. With lengths it goes through them once, a chunk
// ahead of its copies, and tells itself in SRAM which units there are. As many other warps join what these have of a chunk, and merge
// it with its neighbours: in the meantime the next chunk goes on. What lies in several units is merged by whichever warp comes last
// to a node of the tree (tree.cuh), as soon as it comes: were it left to the block's end, the block that comes last would merge nearly
// all. Which warp merges changes no bit, and nor do the length of runs, the batch and the grid.
//
// K and V may have 8 bits, with scales: see cache.cuh. In pages the last keys may be drafts, with a mask: see drafts.cuh.
//
//   SRAM        Q  (STAGES + 1) x (BR x D) | m, l  WARPS x BR | m  BR | K, V  STAGES x (BC x D) | O  WARPS x (BR x D)
//   registers   O (BR x D) and S (BR x BC / WARPS) in float32 per warp
//
// Expected: HBM reads K and V once; the bandwidth of DRAM binds, above a few µs for the launch, the first copy and the merge.
#include "cache.cuh"
#include "drafts.cuh"
#include "elements.cuh"
#include "keys_as_rows.cuh"
#include "scores.cuh"
#include "tree.cuh"
#include "warpgroup.cuh"

constexpr int THREADS = WARPS * 32;  // that compute, and as many that merge
constexpr int WARP_KEYS = BC / WARPS;
constexpr int KEY_FRAGMENTS = WARP_KEYS / 16, QUERY_FRAGMENTS = BR / 8, O_FRAGMENTS = HEAD_DIM / 16;
constexpr int JOINING = 1, FREE = 2, FILLED = 3;  // named barriers
static_assert(BR % 8 == 0 && WARP_KEYS % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");

using QTile = Tile<BR, HEAD_DIM>;
using WarpTile = CacheTile<WARP_KEYS, HEAD_DIM>;
constexpr int Q_SLOTS = STAGES + 1;  // a warp may be STAGES units ahead of another that still reads its queries
constexpr int TOLD = STAGES <= 5 ? 8 : 16;  // units that a warp is ahead of itself, a power of two
constexpr int RING_BYTES = STAGES * WARPS * WarpTile::BYTES;  // of K, and of V

// The outputs of the warps in SRAM, float32. Chunks of 32 bytes change places by the row, against bank conflicts: lanes write eight
// columns of every other row at once.
struct Outputs {
  unsigned base;
  static constexpr int BYTES = BR * HEAD_DIM * 4;  // of a warp
  DEVICE unsigned at(int warp, int row, int column) const {
    const int turned = HEAD_DIM % 32 == 0 ? column ^ row / 2 % 4 * 8 : column ^ row / 2 % 2 * 8;
    return base + warp * BYTES + (row * HEAD_DIM + turned) * 4;
  }
};

struct Sram {
  unsigned base = sram_base();

  DEVICE QTile q(int slot) const { return {base + slot * QTile::BYTES}; }
  DEVICE WarpTile k(int stage) const { return {q(Q_SLOTS).base + (stage * WARPS + warp_id()) * WarpTile::BYTES}; }
  DEVICE WarpTile v(int stage) const { return {k(stage).base + RING_BYTES}; }
  DEVICE Outputs o() const { return {q(Q_SLOTS).base + 2 * RING_BYTES}; }
  DEVICE unsigned m_of(int warp, int row) const { return o().base + WARPS * Outputs::BYTES + (warp * BR + row) * 4; }
  DEVICE unsigned l_of(int warp, int row) const { return m_of(WARPS + warp, row); }
  DEVICE unsigned m(int row) const { return l_of(WARPS, row); }
  // The scales of this warp's keys, and of its values; the scales of the channels of K that queries are multiplied with.
  static constexpr int SCALE_BYTES = STAGES * BC * 4, OF_K = K_SCALE == TOKEN ? SCALE_BYTES : 0, OF_V = V_SCALE == TOKEN ? SCALE_BYTES : 0;
  DEVICE unsigned k_scale(int stage) const { return m(BR) + (stage * BC + warp_id() * WARP_KEYS) * 4; }
  DEVICE unsigned v_scale(int stage) const { return k_scale(stage) + OF_K; }
  static constexpr int CHANNEL_BYTES = K_SCALE == CHANNEL ? Q_SLOTS * HEAD_DIM * 4 : 0;
  DEVICE unsigned channels(int slot) const { return m(BR) + OF_V + slot * HEAD_DIM * 4; }
  // The units that this warp has told itself, and where their keys begin.
  static constexpr int TOLD_UNITS = WARPS * TOLD * 16;
  DEVICE unsigned told(int slot) const { return m(BR) + OF_K + OF_V + CHANNEL_BYTES + (warp_id() * TOLD + slot) * 16; }
  DEVICE unsigned told_first(int slot) const {
    return m(BR) + OF_K + OF_V + CHANNEL_BYTES + TOLD_UNITS + (warp_id() * TOLD + slot) * 4;
  }

  DEVICE void name() const {
    name_sram("q", base, Q_SLOTS * QTile::BYTES);
    name_sram("k", q(Q_SLOTS).base, RING_BYTES);
    name_sram("v", q(Q_SLOTS).base + RING_BYTES, RING_BYTES);
    name_sram("o_warps", o().base, WARPS * Outputs::BYTES);
    name_sram("m_warps", m_of(0, 0), WARPS * BR * 4);
    name_sram("l_warps", l_of(0, 0), WARPS * BR * 4);
    name_sram("m", m(0), BR * 4);
    if (K_SCALE == TOKEN) name_sram("k_scale", m(BR), OF_K);
    if (V_SCALE == TOKEN) name_sram("v_scale", m(BR) + OF_K, OF_V);
    if (K_SCALE == CHANNEL) name_sram("k_scale", channels(0), CHANNEL_BYTES);
    if (PAGED || RAGGED) name_sram("units", m(BR) + OF_K + OF_V + CHANNEL_BYTES, TOLD_UNITS + (RAGGED ? WARPS * TOLD * 4 : 0));
  }
};

// A block's units one after the other, in steps of so many tiles: tile j of `unit` is the first of a step, `last` the unit's last.
template <int STEP>
struct Walk {
  Unit unit;
  int j = 0, last = -1;

  // Moves on, and says whether there is more. The first step of a unit is told with the unit's place. `from` has the units.
  template <class From, class Begin>
  DEVICE bool next(const From& from, const Units& units, Begin begin) {
    j = STEP == 1 ? j + 1 : (j / STEP + 1) * STEP;
    if (j <= last) return true;
    while (from.next(unit)) {
      const Place place(units, unit);
      if (!place.has_keys()) continue;
      j = place.tiles_of(place.chunks.first).first, last = place.tiles_of(place.chunks.last).last;
      begin(place);
      return true;
    }
    return false;
  }
};

#if PAGED || RAGGED
DEVICE int length_of(const int* lengths, int request, int requests) {
  // step: load_q (lengths)
  lanes_meet();
  return request < requests ? load_global<int>(lengths + request) : 0;
}

// The units with keys that this warp has found, as it tells itself in SRAM: so it goes through the lengths once.
struct FoundUnits {
  const Sram& sram;
  const Divisor kv_heads;
  int found = 0;

  DEVICE FoundUnits(const Units& units, const Sram& sram) : sram(sram), kv_heads(units.kv_heads) {}

  DEVICE void tell(const Unit& unit) {
    // step: load_q (units)
    if (lane_id() == 0) {
      const int head = unit.batch * kv_heads + unit.kv_head;
#if RAGGED
      store_shared(sram.told_first(found % TOLD), unit.first_key);
#endif
      store_shared(sram.told(found % TOLD), make_int4(unit.row_tile, unit.run, unit.keys, head));
    }
    warp_barrier();
    ++found;
  }

  DEVICE Unit before_first() const {
    Unit unit = {};
    unit.number = -1;
    return unit;
  }
  DEVICE bool next(Unit& unit) const {
    if (unit.number + 1 == found) return false;
    ++unit.number;
    // step: load_q (units)
    const int4 four = load_shared<int4>(sram.told(unit.number % TOLD));
    unit.row_tile = four.x, unit.run = four.y, unit.keys = four.z;
    unit.batch = four.w / kv_heads, unit.kv_head = four.w - unit.batch * kv_heads;
    return true;
  }
  // Where the keys of a unit begin, for what copies them.
  DEVICE void find_first_key(Unit& unit) const {
#if RAGGED
    // step: load_q (units)
    unit.first_key = load_shared<int>(sram.told_first(unit.number % TOLD));
#endif
  }
};
#else
struct FoundUnits {
  const Units& units;
  DEVICE FoundUnits(const Units& units, const Sram&) : units(units) {}
  DEVICE Unit before_first() const { return units.before_first(); }
  DEVICE bool next(Unit& unit) const { return units.next(unit); }
  DEVICE void find_first_key(Unit&) const {}
};
#endif

#if PAGED
using Loader = PageLoader<WarpTile>;
DEVICE Loader loader(const char* head, const Tensor& x, int row_bytes) { return {head, x, row_bytes}; }

// Where this lane's row of a tile lies: in K, in V and among the scales of keys.
struct Rows {
  int k, v, scale;
  DEVICE void load_k(const Loader& from, WarpTile tile, int keys) const { from.load(tile, k, keys); }
  DEVICE void load_v(const Loader& from, WarpTile tile, int keys) const { from.load(tile, v, keys); }
  DEVICE void load_scales(const float* scales, const Shape& shape, const Unit& unit, unsigned to, int keys) const {
    copy_scales<WARP_KEYS>(to, scales + scale + unit.kv_head * shape.page_size - lane_id(), keys);
  }
};

// Where the keys of this chunk lie, and the pages of the next one's, which are on their way.
struct Lookup {
  const int* table;
  const Divisor page_size;
  Walk<TILES_PER_CHUNK> walk;
  Rows places[TILES_PER_CHUNK] = {};  // of each tile that is left of the chunk
  int ahead[TILES_PER_CHUNK] = {};

  DEVICE Lookup(const int* table, const Units& units) : table(table), page_size(units.batch.page_size), walk{units.before_first()} {}

  // A chunk begins with tile j, and `ahead` has come. The pages of the one behind it are looked up.
  DEVICE void begin_chunk(int j, const Loader& k, const Loader& v, const Units& units, FoundUnits& found) {
#pragma unroll
    for (int i = 0; i < TILES_PER_CHUNK; ++i) {
      const int place = key_of(j + i) % page_size;
      places[i] = {k.row_of(ahead[i], place), v.row_of(ahead[i], place), ahead[i] * units.batch.kv_heads * page_size + place};
    }
    look_up(units, found);
  }

  DEVICE Rows next() {
    const Rows first = places[0];
#pragma unroll
    for (int i = 1; i < TILES_PER_CHUNK; ++i) places[i - 1] = places[i];
    return first;
  }

  DEVICE void look_up(const Units& units, FoundUnits& found) {
    if (!walk.next(units, units, [&](const Place&) { found.tell(walk.unit); })) return;
    const int* line = table + static_cast<long long>(walk.unit.batch) * units.batch.table_pages;
    const int tiles = min(walk.last - walk.j + 1, TILES_PER_CHUNK - walk.j % TILES_PER_CHUNK);
    // step: load_k (pages)
#pragma unroll
    for (int i = 0; i < TILES_PER_CHUNK; ++i) {
      const int key = key_of(walk.j + i);
      lanes_meet();
      if (lane_id() < WARP_KEYS && i < tiles && key < walk.unit.keys) ahead[i] = load_global<int>(line + key / page_size);
    }
  }

  // This lane's in tile j.
  static DEVICE int key_of(int j) { return (j * WARPS + warp_id()) * WARP_KEYS + lane_id(); }
};
#else
using Loader = TileLoader<32, WarpTile>;
DEVICE Loader loader(const char* rows, const Tensor& x, int row_bytes) { return {rows, x.row, row_bytes}; }

// A tile by its number, in tiles of a warp's size.
struct Rows {
  int own;
  DEVICE void load_k(const Loader& from, WarpTile tile, int keys) const { from.at(own).load(tile, keys); }
  DEVICE void load_v(const Loader& from, WarpTile tile, int keys) const { load_k(from, tile, keys); }
  DEVICE void load_scales(const float* scales, const Shape& shape, const Unit& unit, unsigned to, int keys) const {
#if RAGGED
    const float* first = scales + static_cast<long long>(unit.kv_head) * shape.len_kv + unit.first_key;
    copy_scales<WARP_KEYS>(to, first + own * WARP_KEYS, keys);
#else
    const long long row = static_cast<long long>(unit.batch) * shape.kv_heads + unit.kv_head;
    copy_scales<WARP_KEYS>(to, scales + row * shape.len_kv + own * WARP_KEYS, keys);
#endif
  }
};

struct Lookup {
#if RAGGED
  Walk<TILES_PER_CHUNK> walk;
  DEVICE Lookup(const int*, const Units& units) : walk{units.before_first()} {}
  DEVICE void look_up(const Units& units, FoundUnits& found) {
    walk.next(units, units, [&](const Place&) { found.tell(walk.unit); });
  }
#else
  DEVICE Lookup(const int*, const Units&) {}
  DEVICE void look_up(const Units&, const FoundUnits&) {}
#endif
  int own = 0;
  DEVICE void begin_chunk(int j, const Loader&, const Loader&, const Units& units, FoundUnits& found) {
    own = j * WARPS + warp_id();
    look_up(units, found);
  }
  DEVICE Rows next() { return {(own += WARPS) - WARPS}; }
};
#endif

// What the warps that compute copy, for each warp its own keys.
struct Copies : CacheScales {
  const Tensor &q, &k, &v;
  const Shape& shape;
  const Units& units;
  const Sram& sram;
  FoundUnits found;
  Lookup lookup;
  Walk<1> walk;
  int q_slot = 0;
  Loader k_loader, v_loader;

  DEVICE Copies(const Tensor& q, const Tensor& k, const Tensor& v, const CacheScales& scales, const int* table, const Shape& shape,
                const Units& units, const Sram& sram)
      : CacheScales(scales), q(q), k(k), v(v), shape(shape), units(units), sram(sram), found(units, sram), lookup(table, units),
        k_loader(loader(nullptr, k, cache_row_bytes(shape))), v_loader(loader(nullptr, v, cache_row_bytes(shape))) {
    lookup.look_up(units, found);
    walk.unit = found.before_first();
  }

  // The next tile into a stage, and with the first one of a unit its queries. It is a group of copies, even if there is none.
  DEVICE void load(int stage) {
    bool begins = false;
    const bool more = walk.next(found, units, [&](const Place& place) {
      found.find_first_key(walk.unit);
      k_loader = loader(first_of(k), k, cache_row_bytes(shape)), v_loader = loader(first_of(v), v, cache_row_bytes(shape));
      load_queries(place);
      begins = true;
    });
    if (more) {
      if (begins || walk.j % TILES_PER_CHUNK == 0) lookup.begin_chunk(walk.j, k_loader, v_loader, units, found);
      load_tile(stage);
    }
    copy_commit();
  }

  // Where the rows of this KV head begin: in the sequence, or in page 0.
#if RAGGED
  DEVICE const char* first_of(const Tensor& x) const { return row_address(x, 0, walk.unit.kv_head, walk.unit.first_key); }
#else
  DEVICE const char* first_of(const Tensor& x) const { return row_address(x, PAGED ? 0 : walk.unit.batch, walk.unit.kv_head, 0); }
#endif

  DEVICE void load_tile(int stage) {
    const int own = walk.j * WARPS + warp_id(), keys = units.alone(walk.unit).len_kv - own * WARP_KEYS;
    const Rows rows = lookup.next();
    // step: load_k (prefetch)
    rows.load_k(k_loader, sram.k(stage), keys);
    if constexpr (K_SCALE == TOKEN) rows.load_scales(of_k, shape, walk.unit, sram.k_scale(stage), keys);

    // step: load_v (prefetch)
    rows.load_v(v_loader, sram.v(stage), keys);
    if constexpr (V_SCALE == TOKEN) rows.load_scales(of_v, shape, walk.unit, sram.v_scale(stage), keys);
  }

  DEVICE void load_queries(const Place& place) {
    // step: load_q (prefetch)
#pragma unroll 1  // as in TileLoader
    for (int i = threadIdx.x; i < round_up(BR * QTile::CHUNKS, 32); i += THREADS) {
      lanes_meet();
      if (i >= BR * QTile::CHUNKS) continue;
      const int row = i / QTile::CHUNKS, piece = i % QTile::CHUNKS, packed = place.first_row + row;
      const int bytes = row < place.rows ? min(max(row_bytes(shape) - piece * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
      const char* from = row_address(q, walk.unit.batch, walk.unit.kv_head * units.group + packed % units.group, packed / units.group);
      copy_async(sram.q(q_slot).at(row, piece), from + piece * CHUNK_BYTES, bytes);
    }
    if constexpr (K_SCALE == CHANNEL) {
#pragma unroll 1
      for (int i = threadIdx.x; i < round_up(HEAD_DIM, 32); i += THREADS) {
        lanes_meet();
        const float* from = of_k + walk.unit.kv_head * shape.head_dim + i;
        if (i < HEAD_DIM) copy_async_word(sram.channels(q_slot) + 4 * i, from, i < shape.head_dim);
      }
    }
    q_slot = q_slot == Q_SLOTS - 1 ? 0 : q_slot + 1;
  }
};

// The warps that compute: each has all rows of a unit, and its own keys.
DEVICE void compute(const Tensor& q, const Tensor& k, const Tensor& v, const CacheScales& scales, const int* table,
                    const unsigned* draft_mask, const Shape& shapes, const Units& units, const Sram& sram) {
  Copies copies(q, k, v, scales, table, shapes, units, sram);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) copies.load(stage);

  const Scores scores(shapes);
  int stage = 0, q_slot = 0;
  for (Unit unit = copies.found.before_first(); copies.found.next(unit);) {
    const Place place(units, unit);
    if (!place.has_keys()) continue;
    const Shape& shape = units.alone(unit);
    Keys full = scores.sign != 1 ? Keys{0, -1} : full_tiles(shape, place.first_query, place.last_query, BC);  // need no mask
    if constexpr (DRAFTS) full.last = min(full.last, first_draft_tile(shape) - 1);

    // step: load_q
    const QTile q_tile = sram.q(q_slot);
    const unsigned channels = sram.channels(q_slot);
    Drafts drafts;
    if (DRAFTS && place.tiles_of(place.chunks.last).last >= first_draft_tile(shape)) {
      lanes_meet();
      const int query = (place.first_row + lane_id()) / units.group;
      if (lane_id() < place.rows) drafts.word = load_global<unsigned>(draft_mask + unit.batch * shape.len_q + query);
    }
    const float c = times_scale<K_SCALE>(SOFT_CAP ? shape.scale / shape.soft_cap : scores.c, scales.of_k, unit.kv_head);
    const float v_scale = scale_of<V_SCALE>(scales.of_v, unit.kv_head);
    q_slot = q_slot == Q_SLOTS - 1 ? 0 : q_slot + 1;
    copy_wait<STAGES - 1>();
    named_barrier_sync(JOINING, THREADS);  // each warp has copied a part of the queries
#if Q_IN_REGISTERS
    QueryFragment q_fragments[HEAD_DIM / K_STEP][QUERY_FRAGMENTS];
    const QueryFactors<QUERY_FRAGMENTS> factors(q_tile, channels, c, q_fragments);
#else
    const QueryFactors<QUERY_FRAGMENTS> factors(q_tile, channels, c);
#endif
    const auto c_of = [&](int n, int e) { return SOFT_CAP ? scores.c : factors.c(n, e); };  // what a score is multiplied with

    for (int chunk = place.chunks.first; chunk <= place.chunks.last; ++chunk) {
      const Keys tiles = place.tiles_of(chunk);
      float o[O_FRAGMENTS][QUERY_FRAGMENTS][4] = {};
      float m[QUERY_FRAGMENTS][2], l[QUERY_FRAGMENTS][2];  // as in flash2.cu
      float base = V_SCALE == TOKEN ? 0x1p-126f : v_scale;  // what O is to be multiplied with
#pragma unroll
      for (int n = 0; n < QUERY_FRAGMENTS; ++n) m[n][0] = m[n][1] = LOWEST, l[n][0] = l[n][1] = 0;

      for (int j = tiles.first; j <= tiles.last; ++j) {
        // step: load_k
        copy_wait<STAGES - 1>();
        warp_barrier();  // this warp's keys and values are there
        const WarpTile keys = sram.k(stage);

        // step: scores
        float s[KEY_FRAGMENTS][QUERY_FRAGMENTS][4] = {};
#pragma unroll(Q_IN_REGISTERS ? HEAD_DIM / K_STEP : FL_DTYPE == 0 ? 2 : 4)
        for (int d = 0; d < HEAD_DIM / K_STEP; ++d) {
          if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
#if !Q_IN_REGISTERS
          QueryFragment q_fragments[QUERY_FRAGMENTS];
          load_queries(q_fragments, q_tile, d * K_STEP, channels, factors);
#endif
#pragma unroll
          for (int i = 0; i < KEY_FRAGMENTS; ++i) {
            const FragmentA a = load_keys(keys, 16 * i, d * K_STEP);
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#if Q_IN_REGISTERS
              multiply(s[i][n], a, q_fragments[d][n]);
#else
              multiply(s[i][n], a, q_fragments[n]);
#endif
          }
        }

        if constexpr (K_SCALE == TOKEN) scale_keys(s, sram.k_scale(stage));
        if constexpr (SOFT_CAP) {
#pragma unroll
          for (int i = 0; i < KEY_FRAGMENTS; ++i) {
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
              for (int e = 0; e < 4; ++e) s[i][n][e] *= factors.c(n, e % 2);
            Tanh::apply(s[i], 1);
          }
        }

        // step: mask
        if (j < full.first || j > full.last) {
          const int first_key = j * BC + warp_id() * WARP_KEYS;
#pragma unroll
          for (int i = 0; i < KEY_FRAGMENTS; ++i) scores.flip(s[i]);
          mask_keys(s, shape, place.first_row + 2 * (lane_id() % 4), first_key + lane_id() / 4, units.group);
          if constexpr (DRAFTS) drafts.hide(s, shape, first_key);
        }

        // step: softmax
        float alpha[QUERY_FRAGMENTS][2];
        bool risen = false;
#pragma unroll
        for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float top = s[0][n][e];
#pragma unroll
            for (int i = 0; i < KEY_FRAGMENTS; ++i) top = fmaxf(top, fmaxf(s[i][n][e], s[i][n][2 + e]));
            top = fmaxf(m[n][e], c_of(n, e) * column_max(top));
            alpha[n][e] = exp2_approx(m[n][e] - top);
            risen |= top > m[n][e];
            m[n][e] = top;
          }

        // step: rescale
        if (j > tiles.first && any_lane(risen)) {  // there is nothing yet before the first tile
#pragma unroll
          for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
            l[n][0] *= alpha[n][0], l[n][1] *= alpha[n][1];
#pragma unroll
            for (int d = 0; d < O_FRAGMENTS; ++d)
#pragma unroll
              for (int e = 0; e < 4; ++e) o[d][n][e] *= alpha[n][e % 2];
          }
        }

        // step: softmax (P)
#pragma unroll
        for (int i = 0; i < KEY_FRAGMENTS; ++i)
#pragma unroll
          for (int n = 0; n < QUERY_FRAGMENTS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              s[i][n][e] = exp2_approx(c_of(n, e % 2) * s[i][n][e] - m[n][e % 2]);
              l[n][e % 2] += s[i][n][e];
            }

        // step: load_v
        const WarpTile values = sram.v(stage);

        // step: output
        if constexpr (V_SCALE == TOKEN) weigh_keys(s, o, base, sram.v_scale(stage));
#pragma unroll
        for (int key = 0; key < WARP_KEYS; key += K_STEP) {
          Fragment8 b[QUERY_FRAGMENTS];
#pragma unroll
          for (int n = 0; n < QUERY_FRAGMENTS; ++n) b[n] = round_p(s, key, n);
#pragma unroll
          for (int d = 0; d < O_FRAGMENTS; ++d) {
            if (FL_DTYPE == 0) warp_barrier();
            const FragmentA a = load_values(values, 16 * d, key);
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n) multiply(o[d][n], a, b[n]);
          }
        }

        // step: load_k (the next tile to this stage)
        warp_barrier();  // no lane still reads this one
        copies.load(stage);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
      }

      // step: join (of the maxima)
      const int row = 2 * (lane_id() % 4);  // this lane's first one, and again eight further down
#pragma unroll
      for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
        l[n][0] = column_sum(l[n][0]), l[n][1] = column_sum(l[n][1]);
        lanes_meet();
        if (lane_id() < 4) store_shared(sram.m_of(warp_id(), 8 * n + row), make_float2(m[n][0], m[n][1]));
      }
      named_barrier_sync(JOINING, THREADS);
      float factor[QUERY_FRAGMENTS][2];
#pragma unroll
      for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
        float2 top = make_float2(LOWEST, LOWEST);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float2 other = load_shared<float2>(sram.m_of(w, 8 * n + row));
          top.x = fmaxf(top.x, other.x), top.y = fmaxf(top.y, other.y);
        }
        factor[n][0] = exp2_approx(m[n][0] - top.x), factor[n][1] = exp2_approx(m[n][1] - top.y);
        m[n][0] = top.x, m[n][1] = top.y;
      }

      // step: join
      named_barrier_sync(FREE, 2 * THREADS);  // what lies there of the last unit has been read
#pragma unroll
      for (int n = 0; n < QUERY_FRAGMENTS; ++n) {
        lanes_meet();
        if (lane_id() < 4) {
          store_shared(sram.l_of(warp_id(), 8 * n + row), make_float2(l[n][0] * factor[n][0], l[n][1] * factor[n][1]));
          if (warp_id() == 0) store_shared(sram.m(8 * n + row), make_float2(m[n][0], m[n][1]));
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float weight = factor[n][e] * base;
#pragma unroll
          for (int d = 0; d < O_FRAGMENTS; ++d) {
            auto at = [&](int column) { return sram.o().at(warp_id(), 8 * n + row + e, 16 * d + column); };
            store_outputs(at, o[d][n][e] * weight, o[d][n][2 + e] * weight);
          }
        }
      }
      named_barrier_arrive(FILLED, 2 * THREADS);
    }
  }
}

// What the warps that compute have of row `row` of a chunk.
DEVICE Part of_all_warps(const Sram& sram, int row) {
  // step: join (of a row)
  Part x;
  lanes_meet();
  x.m = load_shared<float>(sram.m(row)), x.l = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) x.l += load_shared<float>(sram.l_of(w, row));
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int column = 128 * turn + 4 * lane_id();
    x.o[turn] = make_float4(0, 0, 0, 0);
    lanes_meet();
    if (column < HEAD_DIM)
#pragma unroll
      for (int w = 0; w < WARPS; ++w) x.o[turn] = plus(x.o[turn], load_shared<float4>(sram.o().at(w, row, column)));
  }
  return x;
}

// The rows of a unit, from its chunks up the tree, to out and lse.
struct Results {
  const Tensor& out;
  float* lse;
  const float* sinks;
  float* partial;
  float* partial_m;
  float* partial_l;
  const Shape& shape;
  const Units& units;
  unsigned* arrivals;
  Room room;
  Unit unit = {};
  int first_row = 0;

  static constexpr int ROWS = ceil_div(BR, WARPS);  // of a warp that merges
  static DEVICE int own_row() { return warp_id() - WARPS; }  // this warp has that one, the row WARPS later, and so on
  DEVICE int flat_head() const { return unit.batch * units.kv_heads + unit.kv_head; }
  DEVICE int part_columns() const { return round_up(shape.head_dim, 4); }  // with padding
  DEVICE long long part_at(int at, int row) const {
    return (static_cast<long long>(flat_head()) * room.places + at) * units.all_rows + first_row + row;
  }

  DEVICE void take(const Unit& other, const Place& place) { unit = other, first_row = place.first_row; }

  // The chunks of a unit, as they come. There is room for the next one as soon as one is read, if there is one: `more` are behind
  // this unit.
  DEVICE void merge_run(const Place& place, const Sram& sram, bool more) const {
    Part waiting[LEVELS_OF_RUN + 1][ROWS];  // of each level, the left one of two neighbours
#pragma unroll 1
    for (int chunk = place.chunks.first; chunk <= place.chunks.last; ++chunk) {
      named_barrier_sync(FILLED, 2 * THREADS);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int row = own_row() + i * WARPS;
        if (BR % WARPS && row >= BR) continue;
        Part x = of_all_warps(sram, row);
        warp_barrier();  // or ptxas leaves out some reads of rows outside
        if (row >= place.rows) continue;
        bool waits = false;
        int node = chunk;
#pragma unroll
        for (int level = 0; level < LEVELS_OF_RUN; ++level, node /= 2) {
          // step: merge_run
          const bool is_left = node % 2 == 0, has_right = (node + 1) << level <= place.chunks.last, has_left = node << level > place.chunks.first;
          if (waits) continue;
          if (is_left && has_right) waiting[level][i] = x, waits = true;
          if (!is_left && has_left) x = joined(waiting[level][i], x);
        }
        if (!waits) store(place.level(), row, x);
      }
      if (more || chunk < place.chunks.last) named_barrier_arrive(FREE, 2 * THREADS);
    }
  }

  // Rows that see no key, which nobody computes.
  DEVICE void store_empty(const Place& place) const {
    for (int row = own_row(); row < place.rows; row += WARPS) store_row(row, {{}, LOWEST, 0});
  }

  DEVICE void store(const Level& level, int row, const Part& x) const {
    if (level.is_root())
      store_row(row, x);
    else
      store_partial(part_at(level.place_of(level.node), row), x);
  }

  DEVICE void store_partial(long long at, const Part& x) const {
    // step: store_partial
    lanes_meet();
    if (lane_id() == 0) {
      store_global(partial_m + at, x.m);
      store_global(partial_l + at, x.l);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int column = 128 * turn + 4 * lane_id();
      if (column < part_columns()) store_global(partial + at * part_columns() + column, x.o[turn]);
    }
  }

  // What lies in several units, as far up as this warp is the last one.
  DEVICE void climb(const Place& place) const {
    for (Level level = place.level(); !level.is_root(); level = level.above()) {
      // step: arrive
      const long long counter = static_cast<long long>(flat_head()) * room.counters + level.counter_of_parent();
      const Keys siblings = level.siblings();
      bool last = false;
      warp_barrier();  // this warp's partial results are written
      if (lane_id() == 0)
        last = last_to_arrive(arrivals + (counter * units.row_tiles + unit.row_tile) * WARPS + own_row(), siblings.last - siblings.first);
      if (!any_lane(last)) return;
      warp_barrier();  // those of the others are there
      merge_siblings(level, place.rows);
    }
  }

  // The partial results of all siblings, which are there. All are asked for at once.
  DEVICE void merge_siblings(const Level& level, int rows) const {
    const Keys siblings = level.siblings();
    const int child = level.parent() * CHILDREN, lane = lane_id(), place = level.place_of(child);  // were all of them there
    auto is_there = [&](int n) { return child + n >= siblings.first && child + n <= siblings.last; };
    const long long apart = static_cast<long long>(units.all_rows) * part_columns();  // from one to the next
#pragma unroll 1
    for (int row = own_row(); row < rows; row += WARPS) {
      // step: merge
      float m = LOWEST, l = 0;
      lanes_meet();
      if (is_there(lane)) {
        m = load_global<float>(partial_m + part_at(place + lane, row));
        l = load_global<float>(partial_l + part_at(place + lane, row));
      }
      const Weights weights(m, l);
      Part x;
      x.m = weights.m, x.l = weights.l;
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const int column = 128 * turn + 4 * lane;
        const float* from = partial + part_at(place, row) * part_columns() + column;
        float4 sides[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          // step: merge (columns)
          float4 o[CHILDREN / 2];
          lanes_meet();
#pragma unroll
          for (int n = 0; n < CHILDREN / 2; ++n, from += apart) {
            o[n] = make_float4(0, 0, 0, 0);
            if (is_there(side * CHILDREN / 2 + n) && column < part_columns()) o[n] = load_global<float4>(from);
          }
          sides[side] = weights.merged<Weights::LEVELS - 1>(o, side, side * CHILDREN / 2);
        }
        x.o[turn] = weights.whole(sides[0], sides[1]);
      }
      store(level.above(), row, x);
    }
  }

  DEVICE void store_row(int row, const Part& x) const {
    const int packed = first_row + row, query = packed / units.group, head = unit.kv_head * units.group + packed % units.group;
    // step: store_o
    lanes_meet();
    float m = x.m, l = x.l;
    const float alpha = join_sink(m, l, of_head<SINKS>(sinks, head, -INF)), factor = l > 0 ? alpha * reciprocal(l) : 0;
    char* to = row_address(out, unit.batch, head, query);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int column = 128 * turn + 4 * lane_id();
      if (column < round_up(shape.head_dim, CHUNK_ELEMENTS)) store_elements(to + column * ELEMENT_BYTES, times(x.o[turn], factor));
    }

    // step: store_lse
    if (lane_id() == 0 && lse)
#if RAGGED
      store_global(lse + (static_cast<long long>(head) * units.batches + unit.batch) * units.batch.len_q + query,
#else
      store_global(lse + (static_cast<long long>(unit.batch) * shape.heads + head) * shape.len_q + query,
#endif
                   (m + log2_approx(l)) * LN2);
  }
};

// Goes on to the next unit that has keys, does those before it, and says whether there is one.
DEVICE bool find_keys(Results& results, Unit& unit) {
  while (results.units.next(unit)) {
    const Place place(results.units, unit);
    if (place.has_keys()) return true;
    results.take(unit, place);
    if (place.chunks.first <= place.chunks.last) results.store_empty(place);
  }
  return false;
}

// The warps that merge: what the others have of each unit, and at once what lies in several units. In the meantime these go on with
// the next unit.
DEVICE void merge(Results results, const Sram& sram) {
  Unit next = results.units.before_first();
  for (bool has_unit = false, has_next;; has_unit = true) {
    const Unit unit = next;
    has_next = find_keys(results, next);
    if (has_unit) {
      const Place place(results.units, unit);
      results.take(unit, place);
      results.merge_run(place, sram, has_next);
      results.climb(place);
    } else if (has_next) {
      named_barrier_arrive(FREE, 2 * THREADS);
    }
    if (!has_next) return;
  }
}

DEVICE void decode(const Tensor& q, const Tensor& k, const Tensor& v, const CacheScales& scales, const Tensor& out, float* lse,
                   const float* sinks, const int* table, const unsigned* draft_mask, float* partial, float* partial_m, float* partial_l,
                   unsigned* arrivals, const Shape& shape, const Units& units) {
  const Sram sram;
  sram.name();
  const Results results{out, lse, sinks, partial, partial_m, partial_l, shape, units, arrivals,
                        Room(units.most_runs(), RAGGED ? shape.longest : shape.len_kv)};
  if (warp_id() < WARPS)
    compute(q, k, v, scales, table, draft_mask, shape, units, sram);
  else
    merge(results, sram);
}

#if CACHE
#define SCALES_OF_CACHE const float *k_scale, const float *v_scale,
#define GIVEN_SCALES {k_scale, v_scale}
#else
#define SCALES_OF_CACHE
#define GIVEN_SCALES {}
#endif
#if DRAFTS
#define MASK_OF_DRAFTS const unsigned *draft_mask,
#define GIVEN_DRAFTS draft_mask
#else
#define MASK_OF_DRAFTS
#define GIVEN_DRAFTS nullptr
#endif

#if PAGED
extern "C" __global__ void __launch_bounds__(2 * THREADS, 1)
paged(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const float* sinks,
      SCALES_OF_CACHE const int* block_table, const int* seq_lens, MASK_OF_DRAFTS float* partial, float* partial_m, float* partial_l,
      unsigned* arrivals, const Shape shape) {
  decode(q, k, v, GIVEN_SCALES, out, lse, sinks, block_table, GIVEN_DRAFTS, partial, partial_m, partial_l, arrivals, shape,
         Units(shape, seq_lens));
}
#elif RAGGED
extern "C" __global__ void __launch_bounds__(2 * THREADS, 1)
flash_decoding(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const float* sinks,
               SCALES_OF_CACHE const int* offsets_kv, float* partial, float* partial_m, float* partial_l, unsigned* arrivals,
               const Shape shape) {
  const Shape requests = requests_of(shape);
  decode(by_request(q, requests), k, v, GIVEN_SCALES, by_request(out, requests), lse, sinks, nullptr, nullptr, partial, partial_m,
         partial_l, arrivals, shape, Units(requests, offsets_kv));
}
#else
extern "C" __global__ void __launch_bounds__(2 * THREADS, 1)
flash_decoding(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, const float* sinks,
               SCALES_OF_CACHE float* partial, float* partial_m, float* partial_l, unsigned* arrivals, const Shape shape) {
  decode(q, k, v, GIVEN_SCALES, out, lse, sinks, nullptr, nullptr, partial, partial_m, partial_l, arrivals, shape, Units(shape));
}
#endif
