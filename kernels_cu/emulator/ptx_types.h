// The types of PTX, and how bits go from one to another.
#pragma once
#include "emu_hide_names.h"

#include <cstdint>
#include <type_traits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "small_floats.h"

extern "C" unsigned long long emu_ptx_nanoseconds();

namespace emu_ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using b128 = unsigned __int128;
using pred = bool;
using f32 = float;
using f64 = double;
using f16 = half;
using bf16 = nv_bfloat16;
using f16x2 = half2;
using bf16x2 = nv_bfloat162;
template <class T> struct Two { T x, y; };
using f32x2 = Two<float>;
using u16x2 = Two<u16>;
using s16x2 = Two<s16>;

// What modifiers say, as bits.
enum : unsigned { rn = 0, rz = 1, rm = 2, rp = 3, rna = 4, rounding = 7, integral = 8 };
enum : unsigned { rni = integral | rn, rzi = integral | rz, rmi = integral | rm, rpi = integral | rp };
enum : unsigned { ftz = 16, sat = 32, satfinite = 64, relu = 128, NaN = 256, abs = 512, xorsign = 1024 };

// The bits of x as a T, cut off or filled up with zeros. Integers become integers, and floats become floats.
template <class T, class X>
__forceinline__ T as(const X& x) {
  if constexpr (std::is_same_v<T, X>) return x;
  else if constexpr (std::is_same_v<T, bool>) return x != 0;
  else if constexpr (std::is_floating_point_v<T> && std::is_floating_point_v<X>) return static_cast<T>(x);
  else if constexpr (std::is_integral_v<T> && std::is_integral_v<X>) return static_cast<T>(x);
  else {
    T to{};
    __builtin_memcpy(static_cast<void*>(&to), static_cast<const void*>(&x), sizeof(T) < sizeof(X) ? sizeof(T) : sizeof(X));
    return to;
  }
}

// A value goes to a register. A narrow one is extended, by its sign if it has one.
template <class D, class V>
__forceinline__ void set(D& to, const V& value) { to = as<D>(value); }

struct Sink {
  template <class V> void operator=(const V&) const {}
};
__forceinline__ Sink sink() { return {}; }
template <class V>
__forceinline__ void set(Sink, const V&) {}

// Operands of the asm statement: into a register and out of it.
template <class T, class X>
__forceinline__ T in(X x) {
  if constexpr (std::is_pointer_v<X>) return static_cast<T>(reinterpret_cast<std::uintptr_t>(x));
  else if constexpr (std::is_null_pointer_v<X>) return T{};
  else if constexpr (std::is_enum_v<X>) return as<T>(static_cast<std::underlying_type_t<X>>(x));
  else return as<T>(x);
}
template <class D, class V>
__forceinline__ void out(D&& to, const V& value) {
  using To = std::remove_cv_t<std::remove_reference_t<D>>;
  if constexpr (std::is_pointer_v<To>) to = reinterpret_cast<To>(static_cast<std::uintptr_t>(value));
  else if constexpr (std::is_enum_v<To>) to = static_cast<To>(as<std::underlying_type_t<To>>(value));
  else to = as<To>(value);
}
template <class T>
__forceinline__ T poison() {
  T value;
  __builtin_memset(static_cast<void*>(&value), 0xff, sizeof value);
  return value;
}
// An operand by reference: a variable itself, or a copy of anything else.
template <class T, class X>
__forceinline__ X& referred(X& x) { return x; }
template <class T, class X>
__forceinline__ T referred(const X&& x) { return in<T>(x); }

__forceinline__ u64 address(u64 x) { return x; }
template <class T>
__forceinline__ u64 address(T* x) { return reinterpret_cast<u64>(x); }

__forceinline__ unsigned linear_thread() {
  const uint3 at = emu_thread_index(), size = emu_block_dim();
  return at.x + size.x * (at.y + size.y * at.z);
}
__forceinline__ unsigned lane() { return linear_thread() % 32; }
__forceinline__ unsigned warp() { return linear_thread() / 32; }
__forceinline__ unsigned warps() {
  const uint3 size = emu_block_dim();
  return (size.x * size.y * size.z + 31) / 32;
}

template <class T> constexpr bool is_pair = false;
template <> inline constexpr bool is_pair<f16x2> = true;
template <> inline constexpr bool is_pair<bf16x2> = true;
template <class T> inline constexpr bool is_pair<Two<T>> = true;

}  // namespace emu_ptx

#include "emu_show_names.h"
