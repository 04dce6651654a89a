// Products of a warpgroup (wgmma): 64 x N += 64 x 32 bytes · 32 bytes x N, in the background.
//
// Each warp issues its part. Once all four have, the product is complete, and all four must know that its operands are there. It is
// computed when a warp waits for it. A thread's accumulators are written back at that thread's own wait.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "floats.h"
#include "hopper.h"
#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

namespace emulator {

namespace {

constexpr int WARPS = 4, ROWS = 64, OPERAND_BYTES = 32;  // of a row of A, or a column of B
constexpr unsigned POISON_WORD = 0xffffffffu;
constexpr int A_IN_REGISTERS = 25, LOOSE = 26;  // bits of a product's shape; LOOSE: A's registers may not be where they were

float float_of_e4m3(std::uint8_t x) {
  static const auto values = [] {
    std::array<float, 256> table;
    for (int i = 0; i < 256; ++i) table[i] = Float8<4, 3>::value(static_cast<std::uint8_t>(i));
    return table;
  }();
  return values[x];
}

float element(const char* from, int type) {
  std::uint16_t bits;
  std::uint32_t word;
  switch (type) {
    case EMU_E4M3: return float_of_e4m3(static_cast<std::uint8_t>(*from));
    case EMU_E5M2: return Float8<5, 2>::value(static_cast<std::uint8_t>(*from));
    case EMU_S8: return static_cast<std::int8_t>(*from);
    case EMU_U8: return static_cast<std::uint8_t>(*from);
    case EMU_TF32: std::memcpy(&word, from, 4); return float_of_bits(word & 0xffffe000u);
    default: std::memcpy(&bits, from, 2); return type == EMU_BF16 ? float_of_bf16(bits) : float_of_f16(bits);
  }
}

int bytes_of(const Product& product) { return product.element == EMU_TF32 ? 4 : product.element >= EMU_E4M3 ? 1 : 2; }
int depth_of(const Product& product) { return OPERAND_BYTES / bytes_of(product); }

// Operands in SRAM: the shared addresses of their 16-byte pieces. The descriptor holds address, strides and swizzle (PTX ISA:
// matrix descriptor). An atom is 8 rows of `span` bytes, swizzled, or 8 rows of 16 bytes as they are.
struct Descriptor {
  unsigned address, leading, stride, offset, span;
  explicit Descriptor(std::uint64_t bits)
      : address((bits & 0x3fff) * 16), leading((bits >> 16 & 0x3fff) * 16), stride((bits >> 32 & 0x3fff) * 16),
        offset(bits >> 49 & 7), span(bits >> 62 ? 256 >> (bits >> 62) : 0) {}

