"""The counts of decoding's second rung in closed form."""

from __future__ import annotations

from simulator.config import Config
from simulator.counts import Book, Spec
from simulator.formulas.flash_decoding_1 import count_keys, count_outputs, sram_bytes
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding_1 import row_tiles
from simulator.programs.flash_decoding_2 import chunks


def flash_decoding_2(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per KV head with n keys in c chunks and a group of G heads: cGd of Q, and 2nd of K and V for each tile of Br heads. A chunk
    writes G(d + 2) float32, which the second launch reads."""
    p, n, heads = problem, chunks(problem, tile), problem.batch * problem.heads
    axes = (("parts", n),)
    parts = [book.tensor(Spec("partial", heads, p.len_q, p.head_dim_v, "float32", "workspace", axes=axes, flat=True))]
    for name in ("partial_m", "partial_l"):
        parts.append(book.tensor(Spec(name, heads, p.len_q, 1, "float32", "workspace", axes=axes, vector=True)))
    blocks = p.batch * p.kv_heads * row_tiles(p, tile) * n
    book.launch("flash_decoding_2", blocks, 1, config.heads_together, sram_bytes(p, tile, config.stages), cols=n)
    count_keys(book, p, tile, n)
    for part in parts:
        book.add("store_partial", part.name, hbm_write=part.nbytes)
        book.distinct(part.name, "write", part.nbytes)

    rows = heads * p.len_q
    book.launch("flash_decoding_2_merge", rows, 1, config.heads_together)
    for part in parts:
        book.add("load_partial", part.name, hbm_read=part.nbytes)
        book.distinct(part.name, "read", part.nbytes)
    count_outputs(book, p, lse=lse)
    d = p.head_dim_v
    book.compute(other=rows * (n * (3 * d + 6) + d + 2 * lse), exp=2 * rows * n)
