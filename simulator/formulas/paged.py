"""The counts of paged attention in closed form: those of flash_decoding, and what is read of block table and lengths."""

from __future__ import annotations

from math import gcd

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book
from simulator.formulas.flash_decoding import count_decoding
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding import Splits


def paged(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request and KV head: what flash_decoding moves, and 4 bytes of the block table for each page that a warp's keys of a
    tile touch. With pages of one key those are 4 bytes a key."""
    count_decoding(book, "paged", problem, tile, config, lse=lse)
    p, size, cols = problem, problem.page_size or 1, tile.cols
    share, heads, n = -(-padded(cols) // config.readers), p.batch * p.kv_heads, p.len_kv

    def entries(j: int) -> int:
        """What is looked up for tile j."""
        end = min((j + 1) * cols, n)
        firsts = np.arange(j * cols, end, share, dtype=np.int64)
        return int(((np.minimum(firsts + share, end) - 1) // size - firsts // size + 1).sum())

    whole, period = (
        n // cols,
        size // gcd(cols, size),
    )  # after so many tiles, pages and tiles lie to each other as before
    before = np.cumsum([0, *(entries(j) for j in range(min(whole, period)))])
    spans, first, last = Splits(p, tile, dict(config.constants)["RUN"]).spans(), n, 0

    def up_to(tiles: np.ndarray) -> np.ndarray:
        """What is looked up for so many whole tiles."""
        return tiles // period * before[-1] + before[tiles % period] if whole >= period else before[tiles]

    for _, begin, stop in spans:
        begin, stop = begin[begin < stop], stop[begin < stop]
        if not len(begin):
            continue
        looked = int((up_to(np.minimum(stop, whole)) - up_to(np.minimum(begin, whole))).sum())
        looked += int((stop > whole).sum()) * (entries(whole) if n % cols else 0)
        book.add("load_k", "block_table", hbm_read=4 * heads * looked)
        first, last = min(first, int(begin.min()) * cols), max(last, min(int(stop.max()) * cols, n))
    if first < last:
        book.distinct("block_table", "read", 4 * ((last - 1) // size - first // size + 1))
