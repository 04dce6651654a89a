// How mla_hopper.cu brings tiles from pages that fill a tile, or that a tile fills: TMA brings PAGE_BOX rows of a page at once.
#pragma once

using Pool = TensorMap;  // each page is a batch of its own

// One lane asks for the tiles of a unit. For each box a lane looks its page up. A box is whole: it also brings what lies behind the
// last key. A tile has boxes behind the last key, too, so that it comes whole. These are of the last key's page again. A tile's
// pages are looked up before the tile before it is waited for.
struct Latent {
  static constexpr int OF_TILE = BC / PAGE_BOX;  // boxes of a panel
  static_assert(BC % PAGE_BOX == 0 && OF_TILE <= 32, "a lane for each box");

  const TensorMap& latent;
  const int* table;
  const Shape& batch;
  const Sram& sram;
  Divisor page_size;
  int pages = 0;  // of the coming tile, a lane for each box

  DEVICE void look_up(const Unit& unit, int keys, int j) {
    const int key = min(j * BC + lane_id() * PAGE_BOX, keys - 1);
    lanes_meet();
    if (lane_id() < OF_TILE) pages = load_global<int>(table + static_cast<long long>(unit.batch) * batch.table_pages + key / page_size);
  }

  DEVICE void load(const Unit& unit, int keys, const Keys& tiles, int j, const Ring& ring) {
    if (warp_id() != 0) return;
    if (j == tiles.first) look_up(unit, keys, j);
    const int own = pages, row = OF_TILE == 1 ? j * BC % page_size : 0;  // of a page that is larger than a tile, one part
    if (j < tiles.last) look_up(unit, keys, j + 1);

    const LatentTile tile = sram.latent(ring.slot);
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      const unsigned full = sram.full(ring.slot, columns);
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);
      if (elected()) mbarrier_arrive_expect(full, panels_of(columns) * LatentTile::PANEL_BYTES);
#pragma unroll
      for (int box = 0; box < OF_TILE; ++box) {
        const int page = shuffle(own, box);
        if (elected())
#pragma unroll
          for (int i = first_panel(columns); i < first_panel(columns) + panels_of(columns); ++i)
            tma_load(tile.panel(i) + box * PAGE_BOX * 128, latent, page, 0, row, i * 64, full, EVICT_FIRST);
      }
    }
  }
};
