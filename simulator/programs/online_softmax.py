"""Standard attention, with the two-pass online softmax (Milakov and Gimelshein, arXiv 1805.02867) in the middle."""

from __future__ import annotations

from math import inf

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.standard import COLS, ROWS, three_launches
from simulator.tensors import HbmTensor


def two_pass_softmax(m: Machine, s: HbmTensor, p: HbmTensor, lse: HbmTensor | None, problem: Problem) -> None:
    """Algorithm 3 of 1805.02867, row by row: maximum and sum in one pass, the quotient in a second."""
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


@program
def online_softmax(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor | None]:
    """`standard` with the two-pass online softmax: S is read twice, not three times. Shapes as in `standard`."""
    return three_launches(two_pass_softmax, m, q, k, v, problem, tile)
