"""FlashAttention-1, backward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from functools import partial

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, choose, features, padded
from simulator.devices import Device
from simulator.formulas import flash1_backward as formula
from simulator.formulas.flash1_backward import sram_bytes
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.flash1_backward import flash1_backward
from simulator.programs.flash2_backward import warp_grid
from simulator.support import Support
from simulator.time.schedules import flash1_backward as schedule


@flash1_backward.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The first tile that fits the block's SRAM, of those whose dK, dV, S and dP fit the registers of the warps."""
    d, half = padded(max(problem.head_dim, problem.head_dim_v)), problem.itemsize == 2
    candidates = [(64, 64)] if half or d <= 128 else []
    chosen = choose([*candidates, (32, 32), (32, 16), (16, 16)], tile, device, partial(sram_bytes, problem))
    along, across = warp_grid(problem, chosen)
    return Config(tile=chosen, warps=along * across, constants=(("KEY_WARPS", along), *features(problem)))


ABOUT = {
    "flash1_backward": {
        "init": "Set dQ, dK and dV to 0 in HBM. dQ stays there, in float32, between two key tiles.",
        "load_kv": "Outer loop: fetch the next tile of keys and their values. All queries pass by before it leaves SRAM.",
        "load_q": "Inner loop: fetch a tile of queries and their LSE. They will be fetched again for every other key tile.",
        "load_do": "Fetch dO and O of the same queries.",
        "delta": "D, one number for each query: the sum of dO times O along its row. It is computed anew for every key tile.",
        "scores": "Multiply the keys by the queries: the tile of S again, transposed. The forward pass threw it away.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0. Hidden tiles are walked, too.",
        "exp": "P = exp(S − LSE): with the LSE kept, no maximum and no sum are needed. Rounded, it goes to SRAM for other warps.",
        "dp": "dP = V dOᵀ: how the loss depends on each probability.",
        "ds": "dS = P (dP − D): the derivative of the softmax. It goes to SRAM, too.",
        "dv": "dV of these keys gains Pᵀ dO.",
        "dk": "dK of these keys gains dSᵀ Q.",
        "dq": "dS K is what these keys add to dQ of these queries.",
        "update_dq": "Fetch the rows of dQ from HBM, add this tile's part, and write them back.",
        "store_dkv": "Write dK, times the scale, and dV of these keys to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash1_backward",
    flash1_backward,
    formula.flash1_backward,
    schedule=schedule.launches,
    kernels=(
        Kernel(
            "flash1_backward",
            "flash1_backward",
            ("q", "k", "v", "out", "lse", "dout", "dlse", "dq_sum", "dq", "dk", "dv", "rng_state"),
        ),
    ),
    support=Support(masks=(*COMMON_MASKS, "dropout", "dlse")),
    about=ABOUT,
    follows="standard_backward",
)
