// What host code calls of the emulator: host_runtime.h gives it CUDA's names.
#pragma once
#include "emu_hide_names.h"

#include "driver_types.h"
#include "thread.h"

extern "C" {

// What a program runs with. Its strings live as long as the program.
struct EmuProgram {
  const char* report;  // a file: what is known so far, as JSON, written anew from time to time
  const char* device;
  int major, minor, sms, sram_per_block, sram_per_sm, threads_per_sm;
  unsigned long memory, l2;
  int workers, sanitize;
  double time_limit;  // seconds of processor time of the whole program, 0 for none
};

// One of the program's launches, as host_runtime.h makes it.
struct EmuHostLaunch {
  const char* kernel;
  const void* function;  // null: not known by its address
  void (*entry)(void** arguments);
  void** arguments;
  uint3 grid, block;
  unsigned long sram;
  cudaStream_t stream;
  int cooperative;
};

void emu_host_name(const char* name);
int emu_host_allocate(void** at, unsigned long bytes, int kind);
int emu_host_free(void* at, int pinned, const char* call);
int emu_host_copy(void* to, unsigned long to_pitch, const void* from, unsigned long from_pitch, unsigned long width, unsigned long height,
                  int direction, cudaStream_t stream, int async);
int emu_host_fill(void* at, unsigned long pitch, int value, unsigned long width, unsigned long height, cudaStream_t stream);
int emu_host_symbol(unsigned long size, unsigned long offset, unsigned long bytes);
int emu_host_kind(const void* at);
void emu_host_memory(unsigned long* free, unsigned long* total);
int emu_host_stream(cudaStream_t* made, int non_blocking);
int emu_host_wait(cudaStream_t stream, int all);
int emu_host_event(cudaEvent_t* made);
int emu_host_record(cudaEvent_t event, cudaStream_t stream);
int emu_host_wait_event(cudaStream_t stream, cudaEvent_t event);
int emu_host_sync_event(cudaEvent_t event);
int emu_host_elapsed(float* milliseconds, cudaEvent_t first, cudaEvent_t last);
int emu_host_last(int clear);
int emu_host_unchecked(int error);
const char* emu_host_error(int number, int text);
int emu_host_invalid(const char* message);
int emu_host_invalid_device();
void emu_host_reset();
int emu_host_allow(const char* name, const void* function, int bytes);
void emu_host_known(const void* function, void (*entry)(void**), int parameters);
int emu_host_launch_at(const char* name, const void* function, uint3 grid, uint3 block, void** arguments, unsigned long sram,
                       cudaStream_t stream, int cooperative);
int emu_host_launch(const EmuHostLaunch* launch);
const EmuProgram* emu_host_device();
}

#include "emu_show_names.h"
