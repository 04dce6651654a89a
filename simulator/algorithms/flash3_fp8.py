"""FlashAttention-3 in 8 bits, forward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.flash3 import configure_rung, order
from simulator.config import Config, features, heads_that_share_the_l2
from simulator.devices import Device
from simulator.formulas import flash3_fp8 as formula
from simulator.formulas.flash3_fp8 import sram_bytes
from simulator.problem import COMMON_MASKS, FP8, Problem, Tile
from simulator.programs.flash3_fp8 import flash3_fp8
from simulator.support import Support
from simulator.time.schedules import flash3_fp8 as schedule

TILE = Tile(128, 128)
"""The default tile: how many rows of Q share a scale, and how many keys."""
TILES = (TILE, Tile(128, 64), Tile(64, 64))
"""The tiles that the kernel may be compiled for."""


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that the kernel may be compiled for, else those that it may."""
    del problem
    return None if tile in TILES else f"one of {', '.join(map(str, TILES))} for {FP8}"


@flash3_fp8.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The configuration of `flash3`, with one default tile for all problems."""
    rung = configure_rung(problem, device, tile, TILE, sram=sram_bytes)
    together = heads_that_share_the_l2(problem, device)
    return replace(rung, heads_together=together, constants=features(problem), **order(problem))


ABOUT = {
    "flash3_fp8_transpose": {
        "fetch_v": "Fetch a tile of values: the tensor cores want 8-bit operands along the summed dimension, so V is transposed.",
        "transpose": "Turn the tile through SRAM: keys become columns.",
        "store_v": "Write the transposed tile to HBM, for the next launch to read.",
    },
    "flash3_fp8": {
        "load_q": "TMA brings this block's queries, one byte an element, and each warp asks for their scale.",
        "load_k": "TMA brings the next tile of keys, from the last to the first; each warp asks for its scale.",
        "scores": "Each warpgroup multiplies its 64 queries by the transposed key tile, straight from SRAM: one tile of S.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "softmax": "The new row maximum m, and P = 32 exp(S − m), in e4m3's range. Nothing is divided yet.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
        "load_v": "TMA brings the transposed values of the same keys; rows of ones lie behind them.",
        "output": "Weigh the values with P; the ones behind V sum up P for ℓ. Each key tile's product joins O in float32.",
        "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
        "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
        "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash3_fp8",
    flash3_fp8,
    formula.flash3_fp8,
    schedule=schedule.launches,
    kernels=(
        Kernel("flash3_fp8", "flash3_fp8_transpose", ("v", "v_t"), arch="sm_90a"),
        Kernel(
            "flash3_fp8",
            "flash3_fp8",
            ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "out", "lse", "drawn"),
            (("q", "rows"), ("k", "cols"), ("v_t", "head_dim")),
            "sm_90a",
            persistent=True,
        ),
    ),
    support=Support(
        dtypes=(FP8,), only=(9, 0), masks=(*COMMON_MASKS, "exact_lse"), tile=accepts, tiles=(None, *TILES[1:])
    ),
    about=ABOUT,
    follows="flash3",
    lesson="09_eight_bits",
)
