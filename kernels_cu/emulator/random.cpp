// XORWOW's steps ahead. A step of its 160 bits is linear over bits: a matrix, of which column i is what bit i becomes.
#include <array>
#include <cstdint>

namespace emulator {
namespace {

using Bits = std::array<unsigned, 5>;
using Matrix = std::array<Bits, 160>;

Bits times(const Matrix& matrix, const Bits& x) {
  Bits y{};
  for (int i = 0; i < 160; ++i)
    if (x[i / 32] >> i % 32 & 1)
      for (int k = 0; k < 5; ++k) y[k] ^= matrix[i][k];
  return y;
}

Bits step(const Bits& v) {
  const unsigned t = v[0] ^ v[0] >> 2;
  return {v[1], v[2], v[3], v[4], (v[4] ^ v[4] << 4) ^ (t ^ t << 1)};
}

// Of 2^0, 2^1, ... steps. A subsequence is 2^67 of them, and there are 2^64 subsequences.
const std::array<Matrix, 131>& matrices() {
  static const auto* const made = [] {
    auto* all = new std::array<Matrix, 131>;
    for (int i = 0; i < 160; ++i) {
      Bits one{};
      one[i / 32] = 1u << i % 32;
      (*all)[0][i] = step(one);
    }
    for (int n = 1; n < 131; ++n)
      for (int i = 0; i < 160; ++i) (*all)[n][i] = times((*all)[n - 1], (*all)[n - 1][i]);
    return all;
  }();
  return *made;
}

}  // namespace

extern "C" void emu_xorwow_on(unsigned* v, unsigned long by, int first) {
  Bits bits{v[0], v[1], v[2], v[3], v[4]};
  for (int i = 0; by; ++i, by >>= 1)
    if (by & 1) bits = times(matrices()[first + i], bits);
  for (int k = 0; k < 5; ++k) v[k] = bits[k];
}

}  // namespace emulator
