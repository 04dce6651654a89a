// Reductions of a group's values. All threads of the group get the result.
#pragma once
#include "emu_hide_names.h"

#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class T, class Operation>
__forceinline__ std::decay_t<T> reduce(const Group& group, T&& value, Operation&& operation) {
  using Value = std::decay_t<T>;
  Value sum = value;
  const unsigned n = static_cast<unsigned>(group.size());
  if ((n & (n - 1)) == 0) {  // as butterflies, in which every lane adds in the same order
    for (unsigned by = n / 2; by > 0; by /= 2) sum = operation(sum, group.shfl_xor(sum, by));
    return sum;
  }
  Value total = group.shfl(sum, 0);
  for (unsigned i = 1; i < n; ++i) total = operation(total, group.shfl(sum, static_cast<int>(i)));
  return total;
}
template <class Group, class T, class Operation>
__forceinline__ void reduce_update_async(const Group& group, T* to, const T& value, Operation&& operation) {
  const T sum = reduce(group, value, operation);
  if (group.thread_rank() == 0) *to = operation(*to, sum);
}

}  // namespace cooperative_groups

#include "emu_show_names.h"
