#include "order.h"

#include <algorithm>

#include "launch.h"
#include "machine.h"

namespace emulator {

namespace {

bool reaches(const Known::Clock& clock, const Access& access) {
  const auto at = std::lower_bound(clock.begin(), clock.end(), std::pair{access.thread, std::uint32_t{0}});
  return at != clock.end() && at->first == access.thread && at->second >= access.clock;
}

// The later of two clocks, for every thread that either of them has.
template <class Add>
void for_each(const Known::Clock& a, const Known::Clock& b, Add&& add) {
  auto x = a.begin(), y = b.begin();
  while (x != a.end() || y != b.end()) {
    if (y == b.end() || (x != a.end() && x->first < y->first)) add(x->first, x->second), ++x;
    else if (x == a.end() || y->first < x->first) add(y->first, y->second), ++y;
    else add(x->first, std::max(x->second, y->second)), ++x, ++y;
  }
}

}  // namespace

bool Known::has(const Access& access) const {
  return (access.thread < threads && access.clock <= floor) || reaches(above, access);
}

namespace {

std::shared_ptr<const Known> join(const std::shared_ptr<const Known>& a, const std::shared_ptr<const Known>& b) {
  if (a == b) return a;
  Known both;
  both.threads = a->threads;
  both.floor = std::max(a->floor, b->floor);
  for_each(a->above, b->above, [&](std::uint16_t thread, std::uint32_t clock) {
    if (thread >= both.threads || clock > both.floor) both.above.emplace_back(thread, clock);
  });
  for_each(a->fenced, b->fenced, [&](std::uint16_t thread, std::uint32_t clock) { both.fenced.emplace_back(thread, clock); });
  return std::make_shared<const Known>(std::move(both));
}

}  // namespace

View join(const View& a, const View& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto both = std::make_shared<Views>();
  both->reserve(std::max(a->size(), b->size()));
  auto x = a->begin(), y = b->begin();
  while (x != a->end() || y != b->end()) {
    if (y == b->end() || (x != a->end() && x->first < y->first)) both->push_back(*x++);
    else if (x == a->end() || y->first < x->first) both->push_back(*y++);
    else both->emplace_back(x->first, join(x->second, y->second)), ++x, ++y;
  }
  return both;
}

namespace {

const Known* of_block(const View& view, std::uint32_t block) {
  if (!view) return nullptr;
  const auto at = std::lower_bound(view->begin(), view->end(), block, [](const auto& one, std::uint32_t wanted) { return one.first < wanted; });
  return at != view->end() && at->first == block ? at->second.get() : nullptr;
}

}  // namespace

bool knows(const View& view, const Access& access) {
  const Known* known = of_block(view, access.block);
  return known && known->has(access);
}

bool fenced(const View& view, const Access& access) {
  const Known* known = of_block(view, access.block);
  return known && (access.thread >= known->threads || reaches(known->fenced, access));
}

void Order::join(const Order& other) {
  knows = emulator::join(knows, other.knows);
  shown = emulator::join(shown, other.shown);
  ready = emulator::join(ready, other.ready);
  ready_here = emulator::join(ready_here, other.ready_here);
}

void Handed::add(const void* address, const View& view) {
  if (!view) return;
  const std::lock_guard lock(busy_);
  View& known = views_[address];
  known = join(known, view);
}

View Handed::at(const void* address) {
  const std::lock_guard lock(busy_);
  const auto found = views_.find(address);
  return found == views_.end() ? nullptr : found->second;
}

void Handed::clear() {
  const std::lock_guard lock(busy_);
  views_.clear();
}

void Heard::add(const void* address) {
  const unsigned known = std::min<unsigned>(count, addresses.size());
  if (std::find(addresses.begin(), addresses.begin() + known, address) == addresses.begin() + known)
    addresses[count++ % addresses.size()] = address;
}

// A lane

// From here on the lane knows what was handed on where it has read.
void Lane::take_over(bool everywhere) {
  if (!block->launch.fences) return void(heard.count = 0);
  const unsigned known = std::min<unsigned>(heard.count, heard.addresses.size());
  Clocks& clocks = block->clocks;
  Order& order = clocks.order(number);
  for (unsigned i = 0; i < known; ++i) {
    View found = block->handed.at(heard.addresses[i]);
    if (everywhere) found = join(found, block->launch.handed.at(heard.addresses[i]));
    if (!found) continue;
    order.knows = join(order.knows, found);
    clocks.ordered = true;
    const Known* own = of_block(found, static_cast<std::uint32_t>(block->number));
    if (!own) continue;
    std::uint32_t* row = clocks.of(number);
    for (const auto& [thread, clock] : own->above)
      if (thread < clocks.width) row[thread] = std::max(row[thread], clock);
  }
  heard.count = 0;
}

void Lane::fence(bool everywhere) {
  block->launch.fences = true;
  take_over(everywhere);
  Clocks& clocks = block->clocks;
  Known mine;
  mine.threads = clocks.threads;
  mine.floor = clocks.floor;
  std::uint32_t* row = clocks.of(number);
  for (int column = 0; column < clocks.width; ++column) {
    const bool fences = clocks.proxies() && column >= clocks.threads && column < 2 * clocks.threads;
    if (fences && row[column]) mine.fenced.emplace_back(column - clocks.threads, row[column]);
    if (!fences && row[column] > (column < clocks.threads ? mine.floor : 0)) mine.above.emplace_back(column, row[column]);
  }
  ++row[number];  // what it does next isn't part of it
  Order& order = clocks.order(number);
  const auto known = std::make_shared<const Known>(std::move(mine));
  const View view = join(order.knows, std::make_shared<const Views>(Views{{static_cast<std::uint32_t>(block->number), known}}));
  (everywhere ? order.ready : order.ready_here) = view;
  clocks.ordered = true;
}

void Lane::hand_on(const void* address, bool shared) {
  Clocks& clocks = block->clocks;
  if (!clocks.ordered) return;
  const Order& order = clocks.order(number);
  block->handed.add(address, join(order.ready, order.ready_here));
  if (!shared) block->launch.handed.add(address, order.ready);
}

}  // namespace emulator
