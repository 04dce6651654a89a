// Operands of 16 bits (float16 or bfloat16) for the kernels of FlashAttention-3: their tiles and products. fp8.cuh has the
// same names for 8 bits.
#pragma once

#include "mma.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

DEVICE constexpr const char* name_of_v() { return "v"; }
using QTile = PanelTile<BR, HEAD_DIM>;
using KTile = PanelTile<BC, HEAD_DIM>;
using VTile = PanelTile<BC, HEAD_DIM>;
constexpr int P_REGISTERS = BC / 16, ONES_BYTES = 0;

// Issues S = Q K_jᵀ for this warpgroup's 64 rows, as a group of its own.
DEVICE void multiply_qk(float (&s)[S_FRAGMENTS][4], QTile q, int row, KTile k) {
#pragma unroll
  for (int d = 0; d < QTile::COLUMNS; d += 16) wgmma_ss(s, rows_operand(q, row, d), rows_operand(k, 0, d), d > 0);
  wgmma_commit();
}

// Issues O += P V_j, as a group of its own.
DEVICE void multiply_pv(float (&o)[O_FRAGMENTS][4], const unsigned (&p)[P_REGISTERS][4], VTile v) {
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) wgmma_rs(o, p[i], columns_operand(v, 16 * i));
  wgmma_commit();
}

// O += P V_j, waited for.
DEVICE void multiply_pv_alone(float (&o)[O_FRAGMENTS][4], unsigned (&p)[P_REGISTERS][4], VTile v) {
  settle(o);
  settle(p);
  wgmma_fence();
  multiply_pv(o, p, v);
  wgmma_wait<0>();
  settle(o);
}

// P in the storage dtype, as the operand of the second product.
DEVICE void round_p(unsigned (&p)[P_REGISTERS][4], const float (&s)[S_FRAGMENTS][4]) {
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) {
    const FragmentA a = operand_a(s, 16 * i);
#pragma unroll
    for (int r = 0; r < 4; ++r) p[i][r] = a.r[r];
  }
}
