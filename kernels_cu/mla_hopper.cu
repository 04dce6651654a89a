// Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), on Hopper: TMA, WGMMA, and a warpgroup for each task.
//
//   q (batch, heads, len_q, HEAD_DIM)    latent (batch, 1, len_kv, HEAD_DIM)    out (batch, heads, len_q, VALUE_DIM)
//   lse (batch, heads, len_q) float32, or NULL    sinks (heads) float32    q, latent and out in float16 or bfloat16
//   partial (batch, chunks, rows, VALUE_DIM), partial_m, partial_l (batch, chunks, rows)    float32
//
// In a ragged batch the rows of a batch of 1 are sequences, with equally many queries. Sequence s has rows offsets_kv[s] ..
// offsets_kv[s + 1] - 1 of latent, and partial results as if it were batch s. A box may bring rows of the next sequence. They are
// cleared.
//
// A unit of work is 64 rows and a chunk of keys. A chunk has 1,024 keys unless callers say how many. A block takes one unit after
// the other. A second launch adds up what the chunks of a row have, on all SMs. (In a tree, as in mla.cu, one SM alone has the last
// node.) The order is fixed, so no bit depends on the batch.
//
// A tile has 64 rows, and 64 latent rows, which serve as K and as V. Four warpgroups share a tile's work:
//   - One loads tiles by TMA. Where a tile is made of whole pages, or a page of whole tiles, it loads boxes of a page (PAGE_BOX).
//     From other pages it copies 16 bytes at a time, with two warps for each slot of the ring.
//   - One has the scores: it fetches the queries, multiplies them by all 576 columns, and takes the exponentials. P and what has to
//     be rescaled go to the others through SRAM.
//   - Two have the output, 256 columns each, which fill 128 registers of a thread. P leaves SRAM once for each of them.
// So the scores and exponentials of a tile are computed while the tensor cores still multiply the P of the tile before.
//
// A tile comes in five sets of columns, because each is free at another time. The columns of RoPE are free after the scores, and
// each quarter of the value is free after its product. The scores begin with the set that comes first.
//
//   SRAM        Q  BR x HEAD_DIM | latent  STAGES x (BC x HEAD_DIM) | P  BR x BC | alpha  BR | mbarriers
//   registers   S  BR x BC, and O  BR x VALUE_DIM / 2 in each of two warpgroups, in float32
//
// Expected: a tile takes the tensor cores 1,152 cycles for S and 1,024 for O. It takes SRAM 2,400, as both products read it. So the
// tensor cores reach up to nine tenths of their rate, if the L2 brings 72 KB in that time. With few heads, rows stay empty and the
// bandwidth of DRAM binds.
#include "latent.cuh"
#include "total.cuh"

// Where a unit's results go: to out and lse if its rows see no other chunk, else to the partial results. m and l are to the base 2.
struct Results {
  const Tensor& out;
  float* lse;
  const float* sinks;
  float* partial;
  float* partial_m;
  float* partial_l;
  const Shape& shape;
  const Units& units;
  const Divisor& group;
  Unit unit = {};
  int first_row = 0;

  DEVICE char* out_row(int row) const {
    const int packed = first_row + row;
    return row_address(out, unit.batch, packed % group, packed / group);
  }
  DEVICE float sink_of(int row) const { return of_head<SINKS>(sinks, (first_row + row) % group, -INF); }
  DEVICE long long part_at(int row) const {
    return (static_cast<long long>(unit.batch) * units.most_runs() + unit.run) * units.all_rows + first_row + row;
  }

  DEVICE void store_lse(int row, float m, float l) const {
    const int packed = first_row + row;
    float* to = lse + lse_at(units, shape, unit, packed % group, packed / group);
    if (lse) store_global(to, (m + log2_approx(l)) * LN2);
  }
  DEVICE void store_statistics(int row, float m, float l) const {
    store_global(partial_m + part_at(row), m);
    store_global(partial_l + part_at(row), l);
  }
};

