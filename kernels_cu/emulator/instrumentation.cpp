// Plain loads and stores, as the compiler's own instrumentation reports them. -fsanitize=thread makes each of them a call, and a
// runtime may define the function that is called. So this file sees all accesses that don't go through the primitives.
//
// It sees what the host compiler makes of them. That compiler may hoist, merge or split accesses where nvcc would not.
#include <cstring>

#include "hopper.h"
#include "host.h"
#include "launch.h"
#include "machine.h"

#define HERE __builtin_return_address(0)

namespace emulator {
namespace {

// The compiler's code makes the access when this returns. So an access that must not happen ends the block.
void access(const void* address, unsigned bytes, bool write, Place place, bool is_volatile = false) {
  if (!current) return check_host(address, bytes, write, place);
  Lane& lane = current_lane();
  Block& block = *lane.block;
  auto* at = static_cast<const char*>(address);
  if (at >= lane.stack && at < lane.stack_end) {  // its own local variables
    block.hopper->check_registers(lane, at, bytes, write, place);
    return;
  }
  block.poll(lane, place);
  is_volatile && !write ? block.spin(lane, address, place) : void(lane.spins = 0);
  unsigned shared;
  const bool in_sram = block.sram.shared_address(address, shared);
  if (!is_volatile && !write) lane.reads[lane.read_count++ % lane.reads.size()] = {address, place};
  if (is_volatile) write ? lane.hand_on(address, in_sram) : lane.heard.add(address);
  const Way way = is_volatile ? Way::is_volatile : Way::plain;
  if (in_sram) {
    if (!check_shared(lane, shared, bytes, write, way, place)) block.abort();
    const auto* name = block.sram.name_of(shared);
    lane.warp->log.add(lane, write ? Op::st : Op::ld, Space::sram, shared, bytes, name ? name->name : "SRAM", place);
    ++block.ledger.plain;
    return;
  }
  if (inside_image(address)) return;  // __constant__ and __device__ variables
  Region* region;
  if (!check_global(lane, address, bytes, write, way, place, region)) block.abort();
  lane.warp->log.add(lane, write ? Op::st : Op::ld, Space::hbm, reinterpret_cast<std::uint64_t>(address), bytes,
                     region->name.c_str(), place);
  ++block.ledger.plain;
}

// A range. It is reported in pieces as large as its alignment allows.
void range(const void* address, unsigned long bytes, bool write, Place place) {
  if (!current) return check_host(address, bytes, write, place);
  for (auto at = reinterpret_cast<std::uintptr_t>(address), end = at + bytes; at < end;) {
    unsigned piece = CHUNK;
    while (at % piece || end - at < piece) piece /= 2;
    access(reinterpret_cast<const void*>(at), piece, write, place);
    at += piece;
  }
}

// The stores before this one have happened. Before a load they may not have: the compiler announces both sides of `a[i] = b[j]`
// before it copies, and the store first.
void settle() {
  if (current) current_lane().block->settle();
}

// What -fsanitize=bounds, integer-divide-by-zero and signed-integer-overflow hand over: constants beside the code.
struct Type {
  std::uint16_t kind, info;  // of an integer: info is 2 log2(bits) + signed
  char name[1];
};
struct Source { const char* file; std::uint32_t line, column; };
struct OutOfBounds { Source source; const Type *array, *index; };
struct Overflow { Source source; const Type* type; };

// In host code the program goes on, as a program does.
void refuse(const char* kind, std::string message, Place place) {
  if (!current) return program().findings.add(program().finding(kind, message, place));
  Lane& lane = current_lane();
  Finding finding = lane.block->finding(kind, place, lane);
  finding.message = std::move(message);
  lane.block->findings.add(std::move(finding));
  lane.block->abort();
}

// The value of an integer that the compiler hands over in a word.
std::int64_t value_of(const Type& type, std::uintptr_t word) {
  const unsigned bits = 1u << (type.info >> 1);
  return bits < 64 ? static_cast<std::int64_t>(word << (64 - bits)) >> (64 - bits) : static_cast<std::int64_t>(word);
}

// The kernel goes on with the number that wrapped, as on a GPU. Whether it is an index, build.py knows: by the line.
void overflow(const Overflow* what, const char* sign, std::uintptr_t left, std::uintptr_t right, Place place) {
  if (!current || !current_lane().block->launch.sanitize() || what->type->info >> 1 > 6) return;
  Lane& lane = current_lane();
  Finding finding = lane.block->finding("overflow", place, lane);
  const std::string a = std::to_string(value_of(*what->type, left)), b = std::to_string(value_of(*what->type, right));
  finding.message = "computes " + (*sign ? a + " " + sign + " " + b : "-(" + a + ")") + ", which no " + what->type->name + " holds";
  lane.block->findings.add(std::move(finding));
}

}  // namespace
}  // namespace emulator

