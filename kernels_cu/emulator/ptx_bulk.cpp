// mbarriers and copies of bytes as inline PTX has them.
#include <algorithm>
#include <cstring>

#include "hopper.h"
#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

using namespace emulator;

namespace {

// Bytes in a row as a box: rows of up to 2,048 bytes, one behind the other.
Box box_of(Lane& lane, const void* at, unsigned sram, unsigned bytes, Place place) {
  constexpr unsigned LONGEST = 2048;
  const char* wrong = bytes % CHUNK || !bytes                               ? "copies a number of bytes that isn't a multiple of 16"
                      : sram % CHUNK || reinterpret_cast<std::uintptr_t>(at) % CHUNK ? "copies in bulk from or to an address that isn't a multiple of 16"
                                                                                      : nullptr;
  if (wrong) {
    add_shared(lane, "misaligned", wrong, place, sram, CHUNK);
    lane.block->abort();
  }
  unsigned row = std::min(bytes, LONGEST);
  while (bytes % row) row -= CHUNK;
  Box box;
  box.map = {};
  box.map.magic = TensorMap::MAGIC;
  box.map.base = static_cast<char*>(const_cast<void*>(at));
  box.map.stride[0] = row;
  std::fill(std::begin(box.map.extent), std::end(box.map.extent), 1u);
  std::fill(std::begin(box.map.box), std::end(box.map.box), 1u);
  box.map.extent[0] = box.map.box[0] = row;
  box.map.extent[1] = box.map.box[1] = bytes / row;
  box.map.element_bytes = 1;
  box.map.rank = 2;
  box.corner = {};
  box.sram = sram;
  box.lane = &lane;
  box.place = place;
  return box;
}

}  // namespace

extern "C" {

unsigned emu_ptx_mbarrier_arrive(unsigned address, unsigned count, unsigned expected_bytes) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  Mbarrier& m = hopper.mbarrier(lane, address, HERE);
  const std::uint32_t phase = m.phase;
  for (unsigned i = 0; i < count; ++i) hopper.arrive(lane, m, i ? 0 : expected_bytes, HERE);
  return phase;
}

void emu_ptx_mbarrier_expect_tx(unsigned address, unsigned bytes) {
  Lane& lane = current_lane();
  lane.block->hopper->mbarrier(lane, address, HERE).expected += bytes;
}

void emu_ptx_mbarrier_complete_tx(unsigned address, unsigned bytes) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  Mbarrier& m = hopper.mbarrier(lane, address, HERE);
  m.coming += bytes;
  ++hopper.progress;
  for (const auto& [thread, wait] : hopper.waits)
    if (lane.block->lanes[thread]->wait == Wait::mbarrier && wait.address == address) return hopper.try_complete(m, lane, HERE);
}

void emu_ptx_mbarrier_end(unsigned address) {
  Lane& lane = current_lane();
  lane.block->hopper->mbarrier(lane, address, HERE);
  lane.block->hopper->mbarriers.erase(address);
  if (lane.block->launch.sanitize()) std::memset(&lane.block->sram.state[address], UNWRITTEN, 8);
}

void emu_ptx_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned mbarrier) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  hopper.load(lane, box_of(lane, from, to, bytes, HERE), hopper.mbarrier(lane, mbarrier, HERE), HERE);
}

void emu_ptx_bulk_store(void* to, unsigned from, unsigned bytes) {
  Lane& lane = current_lane();
  lane.block->hopper->store(lane, box_of(lane, to, from, bytes, HERE), HERE);
}

[[noreturn]] void emu_ptx_refuse(const char* what) {
  Lane& lane = current_lane();
  Finding finding = lane.block->finding("not emulated", HERE, lane);
  finding.message = std::string("is in ") + what;
  lane.block->findings.add(std::move(finding));
  lane.block->abort();
}
}
