"""The counts of FlashAttention-1 in closed form."""

from __future__ import annotations

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.problem import Problem, Tile
from simulator.programs.flash1 import CHUNK


def flash1(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 1 of 2205.14135 as printed.

    Per head it moves 2Nd + 3Nd Tc + 4N Tc elements, after Nd + 2N for the initial O, l and m.
    """
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows, w = p.batch * p.heads, p.row_tiles(tile), config.warps
    if lse:
        book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    o = book.tensor(Spec("o", heads, p.len_q, p.head_dim_v, "float32", "workspace"))
    for name in ("l", "m"):
        book.tensor(Spec(name, heads, p.len_q, 1, "float32", "workspace", vector=True))
    vector = book.tensors["l"].nbytes
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    q_tile, k_tile, v_tile, column = br * d * es, bc * d * es, bc * dv * es, br * 4
    sram_peak = q_tile + k_tile + v_tile + w * column * (min(dv, CHUNK) + 2) + 2 * column
    book.launch("flash1", heads if rows else 0, w, config.heads_together, sram_peak)
    if not rows:
        return

    outer = max(1, p.key_tiles(tile))  # without keys there still is one tile, which is empty
    pairs, chunks = heads * outer * rows, -(-dv // CHUNK)
    book.add("init", "o", hbm_write=o.nbytes)
    book.add("init", "l", hbm_write=vector)
    book.add("init", "m", hbm_write=vector)
    for name, size in (("k", k_tile), ("v", v_tile)):
        loaded = heads * p.len_kv * t[name].row_bytes
        book.add(f"load_{name}", name, hbm_read=loaded, sram_write=heads * outer * size)
        book.distinct(name, "read", t[name].nbytes)
    book.add("load_q", "q", hbm_read=outer * t["q"].nbytes, sram_write=pairs * q_tile)
    book.add("scores", "q", sram_read=pairs * w * q_tile)
    book.add("scores", "k", sram_read=pairs * k_tile)
    book.add("row_max", "row_max", sram_write=pairs * w * column, sram_read=pairs * w * w * column)
    book.add("row_sum", "row_sum", sram_write=pairs * w * column)
    book.add("stats", "row_max", sram_read=pairs * w * column)
    book.add("stats", "row_sum", sram_read=pairs * w * column)
    for name in ("l", "m"):
        book.add("stats", name, hbm_read=outer * vector, hbm_write=outer * vector)
    for name in ("a", "b"):
        book.add("stats", name, sram_write=pairs * column)
        book.add("update_o", name, sram_read=pairs * chunks * column)
    book.add("output", "v", sram_read=pairs * v_tile)
    book.add("output", "partial_o", sram_write=pairs * w * column * dv)
    book.add("update_o", "partial_o", sram_read=pairs * w * column * dv)
    book.add("update_o", "o", hbm_read=outer * o.nbytes, hbm_write=(outer - 1) * o.nbytes)
    book.add("update_o", "out", hbm_write=t["out"].nbytes)
    for name in ("q", "o", "l", "m"):
        book.distinct(name, "read", book.tensors[name].nbytes)
    for name in ("o", "l", "m", "out"):
        book.distinct(name, "write", book.tensors[name].nbytes)
    if lse:
        book.add("stats", "lse", hbm_write=vector)
        book.distinct("lse", "write", vector)

    square = tile.rows * tile.cols
    passes = 3 + (p.scale != 1.0)  # scale, maximum, difference, sum
    book.compute(
        matmul=pairs * 2 * br * bc * (d + dv),
        other=pairs * (passes * square + 9 * tile.rows + 3 * tile.rows * p.head_dim_v)
        + lse * heads * rows * 2 * tile.rows,
        exp=pairs * (square + 2 * tile.rows),
    )
