// PTX of one thread: arithmetic, comparisons, logic, conversions.
#pragma once
#include "emu_hide_names.h"

#include "ptx_types.h"

// One operation, rounded as `mode` says: + - * / , fma (f) and square root (r).
extern "C" float emu_ptx_rounded32(char operation, unsigned mode, float a, float b, float c);
extern "C" double emu_ptx_rounded64(char operation, unsigned mode, double a, double b, double c);

namespace emu_ptx {

// A subnormal number as zero.
template <class T>
__forceinline__ T flushed(T x, unsigned mode) {
  if constexpr (std::is_same_v<T, float>) {
    if (mode & ftz && std::fabs(x) < 0x1p-126f) return std::copysign(0.f, x);
  }
  return x;
}

// A result as the modifiers change it.
template <class T>
__forceinline__ T finished(T x, unsigned mode) {
  if constexpr (!std::is_integral_v<T>) {
    x = flushed(x, mode);
    if (mode & sat) x = T(std::fmin(std::fmax(static_cast<double>(x), 0.), 1.));
    if (mode & relu) x = static_cast<float>(x) > 0 ? x : static_cast<float>(x) != static_cast<float>(x) ? x : T(0.f);
  }
  return x;
}

__forceinline__ float rounded(char operation, unsigned mode, float a, float b = 0, float c = 0) {
  return emu_ptx_rounded32(operation, mode, a, b, c);
}
__forceinline__ double rounded(char operation, unsigned mode, double a, double b = 0, double c = 0) {
  return emu_ptx_rounded64(operation, mode, a, b, c);
}
template <class T> constexpr bool wide_float = std::is_floating_point_v<T>;

template <class T> T fma_of(T a, T b, T c) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(a * b + c);
  else if constexpr (wide_float<T>) return std::fma(a, b, c);
  else return __hfma(a, b, c);
}

// Elementwise on pairs.
template <class T> struct Pair;
template <class F> struct Pair<emulator::SmallPair<F>> { using One = emulator::SmallFloat<F>; };
template <class E> struct Pair<Two<E>> { using One = E; };

#define EMU_PTX_ONE(NAME, ...)                                                     \
  template <class T, unsigned mode = 0, class A>                                   \
  __forceinline__ T NAME(const A& first) {                                         \
    const T x = as<T>(first);                                                      \
    if constexpr (is_pair<T>) {                                                    \
      using E = typename Pair<T>::One;                                             \
      return T{NAME<E, mode>(x.x), NAME<E, mode>(x.y)};                            \
    } else {                                                                       \
      const T a = flushed(x, mode);                                                \
      return finished<T>(static_cast<T>(__VA_ARGS__), mode);                       \
    }                                                                              \
  }
#define EMU_PTX_TWO(NAME, ...)                                                     \
  template <class T, unsigned mode = 0, class A, class B>                          \
  __forceinline__ T NAME(const A& first, const B& second) {                        \
    const T x = as<T>(first), y = as<T>(second);                                   \
    if constexpr (is_pair<T>) {                                                    \
      using E = typename Pair<T>::One;                                             \
      return T{NAME<E, mode>(x.x, y.x), NAME<E, mode>(x.y, y.y)};                  \
    } else {                                                                       \
      const T a = flushed(x, mode), b = flushed(y, mode);                          \
      return finished<T>(static_cast<T>(__VA_ARGS__), mode);                       \
    }                                                                              \
  }
#define EMU_PTX_THREE(NAME, ...)                                                   \
  template <class T, unsigned mode = 0, class A, class B, class C>                 \
  __forceinline__ T NAME(const A& first, const B& second, const C& third) {        \
    const T x = as<T>(first), y = as<T>(second), z = as<T>(third);                 \
    if constexpr (is_pair<T>) {                                                    \
      using E = typename Pair<T>::One;                                             \
      return T{NAME<E, mode>(x.x, y.x, z.x), NAME<E, mode>(x.y, y.y, z.y)};        \
    } else {                                                                       \
      const T a = flushed(x, mode), b = flushed(y, mode), c = flushed(z, mode);    \
      return finished<T>(static_cast<T>(__VA_ARGS__), mode);                       \
    }                                                                              \
  }

