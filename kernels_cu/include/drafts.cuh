// The mask of drafts (DRAFTS). They are the last keys of a request in pages, as many as it has queries: a tree of guesses.
// Each query has a word, whose bit j shows the j-th draft. All earlier keys are visible.
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef DRAFTS
#define DRAFTS 0
#endif

// The first key tile that has a draft. All behind it have.
DEVICE int first_draft_tile(const Shape& shape) { return max(shape.len_kv - shape.len_q, 0) / BC; }

// The words of a row tile's queries: each lane has that of its own row, of up to 32.
struct Drafts {
  unsigned word = 0;

  // Hides drafts in 16 rows of accumulators (mma.cuh), from row `first_row` of the tile on. Their columns begin with key
  // `key`. `lane_column` (2t) is this lane's first column.
  template <int N>
  DEVICE void hide(float (&s)[N][4], const Shape& shape, int first_row, int key, int lane_column) const {
    static_assert(8 * N <= 32, "the columns of a row are bits of a word");
    const int skipped = min(max(key - (shape.len_kv - shape.len_q), -32), 31);  // drafts before these columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned own = shuffle(word, first_row + 8 * half + lane_id() / 4);
      const unsigned columns = ((static_cast<unsigned long long>(own) << 32) | 0xffffffffu) >> (32 + skipped);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(columns >> lane_column >> (8 * n + e) & 1)) s[n][2 * half + e] = -INF;
    }
  }
};
