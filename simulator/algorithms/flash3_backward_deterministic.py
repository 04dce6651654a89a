"""FlashAttention-3, backward, the same bits in every run: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from simulator.algorithm import Algorithm
from simulator.algorithms import flash3_backward as unordered
from simulator.algorithms.flash3 import triangular
from simulator.devices import Device
from simulator.formulas import flash3_backward_deterministic as formula
from simulator.problem import COMMON_MASKS, Problem
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward_deterministic import flash3_backward_deterministic
from simulator.time.schedules import flash3_backward_deterministic as schedule

FEW = 10
"""Under a causal mask so many key tiles of a head cost no time by their turns, about."""
LATE = 1.5
"""Without a mask, so many visits of an SM for each pair of a head's key tiles are enough, about."""
LATE_NARROW = 6
"""The same at head dims up to 64."""


flash3_backward_deterministic.configured(partial(unordered.configure, in_turn=True))


def pays(problem: Problem, device: Device) -> bool:
    """Is it faster than `flash3_backward`, which sets the sums to 0 first and rounds them in a launch of its own?

    What those launches cost is the smaller a share, the more key tiles a head has. And the last key tile of a head is the later,
    the more there are before it. So without a mask, the square of their number counts, beside all visits of query tiles that an
    SM makes. (They count less at narrow heads, whose blocks are persistent in `flash3_backward`.) Under a causal mask, few key
    tiles cost next to nothing.

    >>> from simulator import DEVICES
    >>> p = Problem(batch=16, heads=16, len_q=1024, head_dim=128, dtype="bfloat16")
    >>> [pays(p.replace(batch=n, causal=causal), DEVICES["h200"]) for causal in (False, True) for n in (16, 4)]
    [True, False, True, True]
    """
    p, tile = problem, unordered.choose_tile(problem)
    tiles = p.key_tiles(tile)
    if triangular(p):
        return tiles <= FEW
    visits = p.batch * p.heads * p.row_tiles(tile) * tiles / device.sms
    enough = (LATE_NARROW if p.head_dim <= PANEL else LATE) * tiles**2
    return p.left is None and p.right is None and p.queries_per_kv == 1 and visits >= enough


ABOUT = {
    "flash3_backward_delta": {
        **unordered.ABOUT["flash3_backward_delta"],
        "zero_dq": "Say which key tile adds to dQ first. dQ of queries that see no key is 0.",
    },
    "flash3_backward": {
        **unordered.ABOUT["flash3_backward"],
        "load_kv": "Draw the next key tile: blocks with lower numbers have begun. TMA brings its keys and their values.",
        "dq": "dS K belongs to dQ of these queries. Wait for the key tiles before. The first one writes its part, others add "
        "theirs, and the last one adds its part to what it reads, and writes dQ.",
    },
    **{name: unordered.ABOUT[name] for name in ("flash3_backward_parts", "flash3_backward_sinks")},
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash3_backward_deterministic",
    flash3_backward_deterministic,
    formula.flash3_backward_deterministic,
    schedule=schedule.launches,
    kernels=unordered.launches(waits=True),
    support=replace(
        unordered.HOPPER,
        masks=(*COMMON_MASKS, "sinks", "dropout", "dlse", "partial"),
        instead="flash2_backward_deterministic",
    ),
    about=ABOUT,
    follows="flash3_backward",
    rank=5,
    pays=pays,
)
