// CUB's primitives for blocks and warps: reductions, prefix sums, loads and stores, radix sort. They use shuffles and SRAM as
// CUB does, but not the same bytes of it. All algorithms that a template can name are one here.
#pragma once
#include "emu_hide_names.h"

#include <limits>

#include "../cooperative_groups.h"

extern "C" {
// The place of key `index` among `n` keys in SRAM, sorted by the bits begin .. end. Equal keys keep their order.
unsigned emu_rank(const unsigned long long* keys, unsigned n, unsigned index, int begin, int end, int descending);
}

namespace cub {

struct Sum { template <class T, class U> __forceinline__ auto operator()(const T& a, const U& b) const { return a + b; } };
struct Difference { template <class T, class U> __forceinline__ auto operator()(const T& a, const U& b) const { return a - b; } };
struct Max { template <class T> __forceinline__ T operator()(const T& a, const T& b) const { return a < b ? b : a; } };
struct Min { template <class T> __forceinline__ T operator()(const T& a, const T& b) const { return b < a ? b : a; } };
struct Equality { template <class T> __forceinline__ bool operator()(const T& a, const T& b) const { return a == b; } };
struct ArgMax { template <class P> __forceinline__ P operator()(const P& a, const P& b) const { return b.value > a.value || (b.value == a.value && b.key < a.key) ? b : a; } };
struct ArgMin { template <class P> __forceinline__ P operator()(const P& a, const P& b) const { return b.value < a.value || (b.value == a.value && b.key < a.key) ? b : a; } };
template <class K, class V> struct KeyValuePair { using Key = K; using Value = V; K key; V value; };
struct NullType {};

enum BlockReduceAlgorithm { BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS };
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };
enum BlockLoadAlgorithm { BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED };
enum BlockStoreAlgorithm { BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED };

__forceinline__ unsigned LaneId() { return cooperative_groups::emu::rank_in_block() % 32; }
__forceinline__ unsigned WarpId() { return cooperative_groups::emu::rank_in_block() / 32; }
__forceinline__ unsigned RowMajorTid(int x, int y, int) { return threadIdx.x + x * (threadIdx.y + y * threadIdx.z); }

namespace emu {

namespace groups = cooperative_groups::emu;

// Room for values in SRAM. A union may hold it.
template <class T, int N>
struct Room {
  alignas(T) unsigned char bytes[N * sizeof(T)];
  __forceinline__ T& operator[](int i) { return reinterpret_cast<T*>(bytes)[i]; }
};
struct Nothing {};

// Where a thread's element i lies among the elements of its block. Each thread has N.
template <int N, int THREADS, bool STRIPED>
__forceinline__ int place(int i) {
  const int rank = static_cast<int>(groups::rank_in_block());
  return STRIPED ? i * THREADS + rank : rank * N + i;
}

// The lanes of a logical warp of N threads.
template <int N>
__forceinline__ unsigned mask() {
  const unsigned lane = groups::rank_in_block() % 32;
  return (N == 32 ? 0xffffffffu : ((1u << N % 32) - 1) << lane / N * N) & groups::warp_mask();
}
// The value of the lane `by` further up or down. Past the end it is the lane's own.
template <int N, class T>
__forceinline__ T moved(const T& x, int by) {
  const int lane = static_cast<int>(groups::rank_in_block() % 32), first = lane / N * N, source = lane + by;
  return groups::shuffle(mask<N>(), x, source < first || source >= first + N || !(mask<N>() >> source & 1) ? lane : source);
}
// The sum of the first `valid` lanes, in lane 0.
template <int N, class T, class Operation>
__forceinline__ T reduce(T x, Operation operation, int valid) {
  const int rank = static_cast<int>(groups::rank_in_block() % N);
  for (int by = 1; by < N; by *= 2) {
    const T other = moved<N>(x, by);
    if (rank + by < valid) x = operation(x, other);
  }
  return x;
}
template <int N, class T, class Operation>
__forceinline__ T scan(T x, Operation operation) {
  const int rank = static_cast<int>(groups::rank_in_block() % N);
  for (int by = 1; by < N; by *= 2) {
    const T other = moved<N>(x, -by);
    if (rank >= by) x = operation(other, x);
  }
  return x;
}
__forceinline__ int lanes_there() { return __builtin_popcount(groups::warp_mask()); }

}  // namespace emu

