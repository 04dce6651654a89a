// Division by a number that divides often. A plain division has some 20 instructions, three of them on the unit for exponentials.
#pragma once

#include "types.cuh"

// n / by and n % by, for n from 0 to 2^31 - 1, by a multiplication and a shift (Granlund and Montgomery 1994, figure 4.1). The
// division that finds the factor is done once.
struct Divisor {
  unsigned by, factor, shift;

  DEVICE explicit Divisor(unsigned by) : by(by), shift(32 - leading_zeros(by - 1)) {
    factor = static_cast<unsigned>(((1ull << 32) * ((1ull << shift) - by)) / by + 1);
  }
  DEVICE operator int() const { return by; }
};

DEVICE int operator/(int n, const Divisor& divisor) { return (high_product(divisor.factor, n) + n) >> divisor.shift; }
DEVICE int operator%(int n, const Divisor& divisor) { return n - n / divisor * static_cast<int>(divisor.by); }
