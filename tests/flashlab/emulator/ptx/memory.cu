// Memory and threads by inline PTX, as kernels have it.

__device__ unsigned shared_of(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Vectors by every way to global and shared memory.
__global__ void moves(const unsigned* x, unsigned* y) {
  __shared__ __align__(16) unsigned s[32 * 8];
  unsigned t = threadIdx.x, r[8];
  const unsigned* from = x + 8 * t;
  unsigned* to = y + 8 * t;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(from));
  asm volatile("ld.global.cs.v2.b32 {%0, %1}, [%2 + 16];" : "=r"(r[4]), "=r"(r[5]) : "l"(from));
  unsigned short low, high;
  asm volatile("ld.volatile.global.u16 %0, [%1+24];" : "=h"(low) : "l"(from));
  asm volatile("ld.global.ca.b16 %0, [%1+26];" : "=h"(high) : "l"(from));
  asm("mov.b32 %0, {%1, %2};" : "=r"(r[6]) : "h"(low), "h"(high));
  asm volatile("{ .reg .u64 p; cvta.to.global.u64 p, %1; ld.global.s8 %0, [p + 28]; }" : "=r"(r[7]) : "l"(from));
  unsigned at = shared_of(s + 8 * t);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  asm volatile("st.shared.v2.u32 [%0 + 16], {%1, %2};\n\tst.shared.u32 [%0 + 24], %3;" :: "r"(at), "r"(r[4]), "r"(r[5]), "r"(r[6]));
  asm volatile("st.b32 [%0], %1;" :: "l"(s + 8 * t + 7), "r"(r[7]) : "memory");  // a generic address
  asm volatile("bar.sync 0;");
  unsigned other = shared_of(s + 8 * (31 - t)), v[8];
  asm volatile("ld.shared::cta.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(other));
  asm volatile("{ .reg .b64 a, b; ld.shared.v2.b64 {a, b}, [%4 + 16]; mov.b64 {%0, %1}, a; mov.b64 {%2, %3}, b; }"
               : "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7]) : "r"(other));
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "f"(__uint_as_float(v[0])), "f"(__uint_as_float(v[1])), "f"(__uint_as_float(v[2])), "f"(__uint_as_float(v[3])));
  asm volatile("{ .reg .pred p; setp.ge.u32 p, %5, 32; @p bra SKIP;\n st.global.wb.v4.b32 [%0 + 16], {%1, %2, %3, %4};\nSKIP: }"
               :: "l"(to), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7]), "r"(t));
}

// Variables of the file, which no argument brings.
__device__ float table[32];
__global__ void tables(float* y) {
  float v;
  asm volatile("st.global.f32 [%0], %1;" :: "l"(table + threadIdx.x), "f"(2.f * threadIdx.x));
  __syncthreads();
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(table + 31 - threadIdx.x));
  y[threadIdx.x] = v;
}

// Lanes together: each result in a row of its own.
__global__ void lanes(const unsigned* x, unsigned* y) {
  unsigned t = threadIdx.x, a = x[t], r, p;
#define ROW(i) y[32 * i + t] = r
  asm volatile("shfl.sync.bfly.b32 %0, %1, 5, 31, 0xffffffff;" : "=r"(r) : "r"(a)); ROW(0);
  asm volatile("{ .reg .pred q; shfl.sync.up.b32 %0|q, %2, 3, 0, -1; selp.u32 %1, 1, 0, q; }" : "=r"(r), "=r"(p) : "r"(a)); ROW(1);
  r = p; ROW(2);
  asm volatile("shfl.sync.down.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(1), "r"(0x181f), "r"(0xffffffffu)); ROW(3);
  asm volatile("shfl.sync.idx.b32 %0, %1, 2, 0x1c1f, 0xffffffff;" : "=r"(r) : "r"(a)); ROW(4);
  asm volatile("{ .reg .pred q; setp.gt.u32 q, %1, 100; vote.sync.ballot.b32 %0, q, -1; }" : "=r"(r) : "r"(a)); ROW(5);
  asm volatile("{ .reg .pred q; setp.gt.u32 q, %1, 100; vote.sync.any.pred q, q, -1; selp.b32 %0, 7, 8, q; }" : "=r"(r) : "r"(a)); ROW(6);
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(a % 4)); ROW(7);
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(a)); ROW(8);
  asm volatile("redux.sync.min.f32 %0, %1, 0xffffffff;" : "=f"(*reinterpret_cast<float*>(&r)) : "f"(20.f - static_cast<float>(a))); ROW(9);
  asm volatile("{\n .reg .pred P1;\n elect.sync _|P1, 0xffffffff;\n selp.b32 %0, 1, 0, P1;\n}" : "=r"(r)); ROW(10);
  asm volatile("activemask.b32 %0;" : "=r"(r)); ROW(11);
  asm volatile("bar.warp.sync 0xffffffff;");
}

