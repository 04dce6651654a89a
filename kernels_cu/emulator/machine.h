// The machine: the lanes, warps and blocks of one launch, and how they wait for each other.
//
//   a launch    has the blocks of a grid. Threads of the operating system ("SMs") share them.
//   a block     has warps, SRAM and barriers. It runs on one SM from beginning to end.
//   a lane      is a fiber (fiber.h). It runs until it must wait: for the lanes of its warp (a collective), for the
//               threads of its block (a barrier), or for an mbarrier. Then the next lane that can run does.
//
// Lanes run one after the other, in the order of their numbers. So each run is the same. This hides no race: the detection looks
// at what orders accesses (memory.h), and not at the order in which they happen to run.
#pragma once
#include "emu_hide_names.h"

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
#include "told.h"

namespace emulator {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int NAMED_BARRIERS = 16;

struct Block;
struct Hopper;
struct Launch;
struct Warp;

// What a lane waits for. With `others` it waits until all other lanes have run as far as they can.
enum class Wait { nothing, collective, barrier, grid, mbarrier, warpgroup, registers, others };

// The operands of a collective: a lane's inputs and its results.
struct Operands {
  std::uint64_t in[5], out[4];
  struct { std::uint32_t a[4], b[2]; float c[4]; int together; } mma;  // this lane's part of A, B and C in mma.sync m16n8k16
};

// Work that is done for the whole warp when its last lane arrives. The lanes in `mask` take part.
using Collective = void (*)(Warp&, unsigned mask);

struct Lane : Thread {
  void* stack_pointer = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  char *stack = nullptr, *stack_end = nullptr;
  int number = 0;  // in the block
  bool done = false, queued = false;

  Wait wait = Wait::nothing;
  Place place{};           // where it waits, or has let others run
  const char* what = "";   // for which call, in words: "__shfl_sync"
  Collective collective = nullptr;
  unsigned mask = 0;
  int barrier = 0;
  Operands operands{};

  std::uint32_t interval = 0;              // how many collectives the whole warp has had: see Warp::log
  std::vector<std::uint64_t> occurrences;  // by site: interval << 32 | how often the site came in it
  std::vector<Copy> copies;                // by copy_async, not yet waited for, oldest first
  unsigned group = 0;                      // the group of the next copies
  Telling* told = nullptr;                 // its record, if it is told of
  std::uint32_t polls = 0;                 // how often it passed a place where it may be in a loop

  unsigned active = 0;   // what __activemask() said last, and where
  Place active_at{};

  struct Read { const void* address = nullptr; Place place{}; };
  std::array<Read, 4> reads{};  // its latest plain ones, which a compare-and-swap may check
  unsigned read_count = 0;

  // A loop that waits for others reads one place again and again, by atomics or volatile. It touches nothing else.
  const void* spins_on = nullptr;
  std::uint32_t spins = 0, spun_at = 0;  // how often in a row, and `polls` at the last time

  Heard heard;
  void fence(bool everywhere);                        // for all blocks, or its own only
  void take_over(bool everywhere);                    // what was handed on where it has read
  void hand_on(const void* address, bool shared);     // an atomic or volatile store: what it had ready by a fence

  bool in(unsigned mask) const { return mask >> lane & 1; }
  bool spinning() const;
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
  int threads = 0;  // how many threads it takes; 0: all of the block
  int arrived = 0;  // how many threads have come and don't wait
  std::vector<Lane*> waiting;
  Place place{};                    // where the first thread came to it
  Horizon seen;                     // what the threads that didn't wait had seen (Clocks)
};

// One "SM": what a block needs, on a thread of the operating system. Blocks use it one after the other.
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
  bool has_stacks() const { return stacks_ != nullptr; }
  bool aborted = false;
  bool idle = false;  // it waited, when last asked

  Sram sram;
  std::array<NamedBarrier, NAMED_BARRIERS> barriers;
  Clocks clocks;
  Handed handed;  // within this block
  std::unique_ptr<Hopper> hopper;  // mbarriers, copies of boxes, products of warpgroups
  Counters counters;
  Ledger ledger;
  Findings findings, notes;  // a note looks like a misuse, and is harmless
  Findings guesses;          // findings or notes: which one, the end of the launch tells
  struct Undecided {
    Finding finding;
    const char* at;
    char before[CHUNK];
  };
  std::vector<Undecided> undecided;  // stores that have yet to happen, where another thread has stored
  void settle();                     // they have happened

  void yield();  // the running lane waits; returns when it may go on
  void wake(Lane& lane);
  void poll(Lane& lane, Place place);  // the lane may be in a loop without end, so this lets other lanes run now and then
  void spin(Lane& lane, const void* address, Place place);  // an atomic or volatile access, which may be what a loop waits for
  [[noreturn]] void abort();           // the running lane found a misuse after which the block can't go on
  void finished(Lane& lane);
  void check_barrier(int id);
  bool gather();    // no lane can run: answers the lanes that wait in __activemask
  bool at_grid();   // no lane can run: they wait for the other blocks of the grid
  void diagnose();  // no lane can run: reports why
  Finding finding(const char* kind, Place place, const Lane& lane) const;
  void tell_other(Finding& finding, const Access& other) const;
  void tell_other(Finding& finding, const Lane& other) const;

 private:
  void schedule();  // runs lanes until all have ended, or none can go on
  void faulted();
  void too_late(const Lane& lane, Place place);
  bool waits() const;  // does each of its lanes wait, or spin?

  char* stacks_ = nullptr;
  std::size_t stack_bytes_ = 0;
};

// The lane that runs on this thread of the operating system.
inline Lane& current_lane() { return static_cast<Lane&>(*current); }

// The running lane meets the others in `mask`. The last one does `work` for all of them. With `aligned`, all must come from the
// same place in the source.
void meet(Collective work, const char* what, unsigned mask, bool aligned, Place place);

// The work of __syncwarp: each lane sees what the others did. They may come from different lines.
void sync_of_warp(Warp& warp, unsigned mask);

// A barrier of `threads` threads (0: all of the block). The first function waits until all have come. The second doesn't wait.
void wait_barrier(int id, int threads, Place place);
void arrive_barrier(int id, int threads, Place place);

}  // namespace emulator

#include "emu_show_names.h"
