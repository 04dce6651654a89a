// FlashAttention-3 with operands in FP8 (e4m3), forward: section 3.3 of Shah et al. 2024 (arXiv 2407.08608).
//
//   q (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    e4m3
//   q_scale (batch, heads, row tiles)    k_scale, v_scale (batch, kv_heads, key tiles)    float32
//   v_t (batch, kv_heads, head_dim, len_kv padded to 16)    e4m3, the workspace between the two launches
//   out (batch, heads, len_q, head_dim) bfloat16    lse (batch, heads, len_q) float32
//
// The tensor cores do twice as much per clock with operands of 8 bits, but take them along the summed dimension only. So a
// launch of its own transposes V first (FlashAttention-3 does that in its producer). It puts V's keys in the order in which
// P's accumulators already lie as an operand, so no lane hands anything to another. P is scaled by 2^5 and may grow by 2^3.8
// before a rescale, because e4m3 ends at 448 and at 2^-9. Each tile has its own scale. Those of Q and K go into the factor of
// the exponent.
//
// With 8-bit products the tensor cores keep some 14 bits of an accumulator and cut each product to the last of them. Where V
// keeps its sign, a sum over many tiles loses a part of each. So P V_j goes into its own registers, T, and is folded into O in
// float32 by an FMA with V_j's scale (promotion). The sums of P are a product as well, with 8 columns of ones, because each
// addition in float32 takes a clock from the tensor cores. O is then divided by the sum of the rounded P: the weights in `out`
// and their sum are rounded alike. EXACT_LSE adds up P before it is rounded, too, for the LSE alone.
//
// Up to D = 128, T has room beside S (overlapped): P V of a tile runs beside the maximum of the next, and is folded beside its
// exponentials. O and l are rescaled a tile later, beside the products. The wait for T may stand in no branch that warps of
// a warpgroup take apart. At D = 256, T takes the place of S (in_turn): T has two chunks of 64 head dims, and one is folded
// while the other is multiplied. Otherwise one thing comes after the other there.
#define E4M3 1
#include "flash3.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr bool OVERLAPPED = HEAD_DIM <= 128;  // there is room for T beside S

// Writes V transposed ("turned"): (batch, kv_heads, head_dim, len_kv padded to 16 by zeros), with its keys in round_p's order.
extern "C" __global__ void __launch_bounds__(WARPGROUP)
flash3_fp8_transpose(const Tensor v, const Tensor v_t, const Shape shape) {
  const int tiles = ceil_div(shape.len_kv, TURNED_KEYS), flat_head = blockIdx.x / tiles;
  const int batch = flat_head / shape.kv_heads, head = flat_head % shape.kv_heads;
  const int first_key = blockIdx.x % tiles * TURNED_KEYS, columns = round_up(shape.head_dim, 16);
  const unsigned turned = sram_base();
  name_sram("turned", turned, TURNED_KEYS * columns);

  for (int i = threadIdx.x; i < TURNED_KEYS * columns / CHUNK_BYTES; i += WARPGROUP) {
    // step: fetch_v
    lanes_meet();
    const int key = i / (columns / CHUNK_BYTES), byte = i % (columns / CHUNK_BYTES) * CHUNK_BYTES;
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (first_key + key < shape.len_kv) chunk = load_global<uint4>(row_address(v, batch, head, first_key + key) + byte);

    // step: transpose (in)
    store_shared(turned + key * columns + byte, chunk);
  }
  barrier();

  // A thread takes 16 keys of 4 columns. Its neighbour takes the next 16 keys, so that both fill a sector of 32 bytes.
  for (int i = threadIdx.x; i < TURNED_KEYS / 16 * columns / 4; i += WARPGROUP) {
    lanes_meet();
    const int word_column = i / 2 % (columns / 4), key = 16 * (i / 2 / (columns / 4) * 2 + i % 2), column = 4 * word_column;

    // step: transpose
    unsigned word[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) word[k] = load_shared<unsigned>(turned + (key + k) * columns + column);

    // step: store_v
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      auto byte = [&](int k) { return word[k] >> 8 * c & 0xff; };
      auto four = [&](int quad) {  // places 4 quad .. 4 quad + 3 are keys k, k + 1, and those 8 on
        const int k = 2 * quad;
        return byte(k) | byte(k + 1) << 8 | byte(k + 8) << 16 | byte(k + 9) << 24;
      };
      if (column + c < shape.head_dim && first_key + key < shape.len_kv)
        store_global(row_address(v_t, batch, head, column + c) + first_key + key,
                     make_uint4(four(0), four(1), four(2), four(3)));
    }
  }
}

