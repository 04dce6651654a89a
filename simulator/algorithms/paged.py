"""Paged attention: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import flash_decoding
from simulator.algorithms.common import FORWARD, REQUESTS, TREE
from simulator.algorithms.flash_decoding import CLASSES, SORTED
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import paged as formula
from simulator.problem import COMMON_MASKS, OF_CACHES, Problem, Tile
from simulator.programs.paged import paged
from simulator.support import Support, a_lane_per_key


@paged.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As flash_decoding's, so that its bits are the same."""
    plain = flash_decoding.configure(problem, device, tile)
    return replace(plain, constants=(*plain.constants, ("PAGED", 1)))


def keys_of_blocks(lengths: Sequence[int], run: int, units: int, blocks: int) -> list[int]:
    """How many keys each block reads of requests of these lengths, as units.cuh deals out runs of `run` keys.

    Each run is there for so many `units`: KV heads, and tiles of rows. Full runs come first, then the last ones, the long ones
    first: `SORTED` requests at a time, and of more by `CLASSES`. Of each round a block takes one, in an order that turns round.

    >>> keys_of_blocks([100, 250, 30], run=100, units=2, blocks=4)  # 100 × 4; backwards 100, 100, 50, 50; 30, 30
    [180, 180, 200, 200]
    """
    last = [n - (n - 1) // run * run if n else 0 for n in lengths]
    dealt = [run] * sum((n - 1) // run for n in lengths if n) * units
    classes = CLASSES if len(lengths) > SORTED else 1
    for own in range(classes):
        for first in range(0, len(last), SORTED):
            together = sorted(last[first : first + SORTED], reverse=True)
            belong = [n for n in together if min((run - n) * classes // run, classes - 1) == own]
            dealt += [n for n in belong for _ in range(units)]
    keys = [0] * blocks
    for i, n in enumerate(dealt):
        turn, place = divmod(i, blocks)
        keys[blocks - 1 - place if turn % 2 else place] += n
    return keys


ABOUT = {
    "paged": flash_decoding.ABOUT["flash_decoding"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of all heads that share this KV head. "
        "Where keys are drafts, each warp also fetches a word for each query, which says the drafts that it sees.",
        "load_k": "Look the pages of the next tile's keys up, and fetch the keys. Each warp does so for its own, well ahead.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""


def launch(scales: bool, drafts: bool) -> Kernel:
    """The launch, with scales of quantised K and V or without, with a mask of drafts or without."""
    further = (*FORWARD, "sinks", *("k_scale", "v_scale") * scales, *REQUESTS, *("draft_mask",) * drafts, *TREE)
    return Kernel(
        "flash_decoding", "paged", further, persistent=True, when=lambda p: (p.quantized, p.drafts) == (scales, drafts)
    )


ROW = Algorithm(
    "paged",
    paged,
    formula.paged,
    kernels=tuple(launch(scales, drafts) for scales in (False, True) for drafts in (False, True)),
    support=Support(
        masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", *OF_CACHES, "drafts"),
        tile=a_lane_per_key,
        tiles=(None, Tile(16, 16), Tile(32, 32)),
        few_queries=True,
        instead="flash_decoding",
    ),
    about=ABOUT,
    follows="flash_decoding",
    rank=1,
)
