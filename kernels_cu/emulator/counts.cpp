// How a warp's addresses become sectors and wavefronts. No document says so. Each rule was read off an H200, from ncu's
// counters of some 780 access patterns (the results' file of kind "patterns"). tests/emulator/test_access_patterns.py holds
// the rules to them.
//
// Sectors of loads, stores and reductions are counted once per warp, whatever the width and the order of the lanes.
//
// Wavefronts: a pass takes one word from each bank, for any number of lanes. With 4 bytes per lane the whole warp goes
// together, with 8 bytes half of it, with 16 bytes a quarter. Only loads may go twice as many lanes together. They do so if,
// in the whole warp, lanes 1 apart (or lanes 2 apart) ask for the same address, or one of the two asks for nothing. So 32
// lanes load the same 16 bytes in 2 wavefronts, and store them in 4. ldmatrix serves one matrix at a time. Its rows are the
// addresses of the lanes. ncu's counter of instructions (smsp__sass_…) looks at lanes 1 apart in each half of the warp by
// itself. The hardware's own counter (l1tex__…) doesn't. This is the hardware's.
//
// Copies of 16 bytes: if lanes name the same place in SRAM, only the first lane is served. A sector goes from one sector of
// HBM to one of SRAM. Its two chunks may change places. A chunk that goes elsewhere, or to both places, is another sector. A
// wavefront takes sectors that go from one line of 128 bytes to one line, permuted by an XOR, with the same chunks wanted.
// Where rows begin elsewhere in a line of SRAM than in HBM, ncu sometimes says fewer wavefronts. The reason isn't known.
#include "counts.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "launch.h"
#include "machine.h"

