// mbarriers, the registers that warpgroups pass to each other, and what a block leaves behind.
#include "hopper.h"

#include <algorithm>
#include <cstring>

#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

namespace emulator {

namespace {

constexpr unsigned MBARRIER_BYTES = 8;
constexpr unsigned MOST_ARRIVALS = (1u << 20) - 1;
constexpr std::int64_t MOST_BYTES = (1 << 20) - 1;
constexpr unsigned SM_REGISTERS = 64 * 1024;
constexpr unsigned MOST_REGISTERS = 256;

std::string number(std::int64_t n) { return std::to_string(n); }

std::string state_of(const Mbarrier& m) {
  const std::string arrived = number(m.arrivals - m.missing) + " of " + number(m.arrivals) + " arrivals";
  return "phase " + number(m.phase) + " has had " + arrived + " and " + number(m.coming) + " of " + number(m.expected) + " bytes";
}

void add_mbarrier(Lane& lane, const char* kind, std::string message, Place place, unsigned address) {
  add_shared(lane, kind, std::move(message), place, address, MBARRIER_BYTES);
}

}  // namespace

// mbarriers

Mbarrier& Hopper::mbarrier(Lane& lane, unsigned address, Place place) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) {
    add_mbarrier(lane, "mbarrier", "uses an mbarrier that nobody initialised", place, address);
    block.abort();
  }
  Mbarrier& m = found->second;
  const bool ordered = m.made.thread == lane.number || block.clocks.happened_before(m.made, block.clocks.of(lane.number));
  if (block.launch.sanitize() && !ordered)
    add_shared(lane, "race", "uses an mbarrier that another thread initialised, with no barrier between", place, address,
               MBARRIER_BYTES, &m.made);
  return m;
}

void Hopper::arrive(Lane& lane, Mbarrier& m, std::int64_t expected, Place place) {
  ++progress;
  if (!m.missing) {
    add_mbarrier(lane, "mbarrier", "arrives once too often: " + state_of(m), place, m.address);
    return;
  }
  m.expected += expected;
  if (m.expected > MOST_BYTES)
    add_mbarrier(lane, "mbarrier", "expects " + number(m.expected) + " bytes of a phase, which can count " + number(MOST_BYTES),
                 place, m.address);
  block.clocks.release(lane.number, m.released);
  --m.missing;
  bool awaited = !m.expected && !m.coming;
  for (const auto& [thread, wait] : waits)
    awaited = awaited || (block.lanes[thread]->wait == Wait::mbarrier && wait.address == m.address);
  if (awaited || m.coming > m.expected) try_complete(m, lane, place);
}

// Ends the phase if it has all that it waits for.
void Hopper::try_complete(Mbarrier& m, Lane& lane, Place place) {
  if (m.missing || m.coming < m.expected) return;
  if (m.coming > m.expected)
    add_mbarrier(lane, "mbarrier", "ends a phase to which more bytes come than it expects: " + state_of(m), place, m.address);
  complete(m);
}

void Hopper::complete(Mbarrier& m) {
  ++progress;
  for (auto& [thread, wait] : waits)
    if (wait.woken && wait.address == m.address) {
      Lane& lane = *block.lanes[thread];
      add_mbarrier(lane, "mbarrier",
                   "waits for phase " + number(wait.phase) + " and may miss it: phase " + number(m.phase) +
                       " ends without its having seen that", lane.place, m.address);
      wait.woken = false;
    }
  for (const Box& box : m.loads) {
    for (unsigned row = 0; row < box.rows(); ++row) {
      char values[2048] = {};  // zeros outside the array
      const auto [at, begin, end] = box.row(row);
      if (end > begin) std::memcpy(values + begin, at, end - begin);
      for (unsigned i = 0; i < box.row_bytes() / CHUNK; ++i)
        std::memcpy(block.sram.pointer(box.chunk(row, i)), values + i * CHUNK, CHUNK);
    }
    if (block.launch.sanitize()) std::memset(&block.sram.state[box.sram], WRITTEN, box.bytes());
  }
  m.loads.clear();
  m.expected = m.coming = 0;
  m.missing = m.arrivals;
  ++m.phase;
  m.completed = m.released;
  m.completed.resize(std::max<std::size_t>(m.completed.size(), m.agent + 1));
  m.completed[m.agent] = m.phase;
  for (auto& [thread, wait] : waits) {
    Lane& lane = *block.lanes[thread];
    if (lane.wait != Wait::mbarrier || wait.address != m.address) continue;
    wait.woken = true;
    block.wake(lane);
  }
}

