// Attention kernels of a few lines for tests of the verifier: a right one, and what goes wrong in others. float32.
#include <math.h>
#include <cuda_fp16.h>

constexpr int RIGHT = 0, TOP_LEFT = 1, PAST_THE_END = 2, RACE = 3, LAZY = 4;

__device__ float element(const float* x, int i) {
  return x[i];
}

// A thread per query. out (batch, heads, len_q, head_dim), head_dim of up to 64.
template <int MISTAKE>
__global__ void rows(const float* Q, const float* K, const float* V, float* out, float* lse, int num_heads,
                     int kv_heads, int seqlen_q, int seqlen_k, int head_dim, float softmax_scale, bool is_causal,
                     float softcap, const float* s_aux, const float* alibi_slopes) {
  __shared__ float row[32];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y;
  row[threadIdx.x] = 0;
  __syncthreads();
  if (i >= seqlen_q) return;
  const int kv = head / num_heads * kv_heads + head % num_heads / (num_heads / kv_heads);
  const float* q = Q + (size_t(head) * seqlen_q + i) * head_dim;
  const float* k = K + size_t(kv) * seqlen_k * head_dim;
  const float* v = V + size_t(kv) * seqlen_k * head_dim;
  float acc[64] = {}, top = -INFINITY, sum = 0;
  const int last = is_causal ? i + (MISTAKE == TOP_LEFT ? 0 : seqlen_k - seqlen_q) : seqlen_k - 1;
  for (int j = 0; j <= last && j < seqlen_k; ++j) {
    float s = 0;
    for (int x = 0; x < head_dim; ++x) s += q[x] * k[j * head_dim + x];
    if (MISTAKE == PAST_THE_END) s += 0 * element(q, head_dim);
    s *= softmax_scale;
    if (softcap > 0) s = softcap * tanhf(s / softcap);
    s -= alibi_slopes[head % num_heads] * abs(i + seqlen_k - seqlen_q - j);
    if (MISTAKE == RACE) {  // no barrier
      row[threadIdx.x] = s;
      if (row[(threadIdx.x + 1) % 32] == 1234.5f) s = 0;
    }
    const float now = fmaxf(top, s), shrink = __expf(top - now), p = __expf(s - now);
    sum = sum * shrink + p;
    for (int x = 0; x < head_dim; ++x) acc[x] = acc[x] * shrink + p * v[j * head_dim + x];
    top = now;
  }
  const float sink = s_aux[head % num_heads], most = fmaxf(top, sink);
  if (sink > -INFINITY) {
    const float shrink = __expf(top - most);
    for (int x = 0; x < head_dim; ++x) acc[x] *= shrink;
    sum = sum * shrink + __expf(sink - most), top = most;
  }
  for (int x = 0; x < head_dim; ++x)
    if (MISTAKE != LAZY || x < 8) out[(size_t(head) * seqlen_q + i) * head_dim + x] = sum > 0 ? acc[x] / sum : 0;
  lse[size_t(head) * seqlen_q + i] = sum > 0 ? top + __logf(sum) : -INFINITY;
}

// The same for one query of each sequence, half precision, and names and layouts of its own. A block per head.
template <int DIM>
__global__ void decode(half* dst, const half* x, const half* cache, int tokens, float log2_scale) {
  __shared__ float s[256];
  const half* k = cache + size_t(blockIdx.x) * tokens * 2 * DIM;  // (heads, tokens, [k, v], DIM)
  const half* q = x + blockIdx.x * DIM;
  for (int j = threadIdx.x; j < tokens; j += blockDim.x) {
    s[j] = 0;
    for (int d = 0; d < DIM; ++d) s[j] += __half2float(q[d]) * __half2float(k[j * 2 * DIM + d]);
  }
  __syncthreads();
  float top = -INFINITY, sum = 0, acc = 0;
  for (int j = 0; j < tokens; ++j) top = fmaxf(top, s[j] * log2_scale);
  for (int j = 0; j < tokens; ++j) {
    const float p = exp2f(s[j] * log2_scale - top);
    sum += p, acc += __half2float(__float2half(p)) * __half2float(k[(j * 2 + 1) * DIM + threadIdx.x]);
  }
  dst[blockIdx.x * DIM + threadIdx.x] = __float2half(acc / sum);
}
