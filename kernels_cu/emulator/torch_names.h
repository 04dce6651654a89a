// Stands in for PyTorch's headers. It has the names that occur in signatures and structs of kernels. Host code isn't compiled.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "host_names.h"
#include "math_constants.h"

namespace c10 {
using Half = __half;
using BFloat16 = __nv_bfloat16;
using Float8_e4m3fn = __nv_fp8_e4m3;
using Float8_e5m2 = __nv_fp8_e5m2;
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
}  // namespace at
namespace torch {
using at::Tensor;
template <class T> struct RestrictPtrTraits { using PtrType = T* __restrict; };
}  // namespace torch

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
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__) EMU_DISPATCH(half, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND(OTHER, TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND2(OTHER, ANOTHER, TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) EMU_DISPATCH(float, __VA_ARGS__)
