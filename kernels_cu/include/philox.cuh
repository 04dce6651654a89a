// Dropout. Which weights are dropped is a function of (seed, offset, head, row, column) alone, so every kernel and both passes
// make the same mask, whatever their tiles: simulator/philox.py defines it. DROPOUT: 1 where the problem has it, else 0.
//
// A Philox call makes 16 bytes, a byte for each pair of a patch of 4 x 4. The rows 2a, 2a + 1, 2a + 8, 2a + 9 of 16 neighbours
// are a patch's, and columns alike. That shape suits accumulators (mma.cuh, and wgmma's of 16 rows per warp): a lane holds rows
// g, g + 8 and columns 8 n + 2 t, 8 n + 2 t + 1. So of two blocks of 16 x 16 side by side, the lanes with even and odd g need
// the two halves of the same two patches. Each lane makes one of them, and the pair (lanes l and l ^ 4) exchanges halves. No byte
// is left over. Backward passes hold S transposed, and the patch is the same seen from there: only the middle words, and the
// middle bytes of each word, change places. A call and 2 shuffles make 16 bytes in either layout.
//
//   word  2 (row % 2) + column % 2     byte  2 (row / 8 % 2) + column / 8 % 2
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef DROPOUT
#define DROPOUT 0
#endif

// Philox4x32 (Salmon et al., SC 2011). 7 rounds are the fewest that pass BigCrush.
template <int ROUNDS = 7>
DEVICE uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const unsigned long long a = 0xD2511F53ull * counter.x, b = 0xCD9E8D57ull * counter.z;
    counter = make_uint4(static_cast<unsigned>(b >> 32) ^ counter.y ^ key.x, static_cast<unsigned>(b),
                         static_cast<unsigned>(a >> 32) ^ counter.w ^ key.y, static_cast<unsigned>(a));
    key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
  }
  return counter;
}

// The patch of a line, which is a row or a column.
DEVICE unsigned patch_of(int line) { return line / 16 * 4 + line % 8 / 2; }

// A lane's bytes of two blocks of 16 lines by 16: the words of even and odd places, in each the bytes of lines g and g + 8.
struct RandomWords { unsigned of[2][2]; };

// The random bytes of a problem, and those of a head.
struct Dropout {
  uint2 seed, start;   // the key, and the lower half of the counters
  unsigned threshold;  // of the upper byte of a word
  unsigned limits;     // of all four bytes

  // `state` has seed and offset.
  DEVICE Dropout(const long long* state, int kept) {
    if constexpr (DROPOUT) {
      seed = load_global<uint2>(state);
      start = load_global<uint2>(state + 1);
      threshold = static_cast<unsigned>(kept) << 24;
      limits = static_cast<unsigned>(kept) * 0x01010101;
    }
  }

  // Those of a head, whose number counts over all batches.
  DEVICE Dropout of_head(int flat_head) const {
    Dropout own = *this;
    if constexpr (DROPOUT) {
      own.start.x += flat_head;
      own.start.y += own.start.x < start.x;
    }
    return own;
  }

  DEVICE uint4 patch(unsigned row, unsigned column) const { return philox4x32(make_uint4(start.x, start.y, row, column), seed); }

  // Is a weight kept? Its random byte is this one of a word.
  DEVICE bool keeps(unsigned word, int byte) const { return word << (24 - 8 * byte) < threshold; }

  // Four neighbours in a row, without those that are dropped. `column` is a multiple of 4. Most bytes are left over here.
  DEVICE float4 dropped(float4 p, int row, int column) const {
    const uint4 left = patch(patch_of(row), patch_of(column)), right = patch(patch_of(row), patch_of(column + 2));
    const int byte = 2 * (row / 8 % 2) + column / 8 % 2;
    return make_float4(keeps(row % 2 ? left.z : left.x, byte) ? p.x : 0, keeps(row % 2 ? left.w : left.y, byte) ? p.y : 0,
                       keeps(row % 2 ? right.z : right.x, byte) ? p.z : 0, keeps(row % 2 ? right.w : right.y, byte) ? p.w : 0);
  }

