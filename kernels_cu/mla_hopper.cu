// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), on Hopper: TMA, WGMMA, and a warpgroup for each task.
//
//   q (batch, heads, len_q, HEAD_DIM)    latent (batch, 1, len_kv, HEAD_DIM)    out (batch, heads, len_q, VALUE_DIM)
//   lse (batch, heads, len_q) float32, or NULL    sinks (heads) float32    q, latent and out in float16 or bfloat16
//   partial (batch, chunks, rows, VALUE_DIM), partial_m, partial_l (batch, chunks, rows)    float32
//
// Of a ragged batch the rows of a batch of 1 are sequences, which have as many queries each. Sequence s has rows offsets_kv[s] ..
// offsets_kv[s + 1] - 1 of latent, and partial results as if it were batch s. A box may bring rows of the next one: they are cleared.
//
// A unit of work is 64 rows and a chunk of keys, 1,024 unless callers say how many. A block takes one unit after the other. A second
// launch adds up what the chunks of a row have. All SMs share in that, where the last node of a tree (mla.cu) is left to one.
// The order is fixed, so no bit depends on the batch.
//
// A tile has 64 rows, and 64 latent rows, which serve as K and as V. Four warpgroups share a tile's work, each with a part of its own:
//   - One loads tiles by TMA: where pages fill a tile, or a tile them, in boxes of a page (PAGE_BOX). From other pages it copies 16
//     bytes at a time, with two warps for each slot of the ring.
//   - One has the scores: it fetches the queries, multiplies them by all 576 columns, and takes the exponentials. P and what has to
//     be rescaled go to the others through SRAM.
//   - Two have the output, 256 columns each, which fill 128 registers of a thread. P leaves SRAM once for each of them.
// So the scores of a tile are computed, and its exponentials taken, while the tensor cores still multiply the P of the tile before.
//
// A tile comes in five sets of columns, because each is free at another time: those of RoPE after the scores, each quarter of the
// value after its product. The scores begin with what comes first.
//
//   SRAM        Q  BR x HEAD_DIM | latent  STAGES x (BC x HEAD_DIM) | P  BR x BC | alpha  BR | mbarriers
//   registers   S  BR x BC, and O  BR x VALUE_DIM / 2 in each of two warpgroups, in float32
//
// Expected: a tile takes the tensor cores 1,152 cycles for S and 1,024 for O, and SRAM 2,400, which both read. So they reach up to
// nine tenths of their rate, if the L2 brings 72 KB in that time. Few heads leave rows empty: then the bandwidth of DRAM binds.
#define ONE_KV_HEAD 1
#ifndef PAGE_BOX
#define PAGE_BOX 0  // rows of a page that TMA brings in one box; 0: rows are copied one by one
#endif
#ifndef FEW_CHUNKS
#define FEW_CHUNKS 0  // 1: no row sees more than FEW chunks. Then a merge needs few registers, and more of them run at once
#endif
#include "clear.cuh"
#include "divisor.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "scores.cuh"
#include "tma.cuh"
#include "tree.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

static_assert(BR == 64 && BC == 64 && WARPS == 16 && STAGES == 2, "registers and SRAM are shared out for these");

constexpr int THREADS = WARPS * 32;
constexpr int HALF = VALUE_DIM / 2;   // columns of a warpgroup's output
constexpr int PRODUCTS = 2, PRODUCT = HALF / PRODUCTS;  // columns of a product: ptxas takes no more, for 128 registers at the launch
constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = PRODUCT / 8, P_STEPS = BC / 16;
constexpr int OUTPUT_WARPS = 8;
constexpr int SLOT_WARPS = 2;  // that copy a tile from pages
constexpr bool BOXES = !PAGED || PAGE_BOX;  // TMA brings tiles
constexpr bool CLEARS = RAGGED || (PAGED && PAGE_BOX);  // a box may bring rows behind the last key
constexpr int MERGE_WARPS = 4;  // of a row, with 128 columns each
constexpr int FEW = 4, MANY = 16;  // chunks that such a warp asks for at once
static_assert(VALUE_DIM == MERGE_WARPS * 128, "a lane has four columns");
constexpr float TAU = 8;  // a maximum may lag behind by so much: then exponentials reach 2^TAU, and nothing has to be rescaled

