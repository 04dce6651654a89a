// Memory as inline PTX reaches it: by generic addresses, in order with other threads, and the clock.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "hopper.h"
#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

using namespace emulator;

namespace {

const void* pointer(unsigned long long address) { return reinterpret_cast<const void*>(address); }

bool own(const Lane& lane, const void* address) {
  return (address >= lane.stack && address < lane.stack_end) || inside_image(address);
}

// Checks and counts an access by a generic address. Returns false if there is no memory there.
bool access(Lane& lane, unsigned long long address, unsigned bytes, bool write, bool ordered, Place place) {
  lane.block->poll(lane, place);
  const void* at = pointer(address);
  unsigned shared;
  const bool in_sram = lane.block->sram.shared_address(at, shared);
  if (ordered && write) lane.hand_on(at, in_sram);
  if (ordered && !write) lane.heard.add(at), lane.block->spin(lane, at, place);
  if (own(lane, at)) return true;
  const Op op = write ? Op::st : Op::ld;
  const Way way = ordered ? Way::relaxed : Way::primitive;
  if (in_sram) {
    if (!check_shared(lane, shared, bytes, write, way, place)) return false;
    const auto* name = lane.block->sram.name_of(shared);
    lane.warp->log.add(lane, op, Space::sram, shared, bytes, name ? name->name : "SRAM", place);
    return true;
  }
  Region* region = lane.block->launch.find(at, bytes);
  if (!check_global(lane, at, bytes, write, way, place, region)) return false;
  lane.warp->log.add(lane, op, Space::hbm, address, bytes, region->name.c_str(), place);
  return true;
}

void load(void* value, unsigned long long address, unsigned bytes, bool ordered, Place place) {
  if (access(current_lane(), address, bytes, false, ordered, place)) std::memcpy(value, pointer(address), bytes);
  else std::memset(value, POISON, bytes);
}
void store(unsigned long long address, const void* value, unsigned bytes, bool ordered, Place place) {
  if (access(current_lane(), address, bytes, true, ordered, place)) std::memcpy(reinterpret_cast<void*>(address), value, bytes);
}

}  // namespace

extern "C" {

void emu_ptx_load_generic(void* value, unsigned long long address, unsigned bytes) { load(value, address, bytes, false, HERE); }
void emu_ptx_store_generic(unsigned long long address, const void* value, unsigned bytes) { store(address, value, bytes, false, HERE); }
void emu_ptx_load_ordered(void* value, unsigned long long address, unsigned bytes) { load(value, address, bytes, true, HERE); }
void emu_ptx_store_ordered(unsigned long long address, const void* value, unsigned bytes) { store(address, value, bytes, true, HERE); }

int emu_ptx_is_shared(unsigned long long address) {
  unsigned shared;
  return current_lane().block->sram.shared_address(pointer(address), shared);
}
int emu_ptx_is_local(unsigned long long address) {
  const Lane& lane = current_lane();
  return pointer(address) >= lane.stack && pointer(address) < lane.stack_end;
}
int emu_ptx_is_global(unsigned long long address) { return !emu_ptx_is_shared(address) && !emu_ptx_is_local(address); }
int emu_ptx_is_const(unsigned long long address) { return inside_image(pointer(address)); }
int emu_ptx_is_param(unsigned long long) { return 0; }

void emu_ptx_copies_arrive(unsigned mbarrier, int counted) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  Mbarrier& m = hopper.mbarrier(lane, mbarrier, HERE);
  ++lane.group;  // copies without a group, too
  finish_copies(lane, 0);
  --lane.group;
  if (counted) return hopper.arrive(lane, m, 0, HERE);
  lane.block->clocks.release(lane.number, m.released);
}

unsigned long long emu_ptx_nanoseconds() {
  Lane& lane = current_lane();
  lane.block->poll(lane, HERE);
  return static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}
