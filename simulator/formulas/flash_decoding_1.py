"""The counts of decoding's first rung in closed form."""

from __future__ import annotations

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding_1 import row_tiles


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM per block: its queries, and the ring of K and V. Without keys there is no ring."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    ring = stages * padded(tile.cols) * (d + dv) if problem.len_kv else 0
    return (padded(tile.rows) * d + ring) * problem.itemsize


def flash_decoding_1(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """See `count_decoding`."""
    count_decoding(book, "flash_decoding_1", problem, tile, config, lse=lse)


def count_decoding(book: Book, launch: str, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Per KV head with n keys and a group of G heads: it reads Gd of Q, and 2nd of K and V for each tile of Br heads."""
    p, blocks = problem, problem.batch * problem.kv_heads * row_tiles(problem, tile)
    book.launch(launch, blocks, 1, config.heads_together, sram_bytes(p, tile, config.stages))
    count_keys(book, p, tile)
    count_outputs(book, p, lse=lse)
    output, column = tile.rows * p.head_dim_v, tile.rows
    book.compute(other=blocks * (output + 2 * column * lse))


def count_keys(book: Book, p: Problem, tile: Tile, chunks: int = 1) -> None:
    """The walk of all blocks over their keys. Of several chunks, each has blocks of its own, which read the queries again."""
    t, es, rows, cols = book.tensors, p.itemsize, padded(tile.rows), padded(tile.cols)
    tiles = p.batch * p.kv_heads * row_tiles(p, tile)
    visits, q_tile = tiles * p.key_tiles(tile), rows * padded(p.head_dim) * es
    book.add("load_q", "q", hbm_read=chunks * t["q"].nbytes, sram_write=chunks * tiles * q_tile)
    book.add("scores", "q", sram_read=visits * q_tile)
    book.distinct("q", "read", t["q"].nbytes)
    for name, load, use in (("k", "load_k", "scores"), ("v", "load_v", "output")):
        read, size = p.len_kv * t[name].row_bytes, cols * padded(t[name].cols) * es
        book.add(load, name, hbm_read=tiles * read, sram_write=visits * size)
        book.add(use, name, sram_read=visits * size)
        book.distinct(name, "read", p.batch * p.kv_heads * read * (tiles > 0))
    square, column = tile.rows * tile.cols, tile.rows
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=visits * 2 * rows * cols * (padded(p.head_dim) + padded(p.head_dim_v)),
        other=visits * (passes * square + 4 * column + tile.rows * p.head_dim_v),
        exp=visits * (square + column),
    )


def count_outputs(book: Book, p: Problem, *, lse: bool) -> None:
    """What is written of out, and of the LSE if that was asked for."""
    if lse:
        book.tensor(Spec("lse", p.batch * p.heads, p.len_q, 1, "float32", "output", vector=True))
    for step, name in (("store_o", "out"), *((("store_lse", "lse"),) if lse else ())):
        book.add(step, name, hbm_write=book.tensors[name].nbytes)
        book.distinct(name, "write", book.tensors[name].nbytes)
