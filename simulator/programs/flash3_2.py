"""FlashAttention-3, rung 2: a producer and consumers."""

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
    default = Tile(128, 64) if problem.head_dim > 128 else Tile(192 if problem.head_dim <= 64 else 128, 128)
    return configure_rung(problem, device, tile, default)


@program(configure=configure)
def flash3_2(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash3_1` with a warpgroup that only loads, and with mbarriers in place of the block's barrier."""
    return attend("flash3_2", m, q, k, v, problem, tile)
