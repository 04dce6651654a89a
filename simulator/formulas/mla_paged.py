"""The counts of latent attention over pages in closed form: those of mla, and what is read of block table and lengths."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.formulas.mla import count_latent
from simulator.formulas.paged import count_look_ups
from simulator.problem import Problem, Tile
from simulator.programs.mla import splits


def mla_paged(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request: what mla moves, and 4 bytes of the block table for each page that a warp's rows of a tile touch."""
    count_latent(book, "mla_paged", problem, tile, config, lse=lse)
    count_look_ups(book, "load_latent", splits(problem, tile), config)
