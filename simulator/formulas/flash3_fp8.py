"""The counts of FlashAttention-3 in FP8 in closed form: V's transposition, and a launch like `flash3`'s on bytes."""

from __future__ import annotations

from functools import partial

from simulator.config import Config, padded
from simulator.counts import Book, Spec
from simulator.formulas.flash3 import count_draws
from simulator.formulas.walk import walk
from simulator.problem import Problem, Tile, round_up
from simulator.programs.flash3 import MBARRIERS, backwards
from simulator.programs.flash3_fp8 import KEYS, ONES, PANEL


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block: Q, the ring of K and of transposed V (whole panels of keys, and ones), the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    return rows * d + stages * (cols * d + (dv + ONES) * round_up(cols, PANEL)) + 4 * MBARRIERS


def flash3_fp8(book: Book, problem: Problem, tile: Tile, config: Config, *, lse: bool) -> None:
    """2Nd elements per head for the transposition, and 2Nd Tr + 2Nd for the rest. All but those of `out` take one byte.

    Boxes count whole, with their rows outside. Each consumer warp requests each scale. The LSE is written whether it
    was asked for or not. The ones behind V are read with V. A block writes them once, when it makes its mbarriers, and
    what comes before the first step counts nothing.
    """
    del lse
    p, t = problem, book.tensors
    heads, kv_heads, rows = p.batch * p.heads, p.batch * p.kv_heads, p.row_tiles(tile)
    book.tensor(Spec("lse", heads, p.len_q, 1, "float32", "output", vector=True))
    v_t = book.tensor(Spec("v_t", kv_heads, p.head_dim_v, round_up(p.len_kv, 16), p.dtype, "workspace"))

    blocks = kv_heads * -(-p.len_kv // KEYS) if p.len_q else 0
    turned = KEYS * padded(p.head_dim_v)
    book.launch("flash3_fp8_transpose", blocks, 4, config.heads_together, turned)
    if blocks:
        book.add("fetch_v", "v", hbm_read=t["v"].nbytes)
        book.add("transpose", "turned", sram_write=blocks * turned, sram_read=blocks * turned)
        book.add("store_v", "v_t", hbm_write=v_t.nbytes)
        book.distinct("v", "read", t["v"].nbytes)
        book.distinct("v_t", "write", v_t.nbytes)

    br, bc, panels = padded(tile.rows), padded(tile.cols), round_up(tile.cols, PANEL)
    d, dv = round_up(p.head_dim, PANEL), round_up(p.head_dim_v, PANEL)
    visited, readers = walk(p, tile), config.consumers
    book.launch(
        "flash3_fp8",
        rows * heads,
        config.warps,
        config.heads_together,
        sram_bytes(p, tile, config.stages),
        partial(backwards, p, tile),
    )
    tiles, pairs = heads * rows, heads * visited.pairs
    count_draws(book, config, tiles)
    book.add("load_q", "q", hbm_read=tiles * tile.rows * d, sram_write=tiles * br * d)
    book.add("load_q", "q_scale", hbm_read=tiles * 16 * readers)
    book.add("load_k", "k", hbm_read=pairs * tile.cols * d, sram_write=pairs * bc * d)
    book.add("load_k", "k_scale", hbm_read=pairs * 16 * readers)
    book.add("scores", "q", sram_read=pairs * br * d)
    book.add("scores", "k", sram_read=pairs * readers * bc * d)
    book.add("load_v", "v_t", hbm_read=pairs * dv * panels, sram_write=pairs * dv * panels)
    book.add("load_v", "v_scale", hbm_read=pairs * 16 * readers)
    book.add("output", "v_t", sram_read=pairs * readers * (dv + ONES) * bc)
    book.add("store_o", "out", hbm_write=t["out"].nbytes)
    book.add("store_lse", "lse", hbm_write=t["lse"].nbytes)

    seen = -(-visited.distinct_keys // tile.cols)  # key tiles that any row sees
    book.distinct("q", "read", t["q"].nbytes)
    book.distinct("q_scale", "read", 4 * tiles)
    book.distinct("k", "read", kv_heads * visited.distinct_keys * t["k"].row_bytes)
    book.distinct("k_scale", "read", 4 * kv_heads * seen)
    book.distinct(
        "v_t", "read", kv_heads * p.head_dim_v * min(seen * tile.cols, v_t.cols - p.len_kv + visited.distinct_keys)
    )
    book.distinct("v_scale", "read", 4 * kv_heads * seen)
    book.distinct("out", "write", t["out"].nbytes)
    book.distinct("lse", "write", t["lse"].nbytes)

    square, column, wide = tile.rows * tile.cols, tile.rows, tile.rows * dv
    passes = 3 + (p.scale != 1.0)  # scale, the operands' scales, maximum, difference
    exact = p.exact_lse * (square + 2 * column)  # the sum of P before it is rounded
    book.compute(
        matmul=pairs * 2 * br * bc * (d + dv + ONES),
        other=pairs * (passes * square + 5 * column + 3 * wide + 1 + exact) + tiles * (wide + 3 * column),
        exp=pairs * (square + column),
    )
