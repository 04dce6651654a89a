// Tensor cores by CUDA's own interface: a warp for each 16 x 16 tile of c = scale · a · b + c.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

template <class, class>
struct Same {
  static constexpr bool YES = false;
};
template <class T>
struct Same<T, T> {
  static constexpr bool YES = true;
};

template <class Value, class Sum, class LayoutB>
__global__ void tensor(const Value* a, const Value* b, Sum* c, int n, int k, float scale) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, Value, wmma::row_major> rows;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, Value, LayoutB> columns;
  wmma::fragment<wmma::accumulator, 16, 16, 16, Sum> sum, before;
  const int row = 16 * blockIdx.y, column = 16 * (blockIdx.x * blockDim.y + threadIdx.y);
  constexpr bool BY_ROWS = Same<LayoutB, wmma::row_major>::YES;
  wmma::fill_fragment(sum, 0.f);
  for (int i = 0; i < k; i += 16) {
    wmma::load_matrix_sync(rows, a + row * k + i, k);
    wmma::load_matrix_sync(columns, BY_ROWS ? b + i * n + column : b + column * k + i, BY_ROWS ? n : k);
    wmma::mma_sync(sum, rows, columns, sum);
  }
  wmma::load_matrix_sync(before, c + row * n + column, n, wmma::mem_row_major);
  for (int i = 0; i < sum.num_elements; ++i)
    sum.x[i] = static_cast<Sum>(scale * static_cast<float>(sum.x[i]) + static_cast<float>(before.x[i]));
  wmma::store_matrix_sync(c + row * n + column, sum, n, wmma::mem_row_major);
}
