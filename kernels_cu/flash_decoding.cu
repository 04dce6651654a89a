// Flash-Decoding (Dao, Haziza, Massa, Sizov 2023): few queries against many keys, with causal masks, windows, GQA and any lengths.
//
//   q, out (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    in the storage dtype
//   lse (batch, heads, len_q) float32, or NULL    rows padded to 16 bytes
//   partial (batch * kv_heads, places, rows, head_dim), partial_lse (batch * kv_heads, places, rows)    float32; arrivals: zeros
//
// The query heads that share a KV head, and all queries, are the rows of one tile: row r is query r / G of head r % G. A block owns
// BR rows and a chunk of 4 BC keys, which begins at a multiple of its size. Split-K: warp w has all rows and 16 keys of each tile.
// It copies them for itself, so until the end no warp waits for another: what counts is that enough bytes are on their way.
//
// The block that comes last to a node of the tree (tree.cuh) merges what its children left in HBM. Which block that is changes no
// bit, and nor do the batch, the grid and the other sequences.
//
//   SRAM        Q  BR x D | m, l  WARPS x BR | K  STAGES x (BC x D) | V  STAGES x (BC x D); at the end O  WARPS x (BR x D)
//   registers   O (BR x D) and S (BR x 16) in float32 per warp
//
// Expected: HBM reads K and V once; the bandwidth of DRAM binds, above a few µs for the launch, the first copy and the merge.
#include "elements.cuh"
#include "mma.cuh"
#include "scores.cuh"
#include "tree.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WARP_KEYS = BC / WARPS;
constexpr int ROW_FRAGMENTS = BR / 16, S_FRAGMENTS = WARP_KEYS / 8, O_FRAGMENTS = HEAD_DIM / 8;
constexpr int LANES = HEAD_DIM > 64 ? 32 : HEAD_DIM > 32 ? 16 : HEAD_DIM > 16 ? 8 : 4;  // that share a row of the result
static_assert(BR % 16 == 0 && WARP_KEYS == 16 && HEAD_DIM % 16 == 0, "tiles are made of whole fragments");

using QTile = Tile<BR, HEAD_DIM>;
using WarpTile = Tile<WARP_KEYS, HEAD_DIM>;
constexpr int RING_BYTES = STAGES * WARPS * WarpTile::BYTES;  // of K, and of V

// The outputs of the warps in SRAM, float32. Chunks of 32 bytes change places by the row, against bank conflicts.
struct Outputs {
  unsigned base;
  static constexpr int BYTES = BR * HEAD_DIM * 4;  // of a warp
  DEVICE unsigned at(int warp, int row, int column) const {
    const int turned = HEAD_DIM % 32 == 0 ? column ^ row % 4 * 8 : column ^ row % 2 * 8;
    return base + warp * BYTES + (row * HEAD_DIM + turned) * 4;
  }
};

// Which rows of which KV head a block has, and which of the chunks that they see. Blocks that share keys follow one another.
struct Place {
  int group, all_rows, row_tiles, most, row_tile, flat_head, first_row, rows, first_query, last_query, first_chunk, last_chunk, chunk;
  Keys seen;  // tiles

