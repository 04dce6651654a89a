"""FlashAttention-3, rung 2: a producer and consumers."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import attend
from simulator.tensors import HbmTensor


@program
def flash3_2(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash3_1` with a warpgroup that only loads, and with mbarriers in place of the block's barrier."""
    return attend("flash3_2", m, q, k, v, problem, tile)
