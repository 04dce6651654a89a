#include "launch.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <mutex>
#include <thread>

#include "faults.h"
#include "json.h"
#include "machine.h"
#include "watch.h"

namespace emulator {

namespace {

// How many lanes may be resident. Each takes two mappings of memory, and Linux gives a process 65,530.
constexpr std::uint64_t MOST_LANES = 24 * 1024;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// What Python knows of the library once it is built. It outlives a program's own objects.
auto& known_places = *new std::vector<std::uint64_t>;
auto& known_ids = *new std::vector<std::uint32_t>;
std::uint32_t site_count = 1;
auto& known_statics = *new std::vector<StaticArray>;

struct Image { const char* begin = nullptr; const char* end = nullptr; };

const Image& image() {
  static const Image found = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&emu_launch), &info);
    Image result{static_cast<const char*>(info.dli_fbase), static_cast<const char*>(info.dli_fbase)};
    dl_iterate_phdr(
        [](dl_phdr_info* object, std::size_t, void* data) {
          auto& image = *static_cast<Image*>(data);
          if (reinterpret_cast<const char*>(object->dlpi_addr) != image.begin) return 0;
          for (int i = 0; i < object->dlpi_phnum; ++i)
            if (object->dlpi_phdr[i].p_type == PT_LOAD)
              image.end = std::max(image.end, image.begin + object->dlpi_phdr[i].p_vaddr + object->dlpi_phdr[i].p_memsz);
          return 1;
        },
        &result);
    return result;
  }();
  return found;
}

}  // namespace

void tell(Writer& out, const Launched& done) {
  out.field("dropped", done.findings.dropped);
  out.field("plain", done.ledger.plain);
  out.field("flops", done.counters.flops);
  out.field("exp", done.counters.exp);
  out.field("shuffles", done.counters.shuffles);
  out.findings("findings", done.findings);
  out.findings("notes", done.notes);
  out.moved(done.ledger);
}

Launch::Launch(const EmuLaunch& launch)
    : given(launch),
      grid_blocks(std::uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2]),
      blocks(launch.some ? std::min<std::uint64_t>(launch.some, grid_blocks) : grid_blocks),
      begun(seconds_of(CLOCK_PROCESS_CPUTIME_ID)),
      deadline(launch.time_limit > 0 ? now() + launch.time_limit : 1e300) {
  for (int i = 0; i < launch.region_count; ++i) {
    const EmuRegion& from = launch.regions[i];
    Region region;
    region.name = from.name;
    region.base = static_cast<char*>(from.base);
    region.bytes = from.bytes;
    region.input = from.input;
    region.state = from.state;
    if (sanitize() && !from.input) region.watch();
    regions.push_back(std::move(region));
  }
}

// If some run, they are spread over the grid: the last one is among them, where an edge is ragged.
std::uint64_t Launch::chosen(std::uint64_t i) const {
  return blocks < 2 ? i : static_cast<std::uint64_t>(static_cast<unsigned __int128>(i) * (grid_blocks - 1) / (blocks - 1));
}

Region* Launch::find(const void* address, std::int64_t bytes) {
  for (auto& region : regions)
    if (region.holds(address, bytes)) return &region;
  return nullptr;
}

const Region* Launch::nearest(const void* address) const {
  const Region* best = nullptr;
  std::int64_t least = 0;
  auto* at = static_cast<const char*>(address);
  for (const auto& region : regions) {
    const std::int64_t distance = at < region.base ? region.base - at : std::max<std::int64_t>(0, at - region.base - region.bytes);
    if (!best || distance < least) best = &region, least = distance;
  }
  return least < (std::int64_t{1} << 36) ? best : nullptr;  // as far as a 32-bit index of 16-byte elements leads
}

// Only processor time counts, so a busy machine makes no launch late. One thread may run as long as the limit says. All threads
// together may run that long for each worker: there may be many more threads than processors.
bool Launch::late(pthread_t thread) const {
  if (__atomic_load_n(given.stop, __ATOMIC_RELAXED)) return true;
  if (now() <= deadline) return false;
  return processor_seconds(thread) > given.time_limit ||
         seconds_of(CLOCK_PROCESS_CPUTIME_ID) - begun > given.time_limit * std::max(1, given.workers);
}

std::string Launch::limit() const {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g s", given.time_limit);
  return seconds + std::string(" of processor time");
}

double processor_seconds(pthread_t thread) {
  clockid_t clock;
  return pthread_getcpuclockid(thread, &clock) == 0 ? seconds_of(clock) : 0;
}

