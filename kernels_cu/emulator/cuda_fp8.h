// fp8: e4m3 and e5m2, single, in pairs and in fours. Conversions from wider types saturate, as those of the types do
// with nvcc.
#pragma once
#include "emu_hide_names.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8x4_storage_t = unsigned;

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate, __nv_fp8_interpretation_t as) {
  const bool finite = saturate == __NV_SATFINITE;
  return as == __NV_E4M3 ? emulator::Float8<4, 3>::bits(x, finite) : emulator::Float8<5, 2>::bits(x, finite);
}
inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturate, __nv_fp8_interpretation_t as) {
  return __nv_cvt_float_to_fp8(emulator::odd_float(x), saturate, as);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturate, __nv_fp8_interpretation_t as) {
  return __nv_cvt_float_to_fp8(half(x), saturate, as);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturate,
                                                      __nv_fp8_interpretation_t as) {
  return __nv_cvt_float_to_fp8(nv_bfloat16(x), saturate, as);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturate, __nv_fp8_interpretation_t as) {
  return static_cast<unsigned short>(__nv_cvt_float_to_fp8(x.x, saturate, as) | __nv_cvt_float_to_fp8(x.y, saturate, as) << 8);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t as) {
  return half(as == __NV_E4M3 ? emulator::Float8<4, 3>::value(x) : emulator::Float8<5, 2>::value(x));
}

namespace emulator {

template <__nv_fp8_interpretation_t AS>
struct Fp8 {
  using Format = std::conditional_t<AS == __NV_E4M3, Float8<4, 3>, Float8<5, 2>>;
  __nv_fp8_storage_t __x;
  Fp8() = default;
  template <class T, class = std::enable_if_t<std::is_convertible_v<T, float>>>
  explicit Fp8(T x) : __x(Format::bits(odd_float(static_cast<double>(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(x))), true)) {}
  explicit operator float() const { return Format::value(__x); }
  explicit operator double() const { return Format::value(__x); }
  explicit operator half() const { return Format::value(__x); }
  explicit operator nv_bfloat16() const { return Format::value(__x); }
};

template <class One>
struct alignas(2) Fp8x2 {
  __nv_fp8x2_storage_t __x;
  Fp8x2() = default;
  explicit Fp8x2(float2 x) : __x(static_cast<unsigned short>(One(x.x).__x | One(x.y).__x << 8)) {}
  explicit Fp8x2(half2 x) : Fp8x2(__half22float2(x)) {}
  explicit Fp8x2(nv_bfloat162 x) : Fp8x2(__bfloat1622float2(x)) {}
  explicit operator float2() const {
    return {One::Format::value(static_cast<unsigned char>(__x)), One::Format::value(static_cast<unsigned char>(__x >> 8))};
  }
  explicit operator half2() const { return __float22half2_rn(static_cast<float2>(*this)); }
};

template <class One>
struct alignas(4) Fp8x4 {
  __nv_fp8x4_storage_t __x;
  Fp8x4() = default;
  explicit Fp8x4(float4 x) : __x(One(x.x).__x | One(x.y).__x << 8 | One(x.z).__x << 16 | static_cast<unsigned>(One(x.w).__x) << 24) {}
  explicit operator float4() const {
    auto value = [this](int i) { return One::Format::value(static_cast<unsigned char>(__x >> (8 * i))); };
    return {value(0), value(1), value(2), value(3)};
  }
};

}  // namespace emulator

using __nv_fp8_e4m3 = emulator::Fp8<__NV_E4M3>;
using __nv_fp8_e5m2 = emulator::Fp8<__NV_E5M2>;
using __nv_fp8x2_e4m3 = emulator::Fp8x2<__nv_fp8_e4m3>;
using __nv_fp8x2_e5m2 = emulator::Fp8x2<__nv_fp8_e5m2>;
using __nv_fp8x4_e4m3 = emulator::Fp8x4<__nv_fp8_e4m3>;
using __nv_fp8x4_e5m2 = emulator::Fp8x4<__nv_fp8_e5m2>;

#include "emu_show_names.h"