// Calls work(results, place) for each of this block's units.
template <class Work>
DEVICE void for_each_unit(Results results, Work work) {
  for (Unit unit = results.units.before_first();;) {
    // step: load_q (lengths)
    if (!results.units.next(unit)) return;
    const Place place(results.units, unit);
    results.unit = unit, results.first_row = place.first_row;
    if (place.chunks.first <= place.chunks.last) work(results, place);
  }
}

// Does a unit have all keys that its rows see?
DEVICE bool is_whole(const Place& place) { return place.first_chunk == place.last_chunk; }

// The warpgroup that loads.
DEVICE void load_tiles(const Results& results, Latent latent) {
  Ring ring;
  for_each_unit(results, [&](const Results& here, const Place& place) {
    const Keys tiles = place.tiles_of(place.chunks.first);
    const int keys = here.units.alone(here.unit).len_kv;
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j, ring.advance()) {
      // step: load_latent (producer)
      latent.load(here.unit, keys, tiles, j, ring);
    }
  });
}

// The warpgroup that has the scores.
struct Weighing {
  const Tensor& q;
  const Sram& sram;
  const Scores scores;
  Ring ring;
  unsigned p_parity = 0;

  DEVICE int own_row(int half) const { return warp_id() % 4 * 16 + lane_id() / 4 + 8 * half; }

  // No warp still reads the queries of the unit before: this warpgroup has waited for its products.
  DEVICE void load_queries(const Results& here, const Place& place) const {
    // step: load_q
    named_barrier_sync(QUERIES, WARPGROUP);
#pragma unroll 1
    for (int pass = 0; pass < 4; ++pass) {  // eight lanes have a row, and its panels one after the other
      const int lane = opaque(lane_id()), row = warp_id() % 4 * 16 + 4 * pass + lane / 8, chunk = lane % 8;
      const int packed = place.first_row + row;
      const char* from = row_address(q, here.unit.batch, packed % here.group, packed / here.group) + chunk * CHUNK_BYTES;
      const unsigned to = chunk_of(sram.q(), row, chunk);
#pragma unroll
      for (int panel = 0; panel < QTile::PANELS; ++panel) {
        lanes_meet();
        copy_async_inside(to + panel * QTile::PANEL_BYTES, from + panel * 128, row < place.rows);
      }
    }
    copy_commit();
    copy_wait<0>();
    fence_async();
    named_barrier_sync(QUERIES, WARPGROUP);
  }

  // S += Q Kᵀ over a set of columns, in the background.
  DEVICE void multiply(float (&s)[S_FRAGMENTS][4], int columns) const {
    mbarrier_wait(sram.full(ring.slot, columns), ring.parity);
    wgmma_fence();
    const unsigned long long queries = rows_operand(sram.q(), 0, 0), keys = rows_operand(sram.latent(ring.slot), 0, 0);
    const int first = first_panel(columns) * 64;
#pragma unroll
    for (int d = first; d < first + panels_of(columns) * 64; d += 16)
      wgmma_ss(s, queries + operand_step<QTile>(0, d), keys + operand_step<LatentTile>(0, d), columns != ROPE || d > first);
  }

