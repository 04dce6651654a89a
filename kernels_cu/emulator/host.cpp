#include "host.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "json.h"
#include "primitives.h"

#define HERE __builtin_return_address(0)

extern "C" void __cxa_finalize(void*);
extern "C" void* __dso_handle __attribute__((visibility("hidden")));

namespace emulator {

namespace {

constexpr double BETWEEN_REPORTS = 0.5;  // seconds
constexpr int FRAMES = 48;

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Error { int number; const char *name, *text; };
const Error ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidHostPointer, "cudaErrorInvalidHostPointer", "invalid host pointer"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const Error& error_of(int number) {
  for (const Error& error : ERRORS)
    if (error.number == number) return error;
  return ERRORS[sizeof ERRORS / sizeof *ERRORS - 1];
}

// What ended the program, for its lines: the signal, and the places in its own code from the innermost on. Only what a signal's
// handler may do is done here.
char crash_file[4096];
void on_crash(int number) {
  void* frames[FRAMES];
  const int n = backtrace(frames, FRAMES);
  const int file = open(crash_file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  std::int64_t row = number;
  bool written = write(file, &row, sizeof row) == sizeof row;
  for (int i = 0; i < n && written; ++i)
    if (inside_image(frames[i])) {
      row = static_cast<const char*>(frames[i]) - image_base();
      written = write(file, &row, sizeof row) == sizeof row;
    }
  close(file);
  signal(number, SIG_DFL);
  raise(number);
}

}  // namespace

Program& program() {
  static auto& one = *new Program;  // it outlives the program's own objects
  return one;
}

bool in_program() { return program().begun; }

Finding Program::finding(const char* kind, const std::string& message, Place place, const Allocation* about, std::int64_t offset) const {
  Finding found;
  found.kind = kind, found.message = message, found.place = place;
  if (about) found.space = "hbm", found.tensor = about->name, found.offset = offset;
  return found;
}

int Program::fail(int error, const char* kind, const std::string& message, Place place, const Allocation* about, std::int64_t offset) {
  findings.add(finding(kind, message, place, about, offset));
  save();
  return last = error;
}

int Program::failed(int error, const std::string& message, Place place) {
  if (!message.empty()) {  // else it follows from an error before it
    unchecked.clear();
    unchecked.push_back(finding("error unchecked", message + ", and fails: " + error_of(error).text, place));
  }
  return last = error;
}

double Program::seconds_left() const { return given.time_limit - seconds_of(CLOCK_PROCESS_CPUTIME_ID); }

std::string Program::report(bool ended) const {
  Writer out;
  out.field("ended", static_cast<std::uint64_t>(ended));
  out.findings("findings", findings);
  out.findings("notes", notes);
  out.list("launches", launches, [&](const LaunchGroup& group) {
    out.field("kernel", group.kernel);
    out.place("place", group.place);
    out.field("grid", group.grid);
    out.field("block", group.block);
    out.field("sram", group.sram);
    out.field("times", group.times);
    out.key("launched");
    out.text += '{';
    out.field("stopped", static_cast<std::uint64_t>(group.all.stopped));
    tell(out, group.all);
    out.text += '}';
  });
  return out.text;
}

static void put(const char* path, const std::string& text) {
  const std::string fresh = std::string(path) + ".new";
  if (FILE* file = std::fopen(fresh.c_str(), "w")) {
    std::fwrite(text.data(), 1, text.size(), file);
    if (!std::fclose(file)) std::rename(fresh.c_str(), path);
  }
}

void Program::save(bool now) {
  static double latest = 0;
  const double time = seconds_of(CLOCK_MONOTONIC);
  if (!begun || (!now && time - latest < BETWEEN_REPORTS)) return;
  latest = time;
  put(given.report, report(false) + "}");
}

static void finish(int status) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  std::fflush(nullptr);
  Findings left;
  for (const auto& one : p.allocations)  // a program that was ended early had no time to
    if (status != ended_here && !one->freed && one->place)
      left.add(p.finding("not freed", std::to_string(one->bytes) + " bytes of " + one->name + " are never freed", one->place, one.get()));
  p.notes.merge(left);
  put(p.given.report, p.report(true) + ",\"status\":" + std::to_string(status) + "}");
}

void end_program(int status) {
  finish(status);
  _exit(0);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emu_program_begin(const EmuProgram* given) {
  Program& p = program();
  p.given = *given, p.begun = true;
  p.reserve();
  std::snprintf(crash_file, sizeof crash_file, "%s.crash", given->report);
  void* frames[2];
  backtrace(frames, 2);  // the first call may load a library
  for (int number : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL}) signal(number, on_crash);
  p.save(true);
}

void emu_program_main(int (*start)(int, char**, char**), int count, char** arguments, char** environment) {
  const int status = start(count, arguments, environment);
  std::fflush(nullptr);
  __cxa_finalize(__dso_handle);  // the program's own objects, and what it asked for with atexit()
  end_program(status & 0xff);
}

void emu_program_end() { finish(0); }

void emu_program_exit(int status) { end_program(status & 0xff); }

// Memory of the device for an argument of --call, which the caller frees.
void* emu_program_array(const char* name, unsigned long bytes, unsigned char** state) {
  Program& p = program();
  p.next_name = name;
  Allocation* made = p.allocate(bytes, Kind::device, nullptr);
  p.next_name.clear();
  if (made) *state = made->state;
  return made ? made->base : nullptr;
}

int emu_host_last(int clear) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  p.unchecked.clear();
  const int error = p.sticky ? p.sticky : p.last;
  if (clear) p.last = p.sticky;
  return error;
}

// The program hasn't taken a call's result.
int emu_host_unchecked(int error) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  if (error)
    for (Finding& one : p.unchecked) p.notes.add(std::move(one));
  p.unchecked.clear();
  return error;
}

const char* emu_host_error(int number, int text) { return text ? error_of(number).text : error_of(number).name; }

int emu_host_invalid(const char* message) {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  return p.failed(cudaErrorInvalidValue, message, HERE);
}

int emu_host_invalid_device() { return program().failed(cudaErrorInvalidDevice, "there is one device, number 0", HERE); }

void emu_host_reset() {
  Program& p = program();
  const std::lock_guard lock(p.busy);
  p.wait_for_all();
  for (const auto& one : p.allocations)
    if (!one->freed) one->place = nullptr;
}

const EmuProgram* emu_host_device() { return &program().given; }

int emu_in_kernel() { return current != nullptr; }
}
