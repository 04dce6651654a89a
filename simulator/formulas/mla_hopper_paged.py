"""The counts of latent attention on Hopper over pages in closed form: those of mla_hopper, and what is read of block table and
lengths. From pages that aren't boxes, rows come in place of them."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.formulas.mla_hopper import count_hopper
from simulator.problem import Problem, Tile


def mla_hopper_paged(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request: what mla_hopper moves, and 4 bytes of the block table for each box, or for each page that a warp's rows of a
    tile touch."""
    count_hopper(book, "mla_hopper_paged", problem, tile, config, lse=lse)
