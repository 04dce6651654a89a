"""The softmax of a vector in four ways (Milakov and Gimelshein, arXiv 1805.02867). x and out are one row each.

Masked scores are -inf. A tile of them has the maximum -inf, which `finite()` makes a number that can be subtracted.
"""

from __future__ import annotations

from math import inf

from simulator.machine import Machine
from simulator.operations.softmax import SOFTMAX
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.tensors import HbmTensor


@program(operation=SOFTMAX)
def softmax_naive(m: Machine, x: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 1 of 1805.02867: no maximum is subtracted, so exp overflows above 88. 2 loads, 1 store per element."""
    out = m.output("out")
    for block in m.launch("softmax_naive", warps=1, of=x):
        block.step("row_sum")
        total = block.full(1, 1, 0.0)
        for c in range(-(-x.cols // tile.cols)):
            total = total + block.exp(block.fetch(x, 0, 1, c, tile.cols)).sum()
        block.step("store")
        for c in range(-(-x.cols // tile.cols)):
            block.store(out, block.exp(block.fetch(x, 0, 1, c, tile.cols)) / total, 0, 1, c, tile.cols)
    return out


@program(operation=SOFTMAX)
def softmax_safe(m: Machine, x: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 2 of 1805.02867: maximum, sum, quotient. 3 loads, 1 store per element."""
    out, chunks = m.output("out"), range(-(-x.cols // tile.cols))
    for block in m.launch("softmax_safe", warps=1, of=x):
        block.step("row_max")
        top = block.full(1, 1, -inf)
        for c in chunks:
            top = block.maximum(top, block.fetch(x, 0, 1, c, tile.cols).max())
        block.step("row_sum")
        total = block.full(1, 1, 0.0)
        for c in chunks:
            total = total + block.exp(block.fetch(x, 0, 1, c, tile.cols) - top).sum()
        block.step("store")
        for c in chunks:
            block.store(out, block.exp(block.fetch(x, 0, 1, c, tile.cols) - top) / total, 0, 1, c, tile.cols)
    return out


@program(operation=SOFTMAX)
def softmax_online(m: Machine, x: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Algorithm 3 of 1805.02867: the sum is rescaled whenever the maximum rises. 2 loads, 1 store per element."""
    out, chunks = m.output("out"), range(-(-x.cols // tile.cols))
    for block in m.launch("softmax_online", warps=1, of=x):
        block.step("online_pass")
        top, total = block.full(1, 1, -inf), block.full(1, 1, 0.0)
        for c in chunks:
            x_c = block.fetch(x, 0, 1, c, tile.cols)
            new_top = block.maximum(top, x_c.max())
            total = total * block.exp(top - new_top.finite()) + block.exp(x_c - new_top.finite()).sum()
            top = new_top
        block.step("store")
        for c in chunks:
            block.store(out, block.exp(block.fetch(x, 0, 1, c, tile.cols) - top) / total, 0, 1, c, tile.cols)
    return out


@program(operation=SOFTMAX)
def softmax_merge(m: Machine, x: HbmTensor, problem: Problem, tile: Tile) -> HbmTensor:
    """Section 3.1 of 1805.02867: each tile finds its own (m, l), in any order, and then the pairs are merged.

    Both launches have one block per tile. The first writes each tile's pair. The second merges all pairs and divides.
    """
    out, tiles = m.output("out"), -(-x.cols // tile.cols)
    tops, totals = (m.workspace(name, 1, rows=tiles, vector=True, of=x) for name in ("m", "l"))
    for block in m.launch("partial", cols=tiles, warps=1, of=x):
        block.step("partial")
        x_j = block.fetch(x, 0, 1, block.j, tile.cols)
        top = x_j.max()
        block.store(tops, top, block.j, 1)
        block.store(totals, block.exp(x_j - top.finite()).sum(), block.j, 1)
    for block in m.launch("merge", cols=tiles, warps=1, of=x):
        block.step("merge")
        top, total = block.full(1, 1, -inf), block.full(1, 1, 0.0)
        for c in range(tiles):
            tile_top, tile_total = block.fetch(tops, c, 1), block.fetch(totals, c, 1)
            new_top = block.maximum(top, tile_top)
            old, new = block.exp(top - new_top.finite()), block.exp(tile_top - new_top.finite())
            total = total * old + tile_total * new
            top = new_top
        block.step("store")
        x_j = block.fetch(x, 0, 1, block.j, tile.cols)
        block.store(out, block.exp(x_j - top) / total, 0, 1, block.j, tile.cols)
    return out
