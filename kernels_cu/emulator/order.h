// What orders threads beside barriers: fences, with an atomic or volatile store behind them and an atomic or volatile load
// before them (PTX: release and acquire patterns). So a thread knows of others of its block, and of other blocks.
//
//   a fence        makes what its thread knows by then ready to be handed on
//   a store        (atomic or volatile) hands on at its address what is ready. Without a fence nothing is ready
//   a load         (atomic or volatile) is remembered, and
//   a fence        or a barrier behind it takes over what was handed on there
//
// A view never changes once other threads may see it. It lives as long as something points to it. So blocks may end, and may run
// on other threads of the operating system.
#pragma once
#include "emu_hide_names.h"

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace emulator {

struct Access;
struct Clocks;

// What is known of one block: everything of all its threads up to `floor`, and of some threads more.
struct Known {
  using Clock = std::vector<std::pair<std::uint16_t, std::uint32_t>>;  // thread or agent, and its clock; in order
  int threads = 0;
  std::uint32_t floor = 0;
  Clock above;
  Clock fenced;  // how far a proxy fence of its own has shown writes to the engines
  bool has(const Access& access) const;
};

// What is known of blocks, in order of their numbers.
using Views = std::vector<std::pair<std::uint32_t, std::shared_ptr<const Known>>>;
using View = std::shared_ptr<const Views>;  // null: of none

View join(const View& a, const View& b);
bool knows(const View& view, const Access& access);
bool fenced(const View& view, const Access& access);  // by a proxy fence of the other block

// What a thread knows beside its vector clock.
struct Order {
  View knows;             // other blocks
  View shown;             // what a proxy fence has shown to the engines of it
  View ready, ready_here;  // by a fence for the device, and by one for the block only
  bool any() const { return knows || ready || ready_here; }
  void join(const Order& other);
};

// A vector clock that is handed from threads to threads, and what goes with it.
struct Horizon : std::vector<std::uint32_t> {
  Order order;
};

// What was handed on, by address.
class Handed {
 public:
  void add(const void* address, const View& view);
  View at(const void* address);
  void clear();

 private:
  std::mutex busy_;
  std::unordered_map<const void*, View> views_;
};

// The addresses that a thread has read by atomics or volatile since its last fence: the latest of them.
struct Heard {
  std::array<const void*, 8> addresses{};
  unsigned count = 0;
  void add(const void* address);
};

}  // namespace emulator

#include "emu_show_names.h"