  DEVICE Place(const Shape& shape, int block) {
    group = shape.heads / shape.kv_heads, all_rows = shape.len_q * group, row_tiles = ceil_div(all_rows, BR);
    most = gridDim.x / (row_tiles * shape.batch * shape.kv_heads);
    row_tile = block % row_tiles, flat_head = block / row_tiles / most;
    first_row = row_tile * BR, rows = min(BR, all_rows - first_row);
    first_query = first_row / group, last_query = (first_row + rows - 1) / group;
    seen = visible_tiles(shape, first_query, last_query, BC);
    first_chunk = seen.first / TILES_PER_CHUNK, last_chunk = max(seen.last, 0) / TILES_PER_CHUNK;
    chunk = first_chunk + block / row_tiles % most;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, WARPS <= 4 ? 2 : 1)
flash_decoding(const Tensor q, const Tensor k, const Tensor v, const Tensor out, float* lse, float* partial, float* partial_lse,
               unsigned* arrivals, const Shape shape) {
  // step: load_q (which rows and keys)
  const Place place(shape, blockIdx.x);
  if (place.chunk > place.last_chunk) return;  // this row tile sees fewer chunks
  const int first_tile = place.chunk * TILES_PER_CHUNK;
  const Keys tiles = {max(place.seen.first, first_tile), min(place.seen.last, first_tile + TILES_PER_CHUNK - 1)};

  const QTile q_tile{sram_base()};
  const unsigned statistics = q_tile.base + QTile::BYTES, ring = statistics + 2 * WARPS * BR * 4;
  auto k_tile = [&](int stage) { return WarpTile{ring + (stage * WARPS + warp_id()) * WarpTile::BYTES}; };
  auto v_tile = [&](int stage) { return WarpTile{k_tile(stage).base + RING_BYTES}; };
  name_sram("q", q_tile.base, QTile::BYTES);
  name_sram("m_warps", statistics, WARPS * BR * 4);
  name_sram("l_warps", statistics + WARPS * BR * 4, WARPS * BR * 4);
  name_sram("k", ring, RING_BYTES);
  name_sram("v", ring + RING_BYTES, RING_BYTES);

  // step: load_q
  const int batch = place.flat_head / shape.kv_heads, kv_head = place.flat_head % shape.kv_heads;
#pragma unroll 1  // as in TileLoader
  for (int i = threadIdx.x; i < BR * QTile::CHUNKS; i += THREADS) {
    lanes_meet();
    const int row = i / QTile::CHUNKS, piece = i % QTile::CHUNKS, packed = place.first_row + row;
    const int bytes = row < place.rows ? min(max(row_bytes(shape) - piece * CHUNK_BYTES, 0), CHUNK_BYTES) : 0;
    const char* from = row_address(q, batch, kv_head * place.group + packed % place.group, packed / place.group);
    copy_async(q_tile.at(row, piece), from + piece * CHUNK_BYTES, bytes);
  }
  copy_commit();

  const TileLoader<32, WarpTile> k_loader(row_address(k, batch, kv_head, 0), k.row, row_bytes(shape));
  const TileLoader<32, WarpTile> v_loader(row_address(v, batch, kv_head, 0), v.row, row_bytes(shape));
  auto load_ahead = [&](int j, int stage) {
    const int own = j * WARPS + warp_id(), keys = shape.len_kv - own * WARP_KEYS;
    if (j <= tiles.last) {
      // step: load_k (prefetch)
      k_loader.at(own).load(k_tile(stage), keys);

      // step: load_v (prefetch)
      v_loader.at(own).load(v_tile(stage), keys);
    }
    copy_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) load_ahead(tiles.first + stage, stage);

  // step: load_q (it is there)
  copy_wait<STAGES - 1>();
  barrier();
#if Q_IN_REGISTERS
  FragmentA q_fragments[HEAD_DIM / K_STEP][ROW_FRAGMENTS];
#pragma unroll
  for (int d = 0; d < HEAD_DIM / K_STEP; ++d)
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i) q_fragments[d][i] = load_a(q_tile, 16 * i, d * K_STEP);
#endif

  const Scores scores(shape);
  const auto [c, sign] = scores;
  const Keys full = sign != 1 ? Keys{0, -1} : full_tiles(shape, place.first_query, place.last_query, BC);  // need no mask

