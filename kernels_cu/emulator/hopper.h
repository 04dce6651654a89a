// Hopper's engines: what a block sets going and goes on without.
//
//   mbarriers   count arrivals and bytes in phases; who waits for a phase sees what its arrivals released and its copies wrote
//   boxes       tiles of arrays in HBM that the copy engine (TMA) brings to SRAM or takes from there, swizzled
//   products    of a warpgroup (wgmma): operands in SRAM, accumulators in the registers of 128 threads
//
// All of it takes effect as late as the rules allow: a box arrives when its mbarrier's phase has all else it needs and somebody
// waits for it, a product is computed when it is waited for. Until then the box's place in SRAM is PENDING, and accumulators
// hold NaNs.
#pragma once

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

// What flashlab/emulator/maps.py makes, in place of cuTensorMapEncodeTiled.
struct TensorMap {
  static constexpr std::uint64_t MAGIC = 0x50414d524f534e54;  // "TNSORMAP"
  static constexpr int MOST_DIMENSIONS = 5;

  std::uint64_t magic;
  char* base;
  std::int64_t stride[MOST_DIMENSIONS - 1];  // bytes, of the dimensions after the innermost
  std::uint32_t extent[MOST_DIMENSIONS], box[MOST_DIMENSIONS];
  std::uint32_t element_bytes, rank, swizzle;
  unsigned char unused[28];
};
static_assert(sizeof(TensorMap) == 128, "as large as CUtensorMap");

// One box of an array, and its place in SRAM.
struct Box {
  TensorMap map;
  std::array<std::int64_t, TensorMap::MOST_DIMENSIONS> corner;
  unsigned sram;
  Lane* lane;  // who asked for it
  Place place;

  struct Row { char* at; unsigned begin, end; };  // bytes begin..end of the row lie inside the array, the first of them at `at`
  unsigned row_bytes() const { return map.box[0] * map.element_bytes; }
  unsigned rows() const { return map.box[1] * map.box[2] * map.box[3] * map.box[4]; }
  unsigned bytes() const { return rows() * row_bytes(); }
  unsigned inside() const;  // of them
  Row row(unsigned i) const;
  unsigned chunk(unsigned row, unsigned i) const;  // the shared address of its 16-byte piece i
  bool covers(unsigned address, unsigned n) const { return address < sram + bytes() && sram < address + n; }
};

// 128-byte rows, say: chunk c of row r lies at place c ^ (r % 8). `span`: bytes of a row, 0 for none.
inline unsigned swizzled(unsigned address, unsigned span) {
  return span ? address ^ ((address >> 7 & (span / CHUNK - 1)) * CHUNK) : address;
}

struct Mbarrier {
  unsigned address = 0, arrivals = 0;  // of a phase
  unsigned missing = 0;                // arrivals, in this phase
  std::int64_t expected = 0, coming = 0;  // bytes
  std::uint32_t phase = 0;             // phases that are over
  int agent = 0;                       // its clock is that number + 1
  Access made{};
  bool published = false;
  std::vector<Box> loads;
  std::vector<std::uint32_t> released, completed;  // clocks: of all arrivals, and as they were at the end of a phase
};

// C of products that run one after the other on the same registers.
struct Accumulators {
  int fragments = 0;
  std::array<std::array<float*, 32>, 4> at{};  // by warp and lane
  std::vector<float> values;                   // 64 x 8 fragments
  std::array<std::uint64_t, 4> last{};         // product that each warp has issued
};

struct Product {
  std::uint64_t a = 0, b = 0, shape = 0;  // descriptors; what else must be the same in all lanes
  int fragments = 0, element = 0;
  bool add = false, b_columns = false, a_in_registers = false;
  std::vector<std::uint32_t> registers;  // A: four of each thread
  std::shared_ptr<Accumulators> c;
  unsigned warps = 0;                // that have issued it
  std::vector<std::uint32_t> knows;  // clocks: what came before it, in each of its warps
  const char* step = "";
  Place place{};
};

struct Warpgroup {
  int agent = -1;                   // its clock: products that are over
  std::deque<Product> products;
  std::uint64_t first = 0, done = 0;  // the number of products.front(), and how many are computed
  struct Queue {                      // of a warp
    std::uint64_t issued = 0, wanted = 0, waited = 0;
    std::vector<std::uint64_t> groups;  // products up to each commit
    std::vector<std::shared_ptr<Accumulators>> running;
  };
  std::array<Queue, 4> queues;
};

// The instructions that all four warps of a warpgroup execute together (PTX: `.aligned`), in the order in which the first warp
// came to them. What another warp executes in their place must be the same instruction of the same line. A section ends
// with a product, so that after a difference the comparison begins anew at the next one.
struct Aligned {
  struct Step { const char* what; std::uint64_t operand; Place place; const Lane* lane; };
  struct Section { std::vector<Step> steps; bool parted = false; };
  struct Reached { std::uint64_t section = 0; std::size_t step = 0; };
  std::deque<Section> sections;
  std::uint64_t first = 0;  // the number of sections.front()
  std::array<Reached, 4> warps;
};

// What a thread's products use of its registers, as it was at the thread's last wgmma_fence.
struct Registers {
  struct Operand { const char* at; std::size_t bytes; std::vector<char> fenced; };
  std::vector<Operand> operands;
  bool fenced = false;
};

// A thread's copies of boxes to HBM: groups close one after the other, and are waited for so.
struct Stores {
  struct Store { Box box; unsigned group; bool read; std::vector<char> data; };
  std::vector<Store> list;
  unsigned group = 0;
  int reader = -1, writer = -1;  // agents: of SRAM, of HBM
};

struct Hopper {
  explicit Hopper(Block& block) : block(block) {}

  Block& block;
  std::map<unsigned, Mbarrier> mbarriers;
  std::vector<Warpgroup> warpgroups;
  std::vector<Aligned> aligned;                      // by warpgroup
  std::map<int, Stores> stores;                      // by thread
  std::map<int, Registers> registers;                // by thread
  std::vector<unsigned> most_registers;              // by warp
  unsigned handovers = 0;                            // how often that changed
  struct MbarrierWait { unsigned address; std::uint32_t phase; bool woken; std::uint64_t failed; };
  std::map<int, MbarrierWait> waits;                 // by thread
  std::uint64_t progress = 1;

  bool go_on();     // nobody can run: may somebody's wait end without success?
  void deadlock();  // says who waits for ever for what is kept here
  void finished(Lane& lane);
  void end();  // of the block
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
  // what a warpgroup executes together
  void execute_aligned(Warp& warp, std::uint64_t operand, bool product = false);
  void end_aligned();
  // products
  Warpgroup& warpgroup(Lane& lane, Place place);
  void finish(Warp& warp);
  void leave_products(Lane& lane);
};

}  // namespace emulator
