#include "told.h"

#include <cstring>
#include <initializer_list>

#include "launch.h"
#include "machine.h"

namespace emulator {

namespace {

// The kinds of entries. An entry has a kind, a thread, how many numbers follow, and these numbers.
enum Entry { STEP, VALUE, SHARED, BARRIER, GONE, ACCESS };

// Room for an entry with this many numbers. Null if none is left.
double* entry(const Telling& telling, Entry kind, int thread, std::size_t numbers) {
  const auto used = static_cast<std::size_t>(telling.room[0]);
  if (used + 3 + numbers > telling.size) return telling.room[2] = 1, nullptr;
  double* to = telling.room + used;
  to[0] = kind, to[1] = thread, to[2] = static_cast<double>(numbers);
  telling.room[0] = static_cast<double>(used + 3 + numbers);
  return to + 3;
}

void add(const Telling& telling, Entry kind, int thread, std::initializer_list<double> numbers) {
  if (double* to = entry(telling, kind, thread, numbers.size()))
    for (double number : numbers) *to++ = number;
}

std::size_t count_of(const Seen& seen) {
  std::size_t n = 1;
  for (unsigned extent : seen.extents)
    if (extent) n *= extent;
  return n;
}

template <class T>
double element(const void* at, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(at) + i * sizeof(T), sizeof(T));
  return static_cast<double>(value);
}

double element(const Seen& seen, std::size_t i) {
  const bool is_signed = seen.kind == 'i';
  if (seen.kind == 'f') return seen.size == 8 ? element<double>(seen.at, i) : element<float>(seen.at, i);
  switch (seen.size) {
    case 1: return is_signed ? element<std::int8_t>(seen.at, i) : element<std::uint8_t>(seen.at, i);
    case 2: return is_signed ? element<std::int16_t>(seen.at, i) : element<std::uint16_t>(seen.at, i);
    case 4: return is_signed ? element<std::int32_t>(seen.at, i) : element<std::uint32_t>(seen.at, i);
    default: return is_signed ? element<std::int64_t>(seen.at, i) : element<std::uint64_t>(seen.at, i);
  }
}

// FNV-1a
std::uint64_t digest(const Seen& seen) {
  std::uint64_t hash = 14695981039346656037u;
  const auto* at = static_cast<const unsigned char*>(seen.at);
  for (std::size_t i = 0, n = count_of(seen) * seen.size; i < n; ++i) hash = (hash ^ at[i]) * 1099511628211u;
  return hash;
}

void tell(Lane& lane, Seen& seen, Entry kind) {
  const std::uint64_t now = digest(seen);
  if (now == seen.told) return;
  seen.told = now;
  const std::size_t n = count_of(seen);
  double* to = entry(*lane.told, kind, lane.number, 5 + n);
  if (!to) return;
  *to++ = seen.number, *to++ = seen.kind == 'w' ? 0 : seen.size;
  for (unsigned extent : seen.extents) *to++ = extent;
  for (std::size_t i = 0; i < n; ++i) to[i] = element(seen, i);
}

void tell_registers(Lane& lane) {
  for (Seen* seen = lane.told->newest; seen; seen = seen->older)
    if (seen->role == 'r') tell(lane, *seen, VALUE);
}

// The newest variable of a thread that lies there.
const Seen* shared_at(const Lane& lane, const char* address) {
  for (const Seen* seen = lane.told->newest; seen; seen = seen->older)
    if (auto* at = static_cast<const char*>(seen->at); seen->role == 's' && address >= at && address < at + count_of(*seen) * seen->size)
      return seen;
  return nullptr;
}

// A thread may touch neighbours one after the other, from the same place. That is one entry.
void add_access(Lane& lane, double array, double offset, unsigned bytes, bool store, double from) {
  Telling& telling = *lane.told;
  if (double* x = telling.latest; x && x + 5 == telling.room + static_cast<std::size_t>(telling.room[0]) && x[0] == array &&
                                  x[1] + x[2] == offset && x[3] == store && x[4] == from) {
    x[2] += bytes;
    return;
  }
  if (double* x = entry(telling, ACCESS, lane.number, 5))
    x[0] = array, x[1] = offset, x[2] = bytes, x[3] = store, x[4] = from, telling.latest = x;
}

}  // namespace

void tell_step(Lane& lane, const char* name) {
  if (!lane.told) return;
  tell_registers(lane);
  const std::size_t n = std::strlen(name);
  if (double* to = entry(*lane.told, STEP, lane.number, n))
    for (std::size_t i = 0; i < n; ++i) to[i] = name[i];
}

void tell_barrier(Lane& lane) {
  if (!lane.told) return;
  tell_registers(lane);
  add(*lane.told, BARRIER, lane.number, {});
}

// All threads are at a barrier. So SRAM holds what they will read. Each thread has the same variables there.
void tell_shared(Block& block) {
  for (const auto& lane : block.lanes) {
    if (lane->done || !lane->told) continue;
    for (Seen* seen = lane->told->newest; seen; seen = seen->older)
      if (seen->role == 's') tell(*lane, *seen, SHARED);
    return;
  }
}

void tell_access(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, Place place) {
  if (!lane.told) return;
  const bool store = op == Op::st || op == Op::stsm || op == Op::red || op == Op::atom || (op == Op::ldgsts && space == Space::sram);
  const double from = static_cast<double>(static_cast<const char*>(place) - image_base());
  if (space == Space::hbm) {
    const auto& regions = lane.block->launch.regions;
    const auto* region = lane.block->launch.find(reinterpret_cast<const void*>(address), bytes);
    if (!region) return;
    const double offset = static_cast<double>(address - reinterpret_cast<std::uint64_t>(region->base));
    add_access(lane, static_cast<double>(region - regions.data()), offset, bytes, store, from);
  } else if (store) {
    const char* at = lane.block->sram.pointer(static_cast<unsigned>(address));
    if (const Seen* seen = shared_at(lane, at))
      add_access(lane, -1.0 - seen->number, static_cast<double>(at - static_cast<const char*>(seen->at)), bytes, true, from);
  }
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu_tell_begin(Telling* telling) {
  Lane& lane = current_lane();
  if (static_cast<double>(lane.block->number) == telling->room[1]) lane.told = telling;
}

void emu_tell_end(Telling*) { current_lane().told = nullptr; }

void emu_see(Seen* seen) {
  Lane& lane = current_lane();
  if (!lane.told) return;
  seen->older = lane.told->newest;
  lane.told->newest = seen;
  if (seen->role == 'l') tell(lane, *seen, VALUE);
}

void emu_see_no_more(Seen* seen) {
  Lane& lane = current_lane();
  if (!lane.told) return;
  if (seen->role == 'r') tell(lane, *seen, VALUE);
  add(*lane.told, GONE, lane.number, {static_cast<double>(seen->number)});
  lane.told->newest = seen->older;
}

}  // extern "C"
