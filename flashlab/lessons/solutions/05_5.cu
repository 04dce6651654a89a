// FlashAttention-2, forward, in float32. A block owns 64 queries, one for each of its threads.
//   q, out (heads, len_q, 32)   k, v (heads, len_kv, 32)   lse (heads, len_q)   blockIdx.x: tile of queries, .y: head
constexpr int BR = 64, BC = 32, D = 32;

__global__ void my_flash2(const float* q, const float* k, const float* v, float* out, float* lse, int len_q, int len_kv,
                          float scale) {
  __shared__ float k_tile[BC][D], v_tile[BC][D];
  const int t = threadIdx.x, row = blockIdx.x * BR + t;
  q += blockIdx.y * len_q * D, out += blockIdx.y * len_q * D;  // this block's head
  k += blockIdx.y * len_kv * D, v += blockIdx.y * len_kv * D;

  // step: load_q
  float q_row[D], acc[D];
  for (int d = 0; d < D; ++d) q_row[d] = row < len_q ? q[row * D + d] : 0, acc[d] = 0;

  float m = -INFINITY, l = 0;
  for (int j = 0; j < len_kv; j += BC) {
    // step: load_k
    __syncthreads();  // nobody still reads the tiles before
    for (int i = t; i < BC * D; i += BR) k_tile[i / D][i % D] = j + i / D < len_kv ? k[j * D + i] : 0;
    // step: load_v
    for (int i = t; i < BC * D; i += BR) v_tile[i / D][i % D] = j + i / D < len_kv ? v[j * D + i] : 0;  // solution
    __syncthreads();  // both tiles are there

    // step: scores
    float s[BC], m_new = m;
    for (int c = 0; c < BC; ++c) {
      s[c] = 0;
      for (int d = 0; d < D; ++d) s[c] += q_row[d] * k_tile[c][d];
      s[c] = j + c < len_kv ? s[c] * scale : -INFINITY;
      m_new = fmaxf(m_new, s[c]);
    }
    // step: rescale
    const float alpha = expf(m - m_new);  // solution
    l *= alpha;  // solution
    for (int d = 0; d < D; ++d) acc[d] *= alpha;  // solution
    // step: output
    for (int c = 0; c < BC; ++c) {  // solution
      const float p = expf(s[c] - m_new);  // solution
      l += p;  // solution
      for (int d = 0; d < D; ++d) acc[d] += p * v_tile[c][d];  // solution
    }  // solution
    m = m_new;
  }
  if (row < len_q) {
    // step: store_o
    for (int d = 0; d < D; ++d) out[row * D + d] = acc[d] / l;  // solution
    // step: store_lse
    lse[blockIdx.y * len_q + row] = m + logf(l);  // solution
  }
}
