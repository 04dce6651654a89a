"""The backward pass on Hopper, rung 1: TMA and WGMMA."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash3_backward as top
from simulator.tensors import HbmTensor


@program(operation=BACKWARD)
def flash3_backward_1(
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
    """`flash2_backward` with whole boxes by TMA, and 64 keys per matrix product. P and dS stay in registers for dV and dK."""
    return top.backward("flash3_backward_1", m, q, k, v, out, lse, dout, problem, tile)
