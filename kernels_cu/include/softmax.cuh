// The online softmax of a consumer warpgroup: row statistics, exponentials, and the mask before them.
//
// A warpgroup owns 64 rows of Q. Of its warp's 16 rows a lane holds rows g and g + 8 (wgmma.cuh), so each statistic is a
// pair.
#pragma once

#include "e4m3.cuh"
#include "packed_mask.cuh"
#include "scores.cuh"

constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;  // of 8 columns

// A soft cap doesn't change the order of scores. So S stays what Q and K make it, maxima are of that, and tanh is a part of the
// exponentials: c tanh(factor s) - m takes two or three FMAs more of each score than c s - m does. ALiBi adds to capped scores, so
// with it S is capped before.
constexpr bool CAP_LATE = SOFT_CAP && !ALIBI;

// m becomes the maximum of a row so far, as an exponent. Returns alpha, with which the row of O and its sum have to be multiplied.
template <class ScoresT>
DEVICE float raise(const float (&s)[S_FRAGMENTS][4], int half, const ScoresT& scores, float& m) {
  float a = s[0][2 * half], b = s[0][2 * half + 1];
#pragma unroll
  for (int n = 1; n < S_FRAGMENTS; ++n) a = fmaxf(a, s[n][2 * half]), b = fmaxf(b, s[n][2 * half + 1]);
  const float top = fmaxf(m, scores.logit(quad_max(fmaxf(a, b)))), alpha = exp2_approx(m - top);
  m = top;
  return alpha;
}

// m is c times a maximum; l is this lane's part of the row's sum. LOWEST serves as -inf: no score is below it, and m - m is 0,
// not NaN.
struct Softmax : Scores {
  float m[2], l[2];
  float factor;  // with CAP_LATE tanh's argument is factor · s

  DEVICE explicit Softmax(const Shape& shape) : Scores(shape) {
    begin();
    if constexpr (CAP_LATE) {
      factor = (shape.scale != 0 ? fabsf(shape.scale) : 0x1p-60f) / shape.soft_cap;
      sign = shape.scale < 0 ? -1 : 1;
    }
  }

  DEVICE void begin() { m[0] = m[1] = LOWEST, l[0] = l[1] = 0; }

  DEVICE void bend(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int key, float slope) const {
    if constexpr (!CAP_LATE) Scores::bend(s, shape, row, key, slope);
  }

  // Masks key tile j. `row` is the query of this lane's upper row; the tiles in `full` need no mask.
  DEVICE void mask(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int j, Keys full) const {
    if (j >= full.first && j <= full.last && sign == 1) return;
    flip(s);
    hide(s, shape, row, j, full, -INF);
  }

  // The same for a mask that an array says.
  DEVICE void mask(float (&s)[S_FRAGMENTS][4], const MaskBits& hidden, Visit visit) const {
    flip(s);
    hidden.hide(s, visit, -INF);
  }

  // What the mask hides of key tile j becomes `value`.
  static DEVICE void hide(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int j, Keys full, float value) {
    const int key = j * BC + 2 * (opaque(lane_id()) % 4);
    if (j > full.last) mask_side<Side::AFTER>(s, shape, row, key, value);
    if (j < full.first) mask_side<Side::BEFORE>(s, shape, row, key, value);
  }

  // c times a score, capped.
  DEVICE float logit(float s) const { return c * (CAP_LATE ? Tanh::any(factor * s) : s); }

