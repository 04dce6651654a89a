// Hopper's engines, which work on while the block that started them goes on.
//
//   mbarriers   count arrivals and bytes in phases. A thread that waits for a phase sees what the arriving threads had
//               done, and what the phase's copies wrote.
//   boxes       are tiles of arrays in HBM. The copy engine (TMA) copies them to SRAM or from there, swizzled.
//   products    are those of a warpgroup (wgmma). Operands lie in SRAM, accumulators in the registers of 128 threads.
//
// Everything takes effect as late as the rules allow. A box arrives when its mbarrier's phase needs nothing else and a
// thread waits for it. A product is computed when a thread waits for it. Until then the box's place in SRAM is PENDING,
// and the accumulators hold NaNs.
#pragma once
#include "emu_hide_names.h"

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "report.h"

namespace emulator {

struct Warp;

// A tensor map. flashlab/emulator/maps.py makes it, in place of cuTensorMapEncodeTiled.
struct TensorMap {
  static constexpr std::uint64_t MAGIC = 0x50414d524f534e54;  // "TNSORMAP"
  static constexpr int MOST_DIMENSIONS = 5;

  std::uint64_t magic;
  char* base;
  std::int64_t stride[MOST_DIMENSIONS - 1];  // in bytes, for the dimensions after the innermost
  std::uint32_t extent[MOST_DIMENSIONS], box[MOST_DIMENSIONS];
  std::uint32_t element_bytes, rank, swizzle;
  unsigned char unused[28];
};
static_assert(sizeof(TensorMap) == 128, "as large as CUtensorMap");

// A box of an array, and its place in SRAM.
struct Box {
  TensorMap map;
  std::array<std::int64_t, TensorMap::MOST_DIMENSIONS> corner;
  unsigned sram;
  Lane* lane;  // the lane that issued the copy
  Place place;

  struct Row { char* at; unsigned begin, end; };  // bytes begin..end of the row lie inside the array, the first at `at`
  unsigned row_bytes() const { return map.box[0] * map.element_bytes; }
  unsigned rows() const { return map.box[1] * map.box[2] * map.box[3] * map.box[4]; }
  unsigned bytes() const { return rows() * row_bytes(); }
  unsigned inside() const;  // how many bytes lie inside the array
  std::uint64_t sectors(bool load) const;  // how many sectors a counter shows
  Row row(unsigned i) const;
  unsigned chunk(unsigned row, unsigned i) const;  // the shared address of its 16-byte piece i
  bool covers(unsigned address, unsigned n) const { return address < sram + bytes() && sram < address + n; }
};

// The address after swizzling. With rows of 128 bytes, chunk c of row r lies at place c ^ (r % 8). `span` is the bytes
// of a row, or 0 for no swizzle.
inline unsigned swizzled(unsigned address, unsigned span) {
  return span ? address ^ ((address >> 7 & (span / CHUNK - 1)) * CHUNK) : address;
}

struct Mbarrier {
  unsigned address = 0, arrivals = 0;     // `arrivals` per phase
  unsigned missing = 0;                   // how many arrivals this phase still needs
  std::int64_t expected = 0, coming = 0;  // bytes
  std::uint32_t phase = 0;                // how many phases are over
  int agent = 0;                          // in this phase the agent's accesses have the clock `phase` + 1
  Access made{};
  bool published = false;
  std::vector<Box> loads;
  Horizon released, completed;  // clocks: of all arrivals so far, and at the end of the last phase
};

// The accumulators C of products that run one after the other on the same registers.
struct Accumulators {
  int fragments = 0;
  bool halves = false;  // sums of 16 bits, two in a register
  unsigned bytes() const { return (halves ? 8u : 16u) * fragments; }  // of a thread's registers
  std::array<std::array<float*, 32>, 4> at{};  // by warp and lane
  std::vector<float> values;                   // 64 x 8 fragments
  std::array<std::uint64_t, 4> last{};         // the last product that each warp has issued
};

struct Product {
  std::uint64_t a = 0, b = 0, shape = 0;  // the descriptors, and all else that must be the same in all lanes
  int fragments = 0, element = 0, b_element = 0, sums = 0;
  bool add = false, a_columns = false, b_columns = false, negative_a = false, negative_b = false, a_in_registers = false;
  std::vector<std::uint32_t> registers;  // A, if it is in registers: four per thread
  std::shared_ptr<Accumulators> c;
  unsigned warps = 0;                // how many warps have issued it
  std::vector<std::uint32_t> knows;  // clocks: what came before it in each of its warps
  const char* step = "";
  Place place{};
};

struct Warpgroup {
  int agent = -1;  // its clock counts the products that are over
  std::deque<Product> products;
  std::uint64_t first = 0, done = 0;  // the number of products.front(), and how many products are computed
  struct Queue {                      // one per warp
    std::uint64_t issued = 0, wanted = 0, waited = 0;
    std::vector<std::uint64_t> groups;  // products up to each commit
    std::vector<std::shared_ptr<Accumulators>> running;
  };
  std::array<Queue, 4> queues;
};

// The instructions that all four warps of a warpgroup execute together (PTX: `.aligned`), in the order in which the
// first warp came to them. Every other warp must execute the same instructions of the same lines. A section ends with a
// product. After a difference, the comparison begins anew with the next section.
struct Aligned {
  struct Step { const char* what; std::uint64_t operand; Place place; const Lane* lane; };
  struct Section { std::vector<Step> steps; bool parted = false; };
  struct Reached { std::uint64_t section = 0; std::size_t step = 0; };
  std::deque<Section> sections;
  std::uint64_t first = 0;  // the number of sections.front()
  std::array<Reached, 4> warps;
};

// The registers of a thread that its products use, with their values at the thread's last wgmma_fence.
struct Registers {
  struct Operand { const char* at; std::size_t bytes; std::vector<char> fenced; };
  std::vector<Operand> operands;
  bool fenced = false;
};

// A thread's copies of boxes to HBM. Groups close one after the other, and the thread waits for them in that order.
struct Stores {
  struct Store { Box box; unsigned group; bool read; std::vector<char> data; };
  std::vector<Store> list;
  unsigned group = 0;
  int reader = -1, writer = -1;  // the agents that read SRAM and write HBM
};

struct Hopper {
  explicit Hopper(Block& block) : block(block) {}

