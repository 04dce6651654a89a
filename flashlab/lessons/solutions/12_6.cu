// Deals sequences of any lengths to 132 SMs, in tiles of 64 keys: one after another, an equal share for each SM.
//   lengths (n), n up to 256     sequence, tile (132): where the share of each SM begins    One block, a thread for each sequence
constexpr int SMS = 132, TILE = 64, MOST = 256;

__global__ void deal(const int* lengths, int* sequence, int* tile, int n) {
  __shared__ int ends[MOST];  // ends[i]: how many tiles the sequences 0 to i have together
  const int t = threadIdx.x;
  // step: count
  // the tiles of my own sequence; a thread without one has none
  ends[t] = t < n ? (lengths[t] + TILE - 1) / TILE : 0;  // solution
  __syncthreads();
  // step: prefix_sum
  for (int step = 1; step < MOST; step *= 2) {
    // add what lies `step` places before, which all threads have to read before any writes
    const int more = t >= step ? ends[t - step] : 0;  // solution
    __syncthreads();  // solution
    ends[t] += more;  // solution
    __syncthreads();  // solution
  }
  if (t >= SMS) return;
  // step: deal
  // of all tiles in a row, SM t begins with number t * total / SMS, rounded down
  const int first = t * ends[MOST - 1] / SMS;  // solution
  int i = 0;
  while (ends[i] <= first) ++i;  // solution
  sequence[t] = i;  // solution
  tile[t] = first - (i > 0 ? ends[i - 1] : 0);  // solution
}
