"""Standard attention, backward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from functools import partial
from math import gcd

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, choose, features, padded, warps_for
from simulator.devices import Device
from simulator.formulas import standard_backward as formula
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.standard_backward import standard_backward
from simulator.support import Support
from simulator.time.schedules import standard_backward as schedule


def sram_bytes(problem: Problem, tile: Tile) -> int:
    """SRAM bytes per block of the launch that needs most: two tiles of operands, or one and a tile of P or dS."""
    d, rows, cols = padded(max(problem.head_dim, problem.head_dim_v)), padded(tile.rows), padded(tile.cols)
    return max((rows + cols) * d, rows * cols + max(rows, cols) * d) * problem.itemsize


@standard_backward.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The largest of a few tiles that fits the block's SRAM. The warps split rows in some launches and keys in others."""
    chosen = choose(((64, 64), (32, 32), (16, 16)), tile, device, partial(sram_bytes, problem))
    warps = warps_for(gcd(padded(chosen.rows), padded(chosen.cols)))
    return Config(tile=chosen, warps=warps, constants=features(problem))


ABOUT = {
    "standard_backward_p": {
        "load_q": "Fetch a tile of queries and their LSE.",
        "load_k": "Fetch a tile of keys into SRAM.",
        "scores": "Multiply the query tile by the transposed key tile: one tile of S.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "exp": "P = exp(S − LSE): with the LSE kept, no maximum and no sum are needed.",
        "store_p": "Write the tile of P to HBM in float32. The whole of P goes there, and two launches read it back.",
    },
    "standard_backward_dv": {
        "load_p": "Fetch a tile of P from HBM, rounded on its way to SRAM.",
        "load_do": "Fetch dO of the same queries.",
        "dv": "dV of these keys gains Pᵀ dO.",
        "store_dv": "Write the finished rows of dV to HBM.",
    },
    "standard_backward_dp": {
        "load_do": "Fetch dO of a tile of queries.",
        "load_v": "Fetch a tile of values.",
        "dp": "dP = dO Vᵀ: how the loss depends on each probability.",
        "store_dp": "Write the tile of dP to HBM in float32.",
    },
    "standard_backward_ds": {
        "delta": "D, one number for each query: the sum of dO times O along its row.",
        "store_ds": "dS = P (dP − D), the derivative of the softmax: P and dP come from HBM, and it goes there.",
    },
    "standard_backward_dq": {
        "load_ds": "Fetch a tile of dS, which the launch before wrote to HBM.",
        "load_k": "Fetch the keys that belong to it.",
        "dq": "dQ of these queries gains dS K.",
        "store_dq": "Write the finished rows of dQ, times the scale, to HBM.",
    },
    "standard_backward_dk": {
        "load_ds": "Fetch a tile of dS from HBM again.",
        "load_q": "Fetch the queries that belong to it.",
        "dk": "dK of these keys gains dSᵀ Q.",
        "store_dk": "Write the finished rows of dK, times the scale, to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ARGUMENTS = {
    "p": ("q", "k", "lse", "p"),
    "dv": ("p", "dout", "dv", "rng_state"),
    "dp": ("dout", "v", "dp"),
    "ds": ("out", "dout", "dlse", "p", "dp", "ds", "rng_state"),
    "dq": ("ds", "k", "dq"),
    "dk": ("ds", "q", "dk"),
}
ROW = Algorithm(
    "standard_backward",
    standard_backward,
    formula.standard_backward,
    schedule=schedule.launches,
    kernels=tuple(Kernel("standard_backward", f"standard_backward_{entry}", each) for entry, each in ARGUMENTS.items()),
    support=Support(masks=(*COMMON_MASKS, "dropout", "dlse")),
    about=ABOUT,
    lesson="11_way_back",
)
