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
    x[2 * i] = 2 * i < left ? both.x : 0;
    x[2 * i + 1] = 2 * i + 1 < left ? both.y : 0;
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

// An element in 8 bits, to the nearest, ties to even.
DEVICE unsigned rounded(float x) {
  const float kept = fminf(fmaxf(x, -LARGEST_ELEMENT), LARGEST_ELEMENT);
#if CACHE == 2
  return x != x ? 0x80 : bits(kept + 0x1.8p23f) & 0xff;  // of the sum the lowest bits are the integer
#else
  if (x != x) return 0x7f;
  const unsigned sign = static_cast<unsigned>(bits(kept)) >> 24 & 0x80, size = bits(kept) & 0x7fffffff;
  if (size < 0x3c800000u) return sign | (bits(float_of(size) + 0x1p14f) & 0xf);  // below 2^-6: multiples of 2^-9
  return sign | ((size + 0x7ffffu + (size >> 20 & 1) >> 20) - (120 << 3));
#endif
}

// Divides elements of a row by its scale, rounded as a division rounds. (Markstein 1990: what the product with the reciprocal leaves
// is divided once more, by fma.) A large power of two keeps what is left of a row of tiny elements above float32's smallest.
struct Divisor {
  float up, scale, reciprocal;

  DEVICE explicit Divisor(float by) : up(by < 0x1p-60f ? 0x1p60f : 1), scale(by * up), reciprocal(1 / scale) {
    if (reciprocal == 0) scale = 0;  // of an infinite element: the others become 0
  }
  DEVICE float quotient(float x) const {
    const float raised = x * up, first = raised * reciprocal;
    return copysignf(fmaf(fmaf(-first, scale, raised), reciprocal, first), x);
  }
};

// Eight elements divided by a scale.
DEVICE uint2 quantized(const float (&x)[8], float scale) {
  const Divisor by(scale);
  unsigned word[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) word[i / 4] |= rounded(by.quotient(x[i])) << 8 * (i % 4);
  return make_uint2(word[0], word[1]);
}
