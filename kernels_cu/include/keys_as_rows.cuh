// Matrix products of one warp whose rows are keys and whose columns are queries: S transposed is K times Q transposed, and O transposed
// is V transposed times P transposed. mma.sync has 16 rows and 8 columns. So few queries fill a product, and each key is in one only.
//
// An accumulator is as in mma.cuh. With g = lane / 4 and t = lane % 4, a lane holds of S c[0], c[1]: key g, queries 2t and 2t+1, and
// c[2], c[3]: key g + 8; of O column g, and column g + 8. What belongs to a query is the same in the eight lanes of equal t.
#pragma once

#include "mask.cuh"
#include "mma.cuh"

#if FL_DTYPE != 0

struct Fragment8 { unsigned r[2]; };  // (k 2t.., query g), (k 2t+8.., query g), two elements each

// Two 8 x 8 matrices of 16 bits from SRAM: lane 8 i + r names row r of matrix i.
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

// Transposes an 8 x 8 matrix of 16 bits. Each lane has (g, 2t) and (g, 2t+1).
DEVICE unsigned movmatrix(unsigned x) {
#ifdef EMULATOR
  return emu_ptx_movmatrix(x);
#else
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#endif
}

// Q transposed: eight rows of the tile from `n`, columns k.. .
template <class TileT>
DEVICE Fragment8 load_8_rows(TileT tile, int n, int k) {
  Fragment8 b;
  ldmatrix_of_two(b.r, tile.right(tile.at(lane_id() % 8, lane_id() / 8 % 2), k / CHUNK_ELEMENTS) + n * TileT::ROW_BYTES, false);
  return b;
}

// P transposed, rounded to the storage dtype: keys k..k+K_STEP-1 of a column of accumulators.
template <int M, int N>
DEVICE Fragment8 operand_8(const float (&p)[M][N][4], int k, int n) {
  const float (&c)[4] = p[k / 16][n];
  return {{movmatrix(pack(c[0], c[1])), movmatrix(pack(c[2], c[3]))}};
}

DEVICE void mma(float (&c)[4], const FragmentA& a, const Fragment8& b) { mma_16x8x16(c, a.r, b.r[0], b.r[1]); }

#else

struct Fragment8 { float x[2][4]; };  // queries 2t and 2t+1, four k

template <class TileT>
DEVICE Fragment8 load_8_rows(TileT tile, int n, int k) {
  Fragment8 b;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned corner = tile.at(2 * (lane_id() % 4) + i, 0);
    const float4 x = load_shared<float4>(tile.right(corner, k / CHUNK_ELEMENTS) + n * TileT::ROW_BYTES);
    b.x[i][0] = x.x, b.x[i][1] = x.y, b.x[i][2] = x.z, b.x[i][3] = x.w;
  }
  return b;
}

// Key k + i of P sits in the lane of g = (k + i) % 8.
template <int M, int N>
DEVICE Fragment8 operand_8(const float (&p)[M][N][4], int k, int n) {
  Fragment8 b;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    b.x[i / 4][i % 4] = shuffle(p[k / 16][n][k % 16 / 8 * 2 + i / 4], (k % 8 + i % 4) * 4 + lane_id() % 4);
  return b;
}

DEVICE void mma(float (&c)[4], const FragmentA& a, const Fragment8& b) {
#pragma unroll
  for (int k = 0; k < K_STEP; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = multiply_add(a.x[i / 2][k], b.x[i % 2][k], c[i]);  // row i / 2, column i % 2
}

#endif

// Over all keys of an accumulator's column, what each lane has of its own ones.
DEVICE float column_max(float x) {
#pragma unroll
  for (int mask = 4; mask <= 16; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
DEVICE float column_sum(float x) {
#pragma unroll
  for (int mask = 4; mask <= 16; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// m becomes the maximum of a column so far, as an exponent: c(n, e) times a score. O and its sums have then to be multiplied by alpha.
// Returns whether a maximum of this lane's columns has risen.
template <int M, int N, class Factor>
DEVICE bool raise_columns(const float (&s)[M][N][4], float (&m)[N][2], float (&alpha)[N][2], Factor c) {
  bool risen = false;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float top = s[0][n][e];
#pragma unroll
      for (int i = 0; i < M; ++i) top = fmaxf(top, fmaxf(s[i][n][e], s[i][n][2 + e]));
      top = fmaxf(m[n][e], c(n, e) * column_max(top));
      alpha[n][e] = exp2_approx(m[n][e] - top);
      risen |= top > m[n][e];
      m[n][e] = top;
    }
  return risen;
}

template <int D, int N>
DEVICE void rescale_columns(float (&o)[D][N][4], float (&l)[N][2], const float (&alpha)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    l[n][0] *= alpha[n][0], l[n][1] *= alpha[n][1];
#pragma unroll
    for (int d = 0; d < D; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[d][n][e] *= alpha[n][e % 2];
  }
}

// S becomes P = exp2(c S - m), and l grows by its sum.
template <int M, int N, class Factor>
DEVICE void exponentials_of_columns(float (&s)[M][N][4], const float (&m)[N][2], float (&l)[N][2], Factor c) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][n][e] = exp2_approx(c(n, e % 2) * s[i][n][e] - m[n][e % 2]);
        l[n][e % 2] += s[i][n][e];
      }
}

// Sets the scores that the mask hides to -INF. `row` is the packed row of this lane's first query, `key` its first key; `heads` rows
// are of a query.
template <int M, int N, class Heads>
DEVICE void mask_keys(float (&s)[M][N][4], const Shape& shape, int row, int key, Heads heads) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Keys keys = visible_keys(shape, (opaque(row) + 8 * n + e) / heads);
      const int first = keys.first - key, last = keys.last - key;
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (16 * i + 8 * half < first || 16 * i + 8 * half > last) s[i][n][2 * half + e] = -INF;
    }
}