namespace emulator {

namespace {

constexpr unsigned SECTOR = 32, BANKS = 32, BANK_BYTES = 4;

// How many distinct pieces of `unit` bytes the lanes of `mask` touch, in all tensors or in one.
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

// How many passes the lanes first..last take. In one pass each bank gives one word, to all lanes that ask for it.
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

// Do any two lanes that are this far apart ask for the same address, or does one of them ask for nothing?
bool paired(const WarpInstruction& x, int apart) {
  for (int lane = 0; lane < WARP; ++lane)
    if (x.mask >> lane & 1 && x.mask >> (lane ^ apart) & 1 && x.address[lane] != x.address[lane ^ apart]) return false;
  return true;
}

// How many passes there are if this many lanes go together, and how many there would be without bank conflicts.
struct Passes { unsigned taken = 0, groups = 0; };
Passes by_groups(const WarpInstruction& x, int lanes) {
  Passes sum;
  for (int first = 0; first < WARP; first += lanes) {
    const unsigned n = passes(x, first, first + lanes - 1);
    sum.taken += n;
    sum.groups += n > 0;
  }
  return sum;
}

Passes by_rule(const WarpInstruction& x) {
  const int lanes = x.bytes <= 4 ? WARP : x.bytes == 8 ? 16 : 8;
  const Passes alone = by_groups(x, lanes);
  if (x.op != Op::ld || x.bytes <= 4 || !(paired(x, 1) || paired(x, 2))) return alone;
  const Passes joined = by_groups(x, 2 * lanes);
  return joined.taken < alone.taken ? joined : alone;
}

// What a copy moves between a sector of HBM and one of SRAM, in chunks of 16 bytes.
struct Piece {
  std::uint64_t at, partner;  // sectors
  unsigned swapped, chunks;   // do the two chunks change places? which chunks at `at` are wanted?
  const char* tensor;
};

struct Pieces {
  std::array<Piece, 32> list;
  unsigned count = 0;
};

Pieces pieces(const WarpInstruction& x) {
  constexpr unsigned CHUNK = 16;
  const auto& to = x.space == Space::sram ? x.address : x.partner;
  Pieces found;
  for (int lane = 0; lane < WARP; ++lane) {
    if (!(x.mask >> lane & 1)) continue;
    bool served = false;
    for (int before = 0; before < lane; ++before) served |= x.mask >> before & 1 && to[before] == to[lane];
    if (served) continue;
    const std::uint64_t at = x.address[lane] / CHUNK, partner = x.partner[lane] / CHUNK;
    const Piece piece{at / 2, partner / 2, static_cast<unsigned>((at ^ partner) % 2), 1u << at % 2, x.tensor[lane]};
    const auto end = found.list.begin() + found.count;
    const auto same = std::find_if(found.list.begin(), end, [&](const Piece& other) {
      return other.at == piece.at && other.partner == piece.partner && other.swapped == piece.swapped;
    });
    if (same == end) found.list[found.count++] = piece;
    else same->chunks |= piece.chunks;
  }
  return found;
}

bool is_copy(const WarpInstruction& x) { return x.op == Op::ldgsts && x.bytes == 16; }

std::uint64_t sectors(const WarpInstruction& x, const char* tensor) {
  if (!is_copy(x)) return distinct(x, SECTOR, tensor);
  const Pieces found = pieces(x);
  return std::count_if(found.list.begin(), found.list.begin() + found.count,
                       [&](const Piece& piece) { return piece.tensor == tensor; });
}

unsigned wavefronts_of_copy(const WarpInstruction& x) {
  constexpr unsigned OF_LINE = 4;  // sectors
  const Pieces found = pieces(x);
  auto go_together = [](const Piece& a, const Piece& b) {
    return a.at / OF_LINE == b.at / OF_LINE && a.partner / OF_LINE == b.partner / OF_LINE && a.swapped == b.swapped &&
           (a.at ^ a.partner) % OF_LINE == (b.at ^ b.partner) % OF_LINE && a.chunks == b.chunks;
  };
  unsigned total = 0;
  for (unsigned i = 0; i < found.count; ++i) {
    const auto end = found.list.begin() + i;
    total += std::none_of(found.list.begin(), end, [&](const Piece& before) { return go_together(before, found.list[i]); });
  }
  return total;
}

// The fewest passes that the active lanes' bytes could take, at 128 bytes per pass. ncu calls that ideal, too.
void count_wavefronts(const WarpInstruction& x, Moved& moved) {
  constexpr unsigned OF_PASS = BANKS * BANK_BYTES;
  const unsigned full = (__builtin_popcount(x.mask) * x.bytes + OF_PASS - 1) / OF_PASS;
  const unsigned copied = is_copy(x) ? wavefronts_of_copy(x) : 0;
  const Passes found = copied ? Passes{copied, copied} : by_rule(x);
  moved.wavefronts = found.taken;
  moved.ideal = std::min(found.groups, full);
}

}  // namespace

void Ledger::add(const char* step, const char* tensor, Space space, Op op, const Moved& moved) {
  Moved& row = rows[{step, tensor, space, op}];
  row.instructions += moved.instructions;
  row.bytes += moved.bytes;
  row.overlapped += moved.overlapped;
  row.sectors += moved.sectors;
  row.wavefronts += moved.wavefronts;
  row.ideal += moved.ideal;
}

void Ledger::account(const WarpInstruction& x) {
  bool first = true;
  for (unsigned left = x.mask; left;) {  // one tensor after the other; nearly always there is only one
    const char* tensor = x.tensor[__builtin_ctz(left)];
    unsigned lanes = 0;
    for (int lane = 0; lane < WARP; ++lane)
      if (left >> lane & 1 && x.tensor[lane] == tensor) ++lanes, left &= ~(1u << lane);
    Moved moved;
    moved.instructions = first;
    moved.bytes = x.op == Op::red || x.op == Op::atom ? std::uint64_t{lanes} * x.bytes : distinct(x, 1, tensor);
    if (x.overlapped) moved.overlapped = moved.bytes;
    if (x.space == Space::hbm) {
      moved.sectors = sectors(x, tensor);
    } else if (first) {
      count_wavefronts(x, moved);
    }
    add(x.step, tensor, x.space, x.op, moved);
    first = false;
  }
}

void WarpLog::add(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, const char* tensor, Place place,
                  std::uint64_t partner) {
  tell_access(lane, op, space, address, bytes, place);
  // a line may load in some lanes only, and store in all: y[i] = i < n ? x[i] : 0
  const bool loads = op == Op::ld || op == Op::ldgsts || op == Op::ldsm;
  const unsigned site = 4 * site_of(place) + 2 * (space == Space::sram) + loads;
  if (open.size() <= site) open.resize(4 * sites() + 4);
  if (lane.occurrences.size() <= site) lane.occurrences.resize(4 * sites() + 4);
  auto& seen = lane.occurrences[site];
  if (seen >> 32 != lane.interval) seen = std::uint64_t{lane.interval} << 32;
  const auto occurrence = static_cast<std::uint32_t>(seen++);
  auto& list = open[site];
  if (list.empty()) touched.push_back(site);
  if (list.size() <= occurrence) list.resize(occurrence + 1);
  WarpInstruction& x = list[occurrence];
  if (!x.mask) x.op = op, x.space = space, x.step = lane.step, x.place = place, x.bytes = bytes;
  x.mask |= 1u << lane.lane;
  x.overlapped |= !lane.copies.empty();
  x.address[lane.lane] = address;
  x.partner[lane.lane] = partner;
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
