"""The counts of copy_pages in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.problem import Problem, Tile


def copy_pages(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """8 bytes of pairs for each pair, head and warp. All rows of a page, and its scales if they are given, are read once and
    written once. `distinct` counts pages that are copied once each."""
    del tile, lse
    p, t = problem, book.tensors
    book.launch("copy_pages", p.kv_heads * p.len_q, config.warps, config.heads_together)
    if not p.len_q:
        return
    book.add("load_pair", "pairs", hbm_read=p.kv_heads * config.warps * t["pairs"].nbytes)
    book.distinct("pairs", "read", t["pairs"].nbytes)
    for name in "kv":
        for pool in (f"{name}_pool", f"{name}_scale"):
            if pool in t:
                moved = p.kv_heads * p.len_q * (p.page_size or 1) * t[pool].row_bytes
                book.add(f"load_{name}", pool, hbm_read=moved)
                book.add(f"store_{name}", pool, hbm_write=moved)
                book.distinct(pool, "read", moved)
                book.distinct(pool, "write", moved)
