// How units are dealt out where requests differ in length. Their K and V lie in pages (PAGED) or one behind the other (RAGGED).
//
// The grid doesn't know how long requests are. So a block goes through the lengths, 32 requests at a time. Each lane has one
// request. A prefix sum over their units says to which request the block's next unit belongs.
//
// The block takes the units in phases. In the first phase come the runs that other runs follow. Then come the last runs of the row
// tiles. Last runs may be short. Where runs are long, the longest last runs come first: 32 requests are sorted, and more requests
// have a phase for each of CLASSES lengths.
//
// Blocks take units to and fro: the block that has the first unit of a round has the last unit of the next round. So blocks have
// equally much to do. Nothing else depends on the lengths of other requests.
#pragma once

#include "divisor.cuh"
#include "page_loader.cuh"

constexpr int CLASSES = 4;
constexpr int PHASE = 1 << 28;  // requests of a phase are numbered from a multiple of it

// The length of a request, of `requests`. In offsets (RAGGED) it is where the request's keys begin. In those from the second one on it
// is where they end.
DEVICE int length_of(const int* lengths, int request, int requests) {
  lanes_meet();
  return request < requests ? load_global<int>(lengths + request) : 0;
}

// As without pages (plain_units.cuh), and the keys of its request. A warp that walks over units also keeps where it is. `number`
// counts from the first unit of 32 requests, and the next unit is `step` further. Of these 32 a lane has one request: its number
// and phase, its keys, and how many units come before the next request's.
struct Unit {
  int row_tile, run, kv_head, batch, keys, number, step, own_place, own_keys, before_next;
#if RAGGED
  int first_key, own_first;  // where the unit's keys begin in K and V, and those of this lane's request
#else
  static constexpr int first_key = 0;  // in its pages
#endif
};

// The sequences of a ragged batch as requests. All have the same number of queries. So a request is a batch in q and out, too.
DEVICE Shape requests_of(const Shape& ragged) {
  Shape requests = ragged;
  requests.batch = ragged.sequences, requests.len_q = ragged.len_q / ragged.sequences, requests.len_kv = ragged.longest;
  return requests;
}
DEVICE Tensor by_request(const Tensor& queries, const Shape& requests) {
  Tensor x = queries;
  x.batch = requests.len_q * x.row;
  return x;
}

// All units: first the runs that others follow, then the last ones. Units that share keys follow one another. A block takes one of
// each gridDim.x units.
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

  DEVICE Unit before_first() const {
    Unit unit = {};
    unit.step = 2 * blockIdx.x + 1, unit.number = blockIdx.x - unit.step, unit.own_place = -32;
    return unit;
  }
  DEVICE bool next(Unit& unit) const {
    unit.number += unit.step, unit.step = 2 * gridDim.x - unit.step;
    find(unit);
    return unit.batch < batches;
  }
  // The problem that the unit's request is alone.
  DEVICE Shape alone(const Unit& unit) const { return alone_with(unit.keys); }
  DEVICE int runs_of(const Unit& unit) const { return ::most_runs(alone(unit), group); }
  // Those of the longest request that there is room for.
  DEVICE int most_runs() const { return ::most_runs(batch, group); }

 private:
  DEVICE Shape alone_with(int keys) const {
    Shape own = batch;
    own.len_kv = keys;
    return own;
  }

  DEVICE int phases() const { return RUN > 1 && batches > 32 ? 1 + CLASSES : 2; }
  DEVICE bool are_last(int place) const { return place >= PHASE; }  // runs of their row tiles
  DEVICE int request_at(int place) const { return place % PHASE; }
  // Behind 32 requests come the next ones, or the next phase.
  DEVICE int behind(int place) const {
    const int next = place / 32 * 32 + 32;
    return request_at(next) < batches ? next : place / PHASE * PHASE + PHASE;
  }

  static DEVICE int keys_of_last_run(int keys) { return keys > 0 ? (keys - 1) % (RUN * CHUNK_KEYS) + 1 : 0; }
  // Is this a phase for last runs of `keys` keys?
  DEVICE bool belongs(int keys, int place) const {
    const int shorter = (RUN * CHUNK_KEYS - keys_of_last_run(keys)) / (RUN * CHUNK_KEYS / CLASSES);
    return phases() == 2 || min(shorter, CLASSES - 1) == place / PHASE - 1;
  }

  DEVICE void look_at(Unit& unit, int first) const {
    unit.own_place = first + lane_id();
#if RAGGED
    const int request = request_at(unit.own_place);
    unit.own_first = length_of(lengths, request, batches);
    const int own_keys = length_of(lengths + 1, request, batches) - unit.own_first;
#else
    const int own_keys = length_of(lengths, request_at(unit.own_place), batches);
#endif
    unit.own_keys = min(max(own_keys, 0), batch.len_kv);  // there is no room for more
    if (RUN > 1 && are_last(first) && any_lane(belongs(unit.own_keys, first))) sort(unit);
    const int runs = are_last(first) ? belongs(unit.own_keys, first) : ::most_runs(alone_with(unit.own_keys), group) - 1;
    unit.before_next = request_at(unit.own_place) < batches ? runs * kv_heads * row_tiles : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = shuffle(unit.before_next, lane_id() - step);
      if (lane_id() >= step) unit.before_next += before;
    }
  }

  // By how many keys the last runs have, the most first: Batcher's bitonic network (1968).
  DEVICE void sort(Unit& unit) const {
    int own = keys_of_last_run(unit.own_keys) * 32 + lane_id();
#pragma unroll 1
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll 1
      for (int apart = size / 2; apart > 0; apart /= 2) {
        const int other = shuffle(own, lane_id() ^ apart);
        own = ((lane_id() & apart) == 0) == ((lane_id() & size & 31) == 0) ? max(own, other) : min(own, other);
      }
    unit.own_place = shuffle(unit.own_place, own % 32), unit.own_keys = shuffle(unit.own_keys, own % 32);
#if RAGGED
    unit.own_first = shuffle(unit.own_first, own % 32);
#endif
  }

  // n / runs: the number of heads with all runs before run n. Each lane tries a number of heads.
  DEVICE int heads_in(int n, int runs) const {
    int heads = 0;
#pragma unroll 1
    for (int tried = 1 + lane_id(); tried - lane_id() < kv_heads; tried += 32)
      heads += count_bits(ballot(tried < kv_heads && tried * runs <= n));
    return heads;
  }

  DEVICE void find(Unit& unit) const {
#pragma unroll 1
    for (int next = behind(unit.own_place); unit.number >= shuffle(unit.before_next, 31) && next < phases() * PHASE; next = behind(next)) {
      unit.number -= shuffle(unit.before_next, 31);
      look_at(unit, next);
    }
    const unsigned here = ballot(unit.number < unit.before_next);
    unit.batch = batches;
    if (here == 0) return;  // there are no more
    const int lane = count_bits(~here & (here - 1)), before = shuffle(unit.before_next, max(lane - 1, 0));
    const int rest = unit.number - (lane > 0 ? before : 0), runs_before = rest / row_tiles;
    const int place = shuffle(unit.own_place, lane);
    unit.batch = request_at(place), unit.keys = shuffle(unit.own_keys, lane);
#if RAGGED
    unit.first_key = shuffle(unit.own_first, lane);
#endif
    unit.row_tile = rest - runs_before * row_tiles;
    const int last_run = runs_of(unit) - 1, runs = are_last(place) ? 1 : last_run;
    unit.kv_head = heads_in(runs_before, runs), unit.run = are_last(place) ? last_run : runs_before - unit.kv_head * runs;
  }
};