  float o[ROW_FRAGMENTS][O_FRAGMENTS][4] = {};
  float m[ROW_FRAGMENTS][2], l[ROW_FRAGMENTS][2];  // as in flash2.cu
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i) m[i][0] = m[i][1] = LOWEST, l[i][0] = l[i][1] = 0;

  int stage = 0;
  for (int j = tiles.first; j <= tiles.last; ++j) {
    // step: load_k
    copy_wait<STAGES == 1 ? 0 : STAGES - 2>();
    warp_barrier();  // this warp's keys and values are there, and none of its lanes still reads those before
    load_ahead(j + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    if (STAGES == 1) {  // they are not: there is room for one tile
      copy_wait<0>();
      warp_barrier();
    }
    const WarpTile keys = k_tile(stage);
    const int slot = stage;
    stage = stage == STAGES - 1 ? 0 : stage + 1;

    // step: scores
    float s[ROW_FRAGMENTS][S_FRAGMENTS][4] = {};
#pragma unroll(Q_IN_REGISTERS ? HEAD_DIM / K_STEP : FL_DTYPE == 0 ? 2 : 4)
    for (int d = 0; d < HEAD_DIM / K_STEP; ++d) {
      if (FL_DTYPE == 0) warp_barrier();  // or the compiler reads ahead until registers spill
      const FragmentB b = load_b_rows(keys, 0, d * K_STEP);
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
#if Q_IN_REGISTERS
        mma(s[i][0], s[i][1], q_fragments[d][i], b);
#else
        mma(s[i][0], s[i][1], load_a(q_tile, 16 * i, d * K_STEP), b);
#endif
      }
    }

    // step: mask
    if (j < full.first || j > full.last) {
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) {
        scores.flip(s[i]);
        const int row = place.first_row + 16 * i + lane_id() / 4;
        mask_scores(s[i], shape, row, j * BC + warp_id() * WARP_KEYS, 2 * (opaque(lane_id()) % 4), place.group);
      }
    }

    // step: softmax
    float alpha[ROW_FRAGMENTS][2];
    bool risen = false;
#pragma unroll
    for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]), fmaxf(s[i][1][2 * half], s[i][1][2 * half + 1]));
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

    // step: load_v
    const WarpTile values = v_tile(slot);

    // step: output
#pragma unroll
    for (int key = 0; key < WARP_KEYS; key += K_STEP) {
      FragmentA a[ROW_FRAGMENTS];
#pragma unroll
      for (int i = 0; i < ROW_FRAGMENTS; ++i) a[i] = operand_a(s[i], key);
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; n += 2) {
        if (FL_DTYPE == 0) warp_barrier();
        const FragmentB b = load_b_columns(values, key, 8 * n);
#pragma unroll
        for (int i = 0; i < ROW_FRAGMENTS; ++i) mma(o[i][n], o[i][n + 1], a[i], b);
      }
    }
  }

  // step: join
  copy_wait<0>();
  barrier();  // no warp still needs the ring
  const Outputs outputs{ring};
  name_sram("o_warps", ring, WARPS * Outputs::BYTES);
#pragma unroll
  for (int i = 0; i < ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + lane_id() / 4, t = lane_id() % 4;
      const float sum = quad_sum(l[i][half]);
      const unsigned own = statistics + (warp_id() * BR + row) * 4;
      lanes_meet();
      if (t == 0) {
        store_shared(own, m[i][half]);
        store_shared(own + WARPS * BR * 4, sum);
      }
#pragma unroll
      for (int n = 0; n < O_FRAGMENTS; ++n)
        store_shared(outputs.at(warp_id(), row, 8 * n + 2 * t), make_float2(o[i][n][2 * half], o[i][n][2 * half + 1]));
    }
  barrier();

  // From here on LANES lanes have a row, and each of them has four columns at a time.
  constexpr int AT_ONCE = THREADS / LANES;
  const int lane = threadIdx.x % LANES;
  const int columns = round_up(shape.head_dim, CHUNK_ELEMENTS), part_columns = round_up(shape.head_dim, 4);  // with padding
  const Place here(shape, opaque(static_cast<int>(blockIdx.x)));  // once more: cheaper than registers
  const int rows = here.rows, first_row = here.first_row, group = here.group;
  const Room room(here.most, shape.len_kv);
  Level level = {here.chunk, here.first_chunk, here.last_chunk, 0, 0, here.most};
  auto part_at = [&](int at, int row) { return (static_cast<long long>(here.flat_head) * room.places + at) * here.all_rows + first_row + row; };
  auto store_part = [&](const Level& of, int row, int column, const Part& x) {
    const long long part = part_at(of.place_of(of.node), row);
    if (column < part_columns) store_global(partial + part * part_columns + column, output_of(x));
    if (column == 0) store_global(partial_lse + part, lse_of(x));
  };
  auto head_of = [&](int row) { return here.flat_head % shape.kv_heads * group + (first_row + row) % group; };
  auto query_of = [&](int row) { return (first_row + row) / group; };
  auto store_out = [&](int row, int column, const Part& x) {
    char* to = row_address(out, here.flat_head / shape.kv_heads, head_of(row), query_of(row));
    if (column < columns) store_elements(to + column * ELEMENT_BYTES, output_of(x));
  };
  auto store_row_lse = [&](int row, int column, const Part& x) {
    const long long flat = static_cast<long long>(here.flat_head / shape.kv_heads) * shape.heads + head_of(row);
    if (column == 0 && lse) store_global(lse + flat * shape.len_q + query_of(row), lse_of(x));
  };

