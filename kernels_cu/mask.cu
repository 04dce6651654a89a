// Packs a mask that an array says, once for all batches and heads: see packed_mask.cuh for what it writes.
//
//   mask (len_q, len_kv) bytes, of which any but 0 shows a pair    rows padded to 16 bytes
//
// One thread block owns a row tile of the kernel behind it, whose tile is this one's, too. Its warps take PACKERS key tiles at a
// time, one each, and leave in SRAM what they found. Then the first warp appends those that it sees to the list. What causal
// mask and window hide is neither read nor listed.
//
// Expected: it reads each byte of the mask once, in chunks of 16, with AT_ONCE fragments on their way in each warp; next to an
// attention over many heads it takes no time.
#include "mask.cuh"
#include "packed_mask.cuh"

constexpr int PACKERS = 16, THREADS = PACKERS * 32;
constexpr int AT_ONCE = MASK_WORDS == 1 ? 4 : MASK_WORDS == 2 ? 2 : 1;  // fragments whose chunks a lane loads together
static_assert(BR % 16 == 0 && BC % 16 == 0, "tiles are made of whole fragments");

// Of 16 bytes which aren't 0, a bit each.
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

// Of 16 keys from `key` on those that causal mask and window leave to `row`.
DEVICE unsigned left_to(const Shape& shape, int row, int key) {
  const Keys keys = visible_keys(shape, row);
  const int first = min(max(keys.first - key, 0), 16), end = min(max(keys.last + 1 - key, 0), 16);
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

extern "C" __global__ void __launch_bounds__(THREADS)
pack_mask(const Tensor mask, unsigned* bits, int* tiles, const Shape shape) {
  const int row_tile = blockIdx.x, first_row = row_tile * BR;
  const Keys around = visible_tiles(shape, first_row, min(first_row + BR, shape.len_q) - 1, BC);
  const int mask_bytes = round_up(shape.len_kv, CHUNK_BYTES);  // of a row
  const unsigned kinds = sram_base();
  name_sram("kinds", kinds, 4 * PACKERS);
  int* list = tiles + list_of(shape, row_tile);
  int listed = 0;
  for (int together = around.first / PACKERS * PACKERS; together <= around.last; together += PACKERS) {
    const int j = together + warp_id();
    Visit visit{-1};
    if (j >= around.first && j <= around.last) {
      bool some = false, every = true;
#pragma unroll 1
      for (int first = 0; first < MASK_FRAGMENTS; first += AT_ONCE) {
        // Of chunk (i, w, half): its row, its key, and whether it lies in the tile and in the mask.
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
              if (inside(i, w, half))
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
              const unsigned found = bits_of(chunks[i][w][half]) & left_to(shape, row(i, half), j * BC + column(w));
              const bool asked = first + i < MASK_FRAGMENTS && row(i, half) < shape.len_q && column(w) < BC;
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
      if (any_lane(some)) visit.entry = 2 * j + any_lane(!every);
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
