// Packs the mask of an array, once for all batches and heads. It reads what mask_array.cuh describes, and writes what
// packed_mask.cuh describes.
//
// A block owns a row tile. The tile is that of the kernel behind this one. The block's warps take PACKERS key tiles at a time, one
// each. They leave what they found in SRAM. Then the first warp appends the visible ones to the list. What a causal mask or a
// window hides is neither read nor listed. With a mask of blocks, each warp reads the whole list of its row of blocks for each
// tile. The list is short, and may be in any order. Rows of booleans are padded to 16 bytes, and read in chunks of 16 bytes. A warp
// has AT_ONCE fragments on their way. Bits, and the booleans of a sequence, begin anywhere. These are read row by row, each byte
// once.
//
// Expected: it reads each byte of the mask once. Beside attention over many heads it takes no time.
#include "mask.cuh"
#include "mask_array.cuh"
#include "packed_mask.cuh"

constexpr int PACKERS = 16, THREADS = PACKERS * 32;
constexpr int AT_ONCE = MASK_WORDS == 1 ? (FL_DTYPE == 0 ? 2 : 4) : MASK_WORDS == 2 ? 2 : 1;  // fragments a lane loads together
constexpr int RESIDENT = RAGGED || BEFORE_HOPPER ? 1 : 2;  // blocks of an SM: as many as leave registers for that
constexpr bool BITS = MASK == 2, BLOCKS = MASK == 3, BY_ROW = BITS || RAGGED;
constexpr int EIGHTS = (BC + 255) / 256;                            // row by row, of a lane for a row: 8 keys in each 256 columns
constexpr int LOADS = BITS ? (BC / 8 + 1 + 31) / 32 : 8 * EIGHTS;   // and bytes that it loads for them
constexpr int TOGETHER = BITS ? 2 : 1;                              // rows that are on their way together
static_assert(BR % 16 == 0 && BC % 16 == 0, "tiles are made of whole fragments");
static_assert(BLOCK_ROWS % BR == 0 && BLOCK_COLS % BC == 0, "a tile lies in one block");

// A bit for each of 16 bytes: is it other than 0?
DEVICE unsigned bits_of(uint4 chunk) {
  const unsigned words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned tops = ((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f | words[i]) & 0x80808080;  // a byte's top bit, if it isn't 0
    found |= (tops >> 7) * 0x01020408 >> 24 << 4 * i;  // the product gathers the four bits at its top
  }
  return found;
}

// The keys that a causal mask and a window leave to `row`, among the N keys from `key` on.
template <int N>
DEVICE unsigned left_to(const Shape& shape, int row, int key) {
  const Keys keys = visible_keys(shape, row);
  const int first = min(max(keys.first - key, 0), N), end = min(max(keys.last + 1 - key, 0), N);
  return (1u << end) - 1 & ~((1u << first) - 1);
}

// A quad has 64 keys of two rows, 16 keys a lane: the upper row's in the low half of `own`, the lower row's in the high half.
// Returns those that this lane holds as accumulators.
DEVICE unsigned as_accumulators(unsigned own) {
  const int t = lane_id() % 4;
  unsigned word = 0;
#pragma unroll
  for (int source = 0; source < 4; ++source) {
    const unsigned columns = shuffle(own, lane_id() - t + source) >> 2 * t;  // 2t, 2t + 1, and those 8 on, of both rows
    word |= (columns & 0x00030003 | columns >> 6 & 0x000c000c) << 4 * source;
  }
  return word;
}

// The list's entry for key tile j, or -1 if no pair of it is visible. Of the pairs that a lane has seen, `some` or `every` one is
// visible.
DEVICE Visit visit_of(int j, bool some, bool every) { return {any_lane(some) ? 2 * j + any_lane(!every) : -1}; }

