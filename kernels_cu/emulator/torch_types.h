// PyTorch's number types. Half and BFloat16 are types of their own: their bits are `x`, and they go with numbers of other types.
#pragma once
#include "emu_hide_names.h"

#include <cstdint>
#include <limits>

#include "complex_numbers.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

namespace c10 {

#define EMU_TORCH_MIXED(NAME, OP, OTHER, RESULT)                                                                   \
  inline RESULT operator OP(NAME a, OTHER b) { return static_cast<RESULT>(a) OP static_cast<RESULT>(b); }          \
  inline RESULT operator OP(OTHER a, NAME b) { return static_cast<RESULT>(a) OP static_cast<RESULT>(b); }
#define EMU_TORCH_OPERATOR(NAME, OP)                                                                               \
  inline NAME operator OP(NAME a, NAME b) { return static_cast<float>(a) OP static_cast<float>(b); }               \
  inline NAME& operator OP##=(NAME& a, NAME b) { return a = a OP b; }                                              \
  inline float& operator OP##=(float& a, NAME b) { return a = a OP static_cast<float>(b); }                        \
  EMU_TORCH_MIXED(NAME, OP, float, float)                                                                          \
  EMU_TORCH_MIXED(NAME, OP, double, double)                                                                        \
  EMU_TORCH_MIXED(NAME, OP, int, NAME)                                                                             \
  EMU_TORCH_MIXED(NAME, OP, std::int64_t, NAME)
#define EMU_TORCH_FLOAT(NAME, CUDA)                                                                                \
  struct alignas(2) NAME {                                                                                         \
    unsigned short x;                                                                                              \
    struct from_bits_t {};                                                                                         \
    static constexpr from_bits_t from_bits() { return {}; }                                                        \
    NAME() = default;                                                                                              \
    constexpr NAME(unsigned short bits, from_bits_t) : x(bits) {}                                                  \
    NAME(float value) : x(CUDA(value).bits) {}                                                                     \
    NAME(CUDA value) : x(value.bits) {}                                                                            \
    operator float() const { return CUDA::of_bits(x); }                                                            \
    operator CUDA() const { return CUDA::of_bits(x); }                                                             \
  };                                                                                                               \
  inline NAME operator-(NAME a) { return -static_cast<float>(a); }                                                 \
  EMU_TORCH_OPERATOR(NAME, +)                                                                                      \
  EMU_TORCH_OPERATOR(NAME, -)                                                                                      \
  EMU_TORCH_OPERATOR(NAME, *)                                                                                      \
  EMU_TORCH_OPERATOR(NAME, /)
EMU_TORCH_FLOAT(Half, __half)
EMU_TORCH_FLOAT(BFloat16, __nv_bfloat16)
#undef EMU_TORCH_FLOAT
#undef EMU_TORCH_OPERATOR
#undef EMU_TORCH_MIXED

using Float8_e4m3fn = __nv_fp8_e4m3;
using Float8_e5m2 = __nv_fp8_e5m2;
EMU_COMPLEX_NAMES

}  // namespace c10

#define EMU_TORCH_LIMITS(NAME, DIGITS, MIN, MAX, EPSILON, INFINITE, QUIET, TINY)           \
  template <> struct std::numeric_limits<c10::NAME> : std::numeric_limits<float> {         \
    static constexpr int digits = DIGITS;                                                  \
    static constexpr c10::NAME of(unsigned short bits) { return {bits, c10::NAME::from_bits()}; } \
    static constexpr c10::NAME min() { return of(MIN); }                                   \
    static constexpr c10::NAME max() { return of(MAX); }                                   \
    static constexpr c10::NAME lowest() { return of(MAX | 0x8000); }                       \
    static constexpr c10::NAME epsilon() { return of(EPSILON); }                           \
    static constexpr c10::NAME infinity() { return of(INFINITE); }                         \
    static constexpr c10::NAME quiet_NaN() { return of(QUIET); }                           \
    static constexpr c10::NAME denorm_min() { return of(TINY); }                           \
  };
EMU_TORCH_LIMITS(Half, 11, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00, 1)
EMU_TORCH_LIMITS(BFloat16, 8, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0, 1)
#undef EMU_TORCH_LIMITS

// ATen/cuda/Atomic.cuh
template <class T> T gpuAtomicAdd(T* at, T value) { return atomicAdd(at, value); }
inline c10::Half gpuAtomicAdd(c10::Half* at, c10::Half value) {
  const __half own = value;
  return atomicAdd(reinterpret_cast<__half*>(at), own);
}
inline c10::BFloat16 gpuAtomicAdd(c10::BFloat16* at, c10::BFloat16 value) {
  const __nv_bfloat16 own = value;
  return atomicAdd(reinterpret_cast<__nv_bfloat16*>(at), own);
}
template <class T> void gpuAtomicAddNoReturn(T* at, T value) { gpuAtomicAdd(at, value); }

#include "emu_show_names.h"
