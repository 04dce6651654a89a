#include "primitives.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "floats.h"
#include "host.h"
#include "launch.h"
#include "machine.h"

#define HERE __builtin_return_address(0)  // in the kernel, for these functions are never inlined into it

using namespace emulator;

namespace {

void count(Lane& lane, Op op, const Region& region, const void* address, unsigned bytes, Place place, unsigned partner = 0) {
  const auto from = reinterpret_cast<std::uint64_t>(address);
  lane.warp->log.add(lane, op, Space::hbm, from, bytes, region.name.c_str(), place, partner);
}

void count_shared(Lane& lane, Op op, unsigned address, unsigned bytes, Place place, const void* partner = nullptr) {
  const auto* name = lane.block->sram.name_of(address);
  const auto from = reinterpret_cast<std::uint64_t>(partner);
  lane.warp->log.add(lane, op, Space::sram, address, bytes, name ? name->name : "SRAM", place, from);
}

}  // namespace

// Memory

void emu_load_global(void* value, const void* address, unsigned bytes) {
  Lane& lane = current_lane();
  lane.block->poll(lane, HERE);
  Region* region;
  if (!check_global(lane, address, bytes, false, false, HERE, region)) return void(std::memset(value, POISON, bytes));
  count(lane, Op::ld, *region, address, bytes, HERE);
  std::memcpy(value, address, bytes);
}

void emu_store_global(void* address, const void* value, unsigned bytes) {
  Lane& lane = current_lane();
  Region* region;
  if (!check_global(lane, address, bytes, true, false, HERE, region)) return;
  count(lane, Op::st, *region, address, bytes, HERE);
  std::memcpy(address, value, bytes);
}

void emu_load_shared(void* value, unsigned address, unsigned bytes) {
  Lane& lane = current_lane();
  lane.block->poll(lane, HERE);
  if (!check_shared(lane, address, bytes, false, false, HERE)) return void(std::memset(value, POISON, bytes));
  count_shared(lane, Op::ld, address, bytes, HERE);
  std::memcpy(value, lane.block->sram.pointer(address), bytes);
}

void emu_store_shared(unsigned address, const void* value, unsigned bytes) {
  Lane& lane = current_lane();
  if (!check_shared(lane, address, bytes, true, false, HERE)) return;
  count_shared(lane, Op::st, address, bytes, HERE);
  std::memcpy(lane.block->sram.pointer(address), value, bytes);
}

void emu_copy_async(unsigned to, const void* from, unsigned bytes, unsigned kept) {
  Lane& lane = current_lane();
  Region* region = nullptr;
  kept = std::min(kept, bytes);
  if (kept && !check_global(lane, from, kept, false, false, HERE, region)) return;
  if (!lane.block->sram.holds(to, bytes) || to % bytes) return void(check_shared(lane, to, bytes, true, false, HERE));
  if (kept) count(lane, Op::ldgsts, *region, from, kept, HERE, to);
  count_shared(lane, Op::ldgsts, to, bytes, HERE, from);
  begin_copy(lane, to, from, bytes, kept, HERE);
}

void emu_copy_commit() { ++current_lane().group; }
void emu_copy_wait(unsigned pending) { finish_copies(current_lane(), pending); }

unsigned emu_shared_address(const void* pointer) {
  unsigned address = 0;
  current_lane().block->sram.shared_address(pointer, address);
  return address;
}

void* emu_shared_pointer(unsigned address) { return current_lane().block->sram.pointer(address); }

void emu_name_sram(const char* name, unsigned address, unsigned bytes) {
  auto& names = current_lane().block->sram.names;
  for (const auto& known : names)
    if (known.begin == address) return;
  names.push_back({name, address, address + bytes});
}

int emu_atomic(void* address, unsigned bytes) {
  Lane& lane = current_lane();
  lane.block->poll(lane, HERE);
  lane.block->spin(lane, address, HERE);
  lane.heard.add(address);
  unsigned shared;
  const bool in_sram = lane.block->sram.shared_address(address, shared);
  lane.hand_on(address, in_sram);
  if (in_sram) {
    if (!check_shared(lane, shared, bytes, true, true, HERE)) return 0;
    count_shared(lane, Op::atom, shared, bytes, HERE);
    return 1;
  }
  if (inside_image(address)) return 1;  // a __device__ variable
  Region* region;
  if (!check_global(lane, address, bytes, true, true, HERE, region)) return 0;
  count(lane, Op::red, *region, address, bytes, HERE);
  return 1;
}