template <class T, int N = 32, int = 0>
class WarpReduce {
 public:
  using TempStorage = emu::Nothing;
  __forceinline__ explicit WarpReduce(TempStorage&) {}
  template <class Operation>
  __forceinline__ T Reduce(T x, Operation operation, int valid = N) { return emu::reduce<N>(x, operation, valid); }
  __forceinline__ T Sum(T x, int valid = N) { return Reduce(x, cub::Sum(), valid); }
  __forceinline__ T Max(T x, int valid = N) { return Reduce(x, cub::Max(), valid); }
  __forceinline__ T Min(T x, int valid = N) { return Reduce(x, cub::Min(), valid); }
};

template <class T, int N = 32, int = 0>
class WarpScan {
 public:
  using TempStorage = emu::Nothing;
  __forceinline__ explicit WarpScan(TempStorage&) {}
  template <class Operation>
  __forceinline__ void InclusiveScan(T x, T& y, Operation operation) { y = emu::scan<N>(x, operation); }
  template <class Operation>
  __forceinline__ void InclusiveScan(T x, T& y, Operation operation, T& total) {
    y = emu::scan<N>(x, operation);
    total = Broadcast(y, N - 1);
  }
  template <class Operation>
  __forceinline__ void ExclusiveScan(T x, T& y, T initial, Operation operation) {
    const T before = emu::moved<N>(emu::scan<N>(x, operation), -1);
    y = cooperative_groups::emu::rank_in_block() % N ? operation(initial, before) : initial;
  }
  template <class Operation>
  __forceinline__ void ExclusiveScan(T x, T& y, T initial, Operation operation, T& total) {
    const T all = emu::scan<N>(x, operation);
    ExclusiveScan(x, y, initial, operation);
    total = Broadcast(all, N - 1);
  }
  __forceinline__ void InclusiveSum(T x, T& y) { InclusiveScan(x, y, cub::Sum()); }
  __forceinline__ void InclusiveSum(T x, T& y, T& total) { InclusiveScan(x, y, cub::Sum(), total); }
  __forceinline__ void ExclusiveSum(T x, T& y) { ExclusiveScan(x, y, T{}, cub::Sum()); }
  __forceinline__ void ExclusiveSum(T x, T& y, T& total) { ExclusiveScan(x, y, T{}, cub::Sum(), total); }
  __forceinline__ T Broadcast(T x, unsigned from) {
    return cooperative_groups::emu::shuffle(emu::mask<N>(), x, static_cast<int>(cooperative_groups::emu::rank_in_block() % 32 / N * N + from));
  }
};

template <class T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1, int = 0>
class BlockReduce {
  static constexpr int WARPS = (X * Y * Z + 31) / 32;

 public:
  struct TempStorage { emu::Room<T, WARPS> sums; };
  __forceinline__ BlockReduce() : storage_(own()) {}
  __forceinline__ explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  // The sum of the first `valid` threads, in thread 0.
  template <class Operation>
  __forceinline__ T Reduce(T x, Operation operation, int valid = X * Y * Z) {
    const int rank = static_cast<int>(cooperative_groups::emu::rank_in_block());
    const int left = valid - rank / 32 * 32, there = emu::lanes_there();
    x = emu::reduce<32>(x, operation, left < there ? left : there);
    if (rank % 32 == 0) storage_.sums[rank / 32] = x;
    __syncthreads();
    if (rank == 0)
      for (int warp = 1; warp < WARPS && 32 * warp < valid; ++warp) x = operation(x, storage_.sums[warp]);
    return x;
  }
  template <int N, class Operation>
  __forceinline__ T Reduce(T (&x)[N], Operation operation) {
    T sum = x[0];
    for (int i = 1; i < N; ++i) sum = operation(sum, x[i]);
    return Reduce(sum, operation);
  }
  __forceinline__ T Sum(T x) { return Reduce(x, cub::Sum()); }
  __forceinline__ T Sum(T x, int valid) { return Reduce(x, cub::Sum(), valid); }
  template <int N>
  __forceinline__ T Sum(T (&x)[N]) { return Reduce(x, cub::Sum()); }