// Where float and double don't round to the nearest, they ask the processor.
template <class T, unsigned mode>
__forceinline__ T arithmetic(char operation, T a, T b, T c = {}) {
  if constexpr (wide_float<T> && (mode & rounding) != 0) return rounded(operation, mode, a, b, c);
  else switch (operation) {
    case '+': return static_cast<T>(a + b);
    case '-': return static_cast<T>(a - b);
    case '*': return static_cast<T>(a * b);
    case '/': return static_cast<T>(a / b);
    default: return fma_of<T>(a, b, c);
  }
}
template <class T>
__forceinline__ T saturated(__int128 x) {
  const __int128 least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  return static_cast<T>(x < least ? least : x > most ? most : x);
}

template <class T, unsigned mode>
__forceinline__ T sum(T a, T b, bool minus) {
  if constexpr (std::is_integral_v<T> && (mode & sat) != 0) return saturated<T>(minus ? __int128{a} - b : __int128{a} + b);
  else return arithmetic<T, mode>(minus ? '-' : '+', a, b);
}
EMU_PTX_TWO(add, sum<T, mode>(a, b, false))
EMU_PTX_TWO(sub, sum<T, mode>(a, b, true))
EMU_PTX_TWO(mul, arithmetic<T, mode>('*', a, b))
EMU_PTX_THREE(fma, arithmetic<T, mode>('f', a, b, c))
EMU_PTX_THREE(mad, arithmetic<T, mode>('f', a, b, c))
EMU_PTX_TWO(divide, arithmetic<T, mode>('/', a, b))
EMU_PTX_TWO(rem, a % b)
EMU_PTX_THREE(sad, c + (a > b ? a - b : b - a))

template <class T>
__forceinline__ T extreme(T a, T b, unsigned mode, bool greater) {
  if constexpr (std::is_integral_v<T>) return (a < b) == greater ? b : a;
  else {
    const double x = static_cast<double>(a), y = static_cast<double>(b);
    const bool negative = mode & xorsign && std::signbit(x) != std::signbit(y);
    const double p = mode & abs ? std::fabs(x) : x, q = mode & abs ? std::fabs(y) : y;
    double result = greater ? std::fmax(p, q) : std::fmin(p, q);
    if (p == 0 && q == 0) result = std::signbit(p) == greater ? q : p;  // -0 is less than +0
    if (mode & NaN && (std::isnan(x) || std::isnan(y))) result = NAN;
    if (std::isnan(result)) return as<T>(static_cast<u64>(sizeof(T) == 8 ? 0x7fffffffffffffffull : 0x7fffffffu >> (sizeof(T) == 2 ? 16 : 0)));
    return T(negative ? -result : result);
  }
}
EMU_PTX_TWO(min, extreme<T>(a, b, mode, false))
EMU_PTX_TWO(max, extreme<T>(a, b, mode, true))

template <class T>
__forceinline__ T without_sign(T a) {
  if constexpr (std::is_integral_v<T>) return a < 0 ? static_cast<T>(0 - a) : a;
  else if constexpr (wide_float<T>) return std::fabs(a);
  else return __habs(a);
}
EMU_PTX_ONE(absolute, without_sign(a))
EMU_PTX_ONE(neg, -a)
EMU_PTX_TWO(copysign, std::copysign(b, a))

// Integers. A shift by more than the width leaves zeros, or signs.
template <class T, class A, class B>
using Wider = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                                 std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, s64, u64>,
                                                    std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;