  DEVICE void operator()(const Results& here, const Place& place) {
    const Shape& shape = here.units.alone(here.unit);
    const Keys tiles = place.tiles_of(place.chunks.first);
    const Keys full = scores.sign != 1 ? Keys{0, -1} : full_tiles(shape, place.first_query, place.last_query, BC);  // need no mask
    const float c = scores.c;
    float m[2] = {LOWEST, LOWEST}, l[2] = {};
    if (place.has_keys()) load_queries(here, place);
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j) {
      // step: load_latent
      if (CLEARS && (j + 1) * BC > shape.len_kv) {
        for (int columns = 0; columns < SETS; ++columns) mbarrier_wait(sram.full(ring.slot, columns), ring.parity);
        clear_rows<1>(sram.latent(ring.slot), shape.len_kv - j * BC, QUERIES);
      }
      float s[S_FRAGMENTS][4];
      settle(s);

      // step: scores
      multiply(s, ROPE);
      multiply(s, set_of(0, 0));
      multiply(s, set_of(1, 0));
      multiply(s, set_of(0, 1));
      multiply(s, set_of(1, 1));
      wgmma_commit();
      wgmma_wait<0>();
      settle(s);
      release(sram.empty(ring.slot, ROPE));
      ring.advance();

      if constexpr (SOFT_CAP) Tanh::apply(s, shape.scale / shape.soft_cap);

      // step: mask
      if (j < full.first || j > full.last) {
        scores.flip(s);
        mask_scores(s, shape, place.first_row + own_row(0), j * BC, 2 * (opaque(lane_id()) % 4), here.group);
      }

      // step: softmax
      float alpha[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = s[0][2 * half];
#pragma unroll
        for (int n = 0; n < S_FRAGMENTS; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = product(c, quad_max(top));
        top = top > m[half] + TAU ? top : m[half];
        alpha[half] = exp2_approx(m[half] - top);
        m[half] = top, l[half] *= alpha[half];
      }
#pragma unroll
      for (int n = 0; n < S_FRAGMENTS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = exp2_approx(product(c, s[n][e]) - m[e / 2]);  // the largest is a power of two at most, however large the scores
          l[e / 2] += s[n][e];
        }
      mbarrier_wait(sram.p_empty(), p_parity ^ 1);
      store_fragments(sram.p(), warp_id() % 4 * 16, 0, 0, s);
      pass_on(alpha);
    }

    // step: share_sum (the scores' side)
    float whole[2] = {l[0] = quad_sum(l[0]), l[1] = quad_sum(l[1])};  // what the output is to be divided by
    if (SINKS && is_whole(place)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lanes_meet();
        const float sink = own_row(half) < place.rows ? here.sink_of(own_row(half)) : -INF;
        whole[half] += exp2_approx(sink * LOG2E - m[half]);
        join_sink(m[half], l[half], sink);
      }
    }
    mbarrier_wait(sram.p_empty(), p_parity ^ 1);
    pass_on(whole);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lanes_meet();
      if (lane_id() % 4 == 0 && own_row(half) < place.rows) {
        if (is_whole(place)) {
          // step: store_lse (of a unit)
          here.store_lse(own_row(half), m[half], l[half]);
        } else {
          // step: store_partial (statistics)
          here.store_statistics(own_row(half), m[half], l[half]);
        }
      }
    }
  }

  // Hands a number for each row, and what was stored before it, to the warpgroups that have the output.
  DEVICE void pass_on(const float (&x)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lanes_meet();
      if (lane_id() % 4 == 0) store_shared(sram.alpha(own_row(half)), x[half]);
    }
    release(sram.p_full());
    p_parity ^= 1;
  }
};

// A warpgroup that has half of the output's columns.
struct Accumulating {
  const Sram& sram;
  Ring ring;
  unsigned p_parity = 0;

  DEVICE int half_of_columns() const { return warpgroup_id() - OUTPUT; }
  DEVICE int own_row(int half) const { return warp_id() % 4 * 16 + lane_id() / 4 + 8 * half; }

