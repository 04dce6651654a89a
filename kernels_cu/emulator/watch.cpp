#include "watch.h"

#include <chrono>

#include "faults.h"
#include "launch.h"
#include "machine.h"

namespace emulator {

namespace {

// Seconds of processor time without a call of the runtime. No proper work of a lane takes this long.
constexpr double LONG = 0.4;
constexpr std::chrono::milliseconds PAUSE{100};

}  // namespace

Watch::Seen::Seen(const Block& block, pthread_t thread)
    : block(block), thread(thread), lane(nullptr), polls(0), seconds(0) {}

// It reads what the thread writes. An old value is as good.
bool Watch::Seen::stuck() {
  const Lane* running = __atomic_load_n(&block.running, __ATOMIC_RELAXED);
  const std::uint32_t count = running ? __atomic_load_n(&running->polls, __ATOMIC_RELAXED) : 0;
  const double now = processor_seconds(thread);
  if (!running || running != lane || count != polls) {
    lane = running, polls = count, seconds = now;
    return false;
  }
  return now - seconds > LONG;
}

void Watch::Seen::stop() const {
  sigval value{};
  value.sival_int = static_cast<int>(polls);
  pthread_sigqueue(thread, LATE, value);
}

Watch::Watch(const Launch& launch) : launch_(launch) {
  thread_ = std::thread([this] { look(); });
}

Watch::~Watch() {
  {
    const std::lock_guard lock(busy_);
    over_ = true;
  }
  end_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Watch::look() {
  std::unique_lock lock(busy_);
  while (!end_.wait_for(lock, PAUSE, [this] { return over_; }))
    for (auto& seen : all_)
      if (launch_.late(seen.thread) && seen.stuck()) seen.stop();
}

Watch::Watched::Watched(Watch& watch, const Block& block) : watch_(watch) {
  const std::lock_guard lock(watch.busy_);
  seen_ = watch.all_.emplace(watch.all_.end(), block, pthread_self());
}

Watch::Watched::~Watched() {
  const std::lock_guard lock(watch_.busy_);
  watch_.all_.erase(seen_);
}

}  // namespace emulator