template <class T, unsigned, class A, class B>
__forceinline__ Wider<T, A, B> mul_wide(const A& a, const B& b) { return static_cast<Wider<T, A, B>>(as<T>(a)) * as<T>(b); }
template <class T, unsigned, class A, class B>
__forceinline__ T mul_hi(const A& a, const B& b) { return static_cast<T>(mul_wide<T, 0>(a, b) >> 8 * sizeof(T)); }
template <class T, unsigned, class A, class B, class C>
__forceinline__ auto mad_wide(const A& a, const B& b, const C& c) { const auto product = mul_wide<T, 0>(a, b); return product + as<std::remove_const_t<decltype(product)>>(c); }
template <class T, unsigned mode, class A, class B, class C>
__forceinline__ T mad_hi(const A& a, const B& b, const C& c) { return sum<T, mode & sat>(mul_hi<T, 0>(a, b), as<T>(c), false); }
template <class T, class A, class B>
__forceinline__ T mul24_lo(const A& a, const B& b) { return static_cast<T>((as<T>(a) << 8 >> 8) * (as<T>(b) << 8 >> 8)); }
template <class T, class A, class B>
__forceinline__ T mul24(const A& a, const B& b) { return mul24_lo<T>(a, b); }
EMU_PTX_TWO(and_, a & b)
EMU_PTX_TWO(or_, a | b)
EMU_PTX_TWO(xor_, a != b && std::is_same_v<T, bool> ? T(1) : static_cast<T>(a ^ b))
template <class T, unsigned = 0, class A>
__forceinline__ T not_(const A& a) {
  if constexpr (std::is_same_v<T, bool>) return !as<bool>(a);
  else return static_cast<T>(~as<T>(a));
}
EMU_PTX_ONE(cnot, a == 0)
template <class T, unsigned = 0, class A, class B>
__forceinline__ T shl(const A& a, const B& b) {
  const u32 by = as<u32>(b);
  return by >= 8 * sizeof(T) ? T(0) : static_cast<T>(as<T>(a) << by);
}
template <class T, unsigned = 0, class A, class B>
__forceinline__ T shr(const A& a, const B& b) {
  const u32 by = as<u32>(b), most = 8 * sizeof(T) - 1;
  const T x = as<T>(a);
  return by > most ? (std::is_signed_v<T> ? static_cast<T>(x >> most) : T(0)) : static_cast<T>(x >> by);
}
EMU_PTX_ONE(brev, sizeof(T) == 8 ? static_cast<T>(__brevll(a)) : static_cast<T>(__brev(static_cast<u32>(a))))
template <class T, unsigned = 0, class A>
__forceinline__ u32 popc(const A& a) { return static_cast<u32>(__builtin_popcountll(as<T>(a))); }
template <class T, unsigned = 0, class A>
__forceinline__ u32 clz(const A& a) {
  const T x = as<T>(a);
  return x ? static_cast<u32>(__builtin_clzll(x)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T);
}
template <class T, class A, class B, class C>
__forceinline__ T bfe(const A& a, const B& b, const C& c) {
  constexpr int WIDTH = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  const U x = as<U>(a);
  const int first = static_cast<int>(as<u32>(b) & 255), count = static_cast<int>(as<u32>(c) & 255);
  U result = 0;
  const int last = first + count - 1 < WIDTH - 1 ? first + count - 1 : WIDTH - 1;
  const bool sign = std::is_signed_v<T> && count && (x >> last & 1);
  for (int i = 0; i < WIDTH; ++i) result |= U(i < count && first + i < WIDTH ? x >> (first + i) & 1 : sign) << i;
  return static_cast<T>(result);
}
template <class T, class A, class B, class C, class D>
__forceinline__ T bfi(const A& a, const B& b, const C& c, const D& d) {
  const T x = as<T>(a);
  T result = as<T>(b);
  const unsigned first = as<u32>(c) & 255, count = as<u32>(d) & 255;
  for (unsigned i = 0; i < count && first + i < 8 * sizeof(T); ++i) {
    result &= ~(T(1) << (first + i));
    result |= (x >> i & 1) << (first + i);
  }
  return result;
}
template <class T, class A>
__forceinline__ u32 bfind(const A& a) {
  using U = std::make_unsigned_t<T>;
  const T x = as<T>(a);
  const U bits = static_cast<U>(x < 0 ? ~x : x);
  return bits ? static_cast<u32>(63 - __builtin_clzll(bits)) : 0xffffffffu;
}
template <class T, class A>
__forceinline__ u32 bfind_shiftamt(const A& a) {
  const u32 at = bfind<T>(a);
  return at == 0xffffffffu ? at : static_cast<u32>(8 * sizeof(T) - 1 - at);
}
template <class T, class A, class B>
__forceinline__ T bmsk_clamp(const A& a, const B& b) {
  const u32 first = as<u32>(a), count = as<u32>(b);
  const u64 ones = count >= 32 ? 0xffffffffull : (1ull << count) - 1;
  return first >= 32 ? 0 : static_cast<T>(ones << first);
}
template <class T, class A, class B, class C, class D>
__forceinline__ T lop3(const A& a, const B& b, const C& c, const D& d) {
  const u32 x = as<u32>(a), y = as<u32>(b), z = as<u32>(c), table = as<u32>(d);
  u32 result = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
  return result;
}
template <class T, class A, class B, class C>
__forceinline__ T prmt(const A& a, const B& b, const C& c) { return __byte_perm(as<u32>(a), as<u32>(b), as<u32>(c)); }
// The other modes of prmt name the bytes by the two low bits of the selector.
#define EMU_PTX_PRMT(NAME, S0, S1, S2, S3)                                                        \
  template <class T, class A, class B, class C>                                                   \
  __forceinline__ T prmt_##NAME(const A& a, const B& b, const C& c) {                             \
    const u32 i = as<u32>(c) & 3;                                                                 \
    return __byte_perm(as<u32>(a), as<u32>(b), (S0) | (S1) << 4 | (S2) << 8 | (S3) << 12);        \
  }
