// What a run reports: findings, each with its place in the source.
#pragma once
#include "emu_hide_names.h"

#include <cstdint>
#include <string>
#include <vector>

#include "thread.h"

namespace emulator {

// A place in the kernel: the return address of a call. Debug information maps it to lines of source.
using Place = const void*;

// A misuse: which thread did what, where, and to which bytes. `other` is the other access of a race, or the copy that
// the thread didn't wait for.
struct Finding {
  const char* kind = "";
  std::string message;
  Place place = nullptr;
  const char* step = "";
  uint3 block{}, thread{};
  const char* space = "";  // "hbm" or "sram"
  std::string tensor;
  std::int64_t offset = 0;  // bytes from the tensor's start
  const void* address = nullptr;  // in HBM
  int bytes = 0;
  Place other = nullptr;
  uint3 other_block{}, other_thread{};
  bool has_other = false;
  Place guess = nullptr;  // the read of a race with an atomic: harmless if a compare-and-swap checks what it read
  std::uint64_t times = 1;
};

// The first finding of each kind and place, and how often it came.
struct Findings {
  std::vector<Finding> list;
  std::uint64_t dropped = 0;  // how many kinds and places came after LIMIT was reached
  static constexpr std::size_t LIMIT = 200;

  void add(Finding finding);
  void merge(const Findings& others);
};

}  // namespace emulator

#include "emu_show_names.h"
