"""Latent attention over a cache in pages, with requests of any lengths: to `mla` what `paged` is to `flash_decoding`."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.latent import PAGED_LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import mla
from simulator.tensors import HbmTensor


@program(operation=PAGED_LATENT)
def mla_paged(
    m: Machine, q: HbmTensor, latent: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), over pages, one request: see `mla.attend`.

    q (batch, heads, len_q, 576); latent (pages, 1, page_size, 576); block_table (batch, pages of a request) int32; seq_lens (batch)
    int32; out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32. Each block goes through the lengths of all requests,
    so it knows which units of work there are, and takes every n-th. Each warp looks up the pages of the rows that it fetches.
    """
    return mla.attend(m, "mla_paged", q, m.paged(latent, block_table), problem, tile)