// A wait may come back without success, so that a thread can do something else in between. A thread that only waits gets one such
// chance for each thing that happens.
bool Hopper::go_on() {
  bool any = false;
  for (auto& [thread, wait] : waits) {
    Lane& lane = *block.lanes[thread];
    if (lane.wait != Wait::mbarrier || wait.failed == progress) continue;
    wait.failed = progress;
    block.wake(lane);
    any = true;
  }
  return any;
}

void Hopper::deadlock() {
  for (const auto& lane : block.lanes) {
    if (lane->done) continue;
    if (lane->wait == Wait::mbarrier) {
      const auto& wait = waits.at(lane->number);
      const Mbarrier& m = mbarriers.at(wait.address);
      add_mbarrier(*lane, "deadlock",
                   "waits for ever for phase " + number(wait.phase) + " (parity " + number(wait.phase & 1) + ") of an mbarrier: " +
                       state_of(m), lane->place, m.address);
    } else if (lane->wait == Wait::warpgroup || lane->wait == Wait::registers) {
      Finding finding = block.finding("deadlock", lane->place, *lane);
      finding.message = std::string("waits for ever for ") + lane->what;
      block.findings.add(std::move(finding));
    }
  }
}

bool Hopper::find_load(unsigned address, unsigned bytes, Lane& lane, std::string& message, Access& issued) const {
  for (const auto& [at, m] : mbarriers)
    for (const Box& box : m.loads) {
      if (!box.covers(address, bytes)) continue;
      issued = Access{};
      issued.block = static_cast<std::uint32_t>(block.number);
      issued.issuer = static_cast<std::uint16_t>(box.lane->number);
      issued.place = box.place;
      const std::uint32_t seen = block.clocks.of(lane.number)[m.agent];
      message += ": it ends phase " + number(m.phase) + " of its mbarrier, and this thread has waited for " +
                 (seen ? "phase " + number(seen - 1) : std::string("none"));
      if (!m.expected && m.missing == m.arrivals) message += "; that phase expects none of its bytes yet";
      return true;
    }
  return false;
}

// What a warpgroup executes together

// A warp is in an instruction that its warpgroup executes together. Is it the one that the first warp came to there?
void Hopper::execute_aligned(Warp& warp, std::uint64_t operand, bool product) {
  if (!block.launch.sanitize()) return;
  if (aligned.empty()) aligned.resize((block.warps.size() + 3) / 4);
  Aligned& group = aligned[warp.number / 4];
  auto& reached = group.warps[warp.number % 4];
  while (reached.section - group.first >= group.sections.size()) group.sections.emplace_back();
  auto& section = group.sections[reached.section - group.first];
  const Lane& lane = *warp.lanes[0];
  if (!section.parted && reached.step == section.steps.size()) {
    section.steps.push_back({lane.what, operand, lane.place, &lane});
  } else if (!section.parted) {
    const auto& first = section.steps[reached.step];
    const bool same = std::strcmp(first.what, lane.what) == 0, here = site_of(first.place) == site_of(lane.place);
    if (!same || !here || first.operand != operand) {
      section.parted = true;
      Finding finding = block.finding("divergent collective", lane.place, lane);
      finding.message = std::string("is in ") + lane.what + ", and another warp of its warpgroup in " +
                        (same ? "that" : first.what) + (here ? " with another operand" : " of another line") +
                        ": all four execute the same one, or none (.aligned)";
      finding.has_other = true;
      finding.other = first.place, finding.other_block = first.lane->block_index, finding.other_thread = first.lane->thread;
      block.findings.add(std::move(finding));
    }
  }
  ++reached.step;
  if (!product) return;
  ++reached.section, reached.step = 0;
  std::uint64_t oldest = reached.section;
  for (const auto& other : group.warps) oldest = std::min(oldest, other.section);
  for (; group.first < oldest; ++group.first) group.sections.pop_front();
}

