// Natural exponential and logarithm, and a few neighbouring elements rounded to the storage dtype.
#pragma once

#include "memory.cuh"

// e^x and ln(x); exp_approx(-INF) is 0, log_approx(0) is -INF.
DEVICE float exp_approx(float x) { return exp2_approx(x * LOG2E); }
DEVICE float log_approx(float x) { return log2_approx(x) * LN2; }

// A row maximum as the base of an exponential: an empty row's -INF becomes 0, so that no -INF - -INF makes a NaN.
DEVICE float finite(float maximum) { return maximum == -INF ? 0 : maximum; }

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