 private:
  static __forceinline__ TempStorage& own() {
    __shared__ TempStorage storage;
    return storage;
  }
  TempStorage& storage_;
};

template <class T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int = 0>
class BlockScan {
  static constexpr int WARPS = (X * Y * Z + 31) / 32;

 public:
  struct TempStorage { emu::Room<T, WARPS> sums; };
  __forceinline__ BlockScan() : storage_(own()) {}
  __forceinline__ explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  template <class Operation>
  __forceinline__ void InclusiveScan(T x, T& y, Operation operation, T& total) {
    const int rank = static_cast<int>(cooperative_groups::emu::rank_in_block());
    T sum = emu::scan<32>(x, operation);
    if (rank % 32 == emu::lanes_there() - 1) storage_.sums[rank / 32] = sum;
    __syncthreads();
    T before = storage_.sums[0], all = before;
    for (int warp = 1; warp < WARPS; ++warp) {
      if (warp == rank / 32) before = all;
      all = operation(all, storage_.sums[warp]);
    }
    y = rank / 32 ? operation(before, sum) : sum;
    total = all;
  }
  template <class Operation>
  __forceinline__ void InclusiveScan(T x, T& y, Operation operation) {
    T total;
    InclusiveScan(x, y, operation, total);
  }
  // The sum of all threads before this one. Thread 0 has none.
  template <class Operation>
  __forceinline__ void ExclusiveScan(T x, T& y, Operation operation, T& total) {
    const int rank = static_cast<int>(cooperative_groups::emu::rank_in_block());
    const T sum = emu::scan<32>(x, operation), left = emu::moved<32>(sum, -1);
    if (rank % 32 == emu::lanes_there() - 1) storage_.sums[rank / 32] = sum;
    __syncthreads();
    T before = storage_.sums[0], all = before;
    for (int warp = 1; warp < WARPS; ++warp) {
      if (warp == rank / 32) before = all;
      all = operation(all, storage_.sums[warp]);
    }
    y = rank / 32 == 0 ? left : rank % 32 ? operation(before, left) : before;
    total = all;
  }
  template <class Operation>
  __forceinline__ void ExclusiveScan(T x, T& y, T initial, Operation operation, T& total) {
    T before;
    ExclusiveScan(x, before, operation, total);
    y = cooperative_groups::emu::rank_in_block() ? operation(initial, before) : initial;
  }
  template <class Operation>
  __forceinline__ void ExclusiveScan(T x, T& y, T initial, Operation operation) {
    T total;
    ExclusiveScan(x, y, initial, operation, total);
  }
  __forceinline__ void InclusiveSum(T x, T& y) { InclusiveScan(x, y, cub::Sum()); }
  __forceinline__ void InclusiveSum(T x, T& y, T& total) { InclusiveScan(x, y, cub::Sum(), total); }
  __forceinline__ void ExclusiveSum(T x, T& y) { ExclusiveScan(x, y, T{}, cub::Sum()); }
  __forceinline__ void ExclusiveSum(T x, T& y, T& total) { ExclusiveScan(x, y, T{}, cub::Sum(), total); }

