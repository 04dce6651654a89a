// Requests whose K and V lie in pages, on Hopper: which block has which of their row tiles, and how a warpgroup brings their keys
// into tiles that the tensor cores read. All requests have the same number of queries, or (VARLEN) the queries of all lie one behind
// the other in a batch of 1. How many keys they have, and then how many queries, only the device knows.
#pragma once

#include "divisor.cuh"
#include "flash3.cuh"
#include "page_loader.cuh"

#ifndef PAGE_BOX
#define PAGE_BOX 0  // rows of a page that TMA brings in one box; 0: warps copy row by row
#endif

#ifndef VARLEN
#define VARLEN 0  // 1: requests have different numbers of queries; cu_seqlens_q says where each one's begin
#endif

constexpr int PRODUCERS = PAGE_BOX ? 2 : 4;  // warps that load: half of them K, half of them V
constexpr bool ONE_TILE = !DYNAMIC;  // wide heads leave a block no registers for more than one row tile

// What a warp takes next: a row tile of a head of a request (request · heads + head), or none if that is below 0. Rows are numbered as
// in a ragged batch: row `row` is row q + row of its head.
struct Told {
  int request_head, first_row, keys, q;

  DEVICE bool is_there() const { return request_head >= 0; }
  DEVICE bool is_empty() const { return first_row >= keys; }  // a place without a row tile
};

// All row tiles of all requests, by number. Those of long requests come first: blocks draw numbers, so what comes last should be short.
// 32 requests, side by side, are sorted by their lengths. The first requests are fewer where there isn't a multiple of 32, so that the
// last ones are 32. Requests of equal lengths keep their order. Nothing that is computed depends on the order. With VARLEN, tiles have
// places as in a ragged batch (sequences.cuh), and the last places of a head come first.
struct Requests {
  const Shape& shape;
  const int *lengths, *begins;

  DEVICE int row_tiles() const { return VARLEN ? row_tiles_of(shape) : ceil_div(shape.len_q, BR); }
  DEVICE int last() const { return row_tiles() * shape.batch * shape.heads - 1; }

  // The row tile with a number, or the next one that is there. All lanes call it. For an empty place, the next number is drawn.
  DEVICE Told from(int number, unsigned* drawn) const {
    Told told = at(number);
    while (VARLEN && told.is_there() && told.is_empty()) {
      if (!DYNAMIC) return {-1, 0, 0, 0};
      unsigned next = 0;
      if (lane_id() == 0) next = draw_from(drawn, last());
      told = at(gridDim.x + uniform(static_cast<int>(next)));
    }
    return told;
  }

 private:
  DEVICE int length_of(int request) const { return min(max(load_global<int>(lengths + request), 0), shape.len_kv); }

  // All lanes call it. Each has a request's length, and counts the requests that come before.
  DEVICE Told at(int number) const {
    if (number > last()) return {-1, 0, 0, 0};
    if constexpr (VARLEN) return at_place(head_tile_at(shape, row_tiles(), number));
    const HeadTile own = head_tile_at(shape, row_tiles(), number);
    const int nobody = round_up(shape.batch, 32) - shape.batch;  // lanes without a request, among the first 32
    const int rank = own.head / shape.heads + nobody, request = rank / 32 * 32 + lane_id() - nobody;
    int length = 0x7fffffff;
    lanes_meet();
    if (request >= 0) length = length_of(request);  // the table has no more
    int before = 0;
#pragma unroll 1
    for (int lane = 0; lane < 32; ++lane) {
      const int other = shuffle(length, lane);
      before += other > length || (other == length && lane < lane_id());
    }
    const int lane = count_bits(ballot(before == rank % 32) - 1), keys = shuffle(length, lane);
    const int q = shape.len_q - keys;
    return {shuffle(request, lane) * shape.heads + own.head % shape.heads, own.row_tile * BR - q, keys, q};
  }

  // Where requests have different numbers of queries. All lanes look at the same numbers.
  DEVICE Told at_place(const HeadTile& own) const {
    lanes_meet();
    const Sequence request = sequence_at(shape, begins, own.row_tile);
    lanes_meet();
    const int keys = uniform(length_of(request.number)), q = request.end - keys;  // the last row is aligned with the last key
    return {request.number * shape.heads + own.head, request.first - q + request.before(own.row_tile), keys, q};
  }
};

