// Copies from HBM to SRAM that a group shares out, and waits for.
#pragma once
#include "emu_hide_names.h"

#include "../cooperative_groups.h"
#include "../emu_copies.h"

namespace cooperative_groups {

template <class Group, class Count>
__forceinline__ void memcpy_async(const Group& group, void* to, const void* from, const Count& bytes) {
  emulator::share_copy(static_cast<unsigned>(group.thread_rank()), static_cast<unsigned>(group.size()), to, from, static_cast<std::size_t>(bytes));
  emu_copy_commit();
}
template <class Group, class T, class ToCount, class FromCount>
__forceinline__ void memcpy_async(const Group& group, T* to, const ToCount& to_count, const T* from, const FromCount& from_count) {
  const std::size_t a = static_cast<std::size_t>(to_count), b = static_cast<std::size_t>(from_count);
  memcpy_async(group, static_cast<void*>(to), static_cast<const void*>(from), (a < b ? a : b) * sizeof(T));
}
template <unsigned PENDING, class Group>
__forceinline__ void wait_prior(const Group& group) {
  emu_copy_wait(PENDING);
  group.sync();
}
template <class Group>
__forceinline__ void wait(const Group& group) { wait_prior<0>(group); }

}  // namespace cooperative_groups

#include "emu_show_names.h"
