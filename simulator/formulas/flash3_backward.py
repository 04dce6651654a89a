"""The counts of the backward pass for Hopper in closed form, launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simulator.config import WORK, Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.formulas.flash2_backward import count_convert, count_delta, count_sinks
from simulator.formulas.flash3 import count_counter
from simulator.formulas.walk import Walk, walk
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward import PART_ROWS, listeners, mbarriers, warpgroups, work_bytes


def sram_bytes(problem: Problem, tile: Tile, stages: int, *, in_turn: bool = False) -> int:
    """SRAM bytes per block: K_j and V_j, the stages of Q_i and dO_i with LSE and D, two buffers of dS, the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    tiles = (cols + stages * rows) * (d + dv) + 2 * cols * round_up(tile.rows, PANEL)
    return tiles * problem.itemsize + 4 * (2 * round_up(stages * tile.rows, 16) + mbarriers(problem, in_turn=in_turn))


def flash3_backward(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """The elements of FlashAttention-2's Algorithm 2. But TMA's boxes count whole, with their rows outside.

    P never passes through SRAM, dS is written once and read for dQ alone. LSE and D are requested once per visit. With parts of
    a group's heads, each loads the keys, and its sums of dK and dV pass through HBM.
    """
    del lse
    count_launches("flash3_backward", book, problem, tile, config)


def rung(name: str) -> Callable[..., None]:
    """The formula of a rung. All rungs move the same bytes, and the main launch has the rung's name."""

    def formula(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
        del lse
        count_launches(name, book, problem, tile, config)

    return formula


def count_launches(name: str, book: Book, problem: Problem, tile: Tile, config: Config) -> None:
    """All launches, of which the main one has this name. Key tiles add to dQ in any order."""
    seen = count_workspaces(book, problem, tile, config)
    count_delta(book, "flash3_backward", problem, tile.rows)
    count_main(name, book, problem, tile, config, seen)
    heads, width = problem.batch * problem.heads, book.tensors["dq_sum"].row_bytes
    book.add("dq", "dq_sum", hbm_atomic=heads * seen.pairs * tile.rows * width)
    book.distinct("dq_sum", "write", heads * round_up(seen.distinct_keys, tile.rows) * width)
    count_convert(book, "flash3_backward", tile.rows)
    count_after(book, problem, config)


def count_workspaces(book: Book, problem: Problem, tile: Tile, config: Config) -> Walk:
    """What lies in HBM beside inputs and outputs. Returns what the key tiles visit."""
    p, t, parts = problem, book.tensors, config.parts
    heads, kv_heads = p.batch * p.heads, p.batch * p.kv_heads
    book.tensor(Spec("delta", heads, p.len_q, 1, "float32", "workspace", vector=True))
    sums = round_up(p.len_q, tile.rows), round_up(p.head_dim, PANEL)
    book.tensor(Spec("dq_sum", heads, *sums, "float32", "workspace", flat=True))
    if parts > 1:
        for x in ("k", "v"):
            axes = (("parts", parts),)
            book.tensor(Spec(f"d{x}_parts", kv_heads, p.len_kv, t[x].cols, "float32", "workspace", axes=axes))
    # a key tile sees those queries that a row tile of the transposed problem sees as keys
    return walk(p.transposed, Tile(tile.cols, tile.rows))


def count_main(
    name: str, book: Book, problem: Problem, tile: Tile, config: Config, seen: Walk, *, in_turn: bool = False
) -> None:
    """The main launch, of this name, but for what its blocks do with a tile's dQ. `seen` is what its key tiles visit."""
    p, es, t, parts = problem, problem.itemsize, book.tensors, config.parts
    above, across = warpgroups(tile)
    heads, kv_heads, keys = p.batch * p.heads, p.batch * p.kv_heads, p.key_tiles(tile)
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    boxes, boxes_v = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    of_dq = round_up(tile.rows, PANEL)  # rows of dQ, which dS's panels have as columns
    pairs, rows, visits, readers = heads * seen.pairs, heads * seen.keys, kv_heads * keys * parts, config.readers
    visible = partial(p.transposed.tiles_of_row, tile=Tile(tile.cols, tile.rows))
    peak = sram_bytes(p, tile, config.stages, in_turn=in_turn)
    together, alike = config.heads_together, visible if parts == 1 else None
    book.launch(name, visits, config.warps, together, peak, alike, along="len_kv", cols=parts)
    count_counter(book, config, visits, "load_kv")
    if config.told:
        message = visits * work_bytes(p)
        book.add("load_kv", WORK, sram_write=message, sram_read=message * listeners(config))
    count_state(book, p, "load_kv", blocks=visits, warps=4 * readers)
    for name, width in (("k", boxes), ("v", boxes_v)):
        if visits:
            book.add("load_kv", name, hbm_read=visits * tile.cols * width * es, sram_write=visits * bc * width * es)
            book.distinct(name, "read", t[name].nbytes)
            stored = t[f"d{name}" if parts == 1 else f"d{name}_parts"]
            book.add("store_dkv", stored.name, hbm_write=stored.nbytes)
            book.distinct(stored.name, "write", stored.nbytes)
    outside = visits * tile.cols - kv_heads * parts * p.len_kv
    if p.lengths is not None:  # rows of the next sequence are cleared
        for load, name, cleared, width in (
            ("load_kv", "k", outside, boxes),
            ("load_kv", "v", outside, boxes_v),
            ("load_q", "q", pairs * tile.rows - rows, boxes),
            ("load_do", "dout", pairs * tile.rows - rows, boxes_v),
        ):
            book.add(load, name, sram_write=cleared * width * es)
    for load, use, name, vector, width in (
        ("load_q", "exp", "q", "lse", boxes),
        ("load_do", "load_do", "dout", "delta", boxes_v),
    ):
        book.add(load, name, hbm_read=pairs * tile.rows * width * es, sram_write=pairs * br * width * es)
        book.add(load, vector, hbm_read=rows * 4, sram_write=pairs * br * 4)
        book.add(use, vector, sram_read=pairs * 4 * readers * br * 4)
        book.distinct(name, "read", heads * seen.distinct_keys * t[name].row_bytes)
        book.distinct(vector, "read", heads * seen.distinct_keys * 4)
    book.add("ds", "ds", sram_write=pairs * bc * br * es)
    for step, left, right, sides in (
        ("scores", "k", "q", (bc * d, readers * br * d)),
        ("dp", "v", "dout", (bc * dv, readers * br * dv)),
        ("dv", "p", "dout", (0, readers * br * dv)),
        ("dk", "ds", "q", (0, readers * br * d)),
        ("dq", "ds", "k", (across * bc * of_dq, above * bc * boxes)),
    ):
        if sides[0]:
            book.add(step, left, sram_read=pairs * sides[0] * es)
        book.add(step, right, sram_read=pairs * sides[1] * es)
    square = tile.rows * tile.cols
    book.compute(
        matmul=pairs * 2 * bc * (2 * br * (d + dv) + of_dq * boxes),
        other=pairs * ((3 + (p.scale != 1.0)) * square + bool(p.dropout) * tile.rows)
        + visits * tile.cols * (p.head_dim + bool(p.dropout) * p.head_dim_v),
        exp=pairs * square,
    )


def count_after(book: Book, problem: Problem, config: Config) -> None:
    """The launches that add up parts and sinks."""
    count_parts(book, problem, config)
    count_sinks(book, "flash3_backward", problem)


def count_parts(book: Book, problem: Problem, config: Config) -> None:
    """The launch that adds up parts, if there are any: it reads each once, and writes dK and dV."""
    p, t, parts = problem, book.tensors, config.parts
    if parts == 1:
        return
    blocks = p.batch * p.kv_heads * -(-p.len_kv // PART_ROWS)
    book.launch("flash3_backward_parts", blocks, 4, config.heads_together, along="len_kv", across=PART_ROWS)
    if blocks:
        for x in ("dk", "dv"):
            book.add("add_parts", f"{x}_parts", hbm_read=t[f"{x}_parts"].nbytes)
            book.add("add_parts", x, hbm_write=t[x].nbytes)
            book.distinct(f"{x}_parts", "read", t[f"{x}_parts"].nbytes)
            book.distinct(x, "write", t[x].nbytes)
            book.compute(other=blocks * PART_ROWS * t[x].cols * (parts - 1))
