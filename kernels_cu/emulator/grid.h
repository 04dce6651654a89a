// A barrier of all blocks of a grid: grid.sync(). Each block waits on a thread of the operating system of its own, so all
// must be resident at once. What any thread did before it, all know behind it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "order.h"

namespace emulator {

struct Block;
struct Lane;

class GridBarrier {
 public:
  // Waits until all blocks have come, and returns what they know. Null: they never will, or the launch is over.
  View wait(Block& block, const Lane& lane, const View& known);
  void left(std::uint64_t block);  // it has ended

 private:
  std::mutex busy_;
  std::condition_variable changed_;
  std::uint64_t round_ = 0, there_ = 0, ended_ = 0, one_that_ended_ = 0;
  View coming_, known_;  // by the blocks that are there, and by all at the last time
  bool told_ = false;
};

}  // namespace emulator
