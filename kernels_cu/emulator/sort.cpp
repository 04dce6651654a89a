// Places of keys in a sorted order, for cub's radix sort.
#include <cstdint>

extern "C" unsigned emu_rank(const unsigned long long* keys, unsigned n, unsigned index, int begin, int end, int descending) {
  auto part = [&](std::uint64_t key) { return end - begin >= 64 ? key : key >> begin & ((std::uint64_t{1} << (end - begin)) - 1); };
  const std::uint64_t mine = part(keys[index]);
  unsigned before = 0;
  for (unsigned i = 0; i < n; ++i) {
    const std::uint64_t other = part(keys[i]);
    before += other == mine ? i < index : descending ? other > mine : other < mine;
  }
  return before;
}