void emu_wait_for(const void* counter, unsigned value) {
  Lane& lane = current_lane();
  Region* region;
  do {
    lane.block->poll(lane, HERE);
    lane.block->spin(lane, counter, HERE);
    lane.heard.add(counter);
    if (!check_global(lane, counter, sizeof value, false, Way::relaxed, HERE, region)) return;
  } while (__atomic_load_n(static_cast<const unsigned*>(counter), __ATOMIC_ACQUIRE) != value);
  count(lane, Op::ld, *region, counter, sizeof value, HERE);
}

void emu_in_turn(void* address, unsigned bytes) {
  Lane& lane = current_lane();
  Region* region;
  check_global(lane, address, bytes, false, Way::primitive, HERE, region) &&
      check_global(lane, address, bytes, true, Way::primitive, HERE, region);
}

void emu_compare(const void* address) {
  Lane& lane = current_lane();
  for (unsigned i = 0, n = lane.reads.size(); i < n; ++i) {
    auto& read = lane.reads[(lane.read_count - 1 - i) % n];
    if (read.address != address) continue;
    Launch& launch = lane.block->launch;
    const std::lock_guard lock(launch.busy);
    launch.checked.insert(read.place);
    return void(lane.reads = {});
  }
}

[[noreturn]] static void give_up(const char* kind, std::string message, Place place) {
  Lane& lane = current_lane();
  Finding finding = lane.block->finding(kind, place, lane);
  finding.message = std::move(message);
  lane.block->findings.add(std::move(finding));
  lane.block->abort();
}
void emu_assert(const char* condition) {
  if (current) give_up("assert", std::string("assert(") + condition + ") failed", HERE);
  std::fprintf(stderr, "Assertion `%s' failed.\n", condition);
  std::abort();
}
void emu_trap() { give_up("trap", "calls __trap()", HERE); }

// Functions that would end the process. build.py renames the source's calls of them to these. In host code they do what they
// always do.
extern "C" {
#define EMU_END(NAME, SAYS, OTHERWISE) \
  void emu_##NAME(int status) { current ? give_up("exit", SAYS ", which would end the whole process", HERE) : OTHERWISE; }
#define EMU_LEAVE in_program() ? end_program(status & 0xff) : std::_Exit(status)
EMU_END(abort, "calls abort()", std::abort())
EMU_END(exit, "calls exit()", EMU_LEAVE)
EMU_END(_exit, "calls _exit()", EMU_LEAVE)
EMU_END(_Exit, "calls _Exit()", EMU_LEAVE)
EMU_END(quick_exit, "calls quick_exit()", EMU_LEAVE)
EMU_END(terminate, "calls std::terminate()", std::abort())
void* emu_throw(unsigned long bytes) {
  if (current) give_up("exit", "throws an exception, which would end the whole process", HERE);
  return abi::__cxa_allocate_exception(bytes);
}
void emu_rethrow() {
  if (current) give_up("exit", "throws an exception, which would end the whole process", HERE);
  abi::__cxa_rethrow();
}
}

// The running thread

uint3 emu_thread_index() { return current->thread; }
uint3 emu_block_index() { return current->block_index; }
uint3 emu_block_dim() { return current->block_dim; }
uint3 emu_grid_dim() { return current->grid_dim; }
void emu_argument(void* to, int index, unsigned long bytes) {
  std::memcpy(to, current_lane().block->launch.given.arguments[index], bytes);
}
void emu_step(const char* name) {
  tell_step(current_lane(), name);
  current->step = name;
}
void emu_count_flops(unsigned n) { current->counters->flops += n; }
void emu_count_exp() { ++current->counters->exp; }

// Tensor cores

static void ldmatrix_of_warp(Warp& warp, unsigned mask) {
  const Sram& sram = warp.block->sram;
  auto half_word = [&](int matrix, int row, int column) {
    std::uint16_t value = 0xffff;
    const auto address = static_cast<unsigned>(warp.lanes[8 * matrix + row]->operands.in[0]);
    if (sram.holds(address, CHUNK)) std::memcpy(&value, sram.pointer(address) + 2 * column, 2);
    return std::uint32_t{value};
  };
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    auto& operands = warp.lanes[i]->operands;
    const int g = i / 4, t = i % 4;
    for (int m = 0; m < 4; ++m)
      operands.out[m] = operands.in[1] ? half_word(m, 2 * t, g) | half_word(m, 2 * t + 1, g) << 16
                                       : half_word(m, g, 2 * t) | half_word(m, g, 2 * t + 1) << 16;
  }
}

