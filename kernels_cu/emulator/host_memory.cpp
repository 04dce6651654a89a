#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>

#include "host.h"
#include "memory.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

namespace emulator {

char *host_begin = nullptr, *host_end = nullptr;

namespace {

// Of address space: most of it is never touched. Addresses aren't used twice while there are fresh ones, so that what was freed
// is known when it is used.
constexpr std::uint64_t DEVICE_BYTES = std::uint64_t{24} << 30, SHARED_BYTES = std::uint64_t{8} << 30;
constexpr std::uint64_t GAP = 1 << 16;  // between two arrays; and at least half an array

std::uint64_t page() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }
std::uint64_t rounded(std::uint64_t bytes) { return (bytes + page() - 1) / page() * page(); }

std::string count_of(std::int64_t n, const char* noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

const char* word(Kind kind) { return kind == Kind::device ? "device" : kind == Kind::managed ? "managed" : "pinned"; }

// Whose memory a pointer leads to. Variables of the program (`__device__` ones, too) lie in its image.
enum class Owner { host, device, both };
Owner owner(const void* at) {
  if (at >= program().begin && at < program().shared) return Owner::device;
  return (at >= program().shared && at < program().end) || inside_image(at) ? Owner::both : Owner::host;
}

bool in_range(const void* at) { return at >= program().begin && at < program().end; }

const char* const DIRECTIONS[] = {"cudaMemcpyHostToHost", "cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost", "cudaMemcpyDeviceToDevice"};

// One side of a copy or a fill: rows of bytes.
struct Rows {
  const char* at;
  std::uint64_t pitch, width, height;
  std::int64_t span() const { return height ? static_cast<std::int64_t>(pitch * (height - 1) + width) : 0; }
};

// The allocation that has the rows, or a finding and null. What isn't in the program's range is not this function's matter.
Allocation* held(const Rows& rows, const char* verb, Place place, int& error) {
  Program& p = program();
  if (!in_range(rows.at) || !rows.width || !rows.height) return nullptr;
  Allocation* found = p.find(rows.at);
  if (found && rows.at + rows.span() <= found->base + found->bytes) return found;
  const Allocation* about = found ? found : p.find_dead(rows.at) ? p.find_dead(rows.at) : p.near(rows.at);
  error = p.fail(cudaErrorInvalidValue, about && about->freed ? "use after free" : "out of bounds",
                 std::string(verb) + " " + count_of(rows.span(), "byte") + ": " + p.where(rows.at, rows.span()), place, about,
                 about ? rows.at - about->base : 0);
  return nullptr;
}

std::vector<Touched> touched(const Allocation& in, const Rows& rows, bool write) {
  std::vector<Touched> all;
  const std::int64_t first = rows.at - in.base;
  if (rows.pitch == rows.width) return {{first, first + rows.span(), write}};
  for (std::uint64_t i = 0; i < rows.height; ++i) {
    const auto begin = first + static_cast<std::int64_t>(i * rows.pitch);
    all.push_back({begin, begin + static_cast<std::int64_t>(rows.width), write});
  }
  return all;
}

}  // namespace

void Program::reserve() {
  if (begin) return;
  void* range = mmap(nullptr, DEVICE_BYTES + SHARED_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return;
  host_begin = begin = device_top = static_cast<char*>(range);
  shared = shared_top = begin + DEVICE_BYTES;
  host_end = end = shared + SHARED_BYTES;
}

Allocation* Program::allocate(std::uint64_t bytes, Kind kind, Place place) {
  reserve();
  char*& top = kind == Kind::device ? device_top : shared_top;
  const char* limit = kind == Kind::device ? shared : end;
  const std::uint64_t gap = GAP + rounded(std::min<std::uint64_t>(bytes, std::uint64_t{1} << 32) / 2), whole = rounded(std::max<std::uint64_t>(bytes, 1));
  const auto left = static_cast<std::uint64_t>(limit - top);
  if (!begin || bytes > left || whole + 2 * gap > left || in_use + bytes > given.memory) return nullptr;
  char* base = top + gap;
  void* state = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (state == MAP_FAILED) return nullptr;
  if (mprotect(base, whole, PROT_READ | PROT_WRITE)) {
    munmap(state, whole);
    return nullptr;
  }
  top = base + whole;
  in_use += bytes;
  std::string name = next_name.empty() ? std::string(word(kind)) + " memory" : next_name;
  int same = 0;
  for (const auto& other : allocations)
    if (!other->freed && other->name.substr(0, other->name.find('#')) == name) ++same;
  if (same) name += "#" + std::to_string(same + 1);
  auto made = std::make_unique<Allocation>();
  made->name = name, made->base = base, made->bytes = static_cast<std::int64_t>(bytes), made->kind = kind, made->place = place;
  made->state = static_cast<unsigned char*>(state);
  // Host code writes managed and pinned memory also where the compiler doesn't see it (fread). So those count as written.
  if (kind == Kind::device) std::memset(base, POISON, bytes);
  else std::memset(state, WRITTEN, bytes);
  allocations.push_back(std::move(made));
  return allocations.back().get();
}

Allocation* Program::find(const void* at) {
  for (const auto& one : allocations)
    if (!one->freed && one->holds(at)) return one.get();
  return nullptr;
}

Allocation* Program::find_dead(const void* at) {
  for (const auto& one : allocations)
    if (one->freed && one->holds(at)) return one.get();
  return nullptr;
}

Allocation* Program::near(const void* at) {
  Allocation* best = nullptr;
  std::int64_t least = 0;
  for (const auto& one : allocations) {
    const auto* p = static_cast<const char*>(at);
    const std::int64_t distance = p < one->base ? one->base - p : std::max<std::int64_t>(0, p - one->base - one->bytes);
    if (!best || distance < least) best = one.get(), least = distance;
  }
  return best;
}

std::string Program::where(const void* at, std::int64_t bytes) {
  const auto* p = static_cast<const char*>(at);
  if (const Allocation* dead = find_dead(at)) return dead->name + " has been freed";
  if (const Allocation* one = find(at)) return count_of(p + bytes - one->base - one->bytes, "byte") + " past the end of " + one->name;
  const Allocation* one = near(at);
  if (!one) return "no array lies there";
  return p < one->base ? count_of(one->base - p, "byte") + " before the start of " + one->name
                       : count_of(p + bytes - one->base - one->bytes, "byte") + " past the end of " + one->name;
}

// Host code touches memory in the program's range. A GPU's device memory isn't mapped for it: the program would end here.
void host_access(const void* at, std::uint64_t bytes, bool write, Place place) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  Allocation* found = p.find(at);
  const char* verb = write ? "writes" : "reads";
  if (found && found->kind != Kind::device) {
    if (p.pending) {
      const std::int64_t first = static_cast<const char*>(at) - found->base;
      p.touch(*found, {{first, first + static_cast<std::int64_t>(bytes), write}}, 0, "", place);
    }
    return;
  }
  const Allocation* about = found ? found : p.find_dead(at) ? p.find_dead(at) : p.near(at);
  if (found)
    p.findings.add(p.finding("device memory on the host", std::string(verb) + " " + count_of(static_cast<std::int64_t>(bytes), "byte") +
                             " of device memory: a copy would bring them (cudaMemcpy)", place, about, static_cast<const char*>(at) - about->base));
  else
    p.findings.add(p.finding(about && about->freed ? "use after free" : "out of bounds",
                             std::string(verb) + " " + count_of(static_cast<std::int64_t>(bytes), "byte") + ": " + p.where(at, static_cast<std::int64_t>(bytes)),
                             place, about, about ? static_cast<const char*>(at) - about->base : 0));
  end_program(ended_here);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu_host_name(const char* name) { program().next_name = name; }

int emu_host_allocate(void** at, unsigned long bytes, int kind) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (p.sticky) return p.failed(p.sticky, "", HERE);
  *at = nullptr;
  if (!bytes) return cudaSuccess;
  const Allocation* made = p.allocate(bytes, static_cast<Kind>(kind), HERE);
  p.next_name.clear();
  if (!made) return p.failed(cudaErrorMemoryAllocation, "asks for " + count_of(static_cast<std::int64_t>(bytes), "byte"), HERE);
  *at = made->base;
  return cudaSuccess;
}

int emu_host_free(void* at, int pinned, const char* call) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  p.wait_for_all();  // cudaFree does
  if (!at) return cudaSuccess;
  for (const auto& one : p.allocations) {
    if (one->base != at) continue;
    if (one->freed)
      return p.fail(cudaErrorInvalidValue, "use after free", std::string(call) + " of " + one->name + ", which has been freed", HERE, one.get());
    if ((one->kind == Kind::pinned) != (pinned != 0))
      return p.fail(cudaErrorInvalidValue, "free", std::string(call) + " of " + word(one->kind) + " memory: that takes " +
                    (pinned ? "cudaFree" : "cudaFreeHost"), HERE, one.get());
    one->freed = HERE;
    p.in_use -= static_cast<std::uint64_t>(one->bytes);
    const std::uint64_t whole = rounded(std::max<std::uint64_t>(static_cast<std::uint64_t>(one->bytes), 1));
    munmap(one->state, whole);
    madvise(one->base, whole, MADV_DONTNEED);
    mprotect(one->base, whole, PROT_NONE);
    one->state = nullptr, one->past.clear();
    return cudaSuccess;
  }
  const Allocation* inside = p.find(at);
  return p.fail(cudaErrorInvalidValue, "free", std::string(call) + " of " +
                (inside ? "an address inside of " + inside->name : "memory of the host, which CUDA didn't allocate"), HERE, inside);
}

