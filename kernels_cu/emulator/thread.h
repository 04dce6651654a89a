// What a kernel knows about the thread that it runs as: the built-in variables, and the step that it has reached.
#pragma once
#include "emu_hide_names.h"

#include <cstdint>

struct uint3 { unsigned x, y, z; };

namespace emulator {

// `shuffles` are warp instructions that take 32 bits from lane to lane.
struct Counters { std::uint64_t flops = 0, exp = 0, shuffles = 0; };

struct Thread {
  uint3 thread{}, block_index{}, block_dim{}, grid_dim{};
  int lane = 0;           // in the warp
  const char* step = "";  // the last `// step:` mark that this thread passed
  Counters* counters = nullptr;
};

extern thread_local Thread* current;

}  // namespace emulator

#include "emu_show_names.h"
