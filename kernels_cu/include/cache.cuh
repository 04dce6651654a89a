// K and V as caches keep them. CACHE: 0 in the storage dtype, 1 in e4m3, 2 in int8. K_SCALE, V_SCALE: what each scale of theirs is
// for (ScaleOf), 0 where there is none. An element times its scale is the value.
//
// 16 bits hold every element of 8 bits exactly. So an element is widened as it leaves SRAM, and the tensor cores multiply elements.
// A scale for all or for a head scales the scores, or at the end the output. A key's scales its column of S, or of P before that is
// rounded. A channel's of K scales a column of Q, whose product then has float32's bits: it is multiplied in parts.
#pragma once

#include "keys_as_rows.cuh"
#include "params.cuh"

#ifndef CACHE
#define CACHE 0
#endif
#ifndef K_SCALE
#define K_SCALE 0
#endif
#ifndef V_SCALE
#define V_SCALE 0
#endif

enum ScaleOf { ALL = 1, HEAD, TOKEN, CHANNEL };
constexpr bool QUANTIZED = CACHE != 0;
constexpr int CACHE_BYTES = QUANTIZED ? 1 : ELEMENT_BYTES;  // of an element
// Parts that add up to a product of Q and a scale: all of its bits in bfloat16, all but the least in float16.
constexpr int Q_PARTS = K_SCALE != CHANNEL ? 1 : FL_DTYPE == 2 ? 3 : 2;

// Bytes of a row of K or V.
DEVICE int cache_row_bytes(const Shape& shape) { return shape.head_dim * CACHE_BYTES; }

// Where the scales of K and V lie, float32: all of them, one for each head, head x channel, or (batch or page) x head x key.
#if CACHE
struct CacheScales { const float *of_k, *of_v; };
#else
struct CacheScales { static constexpr const float *of_k = nullptr, *of_v = nullptr; };
#endif

// The scale for all or for a KV head, and 1 where scales are for less, or there are none.
template <int OF>
DEVICE float scale_of(const float* scales, int kv_head) {
  if constexpr (OF == ALL || OF == HEAD) return load_global<float>(scales + (OF == HEAD ? kv_head : 0));
  return 1;
}

// What scores are multiplied with, times a scale of K. As in Scores it stays above 0.
template <int OF>
DEVICE float times_scale(float c, const float* scales, int kv_head) {
  if constexpr (OF != ALL && OF != HEAD) return c;
  const float scale = scale_of<OF>(scales, kv_head);
  return c * (scale > 0 ? scale : 0x1p-60f);
}

// Lets a warp copy the scales of its keys, of which `inside` are there. `from` is the first one's.
template <int KEYS>
DEVICE void copy_scales(unsigned to, const float* from, int inside) {
#pragma unroll 1
  for (int key = lane_id(); key < round_up(KEYS, 32); key += 32) {
    lanes_meet();
    if (key < KEYS) copy_async_word(to + 4 * key, from + key, key < inside);
  }
}

// A row of S times the scale of its key, of which a lane has g and g + 8 of each fragment (keys_as_rows.cuh).
template <int M, int N>
DEVICE void scale_keys(float (&s)[M][N][4], unsigned scales) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = load_shared<float>(scales + 4 * (16 * i + 8 * half + lane_id() / 4));
#pragma unroll
      for (int n = 0; n < N; ++n) s[i][n][2 * half] *= scale, s[i][n][2 * half + 1] *= scale;
    }
}

// A row of P times the scale of its value, relative to the largest so far, `base`: so float16 holds it, however small scales are. O
// is relative to the same.
template <int M, int N, int D>
DEVICE void weigh_keys(float (&p)[M][N][4], float (&o)[D][N][4], float& base, unsigned scales) {
  float scale[M][2], top = base;
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[i][half] = load_shared<float>(scales + 4 * (16 * i + 8 * half + lane_id() / 4));
      top = fmaxf(top, scale[i][half]);
    }
  top = column_max(top);
  const float weight = reciprocal(top);
  if (any_lane(top > base)) {
    const float shrink = base * weight;
#pragma unroll
    for (int d = 0; d < D; ++d)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[d][n][e] *= shrink;
    base = top;
  }
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][n][e] *= weight * scale[i][e / 2];
}

#if CACHE

// A tile of bytes, which a Tile counts two by two.
template <int ROWS, int COLUMNS>
struct ByteTile : Tile<ROWS, COLUMNS / 2> {};
template <int ROWS, int COLUMNS>
using CacheTile = ByteTile<ROWS, COLUMNS>;

// x y + z of both elements of a word.
DEVICE unsigned multiply_add_both(unsigned x, unsigned y, unsigned z) {
#ifdef EMULATOR
  const float2 a = unpack(x), b = unpack(y), c = unpack(z);
  return pack(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
#else
  unsigned both;
#if FL_DTYPE == 2
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(x), "r"(y), "r"(z));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(x), "r"(y), "r"(z));
#endif
  return both;
#endif
}

