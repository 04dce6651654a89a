// The online softmax of a consumer warpgroup: row statistics, exponentials, and the mask before them.
//
// A warpgroup owns 64 rows of Q. Of its warp's 16 rows a lane holds rows g and g + 8 (wgmma.cuh), so each statistic is a
// pair.
#pragma once

#include "e4m3.cuh"
#include "packed_mask.cuh"
#include "scores.cuh"

constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;  // of 8 columns

// m is c times a maximum; l is this lane's part of the row's sum. LOWEST serves as -inf: no score is below it, and m - m is 0,
// not NaN.
struct Softmax : Scores {
  float m[2], l[2];

  DEVICE explicit Softmax(const Shape& shape) : Scores(shape) { begin(); }

  DEVICE void begin() { m[0] = m[1] = LOWEST, l[0] = l[1] = 0; }

  // Masks key tile j. `row` is the query of this lane's upper row; the tiles in `full` need no mask.
  DEVICE void mask(float (&s)[S_FRAGMENTS][4], const Shape& shape, int row, int j, Keys full) const {
    if (j >= full.first && j <= full.last && sign == 1) return;
    flip(s);
    const int key = j * BC + 2 * (opaque(lane_id()) % 4);
    if (j > full.last) mask_side<Side::AFTER>(s, shape, row, key);
    if (j < full.first) mask_side<Side::BEFORE>(s, shape, row, key);
  }

  // The same for a mask that an array says.
  DEVICE void mask(float (&s)[S_FRAGMENTS][4], const MaskBits& hidden, Visit visit) const {
    flip(s);
    hidden.hide(s, visit);
  }

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
      const float limit = (m[half] + TAU) * reciprocal(c);
      any |= largest(s, half) >= (limit < 0 ? static_cast<int>(0x80000000) : bits(limit));
    }
    return any;
  }

  // m becomes the maximum so far. l is multiplied by alpha here; O has to be, too.
  DEVICE void raise(const float (&s)[S_FRAGMENTS][4], float (&alpha)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a = s[0][2 * half], b = s[0][2 * half + 1];
#pragma unroll
      for (int n = 1; n < S_FRAGMENTS; ++n) a = fmaxf(a, s[n][2 * half]), b = fmaxf(b, s[n][2 * half + 1]);
      const float top = fmaxf(m[half], c * quad_max(fmaxf(a, b)));
      alpha[half] = exp2_approx(m[half] - top);
      l[half] *= alpha[half];
      m[half] = top;
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
};

template <int N>
DEVICE void rescale(float (&o)[N][4], const float (&alpha)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
}
