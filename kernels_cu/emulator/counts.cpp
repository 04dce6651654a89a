#include "counts.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "launch.h"
#include "machine.h"

namespace emulator {

namespace {

constexpr unsigned SECTOR = 32, BANKS = 32, BANK_BYTES = 4;

// Distinct pieces of `unit` bytes that the lanes of `mask` touch, all of them or those of one tensor.
std::uint64_t distinct(const WarpInstruction& x, unsigned unit, const char* tensor) {
  std::array<std::uint64_t, 32> begins;
  int n = 0;
  for (int lane = 0; lane < WARP; ++lane)
    if (x.mask >> lane & 1 && x.tensor[lane] == tensor) begins[n++] = x.address[lane];
  std::sort(begins.begin(), begins.begin() + n);
  std::uint64_t count = 0, next = 0;  // the first piece that isn't counted yet
  for (int i = 0; i < n; ++i) {
    const std::uint64_t first = std::max(begins[i] / unit, next), end = (begins[i] + x.bytes - 1) / unit + 1;
    if (end > first) count += end - first;
    next = std::max(next, end);
  }
  return count;
}

// Passes that the lanes first..last take: in one pass each bank gives one word, to however many ask for it.
unsigned passes(const WarpInstruction& x, int first, int last) {
  std::array<std::array<std::uint64_t, 32 * 4>, BANKS> words;
  std::array<unsigned, BANKS> filled{};
  unsigned most = 0;
  for (int lane = first; lane <= last; ++lane) {
    if (!(x.mask >> lane & 1)) continue;
    for (std::uint64_t word = x.address[lane] / BANK_BYTES; word <= (x.address[lane] + x.bytes - 1) / BANK_BYTES; ++word) {
      auto& bank = words[word % BANKS];
      auto& n = filled[word % BANKS];
      if (std::find(bank.begin(), bank.begin() + n, word) == bank.begin() + n) bank[n++] = word;
      most = std::max(most, n);
    }
  }
  return most;
}

}  // namespace

// A warp that asks for 8 bytes a lane is served half by half, one that asks for 16 a quarter at a time: 128 bytes a pass.
// ldmatrix serves a matrix of 8 rows at a time, and the lanes' addresses are such rows.
unsigned wavefronts(const WarpInstruction& x, unsigned& ideal) {
  const int together = x.bytes <= 4 ? 32 : x.bytes == 8 ? 16 : 8;
  unsigned total = 0;
  ideal = 0;
  for (int first = 0; first < WARP; first += together) {
    const unsigned n = passes(x, first, first + together - 1);
    total += n;
    ideal += n > 0;
  }
  return total;
}

void Ledger::add(const char* step, const char* tensor, Space space, Op op, const Moved& moved) {
  Moved& row = rows[{step, tensor, space, op}];
  row.instructions += moved.instructions;
  row.bytes += moved.bytes;
  row.sectors += moved.sectors;
  row.wavefronts += moved.wavefronts;
  row.ideal += moved.ideal;
}

void Ledger::account(const WarpInstruction& x) {
  bool first = true;
  for (unsigned left = x.mask; left;) {  // one tensor after the other: nearly always there is one
    const char* tensor = x.tensor[__builtin_ctz(left)];
    unsigned lanes = 0;
    for (int lane = 0; lane < WARP; ++lane)
      if (left >> lane & 1 && x.tensor[lane] == tensor) ++lanes, left &= ~(1u << lane);
    Moved moved;
    moved.instructions = first;
    moved.bytes = x.op == Op::red || x.op == Op::atom ? std::uint64_t{lanes} * x.bytes : distinct(x, 1, tensor);
    if (x.space == Space::hbm) {
      moved.sectors = distinct(x, SECTOR, tensor);
    } else if (first) {
      unsigned ideal;
      moved.wavefronts = wavefronts(x, ideal);
      moved.ideal = ideal;
    }
    add(x.step, tensor, x.space, x.op, moved);
    first = false;
  }
}

void WarpLog::add(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, const char* tensor, Place place) {
  const unsigned site = 2 * site_of(place) + (space == Space::sram);
  if (open.size() <= site) open.resize(2 * sites() + 2);
  if (lane.occurrences.size() <= site) lane.occurrences.resize(2 * sites() + 2);
  auto& seen = lane.occurrences[site];
  if (seen >> 32 != lane.interval) seen = std::uint64_t{lane.interval} << 32;
  const auto occurrence = static_cast<std::uint32_t>(seen++);
  auto& list = open[site];
  if (list.empty()) touched.push_back(site);
  if (list.size() <= occurrence) list.resize(occurrence + 1);
  WarpInstruction& x = list[occurrence];
  if (!x.mask) x.op = op, x.space = space, x.step = lane.step, x.place = place, x.bytes = bytes;
  x.mask |= 1u << lane.lane;
  x.address[lane.lane] = address;
  x.tensor[lane.lane] = tensor;
}

void WarpLog::flush(Ledger& ledger) {
  for (unsigned site : touched) {
    for (const auto& x : open[site])
      if (x.mask) ledger.account(x);
    open[site].clear();
  }
  touched.clear();
}

}  // namespace emulator