// free() and delete in host code. build.py renames the program's calls of them to these.
static void release(void* at, Place place) {
  if (current || !in_range(at)) return std::free(at);
  Program& p = program();
  const std::lock_guard lock(p.busy);
  const Allocation* one = p.find(at);
  p.findings.add(p.finding("free", std::string("free() of ") + (one ? std::string(word(one->kind)) + " memory: that takes " +
                           (one->kind == Kind::pinned ? "cudaFreeHost" : "cudaFree") : "memory that CUDA had"), place, one));
  end_program(ended_here);
}
void emu_host_release(void* at) { release(at, HERE); }
void emu_host__ZdlPv(void* at) { release(at, HERE); }
void emu_host__ZdaPv(void* at) { release(at, HERE); }
void emu_host__ZdlPvm(void* at, unsigned long) { release(at, HERE); }
void emu_host__ZdaPvm(void* at, unsigned long) { release(at, HERE); }

int emu_host_copy(void* to, unsigned long to_pitch, const void* from, unsigned long from_pitch, unsigned long width,
                  unsigned long height, int direction, cudaStream_t stream, int async) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (p.sticky) return p.failed(p.sticky, "", HERE);
  if (!width || !height) return cudaSuccess;
  if (to_pitch < width || from_pitch < width) return p.failed(cudaErrorInvalidPitchValue, "the pitch is less than a row", HERE);
  const Owner target = owner(to), source = owner(from);
  if (direction < 0 || direction > 4) return p.failed(cudaErrorInvalidMemcpyDirection, "no direction has that number", HERE);
  if (direction < 4) {
    const bool to_device = direction & 1, from_device = direction & 2;
    const char* wrong = target != Owner::both && (target == Owner::device) != to_device   ? "destination"
                        : source != Owner::both && (source == Owner::device) != from_device ? "source"
                                                                                            : nullptr;
    if (wrong) {
      const bool is_device = (wrong[0] == 'd' ? target : source) == Owner::device;
      const Allocation* about = p.find(wrong[0] == 'd' ? to : from);
      return p.fail(cudaErrorInvalidValue, "direction", std::string("copies with ") + DIRECTIONS[direction] + ", but the " + wrong + " is " +
                    (is_device ? "device memory" : "the host's memory"), HERE, about);
    }
  }
  const Rows writes{static_cast<const char*>(to), to_pitch, width, height}, reads{static_cast<const char*>(from), from_pitch, width, height};
  int error = 0;
  Allocation* into = held(writes, "copies to", HERE, error);
  if (error) return error;
  Allocation* out_of = held(reads, "copies", HERE, error);
  if (error) return error;
  const unsigned actor = p.begin_operation(stream);
  if (p.ordered()) {
    if (out_of) p.touch(*out_of, touched(*out_of, reads, false), actor, "a copy", HERE);
    if (into) p.touch(*into, touched(*into, writes, true), actor, "a copy", HERE);
  }
  std::int64_t missing = 0;
  for (unsigned long i = 0; i < height; ++i) {
    const char* row = reads.at + i * from_pitch;
    std::memmove(const_cast<char*>(writes.at) + i * to_pitch, row, width);
    const unsigned char* known = out_of ? out_of->state + (row - out_of->base) : nullptr;
    if (known && std::memchr(known, UNWRITTEN, width)) missing += std::count(known, known + width, UNWRITTEN);
    if (!into) continue;
    unsigned char* state = into->state + (writes.at + i * to_pitch - into->base);
    known ? std::memcpy(state, known, width) : std::memset(state, WRITTEN, width);
  }
  if (missing && !into)
    p.notes.add(p.finding("uninitialised", "copies " + count_of(missing, "byte") + " that nobody wrote", HERE, out_of, reads.at - out_of->base));
  // with memory that isn't pinned, a copy is over (or has taken what it needs) when it returns
  if (!async || (!into && target == Owner::host)) p.wait_for(actor);
  return cudaSuccess;
}