  // Piece i of row `row`, if the operand's rows lie along the summed dimension.
  unsigned along(int row, int i) const {
    const unsigned atom = address + row / 8 * stride;
    return span ? swizzled(atom + row % 8 * span + i * CHUNK, span) : atom + row % 8 * CHUNK + i * leading;
  }
  // Eight elements from column 8 i of step k, if the operand's rows lie across it.
  unsigned across(int k, int i) const {
    if (!span) return address + i * stride + k / 8 * leading + k % 8 * CHUNK;
    const int pieces = static_cast<int>(span / CHUNK);
    return swizzled(address + i / pieces * leading + k / 8 * stride + k % 8 * span + i % pieces * CHUNK, span);
  }
  // Where the atom begins in the pattern of the swizzle.
  unsigned first_row() const { return span ? address >> 7 & (span / CHUNK - 1) : 0; }
};

std::vector<unsigned> pieces_of(std::uint64_t bits, int rows, bool columns, int depth) {
  const Descriptor descriptor(bits);
  std::vector<unsigned> pieces;
  if (columns) {
    for (int k = 0; k < depth; ++k)
      for (int i = 0; i < rows / 8; ++i) pieces.push_back(descriptor.across(k, i));
    return pieces;
  }
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < 2; ++i) pieces.push_back(descriptor.along(row, i));
  return pieces;
}

std::vector<unsigned> pieces_of_a(const Product& product) { return pieces_of(product.a, ROWS, product.a_columns, depth_of(product)); }
std::vector<unsigned> pieces_of_b(const Product& product) {
  return pieces_of(product.b, 8 * product.fragments, product.b_columns, depth_of(product));
}

// One operand. Its bytes are counted, and checked as an engine's accesses.
void check_operand(const Actor& engine, const Product& product, const std::vector<unsigned>& pieces, std::uint64_t descriptor,
                   bool first) {
  Block& block = *engine.lane.block;
  const Descriptor given(descriptor);
  const char* wrong = given.first_row() != given.offset ? "names an operand whose rows don't start where its swizzle's pattern does" : nullptr;
  if (wrong) add_shared(engine.lane, "misaligned", wrong, product.place, given.address, CHUNK);
  for (const unsigned piece : pieces)
    if (!check_shared(engine, piece, false, product.place)) block.abort();
  Moved moved;
  moved.instructions = first;
  moved.bytes = pieces.size() * CHUNK;
  const auto* name = block.sram.name_of(given.address);
  block.ledger.add(product.step, name ? name->name : "SRAM", Space::sram, Op::gmma, moved);
}

// All four warps have issued it.
void check_product(Warpgroup& group, const Product& product, std::uint64_t number, Lane& lane) {
  Block& block = *lane.block;
  const Actor engine{lane, product.knows.data(), static_cast<std::uint16_t>(group.agent), static_cast<std::uint32_t>(number + 1),
                     true};
  if (!product.a_in_registers) check_operand(engine, product, pieces_of_a(product), product.a, true);
  check_operand(engine, product, pieces_of_b(product), product.b, product.a_in_registers);
  block.counters.flops += 2ull * ROWS * 8 * product.fragments * depth_of(product);
}

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int32_t EightInts __attribute__((vector_size(32), aligned(4), may_alias));
typedef std::int16_t EightShorts __attribute__((vector_size(16), aligned(2), may_alias));

struct Operands { float a[ROWS][OPERAND_BYTES], b[OPERAND_BYTES][256]; };

// The products of an instruction are added up in float32, and then their sum to the accumulator, as in mma.sync. (The tensor cores
// add 16 products of 16 bits at once, aligned and cut off as for e4m3, but 25 bits below the largest. That differs in the last bits
// of float32.)
void add_in_float32(const Operands& x, float* values, int columns, int depth) {
  for (int row = 0; row < ROWS; ++row)
    for (int n = 0; n < columns; n += 8) {
      Eight sum = {};
      for (int k = 0; k < depth; ++k) sum += x.a[row][k] * *reinterpret_cast<const Eight*>(&x.b[k][n]);
      *reinterpret_cast<Eight*>(values + row * columns + n) += sum;
    }
}

// The exponent of an e4m3 or e5m2. A subnormal number has that of the smallest normal one, and 0 has less than any.
std::int16_t exponent_of(float x, int type) {
  return x == 0 ? -1000 : static_cast<std::int16_t>(std::max(type == EMU_E4M3 ? -6 : -14, std::ilogb(x)));
}

// Products of e4m3, added as an H200 adds them, to the last bit (the results' file of kind "accumulation"). Each product, and the
// accumulator, is cut off 13 bits below the leading bit of the largest. A product's leading bit is where the exponents of its
// factors put it. What is left is summed exactly. The sum keeps 13 bits behind its leading one. (Products of e5m2 are taken to be
// alike.)
void add_eights(const Operands& x, float* values, int columns, int a_type, int b_type) {
  static thread_local std::int16_t a_exponent[ROWS][OPERAND_BYTES], b_exponent[OPERAND_BYTES][256];
  float a_nan[ROWS] = {}, b_nan[256] = {};  // 0, or NaN if there is one among the operands
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < OPERAND_BYTES; ++k) a_exponent[row][k] = exponent_of(x.a[row][k], a_type), a_nan[row] += 0 * x.a[row][k];
  for (int k = 0; k < OPERAND_BYTES; ++k)
    for (int n = 0; n < columns; ++n) b_exponent[k][n] = exponent_of(x.b[k][n], b_type), b_nan[n] += 0 * x.b[k][n];

