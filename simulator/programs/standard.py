"""Standard attention in three launches: S = scale Q K^T, P = softmax(S), O = P V. S and P lie in HBM."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.dropout import dropped, kept_sum, read_state
from simulator.tensors import HbmTensor

ROWS, COLS = 4, 128
"""In the softmax launch, a block takes 4 rows, one per warp. A warp takes 128 columns at a time, 16 bytes per lane."""


def scores(m: Machine, q: HbmTensor, k: HbmTensor, s: HbmTensor, problem: Problem, tile: Tile) -> None:
    """S = scale Q K^T in float32, masked with -inf. There is one block per tile of S, also for hidden tiles."""
    rows, cols = problem.row_tiles(tile), problem.key_tiles(tile)
    for block in m.launch("standard_scores", rows=rows, cols=cols, warps=m.config.warps):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        block.step("load_k")
        k_j = block.load(k, block.j, tile.cols)
        block.step("scores")
        s_ij = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
        block.step("mask")
        s_ij = block.mask(s_ij, block.i, block.j)
        block.step("store_s")
        block.store(s, s_ij, block.i, tile.rows, block.j, tile.cols)


def softmax(m: Machine, s: HbmTensor, p: HbmTensor, lse: HbmTensor | None, problem: Problem) -> None:
    """P = softmax(S), row by row. The safe softmax takes three passes: the maximum, the sum, the quotient."""
    for block in m.launch("standard_softmax", rows=-(-problem.len_q // ROWS), warps=ROWS):
        i, chunks = block.i, range(-(-s.cols // COLS))
        block.step("row_max")
        row_max = block.full(ROWS, 1, -inf)
        for c in chunks:
            row_max = block.maximum(row_max, block.fetch(s, i, ROWS, c, COLS, fill=-inf).max())
        block.step("row_sum")
        row_sum = block.full(ROWS, 1, 0.0)
        for c in chunks:
            row_sum = row_sum + block.exp(block.fetch(s, i, ROWS, c, COLS, fill=-inf) - row_max.finite()).sum()
        block.step("store_p")
        read_state(m, block, ROWS)
        total = kept_sum(row_sum, problem).nonzero()
        for c in chunks:
            e = block.exp(block.fetch(s, i, ROWS, c, COLS, fill=-inf) - row_max.finite())
            block.store(p, dropped(m, block, e / total, i, c, COLS), i, ROWS, c, COLS)
        block.step("store_lse")
        if lse:
            block.store(lse, row_max + block.log(row_sum), i, ROWS)


def output(m: Machine, p: HbmTensor, v: HbmTensor, out: HbmTensor, problem: Problem, tile: Tile) -> None:
    """O = P V, with one block per row tile that goes over all key tiles."""
    for block in m.launch("standard_output", rows=problem.row_tiles(tile), warps=m.config.warps):
        acc = block.full(tile.rows, v.cols, 0.0)
        for j in range(problem.key_tiles(tile)):
            block.step("load_p")
            p_ij = block.load(p, block.i, tile.rows, j, tile.cols)
            block.step("load_v")
            v_j = block.load(v, j, tile.cols)
            block.step("output")
            acc = block.matmul(p_ij, v_j, split=("rows", "none"), acc=acc)
        block.step("store_o")
        block.store(out, acc, block.i, tile.rows)


Softmax = Callable[[Machine, HbmTensor, HbmTensor, HbmTensor | None, Problem], None]


def three_launches(
    middle: Softmax, m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor | None]:
    """The scores launch, the `middle` launch with its softmax, and the output launch. Returns (out, lse or None)."""
    out, lse = m.output("out"), m.output("lse") if m.lse else None
    s = m.workspace("s", problem.len_kv)
    p = m.workspace("p", problem.len_kv, problem.dtype)
    scores(m, q, k, s, problem, tile)
    middle(m, s, p, lse, problem)
    output(m, p, v, out, problem, tile)
    return out, lse


@program
def standard(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor | None]:
    """Algorithm 0 of FlashAttention (arXiv 2205.14135), as tiled kernels do it.

    q (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); out like q; lse (batch, heads, len_q) float32 if
    asked for. S is float32 and P has the storage dtype. Both are (batch, heads, len_q, len_kv) in HBM.
    """
    return three_launches(softmax, m, q, k, v, problem, tile)
