// What a thread holds and stores, recorded step by step. The tutor of the lessons writes calls of this into a source.
//
// One block of the launch is recorded, as a sequence of numbers in an array of the source. A variable's values are recorded
// wherever they may have changed: at a step's end, at a barrier, and at the variable's end.
#pragma once
#include "emu_hide_names.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace emulator {

struct Telling;

// A variable that is recorded: elements of a `kind` (f, i, u; w: words of a struct) and a `size`, in an array of these extents. The
// list of a thread's variables begins with the newest.
struct Seen {
  int number;
  char role;  // r: a register's, l: a loop's, s: shared
  char kind;
  unsigned size, extents[3];
  const void* at;
  std::uint64_t told;  // a digest of the values that were recorded last
  Seen* older;
};

// The record of a thread. `room[0]` is how many numbers it has, `room[1]` the block. `room[2]` says whether numbers are missing.
struct Telling {
  double* room;
  unsigned size;
  Seen* newest = nullptr;
  double* latest = nullptr;  // its latest access
  Telling(double* room, unsigned size);
  ~Telling();
  Telling(const Telling&) = delete;
};

// What the machine calls.
struct Lane;
struct Block;
enum class Op;
enum class Space;
void tell_step(Lane& lane, const char* name);
void tell_barrier(Lane& lane);
void tell_shared(Block& block);
void tell_access(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, const void* place);

}  // namespace emulator

extern "C" {
void emu_tell_begin(emulator::Telling* telling);
void emu_tell_end(emulator::Telling* telling);
void emu_see(emulator::Seen* seen);
void emu_see_no_more(emulator::Seen* seen);
}

namespace emulator {

inline Telling::Telling(double* room, unsigned size) : room(room), size(size) { emu_tell_begin(this); }
inline Telling::~Telling() { emu_tell_end(this); }

// How many elements a type has: a float4 has four. A type of another kind has 0, and isn't recorded.
template <class T, class = void> struct Elements { static constexpr char kind = 0; static constexpr unsigned size = 1, count = 1; };
template <class T> struct Elements<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
  static constexpr char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
  static constexpr unsigned size = sizeof(T), count = 1;
};
template <class T, class = void> struct HasX : std::false_type {};
template <class T> struct HasX<T, std::enable_if_t<std::is_same_v<decltype(T::x), float>>> : std::true_type {};
template <class T> struct Elements<T, std::enable_if_t<HasX<T>::value>> {
  static constexpr char kind = 'f';
  static constexpr unsigned size = sizeof(float), count = sizeof(T) / sizeof(float);
};
// The words of a struct, such as a fragment of a matrix. A struct that holds addresses has none, for they differ from run to run.
template <class T>
struct Elements<T, std::enable_if_t<std::is_class_v<T> && std::is_aggregate_v<T> && std::is_trivially_copyable_v<T> &&
                                    alignof(T) == 4 && !HasX<T>::value>> {
  static constexpr char kind = 'w';
  static constexpr unsigned size = 4, count = sizeof(T) / 4;
};

template <class T>
struct See {
  using Each = Elements<std::remove_cv_t<std::remove_all_extents_t<T>>>;
  Seen seen;
  See(int number, char role, const T& x) : seen{number, role, Each::kind, Each::size, {}, &x, 0, nullptr} {
    constexpr unsigned rank = std::rank_v<T>;
    const unsigned each = Each::count;
    if constexpr (rank == 0) seen.extents[0] = each;
    if constexpr (rank == 1) seen.extents[0] = std::extent_v<T, 0>, seen.extents[1] = each > 1 ? each : 0;
    if constexpr (rank >= 2) {
      seen.extents[0] = std::extent_v<T, 0>;
      seen.extents[1] = each > 1 && rank == 2 ? std::extent_v<T, 1> : sizeof(T) / std::extent_v<T, 0> / Each::size;
      seen.extents[2] = each > 1 && rank == 2 ? each : 0;
    }
    if constexpr (Each::kind) emu_see(&seen);
  }
  ~See() {
    if constexpr (Each::kind) emu_see_no_more(&seen);
  }
  See(const See&) = delete;
};

}  // namespace emulator

#define EMU_SEE(NUMBER, ROLE, NAME) ::emulator::See<decltype(NAME)> emu_see_##NUMBER(NUMBER, ROLE, NAME);

#include "emu_show_names.h"