  // Several values a thread, in a row (blocked).
  template <int N, class Operation>
  __forceinline__ void InclusiveScan(T (&x)[N], T (&y)[N], Operation operation, T& total) {
    T sums[N], before;
    partial(x, sums, operation);
    ExclusiveScan(sums[N - 1], before, operation, total);
    const bool first = cooperative_groups::emu::rank_in_block() == 0;
    for (int i = 0; i < N; ++i) y[i] = first ? sums[i] : operation(before, sums[i]);
  }
  template <int N, class Operation>
  __forceinline__ void InclusiveScan(T (&x)[N], T (&y)[N], Operation operation) {
    T total;
    InclusiveScan(x, y, operation, total);
  }
  template <int N, class Operation>
  __forceinline__ void ExclusiveScan(T (&x)[N], T (&y)[N], T initial, Operation operation, T& total) {
    T sums[N], before;
    partial(x, sums, operation);
    ExclusiveScan(sums[N - 1], before, initial, operation, total);
    for (int i = N - 1; i > 0; --i) y[i] = operation(before, sums[i - 1]);
    y[0] = before;
  }
  template <int N, class Operation>
  __forceinline__ void ExclusiveScan(T (&x)[N], T (&y)[N], T initial, Operation operation) {
    T total;
    ExclusiveScan(x, y, initial, operation, total);
  }
  template <int N> __forceinline__ void InclusiveSum(T (&x)[N], T (&y)[N]) { InclusiveScan(x, y, cub::Sum()); }
  template <int N> __forceinline__ void InclusiveSum(T (&x)[N], T (&y)[N], T& total) { InclusiveScan(x, y, cub::Sum(), total); }
  template <int N> __forceinline__ void ExclusiveSum(T (&x)[N], T (&y)[N]) { ExclusiveScan(x, y, T{}, cub::Sum()); }
  template <int N> __forceinline__ void ExclusiveSum(T (&x)[N], T (&y)[N], T& total) { ExclusiveScan(x, y, T{}, cub::Sum(), total); }

 private:
  template <int N, class Operation>
  static __forceinline__ void partial(const T (&x)[N], T (&sums)[N], Operation operation) {
    sums[0] = x[0];
    for (int i = 1; i < N; ++i) sums[i] = operation(sums[i - 1], x[i]);
  }
  static __forceinline__ TempStorage& own() {
    __shared__ TempStorage storage;
    return storage;
  }
  TempStorage& storage_;
};

template <class T, int X, int N, BlockLoadAlgorithm HOW = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1, int = 0>
class BlockLoad {
  static __forceinline__ int place(int i) { return emu::place<N, X * Y * Z, HOW == BLOCK_LOAD_STRIPED>(i); }

 public:
  using TempStorage = emu::Nothing;
  __forceinline__ BlockLoad() {}
  __forceinline__ explicit BlockLoad(TempStorage&) {}
  template <class From>
  __forceinline__ void Load(From from, T (&x)[N]) {
    for (int i = 0; i < N; ++i) x[i] = from[place(i)];
  }
  template <class From>
  __forceinline__ void Load(From from, T (&x)[N], int valid) {
    for (int i = 0; i < N; ++i)
      if (place(i) < valid) x[i] = from[place(i)];
  }
  template <class From, class Default>
  __forceinline__ void Load(From from, T (&x)[N], int valid, Default otherwise) {
    for (int i = 0; i < N; ++i) x[i] = place(i) < valid ? static_cast<T>(from[place(i)]) : static_cast<T>(otherwise);
  }
};

template <class T, int X, int N, BlockStoreAlgorithm HOW = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1, int = 0>
class BlockStore {
  static __forceinline__ int place(int i) { return emu::place<N, X * Y * Z, HOW == BLOCK_STORE_STRIPED>(i); }

 public:
  using TempStorage = emu::Nothing;
  __forceinline__ BlockStore() {}
  __forceinline__ explicit BlockStore(TempStorage&) {}
  template <class To>
  __forceinline__ void Store(To to, const T (&x)[N]) {
    for (int i = 0; i < N; ++i) to[place(i)] = x[i];
  }
  template <class To>
  __forceinline__ void Store(To to, const T (&x)[N], int valid) {
    for (int i = 0; i < N; ++i)
      if (place(i) < valid) to[place(i)] = x[i];
  }
};

