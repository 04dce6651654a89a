"""Latent attention over a cache in pages, with requests of any lengths: to `mla` what `paged` is to `flash_decoding`."""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.latent import PAGED_LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import mla
from simulator.tensors import HbmTensor


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As mla's, so that its bits are the same."""
    plain = mla.configure(problem, device, tile)
    return replace(plain, constants=(*plain.constants, ("PAGED", 1)))


@program(configure=configure, operation=PAGED_LATENT)
def mla_paged(
    m: Machine, q: HbmTensor, latent: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), over pages, one request: see `mla.attend`.

    q (batch, heads, len_q, 576); latent (pages, 1, page_size, 576); block_table (batch, pages of a request) int32; seq_lens (batch)
    int32; out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32. Each block goes through the lengths of all requests,
    so it knows which units of work there are, and takes every n-th. Each warp looks up the pages of the rows that it fetches.
    """
    return mla.attend(m, "mla_paged", q, m.paged(latent, block_table), problem, tile)


ABOUT = {
    "mla_paged": mla.ABOUT["mla"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of up to 64 heads.",
        "load_latent": "Look the pages of the next tile's rows up, and fetch the rows. They are fetched once, as K and as V.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""
