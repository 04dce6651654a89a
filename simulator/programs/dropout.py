"""Dropout of weights: the seed and the offset that blocks read, and P without what is dropped."""

from __future__ import annotations

from simulator.block import Block, Rows
from simulator.machine import Machine
from simulator.problem import Problem
from simulator.registers import Registers


def read_state(m: Machine, block: Block, warps: int) -> None:
    """Each of `warps` warps requests seed and offset, if the problem has dropout."""
    if m.problem.dropout:
        block.fetch(m.optional("rng_state"), 0, m.problem.rng_words, warps=warps)


def dropped(
    m: Machine, block: Block, p: Registers, i: Rows, j: Rows, cols: int | None = None, *, member: int | None = None
) -> Registers:
    """P with 0 for what is dropped. What is kept is still to be multiplied with 256 / kept."""
    return block.drop(p, i, j, cols, member=member) if m.problem.dropout else p


def kept_sum(row_sum: Registers, problem: Problem) -> Registers:
    """What the rows of a softmax are divided by: their sums, of which dropout leaves a part."""
    return row_sum * (problem.kept / 256) if problem.dropout else row_sum
