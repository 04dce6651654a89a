// Which units a block has, for the warps of flash_decoding.cu that copy keys and compute.
//
// Where requests have lengths of their own, a warp goes through the lengths once. It tells itself in SRAM which units with keys it
// has found. It walks over these again as it copies their tiles, and as it computes. flash_decoding.cuh includes this, and says
// where they lie.
#pragma once

#if PAGED || RAGGED
struct FoundUnits {
  const Sram& sram;
  const Divisor kv_heads;
  int found = 0;

  DEVICE FoundUnits(const Units& units, const Sram& sram) : sram(sram), kv_heads(units.kv_heads) {}

  DEVICE void tell(const Unit& unit) {
    if (lane_id() == 0) {
      const int head = unit.batch * kv_heads + unit.kv_head;
#if RAGGED
      store_shared(sram.told().first_key_at(found), unit.first_key);
#endif
      store_shared(sram.told().at(found), make_int4(unit.row_tile, unit.run, unit.keys, head));
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
    const int4 four = load_shared<int4>(sram.told().at(unit.number));
    unit.row_tile = four.x, unit.run = four.y, unit.keys = four.z;
    unit.batch = four.w / kv_heads, unit.kv_head = four.w - unit.batch * kv_heads;
    return true;
  }
  // next() leaves this out: only what copies a unit's keys asks where they begin.
  DEVICE void find_first_key(Unit& unit) const {
#if RAGGED
    unit.first_key = load_shared<int>(sram.told().first_key_at(unit.number));
#endif
  }
};
#else
// Without lengths a block's next unit follows from the one before.
struct FoundUnits {
  const Units& units;

  DEVICE FoundUnits(const Units& units, const Sram&) : units(units) {}
  DEVICE void tell(const Unit&) {}
  DEVICE Unit before_first() const { return units.before_first(); }
  DEVICE bool next(Unit& unit) const { return units.next(unit); }
  DEVICE void find_first_key(Unit&) const {}
};
#endif

// A block's units one after the other, in steps of STEP tiles: tile j of `unit` is the first of a step, `last` the unit's last.
template <int STEP>
struct Walk {
  Unit unit;
  int j = 0, last = -1;

  // Moves on, and says whether there is more. `from` has the units: Units, or FoundUnits. begin(place) is called where a unit begins.
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
