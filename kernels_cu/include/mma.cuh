// Matrix products of one warp: C (16 x 16, float32) += A (16 x K_STEP) · B (K_STEP x 16).
//
// An accumulator is 16 x 8 and spread over the warp as mma.sync m16n8k16 has it, in every dtype. With g = lane / 4
// and t = lane % 4, a lane holds c[0], c[1]: row g, columns 2t and 2t+1; c[2], c[3]: row g + 8, the same columns.
// 16-bit: tensor cores (sm_75: two m16n8k8 in place of one m16n8k16). float32: plain FMA, no TF32.
#pragma once

#include "tile.cuh"
#include "warp.cuh"

constexpr int K_STEP = FL_DTYPE == 0 ? 4 : 16;  // depth of one product

#if FL_DTYPE != 0

struct FragmentA { unsigned r[4]; };  // two elements each: (row g, k 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..)
struct FragmentB { unsigned r[4]; };  // (k 2t.., column g), (k 2t+8.., column g), and the same of columns 8..15

// Four 8 x 8 matrices from SRAM: lane i names row i % 8 of matrix i / 8 and gets elements (g, 2t), (g, 2t+1) of each.
DEVICE void ldmatrix(unsigned (&r)[4], unsigned address) {
#ifdef EMULATOR
  emu_ldmatrix(r, address, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}

// The same, each matrix transposed.
DEVICE void ldmatrix_transposed(unsigned (&r)[4], unsigned address) {
#ifdef EMULATOR
  emu_ldmatrix(r, address, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}

// c (16 x 8) += a (16 x 16) · b (16 x 8; two registers).
DEVICE void mma_16x8x16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef EMULATOR
  FL_DTYPE == 2 ? emu_mma_bf16(c, a, b0, b1) : emu_mma_f16(c, a, b0, b1, __CUDA_ARCH__ >= 800 ? 16 : 8);
#elif FL_DTYPE == 2
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// A = 16 rows from `row`, k columns from `k` (an operand that lies in SRAM as it is: Q, P).
template <class TileT>
DEVICE FragmentA load_a(TileT tile, int row, int k) {
  FragmentA a;
  const unsigned corner = tile.at(lane_id() % 16, lane_id() / 16);  // matrices: 0 1 below it, 2 3 to the right of them
  ldmatrix(a.r, tile.right(corner, k / CHUNK_ELEMENTS) + row * TileT::ROW_BYTES);
  return a;
}

// B = transpose of tile rows n.., columns k.. (K in Q·Kᵀ: a row of the tile is a column of B).
template <class TileT>
DEVICE FragmentB load_b_rows(TileT tile, int n, int k) {
  FragmentB b;
  const unsigned corner = tile.at(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);  // 0, 1 beside it, 2 3 below
  ldmatrix(b.r, tile.right(corner, k / CHUNK_ELEMENTS) + n * TileT::ROW_BYTES);
  return b;
}

// A = transpose of tile rows k.., columns `row`.. (dSᵀ lies in SRAM: a column of the tile is a row of A).
template <class TileT>
DEVICE FragmentA load_a_columns(TileT tile, int row, int k) {
  FragmentA a;
  const unsigned corner = tile.at(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);  // 0, 1 beside it, 2 3 below
  ldmatrix_transposed(a.r, tile.right(corner, row / CHUNK_ELEMENTS) + k * TileT::ROW_BYTES);
  return a;
}

// B = tile rows k.., columns n.. (V in P·V: a row of the tile is a row of B). Warps that take turns at the columns, 16 each,
// pass where their first ones are as `begin`: n is then a multiple of all their columns together, and costs no address.
template <class TileT>
DEVICE FragmentB load_b_columns(TileT tile, int k, int n, int begin = 0) {
  FragmentB b;
  const unsigned corner = tile.right(tile.at(lane_id() % 16, lane_id() / 16), begin / CHUNK_ELEMENTS);
  ldmatrix_transposed(b.r, tile.right(corner, n / CHUNK_ELEMENTS) + k * TileT::ROW_BYTES);
  return b;
}

// A = columns k..k+K_STEP-1 of a row of accumulators (P), rounded to the storage dtype. Each lane has what it needs.
template <int N>
DEVICE FragmentA operand_a(const float (&p)[N][4], int k) {
  int n = k / 8;
  return {{pack(p[n][0], p[n][1]), pack(p[n][2], p[n][3]),
           pack(p[n + 1][0], p[n + 1][1]), pack(p[n + 1][2], p[n + 1][3])}};
}

// c0 (columns 0..7 of C), c1 (8..15) += A · B.
DEVICE void mma(float (&c0)[4], float (&c1)[4], const FragmentA& a, const FragmentB& b) {
  mma_16x8x16(c0, a.r, b.r[0], b.r[1]);
  mma_16x8x16(c1, a.r, b.r[2], b.r[3]);
}

#else

struct FragmentA { float x[2][4]; };  // rows g and g+8, four k
struct FragmentB { float x[4][4]; };  // columns 2t, 2t+1, 2t+8, 2t+9, four k

template <class TileT>
DEVICE FragmentA load_a(TileT tile, int row, int k) {
  FragmentA a;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned corner = tile.at(lane_id() / 4, 0);
    float4 x = load_shared<float4>(tile.right(corner, k / CHUNK_ELEMENTS) + (row + 8 * i) * TileT::ROW_BYTES);
    a.x[i][0] = x.x, a.x[i][1] = x.y, a.x[i][2] = x.z, a.x[i][3] = x.w;
  }
  return a;
}

template <class TileT>
DEVICE FragmentB load_b_rows(TileT tile, int n, int k) {
  FragmentB b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned corner = tile.at(2 * (lane_id() % 4) + i % 2, 0);
    float4 x = load_shared<float4>(tile.right(corner, k / CHUNK_ELEMENTS) + (n + i / 2 * 8) * TileT::ROW_BYTES);
    b.x[i][0] = x.x, b.x[i][1] = x.y, b.x[i][2] = x.z, b.x[i][3] = x.w;
  }
  return b;
}

