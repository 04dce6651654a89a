// FlashAttention-3 with operands in FP8 (e4m3), forward: section 3.3 of Shah et al. 2024 (arXiv 2407.08608).
//
//   q (batch, heads, len_q, head_dim)    k, v (batch, kv_heads, len_kv, head_dim)    e4m3
//   q_scale (batch, heads, row tiles)    k_scale, v_scale (batch, kv_heads, key tiles)    float32
//   v_t (batch, kv_heads, head_dim, len_kv padded to 16)    e4m3, the workspace between the two launches
//   out (batch, heads, len_q, head_dim) bfloat16    lse (batch, heads, len_q) float32
//
// The tensor cores do twice as much a clock, and take operands of 8 bits along the summed dimension only. So a launch of its own
// transposes V first (which FlashAttention-3 does in its producer), with its keys in the order in which P's accumulators already
// lie as an operand: no lane hands anything to another. P is scaled by 2^5 and may grow by 2^3.8 before a rescale, for e4m3 ends at
// 448 and at 2^-9. Each tile has a scale of its own: those of Q and K go into the factor of the exponent.
//
// Of 8-bit products the tensor cores keep some 14 bits of an accumulator, and cut each product to the last of them: where V keeps its
// sign, a sum over many tiles loses a part of every one. So P V_j goes into registers of its own, T, and is folded into O in float32,
// by an FMA with V_j's scale. The sums of P are a product as well, with 8 columns of ones, for each addition in float32 takes a clock
// from the tensor cores. l is then the sum of the rounded P: what rounding does to the weights in `out`, it does to their sum.
//
// Up to D = 128 T has room beside S: P V of a tile runs beside the maximum of the next, and is folded beside its exponentials. O and
// l are rescaled a tile later, beside the products: the wait for T may stand in no branch that warps of a warpgroup take apart.
// At D = 256 T takes the place of S: two chunks of 64 head dims, one folded while the other is multiplied. Else one thing comes
// after the other there.
//
// Expected: the products take half as long, the softmax as long as before, so D = 256 gains more than D = 128.
// Measured (H200, 16k tokens in all; data: docs/results/fp8/flash3_fp8_h200_2026-11-21.json): as expected, at 16k 1.32 times
// bfloat16, 1.31 causal, and at D = 256 1.47 and 1.45; at 1k 1.24 to 1.38.
// What binds (profile/flash3_h200_2026-11-21.json): at D = 128 tensor cores and exp units alike, busy 60 and 59 % of the clocks;
// additions and FMAs in float32 keep the tensor cores from some of the others. At D = 256 first the tensor cores, 71 %. In both the
// power limit holds the clock down.
// What it took (trials, a run each, side by side: D = 128, 16k, times bfloat16, full; causal is 0.01 to 0.02 less):
//   - three warpgroups of 192 x 128, one thing after the other, the sums of P by additions: 1.22. With ones 1.18, for nothing was left
//     between the exponentials and all their FMAs came first; with an eighth of the FMAs at a time 1.30.
//   - overlapped, two warpgroups: 1.20 with additions, 1.24 with all of them after the exponentials; 1.34 with ones. There the fold lies
//     between the exponentials, and spreading the FMAs gains nothing (1.29 to 1.33).
//   - P V waited for only behind the exponentials: 1.04, for then the fold stands alone. 17 fewer instructions of 443 (descriptors,
//     scales, one ring): nothing. Turns at the tensor cores: 1.30 where 1.33. Three stages: 1.32 where 1.34.
//   - P times 2^4, 2^5, 2^6, 2^7 (causal): 1.33, 1.32, 1.29, 1.22, for a maximum that may lag less is raised more often; the error at
//     1,000 keys is 1.9 % with 2^4, 1.7 % with 2^6 and 1.6 % with 2^7.
//   - the wait for T in the branch of a risen maximum: 1.34 where it now has 1.32. Warps of one warpgroup would then wait at two places,
//     which PTX forbids and synccheck reports. Two branches, one to each side of the wait: 1.31; T times its rows' factors: 1.28.
//   - one accumulator for all key tiles and no ones: 1.35 (D = 256: 1.76), but 43 % of V = 1 lost.
//   - lost before: O in SRAM, to which the accumulators are added every 192 keys; one warpgroup at a time at its exponentials; Q K^T of
//     the next tile between the folds; softmax and products by halves of a tile; no maximum, but a tile done again if P turns out too
//     large; part of the exponentials by a polynomial.
#define E4M3 1
#include "flash3.cuh"

constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int TURNED_KEYS = 128;                       // rows of V that a block transposes
constexpr bool OVERLAPPED = HEAD_DIM <= 128;           // there is room for T beside S
constexpr int CHUNK = 64, CHUNKS = HEAD_DIM / CHUNK;   // else two chunks of T take the place of S, by turns

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

  // As Softmax's, with a product where that divides, and yes where no score is above 0.
  DEVICE bool risen(const float (&s)[S_FRAGMENTS][4]) const {
    bool any = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int top = largest(s, half);
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