// A key's bits as an unsigned number of the same order.
template <class T>
struct Traits {
  using UnsignedBits = std::conditional_t<sizeof(T) == 8, unsigned long long, std::conditional_t<sizeof(T) == 4, unsigned, std::conditional_t<sizeof(T) == 2, unsigned short, unsigned char>>>;
  static constexpr UnsignedBits HIGH_BIT = static_cast<UnsignedBits>(UnsignedBits{1} << (8 * sizeof(T) - 1));
  static constexpr bool FLOAT = !std::is_integral_v<T>;
  static constexpr bool SIGNED = FLOAT || std::is_signed_v<T>;
  static __forceinline__ UnsignedBits TwiddleIn(UnsignedBits key) {
    return !SIGNED ? key : static_cast<UnsignedBits>(key ^ (FLOAT && key & HIGH_BIT ? static_cast<UnsignedBits>(~UnsignedBits{0}) : HIGH_BIT));
  }
  static __forceinline__ UnsignedBits TwiddleOut(UnsignedBits key) {
    return !SIGNED ? key : static_cast<UnsignedBits>(key ^ (FLOAT && !(key & HIGH_BIT) ? static_cast<UnsignedBits>(~UnsignedBits{0}) : HIGH_BIT));
  }
};

template <class K, int X, int N, class V = NullType, int = 4, bool = true, BlockScanAlgorithm = BLOCK_SCAN_WARP_SCANS, int Y = 1, int Z = 1>
class BlockRadixSort {
  static constexpr int THREADS = X * Y * Z;

 public:
  union TempStorage {
    emu::Room<unsigned long long, THREADS * N> bits;
    emu::Room<K, THREADS * N> keys;
    emu::Room<V, THREADS * N> values;
  };
  __forceinline__ BlockRadixSort() : storage_(own()) {}
  __forceinline__ explicit BlockRadixSort(TempStorage& storage) : storage_(storage) {}

  __forceinline__ void Sort(K (&keys)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, nullptr, begin, end, false, false); }
  __forceinline__ void Sort(K (&keys)[N], V (&values)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, values, begin, end, false, false); }
  __forceinline__ void SortDescending(K (&keys)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, nullptr, begin, end, true, false); }
  __forceinline__ void SortDescending(K (&keys)[N], V (&values)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, values, begin, end, true, false); }
  __forceinline__ void SortBlockedToStriped(K (&keys)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, nullptr, begin, end, false, true); }
  __forceinline__ void SortBlockedToStriped(K (&keys)[N], V (&values)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, values, begin, end, false, true); }
  __forceinline__ void SortDescendingBlockedToStriped(K (&keys)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, nullptr, begin, end, true, true); }
  __forceinline__ void SortDescendingBlockedToStriped(K (&keys)[N], V (&values)[N], int begin = 0, int end = 8 * sizeof(K)) { sort(keys, values, begin, end, true, true); }

 private:
  __forceinline__ void sort(K (&keys)[N], V* values, int begin, int end, bool descending, bool striped) {
    const int rank = static_cast<int>(cooperative_groups::emu::rank_in_block());
    typename Traits<K>::UnsignedBits bits;
    int to[N];
    for (int i = 0; i < N; ++i) {
      __builtin_memcpy(&bits, static_cast<const void*>(&keys[i]), sizeof bits);
      storage_.bits[rank * N + i] = Traits<K>::TwiddleIn(bits);
    }
    __syncthreads();
    for (int i = 0; i < N; ++i) to[i] = static_cast<int>(emu_rank(&storage_.bits[0], THREADS * N, rank * N + i, begin, end, descending));
    __syncthreads();
    exchange(storage_.keys, keys, to, rank, striped);
    if (values) exchange(storage_.values, values, to, rank, striped);
  }
  template <class Room, class T>
  __forceinline__ void exchange(Room& room, T* x, const int (&to)[N], int rank, bool striped) {
    for (int i = 0; i < N; ++i) room[to[i]] = x[i];
    __syncthreads();
    for (int i = 0; i < N; ++i) x[i] = room[striped ? i * THREADS + rank : rank * N + i];
    __syncthreads();
  }
  static __forceinline__ TempStorage& own() {
    __shared__ TempStorage storage;
    return storage;
  }
  TempStorage& storage_;
};

}  // namespace cub

#include "emu_show_names.h"