// The block has ended. This reports what one warp executed and another never reached.
void Hopper::end_aligned() {
  for (std::size_t warp = 0; warp < block.warps.size() && !aligned.empty(); ++warp) {
    Aligned& group = aligned[warp / 4];
    const auto& reached = group.warps[warp % 4];
    if (reached.section - group.first >= group.sections.size()) continue;
    auto& section = group.sections[reached.section - group.first];
    if (section.parted || reached.step == section.steps.size()) continue;
    section.parted = true;
    const auto& missed = section.steps[reached.step];
    Finding finding = block.finding("divergent collective", missed.place, *missed.lane);
    finding.message = std::string("is in ") + missed.what + ", to which warp " + number(warp % 4) +
                      " of its warpgroup never comes: all four execute the same one, or none (.aligned)";
    block.findings.add(std::move(finding));
  }
}

// The end

void Hopper::finished(Lane& lane) {
  leave_products(lane);
  const auto found = stores.find(lane.number);
  if (found == stores.end()) return;
  for (const auto& store : found->second.list)
    if (!store.read && block.launch.sanitize()) {
      add_shared(lane, "wait forgotten", "ends while its copy still reads SRAM", store.box.place, store.box.sram, CHUNK);
      break;
    }
  ++found->second.group;
  wait_stores(lane, 0, false);
}

void Hopper::end() {
  if (!block.launch.sanitize()) return;
  for (const auto& [address, m] : mbarriers)
    for (const Box& box : m.loads) {
      if (m.coming > m.expected)
        add_mbarrier(*box.lane, "mbarrier", "asks for bytes that no phase expects: " + state_of(m), box.place, address);
      else
        add_shared(*box.lane, "wait forgotten", "asks for a copy, and the block ends without anybody having waited for it",
                   box.place, box.sram, CHUNK);
      break;
    }
  end_aligned();
}

}  // namespace emulator

using namespace emulator;

void emu_mbarrier_init(unsigned address, unsigned arrivals) {
  Lane& lane = current_lane();
  Block& block = *lane.block;
  Hopper& hopper = *block.hopper;
  if (hopper.mbarriers.count(address)) return add_mbarrier(lane, "mbarrier", "initialises an mbarrier twice", HERE, address);
  if (!check_shared(lane, address, MBARRIER_BYTES, true, false, HERE)) block.abort();
  if (address % MBARRIER_BYTES) block.abort();
  if (arrivals < 1 || arrivals > MOST_ARRIVALS) {
    const std::string possible = " arrivals: there may be 1 to " + number(MOST_ARRIVALS);
    add_mbarrier(lane, "mbarrier", "initialises an mbarrier with phases of " + number(arrivals) + possible, HERE, address);
    block.abort();
  }
  Mbarrier m;
  m.address = address;
  m.arrivals = m.missing = arrivals;
  m.agent = block.clocks.add_agent();
  m.made.block = static_cast<std::uint32_t>(block.number);
  m.made.clock = block.clocks.now(lane.number);
  m.made.thread = m.made.issuer = static_cast<std::uint16_t>(lane.number);
  m.made.place = HERE;
  if (block.launch.sanitize()) std::memset(&block.sram.state[address], MBARRIER, MBARRIER_BYTES);
  hopper.mbarriers.emplace(address, std::move(m));
}

void emu_mbarrier_publish() {
  Lane& lane = current_lane();
  for (auto& [address, m] : lane.block->hopper->mbarriers) m.published = m.published || m.made.thread == lane.number;
}

