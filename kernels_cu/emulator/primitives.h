// The host bodies of the primitives in ../include. One call is one lane's part in one warp instruction.
#pragma once
#include "emu_hide_names.h"

#include "thread.h"

extern "C" {

// Move 4, 8 or 16 bytes between HBM or SRAM and registers.
void emu_load_global(void* value, const void* address, unsigned bytes);
void emu_store_global(void* address, const void* value, unsigned bytes);
void emu_load_shared(void* value, unsigned address, unsigned bytes);
void emu_store_shared(unsigned address, const void* value, unsigned bytes);

// Copy 4, 8 or 16 bytes from HBM to SRAM, in groups. A copy arrives when its thread waits for it. Bytes past `kept` are
// not read and become zeros.
void emu_copy_async(unsigned to, const void* from, unsigned bytes = 16, unsigned kept = 16);
void emu_copy_commit();
void emu_copy_wait(unsigned pending);

// Tensor cores. c (16 x 8, float32) += a (16 x 16) · b (16 x 8) in the layout of mma.sync m16n8k16.
void emu_ldmatrix(unsigned* r, unsigned address, int transposed);
// `count` (1, 2 or 4) matrices of 8 x 8 b16. Lane 8 i + r names row r of matrix i.
void emu_ptx_ldmatrix(unsigned* r, unsigned address, int count, int transposed);
// An 8 x 8 matrix of b16 in registers, transposed.
unsigned emu_ptx_movmatrix(unsigned r);
// In float16, `together` (16 or 8) products are added up before the accumulator is. An instruction of the GPU has that many.
void emu_mma_f16(float* c, const unsigned* a, unsigned b0, unsigned b1, int together = 16);
void emu_mma_bf16(float* c, const unsigned* a, unsigned b0, unsigned b1);

// mbarriers. An arrival may expect bytes. A wait is for the phase with a parity. It may return before that is over, with 0.
void emu_mbarrier_init(unsigned address, unsigned arrivals);
void emu_mbarrier_publish();
void emu_mbarrier_arrive(unsigned address, unsigned expected_bytes);
int emu_mbarrier_try_wait(unsigned address, unsigned parity);

// Copies of boxes by TMA. A load completes on an mbarrier. A thread waits for its stores in groups, with `read` only
// until SRAM is free again. `corner` is the box's first element, with the innermost dimension first.
void emu_tma_load(unsigned to, const void* map, const int* corner, int rank, unsigned mbarrier);
void emu_tma_store(const void* map, unsigned from, const int* corner, int rank);
void emu_tma_commit();
void emu_tma_wait(unsigned pending, int read);

// The proxy fence: the copy engine and the tensor cores see what this thread stored before.
void emu_fence_async();

// Matrix products of a warpgroup: c (64 x 8 fragments, float32) += A (64 x 32 bytes) · B. Operands in SRAM have
// descriptors.
enum EmuElement { EMU_F32 = 0, EMU_F16 = 1, EMU_BF16 = 2, EMU_E4M3 = 3, EMU_E5M2 = 4, EMU_S8 = 5, EMU_U8 = 6, EMU_TF32 = 7, EMU_S32 = 8 };
void emu_wgmma_ss(float* c, int fragments, unsigned long long a, unsigned long long b, int add, int b_columns, int element);
void emu_wgmma_rs(float* c, int fragments, const unsigned* a, unsigned long long b, int add, int b_columns, int element);
// The same for any elements, signs (scale_a, scale_b: 1 or -1) and layouts, with `sums` in float32, float16 or int32. A lies in
// SRAM, or in `registers` if these aren't null. They are copies if they are `loose`.
struct EmuWgmma { int fragments, a, b, sums, add, scale_a, scale_b, a_columns, b_columns, loose; };
void emu_wgmma(const struct EmuWgmma* what, float* c, unsigned long long a, const unsigned* registers, unsigned long long b);
void emu_wgmma_fence();
void emu_wgmma_commit();
void emu_wgmma_wait(unsigned pending);

// Sets how many registers each thread of this warpgroup may use from here on: fewer (`claim` 0) or more (1).
void emu_setmaxnreg(unsigned count, int claim);

// Collectives of a warp and of a block.
enum EmuShuffle { EMU_INDEX, EMU_UP, EMU_DOWN, EMU_XOR };
enum EmuVote { EMU_ANY, EMU_ALL, EMU_BALLOT, EMU_MATCH };
enum EmuReduce { EMU_ADD, EMU_MIN, EMU_MAX, EMU_UMIN, EMU_UMAX, EMU_AND, EMU_OR, EMU_EXCLUSIVE_OR };
unsigned long long emu_shuffle(unsigned mask, unsigned long long value, int words, int lane, int width, enum EmuShuffle kind);
unsigned emu_vote(unsigned mask, unsigned long long value, enum EmuVote kind);
unsigned emu_reduce(unsigned mask, unsigned value, enum EmuReduce kind);
unsigned emu_active_mask();
unsigned emu_coalesced();  // the same, of a group that keeps these lanes together
void emu_syncwarp(unsigned mask);
void emu_syncthreads();
int emu_syncthreads_count(int predicate);
void emu_grid_sync();
void emu_named_barrier(int id, int threads);
void emu_named_arrive(int id, int threads);

// Checks and counts an atomic on HBM or SRAM. Returns 0 if there is no memory there.
int emu_atomic(void* address, unsigned bytes);

// Waits until a counter in HBM is at `value`. Only the read that finds it there counts: how many come before is chance.
void emu_wait_for(const void* counter, unsigned value);

// Called before an atomic on HBM that may meet no other. Checks that fences, waits and barriers order it after all earlier ones.
void emu_in_turn(void* address, unsigned bytes);

// Called before emu_atomic for a compare-and-swap, which checks what the thread has read there.
void emu_compare(const void* address);

// A fence: for threads of all blocks, or of its own.
void emu_fence(int everywhere);

[[noreturn]] void emu_assert(const char* condition);
[[noreturn]] void emu_trap();

// Check and count ranges of bytes, and then move them.
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes);
void* __tsan_memmove(void* to, const void* from, unsigned long bytes);
void* __tsan_memset(void* to, int value, unsigned long bytes);

// The shared address of a pointer into SRAM, and the reverse.
unsigned emu_shared_address(const void* pointer);
void* emu_shared_pointer(unsigned address);

// The running thread: its indices, which never change, its step, and its counts.
[[gnu::const]] uint3 emu_thread_index();
[[gnu::const]] uint3 emu_block_index();
[[gnu::const]] uint3 emu_block_dim();
[[gnu::const]] uint3 emu_grid_dim();
void emu_argument(void* to, int index, unsigned long bytes);
void emu_step(const char* name);
void emu_count_flops(unsigned n);
void emu_count_exp();

// The source names what lies in a range of SRAM.
void emu_name_sram(const char* name, unsigned address, unsigned bytes);
}

namespace emulator {

// These are calls, because the running thread's own record must not count as the kernel's memory.
inline void step(const char* name) { emu_step(name); }
inline void count_flops(unsigned n) { emu_count_flops(n); }
inline void count_exp() { emu_count_exp(); }

}  // namespace emulator

#include "emu_show_names.h"