  constexpr std::int32_t KEPT = 13, BIAS = 127, FIRST = ~0u << (23 - KEPT);
  for (int row = 0; row < ROWS; ++row)
    for (int n = 0; n < columns; n += 8) {
      auto* at = reinterpret_cast<Eight*>(values + row * columns + n);
      const Eight c = *at, nan = a_nan[row] + *reinterpret_cast<const Eight*>(&b_nan[n]);
      EightShorts largest = EightShorts{} - 1000;  // of the products' exponents
      for (int k = 0; k < OPERAND_BYTES; ++k) {
        const EightShorts exponent = a_exponent[row][k] + *reinterpret_cast<const EightShorts*>(&b_exponent[k][n]);
        largest = largest > exponent ? largest : exponent;
      }
      const EightInts c_top = (reinterpret_cast<EightInts>(c) >> 23 & 255) - BIAS;
      const EightInts products_top = __builtin_convertvector(largest, EightInts), top = products_top > c_top ? products_top : c_top;
      const Eight unit = reinterpret_cast<Eight>((top - KEPT + BIAS) << 23);  // 2^(top - 13)
      const Eight scale = reinterpret_cast<Eight>((KEPT - top + BIAS) << 23);
      EightInts units = __builtin_convertvector(c * scale, EightInts);  // cuts off, as the others do
      for (int k = 0; k < OPERAND_BYTES; ++k)
        units += __builtin_convertvector(x.a[row][k] * scale * *reinterpret_cast<const Eight*>(&x.b[k][n]), EightInts);
      Eight sum = __builtin_convertvector(units, Eight) * unit;  // exact
      sum = products_top > -100 ? sum : c;                       // if not all of them are 0
      sum = reinterpret_cast<Eight>(reinterpret_cast<EightInts>(sum) & FIRST) + 0.f;
      *at = c - c == 0 && nan == 0 ? sum : c + nan;
    }
}

// Integers, which are exact. The accumulators hold their bits.
void add_integers(const Operands& x, float* values, int columns, int depth) {
  for (int row = 0; row < ROWS; ++row)
    for (int n = 0; n < columns; ++n) {
      std::uint32_t sum = bits_of_float(values[row * columns + n]);
      for (int k = 0; k < depth; ++k) sum += static_cast<std::uint32_t>(static_cast<std::int32_t>(x.a[row][k] * x.b[k][n]));
      values[row * columns + n] = float_of_bits(sum);
    }
}

void compute(const Sram& sram, const Product& product) {
  const int columns = 8 * product.fragments, depth = depth_of(product), bytes = bytes_of(product), type = product.element;
  const int piece = static_cast<int>(CHUNK) / bytes;  // elements of one
  static thread_local Operands operands;
  auto& [a, b] = operands;
  if (product.a_in_registers) {
    const int each = 4 / bytes;  // elements of a register
    for (int thread = 0; thread < WARPS * WARP; ++thread)
      for (int i = 0; i < 4; ++i) {
        const int row = thread / WARP * 16 + thread % WARP / 4 + i % 2 * 8, k = thread % 4 * each + i / 2 * depth / 2;
        const auto* from = reinterpret_cast<const char*>(&product.registers[4 * thread + i]);
        for (int e = 0; e < each; ++e) a[row][k + e] = element(from + e * bytes, type);
      }
  } else {
    const auto pieces = pieces_of_a(product);
    for (int row = 0; row < ROWS; ++row)
      for (int k = 0; k < depth; ++k) {
        const unsigned at = product.a_columns ? pieces[k * ROWS / 8 + row / 8] : pieces[2 * row + k / piece];
        a[row][k] = element(sram.pointer(at) + (product.a_columns ? row % 8 : k % piece) * bytes, type);
      }
  }
  const auto pieces = pieces_of_b(product);
  for (int column = 0; column < columns; ++column)
    for (int k = 0; k < depth; ++k) {
      const unsigned at = product.b_columns ? pieces[k * product.fragments + column / 8] : pieces[2 * column + k / piece];
      b[k][column] = element(sram.pointer(at) + (product.b_columns ? column % 8 : k % piece) * bytes, product.b_element);
    }
  if (product.negative_a != product.negative_b)
    for (auto& row : a)
      for (float& x : row) x = -x;
  float* values = product.c->values.data();
  if (!product.add) std::fill(product.c->values.begin(), product.c->values.end(), 0.f);
  if (product.sums == EMU_S32) add_integers(operands, values, columns, depth);
  else if (bytes == 1) add_eights(operands, values, columns, type, product.b_element);
  else add_in_float32(operands, values, columns, depth);
  if (product.sums == EMU_F16)
    for (float& value : product.c->values) value = float_of_f16(f16_of_float(value));
}