enum Role { LOADS, SCORES, OUTPUT };  // of a warpgroup: OUTPUT is the first of two
enum NamedBarrier { QUERIES = 1 };
// The sets of columns that a tile comes in, in the order in which a slot's are free, and loaded: those of RoPE, then those of each
// half's first product, then of its second.
constexpr int ROPE = 0, SETS = 1 + 2 * PRODUCTS;
DEVICE constexpr int set_of(int half, int product) { return 1 + 2 * product + half; }

using QTile = PanelTile<BR, HEAD_DIM>;
using LatentTile = PanelTile<BC, HEAD_DIM>;
using ValueTile = PanelTile<BC, PRODUCT>;
using PTile = Tile<BR, BC>;

// The panels of 64 columns that a set has.
constexpr int VALUE_PANELS = PRODUCT / 64;
DEVICE constexpr int first_panel(int columns) {
  return columns == ROPE ? VALUE_DIM / 64 : ((columns - 1) % 2 * PRODUCTS + (columns - 1) / 2) * VALUE_PANELS;
}
DEVICE constexpr int panels_of(int columns) { return columns == ROPE ? LatentTile::PANELS - VALUE_DIM / 64 : VALUE_PANELS; }

struct Sram {
  static constexpr int MBARRIERS = 24, ALPHA_BYTES = BR * 4;

  unsigned base = sram_base();

  DEVICE QTile q() const { return {base}; }
  DEVICE LatentTile latent(int slot) const { return {base + QTile::BYTES + slot * LatentTile::BYTES}; }
  DEVICE PTile p() const { return {latent(STAGES).base}; }
  DEVICE unsigned alpha(int row) const { return p().base + PTile::BYTES + row * 4; }
  DEVICE unsigned mbarrier(int i) const { return alpha(BR) + i * MBARRIER_BYTES; }

  DEVICE unsigned full(int slot, int columns) const { return mbarrier(slot * SETS + columns); }
  DEVICE unsigned empty(int slot, int columns) const { return mbarrier((STAGES + slot) * SETS + columns); }
  DEVICE unsigned p_full() const { return mbarrier(2 * STAGES * SETS); }  // P and alpha of a tile, or at the end the sums
  DEVICE unsigned p_empty() const { return mbarrier(2 * STAGES * SETS + 1); }
};
static_assert(2 * STAGES * SETS + 2 <= Sram::MBARRIERS, "there is room for all mbarriers");

// Makes the block's mbarriers ready. All threads call it.
DEVICE void open(const Sram& sram) {
  name_sram("q", sram.q().base, QTile::BYTES);
  name_sram("latent", sram.latent(0).base, STAGES * LatentTile::BYTES);
  name_sram("p", sram.p().base, PTile::BYTES);
  name_sram("alpha", sram.alpha(0), Sram::ALPHA_BYTES);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot)
      for (int columns = 0; columns < SETS; ++columns) {
        mbarrier_init(sram.full(slot, columns), BOXES ? 1 : SLOT_WARPS);
        mbarrier_init(sram.empty(slot, columns), 4);
      }
    mbarrier_init(sram.p_full(), 4);
    mbarrier_init(sram.p_empty(), OUTPUT_WARPS);
    mbarrier_publish();
  }
  barrier();
}

// Where a chunk of 16 bytes lies in a tile of panels.
template <class TileT>
DEVICE unsigned chunk_of(TileT tile, int row, int chunk) {
  return tile.panel(chunk / 8) + row * 128 + (chunk % 8 ^ row % 8) * CHUNK_BYTES;
}

// Where what a unit has goes: to out and lse if its rows see no other chunk, else to the partial results. m and l are to the base 2.
struct Results {
  const Tensor& out;
  float* lse;
  const float* sinks;
  float* partial;
  float* partial_m;
  float* partial_l;
  const Shape& shape;
  const Units& units;
  const Divisor& group;
  Unit unit = {};
  int first_row = 0;

