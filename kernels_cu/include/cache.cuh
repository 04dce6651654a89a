// K and V as caches keep them. CACHE: 0 in the storage dtype, 1 in e4m3, 2 in int8. K_SCALE, V_SCALE: what each scale of theirs is
// for (ScaleOf), 0 where there is none. An element times its scale is the value.
//
// 16 bits hold every element of 8 bits exactly. So an element is widened as it leaves SRAM, and the tensor cores multiply elements.
// A scale for all or for a head scales the scores, or at the end the output. A key's scales its column of S, or of P before that is
// rounded. A channel's of K scales a column of Q, whose product then has float32's bits: it is multiplied in parts.
#pragma once

#include "mma.cuh"
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

// A column of S times the scale of its key. A lane's columns are 2t and 2t+1 of each fragment.
template <int M, int N>
DEVICE void scale_columns(float (&s)[M][N][4], unsigned scales) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 scale = load_shared<float2>(scales + 4 * (8 * n + 2 * (lane_id() % 4)));
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] *= e % 2 ? scale.y : scale.x;
  }
}

// A column of P times the scale of its value, relative to the largest so far, `base`: so float16 holds it, however small scales
// are. O is relative to the same.
template <int M, int N, int D>
DEVICE void weigh_columns(float (&p)[M][N][4], float (&o)[M][D][4], float& base, unsigned scales) {
  float2 scale[N];
  float top = base;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    scale[n] = load_shared<float2>(scales + 4 * (8 * n + 2 * (lane_id() % 4)));
    top = fmaxf(top, fmaxf(scale[n].x, scale[n].y));
  }
  top = quad_max(top);
  const float weight = reciprocal(top);
  if (any_lane(top > base)) {
    const float shrink = base * weight;
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int n = 0; n < D; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] *= shrink;
    base = top;
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[i][n][e] *= weight * (e % 2 ? scale[n].y : scale[n].x);
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

// Two 8 x 8 matrices of 16 bits from SRAM, which are 16 rows of 16 elements: as ldmatrix.
DEVICE void ldmatrix_of_two(unsigned (&r)[2], unsigned address, bool transposed) {
#ifdef EMULATOR
  emu_ptx_ldmatrix(r, address, 2, transposed);
#else
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
#endif
}

// As in mma.cuh, but a lane gets elements 4t..4t+3 of its key. They are the operand's k 2t, 2t+8, 2t+1, 2t+9: load_query has Q so.
template <int ROWS, int COLUMNS>
DEVICE FragmentB load_b_rows(ByteTile<ROWS, COLUMNS> tile, int n, int k) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), k / 16) + n * COLUMNS, false);
  return {{even_elements(w[0]), odd_elements(w[0]), even_elements(w[1]), odd_elements(w[1])}};
}

// The same: a lane gets columns 2g and 2g+1 of keys 2t and 2t+1, and of those eight further. They are the operand's columns g and
// g+8. So of each 16 columns of O a lane has 4t..4t+3 (four_outputs).
template <int ROWS, int COLUMNS>
DEVICE FragmentB load_b_columns(ByteTile<ROWS, COLUMNS> tile, int k, int n) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), n / 16) + k * COLUMNS, true);
  return {{even_elements(w[0]), even_elements(w[1]), odd_elements(w[0]), odd_elements(w[1])}};
}

// Columns 4t..4t+3 of 16 columns of O, in this lane's upper row (half 0) or its lower one, times `factor`.
DEVICE float4 four_outputs(const float (&first)[4], const float (&second)[4], int half, float factor) {
  return make_float4(first[2 * half] * factor, second[2 * half] * factor, first[2 * half + 1] * factor, second[2 * half + 1] * factor);
}

// A of Q, in parts.
struct QueryFragment { FragmentA part[Q_PARTS]; };

// 16 rows from `row`, 16 columns from `k`, in the order of load_b_rows; `channels` is where the scales of K's channels lie in SRAM.
template <class TileT>
DEVICE QueryFragment load_query(TileT tile, int row, int k, unsigned channels) {
  QueryFragment q;
  const int t = lane_id() % 4;
  const unsigned corner = tile.right(tile.at(lane_id() / 4, t / 2), k / CHUNK_ELEMENTS) + t % 2 * 8 + row * TileT::ROW_BYTES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint2 four = load_shared<uint2>(corner + 8 * half * TileT::ROW_BYTES);
    q.part[0].r[half] = __byte_perm(four.x, four.y, 0x5410), q.part[0].r[half + 2] = __byte_perm(four.x, four.y, 0x7632);
  }
  if constexpr (K_SCALE == CHANNEL) {
    const float4 scale = load_shared<float4>(channels + 4 * (k + 4 * t));
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float2 rest = unpack(q.part[0].r[r]);
      rest.x *= r < 2 ? scale.x : scale.y, rest.y *= r < 2 ? scale.z : scale.w;
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

DEVICE void mma(float (&c0)[4], float (&c1)[4], const QueryFragment& a, const FragmentB& b) {
#pragma unroll
  for (int n = 0; n < Q_PARTS; ++n) mma(c0, c1, a.part[n], b);
}

#else

template <int ROWS, int COLUMNS>
using CacheTile = Tile<ROWS, COLUMNS>;
using QueryFragment = FragmentA;
template <class TileT>
DEVICE QueryFragment load_query(TileT tile, int row, int k, unsigned) {
  return load_a(tile, row, k);
}

#endif
