// What the headers of cuda:: have in common: scopes, orders, sizes, and cuda::std.
#pragma once
#include "emu_hide_names.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda.h"

namespace cuda {

namespace std = ::std;

enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
using ::std::memory_order;
using ::std::memory_order_acq_rel;
using ::std::memory_order_acquire;
using ::std::memory_order_consume;
using ::std::memory_order_relaxed;
using ::std::memory_order_release;
using ::std::memory_order_seq_cst;

template <::std::size_t ALIGNMENT>
struct aligned_size_t {
  static constexpr ::std::size_t align = ALIGNMENT;
  ::std::size_t value;
  explicit constexpr aligned_size_t(::std::size_t n) : value(n) {}
  constexpr operator ::std::size_t() const { return value; }
};

template <thread_scope>
__forceinline__ void emu_fence_before(memory_order order) {
  if (order == memory_order_release || order == memory_order_acq_rel || order == memory_order_seq_cst) __threadfence();
}
template <thread_scope>
__forceinline__ void emu_fence_after(memory_order order) {
  if (order == memory_order_acquire || order == memory_order_acq_rel || order == memory_order_seq_cst || order == memory_order_consume) __threadfence();
}
__forceinline__ void atomic_thread_fence(memory_order, thread_scope = thread_scope_system) { __threadfence(); }

template <class T = void> struct maximum { __forceinline__ T operator()(const T& a, const T& b) const { return a < b ? b : a; } };
template <> struct maximum<void> { template <class T> __forceinline__ T operator()(const T& a, const T& b) const { return a < b ? b : a; } };
template <class T = void> struct minimum { __forceinline__ T operator()(const T& a, const T& b) const { return b < a ? b : a; } };
template <> struct minimum<void> { template <class T> __forceinline__ T operator()(const T& a, const T& b) const { return b < a ? b : a; } };

}  // namespace cuda

#include "emu_show_names.h"
