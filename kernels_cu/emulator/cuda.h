// CUDA C++ for a host compiler: keywords, built-in variables and types, and the functions that every kernel has. It is
// included before the kernel's own text.
#pragma once
#include "emu_hide_names.h"

#include <math.h>
#include <stdlib.h>

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include "driver_types.h"
#include "primitives.h"

// Between preprocessor and compiler the source is split into its declarations. Until then the keywords stay words.
#ifndef EMU_SCAN
#include "keywords.h"
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __restrict__ __restrict
#define __builtin_assume(condition) ((void)0)
#define __CUDACC__ 1
#define __NVCC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 8
#define CUDA_VERSION 12080
#define CUDART_VERSION 12080

// The built-in variables are in keywords.h.
constexpr int warpSize = 32;

using uchar = unsigned char;
using uint = unsigned;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// Vector types. Vectors of 8 and 16 bytes move in one piece, as on a GPU. So they count as one access.
namespace emulator {
// Spelled out by size: g++ drops may_alias where vector_size depends on a template's parameter.
template <std::size_t BYTES> struct Piece;
template <> struct Piece<4> { typedef unsigned type __attribute__((may_alias)); };
template <> struct Piece<8> { typedef unsigned type __attribute__((vector_size(8), may_alias)); };
template <> struct Piece<16> { typedef unsigned type __attribute__((vector_size(16), may_alias)); };

template <std::size_t BYTES>
inline void move(void* to, const void* from) {
  using Whole = typename Piece<BYTES>::type;
  *static_cast<Whole*>(to) = *static_cast<const Whole*>(from);
}
}  // namespace emulator

// g++ copies them in one piece as they are (build.py keeps it from splitting them). So they stay trivial, and a union may hold
// one. clang would copy their parts.
#if defined(__clang__)
#define EMU_MOVES(NAME)                                                    \
  NAME() = default;                                                        \
  NAME(const NAME& other) { emulator::move<sizeof(NAME)>(this, &other); }  \
  NAME& operator=(const NAME& other) {                                     \
    emulator::move<sizeof(NAME)>(this, &other);                            \
    return *this;                                                          \
  }
#else
#define EMU_MOVES(NAME) NAME() = default;
#endif
#define EMU_VECTORS(T, NAME, MOVES2, MOVES4)                                            \
  struct NAME##1 { T x; };                                                              \
  struct alignas(2 * sizeof(T)) NAME##2 {                                               \
    T x, y;                                                                             \
    constexpr NAME##2(T x, T y = {}) : x(x), y(y) {}                                                 \
    MOVES2(NAME##2)                                                                     \
  };                                                                                    \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) NAME##4 {                     \
    T x, y, z, w;                                                                       \
    constexpr NAME##4(T x, T y = {}, T z = {}, T w = {}) : x(x), y(y), z(z), w(w) {}                           \
    MOVES4(NAME##4)                                                                     \
  };                                                                                    \
  inline NAME##1 make_##NAME##1(T x) { return {x}; }                                    \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                            \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMU_PLAIN(NAME) NAME() = default;

EMU_VECTORS(char, char, EMU_PLAIN, EMU_PLAIN)
EMU_VECTORS(unsigned char, uchar, EMU_PLAIN, EMU_PLAIN)
EMU_VECTORS(short, short, EMU_PLAIN, EMU_MOVES)
EMU_VECTORS(unsigned short, ushort, EMU_PLAIN, EMU_MOVES)
EMU_VECTORS(int, int, EMU_MOVES, EMU_MOVES)
EMU_VECTORS(unsigned, uint, EMU_MOVES, EMU_MOVES)
EMU_VECTORS(float, float, EMU_MOVES, EMU_MOVES)
EMU_VECTORS(long long, longlong, EMU_MOVES, EMU_PLAIN)
EMU_VECTORS(unsigned long long, ulonglong, EMU_MOVES, EMU_PLAIN)
EMU_VECTORS(double, double, EMU_MOVES, EMU_PLAIN)
#define EMU_THREE(T, NAME)  \
  struct NAME { T x, y, z; }; \
  inline NAME make_##NAME(T x, T y, T z) { return {x, y, z}; }
