// A row of 16-bit elements in 8 bits: the largest element becomes LARGEST_ELEMENT, and all are divided by one scale. Every bit is that
// of fl.quantize_cache, in float32: so quotients are those of a division.
#pragma once

#include "rows.cuh"

constexpr float LARGEST_ELEMENT = CACHE == 2 ? 127 : 448;

// The eight elements of a chunk, of which `left` are inside; the others are 0.
DEVICE void elements_of(float (&x)[8], uint4 chunk, int left) {
  const unsigned words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = unpack(words[i]);
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
  if (left < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i < left ? x[i] : 0;
  }
}

// The bits of the largest absolute value. Those of a NaN are larger than any other's.
DEVICE unsigned largest_bits(const float (&x)[8]) {
  unsigned top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = max(top, static_cast<unsigned>(bits(x[i])) & 0x7fffffffu);
  return top;
}

// The scale of a row with this maximum: 1 / LARGEST_ELEMENT for zeros, and with a NaN.
DEVICE float scale_for(unsigned top) {
  const float x = float_of(top);
  return fmaxf((x > 0 ? x : 1.0f) / LARGEST_ELEMENT, 0x1p-126f);
}

// Two elements in 8 bits, to the nearest, ties to even. Those beyond LARGEST_ELEMENT become it.
#if CACHE == 2
DEVICE unsigned rounded(float x) {
  const float kept = fminf(fmaxf(x, -LARGEST_ELEMENT), LARGEST_ELEMENT);
  return x != x ? 0x80 : bits(kept + 0x1.8p23f) & 0xff;  // of the sum the lowest bits are the integer
}
DEVICE unsigned two_rounded(float x, float y) { return rounded(x) | rounded(y) << 8; }
#elif defined(EMULATOR) || __CUDA_ARCH__ < 890
DEVICE unsigned rounded(float x) {
  const float kept = fminf(fmaxf(x, -LARGEST_ELEMENT), LARGEST_ELEMENT);
  if (x != x) return 0x7f;
  const unsigned sign = static_cast<unsigned>(bits(kept)) >> 24 & 0x80, size = bits(kept) & 0x7fffffff;
  if (size < 0x3c800000u) return sign | (bits(float_of(size) + 0x1p14f) & 0xf);  // below 2^-6: multiples of 2^-9
  return sign | ((size + 0x7ffffu + (size >> 20 & 1) >> 20) - (120 << 3));
}
DEVICE unsigned two_rounded(float x, float y) { return rounded(x) | rounded(y) << 8; }
#else
DEVICE unsigned two_rounded(float x, float y) {
  unsigned both;
  asm("{.reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, %2, %1; cvt.u32.u16 %0, e;}" : "=r"(both) : "f"(x), "f"(y));
  return both;
}
#endif

// Eight elements divided by their row's scale. Where the row's maximum is finite and not tiny, a quotient needs no division, and
// is rounded alike (Markstein 1990): a product with the reciprocal, and by fma one with what that leaves. int8 needs no limits there.
DEVICE uint2 quantized(const float (&x)[8], float scale, unsigned top) {
  unsigned two[4];
  if (top - 0x20000000u < 0x7f800000u - 0x20000000u) {
    const float reciprocal = 1 / scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float quotient[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float first = x[2 * i + j] * reciprocal;
        quotient[j] = copysignf(fmaf(fmaf(-first, scale, x[2 * i + j]), reciprocal, first), x[2 * i + j]);
      }
#if CACHE == 2
      two[i] = __byte_perm(bits(quotient[0] + 0x1.8p23f), bits(quotient[1] + 0x1.8p23f), 0x40);
#else
      two[i] = two_rounded(quotient[0], quotient[1]);
#endif
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) two[i] = two_rounded(x[2 * i] / scale, x[2 * i + 1] / scale);
  }
  return make_uint2(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[2], two[3], 0x5410));
}
