#include "grid.h"

#include <chrono>
#include <string>

#include "launch.h"
#include "machine.h"
#include "primitives.h"

namespace emulator {

View GridBarrier::wait(Block& block, const Lane& lane, const View& known) {
  Launch& launch = block.launch;
  std::unique_lock lock(busy_);
  const std::uint64_t round = round_;
  coming_ = join(coming_, known);
  if (++there_ == launch.blocks) {
    known_ = coming_, coming_ = nullptr;
    there_ = 0, ++round_;
    changed_.notify_all();
    return known_;
  }
  lock.unlock();
  launch.begin_another();  // it may be one that hasn't begun
  lock.lock();
  while (round_ == round && !launch.stop && !launch.cramped) {
    const bool late = launch.late();
    if (ended_ || late) {
      if (told_) return nullptr;
      told_ = true;
      Finding found = block.finding(ended_ ? "deadlock" : "time limit", lane.place, lane);
      found.message = "waits in grid.sync() for ";
      found.message += ended_ ? "block " + std::to_string(one_that_ended_) + ", which has ended"
                              : std::to_string(launch.blocks - there_) + " blocks, which haven't come after " + launch.limit();
      block.findings.add(std::move(found));
      return nullptr;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(50));
  }
  return round_ == round ? nullptr : known_;
}

void GridBarrier::left(std::uint64_t block) {
  const std::lock_guard lock(busy_);
  if (!ended_++) one_that_ended_ = block;
  changed_.notify_all();
}

// Waits for the other blocks, if the block's threads wait for the grid's barrier. Returns false if they don't.
bool Block::at_grid() {
  Lane* first = nullptr;
  for (auto& lane : lanes)
    if (!first && !lane->done && lane->wait == Wait::grid) first = lane.get();
  if (!first) return false;
  clocks.join_all();
  first->fence(true);
  if (!idle) idle = true, ++launch.idle;
  const View known = launch.grid.wait(*this, *first, clocks.order(first->number).ready);
  idle = false, --launch.idle;
  aborted = !known;
  if (aborted) return true;
  Order order = clocks.order(first->number);
  order.knows = join(order.knows, known);
  clocks.orders.assign(clocks.threads, order);
  for (auto& lane : lanes)
    if (lane->wait == Wait::grid) wake(*lane);
  return true;
}

extern "C" void emu_grid_sync() {
  const Place here = __builtin_return_address(0);
  Lane& lane = current_lane();
  Block& block = *lane.block;
  const Launch& launch = block.launch;
  if (launch.blocks > launch.most_resident) {
    Finding found = block.finding("not emulated", here, lane);
    found.message = "is in grid.sync() of " + std::to_string(launch.blocks) + " blocks, and of this size " +
                    std::to_string(launch.most_resident) + " at a time is the most";
    block.findings.add(std::move(found));
    block.abort();
  }
  wait_barrier(0, 0, here);
  lane.wait = Wait::grid;
  lane.place = here;
  lane.what = "the whole grid";
  block.yield();
}

}  // namespace emulator