  DEVICE char* out_row(int row) const {
    const int packed = first_row + row;
    return row_address(out, unit.batch, packed % group, packed / group);
  }
  DEVICE float sink_of(int row) const { return of_head<SINKS>(sinks, (first_row + row) % group, -INF); }
  DEVICE long long part_at(int row) const {
    return (static_cast<long long>(unit.batch) * units.most_runs() + unit.run) * units.all_rows + first_row + row;
  }

  DEVICE void store_lse(int row, float m, float l) const {
    const int packed = first_row + row;
#if RAGGED
    float* to = lse + (static_cast<long long>(packed % group) * units.batches + unit.batch) * units.batch.len_q + packed / group;
#else
    float* to = lse + (static_cast<long long>(unit.batch) * shape.heads + packed % group) * shape.len_q + packed / group;
#endif
    if (lse) store_global(to, (m + log2_approx(l)) * LN2);
  }
  DEVICE void store_statistics(int row, float m, float l) const {
    store_global(partial_m + part_at(row), m);
    store_global(partial_l + part_at(row), l);
  }
};

// Calls work(results, place) for each of this block's units.
template <class Work>
DEVICE void for_each_unit(Results results, Work work) {
  for (Unit unit = results.units.before_first(); results.units.next(unit);) {
    const Place place(results.units, unit);
    results.unit = unit, results.first_row = place.first_row;
    if (place.chunks.first <= place.chunks.last) work(results, place);
  }
}

// Does a unit have all keys that its rows see?
DEVICE bool is_whole(const Place& place) { return place.first_chunk == place.last_chunk; }

#if PAGED || RAGGED
DEVICE int length_of(const int* lengths, int request, int requests) {
  // step: load_q (lengths)
  lanes_meet();
  return request < requests ? load_global<int>(lengths + request) : 0;
}
#endif

#if PAGED && PAGE_BOX
// Asks for the tiles of a unit. One lane does; a lane for each box looks its page up. A box is whole: it also brings what lies behind
// the last key. Boxes behind it are of its page again, so that each tile comes whole. A tile's pages are looked up before the
// tile before it is waited for.
struct Latent {
  static constexpr int OF_TILE = BC / PAGE_BOX;  // boxes of a panel
  static_assert(BC % PAGE_BOX == 0 && OF_TILE <= 32, "a lane for each box");

  const TensorMap& latent;
  const int* table;
  const Shape& batch;
  const Sram& sram;
  Divisor page_size;
  int pages = 0;  // of the coming tile, a lane for each box

  DEVICE void look_up(const Unit& unit, int keys, int j) {
    // step: load_latent (pages)
    const int key = min(j * BC + lane_id() * PAGE_BOX, keys - 1);
    lanes_meet();
    if (lane_id() < OF_TILE) pages = load_global<int>(table + static_cast<long long>(unit.batch) * batch.table_pages + key / page_size);
  }

  DEVICE void load(const Unit& unit, int keys, const Keys& tiles, int j, const Ring& ring) {
    if (warp_id() != 0) return;
    if (j == tiles.first) look_up(unit, keys, j);
    const int own = pages, row = OF_TILE == 1 ? j * BC % page_size : 0;  // of a page that is larger than a tile, one part
    if (j < tiles.last) look_up(unit, keys, j + 1);

    // step: load_latent (producer)
    const LatentTile tile = sram.latent(ring.slot);
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      const unsigned full = sram.full(ring.slot, columns);
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);
      if (elected()) mbarrier_arrive_expect(full, panels_of(columns) * LatentTile::PANEL_BYTES);
#pragma unroll
      for (int box = 0; box < OF_TILE; ++box) {
        const int page = shuffle(own, box);
        if (elected())
#pragma unroll
          for (int i = first_panel(columns); i < first_panel(columns) + panels_of(columns); ++i)
            tma_load(tile.panel(i) + box * PAGE_BOX * 128, latent, page, 0, row, i * 64, full, EVICT_FIRST);
      }
    }
  }
};
#elif PAGED
// Copies the tiles of a unit. Two warps copy every other tile: that of their slot. Each lane knows where one row lies, and tells it
// the others.
struct Latent {
  static constexpr int ROWS = BC / SLOT_WARPS;  // of a warp

  const Tensor& latent;
  const int* table;
  const Shape& batch;
  const Sram& sram;
  Divisor page_size;