// Calls each(i, its value or values) for the registers of one thread. Two sums of 16 bits share a register.
template <class Each>
void for_registers(Accumulators& c, int warp, int lane, Each each) {
  const int columns = 8 * c.fragments, step = c.halves ? 2 : 1;
  for (int i = 0; i < 4 * c.fragments / step; ++i) {
    const int n = i * step / 4, part = i * step % 4, row = 16 * warp + lane / 4 + part / 2 * 8, column = 8 * n + 2 * (lane % 4) + part % 2;
    each(c.at[warp][lane] + i, &c.values[row * columns + column]);
  }
}

void add_registers(Lane& lane, const char* kind, const char* message, Place place, const Product* product = nullptr) {
  Finding finding = lane.block->finding(kind, place, lane);
  finding.message = message;
  if (product) {
    finding.has_other = true;
    finding.other = product->place, finding.other_block = lane.block_index, finding.other_thread = lane.thread;
  }
  lane.block->findings.add(std::move(finding));
}

bool is_poison(const float& value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits == POISON_WORD;
}

// Registers that a product is about to use must be as they were at the thread's last wgmma_fence.
void check_fence(Lane& lane, const void* at, std::size_t bytes, const char* what) {
  if (!lane.block->launch.sanitize()) return;
  auto& known = lane.block->hopper->registers[lane.number];
  if (!known.fenced) add_registers(lane, "fence forgotten", "issues a wgmma without a wgmma_fence before", lane.place);
  for (auto& operand : known.operands) {
    if (operand.at != at) continue;
    if (operand.fenced.size() == bytes && std::memcmp(at, operand.fenced.data(), bytes) != 0)
      add_registers(lane, "fence forgotten", what, lane.place);
    operand.bytes = bytes;
    return;
  }
  known.operands.push_back({static_cast<const char*>(at), bytes, {}});
}

// The running products' accumulators that begin with this register of the warp's first lane.
std::shared_ptr<Accumulators> running(const Warpgroup::Queue& queue, int warp, const float* first) {
  for (const auto& c : queue.running)
    if (c->at[warp][0] == first) return c;
  return nullptr;
}

// The registers of a warp become a product's accumulators: their values go there, and NaNs take their place.
void take_registers(Warp& warp, Accumulators& c, bool add) {
  const int w = warp.number % WARPS;
  for (Lane* lane : warp.lanes) {
    auto* at = reinterpret_cast<float*>(lane->operands.in[0]);
    check_fence(*lane, at, c.bytes(), "issues a wgmma whose accumulators it wrote after its last wgmma_fence");
    c.at[w][lane->lane] = at;
    for_registers(c, w, lane->lane, [&](float* at, float* kept) {
      const std::uint32_t word = bits_of_float(*at);
      if (add && c.halves) kept[0] = float_of_f16(static_cast<std::uint16_t>(word)), kept[1] = float_of_f16(static_cast<std::uint16_t>(word >> 16));
      else if (add) *kept = *at;
      std::memset(at, POISON, sizeof *at);
    });
  }
}

