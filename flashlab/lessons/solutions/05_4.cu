// lse[i] = log of the sum of exp(scale q_i · k_j) over all keys j. A block owns 64 queries, one for each of its threads.
//   q (heads, len_q, 32)   k (heads, len_kv, 32)   lse (heads, len_q)     blockIdx.x: tile of queries, blockIdx.y: head
constexpr int BR = 64, BC = 32, D = 32;

__global__ void scores_lse(const float* q, const float* k, float* lse, int len_q, int len_kv, float scale) {
  __shared__ float k_tile[BC][D];
  const int t = threadIdx.x, row = blockIdx.x * BR + t;
  q += blockIdx.y * len_q * D;  // this block's head
  k += blockIdx.y * len_kv * D;

  // step: load_q
  float q_row[D];  // in registers
  for (int d = 0; d < D; ++d) q_row[d] = row < len_q ? q[row * D + d] : 0;

  float m = -INFINITY, l = 0;
  for (int j = 0; j < len_kv; j += BC) {
    // step: load_k
    __syncthreads();  // solution
    for (int i = t; i < BC * D; i += BR)  // all threads together, neighbours take neighbours
      k_tile[i / D][i % D] = j + i / D < len_kv ? k[j * D + i] : 0;
    __syncthreads();  // solution

    // step: scores
    float s[BC], m_new = m;
    for (int c = 0; c < BC; ++c) {
      s[c] = 0;
      for (int d = 0; d < D; ++d) s[c] += q_row[d] * k_tile[c][d];
      // scale it; a key past the end is no key
      s[c] = j + c < len_kv ? s[c] * scale : -INFINITY;  // solution
      m_new = fmaxf(m_new, s[c]);
    }
    // step: softmax
    // l for the new maximum, and this tile's exponentials
    l *= expf(m - m_new);  // solution
    for (int c = 0; c < BC; ++c) l += expf(s[c] - m_new);  // solution
    m = m_new;
  }
  // step: store_lse
  if (row < len_q) lse[blockIdx.y * len_q + row] = m + logf(l);
}
