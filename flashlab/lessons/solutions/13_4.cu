// The keys of all requests out of their pages, one behind the other, in float32. A block is a warp: it has 32 keys of a request.
//   pool (pages, page_size, 32)   table (requests, table_pages)   firsts (requests + 1)   out (keys of all requests, 32)
//   Request b has the rows firsts[b] to firsts[b + 1] - 1 of out. blockIdx.x: tile of its keys, .y: request
constexpr int TILE = 32, D = 32;

__global__ void gather(const float* pool, const int* table, const int* firsts, float* out, int page_size, int table_pages) {
  const int lane = threadIdx.x, request = blockIdx.y;
  // step: length
  const int begin = firsts[request], keys = firsts[request + 1] - begin;
  // step: look_up
  // each lane for one key of the tile: in which row of the pool does it lie?
  const int key = blockIdx.x * TILE + lane;
  const int page = key < keys ? table[request * table_pages + key / page_size] : 0;  // solution
  const int row = page * page_size + key % page_size;  // solution
  // step: copy
  // all lanes copy one row, then the next: what does __shfl_sync(0xffffffff, row, n) tell them?
  for (int n = 0; n < TILE && blockIdx.x * TILE + n < keys; ++n) {
    const int from = __shfl_sync(0xffffffff, row, n);  // solution
    const float x = pool[from * D + lane];  // solution
    out[(begin + blockIdx.x * TILE + n) * D + lane] = x;  // solution
  }
}
