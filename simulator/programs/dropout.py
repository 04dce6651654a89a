"""Dropout of weights: the seed and the offset that blocks read, and P without what is dropped."""

from __future__ import annotations

from simulator.block import Block, Rows
from simulator.machine import Machine
from simulator.problem import Problem
from simulator.registers import Registers
from simulator.tensors import SramTile


def read_state(m: Machine, block: Block, warps: int) -> None:
    """Each of `warps` warps requests seed and offset, if the problem has dropout."""
    if m.problem.dropout:
        block.fetch(m.optional("rng_state"), 0, m.problem.rng_words, warps=warps)


def dropped(
    m: Machine, block: Block, p: Registers, i: Rows, j: Rows, cols: int | None = None, *, member: int | None = None
) -> Registers:
    """P with 0 for what is dropped. The factor 256 / kept of what is kept comes later."""
    return block.drop(p, i, j, cols, member=member) if m.problem.dropout else p


def drop_loaded(m: Machine, block: Block, p: SramTile, i: Rows, j: Rows, cols: int, *, member: int) -> None:
    """The same for a tile of P that was loaded: on its way to SRAM it passes through registers, which drop it."""
    if m.problem.dropout:
        p.values = block.drop(Registers(block, p.rows, p.cols, p.values), i, j, cols, member=member).values


def of_kept(factor: float, problem: Problem) -> float:
    """A factor for sums of what is kept: it makes up for what was dropped."""
    return factor * 256 / problem.kept


def of_kept_sum(x: Registers, problem: Problem) -> Registers:
    """Sums of what is kept, times that factor."""
    return x * of_kept(1.0, problem) if problem.dropout else x


def kept_sum(row_sum: Registers, problem: Problem) -> Registers:
    """A number of each row (a softmax's sum, or D), less what dropout takes from it on average. It matches sums of what is kept."""
    return row_sum * (problem.kept / 256) if problem.dropout else row_sum
