"""The backward pass for Hopper at wide heads: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import OFFSETS
from simulator.config import Config, features, heads_that_share_the_l2
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash3_backward_wide as formula
from simulator.formulas.flash3_backward_wide import sram_of_keys, sram_of_queries
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.flash3_backward_wide import flash3_backward_wide
from simulator.support import Support
from simulator.time.schedules import flash3_backward_wide as schedule

TILE = Tile(128, 64)
"""The kernel's tile: 64 rows of S for each of two warpgroups, or 64 keys for one of them."""


def sram_bytes(problem: Problem, tile: Tile, stages: int) -> int:
    """SRAM bytes per block of the launch that takes more."""
    return max(sram(problem, tile, stages) for sram in (sram_of_keys, sram_of_queries))


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for the kernel's tile, else what is accepted."""
    del problem
    return None if tile == TILE else f"{TILE}: 64 rows of S for each of two warpgroups, whose registers hold no other"


@flash3_backward_wide.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """A producer and two warpgroups, with two stages of what the blocks walk over, or one if two don't fit.

    Raises `SramOverflow` if no configuration fits.
    """
    asked = TILE if tile is None else Tile.parse(tile)
    # a small tile is a last resort for float32 and small GPUs, where the kernels don't run anyway
    candidates = [(asked, 2), (asked, 1), *([(Tile(16, 16), 1)] if tile is None else [])]
    for chosen, stages in candidates:
        if sram_bytes(problem, chosen, stages) <= device.sram_per_block:
            break
    else:
        chosen, stages = candidates[-1]
        needed = sram_bytes(problem, chosen, stages)
        raise SramOverflow("tile", str(chosen), needed=needed, limit=device.sram_per_block, device=device.name)
    return Config(
        tile=chosen,
        warps=12,
        stages=stages,
        consumers=2,
        blocks_per_sm=1,
        heads_together=heads_that_share_the_l2(problem, device),
        constants=features(problem),
        told=problem.lengths is not None,
    )


ABOUT = {
    "flash3_backward_wide_delta": {
        "delta": "D, one number for each query: the sum of dO times O along its row. It stands for the softmax's own derivative.",
    },
    "flash3_backward_wide_dkv": {
        "load_kv": "TMA brings a tile of keys and their values, once. Each warpgroup keeps a part of one of them in registers.",
        "load_q": "TMA brings the next tile of queries that see any of these keys. A warp of the producer fetches their LSE.",
        "scores": "The first warpgroup multiplies the keys by the queries: the tile of S again, transposed.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "exp": "P = exp(S − LSE). It goes to SRAM in float32: the second warpgroup needs it unrounded.",
        "load_do": "TMA brings dO of the same queries, and another warp their D. The sums of dP begin at −D.",
        "dv": "dV of these keys gains Pᵀ dO, with P straight from the registers of the first warpgroup.",
        "dp": "dP = V dOᵀ, by the second warpgroup: how the loss depends on each probability.",
        "ds": "dS = P (dP − D): the derivative of the softmax. P comes from SRAM, and dS stays in registers.",
        "dk": "dK of these keys gains dSᵀ Q, with dS straight from the registers of the second warpgroup.",
        "store_dkv": "Write dK, times the scale, and dV to HBM, for the first and only time.",
    },
    "flash3_backward_wide_dq": {
        "load_q": "TMA brings the block's queries, once, and each lane fetches the LSE of its two rows.",
        "load_do": "TMA brings dO of these queries, once, and each lane fetches the D of its two rows.",
        "load_k": "TMA brings the next tile of keys that any of these queries sees.",
        "scores": "Each warpgroup multiplies its 64 queries by the keys: the tile of S a third time.",
        "load_v": "TMA brings the values of these keys.",
        "dp": "dP = dO Vᵀ again. The sums begin at −D.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "exp": "P = exp(S − LSE): with the LSE kept, no maximum and no sum are needed.",
        "ds": "dS = P (dP − D), which stays in registers.",
        "dq": "dQ of these queries gains dS K. Nobody else adds to these rows.",
        "store_dq": "Write dQ, times the scale, to HBM, for the first and only time.",
    },
    "flash3_backward_wide_sinks": {
        "dsinks": "The gradient of a head's sink, which is a key whose value is 0: the sum of −P D, with P = exp(sink − LSE)."
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

FILE, ARCH = "flash3_backward_wide", "sm_90a"
ROW = Algorithm(
    "flash3_backward_wide",
    flash3_backward_wide,
    formula.flash3_backward_wide,
    schedule=schedule.launches,
    kernels=(
        Kernel(FILE, "flash3_backward_wide_delta", ("out", "dout", "dlse", "delta"), arch=ARCH),
        Kernel(
            FILE,
            "flash3_backward_wide_dkv",
            ("q", "k", "v", "lse", "dout", "delta", "dk", "dv", *OFFSETS),
            (("q", "cols"), ("k", "cols"), ("v", "cols"), ("dout", "cols")),
            ARCH,
        ),
        Kernel(
            FILE,
            "flash3_backward_wide_dq",
            ("q", "k", "v", "lse", "dout", "delta", "dq", *OFFSETS),
            (("q", "rows"), ("k", "cols"), ("v", "cols"), ("dout", "rows")),
            ARCH,
        ),
        Kernel(
            FILE,
            "flash3_backward_wide_sinks",
            ("sinks", "lse", "delta", "dsinks", "offsets_q"),
            arch=ARCH,
            when=lambda p: p.sinks,
        ),
    ),
    support=Support(
        dtypes=("float16", "bfloat16"),
        only=(9, 0),
        tile=accepts,
        masks=(*COMMON_MASKS, "sinks", "lengths", "dlse"),
        instead="flash2_backward",
    ),
    about=ABOUT,
    follows="flash3_backward",
    rank=3,
)
