#include "faults.h"

#include <ucontext.h>

#include <mutex>

#include "launch.h"
#include "machine.h"

namespace emulator {

thread_local sigjmp_buf* landing = nullptr;
thread_local Fault fault;

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, LATE};
constexpr std::size_t STACK_BYTES = 64 * 1024;

std::mutex handlers;
int alive = 0;
struct sigaction before[NSIG];

// One byte further, for places are the addresses behind an instruction.
Place place_of(const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__APPLE__) && defined(__x86_64__)
  const auto at = machine->__ss.__rip;
#elif defined(__APPLE__)
  const auto at = machine->__ss.__pc;
#elif defined(__x86_64__)
  const auto at = machine.gregs[REG_RIP];
#else
  const auto at = machine.pc;
#endif
  return reinterpret_cast<Place>(at + 1);
}

// Has the lane called the runtime since the watch looked at it? Then it may hold something that other lanes wait for, such as a
// mutex, and nothing would release that. The same is true in a function of the system: its heap may be half changed.
bool stuck(const siginfo_t& info) {
  return info.si_code == SI_QUEUE && current && current_lane().polls == static_cast<std::uint32_t>(info.si_value.sival_int);
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (signal == LATE && !(landing && stuck(*info) && inside_image(place_of(context)))) return;  // the watch comes again
  if (!landing) return void(sigaction(signal, &before[signal], nullptr));  // it happens again, for the handler before this one
  fault = {signal, place_of(context), info->si_addr};
  siglongjmp(*landing, 1);
}

}  // namespace

FaultHandlers::FaultHandlers() {
  const std::lock_guard lock(handlers);
  image_base();  // the handler will ask for it, and the first call may allocate
  if (alive++) return;
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : SIGNALS) sigaction(signal, &action, &before[signal]);
}

FaultHandlers::~FaultHandlers() {
  const std::lock_guard lock(handlers);
  if (--alive) return;
  for (int signal : SIGNALS) sigaction(signal, &before[signal], nullptr);
}

SignalStack::SignalStack() : bytes_(new char[STACK_BYTES]) {
  stack_t stack{};
  stack.ss_sp = bytes_.get();
  stack.ss_size = STACK_BYTES;
  sigaltstack(&stack, nullptr);
}

SignalStack::~SignalStack() {
  stack_t none{};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
}

}  // namespace emulator
