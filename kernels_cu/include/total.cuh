// What the chunks of a row have together, for the launch of mla_hopper.cu that adds them up.
#pragma once

#include "elements.cuh"

// In partial results a row's columns lie as lanes hold them. A lane has two of the first eight of sixteen columns and two of the
// last eight. It stores these four together. So a warp's store has 64 bytes of a row, not 32, and half as many stores wait for the
// L1. Here the lanes swap them for four columns that are neighbours in the output: even lanes get four of the first eight, odd
// lanes four of the last.
DEVICE float4 neighbours(float4 x) {
  const bool odd = lane_id() % 2;
  const float a = shuffle_xor(odd ? x.x : x.z, 1), b = shuffle_xor(odd ? x.y : x.w, 1);
  return odd ? make_float4(a, b, x.z, x.w) : make_float4(x.x, x.y, a, b);
}
DEVICE int first_of_neighbours() { return lane_id() / 4 * 16 + lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4; }

// The sum over the chunks of a row, in the columns that a lane has.
struct Total {
  float m = LOWEST, l = 0;
  float4 o = make_float4(0, 0, 0, 0);

  // Adds up `chunks` partial results in a fixed order. A warp asks for AT_ONCE of them together. The next one lies `apart` rows
  // further.
  template <int AT_ONCE>
  DEVICE void add(const float* partial, const float* partial_m, const float* partial_l, long long first_part, int apart, int chunks) {
    const float* own = partial + first_part * VALUE_DIM + warp_id() * 128 + lane_id() * 4;
    float4 x[AT_ONCE];
    auto ask = [&](int k) {  // for chunk k and those behind it
      const float* from = own + static_cast<long long>(k) * apart * VALUE_DIM;
      lanes_meet();
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n, from += static_cast<long long>(apart) * VALUE_DIM) {
        x[n] = make_float4(0, 0, 0, 0);
        if (k + n < chunks) x[n] = load_global<float4>(from);
      }
    };
#pragma unroll 1
    for (int first = 0; first < chunks; first += 32) {
      ask(first);  // it is on its way while the weights are computed
      float own_m = LOWEST, own_l = 0;
      lanes_meet();
      if (first + lane_id() < chunks) {
        const long long at = first_part + static_cast<long long>(first + lane_id()) * apart;
        own_m = load_global<float>(partial_m + at), own_l = load_global<float>(partial_l + at);
      }
      const float top = fmaxf(m, warp_max(own_m)), alpha = exp2_approx(m - top), weight = exp2_approx(own_m - top);
      m = top, l = l * alpha + warp_sum(weight * own_l), o = times(o, alpha);
#pragma unroll 1
      for (int k = first; k < min(first + 32, chunks); k += AT_ONCE) {
        if (k > first) ask(k);
#pragma unroll
        for (int n = AT_ONCE - 1; n >= 0; --n)  // the last first: so all are asked for before any is waited for
          o = weighed(x[n], shuffle(weight, k - first + n), o, 1);
      }
    }
  }
};
