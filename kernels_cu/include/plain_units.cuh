// How the units of a plain batch are dealt out. There all queries have the same number of keys.
#pragma once

#include "mask.cuh"

// What a block computes before it moves on: BR rows of a KV head's queries, and a run of chunks that they see, by its number among
// these.
struct Unit {
  int row_tile, run, kv_head, batch;
  static constexpr int first_key = 0;  // where its keys begin
};

// All units. Units that share keys follow one another, and a block takes every gridDim.x-th. A division is slow. So a
// block steps from one unit to the next.
struct Units {
  const Shape& batch;
  int group, all_rows, row_tiles, runs, kv_heads, batches;
  Unit step;

  DEVICE explicit Units(const Shape& shape)
      : batch(shape), group(shape.heads / shape.kv_heads), all_rows(shape.len_q * group), row_tiles(ceil_div(all_rows, BR)),
        runs(::most_runs(shape, group)), kv_heads(ONE_KV_HEAD ? 1 : shape.kv_heads), batches(shape.batch), step(at(gridDim.x)) {}

  // Where a walk begins. From there next() goes to the block's first unit.
  DEVICE Unit before_first() const {
    const Unit unit = at(blockIdx.x);
    return {unit.row_tile - step.row_tile, unit.run - step.run, unit.kv_head - step.kv_head, unit.batch - step.batch};
  }
  // Goes on to the next unit, and says whether there is one.
  DEVICE bool next(Unit& unit) const {
    unit.row_tile += step.row_tile, unit.run += step.run, unit.kv_head += step.kv_head, unit.batch += step.batch;
    if (unit.row_tile >= row_tiles) unit.row_tile -= row_tiles, ++unit.run;
    if (unit.run >= runs) unit.run -= runs, ++unit.kv_head;
    if (unit.kv_head >= kv_heads) unit.kv_head -= kv_heads, ++unit.batch;
    return unit.batch < batches;
  }
  DEVICE const Shape& alone(const Unit&) const { return batch; }
  DEVICE int runs_of(const Unit&) const { return runs; }
  DEVICE int most_runs() const { return runs; }

 private:
  DEVICE Unit at(unsigned i) const {
    const unsigned rest = i / row_tiles, heads = rest / runs;
    return {static_cast<int>(i - rest * row_tiles), static_cast<int>(rest - heads * runs), static_cast<int>(heads % kv_heads),
            static_cast<int>(heads / kv_heads)};
  }
};