  Block& block;
  std::map<unsigned, Mbarrier> mbarriers;
  std::vector<Warpgroup> warpgroups;
  std::vector<Aligned> aligned;                      // by warpgroup
  std::map<int, Stores> stores;                      // by thread
  std::map<int, Registers> registers;                // by thread
  std::vector<unsigned> most_registers;              // per thread, by warp
  unsigned handovers = 0;                            // how often most_registers changed
  struct MbarrierWait { unsigned address; std::uint32_t phase; bool woken; std::uint64_t failed; };
  std::map<int, MbarrierWait> waits;                 // by thread
  std::uint64_t progress = 1;

  bool go_on();     // no lane can run: ends waits for mbarriers without success, if that may help
  void deadlock();  // reports the lanes that wait for ever for something in here
  void finished(Lane& lane);
  void end();  // the block has ended
  bool find_load(unsigned address, unsigned bytes, Lane& lane, std::string& message, Access& issued) const;
  void check_registers(Lane& lane, const char* address, unsigned bytes, bool write, Place place);

  // mbarriers
  Mbarrier& mbarrier(Lane& lane, unsigned address, Place place);
  void arrive(Lane& lane, Mbarrier& m, std::int64_t expected, Place place);
  void try_complete(Mbarrier& m, Lane& lane, Place place);
  void complete(Mbarrier& m);
  // boxes
  void load(Lane& lane, const Box& box, Mbarrier& m, Place place);
  void store(Lane& lane, const Box& box, Place place);
  void wait_stores(Lane& lane, unsigned pending, bool read);
  // instructions that a warpgroup executes together
  void execute_aligned(Warp& warp, std::uint64_t operand, bool product = false);
  void end_aligned();
  // products
  Warpgroup& warpgroup(Lane& lane, Place place);
  void finish(Warp& warp);
  void leave_products(Lane& lane);
};

}  // namespace emulator

#include "emu_show_names.h"
