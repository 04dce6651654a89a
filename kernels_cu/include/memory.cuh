// Every load, store and copy of the kernels. One call is one warp instruction of that width, in program order:
// `asm volatile` keeps the compiler from merging or dropping any, because their bytes are counted.
// SRAM is addressed by its 32-bit shared address.
#pragma once

#include "types.cuh"

// Start of the block's dynamic SRAM (aligned to 1024 bytes, the period of TMA's swizzle).
DEVICE unsigned sram_base() {
  extern __shared__ __align__(1024) unsigned char sram[];
  return static_cast<unsigned>(__cvta_generic_to_shared(sram));
}

// Says what lies in a range of SRAM from now on, for the emulator's reports and counts.
DEVICE void name_sram(const char* name, unsigned address, unsigned bytes) {
#ifdef EMULATOR
  emu_name_sram(name, address, bytes);
#endif
}

// Waits for every thread of the block, and makes their SRAM and HBM writes visible to each other.
DEVICE void barrier() { __syncthreads(); }

// The same, and true for all threads if x is for any.
DEVICE bool barrier_any(bool x) { return __syncthreads_or(x); }

// What this thread wrote to SRAM is visible to the copy engine and the tensor cores, once a barrier has passed.
DEVICE void fence_async() {
#ifdef EMULATOR
  emu_fence_async();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// T from HBM: unsigned char, float, float2, float4, unsigned, uint2 or uint4 (1, 4, 8 or 16 bytes, aligned to its size).
template <class T>
DEVICE T load_global(const void* address) {
#ifdef EMULATOR
  T value;
  emu_load_global(&value, address, sizeof(T));
  return value;
#else
  union { T value; unsigned w[(sizeof(T) + 3) / 4]; } v;
  if constexpr (sizeof(T) == 1)
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v.w[0]) : "l"(address) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v.w[0]) : "l"(address) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(address) : "memory");
  else
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(address) : "memory");
  return v.value;
#endif
}

// T to HBM.
template <class T>
DEVICE void store_global(void* address, T value) {
#ifdef EMULATOR
  emu_store_global(address, &value, sizeof(T));
#else
  union { T value; unsigned w[sizeof(T) / 4]; } v{value};
  if constexpr (sizeof(T) == 4)
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(v.w[0]) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(v.w[0]), "r"(v.w[1]) : "memory");
  else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"l"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
#endif
}

// Adds to four floats in HBM (16 bytes, aligned), each by itself atomically. Nothing comes back.
DEVICE void add_global(void* address, float4 x) {
#if defined(EMULATOR) && __CUDA_ARCH__ >= 900
  atomicAdd(static_cast<float4*>(address), x);
#elif defined(EMULATOR)
  const float parts[] = {x.x, x.y, x.z, x.w};
  for (int i = 0; i < 4; ++i) atomicAdd(static_cast<float*>(address) + i, parts[i]);
#elif __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;\n\tred.global.add.f32 [%0 + 4], %2;\n\t"
               "red.global.add.f32 [%0 + 8], %3;\n\tred.global.add.f32 [%0 + 12], %4;"
               ::"l"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#endif
}

// Adds to four floats in HBM while it is this block's turn (wait_for). No other block may touch them, so the sum has one order. The
// emulator checks that.
DEVICE void add_in_turn(void* address, float4 x) {
#ifdef EMULATOR
  emu_in_turn(address, sizeof x);
#endif
  add_global(address, x);
}

// Counts a counter in HBM up to `last`, and then back to 0. Returns what it found. This orders memory: blocks that come later see
// what this block's threads wrote to HBM before a barrier that comes before the call. After a barrier, this block's threads see
// what the blocks that came before wrote.
DEVICE unsigned count_up(void* counter, unsigned last) {
#ifdef EMULATOR
  __threadfence();
  const unsigned before = atomicInc(static_cast<unsigned*>(counter), last);
  __threadfence();
#else
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
#endif
  return before;
}

// As count_up, but it orders no memory: it only gives each block another number.
DEVICE unsigned draw_from(unsigned* counter, unsigned last) { return atomicInc(counter, last); }

// True for the thread that finds the counter at `last`: all others have been here before.
DEVICE bool last_to_arrive(void* counter, unsigned last) { return count_up(counter, last) == last; }

