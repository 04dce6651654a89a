"""The counts of paged attention in closed form: those of flash_decoding, and what is read of block table and lengths."""

from __future__ import annotations

from math import gcd

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book
from simulator.dtypes import Array
from simulator.formulas.flash_decoding import count_decoding, reached
from simulator.lanes import highest, least, lowest, most, total
from simulator.problem import Problem, Tile
from simulator.programs.drafts import first_tile
from simulator.programs.flash_decoding import Splits


def paged(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per request and KV head: what flash_decoding moves, and 4 bytes of the block table for each page that a warp's keys of a
    tile touch. With pages of one key those are 4 bytes a key."""
    count_decoding(book, "paged", problem, tile, config, lse=lse)
    splits = Splits(problem, tile, dict(config.constants)["RUN"])
    count_look_ups(book, "load_k", splits, config)
    if problem.drafts:
        count_drafts(book, "load_q", splits, config)


def count_drafts(book: Book, step: str, s: Splits, config: Config) -> None:
    """What the warps read of the mask of drafts: a word for each query of a row tile, in each run whose keys have a draft."""
    p, words, low, high, before = s.problem, 0, s.problem.len_q, 0, 0
    for inside, begin, stop in s.spans():
        drafted = np.maximum(begin, first_tile(p, s.tile))
        runs = np.maximum(stop - 1, 0) // s.chunk // s.run - drafted // s.chunk // s.run + 1
        row = np.arange(before, before + len(inside)).reshape(-1, *[1] * (inside.ndim - 1)) * s.tile.rows
        query, last = row // s.group, (row + inside - 1) // s.group
        seen = (begin < stop) & (drafted < stop)
        words += total(np.where(seen, runs * (last - query + 1), 0))
        low = least(low, lowest(np.where(seen, query, low)))
        high = most(high, highest(np.where(seen, last + 1, 0)))
        before += len(inside)
    book.add(step, "draft_mask", hbm_read=4 * p.batch * p.kv_heads * config.warps * words)
    book.distinct("draft_mask", "read", 4 * p.batch * most(0, high - low))


def count_look_ups(book: Book, step: str, s: Splits, config: Config) -> None:
    """What is read of the block table: an entry for each box, or for each page that a warp's keys of a tile touch."""
    p, size, cols = s.problem, s.problem.page_size or 1, s.tile.cols
    heads, n = p.batch * p.kv_heads, np.asarray(p.len_kv)
    for _, begin, stop in s.spans():
        ends = np.minimum(stop * cols, n)
        if config.page_box:
            looked = -(-ends // config.page_box) - begin * cols // config.page_box
        else:
            looked = entries(ends, size, cols, config.readers) - entries(begin * cols, size, cols, config.readers)
        book.add(step, "block_table", hbm_read=4 * heads * total(looked))
    first, last = reached(s)
    book.distinct("block_table", "read", 4 * (first < last) * ((last - 1) // size - first // size + 1))


def entries(keys: Array, size: int, cols: int, warps: int) -> Array:
    """How many entries are looked up for so many first keys: whole tiles, or all.

    Each warp looks one up for its share of a tile, and one more wherever a page begins inside of it.
    """
    share = -(-padded(cols) // warps)
    shares = keys // cols * -(-cols // share) + -(-(keys % cols) // share)
    found = shares + (keys + size - 1) // size
    common = gcd(size, cols)
    for start in range(0, cols, share):  # pages that begin where a share of each tile does
        if start % common == 0:
            page = start // common * pow(size // common, -1, cols // common) % (cols // common)
            before, apart = page * size, size // common * cols
            found = found - np.maximum(0, -(-(keys - before) // apart))
    return found
