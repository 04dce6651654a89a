// Each kernel asks one question: how many clocks of an SM does this take? It writes the clocks of every block, from
// when all of the block's warps are there until all are done. Loops are volatile assembly, so that ptxas drops
// nothing. rates.py says what is asked.
#include "flash3.cuh"

constexpr int CHAINS = 8;  // independent results that each thread has in flight

DEVICE long long now() {
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
DEVICE long long nanoseconds() {
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
DEVICE int sm() {
  int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// Runs the body between two barriers of the block, and writes its clocks.
template <class Body>
DEVICE void timed(long long* clocks, Body body) {
  __syncthreads();
  const long long begun = now();
  body();
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = now() - begun;
}

// The first warpgroup, with a warp on each sub-partition, takes turns until the second has multiplied `products`
// times, in batches. It takes at most `rounds` turns, so that it ends in any case. A batch is issued while another may
// still run, so that the tensor cores always have one to go on with. Each block writes its turns, their clocks, and the
// clocks of the products. The second warpgroup's rounds are fixed ahead, because its warps must leave together.
constexpr int BATCH = 8;
template <class Turn>
DEVICE void beside_products(long long* found, int rounds, int products, float* sink, Turn turn) {
  const unsigned done = opaque(sram_base() + 48 * 1024);
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) store_shared(sram_base() + 4 * i, 0u);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const long long begun = now();
  if (warpgroup_id() == 0) {
    unsigned ended = 0;
    int turns = 0;
    for (; turns < rounds && !ended; ++turns) {
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(ended) : "r"(done) : "memory");  // in flight meanwhile
      turn();
    }
    if (threadIdx.x == 0) found[3 * blockIdx.x] = turns, found[3 * blockIdx.x + 1] = now() - begun;
  } else {
    float c[16][4] = {};
    const unsigned long long q = wgmma_descriptor(sram_base(), 16, 1024), k = wgmma_descriptor(sram_base() + 16384, 16, 1024);
    settle(c);
#pragma unroll 1
    for (int n = 0; n < products; n += BATCH) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i) wgmma_ss(c, q, k, 1);
      wgmma_commit();
      wgmma_wait<1>();
    }
    wgmma_wait<0>();
    settle(c);
    if (threadIdx.x == WARPGROUP) {
      found[3 * blockIdx.x + 2] = now() - begun;
      if (products > 0) store_shared(done, 1u);
    }
    if (c[0][0] == 12345) *sink = c[0][0];
  }
}

// STATEMENT works on x and on a[i], the i-th of N independent results.
#define CHAINED(NAME, T, STATEMENT)                                          \
  __global__ void NAME(long long* clocks, int rounds, T x, T* sink) {        \
    constexpr int N = CHAINS;                                                \
    T a[N];                                                                  \
    for (int i = 0; i < N; ++i) a[i] = x * T(threadIdx.x + i);               \
    timed(clocks, [&] {                                                      \
      for (int n = 0; n < rounds; ++n)                                       \
        _Pragma("unroll") for (int i = 0; i < N; ++i) { STATEMENT; }         \
    });                                                                      \
    for (int i = 0; i < N; ++i) if (a[i] == T(12345)) *sink = a[i];          \
  }

constexpr int STATEMENTS = 256;  // per turn: so many that the loop's own five hardly count
#define CHAINED_BESIDE(NAME, T, STATEMENT)                                                          \
  __global__ void NAME(long long* found, int rounds, T x, float* sink, int products) {              \
    constexpr int N = 32;                                                                           \
    T a[N];                                                                                         \
    for (int i = 0; i < N; ++i) a[i] = x * T(threadIdx.x + i);                                      \
    x += T(threadIdx.x); /* in a register, as kernels' operands are, and not a uniform one */       \
    beside_products(found, rounds, products, sink, [&] {                                            \
      _Pragma("unroll") for (int n = 0; n < STATEMENTS; ++n) {                                      \
        const int i = n % N;                                                                        \
        STATEMENT;                                                                                  \
      }                                                                                             \
    });                                                                                             \
    for (int i = 0; i < N; ++i) if (a[i] == T(12345)) *sink = 1;                                    \
  }

#define INSTRUCTION(NAME, T, STATEMENT)                     \
  CHAINED(NAME, T, STATEMENT)                               \
  CHAINED_BESIDE(NAME##_beside_products, T, STATEMENT)

extern "C" {

INSTRUCTION(multiply_add, float, asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(a[i]) : "f"(x)))
INSTRUCTION(add, float, asm volatile("add.f32 %0, %0, %1;" : "+f"(a[i]) : "f"(x)))
INSTRUCTION(maximum, float, asm volatile("max.f32 %0, %0, %1;" : "+f"(a[i]) : "f"(x)))
INSTRUCTION(exponential, float, asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(a[i])))
INSTRUCTION(convert_pair, unsigned,
            asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a[i]) : "f"(__uint_as_float(a[i])), "f"(__uint_as_float(x))))
