// Attention, forward, in float32, causal: query i sees the keys 0 to i + len_kv - len_q. There are at least as many keys as queries.
//   q, out (heads, len_q, 32)   k, v (heads, len_kv, 32)   lse (heads, len_q)   blockIdx.x: tile of 64 queries, .y: head
//   64 threads a block
__global__ void capstone(const float* q, const float* k, const float* v, float* out, float* lse, int len_q, int len_kv,
                         float scale) {
  constexpr int BR = 64, BC = 32, D = 32, CHUNKS = D / 4;  // solution
  __shared__ float4 k_tile[BC][CHUNKS], v_tile[BC][CHUNKS];  // solution
  const int t = threadIdx.x, row = blockIdx.x * BR + t;  // solution
  const float4* q4 = reinterpret_cast<const float4*>(q) + (blockIdx.y * len_q + row) * CHUNKS;  // solution
  const float4* k4 = reinterpret_cast<const float4*>(k) + blockIdx.y * len_kv * CHUNKS;  // solution
  const float4* v4 = reinterpret_cast<const float4*>(v) + blockIdx.y * len_kv * CHUNKS;  // solution
  float4* out4 = reinterpret_cast<float4*>(out) + (blockIdx.y * len_q + row) * CHUNKS;  // solution
  const float4 zero = make_float4(0, 0, 0, 0);  // solution
  // step: load_q  // solution
  float4 q_row[CHUNKS], acc[CHUNKS];  // solution
  for (int d = 0; d < CHUNKS; ++d) q_row[d] = row < len_q ? q4[d] : zero, acc[d] = zero;  // solution
  float m = -INFINITY, l = 0;  // solution
  const int last_row = min(static_cast<int>(blockIdx.x + 1) * BR, len_q) - 1;  // solution
  const int keys = last_row + len_kv - len_q + 1;  // that the tile's last query sees  // solution
  for (int j = 0; j < keys; j += BC) {  // solution
    // step: load_k  // solution
    __syncthreads();  // nobody still reads the tiles before  // solution
    for (int i = t; i < BC * CHUNKS; i += BR) {  // solution
      const bool inside = j + i / CHUNKS < len_kv;  // solution
      k_tile[i / CHUNKS][i % CHUNKS] = inside ? k4[j * CHUNKS + i] : zero;  // solution
      v_tile[i / CHUNKS][i % CHUNKS] = inside ? v4[j * CHUNKS + i] : zero;  // solution
    }  // solution
    __syncthreads();  // both tiles are there  // solution
    // step: scores  // solution
    float s[BC], m_new = m;  // solution
    for (int c = 0; c < BC; ++c) {  // solution
      float sum = 0;  // solution
      for (int d = 0; d < CHUNKS; ++d) {  // solution
        const float4 a = q_row[d], b = k_tile[c][d];  // solution
        sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;  // solution
      }  // solution
      s[c] = j + c <= row + len_kv - len_q ? sum * scale : -INFINITY;  // solution
      m_new = fmaxf(m_new, s[c]);  // solution
    }  // solution
    // step: rescale  // solution
    const float alpha = expf(m - m_new);  // solution
    l *= alpha;  // solution
    for (int d = 0; d < CHUNKS; ++d) acc[d].x *= alpha, acc[d].y *= alpha, acc[d].z *= alpha, acc[d].w *= alpha;  // solution
    // step: output  // solution
    for (int c = 0; c < BC; ++c) {  // solution
      const float p = expf(s[c] - m_new);  // solution
      l += p;  // solution
      for (int d = 0; d < CHUNKS; ++d) {  // solution
        const float4 b = v_tile[c][d];  // solution
        acc[d].x += p * b.x, acc[d].y += p * b.y, acc[d].z += p * b.z, acc[d].w += p * b.w;  // solution
      }  // solution
    }  // solution
    m = m_new;  // solution
  }  // solution
  if (row < len_q) {  // solution
    // step: store_o  // solution
    for (int d = 0; d < CHUNKS; ++d)  // solution
      out4[d] = make_float4(acc[d].x / l, acc[d].y / l, acc[d].z / l, acc[d].w / l);  // solution
    // step: store_lse  // solution
    lse[blockIdx.y * len_q + row] = m + logf(l);  // solution
  }  // solution
}
