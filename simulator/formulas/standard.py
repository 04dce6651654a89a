"""The counts of standard attention in closed form, launch by launch."""

from __future__ import annotations

from collections.abc import Callable

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.problem import Problem, Tile
from simulator.programs.standard import COLS, ROWS


def scores(book: Book, problem: Problem, tile: Tile, config: Config) -> None:
    """S = scale Q K^T. Every tile of S loads its Q and its K."""
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows, cols = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    br, bc, d = padded(tile.rows), padded(tile.cols), padded(p.head_dim)
    q_tile, k_tile, pairs = br * d * es, bc * d * es, heads * rows * cols
    book.launch("standard_scores", pairs, config.warps, config.heads_together, q_tile + k_tile)
    if not pairs:
        return
    book.add("load_q", "q", hbm_read=cols * t["q"].nbytes, sram_write=pairs * q_tile)
    book.add("load_k", "k", hbm_read=rows * heads * p.len_kv * t["k"].row_bytes, sram_write=pairs * k_tile)
    book.add("scores", "q", sram_read=pairs * q_tile)
    book.add("scores", "k", sram_read=pairs * config.warps * k_tile)
    book.add("store_s", "s", hbm_write=t["s"].nbytes)
    for name, way in (("q", "read"), ("k", "read"), ("s", "write")):
        book.distinct(name, way, t[name].nbytes)
    book.compute(matmul=pairs * 2 * br * bc * d, other=(p.scale != 1.0) * pairs * tile.rows * tile.cols)


def row_softmax(book: Book, problem: Problem, config: Config, *, name: str, passes: dict[str, int], other: tuple[int, int],
                exp: tuple[int, int], lse: bool) -> None:  # fmt: skip
    """A softmax launch that reads S `passes[step]` times in each step, and writes P.

    `other` and `exp` are (per element, per chunk of a row): FLOPs, and exponentials.
    """
    p, t = problem, book.tensors
    blocks, chunks = p.batch * p.heads * -(-p.len_q // ROWS), -(-p.len_kv // COLS)
    book.launch(name, blocks, ROWS, config.heads_together)
    if not blocks:
        return
    for step, times in passes.items():
        book.add(step, "s", hbm_read=times * t["s"].nbytes)
    book.add("store_p", "p", hbm_write=t["p"].nbytes)
    book.distinct("s", "read", t["s"].nbytes)
    book.distinct("p", "write", t["p"].nbytes)
    if lse:
        book.add("store_lse", "lse", hbm_write=t["lse"].nbytes)
        book.distinct("lse", "write", t["lse"].nbytes)
    per_element, per_chunk = blocks * ROWS * p.len_kv, blocks * ROWS * chunks
    book.compute(
        other=other[0] * per_element + other[1] * per_chunk + 2 * lse * blocks * ROWS,
        exp=exp[0] * per_element + exp[1] * per_chunk,
    )


def safe_softmax(book: Book, problem: Problem, config: Config, *, lse: bool) -> None:
    """Three passes: 3 reads and 1 write per element of S."""
    passes = {"row_max": 1, "row_sum": 1, "store_p": 1}
    row_softmax(book, problem, config, name="standard_softmax", passes=passes, other=(5, 2), exp=(2, 0), lse=lse)
    blocks = problem.batch * problem.heads * -(-problem.len_q // ROWS)
    count_state(book, problem, "store_p", blocks=blocks, warps=ROWS)
    book.compute(other=bool(problem.dropout) * blocks * ROWS)


def output(book: Book, problem: Problem, tile: Tile, config: Config) -> None:
    """O = P V. Every row tile loads all of V."""
    p, es, t = problem, problem.itemsize, book.tensors
    heads, rows, cols = p.batch * p.heads, p.row_tiles(tile), p.key_tiles(tile)
    br, bc, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim_v)
    p_tile, v_tile, pairs = br * bc * es, bc * dv * es, heads * rows * cols
    book.launch("standard_output", heads * rows, config.warps, config.heads_together, p_tile + v_tile if cols else 0)
    if not rows:
        return
    if cols:
        book.add("load_p", "p", hbm_read=t["p"].nbytes, sram_write=pairs * p_tile)
        book.add("load_v", "v", hbm_read=rows * heads * p.len_kv * t["v"].row_bytes, sram_write=pairs * v_tile)
        book.add("output", "p", sram_read=pairs * p_tile)
        book.add("output", "v", sram_read=pairs * config.warps * v_tile)
        book.distinct("p", "read", t["p"].nbytes)
        book.distinct("v", "read", t["v"].nbytes)
    book.add("store_o", "out", hbm_write=t["out"].nbytes)
    book.distinct("out", "write", t["out"].nbytes)
    book.compute(matmul=pairs * 2 * br * bc * dv)


def three_launches(
    book: Book, problem: Problem, tile: Tile, config: Config, middle: Callable[..., None], *, lse: bool
) -> None:
    """The scores launch, the `middle` launch with its softmax, and the output launch."""
    p, heads = problem, problem.batch * problem.heads
    if lse:
        book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    book.tensor(Spec("s", heads, p.len_q, p.len_kv, "float32", "workspace"))
    book.tensor(Spec("p", heads, p.len_q, p.len_kv, p.dtype, "workspace"))
    scores(book, problem, tile, config)
    middle(book, problem, config, lse=lse)
    output(book, problem, tile, config)


def standard(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 0 of 2205.14135, tiled. Its compulsory traffic is 4N^2 + 4Nd elements per head."""
    three_launches(book, problem, tile, config, safe_softmax, lse=lse)
