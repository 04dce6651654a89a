// The small floats, on all their bit patterns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

__global__ void to_float(const unsigned short* bits, float* half, float* bfloat, float* e4m3, float* e5m2) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = __half2float(__ushort_as_half(bits[i]));
  bfloat[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
  __nv_fp8_e4m3 x;
  __nv_fp8_e5m2 y;
  x.__x = y.__x = static_cast<unsigned char>(i);
  e4m3[i] = float(x), e5m2[i] = float(y);
}

__global__ void from_float(const float* x, unsigned short* half, unsigned short* bfloat, unsigned char* e4m3, unsigned char* e5m2,
                           int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  half[i] = __half_as_ushort(__float2half(x[i]));
  bfloat[i] = __bfloat16_as_ushort(__float2bfloat16(x[i]));
  e4m3[i] = __nv_fp8_e4m3(x[i]).__x;
  e5m2[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2);
}

// Towards zero, up and down.
__global__ void directed(const float* x, __half* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = __float2half_rz(x[i]), out[n + i] = __float2half_ru(x[i]), out[2 * n + i] = __float2half_rd(x[i]);
}

template <class Small>
__global__ void arithmetic(const Small* a, const Small* b, const Small* c, Small* out, unsigned char* flags, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const Small x = a[i], y = b[i];
  out[i] = x + y, out[n + i] = x - y, out[2 * n + i] = x * y, out[3 * n + i] = x / y;
  out[4 * n + i] = __hfma(x, y, c[i]);
  out[5 * n + i] = hsqrt(x);
  Small sum = x;
  sum += y;
  sum *= y;
  out[6 * n + i] = sum;
  out[7 * n + i] = __habs(-x);
  flags[i] = (x < y) | (x == y) << 1 | (x >= y) << 2 | __hne(x, y) << 3 | __hisnan(x) << 4;
}

// The same two at a time: equal, to the bit.
template <class Small, class Pair>
__global__ void pairs(const Pair* a, const Pair* b, const Pair* c, unsigned* differences, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  auto differ = [](Pair p, Small x, Small y) {
    return !(__low2float(p) == float(x) || __hisnan(x)) || !(__high2float(p) == float(y) || __hisnan(y));
  };
  const Pair x = a[i], y = b[i], z = c[i];
  unsigned bad = 0;
  bad |= differ(x + y, x.x + y.x, x.y + y.y) << 0 | differ(__hsub2(x, y), x.x - y.x, x.y - y.y) << 1;
  bad |= differ(__hmul2(x, y), x.x * y.x, x.y * y.y) << 2 | differ(__h2div(x, y), x.x / y.x, x.y / y.y) << 3;
  bad |= differ(__hfma2(x, y, z), __hfma(x.x, y.x, z.x), __hfma(x.y, y.y, z.y)) << 4;
  bad |= differ(__hmax2(x, y), __hmax(x.x, y.x), __hmax(x.y, y.y)) << 5;
  bad |= differ(__hneg2(x), -x.x, -x.y) << 6 | (__hbgt2(x, y) != (x.x > y.x && x.y > y.y)) << 7;
  if (bad) atomicOr(differences, bad);
}
