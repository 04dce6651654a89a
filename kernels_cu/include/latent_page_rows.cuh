// How mla_hopper.cu brings tiles from pages of any size: two warps for each slot of the ring copy row by row.
#pragma once

using Pool = Tensor;

// Two warps copy every other tile of a unit: the tiles of their slot. Each lane knows where one row lies, and tells the others.
struct Latent {
  static constexpr int ROWS = BC / SLOT_WARPS;  // of a warp

  const Tensor& latent;
  const int* table;
  const Shape& batch;
  const Sram& sram;
  Divisor page_size;

  DEVICE void load(const Unit& unit, int keys, const Keys&, int j, const Ring& ring) const {
    if (warp_id() / SLOT_WARPS != ring.slot) return;
    const int first_row = warp_id() % SLOT_WARPS * ROWS, first_key = j * BC + first_row, key = first_key + lane_id();

    int page = 0;
    lanes_meet();
    if (key < keys) page = load_global<int>(table + static_cast<long long>(unit.batch) * batch.table_pages + key / page_size);
    const long long own = page * latent.batch + key % page_size * latent.row;
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);
      if (keys - first_key >= ROWS)
        copy<true>(sram.latent(ring.slot), columns, first_row, own, keys - first_key);
      else
        copy<false>(sram.latent(ring.slot), columns, first_row, own, keys - first_key);
      copy_commit();
    }
    tell<4>(sram.full(ring.slot, 0));
    tell<3>(sram.full(ring.slot, 1));
    tell<2>(sram.full(ring.slot, 2));
    tell<1>(sram.full(ring.slot, 3));
    tell<0>(sram.full(ring.slot, 4));
  }

  template <bool WHOLE>
  DEVICE void copy(LatentTile tile, int columns, int first_row, long long own, int left) const {
    const char* rows = row_address(latent, 0, 0, 0);
    const int first = first_panel(columns) * 8, chunks = panels_of(columns) * 8;
#pragma unroll(WHOLE ? 4 : 1)
    for (int i = lane_id(); i < ROWS * chunks; i += 32) {
      const int row = i / chunks, chunk = first + i % chunks;
      const char* from = rows + shuffle(own, row) + chunk * CHUNK_BYTES;
      if (!WHOLE) lanes_meet();
      copy_async(chunk_of(tile, first_row + row, chunk), from, WHOLE || row < left ? CHUNK_BYTES : 0);
    }
  }

  // Waits for this warp's copies, all but the newest ones, and says so.
  template <int PENDING>
  static DEVICE void tell(unsigned full) {
    copy_wait<PENDING>();
    fence_async();
    release(full);
  }
};
