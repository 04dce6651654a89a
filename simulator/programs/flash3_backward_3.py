"""The backward pass on Hopper, rung 3: products beside everything else."""

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
def flash3_backward_3(
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
    """`flash3_backward_2` with a tile's dQ one tile later, and exponentials beside the product for dP, which begins at −D."""
    return top.backward("flash3_backward_3", m, q, k, v, out, lse, dout, problem, tile)


ABOUT = top.rung_about(
    "flash3_backward_3",
    {
        "load_do": "The producer also loads dO of the same queries, and another warp their D. The sums of dP begin at −D.",
        "dp": "dP = V dOᵀ, in the background: how the loss depends on each probability.",
        "exp": "P = exp(S − LSE), while the tensor cores are busy with dP.",
        "dq": "dS K belongs to dQ of these queries. It is computed one tile later: the other warpgroup's dS is there by then.",
    },
)
"""What each step of each launch is for, in a sentence or two: the player's words."""
