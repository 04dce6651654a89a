// y = xᵀ: x (rows, cols), y (cols, rows). A block of 32 × 8 threads moves a tile of 32 × 32; blockIdx.x counts tiles along x's
// columns, blockIdx.y along its rows.
__global__ void transpose(const float* x, float* y, int rows, int cols) {
  __shared__ float tile[32][33];  // solution
  const int tx = threadIdx.x, ty = threadIdx.y;
  // a warp has one ty, and tx from 0 to 31
  for (int i = ty; i < 32; i += 8) {  // solution
    const int row = 32 * blockIdx.y + i, col = 32 * blockIdx.x + tx;  // solution
    if (row < rows && col < cols) tile[i][tx] = x[row * cols + col];  // solution
  }  // solution
  __syncthreads();  // solution
  for (int i = ty; i < 32; i += 8) {  // solution
    const int row = 32 * blockIdx.x + i, col = 32 * blockIdx.y + tx;  // solution
    if (row < cols && col < rows) y[row * rows + col] = tile[tx][i];  // solution
  }  // solution
}
