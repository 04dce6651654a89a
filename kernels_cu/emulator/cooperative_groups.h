// Cooperative groups: blocks, tiles of a warp, coalesced lanes, grids, and clusters of one block. They use the emulator's own
// collectives. A group of lanes is a mask.
#pragma once
#include "emu_hide_names.h"

#include "cuda.h"

extern "C" [[noreturn]] void emu_ptx_refuse(const char* what);  // of ptx_bulk.cpp

namespace cooperative_groups {

namespace emu {

inline unsigned rank_in_block() {
  const uint3 at = emu_thread_index(), size = emu_block_dim();
  return at.x + size.x * (at.y + size.y * at.z);
}
inline unsigned block_size() {
  const uint3 size = emu_block_dim();
  return size.x * size.y * size.z;
}
// The lanes of this warp that are threads of the block.
inline unsigned warp_mask() {
  const unsigned left = block_size() - rank_in_block() / 32 * 32;
  return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}

// Values of any size, word by word.
template <class T>
__forceinline__ T shuffle(unsigned mask, const T& x, int lane) {
  if constexpr (sizeof(T) <= 8) return __shfl_sync(mask, x, lane);
  else {
    unsigned words[(sizeof(T) + 3) / 4] = {};
    __builtin_memcpy(words, static_cast<const void*>(&x), sizeof(T));
    for (unsigned& word : words) word = __shfl_sync(mask, word, lane);
    T y;
    __builtin_memcpy(static_cast<void*>(&y), words, sizeof(T));
    return y;
  }
}

// Lanes of a warp: those of a mask, in order.
struct Lanes {
  unsigned mask = 0;

  __forceinline__ unsigned rank() const { return static_cast<unsigned>(__builtin_popcount(mask & ((1u << rank_in_block() % 32) - 1))); }
  __forceinline__ unsigned count() const { return static_cast<unsigned>(__builtin_popcount(mask)); }
  __forceinline__ int lane_of(unsigned rank) const {
    unsigned left = mask;
    for (unsigned i = 0; i < rank; ++i) left &= left - 1;
    return left ? __builtin_ctz(left) : static_cast<int>(rank_in_block() % 32);
  }
  // A mask of lanes as one of ranks.
  __forceinline__ unsigned ranks_of(unsigned lanes) const {
    unsigned result = 0, rank = 0;
    for (unsigned left = mask; left; left &= left - 1, ++rank) result |= (lanes >> __builtin_ctz(left) & 1u) << rank;
    return result;
  }
};

}  // namespace emu

// What all groups of lanes can do.
class emu_group {
 public:
  emu_group() = default;
  explicit emu_group(unsigned mask) : lanes_{mask} {}

  __forceinline__ void sync() const { emu_syncwarp(lanes_.mask); }
  __forceinline__ unsigned thread_rank() const { return lanes_.rank(); }
  __forceinline__ unsigned size() const { return lanes_.count(); }
  __forceinline__ unsigned num_threads() const { return lanes_.count(); }
  __forceinline__ unsigned emu_mask() const { return lanes_.mask; }

  template <class T>
  __forceinline__ T shfl(T x, int rank) const { return emu::shuffle(lanes_.mask, x, lanes_.lane_of(static_cast<unsigned>(rank) % size())); }
  template <class T>
  __forceinline__ T shfl_down(T x, unsigned by) const { return from(x, thread_rank() + by); }
  template <class T>
  __forceinline__ T shfl_up(T x, unsigned by) const { return from(x, thread_rank() - by); }
  template <class T>
  __forceinline__ T shfl_xor(T x, unsigned by) const { return from(x, thread_rank() ^ by); }
  __forceinline__ int any(int p) const { return static_cast<int>(emu_vote(lanes_.mask, p != 0, EMU_ANY)); }
  __forceinline__ int all(int p) const { return static_cast<int>(emu_vote(lanes_.mask, p != 0, EMU_ALL)); }
  __forceinline__ unsigned ballot(int p) const { return lanes_.ranks_of(emu_vote(lanes_.mask, p != 0, EMU_BALLOT)); }
  template <class T>
  __forceinline__ unsigned match_any(T x) const { return lanes_.ranks_of(__match_any_sync(lanes_.mask, x)); }
  template <class T>
  __forceinline__ unsigned match_all(T x, int& same) const {
    same = __match_any_sync(lanes_.mask, x) == lanes_.mask;
    return same ? lanes_.ranks_of(lanes_.mask) : 0;
  }

