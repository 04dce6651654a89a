// Stands in for PyTorch's headers. It has the names that occur in signatures and structs of kernels. Host code isn't compiled.
#pragma once
#include "emu_hide_names.h"

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "host_names.h"
#include "math_constants.h"
#include "torch_types.h"

namespace c10 {
template <class T> using optional = std::optional<T>;
}  // namespace c10
namespace at {
using namespace c10;
class Tensor;
template <class T, bool> struct AccumulateTypeOf { using type = float; };
template <bool B> struct AccumulateTypeOf<double, B> { using type = double; };
template <class T, bool B> using acc_type = typename AccumulateTypeOf<T, B>::type;
template <class T> struct OpMathType { using type = float; };
template <> struct OpMathType<double> { using type = double; };
template <class T> using opmath_type = typename OpMathType<T>::type;
// Bounds are infinite where there are infinities: what a maximum or minimum begins with.
template <class T> struct numeric_limits {
  using Own = std::numeric_limits<T>;
  static T lowest() { return Own::lowest(); }
  static T max() { return Own::max(); }
  static T lower_bound() { return Own::has_infinity ? -Own::infinity() : Own::lowest(); }
  static T upper_bound() { return Own::has_infinity ? Own::infinity() : Own::max(); }
};
template <class T, unsigned LOWEST, unsigned MAX, unsigned INFINITE> struct LimitsOfHalf {
  static T of(unsigned short bits) { return __builtin_bit_cast(T, bits); }
  static T lowest() { return of(LOWEST); }
  static T max() { return of(MAX); }
  static T lower_bound() { return of(INFINITE | 0x8000); }
  static T upper_bound() { return of(INFINITE); }
};
template <> struct numeric_limits<Half> : LimitsOfHalf<Half, 0xfbff, 0x7bff, 0x7c00> {};
template <> struct numeric_limits<BFloat16> : LimitsOfHalf<BFloat16, 0xff7f, 0x7f7f, 0x7f80> {};
}  // namespace at
namespace torch {
using at::Tensor;
template <class T> struct RestrictPtrTraits { using PtrType = T* __restrict; };
}  // namespace torch

// ATen/cuda/DeviceUtils.cuh
#define C10_WARP_SIZE 32
template <class T> T WARP_SHFL(T value, int lane, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_sync(mask, value, lane, width);
}
template <class T> T WARP_SHFL_XOR(T value, int lanes, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_xor_sync(mask, value, lanes, width);
}
template <class T> T WARP_SHFL_UP(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_up_sync(mask, value, delta, width);
}
template <class T> T WARP_SHFL_DOWN(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_down_sync(mask, value, delta, width);
}
inline unsigned WARP_BALLOT(int predicate, unsigned mask = 0xffffffff) { return __ballot_sync(mask, predicate); }
inline unsigned ACTIVE_MASK() { return __activemask(); }
inline void WARP_SYNC(unsigned mask = 0xffffffff) { __syncwarp(mask); }
template <class T> T doLdg(const T* at) { return __ldg(at); }

#define C10_HOST_DEVICE __host__ __device__
#define C10_DEVICE __device__
#define C10_HOST __host__
#define C10_LAUNCH_BOUNDS_1(...)
#define C10_LAUNCH_BOUNDS_2(...)
#define CUDA_KERNEL_LOOP(I, N) for (int I = blockIdx.x * blockDim.x + threadIdx.x; I < (N); I += blockDim.x * gridDim.x)

// PyTorch dispatches on types. The instances for float and half are named here.
#define EMU_DISPATCH(T, ...) \
  {                          \
    using scalar_t = T;      \
    (__VA_ARGS__)();         \
  }
#define AT_DISPATCH_FLOATING_TYPES(TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__) EMU_DISPATCH(at::Half, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND(OTHER, TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND2(OTHER, ANOTHER, TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)

#include "emu_show_names.h"