extern "C" {

#define EMU_ACCESS(BYTES)                                                                                     \
  void __tsan_read##BYTES(void* address) { emulator::access(address, BYTES, false, HERE); }                   \
  void __tsan_write##BYTES(void* address) { emulator::settle(), emulator::access(address, BYTES, true, HERE); } \
  void __tsan_unaligned_read##BYTES(void* address) { emulator::access(address, BYTES, false, HERE); }         \
  void __tsan_unaligned_write##BYTES(void* address) { emulator::settle(), emulator::access(address, BYTES, true, HERE); } \
  void __tsan_volatile_read##BYTES(void* address) { emulator::access(address, BYTES, false, HERE, true); }          \
  void __tsan_volatile_write##BYTES(void* address) { emulator::access(address, BYTES, true, HERE, true); }          \
  void __tsan_unaligned_volatile_read##BYTES(void* address) { emulator::access(address, BYTES, false, HERE, true); } \
  void __tsan_unaligned_volatile_write##BYTES(void* address) { emulator::access(address, BYTES, true, HERE, true); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)

void __tsan_read_range(void* address, unsigned long bytes) { emulator::range(address, bytes, false, HERE); }
void __tsan_write_range(void* address, unsigned long bytes) { emulator::settle(), emulator::range(address, bytes, true, HERE); }
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  emulator::settle(), emulator::range(from, bytes, false, HERE), emulator::range(to, bytes, true, HERE);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  emulator::settle(), emulator::range(to, bytes, true, HERE);
  return std::memset(to, value, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  emulator::settle(), emulator::range(from, bytes, false, HERE), emulator::range(to, bytes, true, HERE);
  return std::memmove(to, from, bytes);
}

// A basic block begins. It may belong to a loop that waits, or that never ends.
void __sanitizer_cov_trace_pc() {
  if (emulator::current) emulator::current_lane().block->poll(emulator::current_lane(), HERE);
}

void __ubsan_handle_out_of_bounds(const emulator::OutOfBounds* what, std::uintptr_t index) {
  auto value = static_cast<std::int64_t>(index);
  if (what->index->info == (5 << 1 | 1)) value = static_cast<std::int32_t>(index);
  emulator::refuse("out of bounds", "takes element " + std::to_string(value) + " of an array that is " + what->array->name, HERE);
}
void __ubsan_handle_divrem_overflow(const void*, std::uintptr_t, std::uintptr_t by) {
  emulator::refuse("division by zero", by ? "divides the least integer by -1" : "divides an integer by zero", HERE);
}
#define EMU_OVERFLOW(NAME, SIGN)                                                                                   \
  void __ubsan_handle_##NAME##_overflow(const emulator::Overflow* what, std::uintptr_t a, std::uintptr_t b) { \
    emulator::overflow(what, SIGN, a, b, HERE);                                                                    \
  }
EMU_OVERFLOW(add, "+")
EMU_OVERFLOW(sub, "-")
EMU_OVERFLOW(mul, "*")
void __ubsan_handle_negate_overflow(const emulator::Overflow* what, std::uintptr_t a) { emulator::overflow(what, "", a, 0, HERE); }

void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// What `emulator::atomic` does with atomics has been checked and counted by emu_atomic.
#define EMU_ATOMIC(BITS, T)                                                                                              \
  T __tsan_atomic##BITS##_load(const volatile T* a, int) { return __atomic_load_n(a, __ATOMIC_RELAXED); }                \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* a, T* expected, T value, int, int) {                     \
    return __atomic_compare_exchange_n(a, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                   \
  }                                                                                                                      \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* a, T* expected, T value, int, int) {                       \
    return __atomic_compare_exchange_n(a, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                   \
  }                                                                                                                      \
  T __tsan_atomic##BITS##_compare_exchange_val(volatile T* a, T expected, T value, int, int) {                           \
    __atomic_compare_exchange_n(a, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                         \
    return expected;                                                                                                     \
  }
EMU_ATOMIC(8, unsigned char)
EMU_ATOMIC(16, unsigned short)
EMU_ATOMIC(32, unsigned)
EMU_ATOMIC(64, unsigned long)

// Those of host code: std::atomic, and OpenMP's.
#define EMU_FETCH(BITS, T, NAME, DOES) \
  T __tsan_atomic##BITS##_##NAME(volatile T* a, T value, int) { return DOES(a, value, __ATOMIC_SEQ_CST); }
#define EMU_ATOMICS(BITS, T)                                                                              \
  void __tsan_atomic##BITS##_store(volatile T* a, T value, int) { __atomic_store_n(a, value, __ATOMIC_SEQ_CST); } \
  EMU_FETCH(BITS, T, exchange, __atomic_exchange_n)                                                       \
  EMU_FETCH(BITS, T, fetch_add, __atomic_fetch_add)                                                       \
  EMU_FETCH(BITS, T, fetch_sub, __atomic_fetch_sub)                                                       \
  EMU_FETCH(BITS, T, fetch_and, __atomic_fetch_and)                                                       \
  EMU_FETCH(BITS, T, fetch_or, __atomic_fetch_or)                                                         \
  EMU_FETCH(BITS, T, fetch_xor, __atomic_fetch_xor)
EMU_ATOMICS(8, unsigned char)
EMU_ATOMICS(16, unsigned short)
EMU_ATOMICS(32, unsigned)
EMU_ATOMICS(64, unsigned long)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) {}
}
