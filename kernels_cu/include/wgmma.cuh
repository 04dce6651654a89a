// WGMMA: the matrix product of a warpgroup, 64 x N += 64 x 16 · 16 x N. It runs in the background. B lies in SRAM, A in SRAM
// or in registers, C in registers. Accumulators are laid out as in mma.cuh, and each warp has 16 of the 64 rows: lane 4g + t
// holds c[n] = columns 8n + 2t, 8n + 2t + 1 of row g, then of row g + 8. An operand A in registers is laid out as FragmentA.
//
// Order: wgmma_fence, products, wgmma_commit (closes a group), wgmma_wait<PENDING>, and `settle` for the accumulators that
// are complete then. The compiler believes them complete at once, so `settle` keeps it from reading them before.
//
// All four warps of a warpgroup execute the same product, fence, commit and wait, or none does: none of them may stand in a
// branch that only some of the warps take (PTX: .aligned).
#pragma once

#include "warp.cuh"

// A tile in SRAM as TMA writes it with its 128-byte swizzle: panels of 64 columns lie side by side. Each panel has ROWS rows
// of 128 bytes, with 16-byte chunk c of row r at place c ^ (r % 8). Panels start on 1024-byte boundaries. The last panel may have
// columns that no product reads: TMA's boxes are whole.
template <int ROWS_, int COLUMNS_>
struct PanelTile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int PANEL_COLUMNS = 64, PANELS = ceil_div(COLUMNS, PANEL_COLUMNS);
  static constexpr int PANEL_BYTES = ROWS * 128, BYTES = PANELS * PANEL_BYTES;
  static_assert(COLUMNS % 16 == 0 && ROWS % 8 == 0, "whole steps of a product, and whole 1024-byte atoms");

  unsigned base;  // shared address, a multiple of 1024

  DEVICE unsigned panel(int i) const { return base + i * PANEL_BYTES; }
};

// Tells the tensor cores where an operand lies in SRAM: address, strides, swizzle. (PTX: a matrix descriptor.)
DEVICE unsigned long long wgmma_descriptor(unsigned address, int leading_bytes, int stride_bytes) {
  constexpr unsigned long long SWIZZLE_128 = 1ull << 62;
  return SWIZZLE_128 | static_cast<unsigned long long>(stride_bytes >> 4) << 32 |
         static_cast<unsigned long long>(leading_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

// A or B with rows contiguous along the summed dimension (Q, K; K-major): columns k..k+15 of the tile from `row` on.
template <class TileT>
DEVICE unsigned long long rows_operand(TileT tile, int row, int k) {
  return wgmma_descriptor(tile.panel(k / 64) + row * 128 + k % 64 * 2, 16, 1024);
}

// rows_operand(tile, row, k) minus rows_operand(tile, 0, 0). It is known ahead, so each product costs one addition.
template <class TileT>
DEVICE constexpr unsigned operand_step(int row, int k) {
  return (k / 64 * TileT::PANEL_BYTES + row * 128 + k % 64 * 2) >> 4;
}

// B with rows contiguous across the summed dimension (V; MN-major): rows k..k+15 of the tile, all its columns.
template <class TileT>
DEVICE unsigned long long columns_operand(TileT tile, int k) {
  return wgmma_descriptor(tile.base + k * 128, TileT::PANEL_BYTES, 1024);
}

// Makes visible what ordinary instructions wrote to the registers that the next product uses.
DEVICE void wgmma_fence() {
#ifdef EMULATOR
  emu_wgmma_fence();
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

DEVICE void wgmma_commit() {
#ifdef EMULATOR
  emu_wgmma_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most PENDING of the newest groups are still running.
template <int PENDING>
DEVICE void wgmma_wait() {
#ifdef EMULATOR
  emu_wgmma_wait(PENDING);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Comes after the wait, and before the fence. Reads and writes of these registers stay on their side of it. (CUTLASS:
// warpgroup_fence_operand.)
template <int N>
DEVICE void settle(float (&c)[N][4]) {
#ifndef EMULATOR
#pragma unroll
  for (int n = 0; n < N; ++n)
    asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
#endif
}

// The same for operands A in registers.
template <int N>
DEVICE void settle(unsigned (&a)[N][4]) {
#ifndef EMULATOR
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
#endif
}

// c (64 x 8N8) += A · B, or = A · B if `add` is 0. wgmma_ss: A and B lie in SRAM, with rows contiguous along the summed
// dimension. wgmma_columns_ss: both lie there with rows contiguous across that dimension. wgmma_rs: A lies in registers, and B's
// rows are contiguous across that dimension. wgmma_rows_rs: A lies in registers, and B's rows are contiguous along it.
template <int N8>
DEVICE void wgmma_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add);
template <int N8>
DEVICE void wgmma_columns_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add);
template <int N8>
DEVICE void wgmma_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b);
template <int N8>
DEVICE void wgmma_rows_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b, int add);

// The same with operands of 8 bits (e4m3), 32 deep, which is as many bytes. Both are contiguous along the summed dimension.
// A in registers: lane 4g + t holds k 4t..4t+3 of row g, the same of row g + 8, then k 4t + 16.. of both.
template <int N8>
DEVICE void wgmma_e4m3_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add);
template <int N8>
DEVICE void wgmma_e4m3_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b, int add = 1);