void issue_of_warp(Warp& warp, unsigned) {
  Block& block = *warp.block;
  Lane& first = *warp.lanes[0];
  Warpgroup& group = block.hopper->warpgroup(first, first.place);
  block.hopper->execute_aligned(warp, 0, true);
  const int w = warp.number % WARPS;
  auto& queue = group.queues[w];
  const std::uint64_t shape = first.operands.in[3];
  const bool a_in_registers = shape >> A_IN_REGISTERS & 1, loose = shape >> LOOSE & 1;
  for (const Lane* lane : warp.lanes) {
    const auto& x = lane->operands;
    if (x.in[2] == first.operands.in[2] && x.in[3] == shape && (a_in_registers || x.in[1] == first.operands.in[1])) continue;
    add_registers(*warp.lanes[lane->lane], "divergent collective", "issues a wgmma with other operands than lane 0", lane->place);
    block.abort();
  }
  const std::uint64_t number = queue.issued++;
  while (number - group.first >= group.products.size()) group.products.emplace_back();
  Product& product = group.products[number - group.first];
  if (!product.warps) {
    product.shape = shape, product.a = a_in_registers ? 0 : first.operands.in[1], product.b = first.operands.in[2];
    product.fragments = shape & 255, product.add = shape >> 8 & 1, product.b_columns = shape >> 9 & 1;
    product.a_columns = shape >> 10 & 1, product.element = shape >> 11 & 15, product.b_element = shape >> 15 & 15;
    product.sums = shape >> 19 & 15, product.negative_a = shape >> 23 & 1, product.negative_b = shape >> 24 & 1;
    product.a_in_registers = a_in_registers;
    product.registers.resize(a_in_registers ? 4 * WARPS * WARP : 0);
    product.step = first.step;
    product.place = first.place;
  } else if (product.shape != shape || product.b != first.operands.in[2] ||
             (!a_in_registers && product.a != first.operands.in[1])) {
    add_registers(first, "divergent collective", "issues another wgmma than the other warps of its warpgroup", first.place,
                  &product);
    block.abort();
  }
  product.warps |= 1u << w;

  auto c = running(queue, w, reinterpret_cast<float*>(first.operands.in[0]));
  if (!c) {
    c = product.c && !product.c->at[w][0] ? product.c : std::make_shared<Accumulators>();
    c->fragments = product.fragments;
    c->halves = product.sums == EMU_F16;
    c->values.resize(ROWS * 8 * product.fragments);
    take_registers(warp, *c, product.add);
    queue.running.push_back(c);
  }
  if (product.c && product.c != c) {
    add_registers(first, "divergent collective", "issues a wgmma onto other accumulators than the other warps of its warpgroup",
                  first.place, &product);
    block.abort();
  }
  product.c = c;
  c->last[w] = number;

  std::vector<std::uint32_t> knows(block.clocks.width);
  for (Lane* lane : warp.lanes) {
    if (a_in_registers) {
      const auto* a = reinterpret_cast<const unsigned*>(lane->operands.in[1]);
      if (!loose) check_fence(*lane, a, 16, "issues a wgmma whose operand in registers it wrote after its last wgmma_fence");
      std::copy_n(a, 4, &product.registers[4 * (w * WARP + lane->lane)]);
    }
    const auto* row = block.clocks.of(lane->number);
    for (std::size_t i = 0; i < knows.size(); ++i) knows[i] = std::max(knows[i], row[i]);
  }
  if (product.knows.empty()) product.knows = std::move(knows);
  else
    for (std::size_t i = 0; i < product.knows.size(); ++i) product.knows[i] = std::min(product.knows[i], knows[i]);

  if (product.warps != (1u << WARPS) - 1) return;
  product.knows.resize(block.clocks.width);
  check_product(group, product, number, first);
  for (int i = 0; i < WARPS; ++i)
    if (group.queues[i].wanted > group.queues[i].waited) block.hopper->finish(block.warps[warp.number / WARPS * WARPS + i]);
}

