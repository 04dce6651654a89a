"""FlashAttention-2 in Triton: `flash2`, in tiles whose sides are powers of two."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash2 import flash2
from simulator.tensors import HbmTensor


@program
def flash2_triton(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash2` as it is. Only the configuration is Triton's."""
    return flash2(m, q, k, v, problem, tile)