// Counts up, for blocks that wait for it. They see what this block's threads wrote to HBM before a barrier that comes before the
// call.
DEVICE void pass_on(unsigned* counter) {
#ifdef EMULATOR
  __threadfence();
  atomicAdd(counter, 1u);
#else
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

// Waits until others have counted up to `turn`. What they wrote before is visible to the block's threads after a barrier.
DEVICE void wait_for(const void* counter, unsigned turn) {
#ifdef EMULATOR
  emu_wait_for(counter, turn);
  __threadfence();
#else
  unsigned now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  while (now != turn);
#endif
}

// T from SRAM. Lanes that name the same address get it from one read.
template <class T>
DEVICE T load_shared(unsigned address) {
#ifdef EMULATOR
  T value;
  emu_load_shared(&value, address, sizeof(T));
  return value;
#else
  union { T value; unsigned w[sizeof(T) / 4]; } v;
  if constexpr (sizeof(T) == 4)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v.w[0]) : "r"(address) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(address) : "memory");
  return v.value;
#endif
}

// T to SRAM.
template <class T>
DEVICE void store_shared(unsigned address, T value) {
#ifdef EMULATOR
  emu_store_shared(address, &value, sizeof(T));
#else
  union { T value; unsigned w[sizeof(T) / 4]; } v{value};
  if constexpr (sizeof(T) == 4)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v.w[0]) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]) : "memory");
  else
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
#endif
}

// Copies one 16-byte chunk HBM -> SRAM in the background. Only the first `bytes` (0..16) are kept, the rest become
// zeros; with 0, HBM isn't touched. What isn't whole, and everything before sm_80, is loaded, cut and stored at once.
//
// The counters (ncu 2025.3) misread two forms of the instruction: with an offset in its shared address they count one
// lane's bytes for all 32, and with a source size they sometimes count bytes that aren't read. The second form is
// avoided; the first is left to the compiler, for it saves an addition, except in the build that is COUNTED.
DEVICE void copy_async(unsigned to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  if (bytes == 16) {
#ifdef EMULATOR
    emu_copy_async(to, from);
#else
#ifdef COUNTED
    asm("xor.b32 %0, %0, %1;" : "+r"(to) : "r"(gridDim.y - 1));  // 0, which the compiler doesn't know
#endif
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
    return;
  }
#endif
  uint4 chunk = make_uint4(0, 0, 0, 0);
  if (bytes > 0) chunk = load_global<uint4>(from);
  unsigned* word = &chunk.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int kept = bytes - 4 * i;  // of this word
    if (kept < 4) word[i] &= kept <= 0 ? 0u : (1u << (8 * kept)) - 1u;
  }
  store_shared(to, chunk);
}

// Copies a chunk in the background, or zeros where it isn't `inside`. A predicate on the instruction is misread, too, so the build
// that is COUNTED gets something that keeps the branch.
DEVICE void copy_async_inside(unsigned to, const void* from, bool inside) {
  if (inside) {
#if defined(COUNTED) && !defined(EMULATOR)
    asm volatile("{ .reg .b32 mask; activemask.b32 mask; bar.warp.sync mask; }" ::: "memory");
#endif
    copy_async(to, from, 16);
  } else {
    store_shared(to, make_uint4(0, 0, 0, 0));
  }
}

// Copies a word of 4 bytes in the background, or zeros where it isn't `inside`.
DEVICE void copy_async_word(unsigned to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  if (inside) {
#ifdef EMULATOR
    emu_copy_async(to, from, 4, 4);
#else
#ifdef COUNTED
    asm("xor.b32 %0, %0, %1;" : "+r"(to) : "r"(gridDim.y - 1));  // as in copy_async
#endif
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#endif
    return;
  }
#endif
  store_shared(to, inside ? load_global<unsigned>(from) : 0u);
}

// Closes a group of copies: all that this thread issued since the last close.
DEVICE void copy_commit() {
#ifdef EMULATOR
  emu_copy_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's newest groups are still on their way (a barrier must follow: the
// other threads' copies are theirs to wait for).
template <int PENDING>
DEVICE void copy_wait() {
#ifdef EMULATOR
  emu_copy_wait(PENDING);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
