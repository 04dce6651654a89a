// A program on the emulator: what its host code has asked of CUDA, and what is told of it in the end.
//
//   memory     of the device, managed and pinned, lies in one range of addresses (host_memory.cpp). Device memory is mapped
//              there, so kernels reach it. The compiler reports what host code reads and writes (instrumentation.cpp), so host
//              code that touches device memory is seen.
//   launches   run at once, one after the other (host_launch.cpp). Whether a program waited for what it needs is a matter of
//              order, not of luck (host_order.cpp).
#pragma once
#include "emu_hide_names.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "host_calls.h"
#include "launch.h"
#include "report.h"

namespace emulator {

enum class Kind { device, managed, pinned };

// A range of bytes that an operation has read or written.
struct Touched { std::int64_t begin, end; bool write; };

// Vector clocks of the host (0), of the default stream (1), and of the other streams. An operation is what a stream or the host
// does at one time.
using Clock = std::vector<std::uint32_t>;
struct Past {
  Touched bytes;
  unsigned actor;
  std::uint32_t when;
  std::string what;  // in words
  Place place;
};

struct Allocation {
  std::string name;
  char* base;
  std::int64_t bytes;
  Kind kind;
  Place place;                          // where it was allocated
  Place freed = nullptr;                // where it was freed, or null
  std::vector<Past> past;               // what the latest operations did to it
  unsigned char* state;                 // a State for each byte, in memory of its own
  bool holds(const void* at) const { return at >= base && at < base + bytes; }
};

// What all launches did that were made at one place with one grid and block.
struct LaunchGroup {
  std::string kernel;
  Place place;
  uint3 grid, block;
  std::uint64_t sram, times = 0;
  Launched all;
};

struct Program {
  EmuProgram given{};
  bool begun = false;
  std::recursive_mutex busy;  // one call of the runtime at a time
  Findings findings, notes;
  std::vector<LaunchGroup> launches;
  std::uint64_t stopped = 0;  // launches that a finding ended

  // Errors
  int last = 0, sticky = 0;
  std::vector<Finding> unchecked;  // failed calls whose errors nobody has looked at yet
  int fail(int error, const char* kind, const std::string& message, Place place, const Allocation* about = nullptr,
           std::int64_t offset = 0);  // also adds a finding
  int failed(int error, const std::string& message, Place place);  // no finding: the program may have asked for it
  Finding finding(const char* kind, const std::string& message, Place place, const Allocation* about = nullptr,
                  std::int64_t offset = 0) const;

  // Memory
  char *begin = nullptr, *shared = nullptr, *end = nullptr;  // of device memory, of managed and pinned memory, of both
  char *device_top = nullptr, *shared_top = nullptr;
  std::vector<std::unique_ptr<Allocation>> allocations;
  std::uint64_t in_use = 0;
  std::string next_name;
  Allocation* allocate(std::uint64_t bytes, Kind kind, Place place);
  Allocation* find(const void* at);     // alive
  Allocation* find_dead(const void* at);
  Allocation* near(const void* at);
  void reserve();
  std::string where(const void* at, std::int64_t bytes);  // why no array has them, in words

  // Order
  std::vector<Clock> clocks{Clock{1, 0}, Clock{0, 1}};
  std::vector<bool> blocking{false, true};  // streams that wait for the default stream, and the other way round
  bool pending = false;                     // is anything under way for which the host hasn't waited?
  bool ordered() const;                     // can an order be missing at all?
  unsigned actor_of(cudaStream_t stream) const;
  unsigned begin_operation(cudaStream_t stream);
  void touch(Allocation& allocation, const std::vector<Touched>& bytes, unsigned actor, const std::string& what, Place place);
  void wait_for(unsigned actor);     // the host does
  void wait_for_all();
  void join(Clock& into, const Clock& from);

  double seconds_left() const;
  void save(bool now = false);  // the report
  std::string report(bool ended) const;
};

Program& program();

// Host code has touched bytes in the program's range of memory.
void host_access(const void* at, std::uint64_t bytes, bool write, Place place);
extern char *host_begin, *host_end;  // that range
inline void check_host(const void* at, std::uint64_t bytes, bool write, Place place) {
  if (at >= host_begin && at < host_end) host_access(at, bytes, write, place);
}

[[noreturn]] void end_program(int status);  // exit() in host code
constexpr int ended_here = -1;              // a finding ended it, as a GPU's system would
bool in_program();

}  // namespace emulator

#include "emu_show_names.h"
