// FlashAttention-3 with operands in FP8 (e4m3), forward: section 3.3 of Shah et al. 2024 (arXiv 2407.08608).
//
//   q (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    e4m3
//   q_scale (batch, heads, row tiles)    k_scale, v_scale (batch, kv_heads, key tiles)    float32
//   v_t (batch, kv_heads, head_dim, len_kv padded to 16)    e4m3, the workspace between the two launches
//   out (batch, heads, len_q, head_dim) bfloat16    lse (batch, heads, len_q) float32
//
// The tensor cores do twice as much a clock, and take operands of 8 bits along the summed dimension only. So a launch of its own
// transposes V first (which FlashAttention-3 does in its producer), with its keys in the order in which P's accumulators already
// lie as an operand: no lane hands anything to another. P is scaled by 2^4 and may grow by 2^4.8 before a rescale, for e4m3 ends at
// 448 and at 2^-9. Each tile has a scale of its own: those of Q and K go into the factor of the exponent.
//
// Of 8-bit products the tensor cores keep some 14 bits of an accumulator, and cut each product to the last of them: where V keeps its
// sign, a sum over many tiles loses a part of every one. So P V_j goes into registers of its own, T, 64 head dims at a time, and is
// folded into O in float32, by an FMA with V_j's scale. T takes the place of S, which is P by then: so nothing of a warpgroup runs
// beside its softmax, and the warpgroups fill each other's gaps.
//
// Expected: the products take half as long, the softmax as long as before, so D = 256 gains more than D = 128.
// Measured (H200, 16k tokens in all; data: docs/results/fp8_flash3_fp8_h200_2026-11-21.json): as expected, at 16k 1.20 times
// bfloat16, 1.22 causal, and at D = 256 1.44 and 1.47. One accumulator for all key tiles had 1.35 and 1.76 (that file as it
// stood before, at db7a0fe), and lost 43 % of V = 1.
// What binds: at D = 256 first the tensor cores, busy 71 % of the clocks. At D = 128 nothing alone: tensor cores, exp units and issue
// slots are each busy half of the time. In both the power limit holds the clock down. Leaving one out would give (D = 128, 16k,
// 1.21 with all): the exponentials 1.46, the maximum 1.31, the sums of P 1.29, the folds 1.28, the rounding of P nothing.
//   - three warpgroups of 192 x 128: 1.25 where two of 128 x 128 had 1.07 (D = 128, full 16k); at 4k causal two are 4 % ahead.
//     192 x 96: 1.09 where 192 x 128 had 1.23; 192 x 160 spills and is no faster. T of 128 head dims: 1.18 where 64 had 1.23.
//   - descriptors that are a base and a step, scales loaded while Q K^T runs: an eighth fewer instructions; 1.35 became 1.43 at
//     D = 256, 1.22 became 1.23 at 128. Turns at the tensor cores: nothing at 128, at 256 they lose up to 5 %.
//   - lost, at D = 128: O in SRAM, to which the accumulators are added every 192 keys: 1.02 where this had 1.23. One warpgroup at a
//     time at its exponentials: 1.16 where 1.24. Q K^T of the next tile between the folds: 1.12 where 1.25. Softmax and products by
//     halves of a tile, one beside the other: 1.20 where 1.25. No maximum, but a tile done again if P turns out too large: 1.20
//     where 1.22.
//   - with one accumulator and two warpgroups: P scaled by 2^8, as in the paper, leaves a maximum 2^0.8 of room: 1.15 where 2^4 and
//     room for 2^4.8 had 1.22 (D = 256: 1.56, 1.74); the error is 1 % larger. Part of the exponentials by a polynomial: a quarter
//     less.
#define E4M3 1
#include "flash3.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int TURNED_KEYS = 128;                      // rows of V that a block transposes
constexpr bool OVERLAPPED = HEAD_DIM <= 128;           // there is room for T beside S
constexpr int CHUNK = 64, CHUNKS = HEAD_DIM / CHUNK;  // else so many head dims at a time take the place of S

