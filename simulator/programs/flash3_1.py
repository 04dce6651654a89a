"""FlashAttention-3, rung 1: TMA and WGMMA."""

from __future__ import annotations

from simulator.config import Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import attend, configure_rung
from simulator.tensors import HbmTensor


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The tile by head dim, and one block per row tile."""
    default = Tile(128, 128 if 64 < problem.head_dim <= 128 else 64)
    return configure_rung(problem, device, tile, default, producers=0)


@program(configure=configure)
def flash3_1(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash2` with whole boxes by TMA, and 64 rows per matrix product. Every warpgroup loads, waits and computes."""
    return attend("flash3_1", m, q, k, v, problem, tile)
