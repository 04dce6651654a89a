// y (n x n) = transpose of x (n x n), n a multiple of 32: a block of 32 x 8 threads moves a tile of 32 x 32 through SRAM.
extern "C" __global__ void transpose(const float* x, float* y, int n) {
  __shared__ float tile[32][33];  // a column more, so that a column's elements lie in 32 banks
  const int across = blockIdx.x * 32, down = blockIdx.y * 32;

  // step: load
  for (int row = threadIdx.y; row < 32; row += 8)
    tile[row][threadIdx.x] = x[(down + row) * n + across + threadIdx.x];
  __syncthreads();

  // step: store
  for (int row = threadIdx.y; row < 32; row += 8)
    y[(across + row) * n + down + threadIdx.x] = tile[threadIdx.x][row];
}
