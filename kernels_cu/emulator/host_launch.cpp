// The program's launches. Each runs when the program makes it; its findings and bytes are kept by the place of the launch.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "host.h"

#define HERE __builtin_return_address(0)

namespace emulator {

namespace {

constexpr std::uint64_t WITHOUT_OPT_IN = 48 * 1024;
constexpr std::size_t MOST_RANGES = 256;  // of an allocation and a launch; where they are more, its order isn't looked at

// Kernels that the program may launch by their addresses: how they are entered.
struct Known { void (*entry)(void**); int parameters; };
std::map<const void*, Known>& known() { static auto& all = *new std::map<const void*, Known>; return all; }

// How much dynamic SRAM a kernel may have: by its address and by its name, for a template's instance is launched by name.
std::map<const void*, std::uint64_t>& allowed_at() { static auto& all = *new std::map<const void*, std::uint64_t>; return all; }
std::map<std::string, std::uint64_t>& allowed_as() { static auto& all = *new std::map<std::string, std::uint64_t>; return all; }

std::string spelled(std::uint64_t n) {
  std::string text = std::to_string(n);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

// `ns::k<64>`, `(const void*)k<64>` and `&k` are all of k.
std::string base_of(std::string name) {
  name = name.substr(0, name.find_first_of("<,"));
  std::size_t end = name.size();
  auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  while (end && !in_word(name[end - 1])) --end;
  std::size_t begin = end;
  while (begin && in_word(name[begin - 1])) --begin;
  return name.substr(begin, end - begin);
}

std::uint64_t allowed(const EmuHostLaunch& launch) {
  const auto at = allowed_at().find(launch.function);
  if (launch.function && at != allowed_at().end()) return at->second;
  const auto as = allowed_as().find(base_of(launch.kernel));
  return as == allowed_as().end() ? WITHOUT_OPT_IN : as->second;
}

// Why no GPU takes a launch, in words, and CUDA's error.
std::string refused(const Program& p, const EmuHostLaunch& launch, int& error) {
  const auto& [x, y, z] = launch.block;
  const std::uint64_t threads = std::uint64_t{x} * y * z;
  error = cudaErrorInvalidConfiguration;
  if (!launch.grid.x || !launch.grid.y || !launch.grid.z) return "has a grid of no blocks, so nothing ran";
  if (!threads) return "has blocks of no threads, so nothing ran";
  if (threads > 1024) return "asks for blocks of " + spelled(threads) + " threads: 1,024 are the most, so nothing ran";
  if (z > 64) return "asks for blocks " + spelled(z) + " threads deep: 64 are the most, so nothing ran";
  if (launch.grid.x > 2147483647u || launch.grid.y > 65535 || launch.grid.z > 65535)
    return "asks for a grid of " + spelled(launch.grid.x) + " x " + spelled(launch.grid.y) + " x " + spelled(launch.grid.z) +
           " blocks: along y and z 65,535 are the most, so nothing ran";
  error = cudaErrorInvalidValue;
  const auto most = static_cast<std::uint64_t>(p.given.sram_per_block);
  if (launch.sram > most) return "asks for " + spelled(launch.sram) + " bytes of dynamic shared memory: " + spelled(most) + " are the most, so nothing ran";
  if (launch.sram > allowed(launch))
    return "asks for " + spelled(launch.sram) + " bytes of dynamic shared memory, and may have " + spelled(allowed(launch)) +
           ": cudaFuncSetAttribute(" + base_of(launch.kernel) + ", cudaFuncAttributeMaxDynamicSharedMemorySize, …) allows more. Nothing ran";
  error = cudaSuccess;
  return "";
}

// A name that outlives the launch: its regions end with it.
const char* kept(const char* name) {
  static auto& names = *new std::set<std::string>;
  return names.insert(name).first->c_str();
}

void add(LaunchGroup& group, const Launched& done) {
  ++group.times;
  group.all.findings.merge(done.findings), group.all.notes.merge(done.notes);
  for (const auto& [key, moved] : done.ledger.rows)
    group.all.ledger.add(std::get<0>(key), kept(std::get<1>(key)), std::get<2>(key), std::get<3>(key), moved);
  group.all.ledger.plain += done.ledger.plain;
  group.all.counters.flops += done.counters.flops;
  group.all.counters.exp += done.counters.exp;
  group.all.counters.shuffles += done.counters.shuffles;
  group.all.stopped |= done.stopped;
}

bool same(const uint3& a, const uint3& b) { return a.x == b.x && a.y == b.y && a.z == b.z; }

LaunchGroup& group_of(Program& p, const EmuHostLaunch& launch, Place place) {
  for (auto& group : p.launches)
    if (group.place == place && group.kernel == launch.kernel && same(group.grid, launch.grid) && same(group.block, launch.block) &&
        group.sram == launch.sram)
      return group;
  p.launches.push_back({launch.kernel, place, launch.grid, launch.block, launch.sram, 0, {}});
  return p.launches.back();
}

// An address outside of all arrays may be in one that was freed, or the host's.
void explain(Program& p, Findings& findings) {
  for (Finding& found : findings.list) {
    if (std::strcmp(found.kind, "out of bounds") || std::strcmp(found.space, "hbm")) continue;
    const auto* at = static_cast<const char*>(found.address);
    if (const Allocation* dead = p.find_dead(at)) {
      found.kind = "use after free";
      found.message = found.message.substr(0, found.message.find(':')) + " of " + dead->name + ", which has been freed";
      found.tensor = dead->name, found.offset = at - dead->base;
    } else if (reinterpret_cast<std::uintptr_t>(at) >> 16 && (at < p.begin || at >= p.end)) {
      found.message = found.message.substr(0, found.message.find(':')) + " of the host's memory, which kernels don't reach";
      found.tensor.clear();
    } else if (!(reinterpret_cast<std::uintptr_t>(at) >> 16)) {
      found.message = found.message.substr(0, found.message.find(':')) + " at a null pointer";
      found.tensor.clear();
    }
  }
}

std::vector<Touched> touched(const Region& region) {
  std::vector<Touched> reads, writes;
  const auto put = [](std::vector<Touched>& to, std::int64_t begin, std::int64_t end, bool write) {
    if (!to.empty() && to.back().end == begin) to.back().end = end;
    else to.push_back({begin, end, write});
  };
  for (std::uint64_t page = 0; page < region.page_count(); ++page) {
    const Region::Chunk* chunks = region.pages[page].load();
    for (std::uint64_t i = 0; chunks && i < Region::of_a_page; ++i) {
      unsigned masks[2] = {0, 0};
      for (const Access& access : chunks[i].accesses) masks[access.write] |= access.bytes;
      const auto first = static_cast<std::int64_t>((page * Region::of_a_page + i) * CHUNK);
      for (const bool write : {false, true}) {
        if (masks[write] == 0xffff) put(write ? writes : reads, first, first + CHUNK, write);
        else
          for (unsigned byte = 0; byte < CHUNK; ++byte)
            if (masks[write] >> byte & 1) put(write ? writes : reads, first + byte, first + byte + 1, write);
      }
    }
  }
  if (reads.size() > MOST_RANGES || writes.size() > MOST_RANGES) return {};
  reads.insert(reads.end(), writes.begin(), writes.end());
  return reads;
}

int error_of(const Launched& done) {
  int error = cudaErrorIllegalAddress;
  for (const Finding& found : done.findings.list) {
    const std::string kind = found.kind;
    if (kind == "misaligned") error = cudaErrorMisalignedAddress;
    if (kind == "assert") return cudaErrorAssert;
    if (kind == "deadlock" || kind == "time limit") return cudaErrorLaunchTimeout;
    if (kind == "trap" || kind == "exit") error = cudaErrorLaunchFailure;
  }
  return error;
}

}  // namespace

}  // namespace emulator

using namespace emulator;

static int launch_at(const EmuHostLaunch* given, Place place) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (p.sticky) return p.failed(p.sticky, "", place);
  int error = 0;
  const std::string why = refused(p, *given, error);
  if (error) return p.fail(error, "launch", given->kernel + std::string(" ") + why, place);
  p.save();
  std::vector<EmuRegion> regions;
  std::vector<Allocation*> live;
  for (const auto& one : p.allocations)
    if (!one->freed) live.push_back(one.get()), regions.push_back({one->name.c_str(), one->base, one->bytes, 0, one->state});
  EmuLaunch request{};
  request.entry = given->entry, request.arguments = given->arguments;
  const int running = 0;
  const uint3 extents[] = {given->grid, given->block};
  std::memcpy(request.grid, &extents[0], sizeof request.grid), std::memcpy(request.block, &extents[1], sizeof request.block);
  request.dynamic_sram = static_cast<unsigned>(given->sram);
  request.regions = regions.data(), request.region_count = static_cast<int>(regions.size());
  request.workers = p.given.workers, request.sanitize = p.given.sanitize;
  request.time_limit = p.given.time_limit > 0 ? std::max(p.seconds_left(), 0.1) : 0;
  request.stop = &running;
  const unsigned actor = p.begin_operation(given->stream);
  Launch launch(request);
  Launched done = run(launch);
  explain(p, done.findings);
  if (p.ordered() && !done.stopped)
    for (std::size_t i = 0; i < live.size(); ++i)
      if (const auto bytes = touched(launch.regions[i]); !bytes.empty()) p.touch(*live[i], bytes, actor, given->kernel, place);
  add(group_of(p, *given, place), done);
  if (done.stopped) p.sticky = p.last = error_of(done), ++p.stopped;
  p.save(!done.findings.list.empty());
  return p.sticky;
}