// V transposed, (batch, kv_heads, head_dim, len_kv padded to 16 by zeros), its keys in round_p's order.
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

  // a thread takes 16 keys of 4 columns; neighbours the next 16 keys, so that they fill a sector of 32 bytes
  for (int i = threadIdx.x; i < TURNED_KEYS / 16 * columns / 4; i += WARPGROUP) {
    lanes_meet();
    const int pairs = i / 2 % (columns / 4), key = 16 * (i / 2 / (columns / 4) * 2 + i % 2), column = 4 * pairs;

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

// The row tiles of one block: it takes every gridDim-th unit, which is a row tile of a head or, with PAIRS, two.
struct Agenda {
  const Shape& shape;
  int unit = blockIdx.x, half = 0;

  DEVICE bool next(Work& work) {
    const int row_tiles = ceil_div(shape.len_q, BR), units = PAIRS ? ceil_div(row_tiles, 2) : row_tiles;  // of a head
    const int all_heads = shape.batch * shape.heads;
    if (unit >= units * all_heads) return false;
    const int first_head = unit / (shape.group * units) * shape.group;  // of the group
    const int heads = min(shape.group, all_heads - first_head), place = unit - first_head * units;
    const int front = place / heads, back = row_tiles - 1 - front;
    work = work_of(shape, first_head + place % heads, half ? front : back);
    half = PAIRS && half == 0 && front != back;
    if (half == 0) unit += gridDim.x;
    return true;
  }
};

// The softmax of 8 bits: of l, the sum of the rounded P, a lane has the whole.
struct RoundedSoftmax : Softmax {
  using Softmax::Softmax;

  // As Softmax's, with a product where that divides: below 0, where integers have another order than floats, yes.
  DEVICE bool risen(const float (&s)[S_FRAGMENTS][4]) const {
    bool any = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int a = bits(s[0][2 * half]), b = bits(s[0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < S_FRAGMENTS; n += 2) {
        a = max(max(a, bits(s[n][2 * half])), bits(s[n][2 * half + 1]));
        if (n + 1 < S_FRAGMENTS) b = max(max(b, bits(s[n + 1][2 * half])), bits(s[n + 1][2 * half + 1]));
      }
      const int top = max(a, b);
      any |= top < 0 || !(c * float_of(top) - m[half] <= TAU);
    }
    return any;
  }

  // As Softmax's, but l waits for rescale, as O does.
  DEVICE void raise(const float (&s)[S_FRAGMENTS][4], float (&alpha)[2]) {
    const float before[2] = {l[0], l[1]};
    Softmax::raise(s, alpha);
    l[0] = before[0], l[1] = before[1];
  }
  DEVICE void rescale(const float (&alpha)[2]) { l[0] *= alpha[0], l[1] *= alpha[1]; }

  // l grows by the sums of a tile's P, the product with the ones: all columns of it alike.
  DEVICE void add(const float (&sums)[4]) { l[0] += sums[0], l[1] += sums[2]; }

  // S becomes P = exp2(c S - m).
  DEVICE void exponentials(float (&s)[S_FRAGMENTS][4]) const {
#pragma unroll
    for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(c * s[n][e] - (m[e / 2] - LARGEST_P));
  }
};

// O += scale T, of T's first `count` fragments, into those of O from `first` on.
template <int N>
DEVICE void fold(float (&o)[O_FRAGMENTS][4], int first, const float (&t)[N][4], int count, float scale) {
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[first + n][e] += scale * t[n][e];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3_fp8(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
           const float* q_scale, const float* k_scale, const float* v_scale, const Tensor out, float* lse, const Shape shape) {
  const Sram sram;
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
        load_tile(sram.q(), q, work.batch, work.head, work.first_row, sram.q_full(), EVICT_FIRST);
        q_parity ^= 1;

        for (int j = work.tiles.last; j >= work.tiles.first; --j) {
          // step: load_k (producer: the next)
          if (j > work.tiles.first) load_k(j - 1);

          // step: load_v (producer)
          mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);
          load_tile(sram.v(v_ring.slot), v, work.batch, kv, 0, sram.v_full(v_ring.slot), EVICT_LAST, j * BC);
          v_ring.advance();
        }
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
  unsigned p[P_REGISTERS][4], q_parity = 0;
  Ring k_ring, v_ring;
  while (agenda.next(work)) {
    const int last_row = min(work.first_row + BR, shape.len_q) - 1;
    const int lane_row = work.first_row + (warp_id() - 4) * 16 + lane_id() / 4;
    Keys full = full_tiles(shape, work.first_row, last_row, BC);  // need no mask
    if (softmax.sign != 1) full = {work.tiles.last + 1, -1};      // nor a change of sign
    float o[O_FRAGMENTS][4] = {}, s[S_FRAGMENTS][4], alpha[2];
    softmax.begin();
    const int kv = work.batch * shape.kv_heads + kv_head(shape, work.head), key_tiles = ceil_div(shape.len_kv, BC);
    const int row_tile = (work.batch * shape.heads + work.head) * ceil_div(shape.len_q, BR) + work.first_row / BR;

    // step: load_q
    const float c = scale * load_global<float>(q_scale + row_tile);
    mbarrier_wait(sram.q_full(), q_parity);
    q_parity ^= 1;

    if constexpr (OVERLAPPED) {
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
        softmax.c = c * load_global<float>(k_scale + kv * key_tiles + work.tiles.last);

        // step: load_v (its scale, first)
        float factor_v = load_global<float>(v_scale + kv * key_tiles + work.tiles.last);

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
          const float factor_k = load_global<float>(k_scale + kv * key_tiles + j);

          // step: load_v (its scale)
          const float next_v = load_global<float>(v_scale + kv * key_tiles + j);

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
    } else {
      for (int j = work.tiles.last; j >= work.tiles.first; --j) {
        float t[2][CHUNK / 8][4], sums[1][4];

        // step: load_k (in turn)
        mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);

        // step: scores (in turn)
        settle(s);
        wgmma_fence();
        multiply_qk(s, sram.q(), consumer * 64, sram.k(k_ring.slot));

        // step: load_k (in turn: its scale, meanwhile)
        const float factor_k = load_global<float>(k_scale + kv * key_tiles + j);

        // step: load_v (in turn: its scale)
        const float factor_v = load_global<float>(v_scale + kv * key_tiles + j);

        // step: scores (in turn: done)
        wgmma_wait<0>();
        settle(s);
        release(sram.k_empty(k_ring.slot));
        k_ring.advance();

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
        multiply_pv(sums, p, v_tile, HEAD_DIM);
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
      release(sram.q_empty());
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;

      // step: normalize
      const float sum = softmax.l[half], factor = sum > 0 ? reciprocal(sum) : 0;  // a row without keys gets 0

      // step: store_o
      store_o(out, shape, work, row, o, half, factor);

      // step: store_lse
      store_lse(lse, shape, work, row, softmax.m[half], sum);
    }
  }
}