// Writes the ones behind each slot of V. Nothing overwrites them.
DEVICE void write_ones(const Sram& sram) {
  constexpr int CHUNKS = ONES_BYTES / CHUNK_BYTES;
  constexpr unsigned FOUR = 0x38383838;
  for (int i = threadIdx.x; i < STAGES * CHUNKS; i += THREADS)
    store_shared(sram.v(i / CHUNKS).base + VTile::BYTES + i % CHUNKS * CHUNK_BYTES, make_uint4(FOUR, FOUR, FOUR, FOUR));
  fence_async();
}

// The scales of all tiles. `row_tile` is the number of this tile's own, `first_key_tile` that of its head's first ones of K and V.
struct Scales {
  const float* q;
  const float* k;
  const float* v;
  int row_tile, first_key_tile;

  DEVICE float of_q() const { return load_global<float>(q + row_tile); }
  DEVICE float of_k(int j) const { return load_global<float>(k + first_key_tile + j); }
  DEVICE float of_v(int j) const { return load_global<float>(v + first_key_tile + j); }
};

// A consumer's part of a row tile. Its main loops change the arguments. (It is a template, so that of the two only the one that is
// called gets compiled.)
template <int D>
struct RowTile {
  const Sram& sram;
  const Shape& shape;
  const Work& work;
  Scales scales;
  Keys full;  // key tiles that need no mask, nor a change of sign
  int consumer, lane_row;
  unsigned q_parity;
  float scale;  // of the exponents, in each tile multiplied by those of Q and K

