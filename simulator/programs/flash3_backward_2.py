"""The backward pass on Hopper, rung 2: a producer and its consumers."""

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
    return top.configure_rung(problem, device, tile)


@program(configure=configure, operation=BACKWARD)
def flash3_backward_2(
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
    """`flash3_backward_1` with a warpgroup that only loads, a ring ahead of those that multiply."""
    return top.backward("flash3_backward_2", m, q, k, v, out, lse, dout, problem, tile)


ABOUT = top.rung_about(
    "flash3_backward_2",
    {
        "load_kv": "The producer asks TMA for a tile of keys and their values. Their gradients never leave the registers.",
        "load_q": "The producer loads a ring ahead: TMA brings a tile of queries, and a warp their LSE, once a slot is empty.",
        "load_do": "The producer also loads dO of the same queries, and another warp their D.",
        "dq": "dS K belongs to dQ of these queries. Each warpgroup waits for the other one's dS. Atomics add dQ up in HBM.",
    },
)
"""What each step of each launch is for, in a sentence or two: the player's words."""
