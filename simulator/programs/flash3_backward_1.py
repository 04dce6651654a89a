"""The backward pass on Hopper, rung 1: TMA and WGMMA."""

from __future__ import annotations

from simulator.config import Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash3_backward as top
from simulator.tensors import HbmTensor


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The tile by head dim, and one block per key tile."""
    return top.configure_rung(problem, device, tile, producers=0)


@program(configure=configure, operation=BACKWARD)
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


ABOUT = top.rung_about(
    "flash3_backward_1",
    {
        "load_kv": "One thread asks TMA for a tile of keys and their values. Their gradients never leave the registers.",
        "scores": "Each warpgroup multiplies its 64 keys by the queries (WGMMA), and waits: the tile of S again, transposed.",
        "dq": "dS K belongs to dQ of these queries. All warps wait until all of dS is there. Atomics add dQ up in HBM.",
    },
)
"""What each step of each launch is for, in a sentence or two: the player's words."""