// Where the producer's first warp tells the other warps what is next.
struct RequestSram : Sram {
  static constexpr int TOLD = MBARRIERS - sizeof(Told) / MBARRIER_BYTES;

  DEVICE unsigned told_full() const { return mbarrier(2 + 4 * STAGES); }
  DEVICE unsigned told_empty() const { return mbarrier(3 + 4 * STAGES); }
  DEVICE unsigned told() const { return mbarrier(TOLD); }
};
static_assert(4 + 4 * STAGES <= RequestSram::TOLD, "the ring has its mbarriers, and leaves room for what is told");

DEVICE void open_requests(const RequestSram& sram) {
  if (threadIdx.x == 0) {
    mbarrier_init(sram.told_full(), 1);
    mbarrier_init(sram.told_empty(), PRODUCERS - 1 + 4 * CONSUMERS);
  }
  open<PRODUCERS / 2>(sram);
  name_sram("work", sram.told(), sizeof(Told));
}

// The row tiles of one persistent block. It begins with its own number, and goes on with the next one that no block has drawn yet.
struct RequestAgenda {
  const Shape& shape;
  const RequestSram& sram;
  unsigned parity = 0;

  // The first warp tells `next` once all have taken what it told before.
  DEVICE void tell(const Told& next) {
    mbarrier_wait(sram.told_empty(), parity ^ 1);
    if (lane_id() == 0) {
      store_shared(sram.told(), next);
      mbarrier_arrive(sram.told_full());
    }
    parity ^= 1;
  }

  // Any other warp hears it.
  DEVICE Told hear() {
    mbarrier_wait(sram.told_full(), parity);
    parity ^= 1;
    const Told told = lane_id() == 0 ? load_shared<Told>(sram.told()) : Told{};
    const Told all = {uniform(told.request_head), uniform(told.first_row), uniform(told.keys), uniform(told.q)};
    release(sram.told_empty());
    return all;
  }

  // What it means; false if no row tile is left.
  DEVICE bool next(Work& work, const Told& told) const {
    if (!told.is_there()) return false;
    work.first_row = told.first_row, work.q = told.q, work.kv = 0, work.keys = told.keys;
    work.sequence = told.request_head / shape.heads, work.head = told.request_head - work.sequence * shape.heads;
    work.batch = VARLEN ? 0 : work.sequence;
    const Shape own = work.alone(shape);
    const Keys tiles = visible_tiles(own, work.first_row, min(work.first_row + BR, own.len_q) - 1, BC);
    work.tiles = {uniform(tiles.first), uniform(tiles.last)};
    return true;
  }
};

// Registers of a thread: those that copy need more than those that ask TMA. Wide heads leave them fewer.
constexpr int COPIER_REGISTERS = PAGE_BOX || ONE_TILE ? 56 : 72, CONSUMER_REGISTERS = (3 * 168 - COPIER_REGISTERS) / 2;

DEVICE void become_copier() {
  static_assert(CONSUMERS <= 2, "with more consumers none has room for its accumulators");
  if constexpr (CONSUMERS == 2) release_registers<COPIER_REGISTERS>();
}
DEVICE void become_consumer_of_copies() {
  if constexpr (CONSUMERS == 2) claim_registers<CONSUMER_REGISTERS>();
}

// Where a request's pages stand in the block table.
DEVICE const int* line_of(const int* block_table, const Shape& shape, int request) {
  return block_table + static_cast<long long>(request) * shape.table_pages;
}

#if PAGE_BOX

using Pool = TensorMap;  // of K or of V: each page is a batch of its own

// What a warp asks TMA for: the keys of a request, from its pages, tile by tile. A lane asks for each box.
struct Copies {
  static constexpr int BOXES = BC / PAGE_BOX;
  static_assert(BC % PAGE_BOX == 0 && BOXES <= 32, "a lane for each box");
  struct Pages { int page, row; };  // where this lane's box begins

  const Shape& shape;
  const Divisor& page_size;
  int request, keys;

  // The pages of tile j. Tile -1 has none. Boxes behind the last key are of its page again, so that each tile comes whole.
  DEVICE Pages look_up(const int* block_table, int j) const {
    const int* line = line_of(block_table, shape, request);
    const int key = min(j * BC + lane_id() * PAGE_BOX, keys - 1);
    Pages pages = {};
    lanes_meet();
    if (lane_id() >= BOXES || j < 0) return pages;
    pages.page = load_global<int>(line + key / page_size);
    if (BOXES == 1) pages.row = key % page_size;  // of a page that is larger than a tile, one part
    return pages;
  }