EMU_PTX_PRMT(f4e, i, i + 1, i + 2, i + 3)
EMU_PTX_PRMT(b4e, i, (i + 7) & 7, (i + 6) & 7, (i + 5) & 7)
EMU_PTX_PRMT(rc8, i, i, i, i)
EMU_PTX_PRMT(ecl, i, i > 1 ? i : 1, i > 2 ? i : 2, 3)
EMU_PTX_PRMT(ecr, 0, i < 1 ? i : 1, i < 2 ? i : 2, i)
EMU_PTX_PRMT(rc16, 2 * (i & 1), 2 * (i & 1) + 1, 2 * (i & 1), 2 * (i & 1) + 1)
#define EMU_PTX_SHF(NAME, LIMIT, EXPRESSION)                                                      \
  template <class T, class A, class B, class C>                                                   \
  __forceinline__ T shf_##NAME(const A& a, const B& b, const C& c) {                              \
    const u64 both = static_cast<u64>(as<u32>(b)) << 32 | as<u32>(a);                             \
    const u32 given = as<u32>(c), n = LIMIT;                                                      \
    return static_cast<u32>(EXPRESSION);                                                          \
  }
EMU_PTX_SHF(l_wrap, given & 31, both << n >> 32)
EMU_PTX_SHF(r_wrap, given & 31, both >> n)
EMU_PTX_SHF(l_clamp, given < 32 ? given : 32, both << n >> 32)
EMU_PTX_SHF(r_clamp, given < 32 ? given : 32, both >> n)

template <class A_, class B_, class A, class B, class C>
__forceinline__ s32 dp4a(const A& a, const B& b, const C& c) {
  using X = std::conditional_t<std::is_signed_v<A_>, s8, u8>;
  using Y = std::conditional_t<std::is_signed_v<B_>, s8, u8>;
  s32 result = as<s32>(c);
  for (int i = 0; i < 32; i += 8) result += static_cast<X>(as<u32>(a) >> i) * static_cast<Y>(as<u32>(b) >> i);
  return result;
}
template <class A_, class B_, class A, class B, class C>
__forceinline__ s32 dp2a(const A& a, const B& b, const C& c, int first) {
  using X = std::conditional_t<std::is_signed_v<A_>, s16, u16>;
  using Y = std::conditional_t<std::is_signed_v<B_>, s8, u8>;
  s32 result = as<s32>(c);
  for (int i = 0; i < 2; ++i) result += static_cast<X>(as<u32>(a) >> 16 * i) * static_cast<Y>(as<u32>(b) >> 8 * (first + i));
  return result;
}
template <class A_, class B_, class A, class B, class C>
__forceinline__ s32 dp2a_lo(const A& a, const B& b, const C& c) { return dp2a<A_, B_>(a, b, c, 0); }
template <class A_, class B_, class A, class B, class C>
__forceinline__ s32 dp2a_hi(const A& a, const B& b, const C& c) { return dp2a<A_, B_>(a, b, c, 2); }

// Words of two or four integers.
enum class Simd { vadd, vsub, vabsdiff, vmin, vmax, vavrg };
template <Simd what, int N, class D, class S, bool SATURATE, bool SUM, class A, class B, class C>
__forceinline__ u32 simd(const A& a, const B& b, const C& c) {
  constexpr int BITS = 32 / N;
  using E = std::conditional_t<N == 2, std::conditional_t<std::is_signed_v<S>, s16, u16>, std::conditional_t<std::is_signed_v<S>, s8, u8>>;
  using R = std::conditional_t<N == 2, std::conditional_t<std::is_signed_v<D>, s16, u16>, std::conditional_t<std::is_signed_v<D>, s8, u8>>;
  u32 word = 0, total = as<u32>(c);
  for (int i = 0; i < 32; i += BITS) {
    const int x = static_cast<E>(as<u32>(a) >> i), y = static_cast<E>(as<u32>(b) >> i);
    int z = 0;
    switch (what) {
      case Simd::vadd: z = x + y; break;
      case Simd::vsub: z = x - y; break;
      case Simd::vabsdiff: z = x > y ? x - y : y - x; break;
      case Simd::vmin: z = x < y ? x : y; break;
      case Simd::vmax: z = x < y ? y : x; break;
      case Simd::vavrg: z = (x + y + 1) >> 1; break;
    }
    if (SATURATE) z = saturated<R>(z);
    total += static_cast<u32>(z);
    word |= (static_cast<u32>(z) & (~0u >> (32 - BITS))) << i;
  }
  return SUM ? total : word;
}

