// y[c][r] = x[r][c]: rows become columns, in chunks of 16 bytes. x (rows, 8) chunks, rows at most 64; one block of 128 threads.
constexpr int ROWS = 64, CHUNKS = 8;

// Where chunk `chunk` of row `row` lies in the tile, counted in chunks: 0 to 511, each once.
__device__ int place(int row, int chunk) {
  int p = row * CHUNKS + chunk;
  // the eight chunks of a row change places, by a rule that depends on the row
  p = row * CHUNKS + (chunk ^ row % 8);  // solution
  return p;
}

__global__ void swizzle(const float4* x, float4* y, int rows) {
  __shared__ float4 tile[ROWS * CHUNKS];
  for (int i = threadIdx.x; i < rows * CHUNKS; i += 128) tile[place(i / CHUNKS, i % CHUNKS)] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += 128) {
    const int chunk = i / ROWS, row = i % ROWS;  // neighbouring lanes: the same chunk of neighbouring rows, as ldmatrix
    if (row < rows) y[chunk * rows + row] = tile[place(row, chunk)];
  }
}
