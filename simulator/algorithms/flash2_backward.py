"""FlashAttention-2, backward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from functools import partial

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import OFFSETS
from simulator.config import Config, choose, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.formulas import flash2_backward as formula
from simulator.formulas.flash2_backward import sram_bytes
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.flash2_backward import flash2_backward, warp_grid
from simulator.support import Support
from simulator.time.schedules import flash2_backward as schedule


@flash2_backward.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The first tile that fits the block's SRAM, of those whose dK, dV, S and dP fit the registers of the warps.

    In 16 bits Q and dO are double-buffered where that fits. Up to head dim 64 a tile has 128 queries there: a warp then reads
    fewer fragments from SRAM for each product.
    """
    d = padded(max(problem.head_dim, problem.head_dim_v))
    half = problem.itemsize == 2
    if half:
        candidates = [tile for tile, widest in (((128, 128), 64), ((64, 128), 128), ((64, 64), 256)) if d <= widest]
    else:
        candidates = [(64, 64)] if d <= 128 else []
    chosen = choose([*candidates, (32, 32), (32, 16), (16, 16)], tile, device, partial(sram_bytes, problem))
    twice = half and device.compute_capability >= (8, 0) and sram_bytes(problem, chosen, 2) <= device.sram_per_block
    along, across = warp_grid(problem, chosen)
    return Config(
        tile=chosen,
        warps=along * across,
        stages=2 if twice else 1,
        heads_together=heads_that_share_the_l2(problem, device),
        constants=(("KEY_WARPS", along), *features(problem)),
    )


def about(name: str, main: dict[str, str]) -> dict[str, dict[str, str]]:
    """The player's words for the launches of an algorithm whose main launch adds up dQ by atomics."""
    delta = {
        "delta": "D, one number for each query: the sum of dO times O along its row. It stands for the softmax's own derivative.",
        "zero_dq": "Set the float32 sum of dQ to 0 in HBM: atomics will add to it.",
    }
    convert = {"convert_dq": "dQ is the finished sum, times the scale, rounded to the storage dtype."}
    sinks = {
        "dsinks": "The gradient of a head's sink, which is a key whose value is 0: the sum of −P D, with P = exp(sink − LSE)."
    }
    return {f"{name}_delta": delta, name: main, f"{name}_convert": convert, f"{name}_sinks": sinks}


ABOUT = about(
    "flash2_backward",
    {
        "load_kv": "Fetch a tile of keys and their values once. Their gradients never leave the registers.",
        "load_q": "Fetch the next tile of queries that see any of these keys, and their LSE.",
        "load_do": "Fetch dO of the same queries, and their D.",
        "scores": "Multiply the keys by the queries: the tile of S again, transposed. The forward pass threw it away.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "exp": "P = exp(S − LSE): with the LSE kept, no maximum and no sum are needed. Rounded, it goes to SRAM for other warps.",
        "dp": "dP = V dOᵀ: how the loss depends on each probability.",
        "ds": "dS = P (dP − D): the derivative of the softmax, with P as it was before it was rounded. It goes to SRAM, too.",
        "dv": "dV of these keys gains Pᵀ dO.",
        "dk": "dK of these keys gains dSᵀ Q.",
        "dq": "dS K belongs to dQ of these queries. Blocks of other key tiles add to the same rows, so atomics add it up in HBM.",
        "store_dkv": "Write dK, times the scale, and dV to HBM, for the first and only time.",
    },
)
"""What each step of each launch is for, in a sentence or two: the player's words."""

ARGUMENTS = ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv", *OFFSETS, "rng_state")
DELTA = Kernel("flash2_backward", "flash2_backward_delta", ("out", "dout", "dlse", "delta", "dq_sum", "offsets_q"))
CONVERT = Kernel("flash2_backward", "flash2_backward_convert", ("dq_sum", "dq", "offsets_q"))
SINKS = Kernel(
    "flash2_backward", "flash2_backward_sinks", ("sinks", "lse", "delta", "dsinks", "offsets_q"), when=lambda p: p.sinks
)
ROW = Algorithm(
    "flash2_backward",
    flash2_backward,
    formula.flash2_backward,
    schedule=schedule.launches,
    kernels=(DELTA, Kernel("flash2_backward", "flash2_backward", ARGUMENTS), CONVERT, SINKS),
    support=Support(masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "dropout", "dlse", "partial")),
    about=ABOUT,
    follows="flash1_backward",
    atomics=("dq",),
    rank=1,
    lesson="11_way_back",
)
