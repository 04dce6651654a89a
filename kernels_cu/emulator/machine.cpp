#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "faults.h"
#include "fiber.h"
#include "hopper.h"
#include "launch.h"

#if defined(__x86_64__)
EMU_DEFINE_SWITCH_X86_64;
#else
EMU_DEFINE_SWITCH_AARCH64;
#endif

namespace emulator {

thread_local Thread* current = nullptr;

namespace {

constexpr std::size_t STACK_BYTES = 576 * 1024;  // of a lane: local memory and some more, touched as needed
constexpr std::size_t GUARD_BYTES = 4096;

void try_meet(Lane& lane, Lane* running);  // below

// Where a lane's fiber begins, and ends.
void lane_main() {
  Lane& lane = current_lane();
  Block& block = *lane.block;
  block.launch.given.entry(block.launch.given.arguments);
  block.finished(lane);
  block.yield();  // never resumed
  __builtin_unreachable();
}

uint3 place_in(std::uint64_t number, const unsigned (&extent)[3]) {
  return {static_cast<unsigned>(number % extent[0]), static_cast<unsigned>(number / extent[0] % extent[1]),
          static_cast<unsigned>(number / extent[0] / extent[1])};
}

std::string lanes_of(unsigned mask) {
  std::string text;
  for (int lane = 0; lane < WARP; ++lane) {
    if (!(mask >> lane & 1)) continue;
    int last = lane;
    while (last + 1 < WARP && mask >> (last + 1) & 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(lane) + (last > lane ? "-" + std::to_string(last) : "");
    lane = last;
  }
  return text;
}

}  // namespace

unsigned Warp::live() const {
  unsigned mask = 0;
  for (int lane = 0; lane < WARP; ++lane)
    if (lanes[lane] && !lanes[lane]->done) mask |= 1u << lane;
  return mask;
}

Block::Block(Launch& launch) : launch(launch) {
  const auto& size = launch.given.block;
  const std::uint64_t threads = std::uint64_t{size[0]} * size[1] * size[2];
  warps.resize((threads + WARP - 1) / WARP);
  for (std::uint64_t i = 0; i < threads; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->thread = place_in(i, size);
    lane->block_dim = {size[0], size[1], size[2]};
    lane->grid_dim = {launch.given.grid[0], launch.given.grid[1], launch.given.grid[2]};
    lane->lane = static_cast<int>(i % WARP);
    lane->number = static_cast<int>(i);
    lane->block = this;
    lane->warp = &warps[i / WARP];
    lane->warp->block = this;
    lane->warp->number = static_cast<int>(i / WARP);
    lane->warp->lanes[lane->lane] = lane.get();
    lanes.push_back(std::move(lane));
  }
  stack_bytes_ = threads * STACK_BYTES;
  void* stacks = mmap(nullptr, stack_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return;
  stacks_ = static_cast<char*>(stacks);
  for (auto& lane : lanes) {
    char* stack = stacks_ + lane->number * STACK_BYTES;
    mprotect(stack, GUARD_BYTES, PROT_NONE);  // an overflow stops here
    lane->stack = stack, lane->stack_end = stack + STACK_BYTES;
  }
  sram.lay_out(launch.given.dynamic_sram);
}

Block::~Block() {
  if (stacks_) munmap(stacks_, stack_bytes_);
}

void Block::run(std::uint64_t index) {
  number = index;
  ++launch.resident;
  aborted = false;
  exited = 0;
  live = static_cast<int>(lanes.size());
  clocks.reset(live);
  handed.clear();
  sram.clear();
  for (auto& barrier : barriers) barrier = {};
  hopper = std::make_unique<Hopper>(*this);
  ready.clear();
  for (auto& lane : lanes) {
    lane->block_index = place_in(index, launch.given.grid);
    lane->stack_pointer = new_fiber(static_cast<char*>(lane->stack), STACK_BYTES, lane_main);
    lane->done = false;
    lane->step = "";
    lane->wait = Wait::nothing;
    lane->group = 0;
    lane->spins = 0;
    lane->heard = {};
    lane->reads = {};
    lane->copies.clear();
    lane->told = nullptr;
    lane->active = 0;
    lane->counters = &counters;
    ++lane->interval;
    wake(*lane);
  }
  sigjmp_buf here;
  landing = &here;
  const bool fell = sigsetjmp(here, 1) != 0;
  if (!fell) schedule();
  landing = nullptr;  // a fault in what follows ends the process, as in a heap that the kernel broke
  if (fell) faulted();
  settle();
  --launch.resident;
  if (idle) idle = false, --launch.idle;
  if (!live) hopper->end(), launch.grid.left(number);
  for (auto& warp : warps) warp.log.flush(ledger);
  current = nullptr;
}

void Block::schedule() {
  for (std::uint64_t turns = 0; live && !aborted && !launch.stop; ++turns) {
    if (ready.empty() && !gather() && !hopper->go_on() && !at_grid()) return diagnose();
    if (aborted) return;
    if (turns % 256 == 255 && launch.late()) return too_late(*ready.front(), ready.front()->place);
    running = ready.front();
    ready.pop_front();
    running->queued = false;
    current = running;
    emu_switch(&scheduler, running->stack_pointer);
  }
}

// The processor refused to go on with the running lane, or `watch` did.
void Block::faulted() {
  aborted = true;
  Lane& lane = *running;
  if (fault.signal == LATE) return too_late(lane, fault.place);
  const auto* at = static_cast<const char*>(fault.address);
  Finding found = finding(fault.signal == SIGFPE ? "division by zero" : "fault", fault.place, lane);
  if (fault.signal == SIGFPE)
    found.message = "divides by zero, or the least integer by -1";
  else if (at >= lane.stack - STACK_BYTES && at < lane.stack + GUARD_BYTES)
    found.message = "needs more than " + std::to_string(STACK_BYTES / 1024) +
                    " KB for local variables: large arrays, or calls that never return";
  else if (fault.signal == SIGILL)
    found.message = "runs into an illegal instruction";
  else
    found.message = "touches or calls what isn't memory";
  findings.add(std::move(found));
}

// If memory hasn't changed, both stored the same value.
void Block::settle() {
  if (undecided.empty()) return;
  for (auto& [finding, at, before] : undecided) {
    const bool same = std::memcmp(at, before, finding.bytes) == 0;
    if (same) finding.kind = "same value", finding.message = "writes what another thread wrote, too: the same value";
    (same ? notes : findings).add(std::move(finding));
  }
  undecided.clear();
}

void Block::yield() { settle(), emu_switch(&running->stack_pointer, scheduler); }

void Block::wake(Lane& lane) {
  lane.wait = Wait::nothing;
  if (!lane.queued) ready.push_back(&lane);
  lane.queued = true;
}

void Block::abort() {
  aborted = true;
  yield();
  __builtin_unreachable();
}

void Block::finished(Lane& lane) {
  leave_copies(lane);
  hopper->finished(lane);
  lane.done = true;
  --live;
  ++exited;
  for (int id = 0; id < NAMED_BARRIERS; ++id) check_barrier(id);  // now all that the waiting threads wait for may be there
  for (Lane* other : lane.warp->lanes)
    if (other && !other->done && other->wait == Wait::collective) try_meet(*other, nullptr);
}

Finding Block::finding(const char* kind, Place place, const Lane& lane) const {
  Finding finding;
  finding.kind = kind;
  finding.place = place;
  finding.step = lane.step;
  finding.block = lane.block_index;
  finding.thread = lane.thread;
  return finding;
}

void Block::tell_other(Finding& finding, const Access& other) const {
  finding.has_other = true;
  finding.other = other.place;
  finding.other_block = place_in(other.block, launch.given.grid);
  finding.other_thread = lanes[other.issuer]->thread;
}

void Block::tell_other(Finding& finding, const Lane& other) const {
  finding.has_other = true;
  finding.other = other.place, finding.other_block = other.block_index, finding.other_thread = other.thread;
}

// Collectives

namespace {

[[noreturn]] void divergent(Lane& lane, const std::string& message, const Lane* other = nullptr) {
  Block& block = *lane.block;
  Finding finding = block.finding("divergent collective", lane.place, lane);
  finding.message = message;
  if (other) block.tell_other(finding, *other);
  block.findings.add(std::move(finding));
  block.abort();
}

// Lets the lanes that wait with `lane` go on, if all lanes that it waits for are there. `running` needn't be woken.
void try_meet(Lane& lane, Lane* running) {
  Block& block = *lane.block;
  Warp& warp = *lane.warp;
  const unsigned live = warp.live(), there = lane.mask & live;
  for (int i = 0; i < WARP; ++i) {
    const Lane* other = warp.lanes[i];
    if (there >> i & 1 && !(other->wait == Wait::collective && other->collective == lane.collective && other->mask == lane.mask))
      return;
  }
  for (int i = 0; i < WARP; ++i)
    if (lane.collective != sync_of_warp && there >> i & 1 && site_of(warp.lanes[i]->place) != site_of(lane.place))
      divergent(lane, std::string("is in ") + lane.what + ", and lane " + std::to_string(i) + " in that of another line", warp.lanes[i]);
  lane.collective(warp, there);
  if (there == live) warp.reconverge(live);
  for (int i = 0; i < WARP; ++i)
    if (there >> i & 1) {
      warp.lanes[i]->wait = Wait::nothing;
      if (warp.lanes[i] != running) block.wake(*warp.lanes[i]);
    }
}

}  // namespace

void meet(Collective work, const char* what, unsigned mask, bool aligned, Place place) {
  Lane& lane = current_lane();
  lane.place = place;
  lane.what = what;
  if (!(mask >> lane.lane & 1)) divergent(lane, std::string("calls ") + what + " with a mask that lacks its own lane, " + std::to_string(lane.lane));
  unsigned ended = 0;
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1 && lane.warp->lanes[i] && lane.warp->lanes[i]->done) ended |= 1u << i;
  if (aligned && ended) divergent(lane, std::string("is in ") + what + " without lanes " + lanes_of(ended) + ", which have ended");
  if (!aligned && mask == lane.active) {
    Finding note = lane.block->finding("active mask", place, lane);
    note.message = std::string("calls ") + what + " with the lanes that __activemask() said: those that happened to be together";
    note.has_other = true;
    note.other = lane.active_at, note.other_block = lane.block_index, note.other_thread = lane.thread;
    lane.block->notes.add(std::move(note));
    lane.active = 0;  // said once
  }
  lane.wait = Wait::collective;
  lane.collective = work;
  lane.mask = mask;
  try_meet(lane, &lane);
  if (lane.wait != Wait::nothing) lane.block->yield();
}

void sync_of_warp(Warp& warp, unsigned mask) {
  Horizon seen;
  Clocks& clocks = warp.block->clocks;
  for (const Lane* lane : warp.lanes)
    if (lane && mask >> lane->lane & 1) clocks.release(lane->number, seen);
  for (const Lane* lane : warp.lanes)
    if (lane && mask >> lane->lane & 1) clocks.acquire(lane->number, seen);
}

// The warp's lanes are together: what they do next, they do together.
void Warp::reconverge(unsigned mask) {
  log.flush(block->ledger);
  std::uint32_t interval = 0;
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1) interval = std::max(interval, lanes[i]->interval + 1);
  for (int i = 0; i < WARP; ++i)
    if (mask >> i & 1) lanes[i]->interval = interval;
}

// __activemask(): lanes run one after the other, so this doesn't show how they diverge. All run as far as they can. The lanes of
// a warp that are then at the same place are together.
bool Block::gather() {
  std::vector<Lane*> asking;
  for (const auto& lane : lanes) {
    if (lane->done || lane->wait != Wait::others) continue;
    lane->operands.out[0] = 0;
    for (const Lane* other : lane->warp->lanes)
      if (other && !other->done && other->wait == Wait::others && site_of(other->place) == site_of(lane->place))
        lane->operands.out[0] |= 1u << other->lane;
    asking.push_back(lane.get());
  }
  for (Lane* lane : asking) wake(*lane);
  return !asking.empty();
}

// Barriers

namespace {

// The first thread says how many threads a named barrier takes. The others must say the same.
void join(Lane& lane, NamedBarrier& barrier, int threads, Place place) {
  if (barrier.waiting.empty() && !barrier.arrived) barrier.place = place, barrier.threads = threads;
  if (threads == barrier.threads && threads % WARP == 0) return;
  Finding found = lane.block->finding("barrier", place, lane);
  found.message = "comes to a barrier of " + std::to_string(threads) + " threads, ";
  found.message += threads % WARP ? "which isn't a multiple of a warp"
                                  : "and another thread to the same one of " + std::to_string(barrier.threads);
  lane.block->findings.add(std::move(found));
}

}  // namespace

void wait_barrier(int id, int threads, Place place) {
  Lane& lane = current_lane();
  Block& block = *lane.block;
  NamedBarrier& barrier = block.barriers[id];
  join(lane, barrier, threads, place);
  lane.take_over(true);
  lane.wait = Wait::barrier;
  lane.place = place;
  lane.what = "a barrier";
  lane.barrier = id;
  barrier.waiting.push_back(&lane);
  block.check_barrier(id);
  block.yield();  // the last thread, too: it is one of those that were woken
}

void arrive_barrier(int id, int threads, Place place) {
  Lane& lane = current_lane();
  NamedBarrier& barrier = lane.block->barriers[id];
  join(lane, barrier, threads, place);
  ++barrier.arrived;
  lane.block->clocks.release(lane.number, barrier.seen);
  lane.block->check_barrier(id);
}

// Opens a barrier if all threads are there. With `threads` 0 it is the whole block's: no thread may be missing, or come from
// elsewhere.
void Block::check_barrier(int id) {
  NamedBarrier& barrier = barriers[id];
  const int there = barrier.arrived + static_cast<int>(barrier.waiting.size());
  if (there == 0 || barrier.waiting.empty()) {
    if (barrier.threads && there == barrier.threads) barrier = {};
    return;
  }
  if (there < (barrier.threads ? barrier.threads : live)) return;
  Lane& first = *barrier.waiting.front();
  if (!barrier.threads) {
    if (exited) {
      Finding found = finding("barrier", first.place, first);
      found.message = "waits at a barrier to which " + std::to_string(exited) + " of the block's threads don't come: they have ended";
      findings.add(std::move(found));
    }
    for (Lane* lane : barrier.waiting)
      if (site_of(lane->place) != site_of(first.place)) {
        Finding found = finding("barrier", lane->place, *lane);
        found.message = "waits at a barrier, and other threads of the block at that of another line";
        tell_other(found, first);
        findings.add(std::move(found));
        break;
      }
  }
  if (!barrier.threads && !exited) {
    clocks.join_all();
  } else {
    auto seen = std::move(barrier.seen);
    for (Lane* lane : barrier.waiting) clocks.release(lane->number, seen);
    for (Lane* lane : barrier.waiting) clocks.acquire(lane->number, seen);
  }
  auto waiting = std::move(barrier.waiting);
  if (!barrier.threads) tell_shared(*this);
  for (Lane* lane : waiting) tell_barrier(*lane);
  barrier = {};
  for (Lane* lane : waiting) wake(*lane);
  for (Warp& warp : warps) {  // a barrier that a whole warp passes brings its lanes together, as a collective does
    unsigned passed = 0;
    for (const Lane* lane : waiting)
      if (lane->warp == &warp) passed |= 1u << lane->lane;
    if (passed && passed == warp.live()) warp.reconverge(passed);
  }
}

// No lane can run, and some haven't ended. Which one waits for which?
void Block::diagnose() {
  hopper->deadlock();
  auto told = [](const Lane& lane) {
    return lane.done || lane.wait == Wait::mbarrier || lane.wait == Wait::warpgroup || lane.wait == Wait::registers;
  };
  for (auto& warp : warps)
    for (int i = 0; i < WARP; ++i) {
      const Lane* lane = warp.lanes[i];
      if (!lane || lane->done || lane->wait != Wait::collective) continue;
      unsigned missing = 0;
      const Lane* elsewhere = nullptr;
      for (int j = 0; j < WARP; ++j) {
        const Lane* other = warp.lanes[j];
        if (!(lane->mask >> j & 1) || !other || other->done) continue;
        if (other->wait == Wait::collective && other->collective == lane->collective && other->mask == lane->mask) continue;
        missing |= 1u << j;
        elsewhere = other;
      }
      if (!missing || told(*elsewhere)) continue;
      Finding found = finding("divergent collective", lane->place, *lane);
      found.message = std::string("waits in ") + lane->what + " for lanes " + lanes_of(missing) + ", which wait for " + elsewhere->what;
      tell_other(found, *elsewhere);
      findings.add(std::move(found));
      return;
    }
  const Lane* first = nullptr;
  std::string waits;
  for (auto& lane : lanes)
    if (!told(*lane) && !first) first = lane.get();
  if (!first) return;
  int at_barrier = 0;
  for (auto& lane : lanes) at_barrier += !lane->done && lane->wait == Wait::barrier;
  Finding found = finding(at_barrier == live ? "barrier" : "deadlock", first->place, *first);
  found.message = std::string("waits for ever for ") + first->what;
  if (const auto& barrier = barriers[first->barrier]; first->wait == Wait::barrier && barrier.threads)
    found.message += " that takes " + std::to_string(barrier.threads) + " threads, as " +
                     std::to_string(barrier.waiting.size()) + " do";
  else if (live > 1)
    found.message += ", as " + std::to_string(live - 1) + " others do";
  for (auto& lane : lanes)
    if (!lane->done && site_of(lane->place) != site_of(first->place)) {
      found.message += std::string(", some for ") + lane->what;
      tell_other(found, *lane);
      break;
    }
  findings.add(std::move(found));
}

// Findings

namespace {

bool earlier(const Finding& a, const Finding& b) {
  return std::tie(a.block.z, a.block.y, a.block.x) < std::tie(b.block.z, b.block.y, b.block.x);
}

}  // namespace

void Findings::add(Finding finding) {
  for (auto& known : list)
    if (known.kind == finding.kind && known.guess == finding.guess && site_of(known.place) == site_of(finding.place) && known.tensor == finding.tensor) {
      finding.times += known.times;
      if (earlier(finding, known)) std::swap(known, finding);  // that of the first block by number, whichever ran first
      known.times = std::max(known.times, finding.times);
      return;
    }
  if (list.size() < LIMIT)
    list.push_back(std::move(finding));
  else
    ++dropped;
}

void Findings::merge(const Findings& others) {
  for (const auto& finding : others.list) add(finding);
  dropped += others.dropped;
  std::stable_sort(list.begin(), list.end(), earlier);
}

}  // namespace emulator
