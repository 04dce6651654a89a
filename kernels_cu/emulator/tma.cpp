// Boxes: what the copy engine (TMA) moves between arrays in HBM and SRAM.
#include <algorithm>
#include <cstring>

#include "hopper.h"
#include "launch.h"
#include "machine.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

namespace emulator {

namespace {

constexpr unsigned SECTOR = 32;

const char* name_of(const Block& block, unsigned address) {
  const auto* name = block.sram.name_of(address);
  return name ? name->name : "SRAM";
}

Moved moved_of(std::uint64_t bytes, std::uint64_t sectors = 0) {
  Moved moved;
  moved.instructions = 1;
  moved.bytes = bytes;
  moved.sectors = sectors;
  return moved;
}

// Checks what the box touches: its rows inside the array, and its place in SRAM. Returns the array's name.
const char* check_box(const Box& box, const Actor& sram, const Actor& hbm, bool load, Place place) {
  Block& block = *sram.lane.block;
  Region* region = block.launch.find(box.map.base, 1);
  const char* name = region ? region->name.c_str() : "?";
  for (unsigned row = 0; row < box.rows(); ++row) {
    const auto [at, begin, end] = box.row(row);
    if (end > begin && !check_global(hbm, at, end - begin, !load, place, region)) block.abort();
  }
  for (unsigned address = box.sram; address < box.sram + box.bytes(); address += CHUNK)
    if (!check_shared(sram, address, load, place)) block.abort();
  return name;
}

// A box as the instruction names it. A box that can't be ends the block.
Box box_of(Lane& lane, const void* map, unsigned sram, const int* corner, int rank, Place place) {
  Block& block = *lane.block;
  Box box;
  std::memcpy(&box.map, map, sizeof box.map);
  box.sram = sram;
  box.lane = &lane;
  box.place = place;
  auto wrong = [&](const char* kind, const std::string& message) {
    add_shared(lane, kind, message, place, sram, CHUNK);
    block.abort();
  };
  if (box.map.magic != TensorMap::MAGIC)
    wrong("tensor map", "copies a box by what is no tensor map (flashlab.emulator.tensor_map makes them)");
  if (static_cast<int>(box.map.rank) != rank)
    wrong("tensor map", "names " + std::to_string(rank) + " coordinates of an array of " + std::to_string(box.map.rank));
  for (int i = 0; i < TensorMap::MOST_DIMENSIONS; ++i) box.corner[i] = i < rank ? corner[i] : 0;
  const unsigned unit = std::max(128u, 8 * box.map.swizzle);  // the swizzle's period
  if (sram % unit) wrong("misaligned", "moves a box at a shared address that isn't a multiple of " + std::to_string(unit));
  return box;
}

}  // namespace

Box::Row Box::row(unsigned i) const {
  std::int64_t offset = corner[0] * map.element_bytes;
  for (unsigned dimension = 1; dimension < map.rank; ++dimension) {
    const std::int64_t place = corner[dimension] + i % map.box[dimension];
    i /= map.box[dimension];
    if (place < 0 || place >= map.extent[dimension]) return {nullptr, 0, 0};
    offset += place * map.stride[dimension - 1];
  }
  const std::int64_t begin = std::clamp<std::int64_t>(-corner[0], 0, map.box[0]);
  const std::int64_t end = std::clamp<std::int64_t>(map.extent[0] - corner[0], begin, map.box[0]);
  const auto bytes = static_cast<std::int64_t>(map.element_bytes);
  return {map.base + offset + begin * bytes, static_cast<unsigned>(begin * bytes), static_cast<unsigned>(end * bytes)};
}

unsigned Box::inside() const {
  unsigned sum = 0;
  for (unsigned i = 0; i < rows(); ++i) sum += row(i).end - row(i).begin;
  return sum;
}

// Read off an H200: a row shows the sectors of HBM that its part inside touches. In a load the part outside counts as well, rounded
// up to sectors by itself. (flashlab/measure/sectors.py predicts the same from shapes.)
std::uint64_t Box::sectors(bool load) const {
  std::uint64_t sum = 0;
  for (unsigned i = 0; i < rows(); ++i) {
    const auto [at, begin, end] = row(i);
    const auto first = reinterpret_cast<std::uintptr_t>(at), last = first + (end - begin);
    if (end > begin) sum += (last + SECTOR - 1) / SECTOR - first / SECTOR;
    if (load) sum += (row_bytes() - (end - begin) + SECTOR - 1) / SECTOR;
  }
  return sum;
}

unsigned Box::chunk(unsigned row, unsigned i) const { return swizzled(sram + row * row_bytes() + i * CHUNK, map.swizzle); }

void Hopper::load(Lane& lane, const Box& box, Mbarrier& m, Place place) {
  ++progress;
  if (block.launch.sanitize() && !m.published)
    add_shared(lane, "proxy fence forgotten",
               "has a copy tell an mbarrier that the copy engine wasn't shown: fence.mbarrier_init is missing", place, m.address, 8,
               &m.made);
  const Actor engine{lane, block.clocks.of(lane.number), static_cast<std::uint16_t>(m.agent), m.phase + 1, true};
  const char* name = check_box(box, engine, engine, true, place);
  if (block.launch.sanitize()) {
    std::memset(&block.sram.state[box.sram], PENDING, box.bytes());
    std::memset(block.sram.pointer(box.sram), POISON, box.bytes());
  }
  block.ledger.add(lane.step, name, Space::hbm, Op::tma_ld, moved_of(box.bytes(), box.sectors(true)));
  block.ledger.add(lane.step, name_of(block, box.sram), Space::sram, Op::tma_ld, moved_of(box.bytes()));
  m.loads.push_back(box);
  m.coming += box.bytes();
  for (const auto& [thread, wait] : waits)
    if (block.lanes[thread]->wait == Wait::mbarrier && wait.address == m.address) return try_complete(m, lane, place);
}

void Hopper::store(Lane& lane, const Box& box, Place place) {
  Stores& mine = stores[lane.number];
  if (mine.reader < 0) mine.reader = block.clocks.add_agent(), mine.writer = block.clocks.add_agent();
  const auto* knows = block.clocks.of(lane.number);
  const Actor reader{lane, knows, static_cast<std::uint16_t>(mine.reader), mine.group + 1, true};
  const Actor writer{lane, knows, static_cast<std::uint16_t>(mine.writer), mine.group + 1, true};
  const char* name = check_box(box, reader, writer, false, place);
  block.ledger.add(lane.step, name_of(block, box.sram), Space::sram, Op::tma_st, moved_of(box.bytes()));
  block.ledger.add(lane.step, name, Space::hbm, Op::tma_st, moved_of(box.inside(), box.sectors(false)));
  mine.list.push_back({box, mine.group, false, {}});
}

// Ends all but the newest groups: the copies as a whole, or only their use of SRAM.
void Hopper::wait_stores(Lane& lane, unsigned pending, bool read) {
  Stores& mine = stores[lane.number];
  if (mine.reader < 0 || mine.group < pending) return;
  const unsigned done = mine.group - pending;  // groups
  for (auto& store : mine.list) {
    if (store.group >= done) break;
    const Box& box = store.box;
    const unsigned row_bytes = box.row_bytes();
    if (!store.read) {
      store.data.resize(box.bytes());
      for (unsigned row = 0; row < box.rows(); ++row)
        for (unsigned i = 0; i < row_bytes / CHUNK; ++i)
          std::memcpy(&store.data[row * row_bytes + i * CHUNK], block.sram.pointer(box.chunk(row, i)), CHUNK);
      store.read = true;
    }
    for (unsigned row = 0; !read && row < box.rows(); ++row) {
      const auto [at, begin, end] = box.row(row);
      if (end > begin) std::memcpy(at, &store.data[row * row_bytes + begin], end - begin);
    }
  }
  auto* seen = block.clocks.of(lane.number);
  seen[mine.reader] = std::max(seen[mine.reader], done);
  if (read) return;
  seen[mine.writer] = std::max(seen[mine.writer], done);
  while (!mine.list.empty() && mine.list.front().group < done) mine.list.erase(mine.list.begin());
}

}  // namespace emulator

using namespace emulator;

void emu_tma_load(unsigned to, const void* map, const int* corner, int rank, unsigned mbarrier) {
  Lane& lane = current_lane();
  Hopper& hopper = *lane.block->hopper;
  hopper.load(lane, box_of(lane, map, to, corner, rank, HERE), hopper.mbarrier(lane, mbarrier, HERE), HERE);
}

void emu_tma_store(const void* map, unsigned from, const int* corner, int rank) {
  Lane& lane = current_lane();
  lane.block->hopper->store(lane, box_of(lane, map, from, corner, rank, HERE), HERE);
}

void emu_tma_commit() { ++current_lane().block->hopper->stores[current_lane().number].group; }

void emu_tma_wait(unsigned pending, int read) {
  Lane& lane = current_lane();
  lane.block->hopper->wait_stores(lane, pending, read);
}