  // The bits of the largest score that the lane holds of a row. Floats above 0 compare as their bits do, and integers have
  // an instruction for the maximum of three. If no score is above 0, the result is some number below 0, or 0.
  static DEVICE int largest(const float (&s)[S_FRAGMENTS][4], int half) {
    int a = bits(s[0][2 * half]), b = bits(s[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < S_FRAGMENTS; n += 2) {
      a = max(max(a, bits(s[n][2 * half])), bits(s[n][2 * half + 1]));
      if (n + 1 < S_FRAGMENTS) b = max(max(b, bits(s[n + 1][2 * half])), bits(s[n + 1][2 * half + 1]));
    }
    return max(a, b);
  }

  // Does a score exceed its row's m by more than TAU? Until one does, exp2(c s - m) stays small enough, and neither O nor l
  // needs a rescale. The comparison is of bits, so where the limit is below 0 the answer is yes.
  DEVICE bool risen(const float (&s)[S_FRAGMENTS][4]) const {
    bool any = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (CAP_LATE) {
        any |= m[half] + TAU < 0 || logit(float_of(largest(s, half))) >= m[half] + TAU;
      } else {
        const float limit = (m[half] + TAU) * reciprocal(c);
        any |= largest(s, half) >= (limit < 0 ? static_cast<int>(0x80000000) : bits(limit));
      }
    }
    return any;
  }

  // m becomes the maximum so far. l is multiplied by alpha here; O has to be, too.
  DEVICE void raise(const float (&s)[S_FRAGMENTS][4], float (&alpha)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      alpha[half] = ::raise(s, half, *this, m[half]);
      l[half] *= alpha[half];
    }
  }

  // S becomes P = exp2(c S - m), times 2^LARGEST_P, and l grows by its sum.
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4]) {
    float sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = exp2_approx(c * s[n][e] - (m[e / 2] - LARGEST_P));
        sum[e / 2][e % 2] += s[n][e];
      }
    l[0] += sum[0][0] + sum[0][1];
    l[1] += sum[1][0] + sum[1][1];
  }

  // Does tanh's polynomial serve for all of the warp's scores?
  DEVICE bool small(const float (&s)[S_FRAGMENTS][4]) const {
    int highest = max(largest(s, 0), largest(s, 1));
    unsigned lowest = 0;  // as an unsigned integer, the largest in size of the floats below 0 is above all others
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        lowest = max(max(lowest, static_cast<unsigned>(bits(s[n][e]))), static_cast<unsigned>(bits(s[n][e + 1])));
    const float limit = Tanh::SMALL * reciprocal(factor);
    return !any_lane(highest > bits(limit) || lowest > static_cast<unsigned>(bits(-limit)));
  }

  // S becomes P, and l grows by its sum, with a soft cap and under a mask as mask() takes it: of a hidden score tanh makes -1, so
  // its weight is set to 0.
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int j, Keys full) {
    capped_exponentials(s);
    hide(s, shape, row, j, full, 0);
    add(s);
  }
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4], const MaskBits& hidden, Visit visit) {
    capped_exponentials(s);
    hidden.hide(s, visit, 0);
    add(s);
  }

  // P = exp2(c tanh(factor S) - m).
  //
  // 1 - 2 / (exp(2x) + 1) is off by 2.4e-7, so the logit by that times the cap. Up to a cap of EXACT this is below what the sum of
  // the products may be off. Powers of a factor above 2^20 may overflow in the polynomial.
  static constexpr float EXACT = 64;

  DEVICE void capped_exponentials(float (&s)[S_FRAGMENTS][4]) const {
    if (c > EXACT * LOG2E || factor > 0x1p20f) {
      Tanh::apply(s, factor);
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(c * s[n][e] - m[e / 2]);
    } else if (small(s)) {
      const float square = factor * factor, first = c * factor, third = Tanh::THIRD * first * square,
                  fifth = Tanh::FIFTH * first * square * square;
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float u = s[n][e] * s[n][e];
          s[n][e] = exp2_approx(s[n][e] * (first + u * (third + u * fifth)) - m[e / 2]);
        }
    } else {
      const float twice = 2 * LOG2E * factor, top[2] = {c - m[0], c - m[1]};
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n][e] = exp2_approx(top[e / 2] - 2 * c * reciprocal(exp2_approx(twice * s[n][e]) + 1));
    }
  }

  // l grows by the sum of P.
  DEVICE void add(const float (&p)[S_FRAGMENTS][4]) {
    float sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e / 2][e % 2] += p[n][e];
    l[0] += sum[0][0] + sum[0][1];
    l[1] += sum[1][0] + sum[1][1];
  }
};

template <int N>
DEVICE void rescale(float (&o)[N][4], const float (&alpha)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
}
