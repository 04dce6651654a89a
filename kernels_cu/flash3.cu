// FlashAttention-3, forward (draft)
#include "mask.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

#ifndef PINGPONG
#define PINGPONG 1
#endif
#ifndef TAU
#define TAU 8.f
#endif
#ifndef SNAKE
#define SNAKE 1
#endif
#ifndef POLY
#define POLY 0   // of 8 exponentials, how many by polynomial
#endif

constexpr int CONSUMERS = BR / 64;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? 24 : 56;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? 240 : 256 - 8;
constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = HEAD_DIM / 8;

using QTile = PanelTile<BR, HEAD_DIM>;
using KVTile = PanelTile<BC, HEAD_DIM>;

struct Work { int batch, head, first_row; Keys tiles; };

DEVICE Work work_of(const Shape& shape, int index) {
  const int row_tiles = ceil_div(shape.len_q, BR);
  const int first_head = index / (shape.group * row_tiles) * shape.group;  // of the group
  const int heads = min(shape.group, shape.batch * shape.heads - first_head);
  const int place = index - first_head * row_tiles;
  const int flat_head = first_head + place % heads, first_row = (row_tiles - 1 - place / heads) * BR;
  const int last_row = min(first_row + BR, shape.len_q) - 1;
  return {flat_head / shape.heads, flat_head % shape.heads, first_row, visible_tiles(shape, first_row, last_row, BC)};
}

DEVICE int turn(int round) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return round * blocks + (SNAKE && round % 2 ? blocks - 1 - block : block);
}

// slot and phase of a ring
struct Ring {
  int slot = 0;
  unsigned parity = 0;
  DEVICE void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

DEVICE float exp2_poly(float x) {  // x <= 0 or small; magic rounding
  x = fmaxf(x, -127.f);
  const float magic = 12582912.f;  // 1.5 * 2^23
  const float r = x + magic;
  const float f = x - (r - magic);  // [-0.5, 0.5]
  float p = 0.00958285f;
  p = fmaf(p, f, 0.05590643f);
  p = fmaf(p, f, 0.24024099f);
  p = fmaf(p, f, 0.69312419f);
  p = fmaf(p, f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(r) << 23));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
flash3(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
       const __grid_constant__ TensorMap v_map, const Tensor out, float* lse, const Shape shape) {
  const unsigned base = sram_base();
  const QTile q_tile{base};
  auto k_tile = [&](int slot) { return KVTile{base + QTile::BYTES + slot * KVTile::BYTES}; };
  auto v_tile = [&](int slot) { return KVTile{base + QTile::BYTES + (STAGES + slot) * KVTile::BYTES}; };
  const unsigned barriers = base + QTile::BYTES + 2 * STAGES * KVTile::BYTES;
  const unsigned q_full = barriers, q_empty = barriers + MBARRIER_BYTES;
  auto k_full = [&](int slot) { return barriers + (2 + slot) * MBARRIER_BYTES; };
  auto k_empty = [&](int slot) { return barriers + (2 + STAGES + slot) * MBARRIER_BYTES; };
  auto v_full = [&](int slot) { return barriers + (2 + 2 * STAGES + slot) * MBARRIER_BYTES; };
  auto v_empty = [&](int slot) { return barriers + (2 + 3 * STAGES + slot) * MBARRIER_BYTES; };

  if (threadIdx.x == 0) {
    mbarrier_init(q_full, 1);
    mbarrier_init(q_empty, 4 * CONSUMERS);
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(k_full(slot), 1);
      mbarrier_init(v_full(slot), 1);
      mbarrier_init(k_empty(slot), 4 * CONSUMERS);
      mbarrier_init(v_empty(slot), 4 * CONSUMERS);
    }
    mbarrier_publish();
  }
  barrier();