 protected:
  template <class T>
  __forceinline__ T from(const T& x, unsigned rank) const { return emu::shuffle(lanes_.mask, x, lanes_.lane_of(rank < size() ? rank : thread_rank())); }
  emu::Lanes lanes_;
};

// A group that may be of either kind when it is compiled: lanes, or with mask 0 the block.
class thread_group : public emu_group {
 public:
  thread_group() = default;
  explicit thread_group(unsigned mask) : emu_group(mask) {}
  __forceinline__ void sync() const { emu_mask() ? emu_syncwarp(emu_mask()) : emu_syncthreads(); }
  __forceinline__ unsigned thread_rank() const { return emu_mask() ? emu_group::thread_rank() : emu::rank_in_block(); }
  __forceinline__ unsigned size() const { return emu_mask() ? emu_group::size() : emu::block_size(); }
  __forceinline__ unsigned num_threads() const { return size(); }
};

class thread_block {
 public:
  struct arrival_token {};
  __forceinline__ static void sync() { emu_syncthreads(); }
  __forceinline__ static unsigned thread_rank() { return emu::rank_in_block(); }
  __forceinline__ static unsigned size() { return emu::block_size(); }
  __forceinline__ static unsigned num_threads() { return emu::block_size(); }
  __forceinline__ static dim3 group_index() { return emu_block_index(); }
  __forceinline__ static dim3 thread_index() { return emu_thread_index(); }
  __forceinline__ static dim3 group_dim() { return emu_block_dim(); }
  __forceinline__ static dim3 dim_threads() { return emu_block_dim(); }
  __forceinline__ arrival_token barrier_arrive() const { return {}; }  // all threads arrive at the wait
  __forceinline__ void barrier_wait(arrival_token&&) const { emu_syncthreads(); }
  operator thread_group() const { return thread_group(); }
};
inline thread_block this_thread_block() { return {}; }
template <unsigned>
struct block_tile_memory {};
template <unsigned N>
inline thread_block this_thread_block(block_tile_memory<N>&) { return {}; }

template <unsigned N, class Parent = void>
class thread_block_tile : public emu_group {
  static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "the emulator has tiles of 1, 2, 4, 8, 16 and 32 threads");

 public:
  thread_block_tile() : thread_block_tile(emu::block_size()) {}
  explicit thread_block_tile(unsigned parent)
      : emu_group((N == 32 ? 0xffffffffu : ((1u << N % 32) - 1) << emu::rank_in_block() % 32 / N * N) & emu::warp_mask()), parent_(parent) {}
  static constexpr unsigned num_threads() { return N; }
  static constexpr unsigned size() { return N; }
  __forceinline__ unsigned thread_rank() const { return emu::rank_in_block() % N; }
  __forceinline__ unsigned meta_group_rank() const { return emu::rank_in_block() % parent_ / N; }
  __forceinline__ unsigned meta_group_size() const { return (parent_ + N - 1) / N; }
  operator thread_block_tile<N, void>() const { return thread_block_tile<N, void>(parent_); }
  operator thread_group() const { return thread_group(emu_mask()); }

 private:
  unsigned parent_ = N;
};

class coalesced_group : public emu_group {
 public:
  explicit coalesced_group(unsigned mask, unsigned rank = 0, unsigned count = 1) : emu_group(mask), meta_rank_(rank), meta_size_(count) {}
  __forceinline__ unsigned meta_group_rank() const { return meta_rank_; }
  __forceinline__ unsigned meta_group_size() const { return meta_size_; }
  operator thread_group() const { return thread_group(emu_mask()); }

 private:
  unsigned meta_rank_, meta_size_;
};
__forceinline__ coalesced_group coalesced_threads() { return coalesced_group(emu_coalesced()); }

template <unsigned N, class Parent>
__forceinline__ thread_block_tile<N, Parent> tiled_partition(const Parent& parent) { return thread_block_tile<N, Parent>(static_cast<unsigned>(parent.size())); }
template <class Parent>
__forceinline__ thread_group tiled_partition(const Parent& parent, unsigned n) {
  if constexpr (std::is_same_v<Parent, coalesced_group>) {
    const unsigned first = parent.thread_rank() / n * n;
    unsigned mask = 0, rank = 0;
    for (unsigned left = parent.emu_mask(); left; left &= left - 1, ++rank)
      if (rank >= first && rank < first + n) mask |= left & (0 - left);
    return thread_group(mask);
  } else {
    const unsigned lane = emu::rank_in_block() % 32;
    return thread_group((n >= 32 ? 0xffffffffu : ((1u << n) - 1) << lane / n * n) & emu::warp_mask());
  }
}
// The lanes of a group that have the same label.
template <class Group, class Label>
__forceinline__ coalesced_group labeled_partition(const Group& group, Label label) {
  const unsigned mask = __match_any_sync(group.emu_mask(), label);
  unsigned rank = 0, count = 0;
  const unsigned first = mask & (0 - mask);
  for (unsigned left = group.emu_mask(); left;) {  // each label by its first lane
    const int lane = __builtin_ctz(left);
    const unsigned others = __shfl_sync(group.emu_mask(), mask, lane);
    rank += (others & (0 - others)) < first;
    ++count, left &= ~others;
  }
  return coalesced_group(mask, rank, count);
}
template <class Group>
__forceinline__ coalesced_group binary_partition(const Group& group, bool p) { return labeled_partition(group, static_cast<int>(p)); }

