// Prefix sums of a group's values, in the order of ranks.
#pragma once
#include "emu_hide_names.h"

#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class T, class Operation>
__forceinline__ std::decay_t<T> inclusive_scan(const Group& group, T&& value, Operation&& operation) {
  using Value = std::decay_t<T>;
  Value sum = value;
  for (unsigned by = 1; by < group.size(); by *= 2) {
    const Value before = group.shfl_up(sum, by);
    if (group.thread_rank() >= by) sum = operation(before, sum);
  }
  return sum;
}
template <class Group, class T>
__forceinline__ std::decay_t<T> inclusive_scan(const Group& group, T&& value) { return inclusive_scan(group, value, plus<std::decay_t<T>>()); }
template <class Group, class T, class Operation>
__forceinline__ std::decay_t<T> exclusive_scan(const Group& group, T&& value, Operation&& operation) {
  const std::decay_t<T> before = group.shfl_up(inclusive_scan(group, value, operation), 1);
  return group.thread_rank() ? before : std::decay_t<T>{};
}
template <class Group, class T>
__forceinline__ std::decay_t<T> exclusive_scan(const Group& group, T&& value) { return exclusive_scan(group, value, plus<std::decay_t<T>>()); }

}  // namespace cooperative_groups

#include "emu_show_names.h"