  const int works = ceil_div(shape.len_q, BR) * shape.batch * shape.heads;
  if (warpgroup_id() == 0) {
    release_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      Ring k_ring, v_ring;
      unsigned q_parity = 0;
      for (int round = 0, index; (index = turn(round)) < works; ++round) {
        const Work work = work_of(shape, index);
        const int kv = kv_head(shape, work.head);
        auto load_k = [&](int j) {
          mbarrier_wait(k_empty(k_ring.slot), k_ring.parity ^ 1);
          mbarrier_arrive_expect(k_full(k_ring.slot), KVTile::BYTES);
#pragma unroll
          for (int p = 0; p < KVTile::PANELS; ++p)
            tma_load(k_tile(k_ring.slot).panel(p), k_map, work.batch, kv, j * BC, p * 64, k_full(k_ring.slot), EVICT_LAST);
          k_ring.advance();
        };
        auto load_v = [&](int j) {
          mbarrier_wait(v_empty(v_ring.slot), v_ring.parity ^ 1);
          mbarrier_arrive_expect(v_full(v_ring.slot), KVTile::BYTES);
#pragma unroll
          for (int p = 0; p < KVTile::PANELS; ++p)
            tma_load(v_tile(v_ring.slot).panel(p), v_map, work.batch, kv, j * BC, p * 64, v_full(v_ring.slot), EVICT_LAST);
          v_ring.advance();
        };
        if (work.tiles.first <= work.tiles.last) load_k(work.tiles.last);
        mbarrier_wait(q_empty, q_parity ^ 1);
        mbarrier_arrive_expect(q_full, QTile::BYTES);
#pragma unroll
        for (int p = 0; p < QTile::PANELS; ++p)
          tma_load(q_tile.panel(p), q_map, work.batch, work.head, work.first_row, p * 64, q_full, EVICT_FIRST);
        q_parity ^= 1;
        for (int j = work.tiles.last; j >= work.tiles.first; --j) {
          if (j > work.tiles.first) load_k(j - 1);
          load_v(j);
        }
      }
    }
    return;
  }

  claim_registers<CONSUMER_REGISTERS>();
  const int consumer = warpgroup_id() - 1;
  const bool elected = lane_id() == 0;
  auto give = [&](unsigned empty) {
    if (elected) mbarrier_arrive(empty);
  };
  auto my_turn = [&] {
    if (PINGPONG && CONSUMERS > 1) named_barrier_sync(1 + consumer, 2 * WARPGROUP);
  };
  auto your_turn = [&] {
    if (PINGPONG && CONSUMERS > 1) named_barrier_arrive(1 + (consumer + 1 == CONSUMERS ? 0 : consumer + 1), 2 * WARPGROUP);
  };
  if (PINGPONG && CONSUMERS > 1 && consumer == CONSUMERS - 1) your_turn();

  const float sign = shape.scale > 0 ? 1.f : shape.scale < 0 ? -1.f : 0.f;
  const float c = (shape.scale != 0 ? fabsf(shape.scale) : 1.f) * LOG2E;

  Ring k_ring, v_ring;
  unsigned q_parity = 0;
  for (int round = 0, index; (index = turn(round)) < works; ++round) {
    const Work work = work_of(shape, index);
    const Keys tiles = {uniform(work.tiles.first), uniform(work.tiles.last)};
    const int warp_row = work.first_row + (warp_id() - 4) * 16;
    const int lane_row = warp_row + lane_id() / 4;
    const int last_row = min(work.first_row + BR, shape.len_q) - 1;
    const Keys full = sign != 1 ? Keys{0, -1} : full_tiles(shape, work.first_row, last_row, BC);

    float o[O_FRAGMENTS][4] = {};
    float m[2] = {LOWEST, LOWEST}, l[2] = {0, 0};

    float s[S_FRAGMENTS][4];
    unsigned p[BC / 16][4];

    auto multiply_qk = [&](int slot) {
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 16)
        wgmma_ss(s, rows_operand(q_tile, consumer * 64, d), rows_operand(k_tile(slot), 0, d), d > 0);
      wgmma_commit();
    };
    auto multiply_pv = [&](int slot) {
#pragma unroll
      for (int key = 0; key < BC; key += 16) wgmma_rs(o, p[key / 16], columns_operand(v_tile(slot), key));
      wgmma_commit();
    };
    float alpha[2];
    bool risen;
    auto softmax = [&](int j) {
      if (j < full.first || j > full.last) {
        if (sign != 1) {
#pragma unroll
          for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= sign;
        }
        mask_scores(s, shape, lane_row, j * BC, 2 * (lane_id() % 4));
      }
      float top[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float a = s[0][2 * half], b = s[0][2 * half + 1];
#pragma unroll
        for (int n = 1; n < S_FRAGMENTS; ++n) a = fmaxf(a, s[n][2 * half]), b = fmaxf(b, s[n][2 * half + 1]);
        top[half] = fmaxf(m[half], c * quad_max(fmaxf(a, b)));
      }
      risen = any_lane(top[0] - m[0] > TAU || top[1] - m[1] > TAU);
      if (risen) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          alpha[half] = exp2_approx(m[half] - top[half]);
          l[half] *= alpha[half];
          m[half] = top[half];
        }
      }
      float sum[2][2] = {};
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = fmaf(c, s[n][e], -m[e / 2]);
          s[n][e] = (n % 8) < POLY ? exp2_poly(x) : exp2_approx(x);
          sum[e / 2][e % 2] += s[n][e];
        }
      l[0] += sum[0][0] + sum[0][1];
      l[1] += sum[1][0] + sum[1][1];
    };
    auto convert = [&] {
#pragma unroll
      for (int key = 0; key < BC; key += 16) {
        const FragmentA a = operand_a(s, key);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[key / 16][i] = a.r[i];
      }
    };

    mbarrier_wait(q_full, q_parity);
    q_parity ^= 1;
    if (tiles.first <= tiles.last) {
      mbarrier_wait(k_full(k_ring.slot), k_ring.parity);
      settle(s);
      wgmma_fence();
      multiply_qk(k_ring.slot);
      wgmma_wait<0>();
      settle(s);
      give(k_empty(k_ring.slot));
      k_ring.advance();
      if (tiles.first == tiles.last) give(q_empty);
      softmax(tiles.last);
      convert();

      for (int j = tiles.last - 1; j >= tiles.first; --j) {
        mbarrier_wait(k_full(k_ring.slot), k_ring.parity);
        my_turn();
        settle(s);
        settle(o);
        settle(p);
        wgmma_fence();
        multiply_qk(k_ring.slot);
        mbarrier_wait(v_full(v_ring.slot), v_ring.parity);
        wgmma_fence();
        multiply_pv(v_ring.slot);
        your_turn();
        wgmma_wait<1>();
        settle(s);
        give(k_empty(k_ring.slot));
        k_ring.advance();
        if (j == tiles.first) give(q_empty);
        softmax(j);
        after(l[0] + l[1]);
        settle(s);  // the exponentials come before the wait
        wgmma_wait<0>();
        settle(o);
        give(v_empty(v_ring.slot));
        v_ring.advance();
        convert();
        if (risen) {
#pragma unroll
          for (int n = 0; n < O_FRAGMENTS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[n][e] *= alpha[e / 2];
        }
      }
      mbarrier_wait(v_full(v_ring.slot), v_ring.parity);
      settle(o);
      settle(p);
      wgmma_fence();
      multiply_pv(v_ring.slot);
      wgmma_wait<0>();
      settle(o);
      give(v_empty(v_ring.slot));
      v_ring.advance();
    } else {
      give(q_empty);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      const bool inside = row < shape.len_q;
      const float sum = quad_sum(l[half]);
      const float factor = sum > 0 ? reciprocal(sum) : 0;
      store_row(row_address(out, work.batch, work.head, row), o, half, factor, inside ? padded_row_bytes(shape) : 0);
      float* row_lse = lse + (static_cast<long long>(work.batch) * shape.heads + work.head) * shape.len_q + row;
      if (inside && lane_id() % 4 == 0) store_global(row_lse, (m[half] + log2_approx(sum)) * LN2);
    }
  }
}
