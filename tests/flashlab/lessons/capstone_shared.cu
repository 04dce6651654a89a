// A better answer to the capstone: two lanes share two queries, and each takes every other key. So a number that comes out of
// SRAM is used twice. Odd rows swap neighbouring chunks, for else both lanes would want the same banks.
__global__ void capstone(const float* q, const float* k, const float* v, float* out, float* lse, int len_q, int len_kv,
                         float scale) {
  constexpr int BR = 64, BC = 32, D = 32, CHUNKS = D / 4, EACH = 2;
  __shared__ float4 k_tile[BC][CHUNKS], v_tile[BC][CHUNKS];
  const int t = threadIdx.x, half = t % 2, first = blockIdx.x * BR + t / 2 * EACH;
  const float4* q4 = reinterpret_cast<const float4*>(q) + blockIdx.y * len_q * CHUNKS;
  const float4* k4 = reinterpret_cast<const float4*>(k) + blockIdx.y * len_kv * CHUNKS;
  const float4* v4 = reinterpret_cast<const float4*>(v) + blockIdx.y * len_kv * CHUNKS;
  const float4 zero = make_float4(0, 0, 0, 0);
  float4 q_row[EACH][CHUNKS], acc[EACH][CHUNKS];
  float m[EACH], l[EACH];
  for (int r = 0; r < EACH; ++r) {
    m[r] = -INFINITY, l[r] = 0;
    for (int d = 0; d < CHUNKS; ++d)
      q_row[r][d] = first + r < len_q ? q4[(first + r) * CHUNKS + d] : zero, acc[r][d] = zero;
  }
  const int last_row = min(static_cast<int>(blockIdx.x + 1) * BR, len_q) - 1;
  const int keys = last_row + len_kv - len_q + 1;
  for (int j = 0; j < keys; j += BC) {
    __syncthreads();
    for (int i = t; i < BC * CHUNKS; i += BR) {
      const bool inside = j + i / CHUNKS < len_kv;
      const int c = i / CHUNKS, d = i % CHUNKS ^ c % 2;
      k_tile[c][d] = inside ? k4[j * CHUNKS + i] : zero;
      v_tile[c][d] = inside ? v4[j * CHUNKS + i] : zero;
    }
    __syncthreads();
    float s[EACH][BC / 2], m_new[EACH], alpha[EACH];
    for (int r = 0; r < EACH; ++r) m_new[r] = m[r];
    for (int c = 0; c < BC / 2; ++c) {
      const int key = 2 * c + half;
      float sum[EACH] = {};
      for (int d = 0; d < CHUNKS; ++d) {
        const float4 b = k_tile[key][d ^ half];
        for (int r = 0; r < EACH; ++r) {
          const float4 a = q_row[r][d];
          sum[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
      }
      for (int r = 0; r < EACH; ++r) {
        s[r][c] = j + key <= first + r + len_kv - len_q ? sum[r] * scale : -INFINITY;
        m_new[r] = fmaxf(m_new[r], s[r][c]);
      }
    }
    for (int r = 0; r < EACH; ++r) {
      alpha[r] = m_new[r] == -INFINITY ? 1 : expf(m[r] - m_new[r]);
      l[r] *= alpha[r], m[r] = m_new[r];
      for (int d = 0; d < CHUNKS; ++d)
        acc[r][d].x *= alpha[r], acc[r][d].y *= alpha[r], acc[r][d].z *= alpha[r], acc[r][d].w *= alpha[r];
    }
    for (int c = 0; c < BC / 2; ++c) {
      float p[EACH];
      for (int r = 0; r < EACH; ++r) p[r] = m[r] == -INFINITY ? 0 : expf(s[r][c] - m[r]), l[r] += p[r];
      for (int d = 0; d < CHUNKS; ++d) {
        const float4 b = v_tile[2 * c + half][d ^ half];
        for (int r = 0; r < EACH; ++r)
          acc[r][d].x += p[r] * b.x, acc[r][d].y += p[r] * b.y, acc[r][d].z += p[r] * b.z, acc[r][d].w += p[r] * b.w;
      }
    }
  }
  for (int r = 0; r < EACH; ++r) {  // the two lanes merge what they have
    const float top = fmaxf(m[r], __shfl_xor_sync(0xffffffff, m[r], 1)), mine = m[r] == -INFINITY ? 0 : expf(m[r] - top);
    l[r] *= mine;
    l[r] += __shfl_xor_sync(0xffffffff, l[r], 1);
    m[r] = top;
    for (int d = 0; d < CHUNKS; ++d) {
      float* x = reinterpret_cast<float*>(&acc[r][d]);
      for (int e = 0; e < 4; ++e) x[e] *= mine, x[e] += __shfl_xor_sync(0xffffffff, x[e], 1);
    }
  }
  const int row = first + half;
  if (row < len_q) {
    float4* out4 = reinterpret_cast<float4*>(out) + (blockIdx.y * len_q + row) * CHUNKS;
    for (int d = 0; d < CHUNKS; ++d) {
      const float4 o = half ? acc[1][d] : acc[0][d];
      const float sum = half ? l[1] : l[0];
      out4[d] = make_float4(o.x / sum, o.y / sum, o.z / sum, o.w / sum);
    }
    lse[blockIdx.y * len_q + row] = half ? m[1] + logf(l[1]) : m[0] + logf(l[0]);
  }
}
