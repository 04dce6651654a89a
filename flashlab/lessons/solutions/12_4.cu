// One query for each row, and its keys split over blocks: the block that comes last merges what all of them have left.
//   s (rows, len): scores   v (rows, len, 64)   out (rows, 64)   lse (rows)
//   partial (rows, chunks, 64), partial_m, partial_l (rows, chunks): O of a chunk, which isn't divided yet, m and l
//   counter (rows): zeros before the launch, and zeros after it   blockIdx.x: chunk of 64 keys, .y: row
constexpr int D = 64, CHUNK = 64;  // a thread has a column

__global__ void attend_and_merge(const float* s, const float* v, float* partial, float* partial_m, float* partial_l,
                                 int* counter, float* out, float* lse, int len) {
  const int t = threadIdx.x, chunks = gridDim.x, row = blockIdx.y, mine = row * chunks + blockIdx.x;
  const int first = blockIdx.x * CHUNK, end = min(first + CHUNK, len);

  // step: attend
  float m = -INFINITY, l = 0, o = 0;
  for (int c = first; c < end; ++c) m = fmaxf(m, s[row * len + c]);
  for (int c = first; c < end; ++c) {
    const float p = expf(s[row * len + c] - m);
    l += p;
    o += p * v[(row * len + c) * D + t];
  }
  // step: store_partial
  partial[mine * D + t] = o;
  if (t == 0) partial_m[mine] = m, partial_l[mine] = l;

  // step: count
  // first make sure that other blocks see what this one has stored, all of its threads; then one thread counts
  __shared__ int before;  // how many blocks of this row had counted before
  __threadfence();  // solution
  __syncthreads();  // solution
  if (t == 0) before = atomicAdd(&counter[row], 1);  // solution
  __syncthreads();  // all threads know `before`
  // a block that isn't the last has nothing more to do
  if (before != chunks - 1) return;  // solution
  __threadfence();  // from here on, what the others had stored is read

  float m_all = -INFINITY, l_all = 0, o_all = 0;
  for (int c = 0; c < chunks; ++c) {
    // step: merge
    const int n = row * chunks + c;
    const float m_c = partial_m[n], l_c = partial_l[n], o_c = partial[n * D + t];
    // both sides on one maximum
    const float top = fmaxf(m_all, m_c);  // solution
    const float alpha = expf(m_all - top), beta = expf(m_c - top);  // solution
    l_all = l_all * alpha + l_c * beta;  // solution
    o_all = o_all * alpha + o_c * beta;  // solution
    m_all = top;  // solution
  }
  // step: store
  out[row * D + t] = o_all / l_all;  // solution
  if (t == 0) lse[row] = m_all + logf(l_all);  // solution
  // step: reset
  // the next launch begins with zeros, too. Where others have added by atomics, a plain store would be a race: atomicExch(place, 0)
  if (t == 0) atomicExch(&counter[row], 0);  // solution
}