  DEVICE void load(const Unit& unit, int keys, const Keys&, int j, const Ring& ring) const {
    if (warp_id() / SLOT_WARPS != ring.slot) return;
    const int first_row = warp_id() % SLOT_WARPS * ROWS, first_key = j * BC + first_row, key = first_key + lane_id();

    // step: load_latent (pages)
    int page = 0;
    lanes_meet();
    if (key < keys) page = load_global<int>(table + static_cast<long long>(unit.batch) * batch.table_pages + key / page_size);
    const long long own = page * latent.batch + key % page_size * latent.row;
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);

      // step: load_latent (producer)
      if (keys - first_key >= ROWS)
        copy<true>(sram.latent(ring.slot), columns, first_row, own, keys - first_key);
      else
        copy<false>(sram.latent(ring.slot), columns, first_row, own, keys - first_key);
      copy_commit();
    }
    tell<4>(sram.full(ring.slot, 0));
    tell<3>(sram.full(ring.slot, 1));
    tell<2>(sram.full(ring.slot, 2));
    tell<1>(sram.full(ring.slot, 3));
    tell<0>(sram.full(ring.slot, 4));
  }

  template <bool WHOLE>
  DEVICE void copy(LatentTile tile, int columns, int first_row, long long own, int left) const {
    const char* rows = row_address(latent, 0, 0, 0);
    const int first = first_panel(columns) * 8, chunks = panels_of(columns) * 8;
#pragma unroll(WHOLE ? 4 : 1)
    for (int i = lane_id(); i < ROWS * chunks; i += 32) {
      const int row = i / chunks, chunk = first + i % chunks;
      const char* from = rows + shuffle(own, row) + chunk * CHUNK_BYTES;
      if (!WHOLE) lanes_meet();
      copy_async(chunk_of(tile, first_row + row, chunk), from, WHOLE || row < left ? CHUNK_BYTES : 0);
    }
  }

  // Waits for this warp's copies, all but the newest ones, and says so.
  template <int PENDING>
  static DEVICE void tell(unsigned full) {
    copy_wait<PENDING>();
    fence_async();
    release(full);
  }
};
#else
// Asks for the tiles of a unit. One thread does.
struct Latent {
  const TensorMap& latent;
  const Sram& sram;

  DEVICE void load(const Unit& unit, int, const Keys&, int j, const Ring& ring) const {
    if (warp_id() != 0) return;
    // step: load_latent (producer)
    const LatentTile tile = sram.latent(ring.slot);
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);
      if (elected()) {
        mbarrier_arrive_expect(sram.full(ring.slot, columns), panels_of(columns) * LatentTile::PANEL_BYTES);
#pragma unroll
        for (int i = first_panel(columns); i < first_panel(columns) + panels_of(columns); ++i)
#if RAGGED
          tma_load(tile.panel(i), latent, 0, 0, unit.first_key + j * BC, i * 64, sram.full(ring.slot, columns), EVICT_FIRST);
#else
          tma_load(tile.panel(i), latent, unit.batch, 0, j * BC, i * 64, sram.full(ring.slot, columns), EVICT_FIRST);
#endif
      }
    }
  }
};
#endif

// The warpgroup that loads.
DEVICE void load_tiles(const Results& results, Latent latent) {
  Ring ring;
  for_each_unit(results, [&](const Results& here, const Place& place) {
    const Keys tiles = place.tiles_of(place.chunks.first);
    const int keys = here.units.alone(here.unit).len_kv;
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j, ring.advance()) latent.load(here.unit, keys, tiles, j, ring);
  });
}

// The warpgroup that has the scores.
struct Weighing {
  const Tensor& q;
  const Sram& sram;
  const Scores scores;
  Ring ring;
  unsigned p_parity = 0;

  DEVICE int own_row(int half) const { return warp_id() % 4 * 16 + lane_id() / 4 + 8 * half; }

