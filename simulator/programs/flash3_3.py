"""FlashAttention-3, rung 3: the softmax runs beside the matrix products."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import attend
from simulator.tensors import HbmTensor


@program
def flash3_3(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash3_2` with S_j issued before O += P V of the tile before, and warpgroups that take turns (ping-pong)."""
    return attend("flash3_3", m, q, k, v, problem, tile)