void emu_ldmatrix(unsigned* r, unsigned address, int transposed) {
  Lane& lane = current_lane();
  if (check_shared(lane, address, CHUNK, false, false, HERE)) count_shared(lane, Op::ldsm, address, CHUNK, HERE);
  lane.operands.in[0] = address;
  lane.operands.in[1] = transposed;
  meet(ldmatrix_of_warp, "ldmatrix", ALL_LANES, true, HERE);
  for (int m = 0; m < 4; ++m) r[m] = static_cast<unsigned>(lane.operands.out[m]);
}

template <float (*FLOAT)(std::uint16_t)>
static void mma_of_warp(Warp& warp, unsigned) {
  float a[16][16], b[16][8], c[16][8];
  auto low = [](std::uint32_t pair) { return FLOAT(static_cast<std::uint16_t>(pair)); };
  auto high = [](std::uint32_t pair) { return FLOAT(static_cast<std::uint16_t>(pair >> 16)); };
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const auto& x = warp.lanes[lane]->operands.mma;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8, k = 2 * t + i / 2 * 8;
      a[row][k] = low(x.a[i]), a[row][k + 1] = high(x.a[i]);
      c[g + i / 2 * 8][2 * t + i % 2] = x.c[i];
    }
    for (int i = 0; i < 2; ++i) b[2 * t + 8 * i][g] = low(x.b[i]), b[2 * t + 8 * i + 1][g] = high(x.b[i]);
  }
  const int together = warp.lanes[0]->operands.mma.together;
  for (int row = 0; row < 16; ++row)
    for (int first = 0; first < 16; first += together) {  // a sum of its own, as in the tensor cores: it is rounded to c once
      float sum[8] = {};
      for (int k = first; k < first + together; ++k)
        for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
      for (int column = 0; column < 8; ++column) c[row][column] += sum[column];
    }
  for (int lane = 0; lane < WARP; ++lane)
    for (int i = 0; i < 4; ++i) warp.lanes[lane]->operands.mma.c[i] = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  warp.block->counters.flops += 2 * 16 * 8 * 16;
}

template <float (*FLOAT)(std::uint16_t)>
static void mma(float* c, const unsigned* a, unsigned b0, unsigned b1, int together, Place place) {
  Lane& lane = current_lane();
  auto& x = lane.operands.mma;
  std::memcpy(x.a, a, sizeof x.a);
  std::memcpy(x.c, c, sizeof x.c);
  x.b[0] = b0, x.b[1] = b1, x.together = together;
  meet(mma_of_warp<FLOAT>, "mma", ALL_LANES, true, place);
  std::memcpy(c, x.c, sizeof x.c);
}

void emu_mma_f16(float* c, const unsigned* a, unsigned b0, unsigned b1, int together) {
  mma<float_of_f16>(c, a, b0, b1, together, HERE);
}
void emu_mma_bf16(float* c, const unsigned* a, unsigned b0, unsigned b1) { mma<float_of_bf16>(c, a, b0, b1, 16, HERE); }

// Collectives

static void shuffle_of_warp(Warp& warp, unsigned mask) {
  warp.block->counters.shuffles += warp.lanes[__builtin_ctz(mask)]->operands.in[4];
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    Lane& lane = *warp.lanes[i];
    auto& operands = lane.operands;
    const int delta = static_cast<int>(operands.in[1]), width = static_cast<int>(operands.in[2]), first = i & ~(width - 1);
    int source = i;
    switch (static_cast<EmuShuffle>(operands.in[3])) {
      case EMU_INDEX: source = first | (delta & (width - 1)); break;
      case EMU_UP: source = i - delta < first ? i : i - delta; break;
      case EMU_DOWN: source = i + delta >= first + width ? i : i + delta; break;
      case EMU_XOR: source = (i ^ delta) >= first + width ? i : i ^ delta; break;
    }
    if (!(mask >> source & 1)) {
      Finding finding = warp.block->finding("divergent collective", lane.place, lane);
      finding.message = std::string("takes from lane ") + std::to_string(source) + " in " + lane.what + ", which isn't in the mask or has ended";
      warp.block->findings.add(std::move(finding));
      source = i;
    }
    operands.out[0] = warp.lanes[source]->operands.in[0];
  }
}

