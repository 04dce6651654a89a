"""The counts of standard attention's backward pass in closed form, launch by launch."""

from __future__ import annotations

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.problem import Problem, Tile
from simulator.programs.dropout import of_kept
from simulator.programs.standard import ROWS


def standard_backward(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 3 of 2205.14135, tiled. Its compulsory traffic is 7N^2 + 8Nd elements per head.

    The launch before it, which computes P again, has N^2 + 2Nd + N more, and D reads 2Nd.
    """
    del lse
    p, heads = problem, problem.batch * problem.heads
    for name, dtype in (("p", "float32"), ("dp", "float32"), ("ds", p.dtype)):
        book.tensor(Spec(name, heads, p.len_q, p.len_kv, dtype, "workspace"))
    square = tile.rows * tile.cols
    pairs = _square(book, problem, tile, config, "p", ("load_q", "q"), ("load_k", "k"), "scores", p.head_dim)
    if pairs:
        book.add("load_q", "lse", hbm_read=p.key_tiles(tile) * book.tensors["lse"].nbytes)
        book.distinct("lse", "read", book.tensors["lse"].nbytes)
        book.compute(other=pairs * square * (1 + (p.scale != 1.0)), exp=pairs * square)
    _columns(book, problem, tile, config, "dv", ("load_p", "p"), ("load_do", "dout"), p.head_dim_v, of_kept(1.0, p))
    _square(book, problem, tile, config, "dp", ("load_do", "dout"), ("load_v", "v"), "dp", p.head_dim_v)
    _ds(book, problem, config)
    _dq(book, problem, tile, config)
    _columns(book, problem, tile, config, "dk", ("load_ds", "ds"), ("load_q", "q"), p.head_dim, of_kept(p.scale, p))


def _square(
    book: Book, p: Problem, tile: Tile, config: Config, to: str, left: tuple[str, str], right: tuple[str, str], step: str,
    dim: int,
) -> int:  # fmt: skip
    """A launch with one block per tile of P or dP. Returns the number of tiles."""
    es, t = p.itemsize, book.tensors
    heads, rows, cols = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    br, bc, d = padded(tile.rows), padded(tile.cols), padded(dim)
    pairs = heads * rows * cols
    book.launch(f"standard_backward_{to}", pairs, config.warps, config.heads_together, (br + bc) * d * es)
    if not pairs:
        return 0
    (load_left, x), (load_right, y) = left, right
    book.add(load_left, x, hbm_read=cols * t[x].nbytes, sram_write=pairs * br * d * es)
    book.add(load_right, y, hbm_read=rows * heads * p.len_kv * t[y].row_bytes, sram_write=pairs * bc * d * es)
    book.add(step, x, sram_read=pairs * br * d * es)
    book.add(step, y, sram_read=pairs * config.warps * bc * d * es)
    book.add(f"store_{to}", to, hbm_write=t[to].nbytes)
    for name, way in ((x, "read"), (y, "read"), (to, "write")):
        book.distinct(name, way, t[name].nbytes)
    book.compute(matmul=pairs * 2 * br * bc * d)
    return pairs


def _columns(
    book: Book, p: Problem, tile: Tile, config: Config, to: str, left: tuple[str, str], right: tuple[str, str], dim: int,
    factor: float,
) -> None:  # fmt: skip
    """dV or dK: one block per tile of keys and KV head goes over all queries of the group's heads."""
    es, t = p.itemsize, book.tensors
    heads, rows, cols = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    br, bc, d = padded(tile.rows), padded(tile.cols), padded(dim)
    blocks, pairs = p.batch * p.kv_heads * cols, heads * rows * cols
    sram = (br * bc + br * d) * es if rows else 0
    book.launch(f"standard_backward_{to}", blocks, config.warps, config.heads_together, sram)
    if not blocks:
        return
    (load_left, x), (load_right, y) = left, right
    if x == "p":
        count_state(book, p, load_left, blocks=blocks, warps=config.warps)
    if pairs:
        book.add(load_left, x, hbm_read=t[x].nbytes, sram_write=pairs * br * bc * es)
        book.add(load_right, y, hbm_read=cols * t[y].nbytes, sram_write=pairs * br * d * es)
        book.add(to, x, sram_read=pairs * br * bc * es)
        book.add(to, y, sram_read=pairs * config.warps * br * d * es)
        book.distinct(x, "read", t[x].nbytes)
        book.distinct(y, "read", t[y].nbytes)
    book.add(f"store_{to}", to, hbm_write=t[to].nbytes)
    book.distinct(to, "write", t[to].nbytes)
    book.compute(matmul=pairs * 2 * br * bc * d, other=(factor != 1.0) * blocks * tile.cols * dim)


def _ds(book: Book, p: Problem, config: Config) -> None:
    """dS = P (dP - D), row by row."""
    t, blocks = book.tensors, p.batch * p.heads * -(-p.len_q // ROWS)
    book.launch("standard_backward_ds", blocks, ROWS, config.heads_together)
    if not blocks:
        return
    for step, name in (("delta", "dout"), ("delta", "out"), ("store_ds", "p"), ("store_ds", "dp")):
        book.add(step, name, hbm_read=t[name].nbytes)
        book.distinct(name, "read", t[name].nbytes)
    if p.dlse:
        book.add("delta", "dlse", hbm_read=t["dlse"].nbytes)
        book.distinct("dlse", "read", t["dlse"].nbytes)
    book.add("store_ds", "ds", hbm_write=t["ds"].nbytes)
    book.distinct("ds", "write", t["ds"].nbytes)
    count_state(book, p, "store_ds", blocks=blocks, warps=ROWS)
    book.compute(other=blocks * ROWS * (2 * (p.head_dim_v + p.len_kv) + bool(p.dropout) + p.dlse))


def _dq(book: Book, p: Problem, tile: Tile, config: Config) -> None:
    """dQ = scale dS K, with one block per row tile that goes over all key tiles."""
    es, t = p.itemsize, book.tensors
    heads, rows, cols = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    br, bc, d = padded(tile.rows), padded(tile.cols), padded(p.head_dim)
    pairs, sram = heads * rows * cols, (br * bc + bc * d) * es if cols else 0
    book.launch("standard_backward_dq", heads * rows, config.warps, config.heads_together, sram)
    if not rows:
        return
    if cols:
        book.add("load_ds", "ds", hbm_read=t["ds"].nbytes, sram_write=pairs * br * bc * es)
        book.add("load_k", "k", hbm_read=rows * heads * p.len_kv * t["k"].row_bytes, sram_write=pairs * bc * d * es)
        book.add("dq", "ds", sram_read=pairs * br * bc * es)
        book.add("dq", "k", sram_read=pairs * config.warps * bc * d * es)
        book.distinct("ds", "read", t["ds"].nbytes)
        book.distinct("k", "read", t["k"].nbytes)
    book.add("store_dq", "dq", hbm_write=t["dq"].nbytes)
    book.distinct("dq", "write", t["dq"].nbytes)
    book.compute(matmul=pairs * 2 * br * bc * d, other=heads * rows * tile.rows * p.head_dim)
