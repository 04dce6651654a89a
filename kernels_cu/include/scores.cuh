// What becomes of a product q k before the softmax: it is scaled, may be bounded by a soft cap, and ALiBi may add a bias.
// And what a sink adds to a row's sum, and a gradient of the LSE to D. SOFT_CAP, ALIBI, SINKS, DLSE: 1 where the problem has them.
#pragma once

#include "mask.cuh"
#include "memory.cuh"
#include "warp.cuh"

#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef DLSE
#define DLSE 0
#endif

// The number of a head, and `without` where the problem has none.
template <bool HAS>
DEVICE float of_head(const float* numbers, int head, float without) {
  if constexpr (HAS) return load_global<float>(numbers + head);
  return without;
}

// tanh(x) of scores, to 1e-6 of itself. Near 0, 1 - 2 / (exp(2x) + 1) would lose its digits: a polynomial of least relative error
// serves there. Where all scores of a warp's tile are far below the cap, as most models have them, it is enough: the
// exponentials are left out. Every FMA takes its slot from the tensor cores, so it has two terms only.
struct Tanh {
  static constexpr float SMALL = 0.2f, THIRD = -0.333296359f, FIFTH = 0.130362406f;

  static DEVICE float small(float x) {
    const float u = x * x;
    return x * (1 + u * (THIRD + u * FIFTH));
  }

  static DEVICE float any(float x) {
    const float e = exp2_approx(fabsf(x) * (2 * LOG2E));  // INF for a large x, whose tanh is then 1
    return fabsf(x) <= SMALL ? small(x) : copysignf(1 - 2 * reciprocal(e + 1), x);
  }

  template <int N>
  static DEVICE void apply(float (&s)[N][4], float factor) {
    float top = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top = fmaxf(top, fabsf(s[n][e] *= factor));
    if (any_lane(top > SMALL)) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = any(s[n][e]);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = small(s[n][e]);
    }
  }
};

// A row's logits are LN2 · c · s, so that exponentials are taken to the base 2: exp(logit - max) = exp2(c s - m), one FMA and
// one ex2. c is above 0: a negative scale flips S instead (`sign`), so that the largest s stays the largest exponent, and with
// scale 0 it is so small that no product counts.
struct Scores {
  float c, sign;

  DEVICE explicit Scores(const Shape& shape)
      : c((SOFT_CAP ? shape.soft_cap : shape.scale != 0 ? fabsf(shape.scale) : 0x1p-60f) * LOG2E),
        sign(!SOFT_CAP && shape.scale < 0 ? -1.f : 1.f) {}

  // The exponent that a score stands for.
  DEVICE float logit(float s) const { return c * s; }

  // S as `c` wants it, where it isn't flipped with the mask.
  template <int N>
  DEVICE void flip(float (&s)[N][4]) const {
    if (sign != 1) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= sign;
    }
  }

  // The soft cap and the bias, in accumulators of two rows (mma.cuh): `row` is the query of this lane's upper row, `key` the key
  // of its first column, `slope` the head's. S isn't flipped yet.
  template <int N>
  DEVICE void bend(float (&s)[N][4], const Shape& shape, int row, int key, float slope) const {
    if constexpr (SOFT_CAP) Tanh::apply(s, shape.scale / shape.soft_cap);
    if constexpr (ALIBI) {
      const float fall = slope * sign * LOG2E / c;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float diagonal = row + 8 * half + shape.len_kv - shape.len_q - key;  // of the first column
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) s[n][2 * half + e] -= fall * fabsf(diagonal - (8 * n + e));
      }
    }
  }
};

// A sink joins a row, as if the row had seen one more key with the logit `sink` and a value of 0. m is in Scores' units.
// Returns what O is to be multiplied with.
DEVICE float join_sink(float& m, float& sum, float sink) {
  if constexpr (!SINKS) return 1;
  const float top = fmaxf(m, sink * LOG2E), alpha = exp2_approx(m - top);
  sum = sum * alpha + exp2_approx(sink * LOG2E - top);
  m = top;
  return alpha;
}

// D - dLSE of a row: the LSE's derivative by a score is P, too. The row's number counts over all heads.
DEVICE float less_dlse(float delta, const float* dlse, long long row) {
  if constexpr (DLSE) return delta - load_global<float>(dlse + row);
  return delta;
}
