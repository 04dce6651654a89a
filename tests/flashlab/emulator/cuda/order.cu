// Threads that order each other by more than barriers. Each kernel is right; without its fence of number `without` the line of
// `// race` is one. x: 1,024 floats; y: 1,024 floats, zeros; state: 64 ints, zeros. 8 blocks of 64 threads.

// The last block to come adds up what all blocks have left (CUDA C++ Programming Guide, memory fence functions).
__global__ void last_block(const float* x, float* y, unsigned* state, int without) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += x[64 * blockIdx.x + i];
    y[blockIdx.x] = sum;
    if (without != 1) __threadfence();
    last = atomicInc(&state[0], gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += y[i];  // race
    y[100] = sum;
  }
}

// The same, but each thread fences what it wrote, and a barrier gathers that.
__global__ void last_block_of_all(const float* x, float* y, unsigned* state, int without) {
  __shared__ bool last;
  y[64 * blockIdx.x + threadIdx.x] = 2 * x[64 * blockIdx.x + threadIdx.x];
  if (without != 1) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&state[0], 1) == gridDim.x - 1;
  __syncthreads();
  if (last) {
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += y[64 * i + threadIdx.x];  // race
    y[512 + threadIdx.x] = sum;
  }
}

// Each block waits for the one before it.
__global__ void chain(const float* x, float* y, volatile int* state, int without) {
  if (threadIdx.x == 0) {
    float sum = x[blockIdx.x];
    if (blockIdx.x > 0) {
      while (state[blockIdx.x - 1] == 0) {
      }
      if (without != 1) __threadfence();
      sum += y[blockIdx.x - 1];  // race
    }
    y[blockIdx.x] = sum;
    if (without != 2) __threadfence();
    state[blockIdx.x] = 1;
  }
}

// Each waits for the one behind it, so all must be resident.
__global__ void chain_from_the_end(const float* x, float* y, int* state, int without) {
  if (threadIdx.x == 0) {
    float sum = x[blockIdx.x];
    if (blockIdx.x + 1 < gridDim.x) {
      while (atomicAdd(&state[blockIdx.x + 1], 0) == 0) {
      }
      if (without != 1) __threadfence();
      sum += y[blockIdx.x + 1];  // race
    }
    y[blockIdx.x] = sum;
    if (without != 2) __threadfence();
    atomicExch(&state[blockIdx.x], 1);
  }
}

// A barrier of the whole grid.
__global__ void grid_barrier(const float* x, float* y, int* state, int without) {
  const int i = 64 * blockIdx.x + threadIdx.x;
  y[i] = x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (without != 1) __threadfence();
    atomicAdd(&state[0], 1);
    while (*reinterpret_cast<volatile int*>(&state[0]) < gridDim.x) {
    }
    __threadfence();
  }
  __syncthreads();
  y[512 + i] = y[511 - i];  // race
}

// A lock that blocks spin for.
__global__ void lock(const float* x, float* y, int* state, int without) {
  if (threadIdx.x == 0) {
    while (atomicCAS(&state[0], 0, 1) != 0) {
    }
    if (without != 1) __threadfence();
    y[0] += x[blockIdx.x];  // race
    if (without != 2) __threadfence();
    atomicExch(&state[0], 0);
  }
}

// A lock that the threads of a block spin for, those of a warp among them.
__global__ void lock_of_block(const float* x, float* y, int* state, int without) {
  __shared__ int taken;
  __shared__ float sum;
  if (threadIdx.x == 0) taken = 0, sum = 0;
  __syncthreads();
  bool done = false;
  while (!done) {
    if (atomicCAS(&taken, 0, 1) == 0) {
      if (without != 1) __threadfence_block();
      sum += x[threadIdx.x];  // race
      if (without != 2) __threadfence_block();
      atomicExch(&taken, 0);
      done = true;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// One warp hands a value to another.
__global__ void between_warps(const float* x, float* y, int* state, int without) {
  __shared__ volatile int flag;
  __shared__ float value;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    value = x[blockIdx.x];
    if (without != 1) __threadfence_block();
    flag = 1;
  }
  if (threadIdx.x == 32) {
    while (flag == 0) {
    }
    if (without != 2) __threadfence_block();
    y[blockIdx.x] = value;  // race
  }
}

// Threads that store one value, and threads that don't.
__global__ void same_value(const float* x, float* y, int* state, int without) {
  __shared__ int any;
  if (x[threadIdx.x] >= 0) any = 1;  // note
  __syncthreads();
  if (any) state[0] = 1;  // note
  if (without) state[1] = threadIdx.x / 32;  // race
}

// The maximum of floats, as the CUDA C++ Programming Guide makes atomics of compare-and-swap; and a read that nothing checks.
__global__ void swapped(const float* x, float* y, int* state, int without) {
  int* const most = reinterpret_cast<int*>(y);
  int old = *most, seen;  // note
  do {
    seen = old;
    old = atomicCAS(most, seen, __float_as_int(fmaxf(__int_as_float(seen), x[64 * blockIdx.x + threadIdx.x])));
  } while (old != seen);
  if (without) y[1 + 64 * blockIdx.x + threadIdx.x] = *most;  // race
}
