// The rows of a unit, and their partial results in HBM, for kernels that merge along a tree (tree.cuh): where they lie, how they are
// written, and which warp merges the children of a node.
#pragma once

#include "scores.cuh"
#include "tree.cuh"

// Where the results of a unit's rows go: to out and lse, or to a place among the partial results.
struct UnitRows {
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

  DEVICE void take(const Unit& other, const Place& place) { unit = other, first_row = place.first_row; }

  DEVICE int flat_head() const { return VALUE_DIM != HEAD_DIM ? unit.batch : unit.batch * units.kv_heads + unit.kv_head; }
  DEVICE int part_columns() const { return VALUE_DIM != HEAD_DIM ? VALUE_DIM : round_up(shape.head_dim, 4); }  // with padding

  // The number of a row's partial result at a place.
  DEVICE long long part_at(int place, int row) const {
    return (static_cast<long long>(flat_head()) * room.places + place) * units.all_rows + first_row + row;
  }

  DEVICE void store_part_statistics(long long at, float m, float l) const {
    store_global(partial_m + at, m);
    store_global(partial_l + at, l);
  }

  DEVICE void store_part(long long at, const Part& x) const {
    lanes_meet();
    if (lane_id() == 0) store_part_statistics(at, x.m, x.l);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int column = 128 * turn + 4 * lane_id();
      if (column < part_columns()) store_global(partial + at * part_columns() + column, x.o[turn]);
    }
  }

  DEVICE void store_lse(int head, int query, float m, float l) const {
    store_global(lse + lse_at(units, shape, unit, head, query), (m + log2_approx(l)) * LN2);
  }

  // Counts this warp: its partial results of a node are written. Is it the last one for the node's parent? Then the other
  // warps' results are there. `warp` is its number among those that merge.
  DEVICE bool last_of_siblings(const Level& level, int warp) const {
    const long long counter = static_cast<long long>(flat_head()) * room.counters + level.counter_of_parent();
    const Keys siblings = level.siblings();
    bool last = false;
    warp_barrier();  // this warp's partial results are written
    if (lane_id() == 0)
      last = last_to_arrive(arrivals + (counter * units.row_tiles + unit.row_tile) * WARPS + warp, siblings.last - siblings.first);
    if (!any_lane(last)) return false;
    warp_barrier();  // those of the others are there
    return true;
  }
};
