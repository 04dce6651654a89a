"""The counts of FlashAttention-1's backward pass in closed form."""

from __future__ import annotations

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.dropout import count_state
from simulator.problem import Problem, Tile
from simulator.programs.flash2_backward import warp_grid


def sram_bytes(problem: Problem, tile: Tile) -> int:
    """SRAM bytes per block: K_j and V_j, Q_i, dO_i and O_i, P and dS, and D."""
    d, dv, rows, cols = padded(problem.head_dim), padded(problem.head_dim_v), padded(tile.rows), padded(tile.cols)
    return (cols * (d + dv) + rows * (d + 2 * dv) + 2 * cols * rows) * problem.itemsize + 4 * rows


def flash1_backward(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """Algorithm 4 of 2205.14135 as printed.

    Per head it moves 4Nd + 5Nd Tc + 2N Tc elements, after 3Nd for the initial dQ, dK and dV. Here one LSE stands for
    its l and m, and each warp along the keys reads it: so N Tc for each of these in place of 2N Tc.
    """
    del lse
    p, es, t = problem, problem.itemsize, book.tensors
    along, across = warp_grid(problem, tile)
    heads, kv_heads, rows = p.batch * p.heads, p.batch * p.kv_heads, p.row_tiles(tile)
    dq_sum = book.tensor(Spec("dq_sum", heads, p.len_q, p.head_dim, "float32", "workspace"))
    br, bc, d, dv = padded(tile.rows), padded(tile.cols), padded(p.head_dim), padded(p.head_dim_v)
    without = sram_bytes(p, tile) - br * (d + 2 * dv) * es
    book.launch(
        "flash1_backward", kv_heads, config.warps, config.heads_together, sram_bytes(p, tile) if rows else without
    )
    outer = max(1, p.key_tiles(tile))  # without keys there still is one tile, which is empty
    visits, pairs = kv_heads * outer, heads * outer * rows
    for name, width in (("k", d), ("v", dv)):
        book.add("init", f"d{name}", hbm_write=t[f"d{name}"].nbytes)
        book.add("load_kv", name, hbm_read=t[name].nbytes, sram_write=visits * bc * width * es)
        book.add("store_dkv", f"d{name}", hbm_write=t[f"d{name}"].nbytes)
        book.distinct(name, "read", t[name].nbytes)
        book.distinct(f"d{name}", "write", t[f"d{name}"].nbytes)
    count_state(book, p, "init", blocks=kv_heads, warps=config.warps)
    book.compute(other=visits * tile.cols * (p.head_dim + bool(p.dropout) * p.head_dim_v))
    if not rows:
        return

    book.add("init", "dq_sum", hbm_write=dq_sum.nbytes)
    for step, name, width in (("load_q", "q", d), ("load_do", "dout", dv), ("load_do", "out", dv)):
        book.add(step, name, hbm_read=outer * t[name].nbytes, sram_write=pairs * br * width * es)
        book.distinct(name, "read", t[name].nbytes)
    book.add("load_q", "lse", hbm_read=along * outer * t["lse"].nbytes)
    for name in ("dout", "out"):
        book.add("delta", name, sram_read=pairs * br * dv * es)
    if p.dlse:
        book.add("delta", "dlse", hbm_read=outer * t["dlse"].nbytes)
        book.distinct("dlse", "read", t["dlse"].nbytes)
    book.add("delta", "d", sram_write=pairs * br * 4)
    book.add("dp", "d", sram_read=pairs * along * br * 4)
    for step, name in (("exp", "p"), ("ds", "ds")):
        book.add(step, name, sram_write=pairs * bc * br * es)
    for step, left, right, sides in (
        ("scores", "k", "q", (bc * d, br * d)),
        ("dp", "v", "dout", (bc * dv, br * dv)),
        ("dv", "p", "dout", (bc * br, br * dv)),
        ("dk", "ds", "q", (bc * br, br * d)),
        ("dq", "ds", "k", (bc * br, bc * d)),
    ):
        book.add(step, left, sram_read=pairs * across * sides[0] * es)
        book.add(step, right, sram_read=pairs * along * sides[1] * es)
    book.add("update_dq", "dq_sum", hbm_read=outer * dq_sum.nbytes, hbm_write=(outer - 1) * dq_sum.nbytes)
    book.add("update_dq", "dq", hbm_write=t["dq"].nbytes)
    for tensor, ways in ((t["lse"], ("read",)), (dq_sum, ("read", "write")), (t["dq"], ("write",))):
        for way in ways:
            book.distinct(tensor.name, way, tensor.nbytes)
    square = tile.rows * tile.cols
    book.compute(
        matmul=pairs * 2 * br * bc * (3 * d + 2 * dv),
        other=pairs
        * ((3 + (p.scale != 1.0)) * square + tile.rows * (2 * (p.head_dim_v + p.head_dim) + bool(p.dropout) + p.dlse)),
        exp=pairs * square,
    )
