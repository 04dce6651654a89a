// The storage dtype of Q, K, V, P and the output, and the arithmetic that PTX has an instruction of its own for.
// FL_DTYPE: 0 float32, 1 float16, 2 bfloat16. Sums, statistics and accumulators are float32 whatever it is.
//
// The primitives have two bodies: PTX for a GPU, and one for the emulator (../emulator), which runs the kernels on a CPU.
#pragma once

#ifdef EMULATOR
#include "floats.h"
#endif

#define DEVICE __device__ __forceinline__

constexpr int ELEMENT_BYTES = FL_DTYPE == 0 ? 4 : 2;
constexpr int CHUNK_BYTES = 16;                              // the unit of every copy from HBM and of the SRAM swizzle
constexpr int CHUNK_ELEMENTS = CHUNK_BYTES / ELEMENT_BYTES;  // 4 (float32) or 8 (16-bit)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool BEFORE_HOPPER = true;
#else
constexpr bool BEFORE_HOPPER = false;
#endif

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOWEST = __builtin_bit_cast(float, 0xff7fffff);  // the least finite float
constexpr float LOG2E = 1.4426950408889634f;  // exp(x) = exp2(x · LOG2E)
constexpr float LN2 = 0.6931471805599453f;    // log(x) = log2(x) · LN2

DEVICE constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
DEVICE constexpr int ceil_div(int x, int y) { return (x + y - 1) / y; }

// The bits of a float. Of two floats that aren't negative, the larger one has the larger bits.
DEVICE int bits(float x) { return __builtin_bit_cast(int, x); }
DEVICE float float_of(int bits) { return __builtin_bit_cast(float, bits); }

// Four bytes. Each repeats the upper bit of a byte of `low` (number 0 to 3) or `high` (4 to 7). The four digits of `numbers` name
// these bytes.
DEVICE unsigned spread_signs(unsigned low, unsigned high, unsigned numbers) {
#ifdef EMULATOR
  return __byte_perm(low, high, numbers | 0x8888);
#else
  unsigned y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(numbers | 0x8888));
  return y;
#endif
}

// x, but the compiler may not know that: it can neither compute ahead what follows from x nor compute x again.
template <class T>
DEVICE T opaque(T x) {
#ifndef EMULATOR
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(x));
  else
    asm volatile("" : "+r"(x));
#endif
  return x;
}

#ifdef EMULATOR
// .ftz takes and leaves 0 for what is below the least normal float32, of the same sign.
DEVICE float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
#endif

// 2^x, relative error about 2^-22; exp2(-INF) is 0, and so is what is below 2^-126.
DEVICE float exp2_approx(float x) {
#ifdef EMULATOR
  emulator::count_exp();
  return flushed(std::exp2(flushed(x)));
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// log2(x), absolute error about 2^-22; log2(0) is -INF.
DEVICE float log2_approx(float x) {
#ifdef EMULATOR
  return flushed(std::log2(flushed(x)));
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// 1 / x, within 1 ulp.
DEVICE float reciprocal(float x) {
#ifdef EMULATOR
  return flushed(1 / flushed(x));
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// The upper half of a product of two numbers of 32 bits.
DEVICE unsigned high_product(unsigned x, unsigned y) {
#ifdef EMULATOR
  return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
#else
  return __umulhi(x, y);
#endif
}

// How many zeros a number of 32 bits begins with; 32 for 0.
DEVICE int leading_zeros(unsigned x) {
#ifdef EMULATOR
  return x ? __builtin_clz(x) : 32;
#else
  return __clz(x);
#endif
}

// How many zeros x has behind its last one, of 32 bits.
DEVICE int trailing_zeros(int x) { return __ffs(x) - 1; }

// x · y, rounded: the compiler won't fuse it with an addition that follows.
DEVICE float product(float x, float y) {
#ifdef EMULATOR
  return x * y;
#else
  return __fmul_rn(x, y);
#endif
}

// x · y + z, counted as two operations.
DEVICE float multiply_add(float x, float y, float z) {
#ifdef EMULATOR
  emulator::count_flops(2);
#endif
  return x * y + z;
}

#if FL_DTYPE != 0
// Two floats rounded to nearest-even to the 16-bit storage dtype, `low` in the lower half (the lower address).
DEVICE unsigned pack(float low, float high) {
#ifdef EMULATOR
#if FL_DTYPE == 2
  return emulator::bf16_of_float(low) | static_cast<unsigned>(emulator::bf16_of_float(high)) << 16;
#else
  return emulator::f16_of_float(low) | static_cast<unsigned>(emulator::f16_of_float(high)) << 16;
#endif
#else
  unsigned bits;
#if FL_DTYPE == 2
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#elif __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(bits) : "f"(low), "f"(high));
#endif
  return bits;
#endif
}

// The two elements of a word as floats, those of the lower half in x.
DEVICE float2 unpack(unsigned both) {
#if FL_DTYPE == 2
  return make_float2(__builtin_bit_cast(float, both << 16), __builtin_bit_cast(float, both & 0xffff0000u));
#elif defined(EMULATOR)
  return make_float2(emulator::float_of_f16(both & 0xffffu), emulator::float_of_f16(both >> 16));
#else
  float2 x;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x.x), "=f"(x.y) : "r"(both));
  return x;
#endif
}
#endif
