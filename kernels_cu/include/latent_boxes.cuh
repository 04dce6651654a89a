// How mla_hopper.cu brings tiles of a sequence whose rows lie one behind the other: TMA brings whole tiles.
#pragma once

using Pool = TensorMap;

// One thread asks for the tiles of a unit.
struct Latent {
  const TensorMap& latent;
  const Sram& sram;

  DEVICE void load(const Unit& unit, int, const Keys&, int j, const Ring& ring) const {
    if (warp_id() != 0) return;
    const LatentTile tile = sram.latent(ring.slot);
#pragma unroll
    for (int columns = 0; columns < SETS; ++columns) {
      mbarrier_wait(sram.empty(ring.slot, columns), ring.parity ^ 1);
      if (elected()) {
        mbarrier_arrive_expect(sram.full(ring.slot, columns), panels_of(columns) * LatentTile::PANEL_BYTES);
#pragma unroll
        for (int i = first_panel(columns); i < first_panel(columns) + panels_of(columns); ++i)
          tma_load(tile.panel(i), latent, RAGGED ? 0 : unit.batch, 0, unit.first_key + j * BC, i * 64, sram.full(ring.slot, columns),
                   EVICT_FIRST);
      }
    }
  }
};
