// Merges the parts of a row pair by pair, up a tree. The bits of the result don't depend on which part comes when.
//   o (parts, 64), m, l (parts): O of each part, which isn't divided yet, its maximum and its sum      out (64)
//   order (parts): the part that comes first, the one that comes next, …     node_o (nodes, 64), node_m, node_l (nodes)
//   counter (nodes): zeros before the launch, and zeros after it; nodes = 2 * parts
constexpr int D = 64;  // a thread has a column

struct Part {
  float m, l, o;
};

// The order of left and right shows in the last bits, so left is always the part with the smaller numbers. Nothing is missing here
__device__ Part merged(Part left, Part right) {
  const float top = fmaxf(left.m, right.m), alpha = expf(left.m - top), beta = expf(right.m - top);
  return {top, fmaf(right.l, beta, left.l * alpha), fmaf(right.o, beta, left.o * alpha)};
}

__global__ void merge_in_pairs(const float* o, const float* m, const float* l, const int* order, float* node_o,
                               float* node_m, float* node_l, int* counter, float* out, int parts) {
  __shared__ int before;
  const int t = threadIdx.x;
  for (int n = blockIdx.x; n < parts; n += gridDim.x) {
    // step: take
    int i = order[n], level = 0;  // this block has node i of a level; `level` is where the level's nodes begin
    Part mine = {m[i], l[i], o[i * D + t]};
    bool last = true;
    for (int nodes = parts; nodes > 1 && last; nodes = (nodes + 1) / 2) {
      // step: climb
      const int partner = i ^ 1, mine_at = level + i, theirs_at = level + partner;
      if (partner < nodes) {  // else it goes up alone
        // leave mine where the partner will look, and count at the pair's left node: the second block goes on with both
        node_o[mine_at * D + t] = mine.o;  // solution
        if (t == 0) node_m[mine_at] = mine.m, node_l[mine_at] = mine.l;  // solution
        __threadfence();  // solution
        __syncthreads();  // solution
        if (t == 0) before = atomicAdd(&counter[min(mine_at, theirs_at)], 1);  // solution
        __syncthreads();  // solution
        last = before == 1;  // solution
        __threadfence();  // from here on, what the other has left is read
        if (last) {
          // step: merge
          const Part theirs = {node_m[theirs_at], node_l[theirs_at], node_o[theirs_at * D + t]};  // solution
          mine = i < partner ? merged(mine, theirs) : merged(theirs, mine);  // solution
          if (t == 0) atomicExch(&counter[min(mine_at, theirs_at)], 0);  // solution
        }
        __syncthreads();  // `before` was read by all
      }
      level += nodes;
      i /= 2;
    }
    // step: store
    // only the block that has come to the root
    if (last) out[t] = mine.o / mine.l;  // solution
  }
}