#ifdef EMULATOR
template <int N8>
DEVICE void wgmma_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add) {
  emu_wgmma_ss(&c[0][0], N8, a, b, add, false, FL_DTYPE);
}
template <int N8>
DEVICE void wgmma_columns_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add) {
  const EmuWgmma what = {N8, FL_DTYPE, FL_DTYPE, EMU_F32, add, 1, 1, 1, 1, 0};
  emu_wgmma(&what, &c[0][0], a, nullptr, b);
}
template <int N8>
DEVICE void wgmma_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b) {
  emu_wgmma_rs(&c[0][0], N8, a, b, true, true, FL_DTYPE);
}
template <int N8>
DEVICE void wgmma_rows_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b, int add) {
  emu_wgmma_rs(&c[0][0], N8, a, b, add, false, FL_DTYPE);
}
template <int N8>
DEVICE void wgmma_e4m3_ss(float (&c)[N8][4], unsigned long long a, unsigned long long b, int add) {
  emu_wgmma_ss(&c[0][0], N8, a, b, add, false, EMU_E4M3);
}
template <int N8>
DEVICE void wgmma_e4m3_rs(float (&c)[N8][4], const unsigned (&a)[4], unsigned long long b, int add) {
  emu_wgmma_rs(&c[0][0], N8, a, b, add, false, EMU_E4M3);
}
#else

#if FL_DTYPE == 2
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif

#define WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R1 WGMMA_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R2 WGMMA_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R3 WGMMA_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R4 WGMMA_R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R5 WGMMA_R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R6 WGMMA_R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R7 WGMMA_R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R8 WGMMA_R7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R9 WGMMA_R8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R10 WGMMA_R9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R11 WGMMA_R10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R12 WGMMA_R11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R13 WGMMA_R12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R14 WGMMA_R13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R15 WGMMA_R14 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_RN "%0, %1, %2, %3"
#define WGMMA_R7_4 WGMMA_R7 ", %64, %65, %66, %67"

#define WGMMA_C(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define WGMMA_C0 WGMMA_C(0), WGMMA_C(1)
#define WGMMA_C1 WGMMA_C0, WGMMA_C(2), WGMMA_C(3)
#define WGMMA_C2 WGMMA_C1, WGMMA_C(4), WGMMA_C(5)
#define WGMMA_C3 WGMMA_C2, WGMMA_C(6), WGMMA_C(7)
#define WGMMA_C4 WGMMA_C3, WGMMA_C(8), WGMMA_C(9)
#define WGMMA_C5 WGMMA_C4, WGMMA_C(10), WGMMA_C(11)
#define WGMMA_C6 WGMMA_C5, WGMMA_C(12), WGMMA_C(13)
#define WGMMA_C7 WGMMA_C6, WGMMA_C(14), WGMMA_C(15)
#define WGMMA_C8 WGMMA_C7, WGMMA_C(16), WGMMA_C(17)
#define WGMMA_C9 WGMMA_C8, WGMMA_C(18), WGMMA_C(19)
#define WGMMA_C10 WGMMA_C9, WGMMA_C(20), WGMMA_C(21)
#define WGMMA_C11 WGMMA_C10, WGMMA_C(22), WGMMA_C(23)
#define WGMMA_C12 WGMMA_C11, WGMMA_C(24), WGMMA_C(25)
#define WGMMA_C13 WGMMA_C12, WGMMA_C(26), WGMMA_C(27)
#define WGMMA_C14 WGMMA_C13, WGMMA_C(28), WGMMA_C(29)
#define WGMMA_C15 WGMMA_C14, WGMMA_C(30), WGMMA_C(31)
#define WGMMA_CN WGMMA_C(0)
#define WGMMA_C7_4 WGMMA_C7, WGMMA_C(16)