EMU_THREE(char, char3)
EMU_THREE(unsigned char, uchar3)
EMU_THREE(short, short3)
EMU_THREE(unsigned short, ushort3)
EMU_THREE(int, int3)
EMU_THREE(float, float3)
EMU_THREE(double, double3)
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

#include "intrinsics.h"

// Memory.
#define EMU_LOAD(NAME) template <class T> __forceinline__ T NAME(const T* address) { return *address; }
#define EMU_STORE(NAME) template <class T> __forceinline__ void NAME(T* address, std::common_type_t<T> value) { *address = value; }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldcv)
EMU_LOAD(__ldlu)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwb)
EMU_STORE(__stwt)

// With a constant size they become plain accesses, which the instrumentation reports. With another size they report their
// accesses by a call.
__forceinline__ void* emu_memcpy(void* to, const void* from, std::size_t bytes) {
  return __builtin_constant_p(bytes) && bytes <= 16 ? __builtin_memcpy(to, from, bytes) : __tsan_memcpy(to, from, bytes);
}
__forceinline__ void* emu_memmove(void* to, const void* from, std::size_t bytes) { return __tsan_memmove(to, from, bytes); }
__forceinline__ void* emu_memset(void* to, int value, std::size_t bytes) { return __tsan_memset(to, value, bytes); }
namespace std { using ::emu_memcpy; using ::emu_memmove; using ::emu_memset; }  // also where it is std::memcpy
#define __cvta_generic_to_shared(pointer) (static_cast<std::size_t>(emu_shared_address(pointer)))
inline std::size_t __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<std::size_t>(pointer); }
inline void cudaGridDependencySynchronize() {}  // launches run one after the other
inline void cudaTriggerProgrammaticLaunchCompletion() {}
__forceinline__ void __threadfence() { emu_fence(true); }
__forceinline__ void __threadfence_block() { emu_fence(false); }
__forceinline__ void __threadfence_system() { emu_fence(true); }
inline void __nanosleep(unsigned) {}
inline long long clock64() { return 0; }
inline void __trap() { emu_trap(); }

// Collectives.
#define __syncthreads() emu_syncthreads()
#define __syncthreads_count(predicate) emu_syncthreads_count(predicate)
#define __syncthreads_or(predicate) (emu_syncthreads_count(predicate) != 0)
#define __syncthreads_and(predicate) (emu_syncthreads_count(!(predicate)) == 0)
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { emu_syncwarp(mask); }
__forceinline__ unsigned __activemask() { return emu_active_mask(); }
__forceinline__ int __any_sync(unsigned mask, int x) { return static_cast<int>(emu_vote(mask, x != 0, EMU_ANY)); }
__forceinline__ int __all_sync(unsigned mask, int x) { return static_cast<int>(emu_vote(mask, x != 0, EMU_ALL)); }
__forceinline__ unsigned __ballot_sync(unsigned mask, int x) { return emu_vote(mask, x != 0, EMU_BALLOT); }
template <class T>
__forceinline__ unsigned __match_any_sync(unsigned mask, T x) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return emu_vote(mask, bits, EMU_MATCH);
}
template <class T>
__forceinline__ unsigned __match_all_sync(unsigned mask, T x, int* all) {
  *all = __match_any_sync(mask, x) == mask;
  return *all ? mask : 0;
}
__forceinline__ unsigned __reduce_add_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_ADD); }
__forceinline__ int __reduce_add_sync(unsigned mask, int x) { return static_cast<int>(emu_reduce(mask, x, EMU_ADD)); }
__forceinline__ int __reduce_min_sync(unsigned mask, int x) { return static_cast<int>(emu_reduce(mask, x, EMU_MIN)); }
__forceinline__ int __reduce_max_sync(unsigned mask, int x) { return static_cast<int>(emu_reduce(mask, x, EMU_MAX)); }
__forceinline__ unsigned __reduce_min_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_UMIN); }
__forceinline__ unsigned __reduce_max_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_UMAX); }
__forceinline__ unsigned __reduce_and_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_AND); }
__forceinline__ unsigned __reduce_or_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_OR); }
__forceinline__ unsigned __reduce_xor_sync(unsigned mask, unsigned x) { return emu_reduce(mask, x, EMU_EXCLUSIVE_OR); }