// A warp packs tile j. It takes booleans in padded rows, or a block that is `listed` or not.
DEVICE Visit pack_chunks(const Tensor& mask, bool listed, const Shape& shape, int row_tile, int j, unsigned* bits) {
  const int first_row = row_tile * BR, mask_bytes = round_up(shape.len_kv, CHUNK_BYTES);  // of a row
  bool some = false, every = true;
#pragma unroll 1
  for (int first = 0; first < MASK_FRAGMENTS; first += AT_ONCE) {
    // Chunk (i, w, half): its row, its key, and whether it lies in the tile and in the mask.
    auto row = [&](int i, int half) { return first_row + 16 * (first + i) + 8 * half + lane_id() / 4; };
    auto column = [&](int w) { return 64 * w + 16 * (lane_id() % 4); };
    auto inside = [&](int i, int w, int half) {
      return first + i < MASK_FRAGMENTS && row(i, half) < shape.len_q && column(w) < BC && j * BC + column(w) < mask_bytes;
    };

    // step: load_mask
    uint4 chunks[AT_ONCE][MASK_WORDS][2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int w = 0; w < MASK_WORDS; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          lanes_meet();
          chunks[i][w][half] = make_uint4(0, 0, 0, 0);
          if (!BLOCKS && inside(i, w, half))
            chunks[i][w][half] = load_global<uint4>(row_address(mask, 0, 0, row(i, half)) + j * BC + column(w));
        }

#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int w = 0; w < MASK_WORDS; ++w) {
        // step: pack
        unsigned own = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool asked = first + i < MASK_FRAGMENTS && row(i, half) < shape.len_q && column(w) < BC;
          const unsigned shown = BLOCKS ? (asked && listed ? 0xffff : 0) : bits_of(chunks[i][w][half]);
          const unsigned found = shown & left_to<16>(shape, row(i, half), j * BC + column(w));
          some |= found != 0;
          every &= !asked || found == 0xffff;
          own |= found << 16 * half;
        }
        own = as_accumulators(own);

        // step: store_bits
        if (first + i < MASK_FRAGMENTS)
          store_global(bits + words_of(shape, row_tile, j, first + i) + 32 * w, own);
      }
  }
  return visit_of(j, some, every);
}

// A lane loaded bytes of a row. This takes the 8 keys from key 256 e + 8 · lane on. Bits begin `before` bits into the first byte.
DEVICE unsigned eight_of(const unsigned (&loaded)[LOADS], int e, int before) {
  if constexpr (BITS) {
    const unsigned after = e + 1 < LOADS ? loaded[min(e + 1, LOADS - 1)] : 0;  // lane 31's byte behind it is lane 0's
    const unsigned next = shuffle(lane_id() == 0 ? after : loaded[e], (lane_id() + 1) % 32);
    return (loaded[e] | next << 8) >> before & 0xff;
  }
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) found |= static_cast<unsigned>(loaded[(8 * e + i) % LOADS] != 0) << i;
  return found;
}

// A warp packs tile j row by row.
DEVICE Visit pack_rows(const Tensor& mask, long long begin, const SequenceRows& own, const Shape& shape, int j, unsigned* bits) {
  const int keys = min(BC, shape.len_kv - j * BC), t = lane_id() % 4, g = lane_id() / 4;
  bool some = false, every = true;
#pragma unroll 1
  for (int fragment = 0; fragment < MASK_FRAGMENTS; ++fragment) {
    unsigned four[EIGHTS][4] = {};  // of each 4 rows a byte of 8 keys
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter)
#pragma unroll 1
      for (int up = 0; up < 4; up += TOGETHER) {
        // step: load_mask (row by row)
        const int first_row = own.first_row + 16 * fragment + 4 * quarter + up;
        unsigned loaded[TOGETHER][LOADS];
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r) {
          const MaskRow from(mask, begin, own, first_row + r, j * BC);
          const int bytes = first_row + r >= shape.len_q ? 0 : BITS ? (from.before + keys + 7) / 8 : keys;
#pragma unroll
          for (int i = 0; i < LOADS; ++i) {
            const int at = BITS ? 32 * i + lane_id() : i / 8 * 256 + 8 * lane_id() + i % 8;
            lanes_meet();
            loaded[r][i] = 0;
            if (at < bytes) loaded[r][i] = load_global<unsigned char>(from.from + at);
          }
        }

        // step: pack (row by row)
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
          for (int e = 0; e < EIGHTS; ++e) {
            const int row = first_row + r, column = 256 * e + 8 * lane_id();
            const MaskRow from(mask, begin, own, row, j * BC);
            unsigned eight = eight_of(loaded[r], e, from.before) & left_to<8>(shape, row, j * BC + column);
            if (column >= BC) eight = 0;
            some |= eight != 0;
            every &= row >= shape.len_q || column >= BC || eight == 0xff;
            four[e][quarter] |= eight << 8 * (up + r);
          }
      }
