#include "memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hopper.h"
#include "launch.h"
#include "machine.h"

namespace emulator {

// Clocks

void Clocks::reset(int count) {
  threads = width = capacity = count;
  floor = 0;
  seen.assign(static_cast<std::size_t>(count) * count, 0);
  orders.assign(count, {});
  ordered = false;
  for (int t = 0; t < count; ++t) of(t)[t] = 1;
}

void Clocks::watch_proxies() {
  if (!proxies()) width = 2 * threads;
  if (width < capacity) return;
  const int room = width + 64;
  std::vector<std::uint32_t> wider(static_cast<std::size_t>(threads) * room);
  for (int t = 0; t < threads; ++t) std::copy_n(of(t), std::min(width, capacity), &wider[static_cast<std::size_t>(t) * room]);
  seen = std::move(wider);
  capacity = room;
}

int Clocks::add_agent() {
  watch_proxies();
  return width++;
}

void Clocks::fence(int thread) {
  watch_proxies();
  std::uint32_t* row = of(thread);
  for (int t = 0; t < threads; ++t) row[threads + t] = std::max({row[threads + t], row[t], floor});
  order(thread).shown = order(thread).knows;
  ++row[thread];  // what it writes next isn't part of it
}

void Clocks::join_all() {
  for (int t = 0; t < threads; ++t) floor = std::max(floor, now(t));
  for (int t = 0; t < threads; ++t) of(t)[t] = floor + 1;
  for (int column = threads; column < width; ++column) {
    std::uint32_t most = 0;
    for (int t = 0; t < threads; ++t) most = std::max(most, of(t)[column]);
    for (int t = 0; t < threads; ++t) of(t)[column] = most;
  }
  if (!ordered) return;
  Order all;
  for (const Order& one : orders) all.join(one);
  orders.assign(threads, all);
}

void Clocks::release(int thread, Horizon& into) {
  into.resize(width);
  if (ordered) into.order.join(order(thread));
  for (int t = 0; t < width; ++t) into[t] = std::max(into[t], of(thread)[t]);
  ++of(thread)[thread];
}

void Clocks::acquire(int thread, const Horizon& from) {
  if (from.order.any()) order(thread).join(from.order);
  const int known = static_cast<int>(from.size());  // there may be more agents by now
  for (int t = 0; t < known; ++t) of(thread)[t] = std::max(of(thread)[t], from[t]);
}

// HBM

void Region::watch() {
  watched = true;
  pages = std::make_unique<std::atomic<Chunk*>[]>(page_count());
}

Region::Chunk* Region::begin_page(std::atomic<Chunk*>& page) {
  auto* fresh = new Chunk[of_a_page];
  Chunk* found = nullptr;
  if (page.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return fresh;
  delete[] fresh;  // another thread was first
  return found;
}

Region::~Region() {
  if (!pages) return;
  for (std::uint64_t i = 0; i < page_count(); ++i) delete[] pages[i].load(std::memory_order_relaxed);
}

// SRAM

void Sram::lay_out(unsigned dynamic_bytes) {
  dynamic = static_cast<char*>(emu_dynamic_sram());
  std::int64_t first = static_arrays().empty() ? 0 : static_arrays().front().from_dynamic;
  for (const auto& array : static_arrays()) first = std::min(first, array.from_dynamic);
  statics = dynamic + first;
  static_bytes = 0;
  statics_by_name.clear();
  for (const auto& array : static_arrays()) {
    const auto begin = static_cast<unsigned>(array.from_dynamic - first);
    statics_by_name.push_back({array.name.c_str(), SRAM_ORIGIN + begin, SRAM_ORIGIN + begin + array.bytes});
    static_bytes = std::max(static_bytes, begin + array.bytes);
  }
  dynamic_begin = (SRAM_ORIGIN + static_bytes + 1023) / 1024 * 1024;
  end = dynamic_begin + dynamic_bytes;
  state.assign(end, UNWRITTEN);
  chunks.assign(end / CHUNK + 1, {});
}

void Sram::clear() {
  std::fill(state.begin(), state.end(), UNWRITTEN);
  for (auto& chunk : chunks) chunk.clear();
  for (const auto& array : statics_by_name) std::memset(pointer(array.begin), POISON, array.end - array.begin);
  std::memset(dynamic, POISON, end - dynamic_begin);
  names.clear();
}

char* Sram::pointer(unsigned address) const {
  return address < dynamic_begin ? statics + (address - SRAM_ORIGIN) : dynamic + (address - dynamic_begin);
}

bool Sram::shared_address(const void* pointer, unsigned& address) const {
  auto* at = static_cast<const char*>(pointer);
  if (at >= statics && at < statics + (dynamic_begin - SRAM_ORIGIN)) {  // or in the gap behind them, where nothing lies
    address = SRAM_ORIGIN + static_cast<unsigned>(at - statics);
    return true;
  }
  if (at >= dynamic && at < dynamic + (1 << 18)) {
    address = dynamic_begin + static_cast<unsigned>(at - dynamic);
    return true;
  }
  return false;
}

const Sram::Name* Sram::name_of(unsigned address) const {
  for (const auto& list : {&names, &statics_by_name})
    for (const auto& name : *list)
      if (address >= name.begin && address < name.end) return &name;
  return nullptr;
}

// For an address in the gap before the dynamic SRAM: the static array that ends there.
const Sram::Name* Sram::before(unsigned address) const {
  const Name* last = nullptr;
  if (address < dynamic_begin)
    for (const auto& name : statics_by_name)
      if (name.end <= address && (!last || name.end > last->end)) last = &name;
  return last;
}

// Findings

namespace {

std::string count_of(std::int64_t n, const char* noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

}  // namespace

namespace {

Finding global_finding(Lane& lane, const char* kind, std::string message, Place place, const Region* region, const void* address,
                       unsigned bytes, const Access* other) {
  Finding finding = lane.block->finding(kind, place, lane);
  finding.message = std::move(message);
  finding.space = "hbm";
  finding.address = address;
  finding.bytes = static_cast<int>(bytes);
  if (region) finding.tensor = region->name, finding.offset = static_cast<const char*>(address) - region->base;
  if (other) lane.block->tell_other(finding, *other);
  return finding;
}

Finding shared_finding(Lane& lane, const char* kind, std::string message, Place place, unsigned address, unsigned bytes,
                       const Access* other) {
  Finding finding = lane.block->finding(kind, place, lane);
  const Sram& sram = lane.block->sram;
  finding.message = std::move(message);
  finding.space = "sram";
  finding.bytes = static_cast<int>(bytes);
  const auto* name = sram.name_of(address);
  if (!name) name = sram.before(address);
  finding.tensor = name ? name->name : "SRAM";
  finding.offset = static_cast<std::int64_t>(address) - (name ? name->begin : sram.dynamic_begin);
  if (other) lane.block->tell_other(finding, *other);
  return finding;
}

// A race, unless it turns out to be harmless: two stores of one value (Block::settle), or a read that only guesses what a
// compare-and-swap then checks (Launch::guesses).
void found_race(Lane& lane, Finding finding, const Access& mine, const Access& other, Way way, const char* at) {
  Block& block = *lane.block;
  const bool guess = !mine.write && !mine.atomic && other.atomic, guessed = mine.atomic && !other.write && !other.atomic;
  if (way == Way::plain && mine.write && other.write && !other.atomic) {
    block.undecided.push_back({std::move(finding), at, {}});
    std::memcpy(block.undecided.back().before, at, block.undecided.back().finding.bytes);
  } else if (guess || guessed) {
    finding.guess = guess ? mine.place : other.place;
    block.guesses.add(std::move(finding));
  } else {
    block.findings.add(std::move(finding));
  }
}

}  // namespace

void add_global(Lane& lane, const char* kind, std::string message, Place place, const Region* region, const void* address,
                unsigned bytes, const Access* other) {
  lane.block->findings.add(global_finding(lane, kind, std::move(message), place, region, address, bytes, other));
}

void add_shared(Lane& lane, const char* kind, std::string message, Place place, unsigned address, unsigned bytes,
                const Access* other) {
  lane.block->findings.add(shared_finding(lane, kind, std::move(message), place, address, bytes, other));
}

namespace {

enum class Conflict { none, race, proxy };

// Did the thread of an access store to the same bytes itself, at a time of which no other thread has learnt? Then that store races
// with all that the access would race with. So it is the stores that tell: if they stored one value, the access is harmless.
bool stored_too(const Accesses& accesses, const Access& reader, std::uint16_t bytes) {
  for (const Access& own : accesses)
    if (own.write && !own.atomic && own.block == reader.block && own.thread == reader.thread && own.clock == reader.clock &&
        (bytes & ~own.bytes) == 0)
      return true;
  return false;
}

// Is the read of one thread told by the stores of both?
bool told_by_stores(const Accesses& accesses, const Access& past, const Access& mine) {
  if (past.write == mine.write || past.atomic || mine.atomic) return false;
  return stored_too(accesses, past.write ? mine : past, past.bytes & mine.bytes);
}

// Enters an access of one chunk. Returns a copy of the earlier access that it conflicts with, if there is one: a race, or a write
// that no proxy fence has shown to the engine that makes this access. What is `shared` with other blocks (HBM) isn't settled by a
// barrier of this block.
Conflict enter(const Actor& actor, Accesses& accesses, const Access& mine, bool shared, Access& other) {
  const Clocks& clocks = actor.lane.block->clocks;
  const View& view = clocks.orders[actor.lane.number].knows;
  const View& shown = clocks.orders[actor.lane.number].shown;
  Conflict conflict = Conflict::none;
  std::uint32_t reader = mine.block;  // another block that read it
  bool two_readers = false;           // two are enough to race with
  for (std::size_t i = 0; i < accesses.size();) {
    Access& past = accesses[i];
    const bool here = past.block == mine.block;
    const bool ordered = here ? (past.thread == mine.thread && !actor.engine) || clocks.happened_before(past, actor.knows)
                              : view && knows(view, past);
    if (conflict == Conflict::none && past.bytes & mine.bytes && (past.write || mine.write) && !(past.atomic && mine.atomic)) {
      if (!ordered) conflict = told_by_stores(accesses, past, mine) ? Conflict::none : Conflict::race;
      else if (actor.engine && past.write && !(here ? clocks.fenced(past, actor.knows) : knows(shown, past) || fenced(view, past)))
        conflict = Conflict::proxy;
      if (conflict != Conflict::none) other = past;
    }
    const bool covered = (past.bytes & ~mine.bytes) == 0;
    // whatever will race with the past access races with this one
    const bool replaced = covered && ordered && (mine.write || !past.write) && (past.atomic || !mine.atomic);
    // all threads have seen it, but an engine may not have seen a write
    const bool settled = !shared && past.thread < clocks.threads && past.clock <= clocks.floor && !(past.write && clocks.proxies());
    if (replaced || settled) {
      past = accesses.back();
      accesses.pop_back();
    } else {
      if (!here && !ordered && !past.write && (mine.bytes & ~past.bytes) == 0) {
        two_readers |= reader != mine.block && reader != past.block;
        reader = past.block;
      }
      ++i;
    }
  }
  if (mine.write || !two_readers) accesses.push_back(mine);
  return conflict;
}

const char* race_of(const Access& mine, const Access& other) {
  return mine.write ? other.write ? "writes what another thread wrote" : "writes what another thread read"
                    : "reads what another thread wrote";
}

std::string misaligned(unsigned bytes, bool write) {
  return std::string(write ? "writes " : "reads ") + count_of(bytes, "byte") + " at an address that isn't a multiple of that";
}

// The chunks of an access, one after the other: calls each(index, bytes of the chunk as bits).
template <class Each>
void for_chunks(std::uint64_t begin, unsigned bytes, Each each) {
  for (std::uint64_t at = begin, end = begin + bytes; at < end;) {
    const unsigned inside = at % CHUNK, n = static_cast<unsigned>(std::min<std::uint64_t>(CHUNK - inside, end - at));
    each(at / CHUNK, static_cast<std::uint16_t>(((1u << n) - 1) << inside));
    at += n;
  }
}

Actor actor_of(Lane& lane) {
  Clocks& clocks = lane.block->clocks;
  return {lane, clocks.of(lane.number), static_cast<std::uint16_t>(lane.number), clocks.now(lane.number), false};
}

// A volatile store that hands nothing on is like any other: a thread that reads it doesn't know what came before it.
bool strong(const Lane& lane, bool write, Way way) {
  if (way != Way::is_volatile) return way == Way::atomic || way == Way::relaxed;
  const Order& order = lane.block->clocks.order(lane.number);
  return !write || order.ready || order.ready_here;
}

Access access_of(const Actor& actor, bool write, bool atomic, Place place) {
  return {static_cast<std::uint32_t>(actor.lane.block->number), actor.clock, actor.thread, 0, write, atomic,
          static_cast<std::uint16_t>(actor.lane.number), place};
}

std::string proxy_of(const Access& mine) {
  return std::string(mine.write ? "overwrites" : "reads") + " what a thread stored, with no fence.proxy.async between";
}

// Before a copy arrives, and afterwards, its destination belongs to the thread that issued it.
bool race_shared(const Actor& actor, unsigned address, unsigned bytes, bool write, Way way, Place place) {
  Access mine = access_of(actor, write, strong(actor.lane, write, way), place), other{};
  bool race = false;
  for_chunks(address, bytes, [&](std::uint64_t chunk, std::uint16_t mask) {
    mine.bytes = mask;
    const Conflict conflict = enter(actor, actor.lane.block->sram.chunks[chunk], mine, false, other);
    if (conflict == Conflict::none) return;
    race = true;
    if (conflict == Conflict::proxy)
      return add_shared(actor.lane, "proxy fence forgotten", proxy_of(mine), place, address, bytes, &other);
    Finding found = shared_finding(actor.lane, "race", std::string(race_of(mine, other)) + ", with no barrier between", place, address, bytes, &other);
    found_race(actor.lane, std::move(found), mine, other, way, actor.lane.block->sram.pointer(address));
  });
  return race;
}

void race_global(const Actor& actor, Region& region, const void* address, unsigned bytes, bool write, Way way, Place place) {
  Lane& lane = actor.lane;
  Access mine = access_of(actor, write, strong(lane, write, way), place), other{};
  for_chunks(static_cast<const char*>(address) - region.base, bytes, [&](std::uint64_t index, std::uint16_t mask) {
    mine.bytes = mask;
    auto& chunk = region.chunk(index);
    while (chunk.busy.test_and_set(std::memory_order_acquire)) ++lane.polls;  // the lane waits, and isn't stuck
    const Conflict conflict = enter(actor, chunk.accesses, mine, true, other);
    chunk.busy.clear(std::memory_order_release);
    if (conflict == Conflict::none) return;
    if (conflict == Conflict::proxy)
      return add_global(lane, "proxy fence forgotten", proxy_of(mine), place, &region, address, bytes, &other);
    const bool here = other.block == mine.block;
    Finding found = global_finding(lane, here ? "race" : "race between blocks",
                                   std::string(race_of(mine, other)) + (here ? ", with no barrier between" : " in another block"),
                                   place, &region, address, bytes, &other);
    found_race(lane, std::move(found), mine, other, way, static_cast<const char*>(address));
  });
}

bool any(const unsigned char* state, unsigned bytes, State wanted) {
  return std::memchr(state, wanted, bytes) != nullptr;
}

}  // namespace

// Checks

namespace {

bool reach_global(const Actor& actor, const void* address, unsigned bytes, bool write, Way way, Place place, Region*& region) {
  Lane& lane = actor.lane;
  const bool atomic = way == Way::atomic;
  Launch& launch = lane.block->launch;
  region = launch.find(address, bytes);
  if (!region) {
    const Region* near = launch.nearest(address);
    std::string where = "no array lies there";
    if (near) {
      const std::int64_t offset = static_cast<const char*>(address) - near->base;
      where = offset < 0 ? count_of(-offset, "byte") + " before the start of " + near->name
                         : count_of(offset + bytes - near->bytes, "byte") + " past the end of " + near->name;
    }
    add_global(lane, "out of bounds", std::string(write ? "writes " : "reads ") + count_of(bytes, "byte") + ": " + where,
               place, near, address, bytes);
    return false;
  }
  const auto* watched = static_cast<const char*>(launch.given.watched);
  if (watched && write && watched - static_cast<const char*>(address) < bytes && watched >= address)
    add_global(lane, "stored", "stores here", place, region, address, bytes);
  if (!launch.sanitize()) return true;
  if (!actor.engine && reinterpret_cast<std::uintptr_t>(address) % bytes && (bytes & (bytes - 1)) == 0) {
    add_global(lane, "misaligned", misaligned(bytes, write), place, region, address, bytes);
    return false;
  }
  unsigned char* state = &region->state[static_cast<const char*>(address) - region->base];
  if (any(state, bytes, NOBODYS)) {
    add_global(lane, "poison", write ? "writes what belongs to nobody" : "reads what belongs to nobody", place, region, address, bytes);
    return true;
  }
  if (region->input) {
    if (write || atomic) add_global(lane, "input written", "writes an input", place, region, address, bytes);
  } else {
    race_global(actor, *region, address, bytes, write, way, place);
  }
  if ((!write || atomic) && any(state, bytes, UNWRITTEN))
    add_global(lane, "uninitialised", "reads what nobody wrote", place, region, address, bytes);
  if (write && !region->input) std::memset(state, WRITTEN, bytes);
  return true;
}

// Do the bytes belong to an mbarrier, or to a box that is on its way? Then no thread may touch them, and this adds a finding.
bool find_owner(Lane& lane, unsigned address, unsigned bytes, bool write, Place place) {
  const unsigned char* state = &lane.block->sram.state[address];
  if (any(state, bytes, MBARRIER)) {
    add_shared(lane, "mbarrier", write ? "overwrites an mbarrier" : "reads an mbarrier", place, address, bytes);
    return true;
  }
  Access issued{};
  std::string message = std::string(write ? "writes" : "reads") + " where a copy is still on its way";
  if (!any(state, bytes, PENDING) || !lane.block->hopper->find_load(address, bytes, lane, message, issued)) return false;
  add_shared(lane, "wait forgotten", std::move(message), place, address, bytes, &issued);
  return true;
}

}  // namespace

bool check_global(Lane& lane, const void* address, unsigned bytes, bool write, Way way, Place place, Region*& region) {
  if (way != Way::plain) lane.block->settle();
  return reach_global(actor_of(lane), address, bytes, write, way, place, region);
}

bool check_global(const Actor& actor, const void* address, unsigned bytes, bool write, Place place, Region*& region) {
  return reach_global(actor, address, bytes, write, Way::primitive, place, region);
}

bool check_shared(const Actor& actor, unsigned chunk, bool write, Place place) {
  Lane& lane = actor.lane;
  Sram& sram = lane.block->sram;
  if (!sram.holds(chunk, CHUNK)) return check_shared(lane, chunk, CHUNK, write, false, place);
  if (!lane.block->launch.sanitize()) return true;
  if (find_owner(lane, chunk, CHUNK, write, place) || race_shared(actor, chunk, CHUNK, write, Way::primitive, place)) return true;
  const unsigned char* state = &sram.state[chunk];
  if (any(state, CHUNK, PENDING))
    add_shared(lane, "wait forgotten", "has an engine touch where a thread's copy is still on its way", place, chunk, CHUNK);
  else if (!write && any(state, CHUNK, UNWRITTEN))
    add_shared(lane, "uninitialised", "reads what nobody wrote", place, chunk, CHUNK);
  return true;
}

bool check_shared(Lane& lane, unsigned address, unsigned bytes, bool write, Way way, Place place) {
  Sram& sram = lane.block->sram;
  const bool atomic = way == Way::atomic;
  if (way != Way::plain) lane.block->settle();
  if (!sram.holds(address, bytes) || (address < sram.dynamic_begin && !sram.name_of(address))) {
    std::string where = "there is no SRAM at address " + std::to_string(address);
    if (const auto* name = sram.before(address))
      where = count_of(address + bytes - name->end, "byte") + " past the end of " + name->name;
    else if (address >= sram.end && address < sram.end + (1u << 24))
      where = count_of(address + bytes - sram.end, "byte") + " past the block's " + std::to_string(sram.end - sram.dynamic_begin);
    add_shared(lane, "out of bounds", std::string(write ? "writes " : "reads ") + count_of(bytes, "byte") + ": " + where,
               place, address, bytes);
    return false;
  }
  if (!lane.block->launch.sanitize()) return true;
  if (address % bytes && (bytes & (bytes - 1)) == 0) {
    add_shared(lane, "misaligned", misaligned(bytes, write), place, address, bytes);
    return false;
  }
  unsigned char* state = &sram.state[address];
  if (!find_owner(lane, address, bytes, write, place)) {
    const bool race = race_shared(actor_of(lane), address, bytes, write, way, place);
    if (race) {  // it has been said; what the bytes hold follows from it
    } else if (any(state, bytes, PENDING)) {
      Access other{};
      const Access* issued = nullptr;
      for (const auto& copier : lane.block->lanes)
        for (const auto& copy : copier->copies)
          if (copy.to < address + bytes && address < copy.to + copy.bytes) {
            other = access_of(actor_of(*copier), true, false, copy.place);
            issued = &other;
          }
      add_shared(lane, "wait forgotten", std::string(write ? "writes" : "reads") + " where a copy is still on its way", place,
                 address, bytes, issued);
    } else if ((!write || atomic) && any(state, bytes, UNWRITTEN)) {
      add_shared(lane, "uninitialised", "reads what nobody wrote", place, address, bytes);
    }
  }
  if (write)
    for (unsigned i = 0; i < bytes; ++i)
      if (state[i] == UNWRITTEN) state[i] = WRITTEN;
  return true;
}

// Copies

void begin_copy(Lane& lane, unsigned to, const void* from, unsigned bytes, unsigned kept, Place place) {
  Sram& sram = lane.block->sram;
  if (lane.block->launch.sanitize()) {
    if (!race_shared(actor_of(lane), to, bytes, true, Way::primitive, place) && any(&sram.state[to], bytes, PENDING))
      add_shared(lane, "wait forgotten", "starts a copy to where another is still on its way", place, to, bytes);
    std::memset(&sram.state[to], PENDING, bytes);
    std::memset(sram.pointer(to), POISON, bytes);
  }
  lane.copies.push_back({to, static_cast<const char*>(from), bytes, kept, lane.group, place, lane.step});
}

void finish_copies(Lane& lane, unsigned pending) {
  Sram& sram = lane.block->sram;
  std::size_t done = 0;
  for (; done < lane.copies.size() && lane.copies[done].group + pending < lane.group; ++done) {
    const Copy& copy = lane.copies[done];
    std::memset(sram.pointer(copy.to), 0, copy.bytes);
    std::memcpy(sram.pointer(copy.to), copy.from, copy.kept);
    if (!lane.block->launch.sanitize()) continue;
    std::memset(&sram.state[copy.to], WRITTEN, copy.bytes);
    const char* step = std::exchange(lane.step, copy.step);
    race_shared(actor_of(lane), copy.to, copy.bytes, true, Way::primitive, copy.place);
    lane.step = step;
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

void leave_copies(Lane& lane) {
  if (lane.copies.empty()) return;
  lane.step = lane.copies.front().step;
  if (lane.block->launch.sanitize())
    add_shared(lane, "wait forgotten", "ends without having waited for this copy", lane.copies.front().place,
               lane.copies.front().to, lane.copies.front().bytes);
  lane.copies.clear();
}

}  // namespace emulator