  // Nobody still reads the queries of the unit before: this warpgroup has waited for its products.
  DEVICE void load_queries(const Results& here, const Place& place) const {
    // step: load_q
    named_barrier_sync(QUERIES, WARPGROUP);
#pragma unroll 1
    for (int pass = 0; pass < 4; ++pass) {  // eight lanes have a row, and its panels one after the other
      const int lane = opaque(lane_id()), row = warp_id() % 4 * 16 + 4 * pass + lane / 8, chunk = lane % 8;
      const int packed = place.first_row + row;
      const char* from = row_address(q, here.unit.batch, packed % here.group, packed / here.group) + chunk * CHUNK_BYTES;
      const unsigned to = chunk_of(sram.q(), row, chunk);
#pragma unroll
      for (int panel = 0; panel < QTile::PANELS; ++panel) {
        lanes_meet();
        copy_async_inside(to + panel * QTile::PANEL_BYTES, from + panel * 128, row < place.rows);
      }
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
    named_barrier_sync(QUERIES, WARPGROUP);
  }

  // S += Q Kᵀ over a set of columns, in the background.
  DEVICE void multiply(float (&s)[S_FRAGMENTS][4], int columns) const {
    mbarrier_wait(sram.full(ring.slot, columns), ring.parity);
    wgmma_fence();
    const unsigned long long queries = rows_operand(sram.q(), 0, 0), keys = rows_operand(sram.latent(ring.slot), 0, 0);
    const int first = first_panel(columns) * 64;
#pragma unroll
    for (int d = first; d < first + panels_of(columns) * 64; d += 16)
      wgmma_ss(s, queries + operand_step<QTile>(0, d), keys + operand_step<LatentTile>(0, d), columns != ROPE || d > first);
  }

  DEVICE void operator()(const Results& here, const Place& place) {
    const Shape& shape = here.units.alone(here.unit);
    const Keys tiles = place.tiles_of(place.chunks.first);
    const Keys full = scores.sign != 1 ? Keys{0, -1} : full_tiles(shape, place.first_query, place.last_query, BC);  // need no mask
    const float c = scores.c;
    float m[2] = {LOWEST, LOWEST}, l[2] = {};
    if (place.has_keys()) load_queries(here, place);
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j) {
      // step: load_latent
      if (CLEARS && (j + 1) * BC > shape.len_kv) {
        for (int columns = 0; columns < SETS; ++columns) mbarrier_wait(sram.full(ring.slot, columns), ring.parity);
        clear_rows<1>(sram.latent(ring.slot), shape.len_kv - j * BC, QUERIES);
      }
      float s[S_FRAGMENTS][4];
      settle(s);

      // step: scores
      multiply(s, ROPE);
      multiply(s, set_of(0, 0));
      multiply(s, set_of(1, 0));
      multiply(s, set_of(0, 1));
      multiply(s, set_of(1, 1));
      wgmma_commit();
      wgmma_wait<0>();
      settle(s);
      release(sram.empty(ring.slot, ROPE));
      ring.advance();

      if constexpr (SOFT_CAP) Tanh::apply(s, shape.scale / shape.soft_cap);

      // step: mask
      if (j < full.first || j > full.last) {
        scores.flip(s);
        mask_scores(s, shape, place.first_row + own_row(0), j * BC, 2 * (opaque(lane_id()) % 4), here.group);
      }

      // step: softmax
      float alpha[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = s[0][2 * half];
#pragma unroll
        for (int n = 0; n < S_FRAGMENTS; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = product(c, quad_max(top));
        top = top > m[half] + TAU ? top : m[half];
        alpha[half] = exp2_approx(m[half] - top);
        m[half] = top, l[half] *= alpha[half];
      }
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = exp2_approx(product(c, s[n][e]) - m[e / 2]);  // the largest is a power of two at most, however large the scores
          l[e / 2] += s[n][e];
        }
      mbarrier_wait(sram.p_empty(), p_parity ^ 1);
      store_fragments(sram.p(), warp_id() % 4 * 16, 0, 0, s);
      pass_on(alpha);
    }

    // step: share_sum (the scores' side)
    float whole[2] = {l[0] = quad_sum(l[0]), l[1] = quad_sum(l[1])};  // what the output is to be divided by
    if (SINKS && is_whole(place)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lanes_meet();
        const float sink = own_row(half) < place.rows ? here.sink_of(own_row(half)) : -INF;
        whole[half] += exp2_approx(sink * LOG2E - m[half]);
        join_sink(m[half], l[half], sink);
      }
    }
    mbarrier_wait(sram.p_empty(), p_parity ^ 1);
    pass_on(whole);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lanes_meet();
      if (lane_id() % 4 == 0 && own_row(half) < place.rows) {
        if (is_whole(place)) {
          // step: store_lse (of a unit)
          here.store_lse(own_row(half), m[half], l[half]);
        } else {
          // step: store_partial (statistics)
          here.store_statistics(own_row(half), m[half], l[half]);
        }
      }
    }
  }

  // A number for each row, and whatever was stored before, to the warpgroups that have the output.
  DEVICE void pass_on(const float (&x)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lanes_meet();
      if (lane_id() % 4 == 0) store_shared(sram.alpha(own_row(half)), x[half]);
    }
    release(sram.p_full());
    p_parity ^= 1;
  }
};

