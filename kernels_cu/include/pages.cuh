// K and V in pages (PAGED): how the units of requests of any lengths are dealt out.
//
// The grid doesn't know how long requests are. So a block goes through the lengths, 32 requests at a time: each lane has one, and
// a prefix sum of their units says whose the next unit is. Nothing else depends on the lengths of other requests.
#pragma once

#include "divisor.cuh"
#include "page_loader.cuh"

// The length of a request, of `requests`. It is in the kernel, because reads are marked there.
DEVICE int length_of(const int* lengths, int request, int requests);

// As without pages, and of its request the keys and the runs of a row tile. A warp that walks over units also keeps where it is:
// `number` counts from the first unit of the 32 requests from `first` on. Of one of these each lane has the keys, and how many
// units come before the next request's.
struct Unit { int row_tile, run, kv_head, batch, keys, runs, number, first, own_keys, before_next; };

// All units, in the order of requests. Those that share keys follow one another, and a block takes every gridDim.x-th.
struct Units {
  const Shape& batch;
  const int* lengths;
  Divisor group;
  int all_rows;
  Divisor row_tiles;
  int kv_heads, batches;

  DEVICE Units(const Shape& shape, const int* lengths)
      : batch(shape), lengths(lengths), group(shape.heads / shape.kv_heads), all_rows(shape.len_q * group),
        row_tiles(ceil_div(all_rows, BR)), kv_heads(ONE_KV_HEAD ? 1 : shape.kv_heads), batches(shape.batch) {}

  DEVICE Unit first() const {
    Unit unit = {};
    unit.number = blockIdx.x;
    look_at(unit, 0);
    find(unit);
    return unit;
  }
  DEVICE bool has(const Unit& unit) const { return unit.batch < batches; }
  DEVICE void move_on(Unit& unit) const {
    unit.number += gridDim.x;
    find(unit);
  }
  // The problem that the unit's request is alone.
  DEVICE Shape alone(const Unit& unit) const { return alone_with(unit.keys); }
  DEVICE int runs_of(const Unit& unit) const { return unit.runs; }
  // Of the longest request that the block table has room for.
  DEVICE int most_runs() const { return ::most_runs(batch, group); }

 private:
  DEVICE Shape alone_with(int keys) const {
    Shape own = batch;
    own.len_kv = keys;
    return own;
  }

  DEVICE void look_at(Unit& unit, int first) const {
    const int request = first + lane_id();
    unit.first = first;
    unit.own_keys = min(max(length_of(lengths, request, batches), 0), batch.len_kv);  // the table has no more
    unit.before_next = request < batches ? ::most_runs(alone_with(unit.own_keys), group) * kv_heads * row_tiles : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = shuffle(unit.before_next, lane_id() - step);
      if (lane_id() >= step) unit.before_next += before;
    }
  }

  // n / runs, the heads whose runs all come before run n. Each lane tries a number of heads.
  DEVICE int heads_in(int n, int runs) const {
    int heads = 0;
#pragma unroll 1
    for (int tried = 1 + lane_id(); tried - lane_id() < kv_heads; tried += 32)
      heads += count_bits(ballot(tried < kv_heads && tried * runs <= n));
    return heads;
  }

  DEVICE void find(Unit& unit) const {
#pragma unroll 1
    while (unit.number >= shuffle(unit.before_next, 31) && unit.first + 32 < batches) {
      unit.number -= shuffle(unit.before_next, 31);
      look_at(unit, unit.first + 32);
    }
    const unsigned here = ballot(unit.number < unit.before_next);
    unit.batch = batches;
    if (here == 0) return;  // there are no more
    const int lane = count_bits(~here & (here - 1)), before = shuffle(unit.before_next, max(lane - 1, 0));
    const int rest = unit.number - (lane > 0 ? before : 0), runs_before = rest / row_tiles;
    unit.batch = unit.first + lane, unit.keys = shuffle(unit.own_keys, lane);
    unit.runs = ::most_runs(alone_with(unit.keys), group);
    unit.row_tile = rest - runs_before * row_tiles;
    unit.kv_head = heads_in(runs_before, unit.runs), unit.run = runs_before - unit.kv_head * unit.runs;
  }
};