// N, then R and C of that many registers, then the numbers of the operands after the N / 2 accumulators.
#define WGMMA_SS(NAME, N, G, I0, I1, I2, ACROSS)                                                                    \
  template <>                                                                                                       \
  DEVICE void NAME<N / 8>(float (&c)[N / 8][4], unsigned long long a, unsigned long long b, int add) {               \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" WGMMA_R##G "}, %" #I0 ", %" #I1         \
                 ", p, 1, 1, " #ACROSS ", " #ACROSS ";}"                                                              \
                 : WGMMA_C##G : "l"(a), "l"(b), "r"(add));                                                           \
  }

#define WGMMA(N, G, I0, I1, I2, I3, I4, I5)                                                                           \
  WGMMA_SS(wgmma_ss, N, G, I0, I1, I2, 0)                                                                           \
  WGMMA_SS(wgmma_columns_ss, N, G, I0, I1, I2, 1)                                                                   \
  template <>                                                                                                       \
  DEVICE void wgmma_rs<N / 8>(float (&c)[N / 8][4], const unsigned (&a)[4], unsigned long long b) {                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" WGMMA_R##G "}, {%" #I0 ", %" #I1       \
                 ", %" #I2 ", %" #I3 "}, %" #I4 ", 1, 1, 1, 1;"                                                       \
                 : WGMMA_C##G : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
  }                                                                                                                 \
  template <>                                                                                                       \
  DEVICE void wgmma_rows_rs<N / 8>(float (&c)[N / 8][4], const unsigned (&a)[4], unsigned long long b, int add) {    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" WGMMA_R##G "}, {%" #I0 ", %" #I1        \
                 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1, 0;}"                                                       \
                 : WGMMA_C##G : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                        \
  }

WGMMA(16, 0, 8, 9, 10, 11, 12, 13)
WGMMA(32, 1, 16, 17, 18, 19, 20, 21)
WGMMA(48, 2, 24, 25, 26, 27, 28, 29)
WGMMA(64, 3, 32, 33, 34, 35, 36, 37)
WGMMA(80, 4, 40, 41, 42, 43, 44, 45)
WGMMA(96, 5, 48, 49, 50, 51, 52, 53)
WGMMA(112, 6, 56, 57, 58, 59, 60, 61)
WGMMA(128, 7, 64, 65, 66, 67, 68, 69)
WGMMA(144, 8, 72, 73, 74, 75, 76, 77)
WGMMA(160, 9, 80, 81, 82, 83, 84, 85)
WGMMA(176, 10, 88, 89, 90, 91, 92, 93)
WGMMA(192, 11, 96, 97, 98, 99, 100, 101)
WGMMA(208, 12, 104, 105, 106, 107, 108, 109)
WGMMA(224, 13, 112, 113, 114, 115, 116, 117)
WGMMA(240, 14, 120, 121, 122, 123, 124, 125)
WGMMA(256, 15, 128, 129, 130, 131, 132, 133)

#define WGMMA_E4M3(N, G, I0, I1, I2, I3, I4, I5)                                                                    \
  template <>                                                                                                       \
  DEVICE void wgmma_e4m3_ss<N / 8>(float (&c)[N / 8][4], unsigned long long a, unsigned long long b, int add) {      \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_R##G "}, %" #I0 ", %" #I1          \
                 ", p, 1, 1;}"                                                                                       \
                 : WGMMA_C##G : "l"(a), "l"(b), "r"(add));                                                           \
  }                                                                                                                 \
  template <>                                                                                                       \
  DEVICE void wgmma_e4m3_rs<N / 8>(float (&c)[N / 8][4], const unsigned (&a)[4], unsigned long long b, int add) {    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_R##G "}, {%" #I0 ", %" #I1         \
                 ", %" #I2 ", %" #I3 "}, %" #I4 ", p, 1, 1;}"                                                          \
                 : WGMMA_C##G : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                        \
  }

WGMMA_E4M3(8, N, 4, 5, 6, 7, 8, 9)
WGMMA_E4M3(64, 3, 32, 33, 34, 35, 36, 37)
WGMMA_E4M3(128, 7, 64, 65, 66, 67, 68, 69)
WGMMA_E4M3(136, 7_4, 68, 69, 70, 71, 72, 73)

#endif

// Four floats rounded to e4m3 (at most 448 in size), x0 in the lowest byte.
DEVICE unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
#ifdef EMULATOR
  auto e4m3 = [](float x) -> unsigned { return emulator::Float8<4, 3>::bits(x, true); };
  return e4m3(x0) | e4m3(x1) << 8 | e4m3(x2) << 16 | e4m3(x3) << 24;
#else
  unsigned bits;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(bits) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return bits;
#endif
}
