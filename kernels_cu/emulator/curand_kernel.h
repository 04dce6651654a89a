// The device side of cuRAND: Philox4_32_10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and XORWOW
// (Marsaglia, "Xorshift RNGs", 2003), which is `curandState`. Seeds, subsequences and offsets lead to the words that cuRAND's do.
// Uniform numbers have its bits, too; normal ones are the host's sine, cosine and logarithm.
#pragma once
#include "emu_hide_names.h"

#include <cmath>
#include <cstdint>

#include "cuda.h"

struct curandStatePhilox4_32_10 {
  uint4 ctr, output;
  uint2 key;
  unsigned STATE;
  int boxmuller_flag, boxmuller_flag_double;
  float boxmuller_extra;
  double boxmuller_extra_double;
};
using curandStatePhilox4_32_10_t = curandStatePhilox4_32_10;

struct curandStateXORWOW {
  unsigned d, v[5];
  int boxmuller_flag, boxmuller_flag_double;
  float boxmuller_extra;
  double boxmuller_extra_double;
};
using curandStateXORWOW_t = curandStateXORWOW;
using curandState_t = curandStateXORWOW;
using curandState = curandStateXORWOW;

// 2^first steps of XORWOW's 160 bits, so many times.
extern "C" void emu_xorwow_on(unsigned* v, unsigned long times, int first);

namespace emulator {

inline uint4 philox(uint4 counter, uint2 key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter.x, b = std::uint64_t{0xCD9E8D57u} * counter.z;
    counter = {static_cast<unsigned>(b >> 32) ^ counter.y ^ key.x, static_cast<unsigned>(b),
               static_cast<unsigned>(a >> 32) ^ counter.w ^ key.y, static_cast<unsigned>(a)};
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
  return counter;
}

// The counter of 128 bits moves on, and new words lie ready.
inline void philox_on(curandStatePhilox4_32_10& s, std::uint64_t by) {
  const std::uint64_t low = s.ctr.x | std::uint64_t{s.ctr.y} << 32, next = low + by;
  s.ctr.x = static_cast<unsigned>(next), s.ctr.y = static_cast<unsigned>(next >> 32);
  if (next < low && !++s.ctr.z) ++s.ctr.w;
  s.output = philox(s.ctr, s.key);
}

inline void xorwow_on(curandStateXORWOW& s, std::uint64_t by, int first) {
  unsigned v[5] = {s.v[0], s.v[1], s.v[2], s.v[3], s.v[4]};
  emu_xorwow_on(v, by, first);
  for (int k = 0; k < 5; ++k) s.v[k] = v[k];
}

inline float curand_unit(unsigned x) { return x * 2.3283064e-10f + 2.3283064e-10f / 2.0f; }
inline double curand_unit_double(unsigned x, unsigned y) {
  const std::uint64_t z = std::uint64_t{x} ^ std::uint64_t{y} << (53 - 32);
  return z * 1.1102230246251565e-16 + 1.1102230246251565e-16 / 2.0;
}
inline float2 curand_box_muller(unsigned x, unsigned y) {
  const float u = curand_unit(x), v = y * 1.46291807e-09f + 1.46291807e-09f / 2.0f, s = std::sqrt(-2.0f * std::log(u));
  return {s * std::sin(v), s * std::cos(v)};
}
inline double2 curand_box_muller_double(unsigned a, unsigned b, unsigned c, unsigned d) {
  const double u = curand_unit_double(a, b);
  const std::uint64_t z = std::uint64_t{c} ^ std::uint64_t{d} << (53 - 32);
  const double v = z * (1.1102230246251565e-16 * 2.0) + 1.1102230246251565e-16, s = std::sqrt(-2.0 * std::log(u));
  return {s * std::sin(v * 3.14159265358979323846), s * std::cos(v * 3.14159265358979323846)};
}

}  // namespace emulator

inline void skipahead_sequence(unsigned long long n, curandStatePhilox4_32_10* s) {
  const std::uint64_t next = (s->ctr.z | std::uint64_t{s->ctr.w} << 32) + n;
  s->ctr.z = static_cast<unsigned>(next), s->ctr.w = static_cast<unsigned>(next >> 32);
  s->output = ::emulator::philox(s->ctr, s->key);
}
inline void skipahead(unsigned long long n, curandStatePhilox4_32_10* s) {
  s->STATE += n & 3;
  n /= 4;
  if (s->STATE > 3) n += 1, s->STATE -= 4;
  ::emulator::philox_on(*s, n);
}
inline void curand_init(unsigned long long seed, unsigned long long subsequence, unsigned long long offset,
                        curandStatePhilox4_32_10* s) {
  *s = {};
  s->key = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  skipahead_sequence(subsequence, s);
  skipahead(offset, s);
}
inline unsigned curand(curandStatePhilox4_32_10* s) {
  const unsigned words[4] = {s->output.x, s->output.y, s->output.z, s->output.w};
  const unsigned next = words[s->STATE++ & 3];
  if (s->STATE == 4) ::emulator::philox_on(*s, 1), s->STATE = 0;
  return next;
}
inline uint4 curand4(curandStatePhilox4_32_10* s) {
  const uint4 old = s->output;
  ::emulator::philox_on(*s, 1);
  const unsigned words[8] = {old.x, old.y, old.z, old.w, s->output.x, s->output.y, s->output.z, s->output.w};
  const unsigned* at = words + (s->STATE & 3);
  return {at[0], at[1], at[2], at[3]};
}