  DEVICE void operator()(const Results& here, const Place& place) {
    const Keys tiles = place.tiles_of(place.chunks.first);
    float o[PRODUCTS][O_FRAGMENTS][4] = {};
#pragma unroll 1
    for (int j = tiles.first; j <= tiles.last; ++j, ring.advance()) {
      mbarrier_wait(sram.p_full(), p_parity);
      p_parity ^= 1;

      // step: rescale
      const float alpha[] = {load_shared<float>(sram.alpha(own_row(0))), load_shared<float>(sram.alpha(own_row(1)))};
      if (any_lane(alpha[0] != 1 || alpha[1] != 1)) {
#pragma unroll
        for (int n = 0; n < PRODUCTS * O_FRAGMENTS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n / O_FRAGMENTS][n % O_FRAGMENTS][e] *= alpha[e / 2];
      }

      // step: output
      unsigned p[P_STEPS][4];
#pragma unroll
      for (int i = 0; i < P_STEPS; ++i) {
        const FragmentA a = load_a(sram.p(), warp_id() % 4 * 16, 16 * i);
#pragma unroll
        for (int r = 0; r < 4; ++r) p[i][r] = a.r[r];
      }
      release(sram.p_empty());
      settle(p);
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) settle(o[n]);
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) {
        mbarrier_wait(sram.full(ring.slot, set_of(half_of_columns(), n)), ring.parity);
        wgmma_fence();
        const ValueTile value = {sram.latent(ring.slot).panel((half_of_columns() * PRODUCTS + n) * VALUE_PANELS)};
#pragma unroll
        for (int i = 0; i < P_STEPS; ++i) wgmma_rs(o[n], p[i], columns_operand(value, 16 * i));
        wgmma_commit();
      }
      wgmma_wait<1>();
      release(sram.empty(ring.slot, set_of(half_of_columns(), 0)));
      wgmma_wait<0>();
      release(sram.empty(ring.slot, set_of(half_of_columns(), 1)));
#pragma unroll
      for (int n = 0; n < PRODUCTS; ++n) settle(o[n]);
    }

    // step: share_sum
    mbarrier_wait(sram.p_full(), p_parity);
    p_parity ^= 1;
    const float l[] = {load_shared<float>(sram.alpha(own_row(0))), load_shared<float>(sram.alpha(own_row(1)))};
    release(sram.p_empty());

    const int first_column = half_of_columns() * HALF;
    if (is_whole(place)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool inside = own_row(half) < place.rows;
        char* to = here.out_row(inside ? own_row(half) : 0) + first_column * ELEMENT_BYTES;
        const float factor = l[half] > 0 ? reciprocal(l[half]) : 0;
        // step: store_o (of a unit)
#pragma unroll
        for (int n = 0; n < PRODUCTS; ++n)
          store_row(to + n * PRODUCT * ELEMENT_BYTES, o[n], half, factor, inside ? PRODUCT * ELEMENT_BYTES : 0);
      }
    } else {
      // step: store_partial
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = here.partial + here.part_at(own_row(half)) * VALUE_DIM + first_column + 4 * (lane_id() % 4);
        lanes_meet();
        if (own_row(half) >= place.rows) continue;
#pragma unroll
        for (int n = 0; n < PRODUCTS * O_FRAGMENTS; n += 2) {
          const float (&x)[4] = o[n / O_FRAGMENTS][n % O_FRAGMENTS], (&y)[4] = o[n / O_FRAGMENTS][n % O_FRAGMENTS + 1];
          store_global(to + 8 * n, make_float4(x[2 * half], x[2 * half + 1], y[2 * half], y[2 * half + 1]));
        }
      }
    }
  }
};

// A launch gives all warpgroups the same share of an SM's 65,536 registers: 128 of a thread. They share them out anew.
DEVICE void decode(const Tensor& q, const Latent& latent, const Results& results, const Sram& sram) {
  if (warpgroup_id() == LOADS) {
    release_registers<48>();
    load_tiles(results, latent);
  } else if (warpgroup_id() == SCORES) {
    release_registers<96>();
    Weighing weighing{q, sram, Scores(results.shape)};
    for_each_unit(results, [&](const Results& here, const Place& place) { weighing(here, place); });
  } else {
    claim_registers<184>();
    Accumulating accumulating{sram};
    for_each_unit(results, [&](const Results& here, const Place& place) { accumulating(here, place); });
  }
}

// The keys of the sequence that has this as its first offset.
DEVICE int keys_between(const int* offset) {
  return load_global<int>(offset + 1) - load_global<int>(offset);
}

