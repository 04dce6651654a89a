// Where the warps of flash_decoding.cu find their keys if K and V lie in pages (PAGED). A block table says which page has a request's keys.
#pragma once

#include "page_loader.cuh"

using Loader = PageLoader<WarpTile>;
DEVICE Loader loader(const char* head, const Tensor& x, int row_bytes) { return {head, x, row_bytes}; }

// Where the rows of a unit's KV head begin in page 0.
DEVICE const char* head_of(const Tensor& x, const Unit& unit) { return row_address(x, 0, unit.kv_head, 0); }

// Where this lane's row of a tile lies: in K, in V and among the scales of keys.
struct Rows {
  int k, v, scale;
  DEVICE void load_k(const Loader& from, WarpTile tile, int keys) const { from.load(tile, k, keys); }
  DEVICE void load_v(const Loader& from, WarpTile tile, int keys) const { from.load(tile, v, keys); }
  DEVICE void load_scales(const float* scales, const Shape& shape, const Unit& unit, unsigned to, int keys) const {
    copy_scales<WARP_KEYS>(to, scales + scale + unit.kv_head * shape.page_size - lane_id(), keys);
  }
};

// Where the keys of this chunk lie, and the pages of the next one, which are on their way.
struct Lookup {
  const int* table;
  const Divisor page_size;
  Walk<TILES_PER_CHUNK> walk;
  Rows places[TILES_PER_CHUNK] = {};  // of each tile that is left of the chunk
  int ahead[TILES_PER_CHUNK] = {};

  DEVICE Lookup(const int* table, const Units& units) : table(table), page_size(units.batch.page_size), walk{units.before_first()} {}

  // A chunk begins with tile j, and its pages have come. The pages of the one behind it are looked up.
  template <class Mark>
  DEVICE void begin_chunk(int j, const Loader& k, const Loader& v, const Units& units, FoundUnits& found, Mark mark) {
#pragma unroll
    for (int i = 0; i < TILES_PER_CHUNK; ++i) {
      const int place = key_of(j + i) % page_size;
      places[i] = {k.row_of(ahead[i], place), v.row_of(ahead[i], place), ahead[i] * units.batch.kv_heads * page_size + place};
    }
    look_up(units, found, mark);
  }

  // Finds the next chunk, and asks for its pages. mark() comes before the block table is read.
  template <class Mark>
  DEVICE void look_up(const Units& units, FoundUnits& found, Mark mark) {
    if (!walk.next(units, units, [&](const Place&) { found.tell(walk.unit); })) return;
    mark();
    const int* line = table + static_cast<long long>(walk.unit.batch) * units.batch.table_pages;
    const int tiles = min(walk.last - walk.j + 1, TILES_PER_CHUNK - walk.j % TILES_PER_CHUNK);
#pragma unroll
    for (int i = 0; i < TILES_PER_CHUNK; ++i) {
      const int key = key_of(walk.j + i);
      lanes_meet();
      if (lane_id() < WARP_KEYS && i < tiles && key < walk.unit.keys) ahead[i] = load_global<int>(line + key / page_size);
    }
  }

  // The rows of the chunk's next tile.
  DEVICE Rows next_tile() {
    const Rows first = places[0];
#pragma unroll
    for (int i = 1; i < TILES_PER_CHUNK; ++i) places[i - 1] = places[i];
    return first;
  }

  // This lane's key in tile j.
  static DEVICE int key_of(int j) { return (j * WARPS + warp_id()) * WARP_KEYS + lane_id(); }
};
