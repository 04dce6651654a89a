// float16, bfloat16 and the 8-bit formats as bits. Conversions to float are exact. Those from float round to the
// nearest, ties to even.
#pragma once
#include "emu_hide_names.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of_f16(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // the exponent of these bits is 112 too small for a float; the product is exact, for subnormals too
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t f16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7fffu);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 2^16 or more
  if (magnitude < 0x38800000u) {  // subnormal: after adding 1/2, the last place of the sum is 2^-24
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float float_of_bf16(std::uint16_t b) { return float_of_bits(std::uint32_t{b} << 16); }

inline std::uint16_t bf16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// A double as a float that rounds further as the double would ("round to odd"). Bits that are lost set the last place,
// so there is no false tie.
inline float odd_float(double value) {
  const float nearest = static_cast<float>(value);
  if (nearest == value || !std::isfinite(nearest)) return nearest;
  const float inward = std::fabs(nearest) > std::fabs(value) ? std::nextafter(nearest, 0.f) : nearest;
  return float_of_bits(bits_of_float(inward) | 1u);
}

// x * y + z as a float that rounds further as the exact sum would. The sum's error sets the last place. The product
// must be exact.
inline float odd_fma(float x, float y, float z) {
  const double product = double{x} * y, sum = product + z, part = sum - product;
  const double error = (product - (sum - part)) + (z - part);
  if (error == 0 || !std::isfinite(sum)) return odd_float(sum);
  return odd_float(std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL));
}

// An 8-bit format of the Open Compute Project: e5m2 has infinities, e4m3 has none and a single NaN.
template <int EXPONENT, int MANTISSA>
struct Float8 {
  static constexpr bool INFINITIES = EXPONENT == 5;
  static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, LEAST = 1 - BIAS;  // the least normal number is 2^LEAST
  static constexpr unsigned GREATEST = INFINITIES ? 0x7bu : 0x7eu;

  static float value(std::uint8_t bits) {
    const int exponent = bits >> MANTISSA & ((1 << EXPONENT) - 1), mantissa = bits & ((1 << MANTISSA) - 1);
    float magnitude = exponent ? std::ldexp(1.f + std::ldexp(static_cast<float>(mantissa), -MANTISSA), exponent - BIAS)
                               : std::ldexp(static_cast<float>(mantissa), LEAST - MANTISSA);
    if ((bits & 0x7fu) > GREATEST) magnitude = INFINITIES && !mantissa ? INFINITY : NAN;
    return bits & 0x80u ? -magnitude : magnitude;
  }

  static std::uint8_t bits(float value, bool saturate) {
    if (std::isnan(value)) return 0x7f;
    const unsigned sign = std::signbit(value) ? 0x80u : 0u, beyond = saturate ? GREATEST : GREATEST + 1;
    const float magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return static_cast<std::uint8_t>(sign | beyond);
    const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), LEAST) : LEAST;
    // in units of the last place; a carry increments the exponent
    const auto places = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, MANTISSA - exponent)));
    const unsigned bits = (static_cast<unsigned>(exponent - LEAST) << MANTISSA) + places;
    return static_cast<std::uint8_t>(sign | (bits > GREATEST ? beyond : bits));
  }
};

}  // namespace emulator

#include "emu_show_names.h"