INSTRUCTION(maximum_of_three, int, a[i] = max(max(a[i], a[(i + 1) % N]), a[(i + 3) % N]))
__global__ void dependent(long long* clocks, int rounds, float x, float* sink) {
  float a = x;
  timed(clocks, [&] {
#pragma unroll 16
    for (int n = 0; n < rounds; ++n) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(a) : "f"(x));
  });
  if (a == 12345) *sink = a;
}

// SRAM: loads of 16 bytes per lane without conflicts; then loads that wait for each other.
__global__ void shared_bandwidth(long long* clocks, int rounds, unsigned, unsigned* sink) {
  unsigned sum = 0;
  const unsigned mine = sram_base() + threadIdx.x % 256 * 16;
  timed(clocks, [&] {
    for (int n = 0; n < rounds; ++n)
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) {
        uint4 x;
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(mine + i * 4096));
        sum += x.x ^ x.y ^ x.z ^ x.w;
      }
  });
  if (sum == 12345) *sink = sum;
}
__global__ void shared_latency(long long* clocks, int rounds, unsigned, unsigned* sink) {
  unsigned at = sram_base();
  for (int i = 0; i < 64; ++i) store_shared(at + 4 * i, at + 4 * ((i + 7) % 64));
  timed(clocks, [&] {
    for (int n = 0; n < rounds; ++n) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at)::"memory");
  });
  if (at == 12345) *sink = at;
}

// From the L2 or DRAM, whichever holds the data: the word at `first` says where the next one lies.
__global__ void global_latency(long long* clocks, int rounds, long long first, long long* sink) {
  timed(clocks, [&] {
    for (int n = 0; n < rounds; ++n) asm volatile("ld.global.cg.s64 %0, [%0];" : "+l"(first)::"memory");
  });
  *sink = first;
}

// Every block reads all of `bytes` (a power of two), 16 bytes per lane, and starts at a place of its own.
__global__ void global_bandwidth(long long* clocks, int rounds, const char* data, unsigned* sink, int bytes) {
  unsigned sum = 0;
  int at = (blockIdx.x * 524288 + threadIdx.x * 16) % bytes;
  timed(clocks, [&] {
    for (int n = 0; n < rounds; ++n)
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) {
        uint4 x;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(data + at));
        sum += x.x ^ x.y ^ x.z ^ x.w;
        at = (at + blockDim.x * 16) % bytes;
      }
  });
  if (sum == 12345) *sink = sum;
}

// Each warp adds 512 bytes in a row, as the backward passes add to the sums of dQ. Every block starts at a place of its own.
__global__ void reductions(long long* clocks, int rounds, char* data, long long bytes) {
  long long at = (blockIdx.x * (bytes / gridDim.x) / 512 * 512 + threadIdx.x * 16) % bytes;
  timed(clocks, [&] {
#pragma unroll 1
    for (int n = 0; n < rounds; ++n)
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) {
        add_global(data + at, make_float4(0, 0, 0, 0));
        at += blockDim.x * 16;
        if (at >= bytes) at -= bytes;
      }
    __threadfence();  // until all additions have arrived
  });
}

// Boxes of 128 rows of 128 bytes by the copy engine (TMA), `in_flight` of them at a time. A block reads its own boxes.
__global__ void boxes(long long* clocks, int rounds, const __grid_constant__ TensorMap map, int in_flight, int all) {
  constexpr int BYTES = 128 * 128;
  const unsigned full = sram_base() + 8 * BYTES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < in_flight; ++i) mbarrier_init(full + 8 * i, 1);
    mbarrier_publish();
  }
  auto ask = [&](int n) {
    mbarrier_arrive_expect(full + n % in_flight * 8, BYTES);
    tma_load(sram_base() + n % in_flight * BYTES, map, 0, 0, (blockIdx.x * 37 + n) % all * 128, 0, full + n % in_flight * 8,
             EVICT_LAST);
  };
  timed(clocks, [&] {
    if (threadIdx.x != 0) return;
    for (int n = 0; n < in_flight; ++n) ask(n);
    for (int n = 0; n < rounds; ++n) {
      mbarrier_wait(full + n % in_flight * 8, n / in_flight % 2);
      if (n + in_flight < rounds) ask(n + in_flight);
    }
  });
}

__global__ void warp_products(long long* clocks, int rounds, unsigned x, float* sink) {
  float c[CHAINS][4] = {};
  const unsigned a[4] = {x, x, x, x};
  timed(clocks, [&] {
    for (int n = 0; n < rounds; ++n)
#pragma unroll
      for (int i = 0; i < CHAINS; ++i)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%4, %5}, {%0, %1, %2, %3};"
            : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
  });
  for (int i = 0; i < CHAINS; ++i) if (c[i][0] == 12345) *sink = c[i][0];
}
}

