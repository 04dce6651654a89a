"""Standard attention: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, choose, features, padded, warps_for
from simulator.devices import Device
from simulator.formulas import standard as formula
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.standard import standard
from simulator.support import Support
from simulator.time.schedules import standard as schedule


@standard.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The configuration of the scores and output launches: the largest of a few tiles that fits the block's SRAM."""

    def sram(t: Tile) -> int:
        d, dv, br, bc = padded(problem.head_dim), padded(problem.head_dim_v), padded(t.rows), padded(t.cols)
        return max((br + bc) * d, bc * (br + dv)) * problem.itemsize

    # with 64 columns, float32 at head dim 16 spills
    widest = 32 if problem.itemsize == 4 and padded(problem.head_dim) == 16 else 64
    chosen = choose(((64, widest), (32, 32), (16, 16)), tile, device, sram)
    return Config(tile=chosen, warps=warps_for(chosen.rows), constants=features(problem))


ABOUT = {
    "standard_scores": {
        "load_q": "Fetch a tile of queries into SRAM.",
        "load_k": "Fetch a tile of keys into SRAM.",
        "scores": "Multiply the query tile by the transposed key tile: one tile of S, each query's scores for these keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "store_s": "Write the tile of S to HBM in float32. The whole of S goes there, and the next launch reads it back.",
    },
    "standard_softmax": {
        "row_max": "First pass over the rows of S in HBM: each row's largest score.",
        "row_sum": "Second pass over the same rows, read from HBM again: the sum of exp(score − maximum).",
        "store_p": "Third pass: divide by the sum, and write P, the probabilities, to HBM.",
        "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
    },
    "standard_output": {
        "load_p": "Fetch a tile of P, which the launch before wrote to HBM.",
        "load_v": "Fetch the values that belong to these keys.",
        "output": "Weigh the values with the probabilities, and add them to the accumulator.",
        "store_o": "Write the finished rows of the output to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

SCORES = Kernel("standard", "standard_scores", ("q", "k", "s"))
OUTPUT = Kernel("standard", "standard_output", ("p", "v", "out"))
ROW = Algorithm(
    "standard",
    standard,
    formula.standard,
    schedule=schedule.launches,
    kernels=(SCORES, Kernel("standard", "standard_softmax", ("s", "p", "lse", "rng_state")), OUTPUT),
    support=Support(masks=(*COMMON_MASKS, "dropout", "dlse")),
    about=ABOUT,
    lesson="01_standard_attention",
)