#pragma unroll 1
  for (int row = threadIdx.x / LANES; row < BR; row += AT_ONCE) {
    // step: join (of a row, the statistics)
    Part x = {make_float4(0, 0, 0, 0), LOWEST, 0};
    float weights[WARPS];
    lanes_meet();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) x.m = fmaxf(x.m, weights[w] = load_shared<float>(statistics + (w * BR + row) * 4));
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      weights[w] = exp2_approx(weights[w] - x.m);
      x.l += weights[w] * load_shared<float>(statistics + ((WARPS + w) * BR + row) * 4);
    }
#pragma unroll 1
    for (int turn = 0; turn < HEAD_DIM; turn += 4 * LANES) {
      // step: join (of a row, the outputs)
      const int column = turn + 4 * lane;
      lanes_meet();
      // asked anew in each turn: else ptxas knows it from the first one, and leaves out reads of rows outside
      const int inside = uniform(rows);
      if (column >= HEAD_DIM) continue;
      x.o = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) x.o = weighed(x.o, 1, load_shared<float4>(outputs.at(w, row, column)), weights[w]);

      // step: normalize
      if (row >= inside) continue;
      if (!level.is_root()) {
        // step: store_partial
        store_part(level, row, column, x);
      } else {
        // step: store_o (of a single chunk)
        store_out(row, column, x);

        // step: store_lse (of a single chunk)
        store_row_lse(row, column, x);
      }
    }
  }

  while (!level.is_root()) {
    // step: arrive
    const Keys siblings = level.siblings();
    const long long counter = static_cast<long long>(here.flat_head) * room.counters + level.counter_of_parent();
    barrier();  // the block's partial result is written
    bool last = false;
    if (threadIdx.x == 0) last = last_to_arrive(arrivals + counter * here.row_tiles + here.row_tile, siblings.last - siblings.first);
    if (!barrier_any(last)) return;
    const int children = level.place_of(level.parent() * CHILDREN);  // the place of the first one, were all of them there
    const Level above = level.above();

#pragma unroll 1
    for (int row = threadIdx.x / LANES; row < BR; row += AT_ONCE) {
      // step: merge
      float tops[CHILDREN];
      lanes_meet();
#pragma unroll
      for (int n = 0; n < CHILDREN; ++n) {
        const int child = above.node * CHILDREN + n;
        tops[n] = -INF;
        if (row < rows && child >= siblings.first && child <= siblings.last)
          tops[n] = load_global<float>(partial_lse + part_at(children + n, row));
      }
#pragma unroll 1
      for (int turn = 0; turn < HEAD_DIM; turn += 4 * LANES) {
        // step: merge (columns)
        const int column = turn + 4 * lane;
        Part parts[CHILDREN];
        lanes_meet();
#pragma unroll
        for (int n = 0; n < CHILDREN; ++n) {
          const int child = above.node * CHILDREN + n;
          parts[n] = {make_float4(0, 0, 0, 0), tops[n] * LOG2E, tops[n] == -INF ? 0.f : 1.f};
          if (row < rows && column < part_columns && child >= siblings.first && child <= siblings.last)
            parts[n].o = load_global<float4>(partial + part_at(children + n, row) * part_columns + column);
        }
        const Part x = merged<CHILDREN>(parts);
        if (row >= rows) continue;
        if (!above.is_root()) {
          // step: store_partial (of a node)
          store_part(above, row, column, x);
        } else {
          // step: store_o
          store_out(row, column, x);

          // step: store_lse
          store_row_lse(row, column, x);
        }
      }
    }
    level = above;
  }
}
