// The mask of drafts (DRAFTS). They are the last keys of a request in pages, as many as it has queries: a tree of guesses.
// Each query has a word, whose bit j shows the j-th draft. All earlier keys are visible.
#pragma once

#include "memory.cuh"
#include "params.cuh"
#include "warp.cuh"

#ifndef DRAFTS
#define DRAFTS 0
#endif

// A kernel takes MASK_OF_DRAFTS among its parameters, and hands GIVEN_DRAFTS on.
#if DRAFTS
#define MASK_OF_DRAFTS const unsigned *draft_mask,
#define GIVEN_DRAFTS draft_mask
#else
#define MASK_OF_DRAFTS
#define GIVEN_DRAFTS nullptr
#endif

// The first key tile that has a draft. All behind it have.
DEVICE int first_draft_tile(const Shape& shape) { return max(shape.len_kv - shape.len_q, 0) / BC; }

// The words of a row tile's queries: each lane has that of its own row, of up to 32.
struct Drafts {
  unsigned word = 0;

  // Hides drafts in accumulators (keys_as_rows.cuh) whose queries are the tile's rows from 0 on. Their keys begin with `key`.
  template <int M, int N>
  DEVICE void hide(float (&s)[M][N][4], const Shape& shape, int key) const {
    static_assert(16 * M <= 32, "the keys of a column are bits of a word");
    const int skipped = min(max(key - (shape.len_kv - shape.len_q), -32), 31);  // drafts before these keys
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned own = shuffle(word, 8 * n + 2 * (lane_id() % 4) + e);
        const unsigned keys = ((static_cast<unsigned long long>(own) << 32) | 0xffffffffu) >> (32 + skipped);
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (!(keys >> lane_id() / 4 >> (16 * i + 8 * half) & 1)) s[i][n][2 * half + e] = -INF;
      }
  }
};
