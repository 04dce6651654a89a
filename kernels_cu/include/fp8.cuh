// Operands of 8 bits (e4m3) for flash3_fp8: their tiles, products and softmax. fp16.cuh has the same names for 16 bits.
#pragma once

#include "memory.cuh"
#include "softmax.cuh"
#include "wgmma.cuh"

// V lies transposed, head_dim x keys.
DEVICE constexpr const char* name_of_v() { return "v_t"; }
using QTile = PanelTile<BR, HEAD_DIM / PACKED>;
using KTile = PanelTile<BC, HEAD_DIM / PACKED>;
using VTile = PanelTile<HEAD_DIM, round_up(BC, 128) / PACKED>;  // keys beyond BC are loaded, and not used
constexpr int P_REGISTERS = BC / 32;
constexpr int ONES_BYTES = 8 * 128;  // behind each tile of V lie 8 rows of ones
static_assert(BC <= 128, "V has one panel, so that the ones are its next rows");

// Issues S = Q K_jᵀ for this warpgroup's 64 rows, as a group of its own.
DEVICE void multiply_qk(float (&s)[S_FRAGMENTS][4], QTile q, int row, KTile k) {
  const unsigned long long rows = rows_operand(QTile{q.base + row * 128}, 0, 0), keys = rows_operand(k, 0, 0);
#pragma unroll
  for (int d = 0; d < QTile::COLUMNS; d += 16)
    wgmma_e4m3_ss(s, rows + operand_step<QTile>(0, d), keys + operand_step<KTile>(0, d), d > 0);
  wgmma_commit();
}

// Issues T = P V_j for the head dims from `dim` on, as a group of its own.
template <int N8>
DEVICE void multiply_pv(float (&t)[N8][4], const unsigned (&p)[P_REGISTERS][4], VTile v, int dim) {
  const unsigned long long values = rows_operand(v, 0, 0);
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i) wgmma_e4m3_rs(t, p[i], values + operand_step<VTile>(dim, 16 * i), i > 0);
  wgmma_commit();
}

// P in e4m3, as the operand of the second product. A lane's accumulators are columns 2t and 2t + 1 of four fragments; its
// operand is k 4t..4t+3 of two halves. So k stands for other keys than its number says, and V's keys come in that order
// (flash3_fp8_transpose).
DEVICE void round_p(unsigned (&p)[P_REGISTERS][4], const float (&s)[S_FRAGMENTS][4]) {
#pragma unroll
  for (int i = 0; i < P_REGISTERS; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float (&a)[4] = s[4 * i + r / 2 * 2], (&b)[4] = s[4 * i + r / 2 * 2 + 1];
      p[i][r] = pack_e4m3(a[r % 2 * 2], a[r % 2 * 2 + 1], b[r % 2 * 2], b[r % 2 * 2 + 1]);
    }
}

// O += scale · T: the first `count` fragments of T are added to those of O from `first` on. The field's name is promotion,
// or two-level accumulation (DeepGEMM): 8-bit products keep few bits of a sum, so each tile's sum goes to float32.
template <int N>
DEVICE void fold(float (&o)[O_FRAGMENTS][4], int first, const float (&t)[N][4], int count, float scale) {
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[first + n][e] += scale * t[n][e];
}

// The softmax of 8 bits. O is divided by the sum of the rounded P. Each lane has the whole sum. Softmax's own l is the sum of P
// before it is rounded. Without EXACT_LSE it isn't used, and the compiler leaves it out.
struct RoundedSoftmax : Softmax {
  float rounded[2];

  DEVICE explicit RoundedSoftmax(const Shape& shape) : Softmax(shape) { begin(); }

  DEVICE void begin() { Softmax::begin(), rounded[0] = rounded[1] = 0; }

  // As Softmax's, with a product in place of a division; yes where no score is above 0.
  DEVICE bool risen(const float (&s)[S_FRAGMENTS][4]) const {
    bool any = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int top = largest(s, half);
      any |= top < 0 || !(c * float_of(top) - m[half] <= TAU);
    }
    return any;
  }

  // The rounded sums wait for this, as O does; l is rescaled by raise().
  DEVICE void rescale(const float (&alpha)[2]) { rounded[0] *= alpha[0], rounded[1] *= alpha[1]; }

  // The sums of a tile's rounded P are the product with the ones, whose columns are all alike.
  DEVICE void add(const float (&sums)[4]) { rounded[0] += sums[0], rounded[1] += sums[2]; }

  // What the LSE is the logarithm of.
  DEVICE float of_lse(int half) const { return EXACT_LSE ? quad_sum(l[half]) : rounded[half]; }
};