#pragma unroll
    for (int w = 0; w < MASK_WORDS; ++w) {
      unsigned word = 0;  // as as_accumulators has it
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        unsigned of[4];
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) of[quarter] = shuffle(four[w / 4][quarter], 8 * (w % 4) + n);
        const unsigned upper = g < 4 ? of[0] : of[1], lower = g < 4 ? of[2] : of[3];
        const int at = 8 * (g % 4) + 2 * t;
        word |= (upper >> at & 3) << 2 * n | (lower >> at & 3) << 16 + 2 * n;
      }

      // step: store_bits (row by row)
      store_global(bits + words_of(shape, own.place, j, fragment) + 32 * w, word);
    }
  }
  return visit_of(j, some, every);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
pack_mask(const MaskArray mask, const BlockLists block_mask, unsigned* bits, int* tiles, const int* offsets_q,
          const int* offsets_kv, const long long* offsets_mask, const Shape batches) {
  // step: load_mask (which rows)
  const int row_tile = blockIdx.x;
  const SequenceRows own = row_tile_at(batches, {offsets_q, offsets_kv}, row_tile);
  const Shape shape = own.alone(batches);
  if (RAGGED && own.first_row >= shape.len_q) return;  // an empty place
  int* list = tiles + list_of(shape, row_tile);
  const Keys around = visible_tiles(shape, own.first_row, min(own.first_row + BR, shape.len_q) - 1, BC);
  if (around.last < around.first) {
    // step: store_list (no row sees a key)
    if (threadIdx.x == 0) store_global(list, 0);
    return;
  }
  // step: load_mask (where it begins)
  const long long begin = BITS && RAGGED ? load_global<long long>(offsets_mask + own.sequence) : 0;
  const BlockList blocks(as_tensor(block_mask), shape, row_tile * BR / BLOCK_ROWS);
  const unsigned kinds = sram_base();
  name_sram("kinds", kinds, 4 * PACKERS);
  int listed = 0;
  for (int together = around.first / PACKERS * PACKERS; together <= around.last; together += PACKERS) {
    const int j = together + warp_id();
    Visit visit{-1};
    if (j >= around.first && j <= around.last) {
      // step: load_mask (is its block listed?)
      const bool listed = BLOCKS && blocks.has(j * BC / BLOCK_COLS);
      if constexpr (BY_ROW)
        visit = pack_rows(as_tensor(mask), begin, own, shape, j, bits);
      else
        visit = pack_chunks(as_tensor(mask), listed, shape, row_tile, j, bits);
    }

    // step: list
    if (lane_id() == 0) store_shared(kinds + 4 * warp_id(), visit.entry);
    barrier();
    if (warp_id() == 0) {
      const int entry = lane_id() < PACKERS ? load_shared<int>(kinds + 4 * lane_id()) : -1;
      const unsigned seen = ballot(entry >= 0);

      // step: store_list
      if (entry >= 0) store_global(list + 1 + listed + count_below(seen), entry);
      listed += count_bits(seen);
    }
    barrier();  // `kinds` may be written again
  }

  // step: store_list (its length)
  if (threadIdx.x == 0) store_global(list, listed);
}
