// nvcuda::wmma: fragments of 16 x 16 x 16, half or bfloat16. CUDA doesn't say which lane holds which element. Here it
// is as in mma.sync, so that one product is two of m16n8k16. Loads and stores are checked and counted element by
// element.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16, "the emulator knows fragments of 16 x 16 x 16");
  using element_type = T;
  static constexpr int num_elements = 8;
  T x[num_elements];
};

// The offset of element i of this lane's fragment, in elements.
template <class Use>
__forceinline__ std::size_t emu_offset(int i, unsigned stride, bool by_rows) {
  const unsigned lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  const unsigned group = lane / 4 + 8 * (std::is_same_v<Use, matrix_b> ? i / 4 : i / 2 % 2);
  const unsigned pair = 2 * (lane % 4) + i % 2 + 8 * (std::is_same_v<Use, matrix_b> ? i / 2 % 2 : i / 4);
  const unsigned row = std::is_same_v<Use, matrix_b> ? pair : group, column = std::is_same_v<Use, matrix_b> ? group : pair;
  return by_rows ? std::size_t{row} * stride + column : std::size_t{column} * stride + row;
}

template <class Use, class T, class Layout>
__forceinline__ void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& to, const T* from, unsigned stride) {
  for (int i = 0; i < 8; ++i) to.x[i] = from[emu_offset<Use>(i, stride, std::is_same_v<Layout, row_major>)];
}
template <class T>
__forceinline__ void load_matrix_sync(fragment<accumulator, 16, 16, 16, T>& to, const T* from, unsigned stride, layout_t layout) {
  for (int i = 0; i < 8; ++i) to.x[i] = from[emu_offset<accumulator>(i, stride, layout == mem_row_major)];
}
template <class T>
__forceinline__ void store_matrix_sync(T* to, const fragment<accumulator, 16, 16, 16, T>& from, unsigned stride, layout_t layout) {
  for (int i = 0; i < 8; ++i) to[emu_offset<accumulator>(i, stride, layout == mem_row_major)] = from.x[i];
}
template <class Use, class T, class Layout>
__forceinline__ void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& to, const std::common_type_t<T>& value) {
  for (T& x : to.x) x = value;
}

template <class T, class AB, class LayoutA, class LayoutB>
__forceinline__ void mma_sync(fragment<accumulator, 16, 16, 16, T>& d, const fragment<matrix_a, 16, 16, 16, AB, LayoutA>& a,
                              const fragment<matrix_b, 16, 16, 16, AB, LayoutB>& b,
                              const fragment<accumulator, 16, 16, 16, T>& c) {
  static_assert(std::is_same_v<AB, half> || std::is_same_v<AB, nv_bfloat16>, "the emulator multiplies half and bfloat16");
  auto pack = [](const AB* x) { return x[0].bits | static_cast<unsigned>(x[1].bits) << 16; };
  const unsigned rows[4] = {pack(a.x), pack(a.x + 2), pack(a.x + 4), pack(a.x + 6)};
  for (int first = 0; first < 8; first += 4) {
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = c.x[first + i];
    if constexpr (std::is_same_v<AB, half>) emu_mma_f16(sums, rows, pack(b.x + first), pack(b.x + first + 2));
    else emu_mma_bf16(sums, rows, pack(b.x + first), pack(b.x + first + 2));
    for (int i = 0; i < 4; ++i) d.x[first + i] = sums[i];
  }
}

}  // namespace nvcuda::wmma