void emu_mbarrier_arrive(unsigned address, unsigned expected_bytes) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  hopper.arrive(lane, hopper.mbarrier(lane, address, HERE), expected_bytes, HERE);
}

int emu_mbarrier_try_wait(unsigned address, unsigned parity) {
  Lane& lane = current_lane();
  Block& block = *lane.block;
  Hopper& hopper = *block.hopper;
  Mbarrier& m = hopper.mbarrier(lane, address, HERE);
  lane.place = HERE;
  lane.what = "an mbarrier";
  if ((m.phase & 1) == (parity & 1)) {
    const std::uint32_t phase = m.phase;
    hopper.try_complete(m, lane, HERE);
    if (m.phase == phase) {
      auto& wait = hopper.waits[lane.number];
      wait.address = address, wait.phase = phase, wait.woken = false;
      lane.wait = Wait::mbarrier;
      block.yield();
      hopper.waits[lane.number].woken = false;
      if (m.phase == phase) return 0;
    }
  }
  block.clocks.acquire(lane.number, m.completed);
  return 1;
}

void emu_fence_async() {
  Lane& lane = current_lane();
  lane.block->clocks.fence(lane.number);
  emu_mbarrier_publish();
}

// Registers. A block has those that it was launched with: as many as launch bounds allow, evenly shared.

static unsigned registers_of(const Block& block) {
  const auto threads = static_cast<unsigned>(block.lanes.size());
  return std::min(SM_REGISTERS / threads / 8 * 8, MOST_REGISTERS);
}

static void setmaxnreg_of_warp(Warp& warp, unsigned) {
  Block& block = *warp.block;
  Lane& lane = *warp.lanes[0];
  if (!lane.operands.in[2]) block.hopper->execute_aligned(warp, lane.operands.in[0]);
  auto& mine = block.hopper->most_registers;
  if (mine.empty()) mine.assign(block.warps.size(), registers_of(block));
  const auto count = static_cast<unsigned>(lane.operands.in[0]);
  const bool claim = lane.operands.in[1];
  const unsigned before = mine[warp.number];
  std::string wrong;
  if (count % 8 || count < 24 || count > 256)
    wrong = "asks for " + number(count) + " registers a thread: it must be a multiple of 8, 24 to 256";
  else if (claim ? count < before : count > before)
    wrong = std::string(claim ? "claims " : "keeps ") + number(count) + " registers a thread, and has " + number(before);
  if (!wrong.empty()) {
    Finding finding = block.finding("registers", lane.place, lane);
    finding.message = wrong + " (setmaxnreg)";
    block.findings.add(std::move(finding));
    for (Lane* each : warp.lanes)
      if (each) each->operands.out[0] = 1;
    return;
  }
  unsigned others = 0;
  for (const auto& other : block.warps) others += other.number == warp.number ? 0 : mine[other.number];
  const bool fits = others + count <= registers_of(block) * block.warps.size();
  if (fits) mine[warp.number] = count, ++block.hopper->handovers;
  for (Lane* each : warp.lanes)
    if (each) each->operands.out[0] = fits, each->operands.out[1] = block.hopper->handovers;
  for (auto& each : block.lanes)
    if (fits && each->wait == Wait::registers) block.wake(*each);  // there may be enough for it now
}

void emu_setmaxnreg(unsigned count, int claim) {
  Lane& lane = current_lane();
  for (bool again = false;; again = true) {
    lane.operands.in[0] = count, lane.operands.in[1] = claim != 0, lane.operands.in[2] = again;
    meet(setmaxnreg_of_warp, "setmaxnreg", ALL_LANES, true, HERE);
    if (lane.operands.out[0]) return;
    if (lane.block->hopper->handovers != lane.operands.out[1]) continue;  // they have changed since the answer, so it may fit now
    lane.wait = Wait::registers;
    lane.what = "registers that no other warpgroup gives up";
    lane.block->yield();
  }
}
