"""The backward pass on Hopper, rung 2: a producer and its consumers."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash3_backward as top
from simulator.tensors import HbmTensor


@program(operation=BACKWARD)
def flash3_backward_2(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:
    """`flash3_backward_1` with a warpgroup that only loads, a ring ahead of those that multiply."""
    return top.backward("flash3_backward_2", m, q, k, v, out, lse, dout, problem, tile)