// Adds up what the chunks of a row have. A block has the row, and each of its warps 128 of the columns.
DEVICE void merge(const Tensor& out, float* lse, const float* sinks, const int* lengths, const float* partial, const float* partial_m,
                  const float* partial_l, const Shape& batch) {
  const int heads = batch.heads, all_rows = batch.len_q * heads;
  const int request = blockIdx.x / all_rows, row = blockIdx.x - request * all_rows, query = row / heads, head = row - query * heads;
  const int first_row = row / BR * BR, last_row = min(first_row + BR, all_rows) - 1;

  // step: merge
  Shape own = batch;
  if (PAGED) own.len_kv = min(max(load_global<int>(lengths + request), 0), batch.len_kv);
  if (RAGGED) own.len_kv = min(max(keys_between(lengths + request), 0), batch.len_kv);
  const Keys seen = visible_tiles(own, first_row / heads, last_row / heads, BC);
  const int chunks = max(seen.last, 0) / TILES_PER_CHUNK - seen.first / TILES_PER_CHUNK + 1;
  if (chunks == 1) return;  // the unit had the whole row
  const long long first_part = static_cast<long long>(request) * most_runs(batch, heads) * all_rows + row;
  Total total;
  if (FEW_CHUNKS || chunks <= FEW)
    total.add<FEW>(partial, partial_m, partial_l, first_part, all_rows, chunks);
  else
    total.add<MANY>(partial, partial_m, partial_l, first_part, all_rows, chunks);

  // step: store_o
  const float alpha = join_sink(total.m, total.l, of_head<SINKS>(sinks, head, -INF));
  const float4 o = neighbours(times(total.o, total.l > 0 ? alpha * reciprocal(total.l) : 0));
  store_elements(row_address(out, request, head, query) + (warp_id() * 128 + first_of_neighbours()) * ELEMENT_BYTES, o);

  // step: store_lse
  if (threadIdx.x == 0 && lse)
    store_global(lse + (RAGGED ? static_cast<long long>(head) * batch.batch + request
                               : static_cast<long long>(request) * heads + head) * batch.len_q + query,
                 (total.m + log2_approx(total.l)) * LN2);
}

#if PAGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper_paged(const Tensor q, const __grid_constant__ Pool latent, const Tensor out, float* lse, const float* sinks,
                 const int* block_table, const int* seq_lens, float* partial, float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Units units(shape, seq_lens);
  const Divisor group(units.group);
  decode(q, {latent, block_table, shape, sram, Divisor(shape.page_size)},
         {out, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_paged_merge(const Tensor out, float* lse, const float* sinks, const int* seq_lens, const float* partial, const float* partial_m,
                       const float* partial_l, const Shape shape) {
  merge(out, lse, sinks, seq_lens, partial, partial_m, partial_l, shape);
}
#elif RAGGED
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper(const Tensor q, const __grid_constant__ TensorMap latent, const Tensor out, float* lse, const float* sinks,
           const int* offsets_kv, float* partial, float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Shape requests = requests_of(shape);
  const Units units(requests, offsets_kv);
  const Divisor group(units.group);
  const Tensor outputs = by_request(out, requests);
  decode(by_request(q, requests), {latent, sram}, {outputs, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_merge(const Tensor out, float* lse, const float* sinks, const int* offsets_kv, const float* partial, const float* partial_m,
                 const float* partial_l, const Shape shape) {
  const Shape requests = requests_of(shape);
  merge(by_request(out, requests), lse, sinks, offsets_kv, partial, partial_m, partial_l, requests);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
mla_hopper(const Tensor q, const __grid_constant__ TensorMap latent, const Tensor out, float* lse, const float* sinks, float* partial,
           float* partial_m, float* partial_l, const Shape shape) {
  const Sram sram;
  open(sram);
  const Units units(shape);
  const Divisor group(units.group);
  decode(q, {latent, sram}, {out, lse, sinks, partial, partial_m, partial_l, shape, units, group}, sram);
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)
mla_hopper_merge(const Tensor out, float* lse, const float* sinks, const float* partial, const float* partial_m, const float* partial_l, const Shape shape) {
  merge(out, lse, sinks, nullptr, partial, partial_m, partial_l, shape);
}
#endif
