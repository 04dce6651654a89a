// PTX of memory, and of threads that work together. It calls the primitives where they have it. The rest is in ptx_memory.cpp.
#pragma once
#include "emu_hide_names.h"

#include "ptx_types.h"

extern "C" {

// Loads and stores by a generic address: HBM, SRAM, or the thread's own memory.
void emu_ptx_load_generic(void* value, unsigned long long address, unsigned bytes);
void emu_ptx_store_generic(unsigned long long address, const void* value, unsigned bytes);
// Ordered loads and stores (relaxed, acquire, release). They don't race with each other, nor with atomics.
void emu_ptx_load_ordered(void* value, unsigned long long address, unsigned bytes);
void emu_ptx_store_ordered(unsigned long long address, const void* value, unsigned bytes);
int emu_ptx_is_global(unsigned long long address);
int emu_ptx_is_shared(unsigned long long address);
int emu_ptx_is_local(unsigned long long address);
int emu_ptx_is_const(unsigned long long address);
int emu_ptx_is_param(unsigned long long address);
// Tells an mbarrier when this thread's copies so far have arrived. With `counted`, that is one of the arrivals that it waits for.
void emu_ptx_copies_arrive(unsigned mbarrier, int counted);
// Adds a finding: the thread is in something that the emulator doesn't know.
[[noreturn]] void emu_ptx_refuse(const char* what);
}

