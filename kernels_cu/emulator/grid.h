// A barrier of all blocks of a grid: grid.sync(). Each block waits on its own thread of the operating system. So all must be
// resident at once. After the barrier all threads know what any thread did before it.
#pragma once
#include "emu_hide_names.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "order.h"

namespace emulator {

struct Block;
struct Lane;

class GridBarrier {
 public:
  // Waits until all blocks have come, and returns what they know. Returns null if they never will, or if the launch is over.
  View wait(Block& block, const Lane& lane, const View& known);
  void left(std::uint64_t block);  // it has ended

 private:
  std::mutex busy_;
  std::condition_variable changed_;
  std::uint64_t round_ = 0, there_ = 0, ended_ = 0, one_that_ended_ = 0;
  View coming_, known_;  // what the blocks know that are there, and what all knew the last time
  bool told_ = false;
};

}  // namespace emulator

#include "emu_show_names.h"
