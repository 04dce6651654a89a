"""The counts of append_kv in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book
from simulator.problem import Problem, Tile


def append_kv(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """8 bytes of slot_mapping for each token and head. Of each token that has a slot its rows are read once and written once, and
    of a pool of 8 bits its two scales."""
    del lse
    p, t = problem, book.tensors
    blocks, rows = p.kv_heads * p.row_tiles(tile), p.kv_heads * p.len_kv
    book.launch("append_kv", blocks, config.warps, config.heads_together)
    if not blocks:
        return
    book.add("load_slots", "slot_mapping", hbm_read=p.kv_heads * t["slot_mapping"].nbytes)
    book.distinct("slot_mapping", "read", t["slot_mapping"].nbytes)
    for name, width in (("k", p.head_dim), ("v", p.head_dim_v)):
        book.add(f"load_{name}", name, hbm_read=rows * t[name].row_bytes)
        book.distinct(name, "read", rows * t[name].row_bytes)
        for into in (f"{name}_pool", f"{name}_scale"):
            if into in t:
                book.add(f"store_{name}", into, hbm_write=rows * t[into].row_bytes)
                book.distinct(into, "write", rows * t[into].row_bytes)
        if p.quantized:  # sizes, their maximum, quotients, rounding; of each row three for its scale
            book.compute(other=blocks * tile.rows * (4 * width + 3))