inline void skipahead_sequence(unsigned long long n, curandStateXORWOW* s) { ::emulator::xorwow_on(*s, n, 67); }
inline void skipahead(unsigned long long n, curandStateXORWOW* s) {
  ::emulator::xorwow_on(*s, n, 0);
  s->d += 362437u * static_cast<unsigned>(n);
}
inline void curand_init(unsigned long long seed, unsigned long long subsequence, unsigned long long offset, curandStateXORWOW* s) {
  *s = {};
  const unsigned a = (static_cast<unsigned>(seed) ^ 0xaad26b49u) * 1099087573u;
  const unsigned b = (static_cast<unsigned>(seed >> 32) ^ 0xf7dcefddu) * 2591861531u;
  s->d = 6615241u + b + a;
  s->v[0] = 123456789u + a, s->v[1] = 362436069u ^ a, s->v[2] = 521288629u + b, s->v[3] = 88675123u ^ b, s->v[4] = 5783321u + a;
  skipahead_sequence(subsequence, s);
  skipahead(offset, s);
}
inline unsigned curand(curandStateXORWOW* s) {
  const unsigned t = s->v[0] ^ s->v[0] >> 2, last = s->v[4];
  for (int k = 0; k < 4; ++k) s->v[k] = s->v[k + 1];
  s->v[4] = (last ^ last << 4) ^ (t ^ t << 1);
  return s->v[4] + (s->d += 362437u);
}

template <class State> float curand_uniform(State* s) { return ::emulator::curand_unit(curand(s)); }
template <class State> double curand_uniform_double(State* s) {
  const unsigned x = curand(s), y = curand(s);
  return ::emulator::curand_unit_double(x, y);
}
inline double curand_uniform_double(curandStatePhilox4_32_10* s) {  // of one word only
  return curand(s) * 2.3283064365386963e-10 + 2.3283064365386963e-10;
}
inline float4 curand_uniform4(curandStatePhilox4_32_10* s) {
  const uint4 x = curand4(s);
  return {::emulator::curand_unit(x.x), ::emulator::curand_unit(x.y), ::emulator::curand_unit(x.z), ::emulator::curand_unit(x.w)};
}
inline double2 curand_uniform2_double(curandStatePhilox4_32_10* s) {
  const uint4 x = curand4(s);
  return {::emulator::curand_unit_double(x.x, x.y), ::emulator::curand_unit_double(x.z, x.w)};
}
template <class State> float2 curand_normal2(State* s) {
  const unsigned x = curand(s), y = curand(s);
  return ::emulator::curand_box_muller(x, y);
}
template <class State> float curand_normal(State* s) {
  if (s->boxmuller_flag) return s->boxmuller_flag = 0, s->boxmuller_extra;
  const float2 both = curand_normal2(s);
  s->boxmuller_extra = both.y, s->boxmuller_flag = 1;
  return both.x;
}
inline float4 curand_normal4(curandStatePhilox4_32_10* s) {
  const uint4 x = curand4(s);
  const float2 a = ::emulator::curand_box_muller(x.x, x.y), b = ::emulator::curand_box_muller(x.z, x.w);
  return {a.x, a.y, b.x, b.y};
}
template <class State> double2 curand_normal2_double(State* s) {
  const unsigned a = curand(s), b = curand(s), c = curand(s), d = curand(s);
  return ::emulator::curand_box_muller_double(a, b, c, d);
}
template <class State> double curand_normal_double(State* s) {
  if (s->boxmuller_flag_double) return s->boxmuller_flag_double = 0, s->boxmuller_extra_double;
  const double2 both = curand_normal2_double(s);
  s->boxmuller_extra_double = both.y, s->boxmuller_flag_double = 1;
  return both.x;
}
template <class State> float curand_log_normal(State* s, float mean, float deviation) {
  return std::exp(mean + deviation * curand_normal(s));
}

#include "emu_show_names.h"
