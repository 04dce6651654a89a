"""FlashAttention-3, rung 3: the softmax runs beside the matrix products."""

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
def flash3_3(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, HbmTensor]:
    """`flash3_2` with S_j issued before O += P V of the tile before, and warpgroups that take turns (ping-pong)."""
    return attend("flash3_3", m, q, k, v, problem, tile)