// A warpgroup that has half of the output's columns.
struct Accumulating {
  const Sram& sram;
  Ring ring;
  unsigned p_parity = 0;

  DEVICE int half_of_columns() const { return warpgroup_id() - OUTPUT; }
  DEVICE int own_row(int half) const { return warp_id() % 4 * 16 + lane_id() / 4 + 8 * half; }

  DEVICE void operator()(const Results& here, const Place& place) {
    const Keys tiles = place.tiles_of(place.chunks.first);
    float o[PRODUCTS][O_FRAGMENTS][4] = {};
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j, ring.advance()) {
      mbarrier_wait(sram.p_full(), p_parity);
      p_parity ^= 1;

      // step: rescale
      const float alpha[] = {load_shared<float>(sram.alpha(own_row(0))), load_shared<float>(sram.alpha(own_row(1)))};
      if (any_lane(alpha[0] != 1 || alpha[1] != 1)) {
#pragma unroll
        for (int n = 0; n < PRODUCTS * O_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n / O_FRAGMENTS][n % O_FRAGMENTS][e] *= alpha[e / 2];
      }

      // step: output
      unsigned p[P_STEPS][4];
#pragma unroll
      for (int i = 0; i < P_STEPS; ++i) {
        const FragmentA a = load_a(sram.p(), warp_id() % 4 * 16, 16 * i);
#pragma unroll
        for (int r = 0; r < 4; ++r) p[i][r] = a.r[r];
      }
      release(sram.p_empty());
      settle(p);
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) settle(o[n]);
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) {
        mbarrier_wait(sram.full(ring.slot, set_of(half_of_columns(), n)), ring.parity);
        wgmma_fence();
        const ValueTile value = {sram.latent(ring.slot).panel((half_of_columns() * PRODUCTS + n) * VALUE_PANELS)};
#pragma unroll
        for (int i = 0; i < P_STEPS; ++i) wgmma_rs(o[n], p[i], columns_operand(value, 16 * i));
        wgmma_commit();
      }
      wgmma_wait<1>();
      release(sram.empty(ring.slot, set_of(half_of_columns(), 0)));
      wgmma_wait<0>();
      release(sram.empty(ring.slot, set_of(half_of_columns(), 1)));
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) settle(o[n]);
    }

    // step: share_sum
    mbarrier_wait(sram.p_full(), p_parity);
    p_parity ^= 1;
    const float l[] = {load_shared<float>(sram.alpha(own_row(0))), load_shared<float>(sram.alpha(own_row(1)))};
    release(sram.p_empty());

    const int first_column = half_of_columns() * HALF;
    if (is_whole(place)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool inside = own_row(half) < place.rows;
        char* to = here.out_row(inside ? own_row(half) : 0) + first_column * ELEMENT_BYTES;
        const float factor = l[half] > 0 ? reciprocal(l[half]) : 0;
        // step: store_o (of a unit)
#pragma unroll
        for (int n = 0; n < PRODUCTS; ++n)
          store_row(to + n * PRODUCT * ELEMENT_BYTES, o[n], half, factor, inside ? PRODUCT * ELEMENT_BYTES : 0);
      }
    } else {
      // step: store_partial
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = here.partial + here.part_at(own_row(half)) * VALUE_DIM + first_column + 4 * (lane_id() % 4);
        lanes_meet();
        if (own_row(half) >= place.rows) continue;
#pragma unroll
        for (int n = 0; n < PRODUCTS * O_FRAGMENTS; n += 2) {
          const float (&x)[4] = o[n / O_FRAGMENTS][n % O_FRAGMENTS], (&y)[4] = o[n / O_FRAGMENTS][n % O_FRAGMENTS + 1];
          store_global(to + 8 * n, make_float4(x[2 * half], x[2 * half + 1], y[2 * half], y[2 * half + 1]));
        }
      }
    }
  }
};

