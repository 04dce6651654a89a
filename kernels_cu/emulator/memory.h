// Memory that is watched. For each byte, it knows whether it was written. For each chunk of 16 bytes, it knows which
// threads touched it, when, and whether they wrote. "When" is a vector clock. Two accesses to one chunk are a race if
// one of them is a write and nothing (such as a barrier) orders them. The order in which they happened to run doesn't
// matter.
//
// The detection is that of FastTrack (Flanagan and Freund, PLDI 2009), with lists of readers in place of its adaptive
// epochs.
#pragma once
#include "emu_hide_names.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "order.h"
#include "report.h"

namespace emulator {

struct Lane;
struct Block;

constexpr unsigned CHUNK = 16;
constexpr unsigned SRAM_ORIGIN = 1024;  // the first shared address; as on a GPU, nothing lies at 0
constexpr unsigned char POISON = 0xff;  // a NaN in every floating-point format

// PENDING means that a copy to it is under way. No thread may read or write what is MBARRIER, or what is NOBODYS: a part of an
// array that the caller said belongs to nobody.
enum State : unsigned char { UNWRITTEN, WRITTEN, PENDING, MBARRIER, NOBODYS };

// A thread's latest access to a chunk, of one kind.
struct Access {
  std::uint32_t block, clock;
  std::uint16_t thread;  // the number of a thread or of an agent (Clocks)
  std::uint16_t bytes;   // a bit for each byte of the chunk
  bool write, atomic;    // atomic or volatile: it races with no other such access
  std::uint16_t issuer;  // the thread that made it, or that told an agent to
  Place place;
};
using Accesses = std::vector<Access>;

// Vector clocks: what each thread has seen of the others. A thread's own clock advances whenever others may learn of
// it. After a barrier of the whole block, all threads have seen everything up to `floor`.
//
// Engines that work beside the threads (TMA, wgmma) are agents. Each has a column, and its clock counts what it has
// completed. A barrier of threads says nothing about agents. With the first agent, each thread gets a second column:
// the clock up to which a proxy fence has shown its writes to the engines.
struct Clocks {
  int threads = 0, width = 0, capacity = 0;  // columns: threads | their fences | agents
  std::uint32_t floor = 0;
  std::vector<std::uint32_t> seen;  // threads x capacity
  std::vector<Order> orders;        // by thread
  bool ordered = false;             // has any thread an order that isn't empty?

  void reset(int threads);
  int add_agent();
  void watch_proxies();  // adds the columns for fences and agents
  bool proxies() const { return width > threads; }
  std::uint32_t* of(int thread) { return &seen[static_cast<std::size_t>(thread) * capacity]; }
  std::uint32_t now(int thread) { return of(thread)[thread]; }
  bool happened_before(const Access& access, const std::uint32_t* knows) const {
    return (access.thread < threads && access.clock <= floor) || (access.thread < width && knows[access.thread] >= access.clock);
  }
  bool fenced(const Access& access, const std::uint32_t* knows) const {
    return access.thread >= threads || (proxies() && knows[threads + access.thread] >= access.clock);
  }
  void fence(int thread);  // from here on, engines see what this thread has seen
  void join_all();
  Order& order(int thread) { return orders[thread]; }
  void release(int thread, Horizon& into);  // threads that acquire `into` see what this thread did
  void acquire(int thread, const Horizon& from);
};

// An array in HBM. Inputs may not be written. In other arrays, races between blocks are detected as well.
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
  bool watched = false;  // not an input, and not if the launch only counts
  // Chunks come by the page, once they are touched: a launch may touch little of a large array.
  static constexpr std::uint64_t of_a_page = 4096;
  std::unique_ptr<std::atomic<Chunk*>[]> pages;
  Chunk& chunk(std::uint64_t index) {
    std::atomic<Chunk*>& page = pages[index / of_a_page];
    Chunk* found = page.load(std::memory_order_acquire);
    return (found ? found : begin_page(page))[index % of_a_page];
  }
  std::uint64_t page_count() const { return watched ? bytes / CHUNK / of_a_page + 1 : 0; }
  static Chunk* begin_page(std::atomic<Chunk*>& page);
  void watch();

  Region() = default;
  Region(Region&&) = default;
  ~Region();

  bool holds(const void* address, std::int64_t n) const {
    auto* at = static_cast<const char*>(address);
    return at >= base && at + n <= base + bytes;
  }
};

// A block's SRAM, static and dynamic, in one range of shared addresses from SRAM_ORIGIN on.
struct Sram {
  char* statics = nullptr;  // where the compiler placed the static arrays of this thread of the operating system
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

// A copy_async that is under way. It takes effect when its thread waits for it, not before.
struct Copy {
  unsigned to;
  const char* from;
  unsigned bytes, kept;  // the bytes of `from` past `kept` become zeros
  unsigned group;
  Place place;
  const char* step;
};

// What makes an access: a lane, or an engine that a lane has started.
struct Actor {
  Lane& lane;
  const std::uint32_t* knows;  // a row of clocks: what came before the access
  std::uint16_t thread;
  std::uint32_t clock;
  bool engine;
};

// These add findings about bytes of HBM and of SRAM.
void add_global(Lane& lane, const char* kind, std::string message, Place place, const Region* region, const void* address,
                unsigned bytes, const Access* other = nullptr);
void add_shared(Lane& lane, const char* kind, std::string message, Place place, unsigned address, unsigned bytes,
                const Access* other = nullptr);

// These check an engine's accesses: to a chunk of SRAM, and to any number of bytes of HBM. They return false if there is no
// memory there.
bool check_shared(const Actor& actor, unsigned chunk, bool write, Place place);
bool check_global(const Actor& actor, const void* address, unsigned bytes, bool write, Place place, Region*& region);

// These check one lane's access to 1 to 16 bytes, and add findings. They return false if there is no memory there. `relaxed` is
// strong and atomic, as PTX's ld.relaxed and st.relaxed are. But it doesn't read and write in one step.
enum class Way { plain, primitive, is_volatile, relaxed, atomic };
bool check_global(Lane& lane, const void* address, unsigned bytes, bool write, Way way, Place place, Region*& region);
bool check_shared(Lane& lane, unsigned address, unsigned bytes, bool write, Way way, Place place);
inline bool check_global(Lane& lane, const void* address, unsigned bytes, bool write, bool atomic, Place place, Region*& region) {
  return check_global(lane, address, bytes, write, atomic ? Way::atomic : Way::primitive, place, region);
}
inline bool check_shared(Lane& lane, unsigned address, unsigned bytes, bool write, bool atomic, Place place) {
  return check_shared(lane, address, bytes, write, atomic ? Way::atomic : Way::primitive, place);
}
void begin_copy(Lane& lane, unsigned to, const void* from, unsigned bytes, unsigned kept, Place place);
void finish_copies(Lane& lane, unsigned pending);
void leave_copies(Lane& lane);  // at the thread's end

}  // namespace emulator

#include "emu_show_names.h"
