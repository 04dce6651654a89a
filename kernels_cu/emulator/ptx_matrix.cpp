// Matrices in inline PTX: loads and stores of 8 x 8, and products of a warp in every shape.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "floats.h"
#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

using namespace emulator;

struct EmuMma { int rows, depth, a, b, sums; };

namespace {

enum Element { F16, BF16, TF32, F64, S8, U8, E4M3, E5M2, S4, U4, B1, F32, S32 };
constexpr int BITS[] = {16, 16, 32, 64, 8, 8, 8, 8, 4, 4, 1, 32, 32};

void count_shared(Lane& lane, Op op, unsigned address, Place place) {
  const auto* name = lane.block->sram.name_of(address);
  lane.warp->log.add(lane, op, Space::sram, address, CHUNK, name ? name->name : "SRAM", place);
}

// The elements (row, column) of an 8 x 8 matrix that a lane's register has.
struct Place2 { int row, column; };
Place2 place_of(int lane, int i, bool transposed) {
  const int g = lane / 4, pair = 2 * (lane % 4) + i;
  return transposed ? Place2{pair, g} : Place2{g, pair};
}

void ldmatrix_of_warp(Warp& warp, unsigned mask) {
  const Sram& sram = warp.block->sram;
  for (int lane = 0; lane < WARP; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto& operands = warp.lanes[lane]->operands;
    for (int m = 0; m < static_cast<int>(operands.in[2]); ++m) {
      std::uint32_t word = 0;
      for (int i = 0; i < 2; ++i) {
        const auto [row, column] = place_of(lane, i, operands.in[1]);
        const auto address = static_cast<unsigned>(warp.lanes[8 * m + row]->operands.in[0]);
        std::uint16_t value = 0xffff;
        if (sram.holds(address, CHUNK)) std::memcpy(&value, sram.pointer(address) + 2 * column, 2);
        word |= std::uint32_t{value} << 16 * i;
      }
      operands.out[m] = word;
    }
  }
}

void stmatrix_of_warp(Warp& warp, unsigned mask) {
  const Sram& sram = warp.block->sram;
  for (int lane = 0; lane < WARP; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const auto& operands = warp.lanes[lane]->operands;
    const auto* words = reinterpret_cast<const unsigned*>(operands.in[3]);
    for (int m = 0; m < static_cast<int>(operands.in[2]); ++m)
      for (int i = 0; i < 2; ++i) {
        const auto [row, column] = place_of(lane, i, operands.in[1]);
        const auto address = static_cast<unsigned>(warp.lanes[8 * m + row]->operands.in[0]);
        const auto value = static_cast<std::uint16_t>(words[m] >> 16 * i);
        if (sram.holds(address, CHUNK)) std::memcpy(sram.pointer(address) + 2 * column, &value, 2);
      }
  }
}

void movmatrix_of_warp(Warp& warp, unsigned mask) {
  for (int lane = 0; lane < WARP; ++lane) {
    if (!(mask >> lane & 1)) continue;
    std::uint32_t word = 0;
    for (int i = 0; i < 2; ++i) {
      const auto [row, column] = place_of(lane, i, true);
      const auto from = static_cast<std::uint32_t>(warp.lanes[4 * row + column / 2]->operands.in[0]);
      word |= (from >> 16 * (column % 2) & 0xffffu) << 16 * i;
    }
    warp.lanes[lane]->operands.out[0] = word;
  }
}

// Element j of a register, as a double. Integers, float16 and tf32 are exact in it.
double value_of(const void* registers, int element, int j) {
  const int bits = BITS[element];
  if (element == F64) return static_cast<const double*>(registers)[j];
  const int each = 32 / bits;
  const std::uint32_t word = static_cast<const std::uint32_t*>(registers)[j / each];
  const std::uint32_t part = bits == 32 ? word : word >> bits * (j % each) & ((1u << bits) - 1);
  switch (element) {
    case F16: return float_of_f16(static_cast<std::uint16_t>(part));
    case BF16: return float_of_bf16(static_cast<std::uint16_t>(part));
    case TF32: return float_of_bits(part & 0xffffe000u);
    case F32: return float_of_bits(part);
    case S8: return static_cast<std::int8_t>(part);
    case E4M3: return Float8<4, 3>::value(static_cast<std::uint8_t>(part));
    case E5M2: return Float8<5, 2>::value(static_cast<std::uint8_t>(part));
    case S4: return part >= 8 ? static_cast<int>(part) - 16 : static_cast<int>(part);
    case S32: return static_cast<std::int32_t>(part);
    default: return part;
  }
}

// c (rows x 8) += a (rows x depth) · b (depth x 8). With g = lane / 4, t = lane % 4 and e elements a register, register i of A
// holds row g + 8 (i % (rows / 8)), columns e t + 4 e (i / (rows / 8)) and on; of B the same with its column g.
template <class T>
void product(Warp& warp, const EmuMma& shape) {
  const int each = shape.a == F64 ? 1 : 32 / BITS[shape.a], halves = shape.rows / 8, depth = shape.depth;
  std::vector<T> a(shape.rows * depth), b(depth * 8), c(shape.rows * 8);
  const int of_a = shape.rows * depth / 32, of_b = 8 * depth / 32, of_c = shape.rows * 8 / 32;  // elements a lane
  auto c_at = [&](int lane, int i) { return (lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2; };
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const auto& in = warp.lanes[lane]->operands.in;
    for (int j = 0; j < of_a; ++j) {
      const int i = j / each;
      a[(g + i % halves * 8) * depth + each * t + i / halves * 4 * each + j % each] =
          static_cast<T>(value_of(reinterpret_cast<const void*>(in[1]), shape.a, j));
    }
    for (int j = 0; j < of_b; ++j)
      b[(each * t + j / each * 4 * each + j % each) * 8 + g] = static_cast<T>(value_of(reinterpret_cast<const void*>(in[2]), shape.b, j));
    for (int i = 0; i < of_c; ++i) c[c_at(lane, i)] = static_cast<T>(value_of(reinterpret_cast<const void*>(in[3]), shape.sums, i));
  }
  for (int row = 0; row < shape.rows; ++row) {
    T sum[8] = {};
    for (int k = 0; k < depth; ++k)
      for (int column = 0; column < 8; ++column) sum[column] += a[row * depth + k] * b[k * 8 + column];
    for (int column = 0; column < 8; ++column) c[row * 8 + column] += sum[column];
  }
  for (int lane = 0; lane < WARP; ++lane) {
    auto* to = reinterpret_cast<char*>(warp.lanes[lane]->operands.in[3]);
    for (int i = 0; i < of_c; ++i) {
      const T value = c[c_at(lane, i)];
      if (shape.sums == F16) {
        const std::uint16_t bits = f16_of_float(static_cast<float>(value));
        std::memcpy(to + 2 * i, &bits, 2);
      } else if (shape.sums == F64) {
        const double wide = static_cast<double>(value);
        std::memcpy(to + 8 * i, &wide, 8);
      } else if (shape.sums == S32) {
        const auto whole = static_cast<std::int32_t>(static_cast<std::int64_t>(value));
        std::memcpy(to + 4 * i, &whole, 4);
      } else {
        const float narrow = static_cast<float>(value);
        std::memcpy(to + 4 * i, &narrow, 4);
      }
    }
  }
  warp.block->counters.flops += 2ull * shape.rows * 8 * depth;
}

void mma_of_warp(Warp& warp, unsigned) {
  const auto& shape = *reinterpret_cast<const EmuMma*>(warp.lanes[0]->operands.in[0]);
  if (shape.sums == S32) product<std::int64_t>(warp, shape);
  else if (shape.sums == F64) product<double>(warp, shape);
  else product<float>(warp, shape);
}

// Lanes 4 p .. 4 p + 3 and 16 + those are pair p. A lane's register pair has four elements of a row (or column) of A and B.
void quads_of_warp(Warp& warp, unsigned) {
  const auto flags = warp.lanes[0]->operands.in[0];
  const bool a_columns = flags & 1, b_rows = flags & 2, f32_sums = flags & 4;
  for (int pair = 0; pair < 4; ++pair) {
    float a[8][4], b[4][8], c[8][8];
    for (int n = 0; n < 8; ++n) {
      const int lane = 4 * pair + n % 4 + n / 4 * 16;
      const auto& in = warp.lanes[lane]->operands.in;
      for (int j = 0; j < 4; ++j) {
        const auto x = static_cast<float>(value_of(reinterpret_cast<const void*>(in[1]), F16, j));
        const auto y = static_cast<float>(value_of(reinterpret_cast<const void*>(in[2]), F16, j));
        (a_columns ? a[j + n / 4 * 4][n % 4] : a[n][j]) = x;
        (b_rows ? b[n % 4][j + n / 4 * 4] : b[j][n]) = y;
      }
      for (int i = 0; i < 8; ++i) {
        const int row = f32_sums ? (n % 2) + (i & 2) + n / 4 * 4 : n, column = f32_sums ? (i & 4) + (n & 2) + (i & 1) : i;
        c[row][column] = static_cast<float>(value_of(reinterpret_cast<const void*>(in[3]), f32_sums ? F32 : F16, i));
      }
    }
    for (int row = 0; row < 8; ++row)
      for (int k = 0; k < 4; ++k)
        for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (int n = 0; n < 8; ++n) {
      auto* to = reinterpret_cast<char*>(warp.lanes[4 * pair + n % 4 + n / 4 * 16]->operands.in[3]);
      for (int i = 0; i < 8; ++i) {
        const int row = f32_sums ? (n % 2) + (i & 2) + n / 4 * 4 : n, column = f32_sums ? (i & 4) + (n & 2) + (i & 1) : i;
        const std::uint16_t bits = f16_of_float(c[row][column]);
        f32_sums ? std::memcpy(to + 4 * i, &c[row][column], 4) : std::memcpy(to + 2 * i, &bits, 2);
      }
    }
  }
  warp.block->counters.flops += 4 * 2 * 8 * 8 * 4;
}

// Element i of a lane's fragment in nvcuda::wmma (mma.h). Lanes take pairs of neighbours in turn.
int place_of_pair(int lane, int i, int elements) {
  const int each = elements > 1 ? 2 : 1;
  return i / each * 32 * each + lane * each + i % each;
}

void wmma_of_warp(Warp& warp, unsigned) {
  const auto shape = warp.lanes[0]->operands.in[0];
  const int m = shape & 63, n = shape >> 6 & 63, k = shape >> 12 & 63;
  const bool wide = shape >> 18 & 1;
  std::vector<double> a(m * k), b(k * n), c(m * n);
  auto gather = [&](std::vector<double>& to, int which) {
    const int elements = static_cast<int>(to.size()) / WARP;
    for (int lane = 0; lane < WARP; ++lane)
      for (int i = 0; i < elements; ++i)
        to[place_of_pair(lane, i, elements)] = reinterpret_cast<const double*>(warp.lanes[lane]->operands.in[which])[i];
  };
  gather(a, 1), gather(b, 2), gather(c, 3);
  for (int row = 0; row < m; ++row)
    for (int i = 0; i < k; ++i)
      for (int column = 0; column < n; ++column) {
        const double product = a[row * k + i] * b[i * n + column];
        double& sum = c[row * n + column];
        sum = wide ? sum + product : static_cast<float>(sum) + static_cast<float>(product);
      }
  const int elements = m * n / WARP;
  for (int lane = 0; lane < WARP; ++lane)
    for (int i = 0; i < elements; ++i)
      reinterpret_cast<double*>(warp.lanes[lane]->operands.in[3])[i] = c[place_of_pair(lane, i, elements)];
  warp.block->counters.flops += 2ull * m * n * k;
}

}  // namespace