// Approximations are as exact as the host's library.
template <class T>
__forceinline__ T small_or(T, double x) { return T(x); }
EMU_PTX_ONE(rcp, (mode & rounding) && wide_float<T> ? static_cast<T>(rounded('/', mode, T(1), a)) : T(T(1) / a))
EMU_PTX_ONE(sqrt, (mode & rounding) && wide_float<T> ? static_cast<T>(rounded('r', mode, a)) : T(std::sqrt(static_cast<std::conditional_t<wide_float<T>, T, float>>(a))))
EMU_PTX_ONE(rsqrt, 1 / std::sqrt(static_cast<std::conditional_t<wide_float<T>, T, float>>(a)))
EMU_PTX_ONE(sin, std::sin(static_cast<std::conditional_t<wide_float<T>, T, float>>(a)))
EMU_PTX_ONE(cos, std::cos(static_cast<std::conditional_t<wide_float<T>, T, float>>(a)))
EMU_PTX_ONE(lg2, std::log2(static_cast<std::conditional_t<wide_float<T>, T, float>>(a)))
EMU_PTX_ONE(tanh, std::tanh(static_cast<std::conditional_t<wide_float<T>, T, float>>(a)))
EMU_PTX_ONE(ex2, (emulator::count_exp(), std::exp2(static_cast<std::conditional_t<wide_float<T>, T, float>>(a))))

// Comparisons
enum class Comparison { eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan };
enum class With { nothing, and_, or_, xor_ };

template <Comparison how, class T>
__forceinline__ bool compared(T a, T b) {
  using C = Comparison;
  const bool unordered = a != a || b != b;
  switch (how) {
    case C::eq: return a == b;
    case C::ne: return !unordered && a != b;
    case C::lt: case C::lo: return a < b;
    case C::le: case C::ls: return a <= b;
    case C::gt: case C::hi: return a > b;
    case C::ge: case C::hs: return a >= b;
    case C::equ: return unordered || a == b;
    case C::neu: return unordered || a != b;
    case C::ltu: return unordered || a < b;
    case C::leu: return unordered || a <= b;
    case C::gtu: return unordered || a > b;
    case C::geu: return unordered || a >= b;
    case C::num: return !unordered;
    case C::nan: return unordered;
  }
  return false;
}
template <With with>
__forceinline__ bool combined(bool x, bool y) {
  return with == With::and_ ? x && y : with == With::or_ ? x || y : with == With::xor_ ? x != y : x;
}
template <class T, Comparison how, unsigned mode, With with = With::nothing, class A, class B>
__forceinline__ auto compare(const A& first, const B& second, bool other = false) {
  const T a = as<T>(first), b = as<T>(second);
  if constexpr (is_pair<T>) return Two<bool>{combined<with>(compared<how>(a.x, b.x), other), combined<with>(compared<how>(a.y, b.y), other)};
  else return combined<with>(compared<how>(flushed(a, mode), flushed(b, mode)), other);
}
// The result of set: ones, or 1.
template <class D>
__forceinline__ D truth_of(bool x) {
  if constexpr (std::is_integral_v<D>) return x ? static_cast<D>(~D(0)) : D(0);
  else return D(x ? 1.f : 0.f);
}
template <class D> __forceinline__ D truth(bool x) { return truth_of<D>(x); }
template <class D>
__forceinline__ D truth(Two<bool> x) {
  if constexpr (is_pair<D>) return D{truth_of<typename Pair<D>::One>(x.x), truth_of<typename Pair<D>::One>(x.y)};
  else return static_cast<D>((x.x ? 0xffffu : 0u) | (x.y ? 0xffff0000u : 0u));
}

}  // namespace emu_ptx

#include "ptx_convert.h"

#include "emu_show_names.h"
