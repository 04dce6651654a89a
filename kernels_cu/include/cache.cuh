// K and V as caches keep them. CACHE: 0 in the storage dtype, 1 in e4m3, 2 in int8. K_SCALE, V_SCALE: what a scale of K or V is
// for (ScaleOf), 0 where there is none. An element times its scale is the value.
//
// float16 holds every element of 8 bits exactly. So an element is widened as it leaves SRAM, and the tensor cores multiply float16.
// A query of bfloat16 is brought there by a power of two (QueryFactors), and P is rounded there.
// A scale for all, or for a head, scales the scores (K's) or the output at the end (V's). A key's scale of K scales its row of S. A
// key's scale of V scales its row of P, before P is rounded. A channel's scale of K scales a column of Q. That product has float32's
// bits, so the tensor cores multiply it in two parts.
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
constexpr int Q_PARTS = K_SCALE == CHANNEL ? 2 : 1;  // that add up to a product of Q and a scale, all bits but the least
constexpr bool QUERY_FACTORS = QUANTIZED && (FL_DTYPE == 2 || K_SCALE == CHANNEL);

// Bytes of a row of K or V.
DEVICE int cache_row_bytes(const Shape& shape) { return shape.head_dim * CACHE_BYTES; }

// Where the scales of K and V lie, float32: all of them, one for each head, head x channel, or (batch or page) x head x key.
// A kernel takes SCALES_OF_CACHE among its parameters, and hands GIVEN_SCALES on.
#if CACHE
#define SCALES_OF_CACHE const float *k_scale, const float *v_scale,
#define GIVEN_SCALES {k_scale, v_scale}
struct CacheScales { const float *of_k, *of_v; };
#else
#define SCALES_OF_CACHE
#define GIVEN_SCALES {}
struct CacheScales { static constexpr const float *of_k = nullptr, *of_v = nullptr; };
#endif

// The scale for all or for a KV head, and 1 where scales are for less, or there are none.
template <int OF>
DEVICE float scale_of(const float* scales, int kv_head) {
  if constexpr (OF == ALL || OF == HEAD) return load_global<float>(scales + (OF == HEAD ? kv_head : 0));
  return 1;
}

// The factor of scores, times a scale of K. As in Scores it stays above 0.
template <int OF>
DEVICE float times_scale(float c, const float* scales, int kv_head) {
  if constexpr (OF != ALL && OF != HEAD) return c;
  const float scale = scale_of<OF>(scales, kv_head);
  return c * (scale > 0 ? scale : 0x1p-60f);
}

// A warp copies the scales of its keys. `inside` of them are there. `from` is the first one's.
template <int KEYS>
DEVICE void copy_scales(unsigned to, const float* from, int inside) {
#pragma unroll 1
  for (int key = lane_id(); key < round_up(KEYS, 32); key += 32) {
    lanes_meet();
    if (key < KEYS) copy_async_word(to + 4 * key, from + key, key < inside);
  }
}

// Each row of S times the scale of its key. A lane has rows g and g + 8 of each fragment (keys_as_rows.cuh).
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

// Each row of P times the scale of its value, relative to the largest scale so far, `base`. So float16 holds it, however small
// scales are. O is relative to the same.
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

#if FL_DTYPE == 2
DEVICE unsigned pack_half(float low, float high) {
#ifdef EMULATOR
  return emulator::f16_of_float(low) | static_cast<unsigned>(emulator::f16_of_float(high)) << 16;
#else
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}
DEVICE float2 unpack_half(unsigned both) {
#ifdef EMULATOR
  return make_float2(emulator::float_of_f16(both & 0xffffu), emulator::float_of_f16(both >> 16));
#else
  float2 x;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x.x), "=f"(x.y) : "r"(both));
  return x;
#endif
}
DEVICE void multiply(float (&c)[4], const FragmentA& a, const Fragment8& b) {
#ifdef EMULATOR
  emu_mma_f16(c, a.r, b.r[0], b.r[1]);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
#endif
}
#else
DEVICE unsigned pack_half(float low, float high) { return pack(low, high); }
DEVICE float2 unpack_half(unsigned both) { return unpack(both); }
DEVICE void multiply(float (&c)[4], const FragmentA& a, const Fragment8& b) { mma(c, a, b); }
#endif