// Of four elements the second and the fourth, or the first and the third, in 16 bits.
//
// e4m3: sign, exponent and mantissa move to where 16 bits have them. The exponent is then too small by as much as the biases differ
// (8 in float16, 120 in bfloat16), and a product makes up for it, subnormals included. (The NaN reads as 480.)
// int8: its bits below those of 1024 or 128 make a float that is too large by a constant.
DEVICE unsigned odd_elements(unsigned x);
DEVICE unsigned even_elements(unsigned x);
#if CACHE == 1
DEVICE unsigned odd_elements(unsigned x) {
  constexpr unsigned MAGNITUDES = FL_DTYPE == 2 ? 0x07f007f0u : 0x3f803f80u, BIAS = FL_DTYPE == 2 ? 0x7b807b80u : 0x5c005c00u;
  return multiply_add_both((x & 0x80008000u) | (x >> (FL_DTYPE == 2 ? 4 : 1) & MAGNITUDES), BIAS, 0x80008000u);
}
DEVICE unsigned even_elements(unsigned x) { return odd_elements(x << 8); }
#elif FL_DTYPE == 2
DEVICE unsigned even_elements(unsigned x) {  // 128 + the lower seven bits, less 128, or 256 where the eighth is set
  return multiply_add_both((x & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (x & 0x007f007fu) | 0x43004300u);
}
DEVICE unsigned odd_elements(unsigned x) { return even_elements(x >> 8); }
#else
DEVICE unsigned even_elements(unsigned x) {  // 1024 + 128 + the element, less 1152
  return multiply_add_both(((x ^ 0x00800080u) & 0x00ff00ffu) | 0x64006400u, 0x3c003c00u, 0xe480e480u);
}
DEVICE unsigned odd_elements(unsigned x) { return even_elements(x >> 8); }
#endif

// K's 16 rows from `key`, 16 columns from `k`: a lane gets elements 4t..4t+3 of keys g and g + 8. They are the operand's k 2t, 2t+8,
// 2t+1, 2t+9: load_query has Q so.
template <int ROWS, int COLUMNS>
DEVICE FragmentA load_keys(ByteTile<ROWS, COLUMNS> tile, int key, int k) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), k / 16) + key * COLUMNS, false);
  return {{even_elements(w[0]), even_elements(w[1]), odd_elements(w[0]), odd_elements(w[1])}};
}

// V transposed, columns `column`.. of keys k..: a lane gets columns 2g and 2g+1 of keys 2t and 2t+1, and of those eight further. They
// are the operand's rows g and g + 8. So of each 16 columns of O a lane has 2g and 2g+1 (store_outputs).
template <int ROWS, int COLUMNS>
DEVICE FragmentA load_values(ByteTile<ROWS, COLUMNS> tile, int column, int k) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), column / 16) + k * COLUMNS, true);
  return {{even_elements(w[0]), odd_elements(w[0]), even_elements(w[1]), odd_elements(w[1])}};
}

// 16 columns of O of a query, of which a lane has two, to where the columns begin: at(column) is an address.
template <class At>
DEVICE void store_outputs(At at, float first, float second) {
  store_shared(at(2 * (lane_id() / 4)), make_float2(first, second));
}

// Q transposed, in parts.
struct QueryFragment { Fragment8 part[Q_PARTS]; };

// Eight rows from `row`, 16 columns from `k`, in the order of load_keys; `channels` is where the scales of K's channels lie in SRAM.
template <class TileT>
DEVICE QueryFragment load_query(TileT tile, int row, int k, unsigned channels) {
  QueryFragment q;
  const int t = lane_id() % 4;
  const unsigned corner = tile.right(tile.at(lane_id() / 4, t / 2), k / CHUNK_ELEMENTS) + t % 2 * 8;
  const uint2 four = load_shared<uint2>(corner + row * TileT::ROW_BYTES);
  q.part[0].r[0] = __byte_perm(four.x, four.y, 0x5410), q.part[0].r[1] = __byte_perm(four.x, four.y, 0x7632);
  if constexpr (K_SCALE == CHANNEL) {
    const float4 scale = load_shared<float4>(channels + 4 * (k + 4 * t));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 rest = unpack(q.part[0].r[r]);
      rest.x *= r == 0 ? scale.x : scale.y, rest.y *= r == 0 ? scale.z : scale.w;
#pragma unroll
      for (int n = 0; n < Q_PARTS; ++n) {
        q.part[n].r[r] = pack(rest.x, rest.y);
        const float2 held = unpack(q.part[n].r[r]);
        rest.x -= held.x, rest.y -= held.y;
      }
    }
  }
  return q;
}

DEVICE void mma(float (&c)[4], const FragmentA& a, const QueryFragment& b) {
#pragma unroll
  for (int n = 0; n < Q_PARTS; ++n) mma(c, a, b.part[n]);
}

#else

template <int ROWS, int COLUMNS>
using CacheTile = Tile<ROWS, COLUMNS>;
using QueryFragment = Fragment8;
template <class TileT>
DEVICE FragmentA load_keys(TileT tile, int key, int k) {
  return load_a(tile, key, k);
}
template <class TileT>
DEVICE FragmentA load_values(TileT tile, int column, int k) {
  return load_a_columns(tile, column, k);
}
template <class At>
DEVICE void store_outputs(At at, float first, float second) {
  store_shared(at(lane_id() / 4), first), store_shared(at(lane_id() / 4 + 8), second);
}
template <class TileT>
DEVICE QueryFragment load_query(TileT tile, int row, int k, unsigned) {
  return load_8_rows(tile, row, k);
}

#endif
