// What mla_hopper.cu has in SRAM, how its warpgroups tell each other, and how a latent tile comes there.
#pragma once

#define ONE_KV_HEAD 1
#ifndef PAGE_BOX
#define PAGE_BOX 0  // rows of a page that TMA brings in one box; 0: rows are copied one by one
#endif
#ifndef FEW_CHUNKS
#define FEW_CHUNKS 0  // 1: no row sees more than FEW chunks. Then a merge needs few registers, and more of them run at once
#endif
#include "clear.cuh"
#include "divisor.cuh"
#include "elements.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "scores.cuh"
#include "tma.cuh"
#include "tree.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

static_assert(BR == 64 && BC == 64 && WARPS == 16 && STAGES == 2, "registers and SRAM are shared out for these");

constexpr int THREADS = WARPS * 32;
constexpr int HALF = VALUE_DIM / 2;   // columns of a warpgroup's output
constexpr int PRODUCTS = 2, PRODUCT = HALF / PRODUCTS;  // columns of a product: ptxas takes no more, for 128 registers at the launch
constexpr int S_FRAGMENTS = BC / 8, O_FRAGMENTS = PRODUCT / 8, P_STEPS = BC / 16;
constexpr int OUTPUT_WARPS = 8;
constexpr int SLOT_WARPS = 2;  // that copy a tile from pages
constexpr bool BOXES = !PAGED || PAGE_BOX;  // TMA brings tiles
constexpr bool CLEARS = RAGGED || (PAGED && PAGE_BOX);  // a box may bring rows behind the last key
constexpr int MERGE_WARPS = 4;  // of a row, with 128 columns each
constexpr int FEW = 4, MANY = 16;  // chunks that such a warp asks for at once
static_assert(VALUE_DIM == MERGE_WARPS * 128, "a lane has four columns");
constexpr float TAU = 8;  // a maximum may lag behind by so much: then exponentials reach 2^TAU, and nothing has to be rescaled

enum Role { LOADS, SCORES, OUTPUT };  // of a warpgroup: OUTPUT is the first of two
enum NamedBarrier { QUERIES = 1 };
// The sets of columns that a tile comes in. They are loaded in the order in which they become free: first RoPE's, then those of
// each half's first product, then those of its second.
constexpr int ROPE = 0, SETS = 1 + 2 * PRODUCTS;
DEVICE constexpr int set_of(int half, int product) { return 1 + 2 * product + half; }

using QTile = PanelTile<BR, HEAD_DIM>;
using LatentTile = PanelTile<BC, HEAD_DIM>;
using ValueTile = PanelTile<BC, PRODUCT>;
using PTile = Tile<BR, BC>;

// The panels of 64 columns that a set has.
constexpr int VALUE_PANELS = PRODUCT / 64;
DEVICE constexpr int first_panel(int columns) {
  return columns == ROPE ? VALUE_DIM / 64 : ((columns - 1) % 2 * PRODUCTS + (columns - 1) / 2) * VALUE_PANELS;
}
DEVICE constexpr int panels_of(int columns) { return columns == ROPE ? LatentTile::PANELS - VALUE_DIM / 64 : VALUE_PANELS; }

struct Sram {
  static constexpr int MBARRIERS = 24, ALPHA_BYTES = BR * 4;

  unsigned base = sram_base();

  DEVICE QTile q() const { return {base}; }
  DEVICE LatentTile latent(int slot) const { return {base + QTile::BYTES + slot * LatentTile::BYTES}; }
  DEVICE PTile p() const { return {latent(STAGES).base}; }
  DEVICE unsigned alpha(int row) const { return p().base + PTile::BYTES + row * 4; }
  DEVICE unsigned mbarrier(int i) const { return alpha(BR) + i * MBARRIER_BYTES; }

  DEVICE unsigned full(int slot, int columns) const { return mbarrier(slot * SETS + columns); }
  DEVICE unsigned empty(int slot, int columns) const { return mbarrier((STAGES + slot) * SETS + columns); }
  DEVICE unsigned p_full() const { return mbarrier(2 * STAGES * SETS); }  // P and alpha of a tile, or at the end the sums
  DEVICE unsigned p_empty() const { return mbarrier(2 * STAGES * SETS + 1); }
};
static_assert(2 * STAGES * SETS + 2 <= Sram::MBARRIERS, "there is room for all mbarriers");

// Makes the block's mbarriers ready. All threads call it.
DEVICE void open(const Sram& sram) {
  name_sram("q", sram.q().base, QTile::BYTES);
  name_sram("latent", sram.latent(0).base, STAGES * LatentTile::BYTES);
  name_sram("p", sram.p().base, PTile::BYTES);
  name_sram("alpha", sram.alpha(0), Sram::ALPHA_BYTES);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot)
      for (int columns = 0; columns < SETS; ++columns) {
        mbarrier_init(sram.full(slot, columns), BOXES ? 1 : SLOT_WARPS);
        mbarrier_init(sram.empty(slot, columns), 4);
      }
    mbarrier_init(sram.p_full(), 4);
    mbarrier_init(sram.p_empty(), OUTPUT_WARPS);
    mbarrier_publish();
  }
  barrier();
}

// Where a chunk of 16 bytes lies in a tile of panels.
template <class TileT>
DEVICE unsigned chunk_of(TileT tile, int row, int chunk) {
  return tile.panel(chunk / 8) + row * 128 + (chunk % 8 ^ row % 8) * CHUNK_BYTES;
}

#if PAGED && PAGE_BOX
#include "latent_page_boxes.cuh"
#elif PAGED
#include "latent_page_rows.cuh"
#else
#include "latent_boxes.cuh"
#endif
