// Memory that knows what was promised about it. Beside each byte lies whether it was written; beside each chunk of 16 bytes
// who touched it, when, and whether he wrote. "When" is a vector clock: two accesses of one chunk, one of them a write, are a
// race unless a barrier (or what else orders threads) lies between them, whatever order they happened to run in.
//
// The detection is FastTrack's (Flanagan and Freund, PLDI 2009), with lists of readers in place of its adaptive epochs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "report.h"

namespace emulator {

struct Lane;
struct Block;

constexpr unsigned CHUNK = 16;
constexpr unsigned SRAM_ORIGIN = 1024;  // the first shared address: as on a GPU, 0 is nobody's
constexpr unsigned char POISON = 0xff;  // a NaN in every floating-point format

// PENDING: a copy is on its way there. MBARRIER: nobody's to read or write.
enum State : unsigned char { UNWRITTEN, WRITTEN, PENDING, MBARRIER };

// One thread's latest access of its kind to a chunk.
struct Access {
  std::uint32_t block, clock;
  std::uint16_t thread;  // a thread's number, or an agent's (Clocks)
  std::uint16_t bytes;   // a bit for each byte of the chunk
  bool write, atomic;
  std::uint16_t issuer;  // the thread that made it, or asked an agent for it
  Place place;
};
using Accesses = std::vector<Access>;

// What each thread has seen of the others: their clocks, as far as it was told of them. A thread's own clock advances
// whenever others may learn of it. After a barrier of the whole block everybody has seen everything up to `floor`.
//
// Engines that work beside the threads (TMA, wgmma) are agents. They have a column each, their clocks count what they
// completed, and a barrier says nothing of them. With the first agent comes a second column for each thread: up to which
// of its clocks its writes have been shown to the engines by a proxy fence.
struct Clocks {
  int threads = 0, width = 0, capacity = 0;  // columns: threads | their fences | agents
  std::uint32_t floor = 0;
  std::vector<std::uint32_t> seen;  // threads x capacity

  void reset(int threads);
  int add_agent();
  void watch_proxies();  // from here on there are fences and agents
  bool proxies() const { return width > threads; }
  std::uint32_t* of(int thread) { return &seen[static_cast<std::size_t>(thread) * capacity]; }
  std::uint32_t now(int thread) { return of(thread)[thread]; }
  bool happened_before(const Access& access, const std::uint32_t* knows) const {
    return (access.thread < threads && access.clock <= floor) || (access.thread < width && knows[access.thread] >= access.clock);
  }
  bool fenced(const Access& access, const std::uint32_t* knows) const {
    return access.thread >= threads || (proxies() && knows[threads + access.thread] >= access.clock);
  }
  void fence(int thread);  // what it knows of, engines see from here on
  void join_all();
  void release(int thread, std::vector<std::uint32_t>& into);  // others that acquire `into` see what this thread did
  void acquire(int thread, const std::vector<std::uint32_t>& from);
};

// An array in HBM. Inputs may not be written; what a kernel writes is watched for races between blocks, too.
struct Region {
  std::string name;
  char* base = nullptr;
  std::int64_t bytes = 0;
  bool input = false;
  unsigned char* state = nullptr;  // a State for each byte
  struct Chunk {
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
    Accesses accesses;
  };
  std::unique_ptr<Chunk[]> chunks;  // of what isn't an input

  bool holds(const void* address, std::int64_t n) const {
    auto* at = static_cast<const char*>(address);
    return at >= base && at + n <= base + bytes;
  }
};

// A block's SRAM, static and dynamic, in one range of shared addresses from SRAM_ORIGIN on.
struct Sram {
  char* statics = nullptr;  // where this thread's static arrays lie, for the compiler placed them
  char* dynamic = nullptr;
  unsigned static_bytes = 0, dynamic_begin = 0, end = 0;
  std::vector<unsigned char> state;
  std::vector<Accesses> chunks;

  struct Name { const char* name; unsigned begin, end; };
  std::vector<Name> statics_by_name, names;

  void lay_out(unsigned dynamic_bytes);
  void clear();
  bool holds(unsigned address, unsigned bytes) const { return address >= SRAM_ORIGIN && address + bytes <= end; }
  char* pointer(unsigned address) const;
  bool shared_address(const void* pointer, unsigned& address) const;
  const Name* name_of(unsigned address) const;
  const Name* before(unsigned address) const;
};

// A copy_async on its way: it takes effect when its thread waits for it, not before.
struct Copy {
  unsigned to;
  const char* from;
  unsigned bytes, kept;  // what it doesn't keep of `from` becomes zeros
  unsigned group;
  Place place;
  const char* step;
};

// Who makes an access: a lane, or an engine that it set to work.
struct Actor {
  Lane& lane;
  const std::uint32_t* knows;  // a row of clocks: what came before
  std::uint16_t thread;
  std::uint32_t clock;
  bool engine;
};

// Findings about bytes of HBM and of SRAM.
void add_global(Lane& lane, const char* kind, std::string message, Place place, const Region* region, const void* address,
                unsigned bytes, const Access* other = nullptr);
void add_shared(Lane& lane, const char* kind, std::string message, Place place, unsigned address, unsigned bytes,
                const Access* other = nullptr);

// The checks of an engine's accesses: of a chunk of SRAM, and of any number of bytes of HBM. False: there is nothing.
bool check_shared(const Actor& actor, unsigned chunk, bool write, Place place);
bool check_global(const Actor& actor, const void* address, unsigned bytes, bool write, Place place, Region*& region);

// The checks, each for one lane's access of 1 to 16 bytes. They add findings; false: there is nothing to access.
bool check_global(Lane& lane, const void* address, unsigned bytes, bool write, bool atomic, Place place, Region*& region);
bool check_shared(Lane& lane, unsigned address, unsigned bytes, bool write, bool atomic, Place place);
void begin_copy(Lane& lane, unsigned to, const void* from, unsigned bytes, unsigned kept, Place place);
void finish_copies(Lane& lane, unsigned pending);
void leave_copies(Lane& lane);  // at the thread's end

}  // namespace emulator