  // Asks for tile j. `full` is told when its bytes have come, also those behind the last key.
  template <class TileT>
  DEVICE void load(TileT tile, const TensorMap& pool, int head, int, const Pages& pages, unsigned full) const {
    if (lane_id() == 0) mbarrier_arrive_expect(full, TileT::BYTES);
    warp_barrier();
    if (lane_id() >= BOXES) return;
    const int first = lane_id() * PAGE_BOX;
#pragma unroll
    for (int i = 0; i < TileT::PANELS; ++i)
      tma_load(tile.panel(i) + first * 128, pool, pages.page, head, pages.row, i * TileT::PANEL_COLUMNS, full, EVICT_LAST);
  }

  DEVICE void finish() const {}
};

#else

using Pool = Tensor;

// A warp's share of a tile of panels, as PageLoader wants it.
template <class TileT, int ROWS_>
struct PanelRows {
  static constexpr int ROWS = ROWS_, CHUNKS = TileT::COLUMNS / CHUNK_ELEMENTS, ROW_BYTES = TileT::COLUMNS * ELEMENT_BYTES;

  TileT tile;
  int first;

  static constexpr int APART = 128;  // bytes from a row to the next
  static_assert(ROWS % 4 == 0, "four rows down, the swizzle has its other half");

  DEVICE unsigned at(int row, int chunk) const {
    return tile.panel(chunk / 8) + (first + row) * APART + (chunk % 8 ^ (first + row) % 8) * CHUNK_BYTES;
  }
  // As Tile has it.
  static DEVICE unsigned right(unsigned address, int chunks) {
    return (address ^ chunks % 8 * CHUNK_BYTES) + chunks / 8 * TileT::PANEL_BYTES;
  }
};

// What the warps of K or of V copy: the keys of a request, from its pages, tile by tile.
struct Copies {
  static constexpr int SHARES = BC <= 64 ? 2 : 4, ROWS = BC / SHARES;  // each warp copies every other share
  static_assert(BC % (4 * SHARES) == 0 && ROWS <= 32, "a lane for each key");
  struct Pages { int of[SHARES / 2]; };  // in which this lane's keys lie

  const Shape& shape;
  const Divisor& page_size;
  int request, keys;
  unsigned under_way = 0;  // the mbarrier to tell when the tile before is there

  static DEVICE int first_row(int i) { return (warp_id() % 2 + 2 * i) * ROWS; }

  // The pages of tile j. Tile -1 has none.
  DEVICE Pages look_up(const int* block_table, int j) const {
    const int* line = line_of(block_table, shape, request);
    Pages pages = {};
#pragma unroll
    for (int i = 0; i < SHARES / 2; ++i) {
      const int key = j * BC + first_row(i) + lane_id();
      lanes_meet();
      if (lane_id() < ROWS && key >= 0 && key < keys) pages.of[i] = load_global<int>(line + key / page_size);
    }
    return pages;
  }

  // Copies tile j, and tells `full` when it is there. Keys from `keys` on become zeros: the rest of the last page isn't read.
  // Where the ring has a slot to spare, the next tile is under way before a warp waits for this one.
  template <class TileT>
  DEVICE void load(TileT tile, const Tensor& pool, int head, int j, const Pages& pages, unsigned full) {
    using Rows = PanelRows<TileT, ROWS>;
    const PageLoader<Rows, true> loader(row_address(pool, 0, head, 0), pool, row_bytes(shape));
#pragma unroll
    for (int i = 0; i < SHARES / 2; ++i) {
      const int first = first_row(i), key = j * BC + first;
      loader.load(Rows{tile, first}, loader.row_of(pages.of[i], (key + lane_id()) % page_size), keys - key);
    }
    copy_commit();
    if (STAGES > 2 && under_way != 0) arrived<1>();
    under_way = full;
    if (STAGES <= 2) finish();
  }

  // Waits for the last tile, too.
  DEVICE void finish() {
    if (under_way != 0) arrived<0>();
    under_way = 0;
  }

  template <int AFTER>
  DEVICE void arrived() const {
    copy_wait<AFTER>();
    fence_async();  // the tensor cores read past what wrote it
    warp_barrier();
    release(under_way);
  }
};

#endif
