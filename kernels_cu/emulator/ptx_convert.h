// cvt, and moves between registers and their parts.
#pragma once
#include "emu_hide_names.h"

#include "cuda_fp8.h"
#include "ptx_scalar.h"

namespace emu_ptx {

struct tf32 { u32 bits; };
// Pairs of small floats, the first operand in the upper half.
using E4m3 = emulator::Float8<4, 3>;
using E5m2 = emulator::Float8<5, 2>;
template <class Format> struct Eights { u16 bits; };
using e4m3x2 = Eights<E4m3>;
using e5m2x2 = Eights<E5m2>;
struct e2m1x2 { u8 bits; };
struct ue8m0x2 { u16 bits; };
template <class T> constexpr bool is_eights = false;
template <class F> inline constexpr bool is_eights<Eights<F>> = true;

// Floats of 4 and 6 bits, which have no infinities and no NaN: a sign, EXPONENT bits and MANTISSA bits.
template <int EXPONENT, int MANTISSA>
struct Mini {
  static constexpr u32 SIGN = 1u << (EXPONENT + MANTISSA), BIAS = (1u << (EXPONENT - 1)) - 1;
  static float value(u32 bits) {
    const u32 exponent = (bits & (SIGN - 1)) >> MANTISSA, mantissa = bits & ((1u << MANTISSA) - 1);
    const float size = exponent ? std::ldexp(static_cast<float>(mantissa | 1u << MANTISSA), static_cast<int>(exponent) - static_cast<int>(BIAS) - MANTISSA)
                                : std::ldexp(static_cast<float>(mantissa), 1 - static_cast<int>(BIAS) - MANTISSA);
    return bits & SIGN ? -size : size;
  }
  // Rounded to the nearest. Between two, the even one is taken.
  static u32 bits(float x) {
    if (std::isnan(x)) return SIGN - 1;
    const float size = std::fabs(x);
    u32 best = 0;
    for (u32 i = 1; i < SIGN; ++i) {
      const float before = std::fabs(size - value(best)), now = std::fabs(size - value(i));
      if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return best | (std::signbit(x) ? SIGN : 0u);
  }
};
using E2m1 = Mini<2, 1>;
struct e2m3x2 { u16 bits; };
struct e3m2x2 { u16 bits; };
template <class T> struct SixBits;
template <> struct SixBits<e2m3x2> { using type = Mini<2, 3>; };
template <> struct SixBits<e3m2x2> { using type = Mini<3, 2>; };
template <class T> constexpr bool is_six = std::is_same_v<T, e2m3x2> || std::is_same_v<T, e3m2x2>;

// A float as an integral one.
template <class F>
__forceinline__ F integral_of(F x, unsigned mode) {
  switch (mode & rounding) {
    case rz: return std::trunc(x);
    case rm: return std::floor(x);
    case rp: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

// A number as a float of 32 bits, rounded as `mode` says.
template <class A>
__forceinline__ float narrowed(A x, unsigned mode) {
  float near = static_cast<float>(x);
  const long double exact = static_cast<long double>(x), value = near;
  const unsigned how = mode & rounding;
  if (how == rn || value == exact || std::isnan(near)) return near;
  const bool too_large = value > exact;
  if (how == rm ? too_large : how == rp ? !too_large : (std::fabs(value) > std::fabs(exact)))
    near = std::nextafter(near, too_large ? -HUGE_VALF : HUGE_VALF);
  return near;
}

template <class Small>
__forceinline__ Small small_of(float x, unsigned mode) {
  const unsigned how = mode & rounding;
  if (mode & relu && !std::isnan(x)) x = x > 0 ? x : 0.f;
  Small to = how == rn ? Small(x)
                       : Small::rounded(x, how == rp, how == rm);
  if (mode & satfinite && !std::isnan(x) && std::isinf(static_cast<float>(to))) to.bits -= 1;
  if (mode & sat) to = Small(std::fmin(std::fmax(static_cast<float>(to), 0.f), 1.f));
  return to;
}
__forceinline__ tf32 tf32_of(float x, unsigned mode) {
  if (mode & relu && !std::isnan(x)) x = x > 0 ? x : 0.f;
  u32 bits = emulator::bits_of_float(x);
  if (std::isnan(x)) return {0x7fffffffu};
  if (std::isinf(x)) return {bits};
  const unsigned how = mode & rounding;
  if (how == rna) bits += 0x1000u;
  else if (how == rn) bits += 0xfffu + (bits >> 13 & 1u);
  return {bits & 0xffffe000u};
}
template <class Format>
__forceinline__ u8 eight_of(float x, unsigned mode) {
  if (mode & relu && !std::isnan(x)) x = x > 0 ? x : 0.f;
  return Format::bits(x, true);
}

template <class F>
__forceinline__ float value_of_eight(Eights<F> s, int shift) { return F::value(static_cast<u8>(s.bits >> shift)); }
template <class S>
__forceinline__ float eight(S s, int shift) { return value_of_eight(s, shift); }
template <class D, unsigned mode> struct Packer;
template <class F, unsigned mode>
struct Packer<Eights<F>, mode> {
  static Eights<F> of(float high, float low) {
    return {static_cast<u16>(eight_of<F>(high, mode) << 8 | eight_of<F>(low, mode))};
  }
};
template <class D, unsigned mode>
__forceinline__ D packed(float high, float low) { return Packer<D, mode>::of(high, low); }

template <class D, class S, unsigned mode, class A>
__forceinline__ D convert(const A& given) {
  const S s = as<S>(given);
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    return mode & sat ? saturated<D>(s) : static_cast<D>(s);
  } else if constexpr (std::is_integral_v<D>) {  // outside the range this is its nearest end
    const double x = static_cast<double>(flushed(s, mode));
    return emulator::integer<D>(integral_of(x, mode));
  } else if constexpr (std::is_same_v<D, tf32>) {
    return tf32_of(s, mode);
  } else if constexpr (std::is_same_v<D, double>) {
    const double x = std::is_integral_v<S> ? static_cast<double>(s) : static_cast<double>(flushed(s, mode));
    return finished(mode & integral ? integral_of(x, mode) : x, mode & ~ftz);
  } else if constexpr (std::is_same_v<D, float>) {
    if constexpr (std::is_integral_v<S>) return finished(narrowed(s, mode), mode);
    else {
      const auto x = flushed(static_cast<std::conditional_t<std::is_same_v<S, double>, double, float>>(s), mode);
      return finished(mode & integral ? static_cast<float>(integral_of(x, mode)) : narrowed(x, mode), mode);
    }
  } else if constexpr (std::is_same_v<D, f16x2> && is_eights<S>) {
    (void)s;
    return f16x2{f16(eight<S>(s, 0)), f16(eight<S>(s, 8))};
  } else if constexpr (std::is_same_v<D, bf16x2> && is_eights<S>) {
    return bf16x2{bf16(eight<S>(s, 0)), bf16(eight<S>(s, 8))};
  } else if constexpr (std::is_same_v<S, e2m1x2>) {
    using One = typename Pair<D>::One;
    return D{One(E2m1::value(s.bits & 15u)), One(E2m1::value(s.bits >> 4))};
  } else if constexpr (is_six<S>) {
    using One = typename Pair<D>::One;
    using Six = typename SixBits<S>::type;
    return D{One(Six::value(s.bits & 63u)), One(Six::value(s.bits >> 8 & 63u))};
  } else if constexpr (std::is_same_v<S, ue8m0x2>) {
    auto value = [](u32 bits) { return bits == 255 ? NAN : std::ldexp(1.f, static_cast<int>(bits) - 127); };
    return D{bf16(value(s.bits & 255u)), bf16(value(s.bits >> 8u))};
  } else if constexpr (is_eights<D>) {
    return packed<D, mode>(static_cast<float>(s.y), static_cast<float>(s.x));
  } else if constexpr (std::is_same_v<D, e2m1x2>) {
    return {static_cast<u8>(E2m1::bits(s.x) | E2m1::bits(s.y) << 4)};
  } else {  // to float16 or bfloat16
    if constexpr (std::is_integral_v<S> || std::is_same_v<S, double>) return small_of<D>(emulator::odd_float(static_cast<double>(s)), mode);
    else return small_of<D>(mode & integral ? integral_of(static_cast<float>(s), mode) : static_cast<float>(s), mode);
  }
}

// d = {a, b}: a goes to the upper half.
template <class D, class S, unsigned mode, class A, class B>
__forceinline__ D convert_pair(const A& first, const B& second) {
  const float high = as<S>(first), low = as<S>(second);
  if constexpr (is_pair<D>) {
    using One = typename Pair<D>::One;
    return D{small_of<One>(low, mode), small_of<One>(high, mode)};
  } else if constexpr (std::is_same_v<D, e2m1x2>) {
    return {static_cast<u8>(E2m1::bits(low) | E2m1::bits(high) << 4)};
  } else if constexpr (is_six<D>) {
    using Six = typename SixBits<D>::type;
    return {static_cast<u16>(Six::bits(high) << 8 | Six::bits(low))};
  } else if constexpr (std::is_same_v<D, ue8m0x2>) {
    auto bits = [](float x) -> u32 {
      if (std::isnan(x)) return 255;
      const float size = std::fabs(x);
      int exponent = size > 0 ? std::ilogb(size) : -127;
      if (size > 0 && (mode & rounding) == rp && std::ldexp(1.f, exponent) < size) ++exponent;
      exponent = exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
      return static_cast<u32>(exponent + 127);
    };
    return {static_cast<u16>(bits(high) << 8 | bits(low))};
  } else {
    return packed<D, mode>(high, low);
  }
}
template <class T, class A, class B>
__forceinline__ u32 cvt_pack(const A& a, const B& b, u32 c = 0) {
  constexpr int BITS = 8 * sizeof(T);
  const u32 low = static_cast<std::make_unsigned_t<T>>(saturated<T>(as<s32>(b)));
  const u32 high = static_cast<std::make_unsigned_t<T>>(saturated<T>(as<s32>(a)));
  return (BITS == 16 ? 0u : c << 16) | high << BITS | low;
}

// Registers and their parts, the first in the lowest bits.
template <class T, class... Parts>
__forceinline__ T pack(const Parts&... parts) {
  constexpr int BITS = 8 * sizeof(T) / sizeof...(Parts);
  using Whole = std::conditional_t<sizeof(T) == 16, b128, u64>;
  using Part = std::conditional_t<BITS == 64, u64, std::conditional_t<BITS == 32, u32, std::conditional_t<BITS == 16, u16, u8>>>;
  Whole whole = 0;
  int at = 0;
  ((whole |= static_cast<Whole>(as<Part>(parts)) << at, at += BITS), ...);
  return as<T>(whole);
}
template <class T, class S, class... Parts>
__forceinline__ void unpack(const S& from, Parts&&... parts) {
  constexpr int BITS = 8 * sizeof(T) / sizeof...(Parts);
  using Whole = std::conditional_t<sizeof(T) == 16, b128, u64>;
  using Part = std::conditional_t<BITS == 64, u64, std::conditional_t<BITS == 32, u32, std::conditional_t<BITS == 16, u16, u8>>>;
  const Whole whole = as<Whole>(as<T>(from));
  int at = 0;
  ((set(parts, static_cast<Part>(whole >> at)), at += BITS), ...);
}

}  // namespace emu_ptx

#include "emu_show_names.h"