  // The main loop where T has room beside S: P V of a tile runs beside the maximum of the next.
  DEVICE void overlapped(RoundedSoftmax& softmax, float (&o)[O_FRAGMENTS][4], Ring& k_ring, Ring& v_ring) const {
    // step: load_q
    const float c = scale * scales.of_q();
    mbarrier_wait(sram.q_full(), q_parity);

    float s[S_FRAGMENTS][4], alpha[2];
    unsigned p[P_REGISTERS][4];
    if (work.tiles.first > work.tiles.last) {
      release(sram.q_empty());
    } else {
      float t[O_FRAGMENTS + 1][4];

      // step: load_k (first)
      mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

      // step: scores (first)
      multiply_qk_alone(s, sram.q(), consumer * 64, sram.k(k_ring.slot));
      release(sram.k_empty(k_ring.slot));
      k_ring.advance();
      if (work.tiles.first == work.tiles.last) release(sram.q_empty());

      // step: load_k (its scale, first)
      softmax.c = c * scales.of_k(work.tiles.last);

      // step: load_v (its scale, first)
      float factor_v = scales.of_v(work.tiles.last);

      // step: mask (first)
      softmax.mask(s, shape, lane_row, work.tiles.last, full);

      // step: softmax (first)
      softmax.raise(s, alpha);
      softmax.exponentials(s);
      round_p(p, s);

      bool risen = false;
      for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) {
        // step: load_k
        mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

        // step: scores
        settle(s);
        settle(t);
        settle(p);
        wgmma_fence();
        multiply_qk(s, sram.q(), consumer * 64, sram.k(k_ring.slot));

        // step: load_v (of the tile before)
        mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

        // step: output (of the tile before, in the background)
        wgmma_fence();
        multiply_pv(t, p, sram.v(v_ring.slot), 0);

        // step: load_k (its scale, meanwhile)
        const float factor_k = scales.of_k(j);

        // step: load_v (its scale)
        const float next_v = scales.of_v(j);

        // step: rescale (by the maximum of the tile before, while the products run)
        if (risen) {
          rescale(o, alpha);
          softmax.rescale(alpha);
        }

        // step: scores (done)
        wgmma_wait<1>();
        settle(s);
        release(sram.k_empty(k_ring.slot));
        k_ring.advance();
        if (j == work.tiles.first) release(sram.q_empty());

        // step: mask
        softmax.c = c * factor_k;
        if (j < full.first || j > full.last) softmax.mask(s, shape, lane_row, j, full);

        // step: softmax
        risen = any_lane(softmax.risen(s));
        if (risen) softmax.raise(s, alpha);

        // step: output (of the tile before: done, and folded, as it is by the m before)
        wgmma_wait<0>();
        settle(t);
        release(sram.v_empty(v_ring.slot));
        v_ring.advance();
        softmax.add(t[O_FRAGMENTS]);
        fold(o, 0, t, O_FRAGMENTS, factor_v);
        factor_v = next_v;

        // step: softmax (P)
        softmax.exponentials(s);
        round_p(p, s);
      }

      // step: rescale
      if (risen) {
        rescale(o, alpha);
        softmax.rescale(alpha);
      }

      // step: load_v
      mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

      // step: output
      settle(p);
      settle(t);
      wgmma_fence();
      multiply_pv(t, p, sram.v(v_ring.slot), 0);
      wgmma_wait<0>();
      settle(t);
      release(sram.v_empty(v_ring.slot));
      v_ring.advance();
      softmax.add(t[O_FRAGMENTS]);
      fold(o, 0, t, O_FRAGMENTS, factor_v);
    }
  }

  // The main loop where T takes the place of S: one thing after the other, but two chunks of T take turns, and one is folded
  // while the other is multiplied.
  DEVICE void in_turn(RoundedSoftmax& softmax, float (&o)[O_FRAGMENTS][4], Ring& k_ring, Ring& v_ring) const {
    constexpr int CHUNK = 64, CHUNKS = D / CHUNK;

    // step: load_q (in turn)
    const float c = scale * scales.of_q();
    mbarrier_wait(sram.q_full(), q_parity);

    if (work.tiles.first > work.tiles.last) release(sram.q_empty());
    float s[S_FRAGMENTS][4], alpha[2];
    unsigned p[P_REGISTERS][4];
    for (int j = work.tiles.last; j >= work.tiles.first; --j) {
      float t[2][CHUNK / 8][4], sums[1][4];

      // step: load_k (in turn)
      mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

      // step: scores (in turn)
      settle(s);
      wgmma_fence();
      multiply_qk(s, sram.q(), consumer * 64, sram.k(k_ring.slot));

      // step: load_k (in turn: its scale, meanwhile)
      const float factor_k = scales.of_k(j);

      // step: load_v (in turn: its scale)
      const float factor_v = scales.of_v(j);

      // step: scores (in turn: done)
      wgmma_wait<0>();
      settle(s);
      release(sram.k_empty(k_ring.slot));
      k_ring.advance();
      if (j == work.tiles.first) release(sram.q_empty());

      // step: mask (in turn)
      softmax.c = c * factor_k;
      if (j < full.first || j > full.last) softmax.mask(s, shape, lane_row, j, full);

      // step: softmax (in turn)
      if (any_lane(softmax.risen(s))) {
        softmax.raise(s, alpha);

        // step: rescale (in turn)
        rescale(o, alpha);
        softmax.rescale(alpha);
      }

      // step: softmax (in turn: P)
      softmax.exponentials(s);
      round_p(p, s);

      // step: load_v (in turn)
      const VTile v_tile = sram.v(v_ring.slot);
      mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);

      // step: output (in turn)
      settle(p);
      settle(sums);
      settle(t[0]);
      settle(t[1]);
      wgmma_fence();
      multiply_pv(sums, p, v_tile, D);
      multiply_pv(t[0], p, v_tile, 0);
      multiply_pv(t[1], p, v_tile, CHUNK);
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        i + 1 < CHUNKS ? wgmma_wait<1>() : wgmma_wait<0>();
        settle(t[i % 2]);
        if (i + 1 == CHUNKS) release(sram.v_empty(v_ring.slot));
        fold(o, i * CHUNK / 8, t[i % 2], CHUNK / 8, factor_v);
        if (i + 2 < CHUNKS) {
          settle(t[i % 2]);
          wgmma_fence();
          multiply_pv(t[i % 2], p, v_tile, (i + 2) * CHUNK);
        }
      }
      settle(sums);
      softmax.add(sums[0]);
      v_ring.advance();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_fp8(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
           const float* q_scale, const float* k_scale, const float* v_scale, const Tensor out, float* lse, unsigned* drawn,
           const Shape shape) {
  const Sram sram;
  write_ones(sram);
  open(sram);
  if (warpgroup_id() == 0) {
    become_producer();
    if (threadIdx.x == 0) {
      Agenda agenda{shape};
      Work work;
      Ring k_ring, v_ring;
      unsigned q_parity = 0;
      while (agenda.next(work)) {
        const int kv = kv_head(shape, work.head);
        auto load_k = [&](int j) {
          mbarrier_wait(sram.k_empty(k_ring.slot), k_ring.parity ^ 1);
          load_tile(sram.k(k_ring.slot), k, work.batch, kv, j * BC, sram.k_full(k_ring.slot), EVICT_LAST);
          k_ring.advance();
        };

        // step: load_k (producer: the first, into a slot that is free before Q's)
        if (work.tiles.first <= work.tiles.last) load_k(work.tiles.last);

        // step: load_q (producer)
        mbarrier_wait(sram.q_empty(), q_parity ^ 1);
        if (DYNAMIC && agenda.number >= gridDim.x) store_shared(sram.number(), agenda.number);
        load_tile(sram.q(), q, work.batch, work.head, work.first_row, sram.q_full(), EVICT_FIRST);
        q_parity ^= 1;

        // step: load_q (producer: draws the next rows, with no time to spare)
        if (DYNAMIC && work.tiles.first >= work.tiles.last) agenda.draw(drawn);

        for (int j = work.tiles.last; j >= work.tiles.first; --j) {
          // step: load_k (producer: the next)
          if (j > work.tiles.first) load_k(j - 1);

          // step: load_q (producer: draws the next rows, a key tile ahead)
          if (DYNAMIC && j == work.tiles.first + 1) agenda.draw(drawn);

          // step: load_v (producer)
          mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);
          load_tile(sram.v(v_ring.slot), v, work.batch, kv, 0, sram.v_full(v_ring.slot), EVICT_LAST, j * BC);
          v_ring.advance();
        }

        // step: load_q (producer: which rows are next)
        if constexpr (DYNAMIC) agenda.take();
      }

      // step: load_q (producer: no rows are left)
      if constexpr (DYNAMIC) {
        mbarrier_wait(sram.q_empty(), q_parity ^ 1);
        store_shared(sram.number(), agenda.number);
        mbarrier_arrive(sram.q_full());
      }
    }
    return;
  }

  become_consumer();
  Agenda agenda{shape};
  Work work;
  const int consumer = warpgroup_id() - 1;
  RoundedSoftmax softmax(shape);
  const float scale = softmax.c;
  unsigned q_parity = 0;
  Ring k_ring, v_ring;
  while (agenda.next(work)) {
    const int last_row = min(work.first_row + BR, shape.len_q) - 1;
    const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;
    Keys full = full_tiles(shape, work.first_row, last_row, BC);
    if (softmax.sign != 1) full = {work.tiles.last + 1, -1};
    float o[O_FRAGMENTS][4] = {};
    softmax.begin();
    const int kv = work.batch * shape.kv_heads + kv_head(shape, work.head), key_tiles = ceil_div(shape.len_kv, BC);
    const int tile = (work.batch * shape.heads + work.head) * ceil_div(shape.len_q, BR) + work.first_row / BR;
    const Scales scales{q_scale, k_scale, v_scale, tile, kv * key_tiles};
    const RowTile<HEAD_DIM> rows{sram, shape, work, scales, full, consumer, lane_row, q_parity, scale};
    if constexpr (OVERLAPPED) rows.overlapped(softmax, o, k_ring, v_ring);
    else rows.in_turn(softmax, o, k_ring, v_ring);
    q_parity ^= 1;

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;

      // step: normalize
      const float sum = softmax.rounded[half], factor = sum > 0 ? reciprocal(sum) : 0;  // a row without keys gets 0

      // step: store_o
      store_o(out, shape, work, row, o, half, factor);

      // step: store_lse
      store_lse(lse, shape, work, row, softmax.m[half], softmax.of_lse(half));
    }

    // step: load_q (which rows the producer has drawn)
    if constexpr (DYNAMIC) agenda.number = told(sram, q_parity);
  }
}
