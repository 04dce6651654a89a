// What waits for what: the host for streams, streams for each other. Vector clocks tell it, at the grain of launches and copies.
#include <algorithm>
#include <set>

#include "host.h"

#define HERE __builtin_return_address(0)

struct CUstream_st { unsigned actor; };
struct CUevent_st {
  emulator::Clock clock;
  double at = -1;
};

namespace emulator {

namespace {

constexpr std::size_t MOST_PAST = 1000;

std::string named(const Program& p, unsigned actor) {
  if (actor == 0) return "the host";
  if (actor == 1) return p.clocks.size() > 2 ? "the default stream" : "the GPU";
  return "stream " + std::to_string(actor - 1);
}

bool knows(const Clock& clock, const Past& past) { return past.actor < clock.size() && clock[past.actor] >= past.when; }

}  // namespace

// Only with several streams, or with memory that host and device share, can an order be missing.
bool Program::ordered() const {
  if (!given.sanitize) return false;
  return clocks.size() > 2 || shared_top != shared;
}

unsigned Program::actor_of(cudaStream_t stream) const {
  return reinterpret_cast<std::uintptr_t>(stream) < 3 ? 1 : stream->actor;  // null, cudaStreamLegacy, cudaStreamPerThread
}

void Program::join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

unsigned Program::begin_operation(cudaStream_t stream) {
  const unsigned actor = actor_of(stream);
  Clock& clock = clocks[actor];
  join(clock, clocks[0]);
  if (actor == 1) {
    for (unsigned other = 2; other < clocks.size(); ++other)
      if (blocking[other]) join(clock, clocks[other]);
  } else if (blocking[actor]) {
    join(clock, clocks[1]);
  }
  if (clock.size() <= actor) clock.resize(actor + 1);
  ++clock[actor], ++clocks[0][0];
  pending = true;
  return actor;
}

void Program::wait_for(unsigned actor) {
  join(clocks[0], clocks[actor]);
  pending = false;
  for (unsigned other = 1; other < clocks.size(); ++other)
    pending |= other >= clocks[0].size() || clocks[0][other] < clocks[other][other];
}

void Program::wait_for_all() {
  for (unsigned other = 1; other < clocks.size(); ++other) join(clocks[0], clocks[other]);
  pending = false;
}

void Program::touch(Allocation& allocation, const std::vector<Touched>& bytes, unsigned actor, const std::string& what, Place place) {
  const Clock& clock = clocks[actor];
  for (const Touched& mine : bytes) {
    for (std::size_t i = 0; i < allocation.past.size();) {
      const Past& past = allocation.past[i];
      const bool overlap = past.bytes.begin < mine.end && mine.begin < past.bytes.end, known = knows(clock, past);
      if (overlap && !known && (past.bytes.write || mine.write)) {
        const std::string who = actor ? what + " in " + named(*this, actor) + " " : "";
        std::string message = who + (mine.write ? "writes" : "reads") + " what " + past.what + " in " + named(*this, past.actor) +
                              (past.bytes.write ? " writes" : " reads") + ", and " +
                              (actor ? "neither waits for the other" : "the host hasn't waited for it (cudaDeviceSynchronize)");
        Finding found = finding(actor ? "race between streams" : "host race", message, place, &allocation,
                                std::max(mine.begin, past.bytes.begin));
        found.has_other = true, found.other = past.place;
        findings.add(std::move(found));
      }
      if (known && mine.begin <= past.bytes.begin && past.bytes.end <= mine.end && (mine.write || !past.bytes.write)) {
        allocation.past[i] = std::move(allocation.past.back());
        allocation.past.pop_back();
      } else {
        ++i;
      }
    }
    if (actor && allocation.past.size() < MOST_PAST) allocation.past.push_back({mine, actor, clock[actor], what, place});
  }
}

}  // namespace emulator

using namespace emulator;

extern "C" {

int emu_host_stream(cudaStream_t* made, int non_blocking) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  const auto actor = static_cast<unsigned>(p.clocks.size());
  p.clocks.push_back(Clock(actor + 1, 0));
  p.blocking.push_back(!non_blocking);
  *made = new CUstream_st{actor};
  return cudaSuccess;
}

// A stream that is null here is the default one; `all` means every stream.
int emu_host_wait(cudaStream_t stream, int all) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (all) {
    p.wait_for_all();
  } else {
    const unsigned actor = p.actor_of(stream);
    if (actor == 1)
      for (unsigned other = 2; other < p.clocks.size(); ++other)
        if (p.blocking[other]) p.join(p.clocks[1], p.clocks[other]);
    p.wait_for(actor);
  }
  return p.sticky ? p.failed(p.sticky, "", HERE) : cudaSuccess;
}

int emu_host_event(cudaEvent_t* made) {
  *made = new CUevent_st;
  return cudaSuccess;
}

int emu_host_record(cudaEvent_t event, cudaStream_t stream) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (!event) return p.failed(cudaErrorInvalidResourceHandle, "the event was never created", HERE);
  event->clock = p.clocks[p.begin_operation(stream)];
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->at = 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
  return p.sticky ? p.failed(p.sticky, "", HERE) : cudaSuccess;
}

int emu_host_wait_event(cudaStream_t stream, cudaEvent_t event) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (!event) return p.failed(cudaErrorInvalidResourceHandle, "the event was never created", HERE);
  p.join(p.clocks[p.begin_operation(stream)], event->clock);
  return cudaSuccess;
}

int emu_host_sync_event(cudaEvent_t event) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (!event) return p.failed(cudaErrorInvalidResourceHandle, "the event was never created", HERE);
  p.join(p.clocks[0], event->clock);
  p.wait_for(0);
  return p.sticky ? p.failed(p.sticky, "", HERE) : cudaSuccess;
}

int emu_host_elapsed(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (!first || !last || first->at < 0 || last->at < 0) return p.failed(cudaErrorInvalidResourceHandle, "an event was never recorded", HERE);
  *milliseconds = static_cast<float>(std::max(last->at - first->at, 1e-3));
  return cudaSuccess;
}
}
