// Where the warps of flash_decoding.cu find their keys if those of a sequence lie one behind the other.
#pragma once

using Loader = TileLoader<32, WarpTile>;
DEVICE Loader loader(const char* rows, const Tensor& x, int row_bytes) { return {rows, x.row, row_bytes}; }

// Where the rows of a unit's KV head begin in its sequence.
DEVICE const char* head_of(const Tensor& x, const Unit& unit) {
  return row_address(x, RAGGED ? 0 : unit.batch, unit.kv_head, unit.first_key);
}

// A tile by its number, in tiles of a warp's size.
struct Rows {
  int own;
  DEVICE void load_k(const Loader& from, WarpTile tile, int keys) const { from.at(own).load(tile, keys); }
  DEVICE void load_v(const Loader& from, WarpTile tile, int keys) const { load_k(from, tile, keys); }
  DEVICE void load_scales(const float* scales, const Shape& shape, const Unit& unit, unsigned to, int keys) const {
    const long long head = RAGGED ? unit.kv_head : static_cast<long long>(unit.batch) * shape.kv_heads + unit.kv_head;
    copy_scales<WARP_KEYS>(to, scales + head * shape.len_kv + unit.first_key + own * WARP_KEYS, keys);
  }
};

// There is nothing to look up. But where requests have lengths, this finds a block's units a chunk ahead.
struct Lookup {
  Walk<TILES_PER_CHUNK> walk;
  int own = 0;

  DEVICE Lookup(const int*, const Units& units) : walk{RAGGED ? units.before_first() : Unit{}} {}
  template <class Mark>
  DEVICE void begin_chunk(int j, const Loader&, const Loader&, const Units& units, FoundUnits& found, Mark mark) {
    own = j * WARPS + warp_id();
    look_up(units, found, mark);
  }
  template <class Mark>
  DEVICE void look_up(const Units& units, FoundUnits& found, Mark) {
    if constexpr (RAGGED) walk.next(units, units, [&](const Place&) { found.tell(walk.unit); });
  }
  DEVICE Rows next_tile() { return {(own += WARPS) - WARPS}; }
};
