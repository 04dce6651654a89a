// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): few queries against many keys, with causal masks, windows, a soft cap, sinks,
// GQA and any lengths.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse (batch, heads, len_q) float32, or NULL    sinks (heads) float32    rows padded to 16 bytes
//   partial (batch * kv_heads, places, rows, head_dim), partial_m, partial_l (batch * kv_heads, places, rows)    float32
//   arrivals (batch * kv_heads, nodes, row tiles, WARPS)    zeros
//
// In a ragged batch the rows of a batch of 1 are sequences, with equally many queries. Sequence s has keys offsets_kv[s] ..
// offsets_kv[s + 1] - 1, and partial results as if it were batch s.
//
// All queries of the heads that share a KV head are the rows of one tile: row r is query r / G of head r % G. A unit of work is BR
// rows and a run of chunks of 4 BC keys. Chunks begin at multiples of their size. A block takes one unit after the other. For the
// tensor cores queries are columns and keys are rows (keys_as_rows.cuh). So eight rows of Q fill a product.
//
// Split-K: WARPS warps compute. Each has all rows, and its own keys of each tile. It copies them itself, STAGES tiles ahead and on
// into the next units, so bytes are on their way at all times. As many other warps merge: they join what the first ones have of a
// chunk, and merge it with its neighbours. In the meantime the next chunk goes on. Some rows lie in several units. The warp that
// comes last to a node of the tree (tree.cuh) merges the node at once. Left to the block's end, nearly all merging would fall to
// the last block. No bit depends on which warp merges, on the length of runs, on the batch or on the grid.
//
// Keys lie one behind the other (keys_in_rows.cuh) or in pages (keys_in_pages.cuh): flash_decoding.cuh chooses. With lengths, a
// warp goes through them once, a chunk ahead of its copies (found_units.cuh). K and V may have 8 bits, with scales: see cache.cuh.
// In pages the last keys may be drafts, with a mask: see drafts.cuh.
//
//   SRAM        Q  (STAGES + 1) x (BR x D) | m, l  WARPS x BR | m  BR | K, V  STAGES x (BC x D) | O  WARPS x (BR x D)
//   registers   O (BR x D) and S (BR x BC / WARPS) in float32 per warp
//
// Expected: HBM reads K and V once. The bandwidth of DRAM binds, above a few µs for the launch, the first copy and the merge.
#include "drafts.cuh"
#include "flash_decoding.cuh"
#include "warpgroup.cuh"

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
    // step: load_q (lengths, and what follows from them)
    lookup.look_up(units, found, mark_pages);
    walk.unit = found.before_first();
  }

  // What looks pages up calls this where it begins to read the block table.
  static DEVICE void mark_pages() {
    // step: load_k (pages)
  }

  // The next tile into a stage, and with the first one of a unit its queries. It is a group of copies, even if there is none.
  DEVICE void load(int stage) {
    bool begins = false;
    // step: load_q (units)
    const bool more = walk.next(found, units, [&](const Place& place) {
      found.find_first_key(walk.unit);
      k_loader = loader(head_of(k, walk.unit), k, cache_row_bytes(shape));
      v_loader = loader(head_of(v, walk.unit), v, cache_row_bytes(shape));
      load_queries(place);
      begins = true;
    });
    if (more) {
      if (begins || walk.j % TILES_PER_CHUNK == 0) lookup.begin_chunk(walk.j, k_loader, v_loader, units, found, mark_pages);
      load_tile(stage);
    }
    copy_commit();
  }

  DEVICE void load_tile(int stage) {
    const int own = walk.j * WARPS + warp_id(), keys = units.alone(walk.unit).len_kv - own * WARP_KEYS;
    const Rows rows = lookup.next_tile();
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

DEVICE void compute(const Tensor& q, const Tensor& k, const Tensor& v, const CacheScales& scales, const int* table,
                    const unsigned* draft_mask, const Shape& shapes, const Units& units, const Sram& sram) {
  Copies copies(q, k, v, scales, table, shapes, units, sram);
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage) copies.load(stage);

  const Scores scores(shapes);
  int stage = 0, q_slot = 0;
  for (Unit unit = copies.found.before_first();;) {
    // step: load_q (units)
    if (!copies.found.next(unit)) return;
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
    const Queries queries(q_tile, channels, c);
    const auto c_of = [&](int n, int e) { return SOFT_CAP ? scores.c : queries.factors.c(n, e); };  // what a score is multiplied with

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
          QueryOperands here;
          const QueryOperands& b = queries.at(d, here);
#pragma unroll
          for (int i = 0; i < KEY_FRAGMENTS; ++i) {
            const FragmentA a = load_keys(keys, 16 * i, d * K_STEP);
#pragma unroll
            for (int n = 0; n < QUERY_FRAGMENTS; ++n) multiply(s[i][n], a, b[n]);
          }
        }

        if constexpr (K_SCALE == TOKEN) scale_keys(s, sram.k_scale(stage));
        if constexpr (SOFT_CAP) cap(s, queries.factors);

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
        const bool risen = raise_columns(s, m, alpha, c_of);

        // step: rescale
        if (j > tiles.first && any_lane(risen)) rescale_columns(o, l, alpha);  // there is nothing yet before the first tile

        // step: softmax (P)
        exponentials_of_columns(s, m, l, c_of);

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

// The rows of a unit, from its chunks up the tree, to out and lse.
struct Results : UnitRows {
  static constexpr int ROWS = ceil_div(BR, WARPS);  // of a warp that merges
  static DEVICE int own_row() { return warp_id() - WARPS; }  // this warp has that one, the row WARPS later, and so on

  // The chunks of a unit, as they come. Once a chunk is read, there is room for the next one. `more` says that chunks follow behind
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
        // step: join (of a row)
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

  // Rows that see no key. No warp computes them.
  DEVICE void store_empty(const Place& place) const {
    for (int row = own_row(); row < place.rows; row += WARPS) store_row(row, {{}, LOWEST, 0});
  }

  DEVICE void store(const Level& level, int row, const Part& x) const {
    if (level.is_root()) return store_row(row, x);
    // step: store_partial
    store_part(part_at(level.place_of(level.node), row), x);
  }

  // What lies in several units, as far up as this warp is the last one.
  DEVICE void climb(const Place& place) const {
    for (Level level = place.level(); !level.is_root(); level = level.above()) {
      // step: arrive
      if (!last_of_siblings(level, own_row())) return;
      merge_siblings(level, place.rows);
    }
  }

  // The partial results of all siblings, which have come. The warp asks for half of a row's at once.
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
    if (lane_id() == 0 && lse) store_lse(head, query, m, l);
  }
};

// Goes on to the next unit that has keys, does those before it, and says whether there is one.
DEVICE bool find_keys(Results& results, Unit& unit) {
  for (;;) {
    // step: load_q (lengths)
    if (!results.units.next(unit)) return false;
    const Place place(results.units, unit);
    if (place.has_keys()) return true;
    results.take(unit, place);
    if (place.chunks.first <= place.chunks.last) results.store_empty(place);
  }
}

// The warps that merge: first what the others have of a unit, then at once what lies in several units. In the meantime the others
// go on with the next unit.
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
  const Results results{{out, lse, sinks, partial, partial_m, partial_l, shape, units, arrivals,
                         Room(units.most_runs(), RAGGED ? shape.longest : shape.len_kv)}};
  if (warp_id() < WARPS) return compute(q, k, v, scales, table, draft_mask, shape, units, sram);
  merge(results, sram);
}

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
