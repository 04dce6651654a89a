"""The counts of paged attention's first rung in closed form: those of `flash_decoding_1`, and what is read of the block table."""

from __future__ import annotations

import numpy as np

from simulator.config import Config
from simulator.counts import Book
from simulator.formulas.flash_decoding_1 import count_decoding
from simulator.formulas.paged import entries
from simulator.lanes import total
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding_1 import row_tiles


def paged_1(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request and KV head: what flash_decoding_1 moves, and 4 bytes of the block table for each page that a tile's keys touch.

    A block also reads the length of its request, 4 bytes. That is counted with all requests (`simulator.ragged`).
    """
    p, size = problem, problem.page_size or 1
    count_decoding(book, "paged_1", p, tile, config, lse=lse)
    blocks = p.batch * p.kv_heads * row_tiles(p, tile)
    looked_up = total(entries(np.asarray(p.len_kv)[None], size, tile.cols, 1))  # a row of tiles
    book.add("load_k", "block_table", hbm_read=4 * blocks * looked_up)
    book.distinct("block_table", "read", 4 * -(-p.len_kv // size) * (blocks > 0))
