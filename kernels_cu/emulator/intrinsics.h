// Functions for mathematics and bits that every kernel has. The approximate ones are as exact here as the host's library.
#pragma once
#include "emu_hide_names.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "primitives.h"

template <class A, class B>
constexpr __forceinline__ std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr __forceinline__ std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a < b ? b : a; }
inline long long llmin(long long a, long long b) { return a < b ? a : b; }
inline long long llmax(long long a, long long b) { return a < b ? b : a; }
inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return a < b ? b : a; }
inline float __expf(float x) { return emulator::count_exp(), std::exp(x); }
inline float __exp10f(float x) { return emulator::count_exp(), std::pow(10.f, x); }
inline float exp10f(float x) { return __exp10f(x); }
inline float emu_exp2f(float x) { return emulator::count_exp(), std::exp2(x); }
namespace std { using ::__expf; using ::emu_exp2f; }  // also where it is std::expf
#define expf __expf  // counted
#define exp2f emu_exp2f
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __tanhf(float x) { return std::tanh(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
inline float sinpif(float x) { return std::sin(3.14159265358979f * std::remainder(x, 2.f)); }
inline float cospif(float x) { return std::cos(3.14159265358979f * std::remainder(x, 2.f)); }
inline float normcdff(float x) { return 0.5f * std::erfc(-0.70710678f * x); }
inline float rcbrtf(float x) { return 1 / std::cbrt(x); }
inline float rhypotf(float x, float y) { return 1 / std::hypot(x, y); }
inline float norm3df(float x, float y, float z) { return std::hypot(x, y, z); }
inline float fdividef(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frsqrt_rn(float x) { return 1 / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.f), 1.f); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }

// To integers: values outside the range become its nearest end, and NaN becomes 0, as on a GPU.
namespace emulator {
template <class T>
inline T integer(double x) {
  if (std::isnan(x)) return 0;
  if (x <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(x);
}
}  // namespace emulator
#define EMU_CONVERSIONS(T, NAME)                                                                          \
  inline T __float2##NAME##_rn(float x) { return emulator::integer<T>(std::nearbyint(x)); }               \
  inline T __float2##NAME##_rz(float x) { return emulator::integer<T>(std::trunc(x)); }                   \
  inline T __float2##NAME##_rd(float x) { return emulator::integer<T>(std::floor(x)); }                   \
  inline T __float2##NAME##_ru(float x) { return emulator::integer<T>(std::ceil(x)); }                    \
  inline T __double2##NAME##_rn(double x) { return emulator::integer<T>(std::nearbyint(x)); }             \
  inline T __double2##NAME##_rz(double x) { return emulator::integer<T>(std::trunc(x)); }                 \
  inline float __##NAME##2float_rn(T x) { return static_cast<float>(x); }                                 \
  inline double __##NAME##2double_rn(T x) { return static_cast<double>(x); }
EMU_CONVERSIONS(int, int)
EMU_CONVERSIONS(unsigned, uint)
EMU_CONVERSIONS(long long, ll)
EMU_CONVERSIONS(unsigned long long, ull)
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// Bits.
template <class To, class From>
inline To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
inline unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 | __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = (static_cast<unsigned long long>(y) << 32) | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 15u;
    unsigned byte = both >> (8 * (pick & 7)) & 255u;
    if (pick & 8) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((static_cast<unsigned long long>(high) << 32) | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32) | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) * y) >> 32);
}
inline int __mulhi(int x, int y) { return static_cast<int>((static_cast<long long>(x) * y) >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}
inline int __mul24(int x, int y) { return (x << 8 >> 8) * (y << 8 >> 8); }
inline unsigned __umul24(unsigned x, unsigned y) { return (x & 0xffffffu) * (y & 0xffffffu); }
inline unsigned __sad(int x, int y, unsigned z) { return z + static_cast<unsigned>(x > y ? x - y : y - x); }
inline unsigned __usad(unsigned x, unsigned y, unsigned z) { return z + (x > y ? x - y : y - x); }
template <class T>
inline T emu_dp4a(T x, T y, T z) {
  using Byte = std::conditional_t<std::is_signed_v<T>, signed char, unsigned char>;
  for (int i = 0; i < 32; i += 8) z += static_cast<T>(static_cast<Byte>(x >> i)) * static_cast<T>(static_cast<Byte>(y >> i));
  return z;
}
inline int __dp4a(int x, int y, int z) { return emu_dp4a(x, y, z); }
inline unsigned __dp4a(unsigned x, unsigned y, unsigned z) { return emu_dp4a(x, y, z); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }

#include "simd_words.h"
#include "textures.h"

#include "emu_show_names.h"
