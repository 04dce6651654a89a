"""Latent attention on Hopper over a cache in pages: to `mla_hopper` what `mla_paged` is to `mla`."""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.latent import PAGED_LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import mla_hopper
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_paged import box_rows
from simulator.tensors import HbmTensor


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As mla_hopper's, so that its bits are the same. Where a page fills a tile, or a tile pages, TMA brings boxes."""
    plain = mla_hopper.configure(problem, device, tile)
    box = box_rows(problem, plain.tile)
    constants = (*plain.constants, ("PAGED", 1), *([("PAGE_BOX", box)] if box else []))
    return replace(plain, constants=constants)


@program(configure=configure, operation=PAGED_LATENT)
def mla_hopper_paged(
    m: Machine, q: HbmTensor, latent: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), on Hopper, over pages: see `mla_hopper.attend`.

    q (batch, heads, len_q, 576); latent (pages, 1, page_size, 576); block_table (batch, pages of a request) int32; seq_lens (batch)
    int32; out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32. A warp asks TMA for the boxes of a
    tile, or two warps fetch it, row by row.
    """
    panel = PANEL if m.config.page_box else None
    return mla_hopper.attend(m, "mla_hopper_paged", q, m.paged(latent, block_table), problem, tile, panel)


_MERGE = mla_hopper.ABOUT["mla_hopper_merge"]
ABOUT = {
    "mla_hopper_paged": mla_hopper.ABOUT["mla_hopper"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of up to 64 heads.",
        "load_latent": "Look the pages of the next tile up. TMA brings boxes of them, or warps fetch rows: once, as K and as V.",
    },
    "mla_hopper_paged_merge": _MERGE | {"merge": f"Look the request's length up. {_MERGE['merge']}"},
}
"""What each step is for, in a sentence or two: the player's words."""
