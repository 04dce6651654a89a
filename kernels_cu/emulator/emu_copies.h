// Copies that threads share out. They move 16, 8 or 4 bytes by cp.async where both ends allow it, and single bytes elsewhere.
#pragma once
#include "emu_hide_names.h"

#include "ptx_memory.h"

namespace emulator {

__forceinline__ void share_copy(unsigned rank, unsigned size, void* to, const void* from, std::size_t bytes) {
  const auto both = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) | bytes;
  const unsigned piece = both % 16 == 0 ? 16 : both % 8 == 0 ? 8 : both % 4 == 0 ? 4 : 1;
  const bool async = piece > 1 && emu_ptx_is_shared(reinterpret_cast<unsigned long long>(to)) &&
                     emu_ptx_is_global(reinterpret_cast<unsigned long long>(from));
  for (std::size_t at = std::size_t{rank} * piece; at < bytes; at += std::size_t{size} * piece) {
    char* target = static_cast<char*>(to) + at;
    const char* source = static_cast<const char*>(from) + at;
    if (async) emu_copy_async(emu_shared_address(target), source, piece);
    else
      for (unsigned i = 0; i < piece; ++i) target[i] = source[i];
  }
}

}  // namespace emulator

#include "emu_show_names.h"
