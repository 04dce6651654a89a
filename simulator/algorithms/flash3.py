"""FlashAttention-3, forward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import FORWARD, OPTIONAL, PACK, TRAINED
from simulator.config import Config, dividing, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash3 as formula
from simulator.formulas.flash3 import sram_bytes
from simulator.problem import Problem, Tile
from simulator.programs.flash3 import PANEL, flash3
from simulator.support import Support, warpgroups
from simulator.time.schedules import flash3 as schedule


def choose_tile(problem: Problem, device: Device) -> Tile:
    """The tile of the top rung: as many keys as registers and SRAM leave room for beside O, or three warpgroups."""
    d, extra = padded(problem.head_dim), problem.alibi or problem.mask or problem.dropout
    if d <= 64:
        # in a short causal problem, the mask hides too much of a tile of 192 rows
        short = triangular(problem) and problem.padded.len_kv <= 2048
        # three warpgroups leave a thread no registers for a bias, for bits, or for random bytes
        return Tile(128 if short or extra else 192, 128)
    if extra or problem.soft_cap or problem.sinks or problem.lengths is not None:  # they take registers, too
        # the exponentials of a soft cap and the numbers of a sequence leave no room for 64 columns, nor do random bytes
        tight = (d > 128 and problem.soft_cap and problem.lengths is not None) or (
            d > 192 and problem.dropout and not problem.soft_cap
        )
        return Tile(128, 48 if tight else 64 if d > 128 else 128)
    if d <= 96:  # the taller is faster, unless the last round of its blocks is emptier
        tall, usual = Tile(192, 112 if d <= 80 else 96), Tile(128, 128)
        return tall if rounds(problem, tall, device) * 192 < 1.08 * rounds(problem, usual, device) * 128 else usual
    if 160 < d <= 192 and problem.padded.len_kv <= 1024:
        return Tile(128, 80)  # wide tiles are mostly padding or hidden there
    return Tile(128, next((cols for most, cols in ((128, 128), (160, 96), (192, 112), (256, 64)) if d <= most), 16))


def rounds(problem: Problem, tile: Tile, device: Device) -> int:
    """How many row tiles the busiest SM computes, if all are dealt out evenly."""
    return -(-problem.batch * problem.heads * problem.row_tiles(tile) // device.sms)


def configure_rung(
    problem: Problem,
    device: Device,
    tile: Tile | tuple[int, int] | str | None,
    default: Tile,
    *,
    producers: int = 1,
    stages: int = 2,
    sram: Callable[[Problem, Tile, int], int] | None = None,
) -> Config:
    """The configuration of a rung: one warpgroup per 64 rows, further `producers`, and a ring of so many stages.

    The ring has fewer stages if these don't fit. `sram(problem, tile, stages)` is the bytes per block (None: `sram_bytes`).
    Raises `SramOverflow` if no configuration fits.
    """
    needs = sram or sram_bytes
    chosen = default if tile is None else Tile.parse(tile)
    # 64 x 16 is a last resort for float32 and small GPUs, where the kernels don't run anyway
    candidates = [*((chosen, n) for n in range(stages, 0, -1)), *([(Tile(64, 16), 1)] if tile is None else [])]
    for chosen, stages in candidates:
        needed = needs(problem, chosen, stages)
        if needed <= device.sram_per_block:
            break
    else:
        chosen, stages = candidates[-1]
        needed = needs(problem, chosen, stages)
        raise SramOverflow("tile", str(chosen), needed=needed, limit=device.sram_per_block, device=device.name)
    consumers = max(1, chosen.rows // 64)
    return Config(tile=chosen, warps=4 * (consumers + producers), stages=stages, consumers=consumers, blocks_per_sm=1)


@flash3.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The kernel's configuration: the tile by head dim and length, and the order of work."""
    default = choose_tile(problem, device)
    if problem.mask == "blocks":
        default = Tile(dividing(default.rows, problem.block.rows, 64), dividing(default.cols, problem.block.cols))
    rung = configure_rung(problem, device, tile, default)
    together = heads_that_share_the_l2(problem, device)
    return replace(rung, heads_together=together, constants=features(problem), **order(problem))


def order(problem: Problem) -> dict[str, bool]:
    """The order of work: `persistent` and `dynamic` of a `Config`.

    If a mask makes rows unequal, persistent blocks draw them, the longest first, unless the registers are needed for a mask's
    bits, or beside a wide head for what bends scores. Then each has a block of its own instead. So it is in a ragged batch,
    whose row tiles are unequal, too, unless its sequences are all alike and none of its rows sees more than another. (Wide heads
    leave it no registers for more than one.)
    """
    p, stepped, wide = problem, triangular(problem), problem.head_dim > 2 * PANEL
    crowded = p.mask is not None or (wide and (p.soft_cap is not None or p.sinks or p.alibi))
    alike = p.alike and not stepped and not wide
    persistent = alike if p.lengths is not None else not (stepped and crowded)
    return {"persistent": persistent, "dynamic": persistent and stepped}


def triangular(problem: Problem) -> bool:
    """Does each row see more keys than the row before, or does each see fewer?"""
    return (problem.left is None) != (problem.right is None)


ABOUT = {
    "load_q": "TMA brings this block's queries, in boxes of 64 columns. Its rows of O, m and ℓ never leave the registers.",
    "load_k": "Walk on, from the last key tile to the first: TMA brings the next tile of keys that the mask leaves to these rows.",
    "scores": "Each warpgroup multiplies its 64 queries by the transposed key tile, straight from SRAM: one tile of S.",
    "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
    "softmax": "The new row maximum m, and P = exp(S − m). Nothing is divided yet.",
    "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
    "load_v": "Fetch the values of the same keys.",
    "output": "Weigh the values with P, and add them to the accumulator.",
    "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
    "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
    "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

HOPPER = Support(
    dtypes=("float16", "bfloat16"),
    only=(9, 0),
    tile=warpgroups,
    tiles=(None, Tile(64, 64), Tile(128, 48), Tile(128, 128), Tile(192, 64)),
)
BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols")
ROW = Algorithm(
    "flash3",
    flash3,
    formula.flash3,
    schedule=schedule.launches,
    kernels=(
        PACK,
        Kernel("flash3", "flash3", (*FORWARD, *OPTIONAL, "rng_state", "drawn"), BOXES, "sm_90a", persistent=True),
    ),
    support=replace(HOPPER, masks=(*TRAINED, "dropout")),
    about={"flash3": ABOUT},
    follows="flash3_3",
    rank=2,
    lesson="08_hopper",
)
