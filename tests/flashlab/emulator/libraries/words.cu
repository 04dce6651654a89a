// The halves and the bytes of words: each result in a row of its own.
__global__ void words(const unsigned* x, const unsigned* y, unsigned* z, int n) {
  int t = threadIdx.x;
  unsigned a = x[t], b = y[t], results[] = {
    __vadd4(a, b), __vaddss4(a, b), __vaddus2(a, b), __vsub2(a, b), __vsubss4(a, b), __vsubus4(a, b), __vabsss4(a), __vneg2(a),
    __vabsdiffu4(a, b), __vavgu4(a, b), __vmaxs4(a, b), __vminu2(a, b), __vcmpeq4(a, b), __vcmpgts2(a, b), __vsetltu4(a, b),
    __vcmpne4(a, b), __vsadu4(a, b), __vsads2(a, b), unsigned(__dp2a_lo(int(a), int(b), 7)), __dp2a_hi(a, b, 7u),
  };
  for (int i = 0; i < n; ++i) z[i * blockDim.x + t] = results[i];
}