#define EMU_SHUFFLE(NAME, KIND)                                            \
  template <class T>                                                       \
  __forceinline__ T NAME(unsigned mask, T x, int lane, int width = 32) {   \
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");          \
    unsigned long long bits = 0;                                           \
    std::memcpy(&bits, &x, sizeof x);                                      \
    bits = emu_shuffle(mask, bits, sizeof x > 4 ? 2 : 1, lane, width, KIND); \
    std::memcpy(static_cast<void*>(&x), &bits, sizeof x);                  \
    return x;                                                              \
  }
EMU_SHUFFLE(__shfl_sync, EMU_INDEX)
EMU_SHUFFLE(__shfl_up_sync, EMU_UP)
EMU_SHUFFLE(__shfl_down_sync, EMU_DOWN)
EMU_SHUFFLE(__shfl_xor_sync, EMU_XOR)

// Atomics are atomic between blocks too, which run on several threads of the operating system.
namespace emulator {
template <class T, class F>
__forceinline__ T exchange(T* address, F new_value) {
  using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>>;
  auto* bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
  do {
    const T value = new_value(emu_bits<T>(old));
    next = emu_bits<Bits>(value);
  } while (!__atomic_compare_exchange_n(bits, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return emu_bits<T>(old);
}

template <class T, class F>
__forceinline__ T atomic(T* address, F new_value) {
  return emu_atomic(address, sizeof(T)) ? exchange(address, new_value) : T{};
}

inline float add(float* a, float x) { return exchange(a, [=](float old) { return old + x; }); }
}  // namespace emulator

template <class T> __forceinline__ T atomicAdd(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return static_cast<T>(old + x); }); }
template <class T> __forceinline__ T atomicSub(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return static_cast<T>(old - x); }); }
template <class T> __forceinline__ T atomicMax(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old < x ? x : old; }); }
template <class T> __forceinline__ T atomicMin(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return x < old ? x : old; }); }
template <class T> __forceinline__ T atomicExch(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T) { return x; }); }
template <class T> __forceinline__ T atomicAnd(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old & x; }); }
template <class T> __forceinline__ T atomicOr(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old | x; }); }
template <class T> __forceinline__ T atomicXor(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old ^ x; }); }
template <class T> __forceinline__ T atomicInc(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old >= x ? T{0} : old + 1; }); }
template <class T> __forceinline__ T atomicDec(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old == 0 || old > x ? x : old - 1; }); }
template <class T> __forceinline__ T atomicCAS(T* a, std::common_type_t<T> compare, std::common_type_t<T> x) {
  emu_compare(a);
  return emulator::atomic(a, [=](T old) { return old == compare ? x : old; });
}
// One instruction adds a vector of floats. But each part is atomic by itself (CUDA C++ Programming Guide, atomicAdd).
inline float2 atomicAdd(float2* a, float2 x) {
  if (!emu_atomic(a, sizeof x)) return {};
  return {emulator::add(&a->x, x.x), emulator::add(&a->y, x.y)};
}
inline float4 atomicAdd(float4* a, float4 x) {
  if (!emu_atomic(a, sizeof x)) return {};
  return {emulator::add(&a->x, x.x), emulator::add(&a->y, x.y), emulator::add(&a->z, x.z), emulator::add(&a->w, x.w)};
}
#define EMU_SCOPES(NAME)                                                                                          \
  template <class... T> __forceinline__ auto NAME##_block(T... x) -> decltype(NAME(x...)) { return NAME(x...); }  \
  template <class... T> __forceinline__ auto NAME##_system(T... x) -> decltype(NAME(x...)) { return NAME(x...); }
