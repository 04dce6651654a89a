// PTX of matrices and of the engines. What the primitives have is theirs; the rest is in ptx_matrix.cpp and ptx_bulk.cpp.
#pragma once

#include "ptx_convert.h"

extern "C" {

// `count` (1, 2 or 4) matrices of 8 x 8 b16; lane 8 i + r names row r of matrix i.
void emu_ptx_ldmatrix(unsigned* r, unsigned address, int count, int transposed);
void emu_ptx_stmatrix(unsigned address, const unsigned* r, int count, int transposed);
unsigned emu_ptx_movmatrix(unsigned r);

// mma.sync m8n8 and m16n8 of any depth: c += a · b, registers as PTX has them.
struct EmuMma { int rows, depth, a, b, sums; };
void emu_ptx_mma(const EmuMma* shape, void* c, const void* a, const void* b);
// mma.sync m8n8k4 of float16: four products of 8 x 8 x 4, one for each pair of quads.
void emu_ptx_mma_quads(void* c, const unsigned* a, const unsigned* b, int a_columns, int b_rows, int f32_sums);

unsigned emu_ptx_mbarrier_arrive(unsigned address, unsigned count, unsigned expected_bytes);  // the phase
void emu_ptx_mbarrier_expect_tx(unsigned address, unsigned bytes);
void emu_ptx_mbarrier_complete_tx(unsigned address, unsigned bytes);
void emu_ptx_mbarrier_end(unsigned address);

// Copies of bytes by the copy engine, without a tensor map: a multiple of 16, from and to multiples of 16.
void emu_ptx_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned mbarrier);
void emu_ptx_bulk_store(void* to, unsigned from, unsigned bytes);

[[noreturn]] void emu_ptx_refuse(const char* what);
}

namespace emu_ptx {

// The elements of matrices; the numbers are those of ptx_matrix.cpp.
enum class Element { f16, bf16, tf32, f64, s8, u8, e4m3, e5m2, s4, u4, b1, f32, s32 };

template <int ROWS, int DEPTH, Element a_type, Element b_type, Element sums, class C, class AB, int A, int B, int N>
__forceinline__ void mma(C (&c)[N], const AB (&a)[A], const AB (&b)[B]) {
  if constexpr (ROWS == 16 && DEPTH == 16 && sums == Element::f32 && a_type == Element::f16) emu_mma_f16(c, a, b[0], b[1]);
  else if constexpr (ROWS == 16 && DEPTH == 16 && sums == Element::f32 && a_type == Element::bf16) emu_mma_bf16(c, a, b[0], b[1]);
  else {
    static const EmuMma shape = {ROWS, DEPTH, static_cast<int>(a_type), static_cast<int>(b_type), static_cast<int>(sums)};
    emu_ptx_mma(&shape, c, a, b);
  }
}
template <int A_COLUMNS, int B_ROWS, Element sums, class C, int N>
__forceinline__ void mma_quads(C (&c)[N], const u32 (&a)[2], const u32 (&b)[2]) {
  emu_ptx_mma_quads(c, a, b, A_COLUMNS, B_ROWS, sums == Element::f32);
}

template <class P>
__forceinline__ u32 parity(const P& phase) { return as<u32>(phase); }
__forceinline__ u32 parity_of(u64 state) { return static_cast<u32>(state) & 1u; }

// The place of an operand that stays in its register.
template <class T>
__forceinline__ float* pointer(T& x) {
  static_assert(sizeof(T) == 4, "registers of 32 bits");
  return reinterpret_cast<float*>(const_cast<std::remove_const_t<T>*>(&x));
}
template <int N>
__forceinline__ float* in_a_row(float* const (&at)[N], const char* what) {
  for (int i = 1; i < N; ++i)
    if (at[i] != at[0] + i) emu_ptx_refuse(what);
  return at[0];
}

template <int COLUMNS, Element a_type, Element b_type, Element sums, int N, class A>
__forceinline__ void wgmma(float* const (&c)[N], const A& a, u64 b, bool add, int scale_a, int scale_b, int a_columns, int b_columns) {
  constexpr bool known = sums == Element::f32 && a_type == b_type && (a_type == Element::f16 || a_type == Element::bf16 || a_type == Element::e4m3);
  if (!known || scale_a != 1 || scale_b != 1 || a_columns) emu_ptx_refuse("a wgmma of a type, sign or layout that the emulator doesn't know");
  constexpr int element = a_type == Element::f16 ? EMU_F16 : a_type == Element::bf16 ? EMU_BF16 : EMU_E4M3;
  float* to = in_a_row(c, "a wgmma whose accumulators don't lie in a row");
  if constexpr (std::is_array_v<A>)
    emu_wgmma_rs(to, COLUMNS / 8, reinterpret_cast<const unsigned*>(in_a_row(a, "a wgmma whose registers of A don't lie in a row")), b, add, b_columns, element);
  else
    emu_wgmma_ss(to, COLUMNS / 8, a, b, add, b_columns, element);
}

}  // namespace emu_ptx