unsigned long long emu_shuffle(unsigned mask, unsigned long long value, int words, int delta, int width, EmuShuffle kind) {
  static const char* const NAMES[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync"};
  auto& operands = current_lane().operands;
  operands.in[0] = value, operands.in[1] = static_cast<unsigned>(delta), operands.in[2] = static_cast<unsigned>(width);
  operands.in[3] = kind, operands.in[4] = static_cast<unsigned>(words);
  meet(shuffle_of_warp, NAMES[kind], mask, false, HERE);
  return operands.out[0];
}

static void vote_of_warp(Warp& warp, unsigned mask) {
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    auto& operands = warp.lanes[i]->operands;
    unsigned ballot = 0;
    for (int j = 0; j < WARP; ++j)
      if (mask >> j & 1 && (operands.in[1] == EMU_MATCH ? warp.lanes[j]->operands.in[0] == operands.in[0]
                                                        : warp.lanes[j]->operands.in[0] != 0))
        ballot |= 1u << j;
    switch (static_cast<EmuVote>(operands.in[1])) {
      case EMU_ANY: operands.out[0] = ballot != 0; break;
      case EMU_ALL: operands.out[0] = ballot == mask; break;
      default: operands.out[0] = ballot;
    }
  }
}

unsigned emu_vote(unsigned mask, unsigned long long value, EmuVote kind) {
  static const char* const NAMES[] = {"__any_sync", "__all_sync", "__ballot_sync", "__match_any_sync"};
  auto& operands = current_lane().operands;
  operands.in[0] = value, operands.in[1] = kind;
  meet(vote_of_warp, NAMES[kind], mask, false, HERE);
  return static_cast<unsigned>(operands.out[0]);
}

static void reduce_of_warp(Warp& warp, unsigned mask) {
  ++warp.block->counters.shuffles;
  unsigned result = 0;
  bool first = true;
  EmuReduce kind = EMU_ADD;
  for (int i = 0; i < WARP; ++i) {
    if (!(mask >> i & 1)) continue;
    const auto value = static_cast<unsigned>(warp.lanes[i]->operands.in[0]);
    kind = static_cast<EmuReduce>(warp.lanes[i]->operands.in[1]);
    if (first) result = value;
    else switch (kind) {
      case EMU_ADD: result += value; break;
      case EMU_MIN: result = static_cast<unsigned>(std::min(static_cast<int>(result), static_cast<int>(value))); break;
      case EMU_MAX: result = static_cast<unsigned>(std::max(static_cast<int>(result), static_cast<int>(value))); break;
      case EMU_UMIN: result = std::min(result, value); break;
      case EMU_UMAX: result = std::max(result, value); break;
      case EMU_AND: result &= value; break;
      case EMU_OR: result |= value; break;
      case EMU_EXCLUSIVE_OR: result ^= value; break;
    }
    first = false;
  }
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1) warp.lanes[i]->operands.out[0] = result;
}

unsigned emu_reduce(unsigned mask, unsigned value, EmuReduce kind) {
  auto& operands = current_lane().operands;
  operands.in[0] = value, operands.in[1] = kind;
  meet(reduce_of_warp, "__reduce_sync", mask, false, HERE);
  return static_cast<unsigned>(operands.out[0]);
}

static unsigned together(Place place) {
  Lane& lane = current_lane();
  lane.wait = Wait::others;
  lane.place = place;
  lane.what = "__activemask";
  lane.block->yield();
  return static_cast<unsigned>(lane.operands.out[0]);
}

unsigned emu_coalesced() { return together(HERE); }

unsigned emu_active_mask() {
  Lane& lane = current_lane();
  lane.active = together(HERE), lane.active_at = HERE;
  return lane.active;
}

void emu_fence(int everywhere) { current_lane().fence(everywhere); }

void emu_syncwarp(unsigned mask) { current_lane().take_over(true), meet(sync_of_warp, "__syncwarp", mask, false, HERE); }

void emu_syncthreads() { wait_barrier(0, 0, HERE); }

int emu_syncthreads_count(int predicate) {
  Lane& lane = current_lane();
  Block& block = *lane.block;
  lane.operands.in[0] = predicate != 0;
  wait_barrier(0, 0, HERE);
  int count = 0;
  for (const auto& other : block.lanes) count += !other->done && other->operands.in[0];
  wait_barrier(0, 0, HERE);  // before any thread's predicate changes
  return count;
}

static void check_named(int id, Place place) {
  Lane& lane = current_lane();
  if (id >= 0 && id < NAMED_BARRIERS) return;
  Finding finding = lane.block->finding("barrier", place, lane);
  finding.message = "comes to barrier " + std::to_string(id) + " of a block's 0 to " + std::to_string(NAMED_BARRIERS - 1);
  lane.block->findings.add(std::move(finding));
  lane.block->abort();
}

void emu_named_barrier(int id, int threads) { check_named(id, HERE), wait_barrier(id, threads, HERE); }
void emu_named_arrive(int id, int threads) { check_named(id, HERE), arrive_barrier(id, threads, HERE); }