class grid_group {
 public:
  struct arrival_token {};
  __forceinline__ void sync() const { emu_grid_sync(); }
  __forceinline__ arrival_token barrier_arrive() const { return {}; }  // all threads arrive at the wait
  __forceinline__ void barrier_wait(arrival_token&&) const { emu_grid_sync(); }
  __forceinline__ bool is_valid() const { return true; }
  __forceinline__ unsigned long long size() const { return num_blocks() * emu::block_size(); }
  __forceinline__ unsigned long long num_threads() const { return size(); }
  __forceinline__ unsigned long long num_blocks() const {
    const uint3 grid = emu_grid_dim();
    return static_cast<unsigned long long>(grid.x) * grid.y * grid.z;
  }
  __forceinline__ unsigned long long block_rank() const {
    const uint3 at = emu_block_index(), grid = emu_grid_dim();
    return at.x + static_cast<unsigned long long>(grid.x) * (at.y + static_cast<unsigned long long>(grid.y) * at.z);
  }
  __forceinline__ unsigned long long thread_rank() const { return block_rank() * emu::block_size() + emu::rank_in_block(); }
  __forceinline__ dim3 group_dim() const { return emu_grid_dim(); }
  __forceinline__ dim3 dim_blocks() const { return emu_grid_dim(); }
  __forceinline__ dim3 block_index() const { return emu_block_index(); }
};
inline grid_group this_grid() { return {}; }

// Clusters have one block here.
class cluster_group {
 public:
  struct arrival_token {};
  __forceinline__ static void sync() { emu_syncthreads(); }
  __forceinline__ static arrival_token barrier_arrive() { return {}; }
  __forceinline__ static void barrier_wait() { emu_syncthreads(); }
  __forceinline__ static void barrier_wait(arrival_token&&) { emu_syncthreads(); }
  __forceinline__ static unsigned thread_rank() { return emu::rank_in_block(); }
  __forceinline__ static unsigned block_rank() { return 0; }
  __forceinline__ static unsigned num_blocks() { return 1; }
  __forceinline__ static unsigned num_threads() { return emu::block_size(); }
  __forceinline__ static unsigned size() { return emu::block_size(); }
  __forceinline__ static dim3 block_index() { return {0, 0, 0}; }
  __forceinline__ static dim3 dim_blocks() { return {1, 1, 1}; }
  template <class T>
  __forceinline__ static T* map_shared_rank(T* address, int rank) {
    if (rank != 0) emu_ptx_refuse("map_shared_rank() of another block; the emulator's clusters have one");
    return address;
  }
  template <class T>
  __forceinline__ static unsigned query_shared_rank(const T*) { return 0; }
};
inline cluster_group this_cluster() { return {}; }

template <class Group>
__forceinline__ void sync(const Group& group) { group.sync(); }
template <class Group>
__forceinline__ auto thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group>
__forceinline__ auto group_size(const Group& group) { return group.size(); }

template <class Group, class F, class... Arguments>
__forceinline__ void invoke_one(const Group& group, F&& f, Arguments&&... arguments) {
  if (group.thread_rank() == 0) f(static_cast<Arguments&&>(arguments)...);
}

template <class T = void> struct plus { __forceinline__ T operator()(const T& a, const T& b) const { return a + b; } };
template <class T = void> struct less { __forceinline__ T operator()(const T& a, const T& b) const { return b < a ? b : a; } };
template <class T = void> struct greater { __forceinline__ T operator()(const T& a, const T& b) const { return a < b ? b : a; } };
template <class T = void> struct bit_and { __forceinline__ T operator()(const T& a, const T& b) const { return a & b; } };
template <class T = void> struct bit_or { __forceinline__ T operator()(const T& a, const T& b) const { return a | b; } };
template <class T = void> struct bit_xor { __forceinline__ T operator()(const T& a, const T& b) const { return a ^ b; } };

}  // namespace cooperative_groups

#include "emu_show_names.h"
