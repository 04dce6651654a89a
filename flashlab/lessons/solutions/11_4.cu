// dK and dV of a tile of 64 keys, in float32. A block owns 64 keys, one for each of its threads.
//   q, dout (heads, len_q, 32)   k, v, dk, dv (kv_heads, len_kv, 32)   lse, delta (heads, len_q)   heads = kv_heads * group
//   blockIdx.x: tile of keys, .y: KV head
constexpr int BC = 64, BR = 32, D = 32;

__global__ void dk_dv(const float* q, const float* k, const float* v, const float* dout, const float* lse,
                      const float* delta, float* dk, float* dv, int len_q, int len_kv, int group, float scale) {
  __shared__ float q_tile[BR][D], do_tile[BR][D], lse_tile[BR], delta_tile[BR];
  const int t = threadIdx.x, key = blockIdx.x * BC + t;
  k += blockIdx.y * len_kv * D, v += blockIdx.y * len_kv * D;  // this block's KV head
  dk += blockIdx.y * len_kv * D, dv += blockIdx.y * len_kv * D;

  // step: load_kv
  float k_row[D], v_row[D], dk_row[D], dv_row[D];
  for (int d = 0; d < D; ++d) {
    k_row[d] = key < len_kv ? k[key * D + d] : 0, v_row[d] = key < len_kv ? v[key * D + d] : 0;
    dk_row[d] = 0, dv_row[d] = 0;
  }
  for (int g = 0; g < group; ++g) {
    for (int i = 0; i < len_q; i += BR) {
      // step: load_q
      const int head = blockIdx.y * group + g;
      __syncthreads();  // nobody still reads the tiles before  // solution
      for (int n = t; n < BR * D; n += BC)
        q_tile[n / D][n % D] = i + n / D < len_q ? q[(head * len_q + i) * D + n] : 0;
      // step: load_do
      for (int n = t; n < BR * D; n += BC)  // solution
        do_tile[n / D][n % D] = i + n / D < len_q ? dout[(head * len_q + i) * D + n] : 0;  // solution
      if (t < BR) lse_tile[t] = i + t < len_q ? lse[head * len_q + i + t] : INFINITY;  // solution
      if (t < BR) delta_tile[t] = i + t < len_q ? delta[head * len_q + i + t] : 0;  // solution
      __syncthreads();  // the tiles are there  // solution

      // step: weights
      float p[BR], ds[BR];
      for (int r = 0; r < BR; ++r) {
        float s = 0;
        for (int d = 0; d < D; ++d) s += k_row[d] * q_tile[r][d];
        p[r] = expf(s * scale - lse_tile[r]);  // solution
      }
      // step: dv
      for (int r = 0; r < BR; ++r)  // solution
        for (int d = 0; d < D; ++d) dv_row[d] += p[r] * do_tile[r][d];  // solution
      // step: ds
      for (int r = 0; r < BR; ++r) {
        float dp = 0;
        for (int d = 0; d < D; ++d) dp += v_row[d] * do_tile[r][d];  // solution
        ds[r] = p[r] * (dp - delta_tile[r]);  // solution
      }
      // step: dk
      for (int r = 0; r < BR; ++r)  // solution
        for (int d = 0; d < D; ++d) dk_row[d] += ds[r] * q_tile[r][d];  // solution
    }
  }
  // step: store_dkv
  for (int d = 0; d < D && key < len_kv; ++d) dk[key * D + d] = dk_row[d] * scale;  // solution
  for (int d = 0; d < D && key < len_kv; ++d) dv[key * D + d] = dv_row[d];  // solution
}
