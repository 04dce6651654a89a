"""Latent attention on Hopper over a cache in pages: to `mla_hopper` what `mla_paged` is to `mla`."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.latent import PAGED_LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import mla_hopper
from simulator.programs.flash3 import PANEL
from simulator.tensors import HbmTensor


@program(operation=PAGED_LATENT)
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
