// How the blocks of flash2_backward.cu add to dQ if the call asks for no order: each block adds as soon as it can. Then the
// last bits of dQ may differ from run to run.
#pragma once

#include "flash2_backward.cuh"

struct Turns {
  static constexpr bool ORDERED = false, BACKWARDS = false;

  // A block's keys follow from its number.
  DEVICE OwnKeys draw(int, const SequenceRows& place, const Shape& batches) const {
    return {place.alone(batches), place.first_row, place.q};
  }

  // They are computed once more behind the loop. That is cheaper than registers.
  DEVICE int first_key(const Place& again, int kept) const { return RAGGED ? kept : again.key_tile * BC; }

  DEVICE void wait(const Shape&, long long, int, int) const {}
  DEVICE void pass_on(const Shape&, long long, int) const {}
};
