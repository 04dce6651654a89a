// __half and __nv_bfloat16, single and in pairs, with the operators and intrinsics of both. They compute in float and round once.
// The functions are friends, so that their arguments convert as they do with nvcc.
#pragma once
#include "emu_hide_names.h"

#include "cuda.h"
#include "floats.h"

namespace emulator {

struct F16 {
  static float value(std::uint16_t bits) { return float_of_f16(bits); }
  static std::uint16_t bits(float value) { return f16_of_float(value); }
};
struct BF16 {
  static float value(std::uint16_t bits) { return float_of_bf16(bits); }
  static std::uint16_t bits(float value) { return bf16_of_float(value); }
};

template <class Format>
struct RawFloat { unsigned short x; };

template <class Format>
struct SmallFloat {
  std::uint16_t bits;

  SmallFloat() = default;
  SmallFloat(float x) : bits(Format::bits(x)) {}
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  SmallFloat(T x) : bits(Format::bits(odd_float(static_cast<double>(x)))) {}
  SmallFloat(RawFloat<Format> raw) : bits(raw.x) {}
  operator float() const { return Format::value(bits); }
  operator RawFloat<Format>() const { return {bits}; }
  static SmallFloat of_bits(std::uint16_t bits) { return RawFloat<Format>{bits}; }

