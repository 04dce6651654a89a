// PTX of matrices and of the engines. It calls the primitives where they have it. The rest is in ptx_matrix.cpp and ptx_bulk.cpp.
#pragma once
#include "emu_hide_names.h"

#include "ptx_convert.h"

extern "C" {

// As emu_ptx_ldmatrix, but from registers to SRAM.
void emu_ptx_stmatrix(unsigned address, const unsigned* r, int count, int transposed);

// mma.sync m8n8 and m16n8 of any depth: c += a · b, registers as PTX has them.
struct EmuMma { int rows, depth, a, b, sums; };
void emu_ptx_mma(const EmuMma* shape, void* c, const void* a, const void* b);
// mma.sync m8n8k4 of float16: four products of 8 x 8 x 4, one for each pair of quads.
void emu_ptx_mma_quads(void* c, const unsigned* a, const unsigned* b, int a_columns, int b_rows, int f32_sums);

unsigned emu_ptx_mbarrier_arrive(unsigned address, unsigned count, unsigned expected_bytes);  // the phase
void emu_ptx_mbarrier_expect_tx(unsigned address, unsigned bytes);
void emu_ptx_mbarrier_complete_tx(unsigned address, unsigned bytes);
void emu_ptx_mbarrier_end(unsigned address);

// Copies of bytes by the copy engine, without a tensor map. Sizes and addresses are multiples of 16.
void emu_ptx_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned mbarrier);
void emu_ptx_bulk_store(void* to, unsigned from, unsigned bytes);
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

constexpr int of_wgmma(Element x) {
  switch (x) {
    case Element::f16: return EMU_F16;
    case Element::bf16: return EMU_BF16;
    case Element::e4m3: return EMU_E4M3;
    case Element::e5m2: return EMU_E5M2;
    case Element::s8: return EMU_S8;
    case Element::u8: return EMU_U8;
    case Element::tf32: return EMU_TF32;
    case Element::s32: return EMU_S32;
    default: return EMU_F32;
  }
}

template <int COLUMNS, Element a_type, Element b_type, Element sums, int N, class A>
__forceinline__ void wgmma(float* const (&c)[N], const A& a, u64 b, bool add, int scale_a, int scale_b, int a_columns, int b_columns) {
  EmuWgmma what = {COLUMNS / 8, of_wgmma(a_type), of_wgmma(b_type), of_wgmma(sums), add, scale_a, scale_b, a_columns, b_columns, 0};
  float* to = in_a_row(c, "a wgmma whose accumulators don't lie in a row, which the emulator needs");
  if constexpr (std::is_array_v<A>) {
    unsigned copies[4];
    const unsigned* registers = reinterpret_cast<const unsigned*>(a[0]);
    for (int i = 0; i < 4; ++i) {
      copies[i] = *reinterpret_cast<const unsigned*>(a[i]);
      what.loose = what.loose || a[i] != a[0] + i;
    }
    emu_wgmma(&what, to, 0, what.loose ? copies : registers, b);
  } else {
    emu_wgmma(&what, to, a, nullptr, b);
  }
}

}  // namespace emu_ptx

#include "emu_show_names.h"
