// wmma's shapes and types: one warp, c = a · b + c.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

template <int M, int N, int K, class T, class S, class Sum, bool ROWS>
__device__ void product(const S* a, const S* b, Sum* c) {
  using Layout = std::conditional_t<ROWS, wmma::row_major, wmma::col_major>;
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::row_major> rows;
  wmma::fragment<wmma::matrix_b, M, N, K, T, Layout> columns;
  wmma::fragment<wmma::accumulator, M, N, K, Sum> sum;
  wmma::load_matrix_sync(rows, a, K);
  wmma::load_matrix_sync(columns, b, ROWS ? N : K);
  wmma::load_matrix_sync(sum, c, N, wmma::mem_row_major);
  wmma::mma_sync(sum, rows, columns, sum);
  wmma::store_matrix_sync(c, sum, N, wmma::mem_row_major);
}
__global__ void half_32_8(const half* a, const half* b, float* c) { product<32, 8, 16, half, half, float, true>(a, b, c); }
__global__ void half_8_32(const half* a, const half* b, half* c) { product<8, 32, 16, half, half, half, false>(a, b, c); }
__global__ void bfloat_8_32(const nv_bfloat16* a, const nv_bfloat16* b, float* c) { product<8, 32, 16, nv_bfloat16, nv_bfloat16, float, true>(a, b, c); }
__global__ void signed_16_16(const signed char* a, const signed char* b, int* c) { product<16, 16, 16, signed char, signed char, int, false>(a, b, c); }
__global__ void unsigned_32_8(const unsigned char* a, const unsigned char* b, int* c) { product<32, 8, 16, unsigned char, unsigned char, int, true>(a, b, c); }
__global__ void tf32_16_16(const float* a, const float* b, float* c) { product<16, 16, 8, wmma::precision::tf32, float, float, false>(a, b, c); }
__global__ void double_8_8(const double* a, const double* b, double* c) { product<8, 8, 4, double, double, double, true>(a, b, c); }
