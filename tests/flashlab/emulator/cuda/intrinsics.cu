// Integers and bits, beside what NumPy says of them.
__global__ void bits(const unsigned* x, const unsigned* y, unsigned* out, int n) {
  const int i = threadIdx.x;
  if (i >= n) return;
  const unsigned a = x[i], b = y[i];
  out[i] = __popc(a), out[n + i] = __clz(static_cast<int>(a)), out[2 * n + i] = __ffs(static_cast<int>(a)), out[3 * n + i] = __brev(a);
  out[4 * n + i] = __umulhi(a, b), out[5 * n + i] = static_cast<unsigned>(__mulhi(static_cast<int>(a), static_cast<int>(b)));
  out[6 * n + i] = __byte_perm(a, b, 0x5140), out[7 * n + i] = __funnelshift_l(a, b, 7), out[8 * n + i] = __funnelshift_r(a, b, 7);
  out[9 * n + i] = static_cast<unsigned>(__dp4a(static_cast<int>(a), static_cast<int>(b), 5));
  out[10 * n + i] = static_cast<unsigned>(__float2int_rn(__uint_as_float(a))), out[11 * n + i] = __float2uint_rz(__uint_as_float(a));
  out[12 * n + i] = __float_as_uint(__saturatef(__uint_as_float(a)));
}

__global__ void integers(unsigned* words, unsigned long long* wide, int* extremes, float* sum, double* precise) {
  const unsigned t = threadIdx.x + blockIdx.x * blockDim.x;
  atomicAdd(&words[0], t), atomicSub(&words[1], 1u), atomicMax(&words[2], t), atomicMin(&words[3], t);
  atomicAnd(&words[4], ~(1u << t % 32)), atomicOr(&words[5], 1u << t % 32), atomicXor(&words[6], t);
  atomicInc(&words[7], 9u), atomicDec(&words[8], 9u), atomicCAS(&words[9], 7u, 8u), atomicExch(&words[10], 3u);
  atomicAdd(wide, 1ull << 32);
  atomicMax(&extremes[0], -static_cast<int>(t)), atomicMin(&extremes[1], -static_cast<int>(t));
  atomicAdd(sum, 0.5f), atomicAdd(precise, 0.25);
}