extern "C" {

void emu_wmma(int m, int n, int k, int wide, double* c, const double* a, const double* b) {
  auto& in = current_lane().operands.in;
  in[0] = static_cast<unsigned>(m | n << 6 | k << 12 | (wide != 0) << 18), in[1] = reinterpret_cast<std::uint64_t>(a);
  in[2] = reinterpret_cast<std::uint64_t>(b), in[3] = reinterpret_cast<std::uint64_t>(c);
  meet(wmma_of_warp, "mma_sync", ALL_LANES, true, HERE);
}

void emu_ptx_ldmatrix(unsigned* r, unsigned address, int count, int transposed) {
  Lane& lane = current_lane();
  if (lane.lane < 8 * count && check_shared(lane, address, CHUNK, false, false, HERE)) count_shared(lane, Op::ldsm, address, HERE);
  auto& operands = lane.operands;
  operands.in[0] = address, operands.in[1] = transposed, operands.in[2] = static_cast<unsigned>(count);
  meet(ldmatrix_of_warp, "ldmatrix", ALL_LANES, true, HERE);
  for (int m = 0; m < count; ++m) r[m] = static_cast<unsigned>(operands.out[m]);
}

void emu_ptx_stmatrix(unsigned address, const unsigned* r, int count, int transposed) {
  Lane& lane = current_lane();
  if (lane.lane < 8 * count && check_shared(lane, address, CHUNK, true, false, HERE)) count_shared(lane, Op::st, address, HERE);
  auto& operands = lane.operands;
  operands.in[0] = address, operands.in[1] = transposed, operands.in[2] = static_cast<unsigned>(count);
  operands.in[3] = reinterpret_cast<std::uint64_t>(r);
  meet(stmatrix_of_warp, "stmatrix", ALL_LANES, true, HERE);
}

unsigned emu_ptx_movmatrix(unsigned r) {
  auto& operands = current_lane().operands;
  operands.in[0] = r;
  meet(movmatrix_of_warp, "movmatrix", ALL_LANES, true, HERE);
  return static_cast<unsigned>(operands.out[0]);
}

void emu_ptx_mma(const EmuMma* shape, void* c, const void* a, const void* b) {
  auto& in = current_lane().operands.in;
  in[0] = reinterpret_cast<std::uint64_t>(shape), in[1] = reinterpret_cast<std::uint64_t>(a);
  in[2] = reinterpret_cast<std::uint64_t>(b), in[3] = reinterpret_cast<std::uint64_t>(c);
  meet(mma_of_warp, "mma", ALL_LANES, true, HERE);
}

void emu_ptx_mma_quads(void* c, const unsigned* a, const unsigned* b, int a_columns, int b_rows, int f32_sums) {
  auto& in = current_lane().operands.in;
  in[0] = static_cast<unsigned>(a_columns | b_rows << 1 | f32_sums << 2), in[1] = reinterpret_cast<std::uint64_t>(a);
  in[2] = reinterpret_cast<std::uint64_t>(b), in[3] = reinterpret_cast<std::uint64_t>(c);
  meet(quads_of_warp, "mma", ALL_LANES, true, HERE);
}
}