namespace emu_ptx {

enum class Space { generic, global, shared, fixed };
enum class Order { weak, volatile_, relaxed, acquire, release, acq_rel };

__forceinline__ u32 shared(u64 address) { return static_cast<u32>(address); }
__forceinline__ u32 shared_of(u64 address) {
  return address >> 32 ? emu_shared_address(reinterpret_cast<const void*>(address)) : static_cast<u32>(address);
}
template <class T>
__forceinline__ T from_shared(T address) { return static_cast<T>(reinterpret_cast<u64>(emu_shared_pointer(static_cast<u32>(address)))); }
template <class T>
__forceinline__ T to_shared(T address) { return static_cast<T>(emu_shared_address(reinterpret_cast<const void*>(static_cast<u64>(address)))); }

template <Space space>
__forceinline__ u64 generic(u64 address) {
  return space == Space::shared ? reinterpret_cast<u64>(emu_shared_pointer(static_cast<u32>(address))) : address;
}

template <Space space, Order order, class T, int N>
__forceinline__ void load(T (&value)[N], u64 address) {
  constexpr unsigned bytes = sizeof value, piece = bytes > 16 ? 16 : bytes;
#pragma GCC unroll 8
  for (unsigned at = 0; at < bytes; at += piece) {
    void* to = reinterpret_cast<char*>(value) + at;
    if constexpr (space == Space::fixed) __builtin_memcpy(to, reinterpret_cast<const void*>(address + at), piece);
    else if constexpr (order != Order::weak) emu_ptx_load_ordered(to, generic<space>(address) + at, piece);
    else if constexpr (space == Space::global) {
      if (emu_ptx_is_const(address + at)) emu_ptx_load_generic(to, address + at, piece);  // a __device__ variable
      else emu_load_global(to, reinterpret_cast<const void*>(address + at), piece);
    }
    else if constexpr (space == Space::shared) emu_load_shared(to, static_cast<u32>(address) + at, piece);
    else emu_ptx_load_generic(to, address + at, piece);
  }
  if constexpr (order == Order::acquire) __threadfence();
}
template <Space space, Order order, class T, int N>
__forceinline__ void store(u64 address, const T (&value)[N]) {
  constexpr unsigned bytes = sizeof value, piece = bytes > 16 ? 16 : bytes;
  if constexpr (order == Order::release) __threadfence();
#pragma GCC unroll 8
  for (unsigned at = 0; at < bytes; at += piece) {
    const void* from = reinterpret_cast<const char*>(value) + at;
    if constexpr (space == Space::fixed) __builtin_memcpy(reinterpret_cast<void*>(address + at), from, piece);
    else if constexpr (order != Order::weak) emu_ptx_store_ordered(generic<space>(address) + at, from, piece);
    else if constexpr (space == Space::global) {
      if (emu_ptx_is_const(address + at)) emu_ptx_store_generic(address + at, from, piece);
      else emu_store_global(reinterpret_cast<void*>(address + at), from, piece);
    }
    else if constexpr (space == Space::shared) emu_store_shared(static_cast<u32>(address) + at, from, piece);
    else emu_ptx_store_generic(address + at, from, piece);
  }
}

enum class Atomic { add_, min_, max_, inc_, dec_, and_, or_, xor_, exch_, cas_ };
template <class T>
__forceinline__ bool same_bits(const T& x, const T& y) { return __builtin_memcmp(&x, &y, sizeof x) == 0; }
template <class T, Atomic operation, class A>
__forceinline__ T updated(T old, const A& x, const A& other) {
  if constexpr (operation == Atomic::add_) return old + x;
  else if constexpr (operation == Atomic::exch_) return x;
  else if constexpr (operation == Atomic::cas_) return same_bits(old, x) ? other : old;
  else if constexpr (is_pair<T>) {
    if constexpr (operation == Atomic::min_) return __hmin2(old, x);
    else return __hmax2(old, x);
  }
  else if constexpr (operation == Atomic::min_) return x < old ? x : old;
  else if constexpr (operation == Atomic::max_) return old < x ? x : old;
  else if constexpr (operation == Atomic::inc_) return old >= x ? T(0) : T(old + 1);
  else if constexpr (operation == Atomic::dec_) return old == 0 || old > x ? x : T(old - 1);
  else if constexpr (operation == Atomic::and_) return old & x;
  else if constexpr (operation == Atomic::or_) return old | x;
  else return old ^ x;
}
template <class T, Atomic operation, Space space, Order order, class A, class B = A>
__forceinline__ T atomic(u64 address, const A& first, const B& second = {}) {
  const T x = as<T>(first), other = as<T>(second);
  if constexpr (order == Order::release || order == Order::acq_rel) __threadfence();
  const T old = emulator::atomic(reinterpret_cast<T*>(generic<space>(address)), [=](T now) { return updated<T, operation>(now, x, other); });
  if constexpr (order == Order::acquire || order == Order::acq_rel) __threadfence();
  return old;
}

// How many bytes of a copy are kept: the given number, or none if the copy is ignored.
template <class T, class N>
__forceinline__ u32 kept(T x, N size) {
  if constexpr (std::is_same_v<T, bool>) return x ? 0u : static_cast<u32>(size);
  else return static_cast<u32>(x);
}

// Collectives

enum class Shuffle { up, down, bfly, idx };
struct Shuffled { u32 value; bool inside; };
template <Shuffle kind, class V, class B, class C, class M>
__forceinline__ Shuffled shuffle(const V& value, const B& by, const C& bounds, const M& mask) {
  const int lane = static_cast<int>(emu_ptx::lane()), b = static_cast<int>(as<u32>(by) & 31);
  const int segment = static_cast<int>(as<u32>(bounds) >> 8 & 31), clamp = static_cast<int>(as<u32>(bounds) & 31);
  const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
  int source = 0;
  bool inside = false;
  switch (kind) {
    case Shuffle::up: source = lane - b, inside = source >= last; break;
    case Shuffle::down: source = lane + b, inside = source <= last; break;
    case Shuffle::bfly: source = lane ^ b, inside = source <= last; break;
    case Shuffle::idx: source = first | (b & ~segment), inside = source <= last; break;
  }
  const auto got = emu_shuffle(as<u32>(mask), as<u32>(value), 1, inside ? source : lane, 32, EMU_INDEX);
  return {static_cast<u32>(got), inside};
}
template <class M>
__forceinline__ u32 elected(const M& mask) { return static_cast<u32>(__builtin_ctz(emu_vote(as<u32>(mask), 1, EMU_BALLOT))); }
__forceinline__ bool uniform(bool p, u32 mask) {
  const u32 ballot = emu_vote(mask, p, EMU_BALLOT);
  return ballot == 0 || ballot == mask;
}
// Floats in the order of integers. A NaN loses, or with NANS wins.
template <bool MAX, bool ABSOLUTE, bool NANS, class A>
__forceinline__ f32 reduce_floats(u32 mask, const A& given) {
  f32 x = as<f32>(given);
  if (ABSOLUTE) x = std::fabs(x);
  const s32 bits = as<s32>(x);
  s32 key = bits ^ ((bits >> 31) & 0x7fffffff);
  if (x != x) key = MAX == NANS ? std::numeric_limits<s32>::max() : std::numeric_limits<s32>::min();
  const s32 found = static_cast<s32>(emu_reduce(mask, static_cast<u32>(key), MAX ? EMU_MAX : EMU_MIN));
  if (found == std::numeric_limits<s32>::max() || found == std::numeric_limits<s32>::min()) return as<f32>(0x7fffffffu);
  return as<f32>(found ^ ((found >> 31) & 0x7fffffff));
}

// A shared address in another block of the cluster, which has one block: its own.
template <class A, class R>
__forceinline__ A mapped(A address, const R& rank) {
  if (as<u32>(rank) != 0) emu_ptx_refuse("mapa of another block; the emulator's clusters have one");
  return address;
}

}  // namespace emu_ptx

#include "emu_show_names.h"
