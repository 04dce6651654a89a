"""The rungs below FlashAttention-3's backward pass: their configurations, the player's words, and their rows.

All move the same bytes, and have the first and the last launch of `flash3_backward`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from simulator.algorithm import Algorithm, Kernel, Schedule
from simulator.algorithms.flash3_backward import ABOUT, BOXES, HOPPER, OF_ROWS, configure_rung
from simulator.formulas import flash3_backward as formula
from simulator.problem import COMMON_MASKS
from simulator.program import Program
from simulator.programs.flash3_backward_1 import flash3_backward_1
from simulator.programs.flash3_backward_2 import flash3_backward_2
from simulator.programs.flash3_backward_3 import flash3_backward_3
from simulator.time.schedules import flash3_backward_1 as schedule_1
from simulator.time.schedules import flash3_backward_2 as schedule_2
from simulator.time.schedules import flash3_backward_3 as schedule_3

flash3_backward_1.configured(partial(configure_rung, producers=0))
flash3_backward_2.configured(configure_rung)
flash3_backward_3.configured(configure_rung)


def about(name: str, changes: dict[str, str]) -> dict[str, dict[str, str]]:
    """The player's words for a rung: those of `flash3_backward`, with changes."""
    main = {
        "load_q": "TMA brings the next tile of queries that see any of these keys, and a warp fetches their LSE.",
        "load_do": "TMA brings dO of the same queries, and a warp fetches their D.",
        "dp": "dP = V dOᵀ: how the loss depends on each probability.",
        "store_dkv": "Write dK, times the scale, and dV to HBM, for the first and only time.",
    }
    others = {launch: ABOUT[launch] for launch in ("flash3_backward_delta", "flash3_backward_convert")}
    return others | {name: ABOUT["flash3_backward"] | main | changes}


def rung(program: Program, schedule: Schedule, changes: dict[str, str], follows: str) -> Algorithm:
    """The row of a rung. `changes` are the words for the steps that it changes."""
    name, file, arch = program.name, "flash3_backward", "sm_90a"
    return Algorithm(
        name,
        program,
        formula.rung(name),
        schedule=schedule,
        kernels=(
            Kernel(file, "flash3_backward_delta", (*OF_ROWS, "order"), arch=arch),
            Kernel(name, name, ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dk", "dv"), BOXES, arch),
            Kernel(file, "flash3_backward_convert", ("dq_sum", "dq", "offsets_q"), arch=arch),
        ),
        support=replace(HOPPER, masks=(*COMMON_MASKS, "dlse"), instead="flash3_backward"),
        about=about(name, changes),
        follows=follows,
        atomics=("dq",),
    )


_1 = {
    "load_kv": "One thread asks TMA for a tile of keys and their values. Their gradients never leave the registers.",
    "scores": "Each warpgroup multiplies its 64 keys by the queries (WGMMA), and waits: the tile of S again, transposed.",
    "dq": "dS K belongs to dQ of these queries. All warps wait until all of dS is there. Atomics add dQ up in HBM.",
}
_2 = {
    "load_kv": "The producer asks TMA for a tile of keys and their values. Their gradients never leave the registers.",
    "load_q": "The producer loads a ring ahead: TMA brings a tile of queries, and a warp their LSE, once a slot is empty.",
    "load_do": "The producer also loads dO of the same queries, and another warp their D.",
    "dq": "dS K belongs to dQ of these queries. Each warpgroup waits for the other one's dS. Atomics add dQ up in HBM.",
}
_3 = {
    "load_do": "The producer also loads dO of the same queries, and another warp their D. The sums of dP begin at −D.",
    "dp": "dP = V dOᵀ, in the background: how the loss depends on each probability.",
    "exp": "P = exp(S − LSE), while the tensor cores are busy with dP.",
    "dq": "dS K belongs to dQ of these queries. It is computed one tile later: the other warpgroup's dS is there by then.",
}
"""What the steps that a rung changes are for: the player's words."""

ROWS = (
    rung(flash3_backward_1, schedule_1.launches, _1, "flash2_backward"),
    rung(flash3_backward_2, schedule_2.launches, _2, "flash3_backward_1"),
    rung(flash3_backward_3, schedule_3.launches, _3, "flash3_backward_2"),
)
