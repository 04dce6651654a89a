// nvcuda::wmma: fragments of half, bfloat16 and bytes (16 x 16 x 16, 32 x 8 x 16, 8 x 32 x 16), of tf32 (16 x 16 x 8) and of
// double (8 x 8 x 4). CUDA doesn't say which lane holds which element. Here 16 x 16 x 16 is as in mma.sync, so that one
// product is two of m16n8k16. In the other shapes lanes take pairs in turn, row by row. Loads and stores are checked and counted
// element by element.
#pragma once
#include "emu_hide_names.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"

extern "C" {
// c (m x n) += a (m x k) · b (k x n) of a warp. Each lane has its elements in the order of `emu_pairs`. Products are added one
// after the other in float32, or with `wide` in double.
void emu_wmma(int m, int n, int k, int wide, double* c, const double* a, const double* b);
}

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32;
}

// What an element is stored as.
template <class T> struct emu_stored { using type = T; };
template <> struct emu_stored<precision::tf32> { using type = float; };

template <int M, int N, int K, class T>
constexpr bool emu_known() {
  constexpr bool deep = (M == 16 && N == 16 && K == 16) || (M == 32 && N == 8 && K == 16) || (M == 8 && N == 32 && K == 16);
  if constexpr (std::is_same_v<T, precision::tf32>) return M == 16 && N == 16 && K == 8;
  else if constexpr (std::is_same_v<T, double>) return M == 8 && N == 8 && K == 4;
  else if constexpr (std::is_same_v<T, float>) return deep || (M == 16 && N == 16 && K == 8);
  else return deep;
}

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static_assert(emu_known<M, N, K, T>(), "wmma has no fragment of that shape and type");
  static constexpr int ROWS = std::is_same_v<Use, matrix_b> ? K : M, COLUMNS = std::is_same_v<Use, matrix_a> ? K : N;
  using element_type = T;
  using storage_element_type = typename emu_stored<T>::type;
  static constexpr int num_elements = ROWS * COLUMNS / 32, num_storage_elements = num_elements;
  storage_element_type x[num_elements];
};

// As in mma.sync: 16-bit factors, and their accumulators.
template <int M, int N, int K, class T>
constexpr bool emu_square = M == 16 && N == 16 && K == 16 && !std::is_integral_v<T>;

// The offset of element i of this lane's fragment, in elements.
template <class Use, int ROWS, int COLUMNS, bool SQUARE>
__forceinline__ std::size_t emu_offset(int i, unsigned stride, bool by_rows) {
  const unsigned lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  unsigned row, column;
  if constexpr (SQUARE) {
    constexpr bool IS_B = std::is_same_v<Use, matrix_b>;
    const unsigned group = lane / 4 + 8 * (IS_B ? i / 4 : i / 2 % 2);
    const unsigned pair = 2 * (lane % 4) + i % 2 + 8 * (IS_B ? i / 2 % 2 : i / 4);
    row = IS_B ? pair : group, column = IS_B ? group : pair;
  } else {
    constexpr unsigned EACH = ROWS * COLUMNS / 32 > 1 ? 2 : 1;  // neighbours
    const unsigned place = i / EACH * 32 * EACH + lane * EACH + i % EACH;
    row = place / COLUMNS, column = place % COLUMNS;
  }
  return by_rows ? std::size_t{row} * stride + column : std::size_t{column} * stride + row;
}
template <class Use, int M, int N, int K, class T, class Layout>
__forceinline__ std::size_t emu_offset(const fragment<Use, M, N, K, T, Layout>&, int i, unsigned stride, bool by_rows) {
  using F = fragment<Use, M, N, K, T, Layout>;
  return emu_offset<Use, F::ROWS, F::COLUMNS, emu_square<M, N, K, T>>(i, stride, by_rows);
}

template <class Use, int M, int N, int K, class T, class Layout>
__forceinline__ void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const typename emu_stored<T>::type* from, unsigned stride) {
  for (int i = 0; i < to.num_elements; ++i) to.x[i] = from[emu_offset(to, i, stride, std::is_same_v<Layout, row_major>)];
}
template <int M, int N, int K, class T>
__forceinline__ void load_matrix_sync(fragment<accumulator, M, N, K, T>& to, const T* from, unsigned stride, layout_t layout) {
  for (int i = 0; i < to.num_elements; ++i) to.x[i] = from[emu_offset(to, i, stride, layout == mem_row_major)];
}
template <int M, int N, int K, class T>
__forceinline__ void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& from, unsigned stride, layout_t layout) {
  for (int i = 0; i < from.num_elements; ++i) to[emu_offset(from, i, stride, layout == mem_row_major)] = from.x[i];
}
template <class Use, int M, int N, int K, class T, class Layout>
__forceinline__ void fill_fragment(fragment<Use, M, N, K, T, Layout>& to, const std::common_type_t<typename emu_stored<T>::type>& value) {
  for (auto& x : to.x) x = value;
}

// Rounded to nearest, ties away from 0.
inline float __float_to_tf32(float x) { return std::isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u) : x; }

// As the tensor cores read it; the low bits of a tf32 are cut off.
template <class T, class X>
__forceinline__ double emu_operand(const X& x) {
  if constexpr (std::is_same_v<T, precision::tf32>) return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  else return static_cast<double>(x);
}

template <int M, int N, int K, class D, class C, class A, class B, class LayoutA, class LayoutB>
__forceinline__ void mma_sync(fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, A, LayoutA>& a,
                              const fragment<matrix_b, M, N, K, B, LayoutB>& b, const fragment<accumulator, M, N, K, C>& c,
                              bool = false) {
  static_assert(std::is_same_v<A, B>, "both factors have one type");
  if constexpr (M == 16 && N == 16 && K == 16 && (std::is_same_v<A, half> || std::is_same_v<A, nv_bfloat16>)) {
    auto pack = [](const A* x) { return x[0].bits | static_cast<unsigned>(x[1].bits) << 16; };
    const unsigned rows[4] = {pack(a.x), pack(a.x + 2), pack(a.x + 4), pack(a.x + 6)};
    for (int first = 0; first < 8; first += 4) {
      float sums[4];
      for (int i = 0; i < 4; ++i) sums[i] = c.x[first + i];
      if constexpr (std::is_same_v<A, half>) emu_mma_f16(sums, rows, pack(b.x + first), pack(b.x + first + 2));
      else emu_mma_bf16(sums, rows, pack(b.x + first), pack(b.x + first + 2));
      for (int i = 0; i < 4; ++i) d.x[first + i] = sums[i];
    }
  } else {
    double p[M * K / 32], q[K * N / 32], sums[M * N / 32];
    for (int i = 0; i < M * K / 32; ++i) p[i] = emu_operand<A>(a.x[i]);
    for (int i = 0; i < K * N / 32; ++i) q[i] = emu_operand<B>(b.x[i]);
    for (int i = 0; i < M * N / 32; ++i) sums[i] = static_cast<double>(c.x[i]);
    emu_wmma(M, N, K, std::is_same_v<D, double> || std::is_integral_v<D>, sums, p, q);
    for (int i = 0; i < M * N / 32; ++i) d.x[i] = static_cast<D>(sums[i]);
  }
}

}  // namespace nvcuda::wmma

#include "emu_show_names.h"