// x y + z of both float16 of a word.
DEVICE unsigned multiply_add_both(unsigned x, unsigned y, unsigned z) {
#ifdef EMULATOR
  const float2 a = unpack_half(x), b = unpack_half(y), c = unpack_half(z);
  return pack_half(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
#else
  unsigned both;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(x), "r"(y), "r"(z));
  return both;
#endif
}

// The first two of four elements in float16, or the last two (HALF 1).
//
// e4m3: there is an instruction. Without it sign, exponent and mantissa move to where float16 has them. The exponent is then too small
// by 8, and a product makes up for it, subnormals included. (The NaN then reads as 480.)
// int8: an element and 128 below the bits of 1024 make a number that is too large by 1152.
template <int HALF>
DEVICE unsigned two_elements(unsigned x) {
#if CACHE == 2
  return multiply_add_both(__byte_perm(x ^ 0x80808080u, 0x64646464u, HALF ? 0x4342 : 0x4140), 0x3c003c00u, 0xe480e480u);
#elif defined(EMULATOR) || __CUDA_ARCH__ < 890
  const unsigned high = __byte_perm(x, 0, HALF ? 0x3424 : 0x1404);
  return multiply_add_both((high & 0x80008000u) | (high >> 1 & 0x3f803f80u), 0x5c005c00u, 0x80008000u);
#else
  unsigned both;
  if (HALF)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(both) : "r"(x));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(both) : "r"(x));
  return both;
#endif
}

// K's 16 rows from `key`, 16 columns from `k`: a lane gets elements 4t..4t+3 of keys g and g + 8. They are the operand's k 2t, 2t+1,
// 2t+8, 2t+9: load_queries has Q so.
template <int ROWS, int COLUMNS>
DEVICE FragmentA load_keys(ByteTile<ROWS, COLUMNS> tile, int key, int k) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), k / 16) + key * COLUMNS, false);
  return {{two_elements<0>(w[0]), two_elements<0>(w[1]), two_elements<1>(w[0]), two_elements<1>(w[1])}};
}

// V transposed, columns `column`.. of keys k..: a lane gets columns 2g and 2g+1 of keys 2t and 2t+1, and of those eight further. They
// are the operand's rows g and g + 8. So of each 16 columns of O a lane has 2g and 2g+1 (store_outputs).
template <int ROWS, int COLUMNS>
DEVICE FragmentA load_values(ByteTile<ROWS, COLUMNS> tile, int column, int k) {
  unsigned w[2];
  ldmatrix_of_two(w, tile.right(tile.at(lane_id() % 16, 0), column / 16) + k * COLUMNS, true);
  const unsigned x = __byte_perm(w[0], 0, 0x3120), y = __byte_perm(w[1], 0, 0x3120);  // both keys of a column side by side
  return {{two_elements<0>(x), two_elements<1>(x), two_elements<0>(y), two_elements<1>(y)}};
}

// Stores 16 columns of O of a query. A lane has two of them. at(column) is the address of a column.
template <class At>
DEVICE void store_outputs(At at, float first, float second) {
  store_shared(at(2 * (lane_id() / 4)), make_float2(first, second));
}

// P transposed, in float16, as operand_8.
template <int M, int N>
DEVICE Fragment8 round_p(const float (&p)[M][N][4], int k, int n) {
  const float (&c)[4] = p[k / 16][n];
  return {{movmatrix(pack_half(c[0], c[1])), movmatrix(pack_half(c[2], c[3]))}};
}

// Q transposed, in parts.
struct QueryFragment { Fragment8 part[Q_PARTS]; };

// A lane's elements 4t..4t+3 of row g of 8 N rows, in 16 columns from `k` (the order of load_keys), times the scales of their
// channels, which lie in SRAM from `channels` on.
template <int N, class TileT>
DEVICE void load_elements(float4 (&elements)[N], TileT tile, int k, unsigned channels) {
  const int t = lane_id() % 4;
  const unsigned corner = tile.right(tile.at(lane_id() / 4, t / 2), k / CHUNK_ELEMENTS) + t % 2 * 8;
  float4 scale;
  if constexpr (K_SCALE == CHANNEL) scale = load_shared<float4>(channels + 4 * (k + 4 * t));
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const uint2 four = load_shared<uint2>(corner + 8 * n * TileT::ROW_BYTES);
    const float2 first = unpack(four.x), second = unpack(four.y);
    float4& x = elements[n];
    x = make_float4(first.x, first.y, second.x, second.y);
    if constexpr (K_SCALE == CHANNEL) x.x *= scale.x, x.y *= scale.y, x.z *= scale.z, x.w *= scale.w;
  }
}