extern "C" {

int emu_host_launch(const EmuHostLaunch* given) { return launch_at(given, HERE); }

void emu_host_known(const void* function, void (*entry)(void**), int parameters) { known()[function] = {entry, parameters}; }

// cudaLaunchKernel: a kernel by its address.
int emu_host_launch_at(const char* name, const void* function, uint3 grid, uint3 block, void** arguments, unsigned long sram, cudaStream_t stream,
                       int cooperative) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  const auto found = known().find(function);
  if (found == known().end()) return p.fail(cudaErrorInvalidDeviceFunction, "launch", "launches what is no kernel of this file", HERE);
  std::vector<void*> given{&function};
  given.insert(given.end(), arguments, arguments + found->second.parameters);
  const EmuHostLaunch launch{kept(base_of(name).c_str()), function, found->second.entry, given.data(), grid, block, sram, stream, cooperative};
  return launch_at(&launch, HERE);
}

int emu_host_allow(const char* name, const void* function, int bytes) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (bytes < 0 || bytes > p.given.sram_per_block)
    return p.failed(cudaErrorInvalidValue, "asks for " + spelled(static_cast<std::uint64_t>(bytes)) + " bytes of dynamic shared memory: " +
                    spelled(static_cast<std::uint64_t>(p.given.sram_per_block)) + " are the most", HERE);
  allowed_as()[base_of(name)] = static_cast<std::uint64_t>(bytes);
  if (function) allowed_at()[function] = static_cast<std::uint64_t>(bytes);
  return cudaSuccess;
}
}