// A launch gives all warpgroups the same share of an SM's 65,536 registers: 128 of a thread. They share them out anew.
DEVICE void decode(const Tensor& q, const Latent& latent, const Results& results, const Sram& sram) {
  if (warpgroup_id() == LOADS) {
    release_registers<48>();
    load_tiles(results, latent);
  } else if (warpgroup_id() == SCORES) {
    release_registers<96>();
    Weighing weighing{q, sram, Scores(results.shape)};
    for_each_unit(results, [&](const Results& here, const Place& place) { weighing(here, place); });
  } else {
    claim_registers<184>();
    Accumulating accumulating{sram};
    for_each_unit(results, [&](const Results& here, const Place& place) { accumulating(here, place); });
  }
}

// Partial results have a row's columns as lanes hold them: of each sixteen, a lane has two of the first eight and two of the others,
// and stores the four together. So a warp's store has 64 bytes of a row, not 32, and half as many wait for the L1. Here the lanes
// swap them for four that are neighbours in the output: of the first eight in even lanes, of the others in odd ones.
DEVICE float4 neighbours(float4 x) {
  const bool odd = lane_id() % 2;
  const float a = shuffle_xor(odd ? x.x : x.z, 1), b = shuffle_xor(odd ? x.y : x.w, 1);
  return odd ? make_float4(a, b, x.z, x.w) : make_float4(x.x, x.y, a, b);
}
DEVICE int first_of_neighbours() { return lane_id() / 4 * 16 + lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4; }

// What the chunks of a row have together, of the columns that a lane has.
struct Total {
  float m = LOWEST, l = 0;
  float4 o = make_float4(0, 0, 0, 0);

  // Adds up `chunks` of them in a fixed order, of which AT_ONCE are asked for at once. From each to the next it is `apart` rows.
  template <int AT_ONCE>
  DEVICE void add(const float* partial, const float* partial_m, const float* partial_l, long long first_part, int apart, int chunks) {
    // step: merge (of chunks)
    const float* own = partial + first_part * VALUE_DIM + warp_id() * 128 + lane_id() * 4;
    float4 x[AT_ONCE];
    auto ask = [&](int k) {  // for chunk k and those behind it
      const float* from = own + static_cast<long long>(k) * apart * VALUE_DIM;
      lanes_meet();
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n, from += static_cast<long long>(apart) * VALUE_DIM) {
        x[n] = make_float4(0, 0, 0, 0);
        if (k + n < chunks) x[n] = load_global<float4>(from);
      }
    };
#pragma unroll 1
    for (int first = 0; first < chunks; first += 32) {
      ask(first);  // it is on its way while the weights are computed
      float own_m = LOWEST, own_l = 0;
      lanes_meet();
      if (first + lane_id() < chunks) {
        const long long at = first_part + static_cast<long long>(first + lane_id()) * apart;
        own_m = load_global<float>(partial_m + at), own_l = load_global<float>(partial_l + at);
      }
      const float top = fmaxf(m, warp_max(own_m)), alpha = exp2_approx(m - top), weight = exp2_approx(own_m - top);
      m = top, l = l * alpha + warp_sum(weight * own_l), o = times(o, alpha);
#pragma unroll 1
      for (int k = first; k < min(first + 32, chunks); k += AT_ONCE) {
        if (k > first) ask(k);
#pragma unroll
        for (int n = AT_ONCE - 1; n >= 0; --n)  // the last first: so all are asked for before any is waited for
          o = weighed(x[n], shuffle(weight, k - first + n), o, 1);
      }
    }
  }
};

// The keys of a sequence whose first offset this is.
DEVICE int keys_between(const int* offset) {
  // step: merge (offsets)
  return load_global<int>(offset + 1) - load_global<int>(offset);
}