template <class TileT>
DEVICE FragmentA load_a_columns(TileT tile, int row, int k) {
  FragmentA a;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // row g or g + 8, k + i % 4
    const unsigned corner = tile.at(k % 8 + i % 4, lane_id() / 16), down = k / 8 * 8 * TileT::ROW_BYTES;
    const unsigned chunk = tile.right(corner, row / CHUNK_ELEMENTS + i / 4 * 2);
    a.x[i / 4][i % 4] = load_shared<float>(chunk + lane_id() / 4 % 4 * 4 + down);
  }
  return a;
}

template <class TileT>
DEVICE FragmentB load_b_columns(TileT tile, int k, int n, int begin = 0) {
  FragmentB b;
  int t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // key k + i / 2, columns 2t and 2t+1 of one half
    int half = i % 2;
    const unsigned corner = tile.right(tile.at(k % 8 + i / 2, t / 2), begin / CHUNK_ELEMENTS), down = k / 8 * 8 * TileT::ROW_BYTES;
    float2 x = load_shared<float2>(tile.right(corner, n / CHUNK_ELEMENTS + 2 * half) + t % 2 * 8 + down);
    b.x[2 * half][i / 2] = x.x, b.x[2 * half + 1][i / 2] = x.y;
  }
  return b;
}

// Column k + i of P sits in the quad's lane (k + i) % 8 / 2.
template <int N>
DEVICE FragmentA operand_a(const float (&p)[N][4], int k) {
  FragmentA a;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int row = i / 4, column = k % 8 + i % 4;
    a.x[row][i % 4] = shuffle(p[k / 8][2 * row + column % 2], lane_id() / 4 * 4 + column / 2);
  }
  return a;
}

DEVICE void mma(float (&c0)[4], float (&c1)[4], const FragmentA& a, const FragmentB& b) {
#pragma unroll
  for (int k = 0; k < K_STEP; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // row i / 2, column i % 2
      c0[i] = multiply_add(a.x[i / 2][k], b.x[i % 2][k], c0[i]);
      c1[i] = multiply_add(a.x[i / 2][k], b.x[2 + i % 2][k], c1[i]);
    }
}

#endif

// Accumulators to a tile in SRAM, rounded to the storage dtype: rows `row`.., columns `begin + column`.., which are as n and
// `begin` of load_b_columns.
template <int N, class TileT>
DEVICE void store_fragments(TileT tile, int row, int column, int begin, const float (&c)[N][4]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  const unsigned corner = tile.right(tile.at(g, FL_DTYPE == 0 ? t / 2 : 0), begin / CHUNK_ELEMENTS);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned chunk = tile.right(corner, (column + 8 * n) / CHUNK_ELEMENTS) + (row + 8 * half) * TileT::ROW_BYTES;
#if FL_DTYPE != 0
      store_shared(chunk + 4 * t, pack(c[n][2 * half], c[n][2 * half + 1]));
#else
      store_shared(chunk + t % 2 * 8, make_float2(c[n][2 * half], c[n][2 * half + 1]));
#endif
    }
}

// Four neighbouring columns of an accumulator, 4 (t / 2)..: of row g in even lanes, of row g + 8 in odd ones.
DEVICE float4 four_columns(const float (&c)[4]) {
  const bool odd = lane_id() % 2;
  const float x = shuffle_xor(odd ? c[0] : c[2], 1), y = shuffle_xor(odd ? c[1] : c[3], 1);
  return odd ? make_float4(x, y, c[2], c[3]) : make_float4(c[0], c[1], x, y);
}

// One row of 8 N columns in HBM, in the storage dtype, from a row of accumulators times `factor`: row g if `half` is
// 0, row g + 8 if it is 1. Writes the row's first `bytes`, a multiple of 16. All lanes of the warp call it; those
// whose row isn't there pass 0 bytes.
template <int N>
DEVICE void store_row(char* row, const float (&c)[N][4], int half, float factor, int bytes) {
  int t = lane_id() % 4;
#if FL_DTYPE != 0
#pragma unroll
  for (int n = 0; n < N; n += 4) {  // a 4 x 4 transposition in the quad turns a lane's four pairs into one chunk
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = c[(n + i) % N];
      w[i] = n + i < N ? pack(pair[2 * half] * factor, pair[2 * half + 1] * factor) : 0;
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!(i & bit)) {
          unsigned received = shuffle_xor(t & bit ? w[i] : w[i | bit], bit);
          (t & bit ? w[i] : w[i | bit]) = received;
        }
    int place = (n + t) * CHUNK_BYTES;
    if (place < bytes && (N % 4 == 0 || n + t < N)) store_global(row + place, make_uint4(w[0], w[1], w[2], w[3]));
  }
#else
#pragma unroll
  for (int n = 0; n < N; ++n) {
    int place = (8 * n + 2 * t) * ELEMENT_BYTES;
    if (place < bytes) store_global(row + place, make_float2(c[n][2 * half] * factor, c[n][2 * half + 1] * factor));
  }
#endif
}
