// Loops. A lane in a loop lets others run now and then. A lane that waits for others may need blocks that haven't begun.
#include <algorithm>
#include <thread>

#include "launch.h"
#include "machine.h"

namespace emulator {

void Block::poll(Lane& lane, Place place) {
  constexpr std::uint32_t PATIENCE = 1024;
  if (++lane.polls % PATIENCE) return;
  if (launch.late()) too_late(lane, place), yield();
  lane.place = place;
  wake(lane);
  yield();
}

namespace {

constexpr std::uint32_t MANY = 32, NEAR = 256;  // how many reads in a row make a spin; the most polls between two of them

}  // namespace

bool Lane::spinning() const { return spins >= MANY && polls - spun_at < NEAR; }

void Block::spin(Lane& lane, const void* address, Place place) {
  lane.spins = lane.spins_on == address && lane.polls - lane.spun_at < NEAR ? lane.spins + 1 : 1;
  lane.spins_on = address;
  lane.spun_at = lane.polls;
  if (lane.spins % MANY) return;
  if (launch.late()) too_late(lane, place), yield();
  if (waits() != idle) idle = !idle, launch.idle += idle ? 1 : -1;
  if (idle) launch.begin_another(), std::this_thread::yield();  // another block has to go on
  lane.place = place;
  wake(lane);
  yield();
}

bool Block::waits() const {
  return std::all_of(lanes.begin(), lanes.end(), [](const auto& lane) { return lane->done || lane->wait != Wait::nothing || lane->spinning(); });
}

// If all that is left waits, no time would be enough.
void Block::too_late(const Lane& lane, Place place) {
  aborted = true;
  const bool others_wait = launch.idle - idle == launch.resident - 1;
  const bool deadlock = waits() && others_wait;
  Finding found = finding(deadlock ? "deadlock" : "time limit", place, lane);
  found.message = deadlock ? std::string("still waits here after ") + launch.limit() + ", in a loop: nobody writes what it waits for"
                           : std::string("is still running after ") + launch.limit();
  if (deadlock && launch.next < launch.blocks)
    found.message += ", or blocks from " + std::to_string(launch.next) + " on do, which aren't begun: " +
                     std::to_string(launch.most_resident) + " at a time is the most";
  findings.add(std::move(found));
}

}  // namespace emulator