// The power of two that a query is multiplied with, so that its largest element is between 2^14 and 2^15, and float16 loses nothing
// above 2^-39 of it: `up` is that of this lane's query in each fragment of Q. In S, c(n, e) takes the place of `c`.
template <int N>
struct QueryFactors {
  float up[N], of[N][2];

  template <class TileT>
  DEVICE QueryFactors(TileT tile, unsigned channels, float c) {
    float top[N] = {};
    if constexpr (QUERY_FACTORS)
#pragma unroll
      for (int k = 0; k < HEAD_DIM; k += K_STEP) {
        float4 x[N];
        load_elements(x, tile, k, channels);
        raise(top, x);
      }
    find(top, c);
  }

  // And all of Q, which is read once.
  template <class TileT, int K>
  DEVICE QueryFactors(TileT tile, unsigned channels, float c, QueryFragment (&q)[K][N]) {
    float4 x[K][N];
    float top[N] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      load_elements(x[k], tile, k * K_STEP, channels);
      raise(top, x[k]);
    }
    find(top, c);
#pragma unroll
    for (int k = 0; k < K; ++k) round(q[k], x[k]);
  }

  DEVICE float c(int n, int e) const { return of[n][e]; }

  // Elements times their queries' factors, in parts.
  DEVICE void round(QueryFragment (&q)[N], const float4 (&x)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float2 rest[2] = {make_float2(x[n].x * up[n], x[n].y * up[n]), make_float2(x[n].z * up[n], x[n].w * up[n])};
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int part = 0; part < Q_PARTS; ++part) {
          q[n].part[part].r[r] = pack_half(rest[r].x, rest[r].y);
          const float2 held = unpack_half(q[n].part[part].r[r]);
          rest[r].x -= held.x, rest[r].y -= held.y;
        }
    }
  }

 private:
  static DEVICE void raise(float (&top)[N], const float4 (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      top[n] = fmaxf(fmaxf(top[n], fmaxf(fabsf(x[n].x), fabsf(x[n].y))), fmaxf(fabsf(x[n].z), fabsf(x[n].w)));
  }

  DEVICE void find(const float (&top)[N], float c) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      up[n] = 1, of[n][0] = of[n][1] = c;
      if constexpr (!QUERY_FACTORS) continue;
      const int exponent = min(max(__builtin_bit_cast(int, quad_max(top[n])) >> 23, 15), 254);
      up[n] = __builtin_bit_cast(float, (268 - exponent) << 23);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float down = __builtin_bit_cast(float, (shuffle(exponent, 4 * (2 * (lane_id() % 4) + e)) - 14) << 23);
        of[n][e] = fmaxf(c * down, 0x1p-126f);  // above 0, as in Scores
      }
    }
  }
};

// Q transposed: 8 N rows, 16 columns from `k`, each times its query's factor.
template <int N, class TileT>
DEVICE void load_queries(QueryFragment (&q)[N], TileT tile, int k, unsigned channels, const QueryFactors<N>& factors) {
  float4 x[N];
  load_elements(x, tile, k, channels);
  factors.round(q, x);
}

DEVICE void multiply(float (&c)[4], const FragmentA& a, const QueryFragment& b) {
#pragma unroll
  for (int n = 0; n < Q_PARTS; ++n) multiply(c, a, b.part[n]);
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
template <int M, int N>
DEVICE Fragment8 round_p(const float (&p)[M][N][4], int k, int n) {
  return operand_8(p, k, n);
}
template <int N>
struct QueryFactors;
template <int N, class TileT>
DEVICE void load_queries(QueryFragment (&q)[N], TileT tile, int k, unsigned, const QueryFactors<N>&) {
#pragma unroll
  for (int n = 0; n < N; ++n) q[n] = load_8_rows(tile, 8 * n, k);
}
template <int N>
struct QueryFactors {
  float all;
  template <class TileT>
  DEVICE QueryFactors(TileT, unsigned, float c) : all(c) {}
  template <class TileT, int K>
  DEVICE QueryFactors(TileT tile, unsigned, float c, QueryFragment (&q)[K][N]) : all(c) {
#pragma unroll
    for (int k = 0; k < K; ++k) load_queries(q[k], tile, k * K_STEP, 0, *this);
  }
  DEVICE float c(int, int) const { return all; }
};
DEVICE void multiply(float (&c)[4], const FragmentA& a, const Fragment8& b) { mma(c, a, b); }

#endif
