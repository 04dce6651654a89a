// A launch, as Python passes it, and the text that Python gets back.
#pragma once
#include "emu_hide_names.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "counts.h"
#include "grid.h"
#include "memory.h"

namespace emulator {

extern "C" {

struct EmuRegion {
  const char* name;
  void* base;
  std::int64_t bytes;
  int input;             // 1: it may not be written
  unsigned char* state;  // for each byte, 1 if it holds a value. The launch updates it for later launches.
};

struct EmuLaunch {
  void (*entry)(void** arguments);  // emu_entry_<i> of the kernel's library
  void** arguments;
  unsigned grid[3], block[3];
  unsigned dynamic_sram;
  const EmuRegion* regions;
  int region_count;
  int workers;   // threads of the operating system
  int sanitize;  // 1: look for misuse; 0: only count
  double time_limit;  // seconds of processor time, 0 for none
  const void* watched;  // a byte in HBM: each store to it is reported; or null
  const int* stop;  // not 0 once no caller waits for the launch any more
  unsigned long some;  // how many blocks of the grid run; 0: all
};

// Runs a launch. The answer is a JSON document. The caller frees it with emu_free.
char* emu_launch(const EmuLaunch* launch);
void emu_free(char* text);

// Sets the sites: an id for each place (bytes from the start of the library), sorted by place.
void emu_sites(const std::uint64_t* places, const std::uint32_t* ids, int count);

// Sets the static arrays in SRAM: where each lies, in bytes from the dynamic SRAM.
void emu_statics(const char* const* names, const std::int64_t* from_dynamic, const std::uint32_t* bytes, int count);
}

double processor_seconds(pthread_t thread);

struct Launch {
  const EmuLaunch& given;
  std::vector<Region> regions;
  std::uint64_t grid_blocks, blocks;  // the grid's; those that run
  double begun, deadline;  // seconds of processor time when it began; when it may be late, on the monotonic clock
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> cramped{false};  // was there no memory for another block?
  Handed handed;
  std::atomic<bool> fences{false};  // has any thread made one?
  std::atomic<int> resident{0}, idle{0};  // blocks that have begun and not ended; those of them that only wait
  std::uint64_t most_resident = 0;
  std::function<void()> begin_another;    // block beside the resident ones, which may wait for it
  GridBarrier grid;

  std::mutex busy;
  std::set<Place> checked;  // plain reads that a compare-and-swap of the same thread checked next

  explicit Launch(const EmuLaunch& given);
  bool sanitize() const { return given.sanitize; }
  std::uint64_t chosen(std::uint64_t i) const;  // the number of the i-th block that runs
  Region* find(const void* address, std::int64_t bytes);
  const Region* nearest(const void* address) const;
  bool late(pthread_t thread = pthread_self()) const;  // has it used up its time, or was it interrupted?
  std::string limit() const;  // in words
};

// What a launch did, and the JSON of it.
struct Launched {
  Findings findings, notes;
  Ledger ledger;
  Counters counters;
  bool stopped = false;
};
struct Writer;
Launched run(Launch& launch);
void tell(Writer& out, const Launched& done);

// SRAM lies in thread-local variables of the kernel's library, so each SM has its own. Static arrays lie where the
// compiler put them, and dynamic SRAM lies where `emu_dynamic_sram` says.
struct StaticArray { std::string name; std::int64_t from_dynamic; unsigned bytes; };
const std::vector<StaticArray>& static_arrays();
extern "C" void* emu_dynamic_sram();

const char* image_base();  // of the kernel's library
bool inside_image(const void* address);

}  // namespace emulator

#include "emu_show_names.h"