const char* image_base() { return image().begin; }
bool inside_image(const void* address) { return address >= image().begin && address < image().end; }

unsigned site_of(Place place) {
  const auto offset = static_cast<std::uint64_t>(static_cast<const char*>(place) - image().begin);
  const auto found = std::lower_bound(known_places.begin(), known_places.end(), offset);
  return found != known_places.end() && *found == offset ? known_ids[found - known_places.begin()] : 0;
}

unsigned sites() { return site_count; }

const std::vector<StaticArray>& static_arrays() { return known_statics; }

Launched run(Launch& launch) {
  const EmuLaunch* given = &launch.given;
  Launched done;
  auto& [findings, notes, ledger, counters, stopped] = done;
  Findings guesses;
  std::mutex results;
  const FaultHandlers handlers;
  Watch watch(launch);
  auto sm = [&] {
    const SignalStack signals;
    Block block(launch);
    if (!block.has_stacks()) return void(launch.cramped = true);
    const Watch::Watched watched(watch, block);
    for (std::uint64_t number; !launch.stop && (number = launch.next++) < launch.blocks;) {
      block.run(launch.chosen(number));
      if (block.aborted) launch.stop = true;
    }
    const std::lock_guard lock(results);
    findings.merge(block.findings), notes.merge(block.notes), guesses.merge(block.guesses);
    for (const auto& [key, moved] : block.ledger.rows)
      ledger.add(std::get<0>(key), std::get<1>(key), std::get<2>(key), std::get<3>(key), moved);
    ledger.plain += block.ledger.plain;
    counters.flops += block.counters.flops;
    counters.exp += block.counters.exp;
    counters.shuffles += block.counters.shuffles;
  };
  const auto workers = std::min<std::uint64_t>(std::max(1, given->workers), launch.blocks);
  const std::uint64_t most = launch.most_resident = std::max(workers, MOST_LANES / (std::uint64_t{given->block[0]} * given->block[1] * given->block[2]));
  std::deque<std::thread> threads;
  std::mutex starting;
  std::uint64_t joined = 0;
  launch.begin_another = [&] {
    const std::lock_guard lock(starting);
    // one at a time: the last thread must have begun its block before another is asked for
    if (launch.next < launch.blocks && threads.size() - joined < most && launch.idle >= launch.resident) {
      ++launch.resident;
      threads.emplace_back([&] { --launch.resident, sm(); });
    }
  };
  for (std::uint64_t i = 0; i < workers; ++i) {
    const std::lock_guard lock(starting);
    threads.emplace_back(sm);  // each with SRAM of its own
  }
  for (;; ++joined) {  // a thread that ends may still begin others
    std::thread* thread = nullptr;
    {
      const std::lock_guard lock(starting);
      if (joined < threads.size()) thread = &threads[joined];
    }
    if (!thread) break;
    thread->join();
  }
  std::fflush(stdout);  // what kernels printed
  if (launch.cramped && findings.list.empty() && launch.next < launch.blocks) {
    Finding finding;
    finding.kind = "memory";
    finding.message = "has no memory for the stacks of a block's threads: less than it takes is free, or allowed";
    findings.add(std::move(finding));
    launch.stop = true;
  }
  for (Finding finding : guesses.list) {
    const bool checked = launch.checked.count(finding.guess) > 0;
    if (checked) finding.kind = "checked guess", finding.message += "; a compare-and-swap checks what was read";
    Findings one;
    finding.guess = nullptr;
    one.add(std::move(finding));
    (checked ? notes : findings).merge(one);
  }
  stopped = launch.stop;
  return done;
}

extern "C" {

char* emu_launch(const EmuLaunch* given) {
  Launch launch(*given);
  const Launched done = run(launch);
  Writer out;
  out.field("stopped", static_cast<std::uint64_t>(done.stopped));
  tell(out, done);
  return strdup((out.text + "}").c_str());
}

void emu_free(char* text) { std::free(text); }

void emu_sites(const std::uint64_t* places, const std::uint32_t* ids, int count) {
  known_places.assign(places, places + count);
  known_ids.assign(ids, ids + count);
  site_count = 1;
  for (std::uint32_t id : known_ids) site_count = std::max(site_count, id + 1);
}

void emu_statics(const char* const* names, const std::int64_t* from_dynamic, const std::uint32_t* bytes, int count) {
  known_statics.clear();
  for (int i = 0; i < count; ++i) known_statics.push_back({names[i], from_dynamic[i], bytes[i]});
}

}  // extern "C"

}  // namespace emulator