// Atomics on both memories.
__global__ void atomics(int* sums, float* total, half2* pair, unsigned* counter, unsigned long long* most, int* y) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  int t = threadIdx.x, old;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(shared_of(&s)), "r"(1) : "memory");
  y[old] = 1;  // each old value comes once
  asm volatile("red.global.add.s32 [%0], %1;" :: "l"(sums + t % 2), "r"(t) : "memory");
  asm volatile("red.relaxed.gpu.global.max.s32 [%0 + 8], %1;" :: "l"(sums), "r"(t - 10) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" :: "l"(total), "f"(0.5f) : "memory");
  asm volatile("red.global.add.noftz.f16x2 [%0], %1;" :: "l"(pair), "r"(0x40003c00) : "memory");  // 2, 1
  asm volatile("{ .reg .u32 u; atom.global.inc.u32 u, [%0], 4; }" :: "l"(counter) : "memory");
  asm volatile("{ .reg .u64 u; atom.max.u64 u, [%0], %1; }" :: "l"(most), "l"((unsigned long long)t << 40) : "memory");
  asm volatile("{ .reg .b32 u; atom.global.cas.b32 u, [%0 + 12], 0, %1; }" :: "l"(sums), "r"(t + 1) : "memory");
}

// Copies in the background: groups, zeros behind the source, an mbarrier that hears of them.
__global__ void copies(const float* x, float* y) {
  __shared__ __align__(16) float s[3][32 * 4];
  __shared__ __align__(8) unsigned long long bar;
  unsigned t = threadIdx.x, b = shared_of(&bar);
  if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(32));
  asm volatile("fence.mbarrier_init.release.cluster;");
  __syncthreads();
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;\n" :: "r"(shared_of(&s[0][4 * t])), "l"(x + 4 * t), "n"(16));
  asm volatile("cp.async.commit_group;\n" ::);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" :: "r"(shared_of(&s[1][4 * t])), "l"(x + 128 + 4 * t), "r"(t % 3 * 4));
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 8; @!p st.shared.v2.u32 [%0], {0, 0}; }"
               :: "r"(shared_of(&s[1][4 * t + 2])), "l"(x + 128 + 4 * t + 2), "r"(t & 1));
  asm volatile("cp.async.commit_group;\n" ::);
  asm volatile("cp.async.wait_group %0;\n" :: "n"(1));
  __syncwarp();
  float sum = s[0][4 * t] + s[0][4 * ((t + 1) % 32)];
  asm volatile("cp.async.wait_all;");
  __syncwarp();
  for (int i = 0; i < 4; ++i) y[32 + 4 * t + i] = s[1][4 * t + i];
  asm volatile("cp.async.cg.shared::cta.global [%0], [%1], 16;" :: "r"(shared_of(&s[2][4 * t])), "l"(x + 4 * t));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(b));
  asm volatile(
      "{\n"
      ".reg .pred                P1;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1, %2;\n"
      "@P1                       bra DONE;\n"
      "bra                   LAB_WAIT;\n"
      "DONE:\n"
      "}\n" :: "r"(b), "r"(0), "r"(0x989680));
  y[t] = sum + s[2][4 * (31 - t)];
}

// Bytes by the copy engine, there and back; the arrival's phase as a state.
__global__ void bulk(const int* x, int* y, int n) {
  extern __shared__ __align__(128) int s[];
  __shared__ __align__(8) unsigned long long bar;
  unsigned b = shared_of(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 33;" :: "r"(b));
    asm volatile("fence.proxy.async;");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(4 * n) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_of(s)), "l"(x), "r"(4 * n), "r"(b) : "memory");
  }
  unsigned long long state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.test_wait.shared.b64 p, [%0], %1; @!p bra AGAIN; }" :: "r"(b), "l"(state) : "memory");
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] += 1;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, 32;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(y), "r"(shared_of(s)), "r"(4 * n) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(0) : "memory");
  }
}

// Faults: each is one of the emulator's findings, at its line.
__global__ void faults(const float* x, float* y, int which) {
  __shared__ __align__(16) float s[32 * 4];
  unsigned t = threadIdx.x, at = shared_of(s + 4 * t);
  float v = 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(x + 4 * t));
  if (which == 0) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
  asm volatile("cp.async.wait_all;");
  if (which == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared_of(s + 4 * (31 - t))));
  if (which == 2) asm volatile("ld.global.f32 %0, [%1 + 512];" : "=f"(v) : "l"(x + 4 * t));
  if (which == 3) asm volatile("ld.shared.v4.f32 {%0, _, _, _}, [%1 + 8];" : "=f"(v) : "r"(at));
  y[t] = v;
}

// The second block copies in bulk what the first one wrote. A proxy fence of either thread shows it to the copy engine.
__global__ void passed_on(int* x, int* y, int* flag, int fence) {
  __shared__ __align__(16) int s[32];
  __shared__ __align__(8) unsigned long long bar;
  const int t = threadIdx.x;
  const unsigned b = shared_of(&bar);
  if (blockIdx.x == 0) {
    x[t] = t + 7;
    if (fence == 1) asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence();
    __syncthreads();
    if (t == 0) atomicExch(flag, 1);
    return;
  }
  if (t == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b));
    asm volatile("fence.mbarrier_init.release.cluster;");
    while (atomicAdd(flag, 0) == 0) {
    }
    __threadfence();
    if (fence == 2) asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], 128;" :: "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                 :: "r"(shared_of(s)), "l"(x), "r"(b) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra AGAIN; }" :: "r"(b) : "memory");
  y[t] = s[t];
}
