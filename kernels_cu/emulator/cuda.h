// CUDA C++ as a host compiler sees it: keywords, built-in variables and types, the functions that every kernel has.
// Included before the kernel's own text.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "primitives.h"

// Keywords. SRAM is thread-local: a block runs on one thread of the operating system, which runs one block at a time.
#define __host__
#define __device__
#define __constant__
#define __global__ __attribute__((flatten, noinline))  // inlined calls keep their line of the kernel in the debug information
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __restrict__ __restrict
#define __cluster_dims__(...)

// Built-in variables.
#define threadIdx emu_thread_index()
#define blockIdx emu_block_index()
#define blockDim dim3(emu_block_dim())
#define gridDim dim3(emu_grid_dim())
constexpr int warpSize = 32;

using uchar = unsigned char;
using uint = unsigned;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// Vector types. Those of 8 and 16 bytes move as one piece, as on a GPU, so that one access is seen.
namespace emulator {
template <std::size_t BYTES>
inline void move(void* to, const void* from) {
  typedef unsigned Piece __attribute__((vector_size(BYTES), may_alias));
  *static_cast<Piece*>(to) = *static_cast<const Piece*>(from);
}
}  // namespace emulator

#define EMU_MOVES(NAME)                                                    \
  NAME() = default;                                                        \
  NAME(const NAME& other) { emulator::move<sizeof(NAME)>(this, &other); }  \
  NAME& operator=(const NAME& other) {                                     \
    emulator::move<sizeof(NAME)>(this, &other);                            \
    return *this;                                                          \
  }
#define EMU_VECTORS(T, NAME, MOVES2, MOVES4)                                            \
  struct NAME##1 { T x; };                                                              \
  struct alignas(2 * sizeof(T)) NAME##2 {                                               \
    T x, y;                                                                             \
    NAME##2(T x, T y) : x(x), y(y) {}                                                   \
    MOVES2(NAME##2)                                                                     \
  };                                                                                    \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) NAME##4 {                     \
    T x, y, z, w;                                                                       \
    NAME##4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}                             \
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
struct int3 { int x, y, z; };
struct float3 { float x, y, z; };
struct uchar3 { unsigned char x, y, z; };
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

// Mathematics.
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
inline float __expf(float x) { return emulator::count_exp(), std::exp(x); }
inline float __exp10f(float x) { return emulator::count_exp(), std::pow(10.f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
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
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(std::ceil(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }

// Bits.
template <class To, class From>
inline To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
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
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<unsigned long long>(x) * y) >> 32);
}

// Memory.
template <class T> __forceinline__ T __ldg(const T* address) { return *address; }
template <class T> __forceinline__ T __ldcg(const T* address) { return *address; }
template <class T> __forceinline__ T __ldcs(const T* address) { return *address; }
template <class T> __forceinline__ void __stcg(T* address, T value) { *address = value; }
template <class T> __forceinline__ void __stcs(T* address, T value) { *address = value; }
#define __cvta_generic_to_shared(pointer) (static_cast<std::size_t>(emu_shared_address(pointer)))
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline long long clock64() { return 0; }

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
    bits = emu_shuffle(mask, bits, lane, width, KIND);                     \
    std::memcpy(static_cast<void*>(&x), &bits, sizeof x);                  \
    return x;                                                              \
  }
EMU_SHUFFLE(__shfl_sync, EMU_INDEX)
EMU_SHUFFLE(__shfl_up_sync, EMU_UP)
EMU_SHUFFLE(__shfl_down_sync, EMU_DOWN)
EMU_SHUFFLE(__shfl_xor_sync, EMU_XOR)

// Atomics: one at a time, whatever blocks run beside.
namespace emulator {
template <class T, class F>
__forceinline__ T atomic(T* address, F new_value) {
  using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>>;
  if (!emu_atomic(address, sizeof(T))) return T{};
  auto* bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
  do {
    const T value = new_value(emu_bits<T>(old));
    next = emu_bits<Bits>(value);
  } while (!__atomic_compare_exchange_n(bits, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return emu_bits<T>(old);
}
}  // namespace emulator

template <class T> __forceinline__ T atomicAdd(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return static_cast<T>(old + x); }); }
template <class T> __forceinline__ T atomicSub(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return static_cast<T>(old - x); }); }
template <class T> __forceinline__ T atomicMax(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old < x ? x : old; }); }
template <class T> __forceinline__ T atomicMin(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return x < old ? x : old; }); }
template <class T> __forceinline__ T atomicExch(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T) { return x; }); }
template <class T> __forceinline__ T atomicAnd(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old & x; }); }
template <class T> __forceinline__ T atomicOr(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old | x; }); }
template <class T> __forceinline__ T atomicXor(T* a, std::common_type_t<T> x) { return emulator::atomic(a, [=](T old) { return old ^ x; }); }
template <class T> __forceinline__ T atomicCAS(T* a, std::common_type_t<T> compare, std::common_type_t<T> x) {
  return emulator::atomic(a, [=](T old) { return old == compare ? x : old; });
}

#undef assert
#define assert(condition) ((condition) ? void() : emu_assert(#condition))

// A door to a kernel, for the end of its source: unpacks the arguments, each by its type, which are none of the kernel's accesses.
#define EMU_UNSEEN __attribute__((no_sanitize("thread")))
#define EMU_DOOR(I, ...)                                                                                          \
  extern "C" EMU_UNSEEN void emu_entry_##I(void** arguments) { emulator::call(__VA_ARGS__, arguments); }          \
  extern "C" int emu_parameters_##I(char* letters, unsigned* sizes, int most) {                                   \
    return emulator::describe(__VA_ARGS__, letters, sizes, most);                                                 \
  }
namespace emulator {
template <class... Parameters, std::size_t... I>
EMU_UNSEEN void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[I])...);
}
template <class... Parameters>
EMU_UNSEEN void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

// One letter and the size for each parameter: p pointer, c pointer to const, i u integers, f float, s something else.
template <class T>
constexpr char letter() {
  return std::is_pointer_v<T> ? (std::is_const_v<std::remove_pointer_t<T>> ? 'c' : 'p') : std::is_integral_v<T> ? (std::is_signed_v<T> ? 'i' : 'u') : std::is_floating_point_v<T> ? 'f' : 's';
}
template <class... Parameters>
int describe(void (*)(Parameters...), char* letters, unsigned* sizes, int most) {
  int n = 0;
  ((n < most ? void((letters[n] = letter<Parameters>(), sizes[n] = sizeof(Parameters))) : void(), ++n), ...);
  return n;
}
}  // namespace emulator