EMU_SCOPES(atomicAdd)
EMU_SCOPES(atomicSub)
EMU_SCOPES(atomicMax)
EMU_SCOPES(atomicMin)
EMU_SCOPES(atomicExch)
EMU_SCOPES(atomicAnd)
EMU_SCOPES(atomicOr)
EMU_SCOPES(atomicXor)
EMU_SCOPES(atomicInc)
EMU_SCOPES(atomicDec)
EMU_SCOPES(atomicCAS)

#define memcpy emu_memcpy
#define memmove emu_memmove
#define memset emu_memset
#undef assert
#define assert(condition) ((condition) ? void() : emu_assert(#condition))

// What the doors of keywords.h call.
namespace emulator {
template <class T>
struct Argument {
  alignas(T) unsigned char bytes[sizeof(T)];
  explicit Argument(std::size_t index) { emu_argument(bytes, static_cast<int>(index), sizeof(T)); }
  T& value() { return reinterpret_cast<T&>(bytes); }
};
template <class... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), std::index_sequence<I...>) {
  kernel(Argument<std::remove_const_t<Parameters>>(I).value()...);
}
template <class... Parameters>
void call(void (*kernel)(Parameters...)) {
  call(kernel, std::index_sequence_for<Parameters...>{});
}

// A parameter's type as two letters and a size. The first letter is how it is passed (p pointer, c pointer to const, v
// value), the second what it is or points to (i or u integer, f float, s something else). Size 0: not known here.
template <class T, class = void> struct Size { static constexpr unsigned value = 0; };
template <class T> struct Size<T, std::enable_if_t<(!std::is_void_v<T> && sizeof(T) > 0)>> { static constexpr unsigned value = sizeof(T); };
template <class T>
void describe_one(char* letters, unsigned* size) {
  using Element = std::remove_pointer_t<T>;
  letters[0] = !std::is_pointer_v<T> ? 'v' : std::is_const_v<Element> ? 'c' : 'p';
  letters[1] = std::is_integral_v<Element> ? (std::is_signed_v<Element> ? 'i' : 'u') : std::is_floating_point_v<Element> ? 'f' : 's';
  *size = Size<Element>::value;
}
template <class... Parameters>
int describe(void (*)(Parameters...), char* letters, unsigned* sizes, int most) {
  int n = 0;
  ((n < most ? describe_one<Parameters>(letters + 2 * n, sizes + n) : void(), ++n), ...);
  return n;
}

// The members of a kernel's structs: of which parameter, the name (`inner.x`), its type as a parameter's, its size, and where in
// the parameter it lies. `EMU_FIELD` makes `EmuField_x`, which says it of any struct that has an `x`; source.py names all that may be.
using Say = void (*)(int parameter, const char* name, const char* letters, unsigned size, unsigned long offset);
template <class T> struct Unrestricted { using type = T; };
template <class T> struct Unrestricted<T* __restrict__> { using type = T*; };
template <class T> void say_fields(Say say, int parameter, const char* before, unsigned long from);
template <class T, class Member>
void say_field(Say say, int parameter, const char* name, unsigned long from, const T* object, const char* at) {
  const unsigned long offset = at - reinterpret_cast<const char*>(object);
  if (offset >= sizeof(T)) return;  // static
  char letters[3] = {};
  unsigned size;
  describe_one<typename Unrestricted<std::remove_cv_t<Member>>::type>(letters, &size);
  if (letters[0] == 'v') size = sizeof(Member);
  say(parameter, name, letters, size, from + offset);
  char before[256];
  if (std::is_class_v<Member> && std::snprintf(before, sizeof before, "%s.", name) < static_cast<int>(sizeof before)) {
    if constexpr (std::is_class_v<Member>) say_fields<Member>(say, parameter, before, from + offset);
  }
}
template <class... Parameters>
void say_all_fields(void (*)(Parameters...), Say say) {
  int i = 0;
  const auto one = [&](auto* parameter) {
    using T = std::remove_pointer_t<decltype(parameter)>;
    if constexpr (std::is_class_v<T>) say_fields<T>(say, i, "", 0);
    ++i;
  };
  (one(static_cast<std::remove_cv_t<std::remove_reference_t<Parameters>>*>(nullptr)), ...);
}
}  // namespace emulator

#include "emu_show_names.h"
