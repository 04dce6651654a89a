// What the processor itself refuses: a stack that overflows, a jump to nowhere, an integer division that it can't do. It tells
// the process by a signal; while a kernel runs, the signal becomes a finding and ends the block.
#pragma once

#include <csetjmp>
#include <csignal>
#include <memory>

#include "report.h"

namespace emulator {

// The signal that stopped a lane, where, and the address that it was about.
struct Fault {
  int signal = 0;
  Place place = nullptr;
  const void* address = nullptr;
};

// Where the running thread goes on after a fault (null: faults are none of the emulator's), and the last one.
extern thread_local sigjmp_buf* landing;
extern thread_local Fault fault;

// Handles the process's signals from the first one alive to the last.
struct FaultHandlers {
  FaultHandlers();
  ~FaultHandlers();
};

// A stack for a thread's signals: the lane's own may be what overflowed.
class SignalStack {
 public:
  SignalStack();
  ~SignalStack();

 private:
  std::unique_ptr<char[]> bytes_;
};

}  // namespace emulator
