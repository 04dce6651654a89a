// What the kernels of latent attention share: where results lie, and how a warp merges the partial results of several units.
//
// All heads and queries are rows: row r is query r / heads of head r % heads.
#pragma once

#define ONE_KV_HEAD 1
#include "divisor.cuh"
#include "elements.cuh"
#include "tree.cuh"

// What a unit has, from there up the tree to out and lse. m and l are to the base 2, as in Part.
struct Results {
  const Tensor& out;
  float* lse;
  float* partial;
  float* partial_m;
  float* partial_l;
  const Shape& shape;
  const Units& units;
  const Divisor& group;
  unsigned* arrivals;
  Room room;
  Unit unit = {};
  int first_row = 0;

  DEVICE char* out_row(int row) const {
    const int packed = first_row + row;
    return row_address(out, unit.batch, packed % group, packed / group);
  }
  // The first number of a row's partial output.
  DEVICE float* part_row(const Level& level, int row) const {
    return partial + part_at(level.place_of(level.node), row) * VALUE_DIM;
  }

  DEVICE void store_lse(int row, float m, float l) const {
    const int packed = first_row + row;
    float* to = lse + (static_cast<long long>(unit.batch) * shape.heads + packed % group) * shape.len_q + packed / group;
    if (lse) store_global(to, (m + log2_approx(l)) * LN2);
  }
  DEVICE void store_statistics(const Level& level, int row, float m, float l) const {
    const long long at = part_at(level.place_of(level.node), row);
    store_global(partial_m + at, m);
    store_global(partial_l + at, l);
  }

  // True for the warp that comes last to a node's parent, of the `warp`-th warps of the blocks that have its children.
  DEVICE bool last_to_come(const Level& level, int warp, int warps) const {
    const long long counter = static_cast<long long>(unit.batch) * room.counters + level.counter_of_parent();
    const Keys siblings = level.siblings();
    bool last = false;
    warp_barrier();  // this warp's partial results are written
    if (lane_id() == 0)
      last = last_to_arrive(arrivals + (counter * units.row_tiles + unit.row_tile) * warps + warp, siblings.last - siblings.first);
    if (!any_lane(last)) return false;
    warp_barrier();  // those of the others are there
    return true;
  }

  DEVICE long long part_at(int at, int row) const {
    return (static_cast<long long>(unit.batch) * room.places + at) * units.all_rows + first_row + row;
  }
};

// The partial results of a node's siblings, which are all there.
struct Siblings {
  const Results& results;
  Keys siblings;
  int child, place;  // of the parent's first child, were all of them there

  DEVICE Siblings(const Results& results, const Level& level)
      : results(results), siblings(level.siblings()), child(level.parent() * CHILDREN), place(level.place_of(child)) {}

  DEVICE bool is_there(int n) const { return child + n >= siblings.first && child + n <= siblings.last; }

  DEVICE Weights weights(int row) const {
    float m = LOWEST, l = 0;
    lanes_meet();
    if (is_there(lane_id())) {
      m = load_global<float>(results.partial_m + results.part_at(place + lane_id(), row));
      l = load_global<float>(results.partial_l + results.part_at(place + lane_id(), row));
    }
    return Weights(m, l);
  }

  // Four columns of a row, from `column` on.
  DEVICE float4 merged(const Weights& weights, int row, int column) const {
    const long long apart = static_cast<long long>(results.units.all_rows) * VALUE_DIM;  // from one to the next
    const float* from = results.partial + results.part_at(place, row) * VALUE_DIM + column;
    float4 sides[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float4 o[CHILDREN / 2];
      lanes_meet();
#pragma unroll
      for (int n = 0; n < CHILDREN / 2; ++n, from += opaque(apart)) {  // or its multiples wait in registers
        o[n] = make_float4(0, 0, 0, 0);
        if (is_there(side * CHILDREN / 2 + n)) o[n] = load_global<float4>(from);
      }
      sides[side] = weights.merged<Weights::LEVELS - 1>(o, side, side * CHILDREN / 2);
    }
    return weights.whole(sides[0], sides[1]);
  }
};

// Calls work(results, place) for each of this block's units.
template <class Work>
DEVICE void for_each_unit(Results results, Work work) {
  for (Unit unit = results.units.first(); results.units.has(unit); results.units.move_on(unit)) {
    const Place place(results.units, unit);
    results.unit = unit, results.first_row = place.first_row;
    if (place.chunks.first <= place.chunks.last) work(results, place);
  }
}
