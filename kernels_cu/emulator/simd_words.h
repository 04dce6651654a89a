// Arithmetic on the two halves or the four bytes of a word (CUDA's SIMD intrinsics): __vadd4, __vsubss4, __vcmpeq2 …
#pragma once
#include "emu_hide_names.h"

#include <cstdint>

namespace emulator {

template <int N, bool SIGNED>
using Part = std::conditional_t<N == 2, std::conditional_t<SIGNED, std::int16_t, std::uint16_t>,
                                std::conditional_t<SIGNED, std::int8_t, std::uint8_t>>;

// f of each part, which wraps or (`SATURATE`) stays in its range.
template <int N, bool SIGNED, bool SATURATE = false, class F>
inline unsigned each_part(unsigned x, unsigned y, F f) {
  using P = Part<N, SIGNED>;
  constexpr int BITS = 32 / N, LEAST = std::numeric_limits<P>::min(), MOST = std::numeric_limits<P>::max();
  unsigned word = 0;
  for (int at = 0; at < 32; at += BITS) {
    int z = f(static_cast<int>(static_cast<P>(x >> at)), static_cast<int>(static_cast<P>(y >> at)));
    if (SATURATE) z = z < LEAST ? LEAST : z > MOST ? MOST : z;
    word |= static_cast<unsigned>(static_cast<Part<N, false>>(z)) << at;
  }
  return word;
}
template <int N, bool SIGNED, class F>
inline unsigned sum_of_parts(unsigned x, unsigned y, F f) {
  unsigned sum = 0;
  for (int at = 0; at < 32; at += 32 / N)
    sum += static_cast<unsigned>(f(static_cast<int>(static_cast<Part<N, SIGNED>>(x >> at)), static_cast<int>(static_cast<Part<N, SIGNED>>(y >> at))));
  return sum;
}

}  // namespace emulator

#define EMU_WORD_ONE(NAME, N, SIGNED, SATURATE, EXPRESSION) \
  inline unsigned NAME##N(unsigned x) { return emulator::each_part<N, SIGNED, SATURATE>(x, 0u, [](int a, int) -> int { return EXPRESSION; }); }
#define EMU_WORD_TWO(NAME, N, SIGNED, SATURATE, EXPRESSION) \
  inline unsigned NAME##N(unsigned x, unsigned y) { return emulator::each_part<N, SIGNED, SATURATE>(x, y, [](int a, int b) -> int { return EXPRESSION; }); }
#define EMU_WORD_COMPARISON(NAME, OP, N, LETTER, SIGNED)                       \
  EMU_WORD_TWO(__vcmp##NAME##LETTER, N, SIGNED, false, a OP b ? -1 : 0)        \
  EMU_WORD_TWO(__vset##NAME##LETTER, N, SIGNED, false, a OP b ? 1 : 0)
#define EMU_WORDS(N)                                                                                               \
  EMU_WORD_ONE(__vabs, N, true, false, a < 0 ? -a : a)                                                             \
  EMU_WORD_ONE(__vabsss, N, true, true, a < 0 ? -a : a)                                                            \
  EMU_WORD_ONE(__vneg, N, true, false, -a)                                                                         \
  EMU_WORD_ONE(__vnegss, N, true, true, -a)                                                                        \
  EMU_WORD_TWO(__vabsdiffs, N, true, false, a > b ? a - b : b - a)                                                 \
  EMU_WORD_TWO(__vabsdiffu, N, false, false, a > b ? a - b : b - a)                                                \
  EMU_WORD_TWO(__vadd, N, false, false, a + b)                                                                     \
  EMU_WORD_TWO(__vaddss, N, true, true, a + b)                                                                     \
  EMU_WORD_TWO(__vaddus, N, false, true, a + b)                                                                    \
  EMU_WORD_TWO(__vsub, N, false, false, a - b)                                                                     \
  EMU_WORD_TWO(__vsubss, N, true, true, a - b)                                                                     \
  EMU_WORD_TWO(__vsubus, N, false, true, a - b)                                                                    \
  EMU_WORD_TWO(__vavgs, N, true, false, (a + b + (a + b >= 0)) >> 1)                                               \
  EMU_WORD_TWO(__vavgu, N, false, false, (a + b + 1) >> 1)                                                         \
  EMU_WORD_TWO(__vhaddu, N, false, false, (a + b) >> 1)                                                            \
  EMU_WORD_TWO(__vmaxs, N, true, false, a < b ? b : a)                                                             \
  EMU_WORD_TWO(__vmaxu, N, false, false, a < b ? b : a)                                                            \
  EMU_WORD_TWO(__vmins, N, true, false, b < a ? b : a)                                                             \
  EMU_WORD_TWO(__vminu, N, false, false, b < a ? b : a)                                                            \
  EMU_WORD_COMPARISON(eq, ==, N, , false)                                                                          \
  EMU_WORD_COMPARISON(ne, !=, N, , false)                                                                          \
  EMU_WORD_COMPARISON(ge, >=, N, s, true)                                                                          \
  EMU_WORD_COMPARISON(gt, >, N, s, true)                                                                           \
  EMU_WORD_COMPARISON(le, <=, N, s, true)                                                                          \
  EMU_WORD_COMPARISON(lt, <, N, s, true)                                                                           \
  EMU_WORD_COMPARISON(ge, >=, N, u, false)                                                                         \
  EMU_WORD_COMPARISON(gt, >, N, u, false)                                                                          \
  EMU_WORD_COMPARISON(le, <=, N, u, false)                                                                         \
  EMU_WORD_COMPARISON(lt, <, N, u, false)                                                                          \
  inline unsigned __vsads##N(unsigned x, unsigned y) { return emulator::sum_of_parts<N, true>(x, y, [](int a, int b) { return a > b ? a - b : b - a; }); } \
  inline unsigned __vsadu##N(unsigned x, unsigned y) { return emulator::sum_of_parts<N, false>(x, y, [](int a, int b) { return a > b ? a - b : b - a; }); }
EMU_WORDS(2)
EMU_WORDS(4)
#undef EMU_WORDS
#undef EMU_WORD_COMPARISON
#undef EMU_WORD_TWO
#undef EMU_WORD_ONE

// Dot products of two halves and two of the four bytes.
inline int __dp2a_lo(int x, int y, int z) { return z + static_cast<std::int16_t>(x) * static_cast<std::int8_t>(y) + (x >> 16) * static_cast<std::int8_t>(y >> 8); }
inline int __dp2a_hi(int x, int y, int z) { return z + static_cast<std::int16_t>(x) * static_cast<std::int8_t>(y >> 16) + (x >> 16) * (y >> 24); }
inline unsigned __dp2a_lo(unsigned x, unsigned y, unsigned z) { return z + (x & 0xffffu) * (y & 255u) + (x >> 16) * (y >> 8 & 255u); }
inline unsigned __dp2a_hi(unsigned x, unsigned y, unsigned z) { return z + (x & 0xffffu) * (y >> 16 & 255u) + (x >> 16) * (y >> 24); }

#include "emu_show_names.h"
