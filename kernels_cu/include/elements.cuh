// Natural exponential and logarithm, and a few neighbouring elements rounded to the storage dtype.
#pragma once

#include "memory.cuh"

// e^x and ln(x); exp_approx(-INF) is 0, log_approx(0) is -INF.
DEVICE float exp_approx(float x) { return exp2_approx(x * LOG2E); }
DEVICE float log_approx(float x) { return log2_approx(x) * LN2; }

// A row maximum as the base of an exponential: an empty row's -INF becomes 0, so that no -INF - -INF makes a NaN.
DEVICE float finite(float maximum) { return maximum == -INF ? 0 : maximum; }

// A weighed sum. fma, not a product and a sum: compilers would choose which of the two products to round.
DEVICE float weighed(float x, float a, float y, float b) { return fmaf(x, a, y * b); }
DEVICE float4 weighed(float4 x, float a, float4 y, float b) {
  return make_float4(weighed(x.x, a, y.x, b), weighed(x.y, a, y.y, b), weighed(x.z, a, y.z, b), weighed(x.w, a, y.w, b));
}
DEVICE float4 times(float4 x, float a) { return make_float4(x.x * a, x.y * a, x.z * a, x.w * a); }

// Two or four columns of a row in HBM; the address is a multiple of their bytes.
DEVICE void store_elements(void* address, float2 x) {
#if FL_DTYPE == 0
  store_global(address, x);
#else
  store_global(address, pack(x.x, x.y));
#endif
}
DEVICE void store_elements(void* address, float4 x) {
#if FL_DTYPE == 0
  store_global(address, x);
#else
  store_global(address, make_uint2(pack(x.x, x.y), pack(x.z, x.w)));
#endif
}

// Lanes that share a row of `chunks` chunks.
DEVICE constexpr int lanes_for(int chunks) { return chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : chunks > 2 ? 4 : chunks; }

// The product of two chunks of a row. Elements from `left` on are padding, and don't count.
DEVICE float dot(uint4 a, uint4 b, int left) {
  const unsigned x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if FL_DTYPE == 0
    if (i < left) sum += float_of(x[i]) * float_of(y[i]);
#else
    const float2 p = unpack(x[i]), r = unpack(y[i]);
    if (2 * i < left) sum += p.x * r.x;
    if (2 * i + 1 < left) sum += p.y * r.y;
#endif
  }
  return sum;
}
