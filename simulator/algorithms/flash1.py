"""FlashAttention-1, forward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, choose, padded, warps_for
from simulator.devices import Device
from simulator.formulas import flash1 as formula
from simulator.problem import Problem, Tile
from simulator.programs.flash1 import CHUNK, flash1
from simulator.time.schedules import flash1 as schedule


@flash1.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The kernel's configuration: the largest of a few tiles that fits the block's SRAM."""

    def sram(t: Tile) -> int:
        d, dv, w = padded(problem.head_dim), padded(problem.head_dim_v), warps_for(t.cols)
        br, bc = padded(t.rows), padded(t.cols)
        return (bc * (d + dv) + br * d) * problem.itemsize + w * br * (min(dv, CHUNK) + 2) * 4 + br * 8

    chosen = choose(((64, 64), (32, 64), (16, 64), (16, 32), (16, 16)), tile, device, sram)
    return Config(tile=chosen, warps=warps_for(chosen.cols))


ABOUT = {
    "flash1": {
        "init": "Set O and ℓ to 0 and m to −∞ in HBM: there, between two key tiles, this algorithm keeps them.",
        "load_k": "Outer loop: fetch the next tile of keys. All queries pass by before it leaves SRAM.",
        "load_v": "Fetch the values of the same keys.",
        "load_q": "Inner loop: fetch a tile of queries. It will be fetched again for every other key tile.",
        "scores": "Multiply the query tile by the transposed key tile: one tile of S, each query's scores for these keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "row_max": "Each warp has some of the keys only, so the warps' row maxima meet in SRAM.",
        "exp": "Exponentials, with this tile's own maximum subtracted.",
        "row_sum": "The warps' partial row sums meet in SRAM, too.",
        "stats": "Fetch the running m and ℓ, merge this tile's into them, and write them back to HBM.",
        "output": "Multiply P by the values. Each warp has a part of the keys, so their partial results meet in SRAM.",
        "update_o": "Fetch the rows of O from HBM, rescale them, add this tile's part, and write them back.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash1",
    flash1,
    formula.flash1,
    schedule=schedule.launches,
    kernels=(Kernel("flash1", "flash1", ("q", "k", "v", "o", "l", "m", "out", "lse")),),
    about=ABOUT,
    follows="online_softmax",
    lesson="03_flash1",
)
