// Dropout of the weights p: a block has a tile of blockDim.y rows and blockDim.x columns, a thread has one weight.
//   p, z (heads, rows, cols)   rows are queries and columns are keys; with `flipped` it is the other way round
//   blockIdx.x: tile of columns, .y: tile of rows, .z: head
__device__ float uniform(unsigned seed, unsigned place) {  // from 0 to 1: nothing is missing here
  unsigned x = place * 0x9e3779b9u + seed;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return ((x ^ x >> 16) >> 8) * 0x1p-24f;
}

__global__ void drop(const float* p, float* z, int rows, int cols, int flipped, int seed, float keep) {
  const int head = blockIdx.z;
  // step: place
  // row and column in the whole matrix; a tile may reach past its end
  const int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;  // solution
  if (row >= rows || col >= cols) return;  // solution
  // query, key, and how many there are; then the place
  const int query = flipped ? col : row, key = flipped ? row : col;  // solution
  const int len_q = flipped ? cols : rows, len_kv = flipped ? rows : cols;  // solution
  const int place = (head * len_q + query) * len_kv + key;  // solution
  // step: drop
  // each weight is loaded, kept or not: then all lanes of a warp do the same
  const int i = (head * rows + row) * cols + col;  // solution
  const float weight = p[i];  // solution
  z[i] = uniform(seed, place) < keep ? weight / keep : 0;  // solution
}
