"""The backward pass on Hopper, rung 3: products beside everything else."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash3_backward as top
from simulator.tensors import HbmTensor


@program(operation=BACKWARD)
def flash3_backward_3(
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
    """`flash3_backward_2` with a tile's dQ one tile later, and exponentials beside the product for dP, which begins at −D."""
    return top.backward("flash3_backward_3", m, q, k, v, out, lse, dout, problem, tile)