  // The lane's bytes of two blocks of accumulators. Lines are rows, or with TRANSPOSED columns: `lines` is the number of the block's
  // 16, `first` and `second` are those of the 16 across. All lanes of the warp call it together.
  template <bool TRANSPOSED>
  DEVICE RandomWords words(int lines, int first, int second) const {
    const bool odd = lane_id() / 4 % 2;
    const unsigned line = lines * 4 + lane_id() / 8, across = (odd ? second : first) * 4 + lane_id() % 4;
    const uint4 made = TRANSPOSED ? patch(across, line) : patch(line, across);
    const unsigned even_line[2] = {made.x, TRANSPOSED ? made.z : made.y}, odd_line[2] = {TRANSPOSED ? made.y : made.z, made.w};
    RandomWords words;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const unsigned own = odd ? odd_line[e] : even_line[e];
      const unsigned other = shuffle_xor(odd ? even_line[e] : odd_line[e], 4);
      words.of[0][e] = odd ? other : own;
      words.of[1][e] = odd ? own : other;
    }
    return words;
  }

  // Is element e of fragment n kept, of the four fragments of 8 that two blocks have?
  template <bool TRANSPOSED>
  DEVICE bool keeps(const RandomWords& words, int n, int e) const {
    return keeps(words.of[n / 2][e % 2], TRANSPOSED ? 2 * (n % 2) + e / 2 : 2 * (e / 2) + n % 2);
  }

  // Drops of rows g and g + 8 of accumulators, whose first row is the first of 16 and number `row` among those, and whose first
  // column is number `column` among the columns' 16.
  template <int N>
  DEVICE void drop(float (&p)[N][4], int row, int column) const {
    static_assert(N % 2 == 0, "blocks of 16 x 16");
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      const RandomWords random = words<false>(row, column + n / 2, column + min(n / 2 + 1, N / 2 - 1));
#pragma unroll
      for (int m = 0; m < 4 && n + m < N; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!keeps<false>(random, m, e)) p[n + m][e] = 0;
    }
  }
};

// The upper bit of each byte becomes 1 if that byte of x is below the one of `limits`. The bits below it mean nothing.
DEVICE unsigned bytes_below(unsigned x, unsigned limits) {
  constexpr unsigned UPPER = 0x80808080;
  const unsigned less = (x | UPPER) - (limits & ~UPPER);  // no byte borrows from the next
  return (~x & limits) | (~(x ^ limits) & ~less);
}

// Which weights of a warp's 16 lines are kept, for 16-bit operands: fragments of 8 lines across. Two instructions drop two weights
// then, and a lane needs 4 registers for 16 weights, so the bytes may be made long before P is known.
template <int FRAGMENTS, bool TRANSPOSED>
struct KeptWeights {
  static_assert(FRAGMENTS % 2 == 0, "blocks of 16 x 16");
  RandomWords signs[ceil_div(FRAGMENTS, 4)];  // of each byte the upper bit is 1 if its weight is kept

  // Draws the bytes of the 16 lines with number `lines`, in blocks of 16 from number `across` on. The branch is always taken, and
  // the compiler can't take it away. So it doesn't mix this with products that it ought to issue first.
  DEVICE void draw(const Dropout& dropout, int lines, int across) {
    if (dropout.limits != 0) {
#pragma unroll
      for (int n = 0; n < FRAGMENTS; n += 4) {
        signs[n / 4] = dropout.words<TRANSPOSED>(lines, across + n / 2, across + min(n / 2 + 1, FRAGMENTS / 2 - 1));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned& word = signs[n / 4].of[i / 2][i % 2];
          word = bytes_below(word, dropout.limits);
        }
      }
    }
  }

  // The byte of a line of a fragment in its words.
  static DEVICE constexpr int byte_of(int n, int half) { return TRANSPOSED ? 2 * (n % 2) + half : 2 * half + n % 2; }

  // All ones in each half whose weight is kept, of two neighbours in a line of fragment n.
  DEVICE unsigned pair(int n, int half) const {
    const RandomWords& of = signs[n / 4];
    return spread_signs(of.of[n / 2 % 2][0], of.of[n / 2 % 2][1], 0x4400 + 0x1111 * byte_of(n, half));
  }

  // All ones if element e of fragment n is kept.
  DEVICE unsigned one(int n, int e) const {
    const unsigned word = signs[n / 4].of[n / 2 % 2][e % 2];
    return spread_signs(word, word, 0x1111 * byte_of(n, e / 2));
  }

  // Drops of an operand A, which has 16 columns in each of its four registers.
  DEVICE void drop(unsigned (&p)[FRAGMENTS / 2][4]) const {
    if constexpr (DROPOUT) {
#pragma unroll
      for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) p[n / 2][n % 2 * 2 + half] &= pair(n, half);
    }
  }
};

// A number of a row, D say, where sums are to be multiplied with 256 / kept in the end.
DEVICE float kept_part(float x, int kept) {
  if constexpr (DROPOUT) return x * (kept / 256.f);
  return x;
}

// The factor of a sum over the kept weights alone.
DEVICE float of_kept(float factor, int kept) {
  if constexpr (DROPOUT) return factor * (256.f / kept);
  return factor;
}
