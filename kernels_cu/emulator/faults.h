// Faults that the processor reports: a stack overflow, a jump to nowhere, an integer division that it can't do. They
// come as signals. While a kernel runs, a signal becomes a finding and ends the block. So does one that `watch` sends.
#pragma once
#include "emu_hide_names.h"

#include <csetjmp>
#include <csignal>
#include <memory>

#include "report.h"

namespace emulator {

// The signal that stopped a lane, the place in the kernel, and the address that was accessed.
struct Fault {
  int signal = 0;
  Place place = nullptr;
  const void* address = nullptr;
};

constexpr int LATE = SIGVTALRM;  // sent to a thread whose lane can't be stopped otherwise

// Where the running thread goes on after a fault (null: no kernel runs, so the fault isn't the emulator's), and the
// last fault.
extern thread_local sigjmp_buf* landing;
extern thread_local Fault fault;

// Handles the process's signals while an object of this class is alive.
struct FaultHandlers {
  FaultHandlers();
  ~FaultHandlers();
};

// A stack for a thread's signal handlers, because the lane's own stack may have overflowed.
class SignalStack {
 public:
  SignalStack();
  ~SignalStack();

 private:
  std::unique_ptr<char[]> bytes_;
};

}  // namespace emulator

#include "emu_show_names.h"