void fence_of_warp(Warp& warp, unsigned mask) {
  warp.block->hopper->execute_aligned(warp, 0);
  for (Lane* lane : warp.lanes) {
    if (!lane || !(mask >> lane->lane & 1)) continue;
    auto& known = warp.block->hopper->registers[lane->number];
    known.fenced = true;
    for (auto& operand : known.operands) operand.fenced.assign(operand.at, operand.at + operand.bytes);
  }
}

void commit_of_warp(Warp& warp, unsigned) {
  warp.block->hopper->execute_aligned(warp, 0);
  auto& queue = warp.block->hopper->warpgroup(*warp.lanes[0], warp.lanes[0]->place).queues[warp.number % WARPS];
  queue.groups.push_back(queue.issued);
}

void wait_of_warp(Warp& warp, unsigned) {
  const Lane& first = *warp.lanes[0];
  Hopper& hopper = *warp.block->hopper;
  auto& queue = hopper.warpgroup(*warp.lanes[0], first.place).queues[warp.number % WARPS];
  const std::uint64_t pending = first.operands.in[0], groups = queue.groups.size();
  hopper.execute_aligned(warp, pending);
  if (groups > pending) queue.wanted = std::max(queue.wanted, queue.groups[groups - pending - 1]);
  hopper.finish(warp);
}

}  // namespace

Warpgroup& Hopper::warpgroup(Lane& lane, Place place) {
  if (warpgroups.empty()) warpgroups.resize(block.warps.size() / WARPS);
  const std::size_t i = lane.warp->number / WARPS;
  if (i >= warpgroups.size() || block.lanes.size() < (i + 1) * WARPS * WARP) {
    add_registers(lane, "divergent collective", "issues a wgmma, and its warpgroup isn't four whole warps", place);
    block.abort();
  }
  if (warpgroups[i].agent < 0) warpgroups[i].agent = block.clocks.add_agent();
  return warpgroups[i];
}

// Computes what a warp waits for and gives it its accumulators, if all warps of the warpgroup have issued it.
void Hopper::finish(Warp& warp) {
  const int w = warp.number % WARPS;
  Warpgroup& group = warpgroups[warp.number / WARPS];
  auto& queue = group.queues[w];
  for (std::uint64_t i = group.done; i < queue.wanted; ++i)
    if (group.products[i - group.first].warps != (1u << WARPS) - 1) return;
  for (; group.done < queue.wanted; ++group.done) compute(block.sram, group.products[group.done - group.first]);
  queue.waited = queue.wanted;

  for (auto& c : queue.running) {
    if (c->last[w] >= queue.waited) continue;
    const Product& last = group.products[c->last[w] - group.first];
    for (Lane* lane : warp.lanes) {
      bool written = false;
      for_registers(*c, w, lane->lane, [&](float* at, const float* results) {
        written = written || !is_poison(*at);
        const std::uint32_t pair = f16_of_float(results[0]) | (c->halves ? static_cast<std::uint32_t>(f16_of_float(results[1])) << 16 : 0);
        if (c->halves) std::memcpy(at, &pair, 4);
        else std::memcpy(at, results, 4);
      });
      if (written && block.launch.sanitize())
        add_registers(*lane, "wait forgotten", "wrote an accumulator while its wgmma was still running", lane->place, &last);
      for (auto& operand : registers[lane->number].operands)  // a product may go on with what a product left
        if (operand.at == reinterpret_cast<const char*>(c->at[w][lane->lane]))
          operand.fenced.assign(operand.at, operand.at + operand.bytes);
    }
    c->at[w] = {};
  }
  auto& left = queue.running;
  left.erase(std::remove_if(left.begin(), left.end(), [&](const auto& c) { return c->last[w] < queue.waited; }), left.end());
  for (Lane* lane : warp.lanes) {
    auto& seen = block.clocks.of(lane->number)[group.agent];
    seen = std::max(seen, static_cast<std::uint32_t>(queue.waited));
    if (lane->wait == Wait::warpgroup) block.wake(*lane);
  }
  std::uint64_t oldest = group.queues[0].waited;
  for (const auto& other : group.queues) oldest = std::min(oldest, other.waited);
  for (; group.first < oldest && !group.products.empty(); ++group.first) group.products.pop_front();
}