int emu_host_fill(void* at, unsigned long pitch, int value, unsigned long width, unsigned long height, cudaStream_t stream) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (p.sticky) return p.failed(p.sticky, "", HERE);
  if (!width || !height) return cudaSuccess;
  if (owner(at) == Owner::host)
    return p.fail(cudaErrorInvalidValue, "direction", "fills the host's memory: cudaMemset is for device memory", HERE);
  const Rows rows{static_cast<const char*>(at), std::max(pitch, width), width, height};
  int error = 0;
  Allocation* into = held(rows, "fills", HERE, error);
  if (error) return error;
  const unsigned actor = p.begin_operation(stream);
  if (into && p.ordered()) p.touch(*into, touched(*into, rows, true), actor, "a fill", HERE);
  for (unsigned long i = 0; i < height; ++i) {
    std::memset(const_cast<char*>(rows.at) + i * rows.pitch, value, width);
    if (into) std::memset(into->state + (rows.at + i * rows.pitch - into->base), WRITTEN, width);
  }
  return cudaSuccess;
}

// cudaMemcpyToSymbol and its reverse have compared the size of the variable with what is asked for.
int emu_host_symbol(unsigned long size, unsigned long offset, unsigned long bytes) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (offset <= size && bytes <= size - offset) return cudaSuccess;
  return p.fail(cudaErrorInvalidValue, "out of bounds", "copies " + count_of(static_cast<std::int64_t>(bytes), "byte") + ": " +
                count_of(static_cast<std::int64_t>(offset + bytes - size), "byte") + " past the end of the variable, which has " + std::to_string(size), HERE);
}

// What a pointer leads to: 0 the host's memory, 1 device memory, 2 managed, 3 pinned.
int emu_host_kind(const void* at) {
  const Allocation* found = program().find(at);
  return !found ? 0 : found->kind == Kind::device ? 1 : found->kind == Kind::managed ? 2 : 3;
}

void emu_host_memory(unsigned long* free, unsigned long* total) {
  *total = program().given.memory;
  *free = *total - program().in_use;
}
}
