// Fibers: many stacks on one thread of the operating system, with a switch between them that takes a few nanoseconds.
// Each lane of a warp is a fiber. It runs until it must wait for others, and later goes on where it stopped.
#pragma once
#include "emu_hide_names.h"

#include <cstddef>
#include <cstdint>

// Saves the running fiber's registers on its stack and its stack pointer in *from, and goes on with `to`. It saves only
// those registers that the calling convention makes a function preserve.
extern "C" void emu_switch(void** from, void* to);

#if defined(__APPLE__)
#define EMU_SYMBOL "_emu_switch"
#else
#define EMU_SYMBOL "emu_switch"
#endif

#define EMU_DEFINE_SWITCH_X86_64                                                                              \
  asm(".text\n.globl " EMU_SYMBOL "\n" EMU_SYMBOL ":\n"                                                       \
      "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"                              \
      "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"                                                                  \
      "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n")

#define EMU_DEFINE_SWITCH_AARCH64                                                                             \
  asm(".text\n.balign 4\n.globl " EMU_SYMBOL "\n" EMU_SYMBOL ":\n"                                            \
      "sub sp, sp, #160\n"                                                                                    \
      "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"   \
      "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"                                                    \
      "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n" \
      "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"                                                                \
      "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"   \
      "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"                                                    \
      "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n" \
      "add sp, sp, #160\nret\n")

namespace emulator {

// The stack pointer of a new fiber, which starts with entry() at the top of a stack. entry() never returns.
inline void* new_fiber(char* stack, std::size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15};
#if defined(__x86_64__)
  auto* frame = reinterpret_cast<void**>(top - 64);  // six registers, the return address, and a hole, so that after
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;    // the return the stack is aligned as after a call
  frame[6] = reinterpret_cast<void*>(entry);
#elif defined(__aarch64__)
  auto* frame = reinterpret_cast<void**>(top - 160);
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);  // x30, the address to return to
#else
#error "the emulator knows the stacks of x86-64 and arm64"
#endif
  return frame;
}

}  // namespace emulator

#include "emu_show_names.h"