void Hopper::leave_products(Lane& lane) {
  if (warpgroups.empty() || static_cast<std::size_t>(lane.warp->number / WARPS) >= warpgroups.size()) return;
  const auto& group = warpgroups[lane.warp->number / WARPS];
  const auto& queue = group.queues[lane.warp->number % WARPS];
  if (queue.waited == queue.issued || !block.launch.sanitize()) return;
  add_registers(lane, "wait forgotten", "ends while a wgmma of its warpgroup is still running",
                group.products[queue.waited - group.first].place);
}

// A plain access of a thread to its own variables: accumulators that a product still uses are out of reach.
void Hopper::check_registers(Lane& lane, const char* address, unsigned bytes, bool write, Place place) {
  const std::size_t i = lane.warp->number / WARPS;
  if (i >= warpgroups.size() || !block.launch.sanitize()) return;
  const int w = lane.warp->number % WARPS;
  for (const auto& c : warpgroups[i].queues[w].running) {
    const auto* at = reinterpret_cast<const char*>(c->at[w][lane.lane]);
    if (!at || address + bytes <= at || address >= at + c->bytes()) continue;
    add_registers(lane, "wait forgotten", write ? "writes an accumulator while its wgmma is still running"
                                                : "reads an accumulator while its wgmma is still running", place,
                  &warpgroups[i].products[c->last[w] - warpgroups[i].first]);
  }
}

}  // namespace emulator

using namespace emulator;

static void issue(const EmuWgmma& x, float* c, std::uint64_t a, std::uint64_t b, bool a_in_registers, Place place) {
  auto& in = current_lane().operands.in;
  in[0] = reinterpret_cast<std::uint64_t>(c), in[1] = a, in[2] = b;
  const int bits[] = {x.add != 0, x.b_columns != 0, x.a_columns != 0};
  in[3] = static_cast<std::uint64_t>(x.fragments | bits[0] << 8 | bits[1] << 9 | bits[2] << 10 | x.a << 11 | x.b << 15 | x.sums << 19 |
                                     (x.scale_a < 0) << 23 | (x.scale_b < 0) << 24 | a_in_registers << A_IN_REGISTERS |
                                     (x.loose != 0) << LOOSE);
  meet(issue_of_warp, "wgmma", ALL_LANES, true, place);
}

static EmuWgmma plain(int fragments, int add, int b_columns, int element) {
  return {fragments, element, element, EMU_F32, add, 1, 1, 0, b_columns, 0};
}

void emu_wgmma_ss(float* c, int fragments, unsigned long long a, unsigned long long b, int add, int b_columns, int element) {
  issue(plain(fragments, add, b_columns, element), c, a, b, false, HERE);
}

void emu_wgmma_rs(float* c, int fragments, const unsigned* a, unsigned long long b, int add, int b_columns, int element) {
  issue(plain(fragments, add, b_columns, element), c, reinterpret_cast<std::uint64_t>(a), b, true, HERE);
}

void emu_wgmma(const EmuWgmma* what, float* c, unsigned long long a, const unsigned* registers, unsigned long long b) {
  issue(*what, c, registers ? reinterpret_cast<std::uint64_t>(registers) : a, b, registers != nullptr, HERE);
}

void emu_wgmma_fence() { meet(fence_of_warp, "wgmma_fence", ALL_LANES, true, HERE); }
void emu_wgmma_commit() { meet(commit_of_warp, "wgmma_commit", ALL_LANES, true, HERE); }

void emu_wgmma_wait(unsigned pending) {
  Lane& lane = current_lane();
  lane.operands.in[0] = pending;
  meet(wait_of_warp, "wgmma_wait", ALL_LANES, true, HERE);
  const auto& queue = lane.block->hopper->warpgroups[lane.warp->number / WARPS].queues[lane.warp->number % WARPS];
  while (queue.waited < queue.wanted) {
    lane.wait = Wait::warpgroup;
    lane.what = "the other warps of its warpgroup, which issued no such wgmma";
    lane.block->yield();
  }
}
