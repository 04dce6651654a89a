"""Standard attention with the two-pass online softmax (Milakov and Gimelshein, arXiv 1805.02867) as its middle launch."""

from __future__ import annotations

from math import inf

from simulator.machine import HbmTensor, Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.standard import COLS, ROWS, configure, three_launches


def two_pass_softmax(m: Machine, s: HbmTensor, p: HbmTensor, lse: HbmTensor | None, problem: Problem) -> None:
    """Algorithm 3 of 1805.02867, row by row: maximum and sum in one pass, then the quotient."""
    for block in m.launch("online_softmax", rows=-(-problem.len_q // ROWS), warps=ROWS):
        i, chunks = block.i, range(-(-s.cols // COLS))
        block.step("online_pass")
        row_max, row_sum = block.full(ROWS, 1, -inf), block.full(ROWS, 1, 0.0)
        for c in chunks:
            x = block.fetch(s, i, ROWS, c, COLS, fill=-inf)
            new_max = block.maximum(row_max, x.max())
            row_sum = row_sum * block.exp(row_max - new_max.finite()) + block.exp(x - new_max.finite()).sum()
            row_max = new_max
        block.step("store_p")
        for c in chunks:
            e = block.exp(block.fetch(s, i, ROWS, c, COLS, fill=-inf) - row_max.finite())
            block.store(p, e / row_sum.nonzero(), i, ROWS, c, COLS)
        block.step("store_lse")
        if lse:
            block.store(lse, row_max + block.log(row_sum), i, ROWS)


@program(configure=configure)
def online_softmax(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor | None]:
    """`standard` with the two-pass online softmax: S is read twice, not three times. Shapes as in `standard`."""
    return three_launches(two_pass_softmax, m, q, k, v, problem, tile)


# -- the softmax of a vector: x is q of one row, the result is out of one row --------------------------------------


@program
def softmax_naive(m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 1 of 1805.02867: no maximum is subtracted, so exp overflows over 88. 2 loads and 1 store an element."""
    out = m.output("out")
    for block in m.launch("softmax_naive", warps=1):
        block.step("row_sum")
        total = block.full(1, 1, 0.0)
        for c in range(-(-q.cols // tile.cols)):
            total = total + block.exp(block.fetch(q, 0, 1, c, tile.cols)).sum()
        block.step("store")
        for c in range(-(-q.cols // tile.cols)):
            block.store(out, block.exp(block.fetch(q, 0, 1, c, tile.cols)) / total, 0, 1, c, tile.cols)
    return out


@program
def softmax_safe(m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 2 of 1805.02867: maximum, sum, quotient. 3 loads and 1 store an element."""
    out, chunks = m.output("out"), range(-(-q.cols // tile.cols))
    for block in m.launch("softmax_safe", warps=1):
        block.step("row_max")
        top = block.full(1, 1, -inf)
        for c in chunks:
            top = block.maximum(top, block.fetch(q, 0, 1, c, tile.cols).max())
        block.step("row_sum")
        total = block.full(1, 1, 0.0)
        for c in chunks:
            total = total + block.exp(block.fetch(q, 0, 1, c, tile.cols) - top).sum()
        block.step("store")
        for c in chunks:
            block.store(out, block.exp(block.fetch(q, 0, 1, c, tile.cols) - top) / total, 0, 1, c, tile.cols)
    return out


@program
def softmax_online(m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 3 of 1805.02867: the sum is rescaled whenever the maximum rises. 2 loads and 1 store an element."""
    out, chunks = m.output("out"), range(-(-q.cols // tile.cols))
    for block in m.launch("softmax_online", warps=1):
        block.step("online_pass")
        top, total = block.full(1, 1, -inf), block.full(1, 1, 0.0)
        for c in chunks:
            x = block.fetch(q, 0, 1, c, tile.cols)
            new_top = block.maximum(top, x.max())
            total = total * block.exp(top - new_top) + block.exp(x - new_top).sum()
            top = new_top
        block.step("store")
        for c in chunks:
            block.store(out, block.exp(block.fetch(q, 0, 1, c, tile.cols) - top) / total, 0, 1, c, tile.cols)
    return out


@program
def softmax_merge(m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Section 3.1 of 1805.02867: tiles find (m, l) by themselves, in any order, and the pairs are merged.

    One block a tile, twice: the first launch writes each tile's pair, the second merges all pairs and divides.
    """
    out, tiles = m.output("out"), -(-q.cols // tile.cols)
    tops, totals = (m.workspace(name, 1, rows=tiles, vector=True) for name in ("m", "l"))
    for block in m.launch("partial", cols=tiles, warps=1):
        block.step("partial")
        x = block.fetch(q, 0, 1, block.j, tile.cols)
        top = x.max()
        block.store(tops, top, block.j, 1)
        block.store(totals, block.exp(x - top).sum(), block.j, 1)
    for block in m.launch("merge", cols=tiles, warps=1):
        block.step("merge")
        top, total = block.full(1, 1, -inf), block.full(1, 1, 0.0)
        for c in range(tiles):
            tile_top, tile_total = block.fetch(tops, c, 1), block.fetch(totals, c, 1)
            new_top = block.maximum(top, tile_top)
            total = total * block.exp(top - new_top) + tile_total * block.exp(tile_top - new_top)
            top = new_top
        block.step("store")
        x = block.fetch(q, 0, 1, block.j, tile.cols)
        block.store(out, block.exp(x - top) / total, 0, 1, block.j, tile.cols)
    return out
