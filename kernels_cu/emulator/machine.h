// The machine: lanes, warps and blocks of one launch, and what holds them together.
//
//   a launch    blocks of a grid, shared out among threads of the operating system ("SMs")
//   a block     its warps, its SRAM, its barriers; runs on one SM from beginning to end
//   a lane      a fiber (fiber.h). It runs until it must wait: for the lanes of its warp (a collective), for the threads
//               of its block (a barrier), or for an mbarrier. Then the next one that can run does
//
// Lanes run one after the other, in the order of their numbers, so a run is the same each time. That hides no race: it isn't
// the order of accesses that is looked at but what was promised about it (memory.h).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "counts.h"
#include "memory.h"
#include "report.h"
#include "thread.h"

namespace emulator {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int NAMED_BARRIERS = 16;

struct Block;
struct Hopper;
struct Launch;
struct Warp;

// What a lane waits for.
// others: to run as far as they can
enum class Wait { nothing, collective, barrier, mbarrier, warpgroup, registers, others };

// The operands of a collective: what a lane brings, and what it takes away.
struct Operands {
  std::uint64_t in[4], out[4];
  struct { std::uint32_t a[4], b[2]; float c[4]; } mma;  // as mma.sync m16n8k16 spreads A, B and C
};

// Work that the whole warp does at once when its last lane arrives; `mask` are the lanes that take part.
using Collective = void (*)(Warp&, unsigned mask);

struct Lane : Thread {
  void* stack_pointer = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  char *stack = nullptr, *stack_end = nullptr;
  int number = 0;  // in the block
  bool done = false, queued = false;

  Wait wait = Wait::nothing;
  Place place{};           // where it waits
  const char* what = "";   // in words: "__shfl_sync"
  Collective collective = nullptr;
  unsigned mask = 0;
  int barrier = 0;
  Operands operands{};

  std::uint32_t interval = 0;             // collectives of the whole warp so far: see Warp::log
  std::vector<std::uint64_t> occurrences;  // by site: interval << 32 | how often in it
  std::vector<Copy> copies;                // copy_async that weren't waited for, oldest first
  unsigned group = 0;                      // of the copies that come next
  std::uint32_t since_switch = 0;

  bool in(unsigned mask) const { return mask >> lane & 1; }
};

struct Warp {
  Block* block = nullptr;
  int number = 0;
  Lane* lanes[WARP] = {};  // null past the block's last thread
  WarpLog log;

  unsigned live() const;
  void reconverge(unsigned mask);
};

struct NamedBarrier {
  int threads = 0;  // that it takes; 0: all of the block
  int arrived = 0;  // threads that came and didn't wait
  std::vector<Lane*> waiting;
  Place place{};        // of the first
  std::vector<std::uint32_t> seen;  // what those who arrived without waiting had seen
};

// One "SM": a thread of the operating system with what a block needs. Blocks use it one after the other.
struct Block {
  explicit Block(Launch& launch);
  ~Block();

  void run(std::uint64_t number);  // one block of the grid

  Launch& launch;
  std::uint64_t number = 0;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<Warp> warps;
  std::deque<Lane*> ready;
  Lane* running = nullptr;
  void* scheduler = nullptr;  // the stack pointer of run()
  int live = 0, exited = 0;
  bool aborted = false;

  Sram sram;
  std::array<NamedBarrier, NAMED_BARRIERS> barriers;
  Clocks clocks;
  std::unique_ptr<Hopper> hopper;  // mbarriers, copies of boxes, products of warpgroups
  Counters counters;
  Ledger ledger;
  Findings findings;

  void yield();                // the running lane waits; returns when it may go on
  void wake(Lane& lane);
  void poll(Lane& lane, Place place);  // an access that may be one of a loop that waits: lets the others run now and then
  [[noreturn]] void abort();  // the running lane found what the block can't go on after
  void finished(Lane& lane);
  void check_barrier(int id);
  bool gather();  // nobody can run: lanes that ask who is with them learn it
  void diagnose();  // nobody can run: says why
  Finding finding(const char* kind, Place place, const Lane& lane) const;
  void tell_other(Finding& finding, const Access& other) const;
  void tell_other(Finding& finding, const Lane& other) const;

 private:
  void schedule();  // until all lanes have ended, or can't
  void faulted();
  void too_late(const Lane& lane, Place place);

  char* stacks_ = nullptr;
  std::size_t stack_bytes_ = 0;
};

// The lane that runs on this thread of the operating system.
inline Lane& current_lane() { return static_cast<Lane&>(*current); }

// The running lane and the others in `mask` meet; the last one to come does `work` for all. `aligned`: all must come from
// the same place in the source.
void meet(Collective work, const char* what, unsigned mask, bool aligned, Place place);

// The work of __syncwarp: its lanes see what each of them did. Its lanes may come from different lines.
void sync_of_warp(Warp& warp, unsigned mask);

// A barrier: waits until `threads` have come (0: all of the block), or comes without waiting.
void wait_barrier(int id, int threads, Place place);
void arrive_barrier(int id, int threads, Place place);

}  // namespace emulator