// Adds up what the chunks of a row have. A block has the row, and each of its warps 128 of the columns.
DEVICE void merge(const Tensor& out, float* lse, const float* sinks, const int* lengths, const float* partial, const float* partial_m,
                  const float* partial_l, const Shape& batch) {
  const int heads = batch.heads, all_rows = batch.len_q * heads;
  const int request = blockIdx.x / all_rows, row = blockIdx.x - request * all_rows, query = row / heads, head = row - query * heads;
  const int first_row = row / BR * BR, last_row = min(first_row + BR, all_rows) - 1;

  // step: merge
  Shape own = batch;
  if (PAGED) own.len_kv = min(max(load_global<int>(lengths + request), 0), batch.len_kv);
  if (RAGGED) own.len_kv = min(max(keys_between(lengths + request), 0), batch.len_kv);
  const Keys seen = visible_tiles(own, first_row / heads, last_row / heads, BC);
  const int chunks = max(seen.last, 0) / TILES_PER_CHUNK - seen.first / TILES_PER_CHUNK + 1;
  if (chunks == 1) return;  // the unit had the whole row
  const long long first_part = static_cast<long long>(request) * most_runs(batch, heads) * all_rows + row;
  Total total;
  if (FEW_CHUNKS || chunks <= FEW)
    total.add<FEW>(partial, partial_m, partial_l, first_part, all_rows, chunks);
  else
    total.add<MANY>(partial, partial_m, partial_l, first_part, all_rows, chunks);

  // step: store_o
  const float alpha = join_sink(total.m, total.l, of_head<SINKS>(sinks, head, -INF));
  const float4 o = neighbours(times(total.o, total.l > 0 ? alpha * reciprocal(total.l) : 0));
  store_elements(row_address(out, request, head, query) + (warp_id() * 128 + first_of_neighbours()) * ELEMENT_BYTES, o);

  // step: store_lse
  if (threadIdx.x == 0 && lse)
#if RAGGED
    store_global(lse + (static_cast<long long>(head) * batch.batch + request) * batch.len_q + query, (total.m + log2_approx(total.l)) * LN2);
#else
    store_global(lse + (static_cast<long long>(request) * heads + head) * batch.len_q + query, (total.m + log2_approx(total.l)) * LN2);
#endif
}

#if PAGED
#if PAGE_BOX
using Pool = TensorMap;  // each page is a batch of its own
#else
using Pool = Tensor;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper_paged(const Tensor q, const __grid_constant__ Pool latent, const Tensor out, float* lse, const float* sinks,
                 const int* block_table, const int* seq_lens, float* partial, float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Units units(shape, seq_lens);
  const Divisor group(units.group);
  decode(q, {latent, block_table, shape, sram, Divisor(shape.page_size)},
         {out, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_paged_merge(const Tensor out, float* lse, const float* sinks, const int* seq_lens, const float* partial, const float* partial_m,
                       const float* partial_l, const Shape shape) {
  merge(out, lse, sinks, seq_lens, partial, partial_m, partial_l, shape);
}
#elif RAGGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper(const Tensor q, const __grid_constant__ TensorMap latent, const Tensor out, float* lse, const float* sinks,
           const int* offsets_kv, float* partial, float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Shape requests = requests_of(shape);
  const Units units(requests, offsets_kv);
  const Divisor group(units.group);
  const Tensor outputs = by_request(out, requests);
  decode(by_request(q, requests), {latent, sram}, {outputs, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_merge(const Tensor out, float* lse, const float* sinks, const int* offsets_kv, const float* partial, const float* partial_m,
                 const float* partial_l, const Shape shape) {
  const Shape requests = requests_of(shape);
  merge(by_request(out, requests), lse, sinks, offsets_kv, partial, partial_m, partial_l, requests);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper(const Tensor q, const __grid_constant__ TensorMap latent, const Tensor out, float* lse, const float* sinks, float* partial,
           float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Units units(shape);
  const Divisor group(units.group);
  decode(q, {latent, sram}, {out, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_merge(const Tensor out, float* lse, const float* sinks, const float* partial, const float* partial_m, const float* partial_l, const Shape shape) {
  merge(out, lse, sinks, nullptr, partial, partial_m, partial_l, shape);
}
#endif
