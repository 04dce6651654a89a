// What must be named and must not crash. Each kernel gets 64 ints of zeros and n = 0; `// wrong:` names what is found on its
// line. Shared memory: 256 dynamic bytes.
#ifdef EMULATOR
#include <assert.h>
#include <exception>
#endif

__global__ void null_pointer(int* a, int n) {
  int* p = n ? a : nullptr;
  p[threadIdx.x] = 1;  // wrong: out of bounds
}

__global__ void wild_pointer(int* a, int n) {
  const int* p = reinterpret_cast<const int*>(0x123456789abcdef0ull);
  a[threadIdx.x] = p[n];  // wrong: out of bounds
}

__global__ void far_away(int* a, int n) {
  a[(1ll << 40) + n] = 1;  // wrong: out of bounds
}

__global__ void past_the_end(int* a, int n) {
  a[threadIdx.x + 1 + n] = 1;  // wrong: out of bounds
}

__global__ void before_the_start(int* a, int n) {
  a[threadIdx.x] = a[static_cast<int>(threadIdx.x) - 1 + n];  // wrong: out of bounds
}

__global__ void past_the_dynamic(int* a, int n) {
  extern __shared__ int shared[];
  shared[threadIdx.x + 1] = n;  // wrong: out of bounds
  a[threadIdx.x] = 1;
}

__global__ void past_the_static(int* a, int n) {
  __shared__ int shared[64];
  shared[threadIdx.x] = n;
  a[threadIdx.x] = shared[threadIdx.x * 2];  // wrong: out of bounds
}

__constant__ int table[4] = {1, 2, 3, 4};

__global__ void past_the_constants(int* a, int n) {
  a[threadIdx.x] = table[threadIdx.x + n];  // wrong: out of bounds
}

__global__ void atomic_on_null(int* a, int n) {
  atomicAdd(n ? a : nullptr, 1);  // wrong: out of bounds
}

__global__ void cleared_too_far(int* a, int n) {
  memset(a, n, 1 << 30);  // wrong: out of bounds
}

__global__ void misaligned(int* a, int n) {
  reinterpret_cast<int2*>(a + 1)[n] = make_int2(1, 2);  // wrong: misaligned
}

__global__ void divides(int* a, int n) {
  a[threadIdx.x] = 7 / n;  // wrong: division by zero
}

__global__ void remainder_of(int* a, int n) {
  a[threadIdx.x] = threadIdx.x % n;  // wrong: division by zero
}

__device__ int deeper(int* a, int n) {  // wrong: fault
  volatile int room[64];
  room[n % 64] = n;
  return n < 0 ? 0 : deeper(a, n + 1) + room[n % 64];
}
__global__ void recursion(int* a, int n) {
  a[threadIdx.x] = deeper(a, n);
}

__global__ void calls_nothing(int* a, int n) {
  void (*f)(int) = n ? reinterpret_cast<void (*)(int)>(a) : nullptr;
  f(n);  // wrong: fault, nowhere
}

__global__ void waits_for_a_write(int* a, int n) {
  while (*static_cast<volatile int*>(a) == n) {  // wrong: deadlock
  }
}

__global__ void loops_on_registers(int* a, unsigned n) {
  unsigned i = n;
  while (i != 5) i += 2;  // wrong: time limit
  a[0] = i;
}

__global__ void barriers_for_ever(int* a, int n) {
  while (n == 0) __syncthreads();  // wrong: time limit
  a[0] = n;
}

__global__ void a_lock_never_freed(int* a, int n) {
  while (atomicCAS(a, 0, 1) != n) {  // wrong: deadlock
  }
}

__global__ void asserts(int* a, int n) {
  assert(static_cast<int>(threadIdx.x) < n + 5);  // wrong: assert
  a[threadIdx.x] = 1;
}

__global__ void traps(int* a, int n) {
  if (threadIdx.x == 9u + n) __trap();  // wrong: trap
  a[threadIdx.x] = 1;
}

__global__ void leaves_early(int* a, int n) {
  if (threadIdx.x > n + 40u) return;
  __syncthreads();  // wrong: barrier
  a[threadIdx.x] = 1;
}

__global__ void half_a_shuffle(int* a, int n) {
  if (threadIdx.x % 32 < n + 16u) a[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 3, 1);  // wrong: divergent collective
  __syncthreads();
}

__global__ void unwritten(int* a, int n) {
  __shared__ int shared[64];
  if (threadIdx.x > 3) shared[threadIdx.x] = n;
  __syncthreads();
  a[threadIdx.x] = shared[threadIdx.x];  // wrong: uninitialised
}

__global__ void no_barrier(int* a, int n) {
  __shared__ int shared[64];
  shared[threadIdx.x] = n;
  a[threadIdx.x] = shared[63 - threadIdx.x];  // wrong: race
}

// As one wrote it before Volta: a warp's threads aren't in step by themselves.
__global__ void warp_without_sync(int* a, int n) {
  __shared__ volatile int shared[64];
  shared[threadIdx.x] = n;
  __syncthreads();
  if (threadIdx.x < 32) shared[threadIdx.x] += shared[threadIdx.x + 1];  // wrong: race
  if (threadIdx.x == 0) a[0] = shared[0];
}

#ifdef EMULATOR  // NVIDIA's compiler refuses these
__global__ void exits(int* a, int n) {
  if (threadIdx.x == 9u + n) exit(7);  // wrong: exit
  a[threadIdx.x] = 1;
}

__device__ int checked(int n) {
  if (n == 0) abort();  // wrong: exit
  return n;
}

__global__ void aborts(int* a, int n) { a[threadIdx.x] = checked(n); }

__global__ void throws(int* a, int n) {
  if (n == 0) throw n;  // wrong: exit
  a[threadIdx.x] = 1;
}

__global__ void terminates(int* a, int n) {
  if (n == 0) std::terminate();  // wrong: exit
  a[threadIdx.x] = 1;
}
#endif
