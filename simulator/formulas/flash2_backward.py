"""The counts of FlashAttention-2's backward pass in closed form, launch by launch."""

from __future__ import annotations

from functools import partial

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.formulas.walk import Walk, walk
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash2_backward import SINK_ROWS, warp_grid


def sram_bytes(problem: Problem, tile: Tile, stages: int = 1) -> int:
    """SRAM bytes per block: K_j and V_j, the stages of Q_i and dO_i, and P and dS."""
    d, dv, rows, cols = padded(problem.head_dim), padded(problem.head_dim_v), padded(tile.rows), padded(tile.cols)
    return ((cols + stages * rows) * (d + dv) + 2 * cols * rows) * problem.itemsize


def flash2_backward(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 2 of 2307.08691, in elements per query head.

    The main launch reads 2Nd + Tc (2Nd + 2N), where each warp along the keys reads the 2N, adds Tc Nd by atomics, and
    writes 2Nd. The first launch reads 2Nd for D, and writes N of it and Nd zeros. The last one converts: it reads and
    writes Nd.
    """
    del lse
    count_before(book, problem, tile)
    count_main(book, "flash2_backward", problem, tile, config)
    count_convert(book, "flash2_backward", tile.rows)
    count_sinks(book, "flash2_backward", problem)


def count_before(book: Book, problem: Problem, tile: Tile) -> None:
    """The workspaces, and the first launch."""
    heads = problem.batch * problem.heads
    book.tensor(Spec("delta", heads, problem.len_q, 1, "float32", "workspace", vector=True))
    sums = round_up(problem.len_q, tile.rows), padded(problem.head_dim)
    book.tensor(Spec("dq_sum", heads, *sums, "float32", "workspace", flat=True))
    count_delta(book, "flash2_backward", problem, tile.rows)


def count_main(book: Book, name: str, problem: Problem, tile: Tile, config: Config) -> Walk:
    """The main launch, of this name. Returns what its key tiles visit."""
    p, es, t = problem, problem.itemsize, book.tensors
    along, across = warp_grid(problem, tile)
    heads, kv_heads, keys = p.batch * p.heads, p.batch * p.kv_heads, p.key_tiles(tile)
    dq_sum = t["dq_sum"]

    # a key tile sees those queries that a row tile of the transposed problem sees as keys
    seen = walk(p.transposed, Tile(tile.cols, tile.rows))
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    pairs, rows, visits = heads * seen.pairs, heads * seen.keys, kv_heads * keys
    peak = sram_bytes(p, tile, config.stages if seen.pairs else 0)
    visible = partial(p.transposed.tiles_of_row, tile=Tile(tile.cols, tile.rows))
    book.launch(name, visits, config.warps, config.heads_together, peak, visible, along="len_kv")
    count_state(book, p, "load_kv", blocks=visits, warps=config.warps)
    for x, width in (("k", d), ("v", dv)):
        if visits:
            book.add("load_kv", x, hbm_read=t[x].nbytes, sram_write=visits * bc * width * es)
            book.distinct(x, "read", t[x].nbytes)
            book.add("store_dkv", f"d{x}", hbm_write=t[f"d{x}"].nbytes)
            book.distinct(f"d{x}", "write", t[f"d{x}"].nbytes)
    for step, x, vector, width in (("load_q", "q", "lse", d), ("load_do", "dout", "delta", dv)):
        book.add(step, x, hbm_read=rows * t[x].row_bytes, sram_write=pairs * br * width * es)
        book.add(step, vector, hbm_read=along * rows * 4)
        book.distinct(x, "read", heads * seen.distinct_keys * t[x].row_bytes)
        book.distinct(vector, "read", heads * seen.distinct_keys * 4)
    for step, x in (("exp", "p"), ("ds", "ds")):
        book.add(step, x, sram_write=pairs * bc * br * es)
    for step, left, right, sides in (
        ("scores", "k", "q", (bc * d, br * d)),
        ("dp", "v", "dout", (bc * dv, br * dv)),
        ("dv", "p", "dout", (bc * br, br * dv)),
        ("dk", "ds", "q", (bc * br, br * d)),
        ("dq", "ds", "k", (bc * br, bc * d)),
    ):
        book.add(step, left, sram_read=pairs * across * sides[0] * es)
        book.add(step, right, sram_read=pairs * along * sides[1] * es)
    book.add("dq", "dq_sum", hbm_atomic=pairs * tile.rows * dq_sum.row_bytes)
    book.distinct("dq_sum", "write", heads * round_up(seen.distinct_keys, tile.rows) * dq_sum.row_bytes)
    square = tile.rows * tile.cols
    book.compute(
        matmul=pairs * 2 * br * bc * (3 * d + 2 * dv),
        other=pairs * ((3 + (p.scale != 1.0) + 8 * (p.soft_cap is not None)) * square + bool(p.dropout) * tile.rows)
        + visits * tile.cols * (p.head_dim + bool(p.dropout) * p.head_dim_v),
        exp=pairs * square,
    )
    return seen


def count_delta(book: Book, name: str, problem: Problem, rows: int, *, zeros: bool = True) -> None:
    """The first launch: D = rowsum(dO * O), and `zeros` for the sums of dQ if there are any, with so many `rows` per block."""
    p, t = problem, book.tensors
    covered = t["dq_sum"] if zeros and "dq_sum" in t else t["out"]
    blocks = t["out"].heads * -(-covered.rows // rows)
    together = book.config.heads_together if book.config else 1
    across = 0 if covered.flat else rows
    book.launch(f"{name}_delta", blocks, 4, together, along="delta", across=across)
    if not blocks:
        return
    for x in ("dout", "out"):
        book.add("delta", x, hbm_read=t[x].nbytes)
        book.distinct(x, "read", t[x].nbytes)
    if p.dlse:
        book.add("delta", "dlse", hbm_read=t["dlse"].nbytes)
        book.distinct("dlse", "read", t["dlse"].nbytes)
    book.add("delta", "delta", hbm_write=t["delta"].nbytes)
    book.distinct("delta", "write", t["delta"].nbytes)
    if covered.name == "dq_sum":
        book.add("zero_dq", "dq_sum", hbm_write=t["dq_sum"].nbytes)
        book.distinct("dq_sum", "write", t["dq_sum"].nbytes)
    book.compute(other=blocks * rows * (2 * p.head_dim_v + p.dlse))


def count_convert(book: Book, name: str, rows: int) -> None:
    """The last launch: dQ from the sums, with so many `rows` per block."""
    t = book.tensors
    blocks = t["dq_sum"].heads * -(-t["dq_sum"].rows // rows)
    together = book.config.heads_together if book.config else 1
    book.launch(f"{name}_convert", blocks, 4, together, along="convert_dq")
    if blocks:
        book.add("convert_dq", "dq_sum", hbm_read=t["dq_sum"].nbytes)
        book.add("convert_dq", "dq", hbm_write=t["dq"].nbytes)
        book.distinct("dq_sum", "read", t["dq_sum"].nbytes)
        book.distinct("dq", "write", t["dq"].nbytes)
        book.compute(other=blocks * rows * t["dq_sum"].cols)


def count_sinks(book: Book, name: str, problem: Problem) -> None:
    """The gradients of the sinks: a block per batch (or sequence) and head reads the LSE and D of its rows."""
    p, t = problem, book.tensors
    if not p.sinks:
        return
    heads, tiles = p.batch * p.heads, -(-p.len_q // SINK_ROWS)
    together = book.config.heads_together if book.config else 1
    book.launch(f"{name}_sinks", heads, 1, together, along="sequences_of_lengths")
    if p.len_q:  # else nobody asks for the sink
        book.add("dsinks", "sinks", hbm_read=4 * heads)
        book.distinct("sinks", "read", t["sinks"].nbytes)
    for x in ("lse", "delta"):
        book.add("dsinks", x, hbm_read=t[x].nbytes)
        book.distinct(x, "read", t[x].nbytes)
    book.add("dsinks", "dsinks", hbm_write=t["dsinks"].nbytes)
    book.distinct("dsinks", "write", t["dsinks"].nbytes)
    book.compute(other=heads * (3 * tiles + 1) * SINK_ROWS + heads, exp=heads * tiles * SINK_ROWS)