  // Rounding towards zero, up or down: the nearest value, or its neighbour on the side that is asked for.
  static SmallFloat rounded(float x, bool up, bool down) {
    const SmallFloat near = x;
    const float value = near;
    const bool away = x < 0 ? (value < x && !down) || (value > x && down) : (value > x && !up) || (value < x && up);
    if (!away) return near;
    const bool grow = x < 0 ? down : up;
    return of_bits(static_cast<std::uint16_t>(grow ? near.bits + 1 : near.bits - 1));
  }

#define EMU_OPERATOR(OP, NAME)                                                                             \
  friend SmallFloat operator OP(SmallFloat a, SmallFloat b) { return float{a} OP float{b}; }               \
  friend SmallFloat& operator OP##=(SmallFloat& a, SmallFloat b) { return a = a OP b; }                    \
  friend SmallFloat NAME(SmallFloat a, SmallFloat b) { return a OP b; }                                    \
  friend SmallFloat NAME##_rn(SmallFloat a, SmallFloat b) { return a OP b; }                               \
  friend SmallFloat NAME##_sat(SmallFloat a, SmallFloat b) { return __saturatef(a OP b); }
  EMU_OPERATOR(+, __hadd)
  EMU_OPERATOR(-, __hsub)
  EMU_OPERATOR(*, __hmul)
  EMU_OPERATOR(/, __hdiv)
#undef EMU_OPERATOR
  static bool ordered(SmallFloat a, SmallFloat b) { return !std::isunordered(float{a}, float{b}); }
#define EMU_COMPARISON(OP, NAME)                                                          \
  friend bool operator OP(SmallFloat a, SmallFloat b) { return float{a} OP float{b}; }    \
  friend bool NAME(SmallFloat a, SmallFloat b) { return ordered(a, b) && float{a} OP float{b}; } \
  friend bool NAME##u(SmallFloat a, SmallFloat b) { return !ordered(a, b) || float{a} OP float{b}; }
  EMU_COMPARISON(==, __heq)
  EMU_COMPARISON(!=, __hne)
  EMU_COMPARISON(<, __hlt)
  EMU_COMPARISON(<=, __hle)
  EMU_COMPARISON(>, __hgt)
  EMU_COMPARISON(>=, __hge)
#undef EMU_COMPARISON
  friend SmallFloat operator+(SmallFloat a) { return a; }
  friend SmallFloat operator-(SmallFloat a) { return of_bits(a.bits ^ 0x8000u); }
  friend SmallFloat& operator++(SmallFloat& a) { return a += SmallFloat(1.f); }
  friend SmallFloat& operator--(SmallFloat& a) { return a -= SmallFloat(1.f); }
  friend SmallFloat __hneg(SmallFloat a) { return -a; }
  friend SmallFloat __habs(SmallFloat a) { return of_bits(a.bits & 0x7fffu); }
  friend SmallFloat __hfma(SmallFloat a, SmallFloat b, SmallFloat c) { return odd_fma(a, b, c); }
  friend SmallFloat __hfma_relu(SmallFloat a, SmallFloat b, SmallFloat c) { return std::fmax(odd_fma(a, b, c), 0.f); }
  friend SmallFloat __hfma_sat(SmallFloat a, SmallFloat b, SmallFloat c) { return __saturatef(odd_fma(a, b, c)); }
  friend SmallFloat __hmax(SmallFloat a, SmallFloat b) { return std::fmax(float{a}, float{b}); }
  friend SmallFloat __hmin(SmallFloat a, SmallFloat b) { return std::fmin(float{a}, float{b}); }
  friend SmallFloat __hmax_nan(SmallFloat a, SmallFloat b) { return __hisnan(a) || __hisnan(b) ? NAN : __hmax(a, b); }
  friend SmallFloat __hmin_nan(SmallFloat a, SmallFloat b) { return __hisnan(a) || __hisnan(b) ? NAN : __hmin(a, b); }
  friend bool __hisnan(SmallFloat a) { return std::isnan(float{a}); }
  friend int __hisinf(SmallFloat a) { return std::isinf(float{a}) ? (float{a} < 0 ? -1 : 1) : 0; }
#define EMU_FUNCTION(NAME, EXPRESSION) \
  friend SmallFloat NAME(SmallFloat a) { const float x = a; return static_cast<float>(EXPRESSION); }
  EMU_FUNCTION(hexp, (count_exp(), std::exp(x)))
  EMU_FUNCTION(hexp2, (count_exp(), std::exp2(x)))
  EMU_FUNCTION(hexp10, (count_exp(), std::pow(10.f, x)))
  EMU_FUNCTION(hlog, std::log(x))
  EMU_FUNCTION(hlog2, std::log2(x))
  EMU_FUNCTION(hlog10, std::log10(x))
  EMU_FUNCTION(hsqrt, std::sqrt(x))
  EMU_FUNCTION(hrsqrt, 1 / std::sqrt(x))
  EMU_FUNCTION(hrcp, 1 / x)
  EMU_FUNCTION(hsin, std::sin(x))
  EMU_FUNCTION(hcos, std::cos(x))
  EMU_FUNCTION(htanh, std::tanh(x))
  EMU_FUNCTION(hfloor, std::floor(x))
  EMU_FUNCTION(hceil, std::ceil(x))
  EMU_FUNCTION(htrunc, std::trunc(x))
  EMU_FUNCTION(hrint, std::nearbyint(x))
#undef EMU_FUNCTION
};

// A pair: 4 bytes, which move in one piece.
template <class Format>
struct alignas(4) SmallPair {
  using One = SmallFloat<Format>;
  One x, y;
  SmallPair(One x, One y) : x(x), y(y) {}
  EMU_MOVES(SmallPair)

#define EMU_PAIRWISE(NAME2, NAME) \
  friend SmallPair NAME2(SmallPair a, SmallPair b) { return {NAME(a.x, b.x), NAME(a.y, b.y)}; }
#define EMU_PAIR_OPERATOR(OP, NAME2, NAME)                                                     \
  EMU_PAIRWISE(operator OP, NAME)                                                              \
  EMU_PAIRWISE(NAME2, NAME)                                                                    \
  EMU_PAIRWISE(NAME2##_rn, NAME##_rn)                                                          \
  EMU_PAIRWISE(NAME2##_sat, NAME##_sat)                                                        \
  friend SmallPair& operator OP##=(SmallPair& a, const SmallPair& b) { return a = a OP b; }
  EMU_PAIR_OPERATOR(+, __hadd2, __hadd)
  EMU_PAIR_OPERATOR(-, __hsub2, __hsub)
  EMU_PAIR_OPERATOR(*, __hmul2, __hmul)
  EMU_PAIR_OPERATOR(/, __h2div, __hdiv)
  EMU_PAIRWISE(__hmax2, __hmax)
  EMU_PAIRWISE(__hmin2, __hmin)
  EMU_PAIRWISE(__hmax2_nan, __hmax_nan)
  EMU_PAIRWISE(__hmin2_nan, __hmin_nan)
#undef EMU_PAIR_OPERATOR
#undef EMU_PAIRWISE
#define EMU_PAIR_COMPARISON(OP, ONE, NAME)                                                                       \
  friend bool operator OP(SmallPair a, SmallPair b) { return a.x OP b.x && a.y OP b.y; }                         \
  friend bool __hb##NAME(SmallPair a, SmallPair b) { return ONE(a.x, b.x) && ONE(a.y, b.y); }                    \
  friend SmallPair __h##NAME(SmallPair a, SmallPair b) { return {One(ONE(a.x, b.x)), One(ONE(a.y, b.y))}; }      \
  friend unsigned __h##NAME##_mask(SmallPair a, SmallPair b) {                                                   \
    return (ONE(a.x, b.x) ? 0xffffu : 0u) | (ONE(a.y, b.y) ? 0xffff0000u : 0u);                                  \
  }
  EMU_PAIR_COMPARISON(==, __heq, eq2)
  EMU_PAIR_COMPARISON(!=, __hne, ne2)
  EMU_PAIR_COMPARISON(<, __hlt, lt2)
  EMU_PAIR_COMPARISON(<=, __hle, le2)
  EMU_PAIR_COMPARISON(>, __hgt, gt2)
  EMU_PAIR_COMPARISON(>=, __hge, ge2)
#undef EMU_PAIR_COMPARISON
#define EMU_PAIR_FUNCTION(NAME2, NAME) \
  friend SmallPair NAME2(SmallPair a) { return {NAME(a.x), NAME(a.y)}; }
  EMU_PAIR_FUNCTION(operator-, -)
  EMU_PAIR_FUNCTION(__hneg2, __hneg)
  EMU_PAIR_FUNCTION(__habs2, __habs)
  EMU_PAIR_FUNCTION(__hisnan2, __hisnan)
  EMU_PAIR_FUNCTION(h2exp, hexp)
  EMU_PAIR_FUNCTION(h2exp2, hexp2)
  EMU_PAIR_FUNCTION(h2exp10, hexp10)
  EMU_PAIR_FUNCTION(h2log, hlog)
  EMU_PAIR_FUNCTION(h2log2, hlog2)
  EMU_PAIR_FUNCTION(h2log10, hlog10)
  EMU_PAIR_FUNCTION(h2sqrt, hsqrt)
  EMU_PAIR_FUNCTION(h2rsqrt, hrsqrt)
  EMU_PAIR_FUNCTION(h2rcp, hrcp)
  EMU_PAIR_FUNCTION(h2sin, hsin)
  EMU_PAIR_FUNCTION(h2cos, hcos)
  EMU_PAIR_FUNCTION(h2tanh, htanh)
  EMU_PAIR_FUNCTION(h2floor, hfloor)
  EMU_PAIR_FUNCTION(h2ceil, hceil)
  EMU_PAIR_FUNCTION(h2trunc, htrunc)
  EMU_PAIR_FUNCTION(h2rint, hrint)
#undef EMU_PAIR_FUNCTION
#define EMU_PAIR_FMA(NAME2, NAME) \
  friend SmallPair NAME2(SmallPair a, SmallPair b, SmallPair c) { return {NAME(a.x, b.x, c.x), NAME(a.y, b.y, c.y)}; }
  EMU_PAIR_FMA(__hfma2, __hfma)
  EMU_PAIR_FMA(__hfma2_relu, __hfma_relu)
  EMU_PAIR_FMA(__hfma2_sat, __hfma_sat)
#undef EMU_PAIR_FMA
  friend float __low2float(SmallPair a) { return a.x; }
  friend float __high2float(SmallPair a) { return a.y; }
  friend SmallPair __lowhigh2highlow(SmallPair a) { return {a.y, a.x}; }
};

}  // namespace emulator

// The functions by their qualified names, as ::hexp: friends are found by their arguments only.
#define EMU_QUALIFIED(NAME) \
  template <class Format> emulator::SmallFloat<Format> NAME(emulator::SmallFloat<Format> x) { return NAME(x); }
EMU_QUALIFIED(hexp)
EMU_QUALIFIED(hexp2)
EMU_QUALIFIED(hlog)
EMU_QUALIFIED(hlog2)
EMU_QUALIFIED(hsqrt)
EMU_QUALIFIED(hrsqrt)
EMU_QUALIFIED(hrcp)
EMU_QUALIFIED(hsin)
EMU_QUALIFIED(hcos)
EMU_QUALIFIED(htanh)
EMU_QUALIFIED(hfloor)
EMU_QUALIFIED(hceil)
EMU_QUALIFIED(htrunc)
EMU_QUALIFIED(hrint)
#undef EMU_QUALIFIED

// The functions with the type in their names: NAME is `half` or `bfloat16`.
#define EMU_SMALL_NAMES(ONE, PAIR, NAME)                                                                    \
  inline ONE __float2##NAME(float x) { return x; }                                                          \
  inline ONE __float2##NAME##_rn(float x) { return x; }                                                     \
  inline ONE __float2##NAME##_rz(float x) { return ONE::rounded(x, false, false); }                         \
  inline ONE __float2##NAME##_ru(float x) { return ONE::rounded(x, true, false); }                          \
  inline ONE __float2##NAME##_rd(float x) { return ONE::rounded(x, false, true); }                          \
  inline ONE __double2##NAME(double x) { return x; }                                                        \
  inline ONE __int2##NAME##_rn(int x) { return x; }                                                         \
  inline ONE __uint2##NAME##_rn(unsigned x) { return x; }                                                   \
  inline ONE __short2##NAME##_rn(short x) { return x; }                                                     \
  inline ONE __ushort2##NAME##_rn(unsigned short x) { return x; }                                           \
  inline float __##NAME##2float(ONE x) { return x; }                                                        \
  inline int __##NAME##2int_rn(ONE x) { return __float2int_rn(x); }                                         \
  inline int __##NAME##2int_rz(ONE x) { return __float2int_rz(x); }                                         \
  inline int __##NAME##2int_rd(ONE x) { return __float2int_rd(x); }                                         \
  inline int __##NAME##2int_ru(ONE x) { return __float2int_ru(x); }                                         \
  inline unsigned __##NAME##2uint_rn(ONE x) { return __float2uint_rn(x); }                                  \
  inline unsigned __##NAME##2uint_rz(ONE x) { return __float2uint_rz(x); }                                  \
  inline unsigned short __##NAME##_as_ushort(ONE x) { return x.bits; }                                      \
  inline short __##NAME##_as_short(ONE x) { return static_cast<short>(x.bits); }                            \
  inline ONE __ushort_as_##NAME(unsigned short x) { return ONE::of_bits(x); }                               \
  inline ONE __short_as_##NAME(short x) { return ONE::of_bits(static_cast<unsigned short>(x)); }            \
  inline PAIR __float2##NAME##2_rn(float x) { return {x, x}; }                                              \
  inline PAIR __floats2##NAME##2_rn(float x, float y) { return {x, y}; }                                    \
  inline PAIR __float22##NAME##2_rn(float2 x) { return {x.x, x.y}; }                                        \
  inline float2 __##NAME##22float2(PAIR x) { return {x.x, x.y}; }                                           \
  inline PAIR __##NAME##2##NAME##2(ONE x) { return {x, x}; }                                                \
  inline PAIR __halves2##NAME##2(ONE x, ONE y) { return {x, y}; }                                           \
  inline ONE __low2##NAME(PAIR x) { return x.x; }                                                           \
  inline ONE __high2##NAME(PAIR x) { return x.y; }                                                          \
  inline PAIR __low2##NAME##2(PAIR x) { return {x.x, x.x}; }                                                \
  inline PAIR __high2##NAME##2(PAIR x) { return {x.y, x.y}; }                                               \
  inline PAIR __lows2##NAME##2(PAIR x, PAIR y) { return {x.x, y.x}; }                                       \
  inline PAIR __highs2##NAME##2(PAIR x, PAIR y) { return {x.y, y.y}; }

#include "emu_show_names.h"
