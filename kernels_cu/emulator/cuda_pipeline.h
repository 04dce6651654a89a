// Asynchronous copies from HBM to SRAM: the primitives that CUDA C++ has for cp.async.
#pragma once
#include "emu_hide_names.h"

#include "cuda.h"

__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, std::size_t bytes, std::size_t zeros = 0) {
  emu_copy_async(emu_shared_address(to), from, static_cast<unsigned>(bytes), static_cast<unsigned>(bytes - zeros));
}
__forceinline__ void __pipeline_commit() { emu_copy_commit(); }
__forceinline__ void __pipeline_wait_prior(unsigned pending) { emu_copy_wait(pending); }

#include "emu_show_names.h"