// Products of a warpgroup, 64 x N x 16. BATCH of them are issued, then waited for.
template <int N, bool A_IN_SRAM>
DEVICE void warpgroup_products(long long* clocks, int rounds, float* sink) {
  float c[N / 8][4] = {};
  const unsigned a[4] = {};
  const unsigned long long q = wgmma_descriptor(sram_base(), 16, 1024), k = wgmma_descriptor(sram_base() + 16384, 16, 1024);
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) store_shared(sram_base() + 4 * i, 0u);
  asm volatile("fence.proxy.async;" ::: "memory");
  timed(clocks, [&] {
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
      settle(c);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if constexpr (A_IN_SRAM) wgmma_ss(c, q, k, 1);
        else wgmma_rs(c, a, k);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(c);
    }
  });
  if (c[0][0] == 12345) *sink = c[0][0];
}

// A consumer's exponentials, as in flash3, of 64 x BC scores per warpgroup.
struct TileOfScores {
  Softmax softmax;
  float s[S_FRAGMENTS][4];
  unsigned p[P_REGISTERS][4];

  DEVICE explicit TileOfScores(const Shape& shape) : softmax(shape) {
    for (int n = 0; n < S_FRAGMENTS; ++n)
      for (int e = 0; e < 4; ++e) s[n][e] = shape.scale * (n + e);
    softmax.m[0] = softmax.m[1] = 0;
  }
  DEVICE void exponentials() {
    settle(s);
    softmax.exponentials(s);
    round_p(p, s);
    settle(p);
  }
  DEVICE float rest() const { return softmax.l[0] + softmax.l[1] + s[0][0]; }
};

// The last warpgroup multiplies all the time, and the others take exponentials all the time. Writes the clocks of the
// first warpgroup's `rounds`, and those of the products.
template <int N, bool A_IN_SRAM>
DEVICE void exponentials_beside(long long* clocks, int rounds, float x, float* sink, int products) {
  Shape shape{};
  shape.scale = x;
  for (int i = threadIdx.x; i < 16384; i += blockDim.x) store_shared(sram_base() + 4 * i, 0u);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const long long begun = now();
  if (warpgroup_id() == static_cast<int>(blockDim.x) / WARPGROUP - 1) {
    float c[N / 8][4] = {};
    const unsigned a[4] = {};
    const unsigned long long q = wgmma_descriptor(sram_base(), 16, 1024), k = wgmma_descriptor(sram_base() + 16384, 16, 1024);
#pragma unroll 1
    for (int n = 0; n < products; ++n) {
      settle(c);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (A_IN_SRAM) wgmma_ss(c, q, k, 1);
        else wgmma_rs(c, a, k);
      }
      wgmma_commit();
      wgmma_wait<0>();
      settle(c);
    }
    if (threadIdx.x % WARPGROUP == 0) clocks[2 * blockIdx.x + 1] = now() - begun;
    if (c[0][0] == 12345) *sink = c[0][0];
  } else {
    TileOfScores scores(shape);
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) scores.exponentials();
    if (threadIdx.x == 0) clocks[2 * blockIdx.x] = now() - begun;
    if (scores.rest() == 12345) *sink = 1;
  }
}

extern "C" {

__global__ void exponentials(long long* clocks, int rounds, float x, float* sink) {
  Shape shape{};
  shape.scale = x;
  TileOfScores scores(shape);
  timed(clocks, [&] {
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) scores.exponentials();
  });
  if (scores.rest() == 12345) *sink = 1;
}
#define BESIDE(NAME, N, A_IN_SRAM)                                                                     \
  __global__ void NAME(long long* clocks, int rounds, float x, float* sink, int products) {            \
    exponentials_beside<N, A_IN_SRAM>(clocks, rounds, x, sink, products);                              \
  }
BESIDE(exponentials_beside_128_sram, 128, true)
BESIDE(exponentials_beside_64_registers, 64, false)
BESIDE(exponentials_beside_128_registers, 128, false)

// Two warpgroups pass the turn to each other (ping-pong).
__global__ void turns(long long* clocks, int rounds, int, float*) {
  timed(clocks, [&] {
    const Turns turns{warpgroup_id()};
    turns.start();
    for (int n = 0; n < rounds; ++n) turns.take(), turns.pass();
    if (warpgroup_id() == 0) turns.take();
  });
}

#define PRODUCTS(NAME, N, A_IN_SRAM)                                          \
  __global__ void NAME(long long* clocks, int rounds, int, float* sink) {     \
    warpgroup_products<N, A_IN_SRAM>(clocks, rounds, sink);                   \
  }
PRODUCTS(products_128_sram, 128, true)
PRODUCTS(products_128_registers, 128, false)

// Writes when a block begins and ends, in clocks of its SM. It takes `spin` clocks.
__global__ void blocks(long long* times, int spin, int, int*) {
  if (threadIdx.x == 0) {
    const long long begun = now();
    while (now() - begun < spin) {}
    times[3 * blockIdx.x] = sm(), times[3 * blockIdx.x + 1] = begun, times[3 * blockIdx.x + 2] = now();
  }
}

// Writes each SM's clock count beside the time. Two of these give the clock rate in between.
__global__ void watch(long long* times) {
  if (threadIdx.x == 0) times[2 * sm()] = now(), times[2 * sm() + 1] = nanoseconds();
}

__global__ void nothing() {}
}
