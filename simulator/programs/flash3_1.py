"""FlashAttention-3, rung 1: TMA and WGMMA."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import attend
from simulator.tensors import HbmTensor


@program
def flash3_1(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash2` with whole boxes by TMA, and 64 rows per matrix product. Every warpgroup loads, waits and computes."""
    return attend("flash3_1", m, q, k, v, problem, tile)
