"""Paged attention on Hopper: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import flash_decoding
from simulator.algorithms.common import FORWARD, REQUESTS
from simulator.algorithms.flash3 import ABOUT as FLASH3
from simulator.algorithms.flash3 import HOPPER, configure_rung
from simulator.config import Config, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.formulas import flash3_paged as formula
from simulator.formulas.flash3_paged import sram_bytes
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.flash3_paged import flash3_paged

ROWS = 128
"""Queries of a row tile: 64 for each of two warpgroups."""
SWIZZLED = 8
"""Rows after which the swizzle of a tile begins anew: a box has a multiple of them."""


def box_rows(problem: Problem, tile: Tile) -> int:
    """How many rows of a page TMA brings in one box: all of it, or as many as a tile has. 0 where neither divides the other.

    >>> p = Problem(batch=1, heads=1, len_q=512, len_kv=512, head_dim=128, dtype="float16")
    >>> [box_rows(p.replace(page_size=n), Tile(128, 128)) for n in (1, 16, 64, 100, 256)]
    [0, 16, 64, 0, 128]
    """
    size = problem.page_size or 1
    rows = min(size, tile.cols)
    return rows if max(size, tile.cols) % rows == 0 and rows % SWIZZLED == 0 else 0


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that leaves its warpgroups' registers for the warps that copy, else what is accepted."""
    del problem
    if tile.rows in (64, 128) and tile.cols % 16 == 0 and tile.cols <= 128:
        return None
    return "64 or 128 rows, 64 for each warpgroup, and a multiple of 16 columns up to 128"


def choose_tile(problem: Problem) -> Tile:
    """As many keys as registers and SRAM leave room for. A soft cap takes registers, too."""
    d, capped = padded(problem.head_dim), problem.soft_cap is not None
    if d <= 128:
        return Tile(ROWS, 128)
    if d <= 192:
        return Tile(ROWS, 64 if capped and d > 160 else 96)
    return Tile(ROWS, 48 if capped else 64)


def pays(problem: Problem, device: Device) -> bool:
    """Is it faster than `paged`? It is where `flash3` is faster than `flash_decoding`, if all requests are as long.

    >>> from simulator.devices import DEVICES
    >>> p = Problem(batch=16, heads=32, kv_heads=8, len_q=512, len_kv=8192, head_dim=128, dtype="bfloat16", page_size=16)
    >>> [pays(p.replace(batch=b, len_q=n), DEVICES["h100"]) for b, n in ((16, 512), (1, 512), (16, 32), (4, 32), (64, 32))]
    [True, True, True, True, True]
    >>> [pays(p.replace(batch=b, len_q=n), DEVICES["h100"]) for b, n in ((16, 16), (64, 1), (1, 32))]
    [False, False, False]
    """
    return not flash_decoding.pays(problem, device)


@flash3_paged.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """Two warpgroups of 64 rows. Wide heads leave them no registers to take one row tile after the other.

    Copies take longer than boxes of TMA: they are issued row by row. So the ring has three stages where that many fit.
    """
    rung = configure_rung(problem, device, tile, choose_tile(problem), stages=3, sram=sram_bytes)
    drawn = padded(problem.head_dim) <= 192
    together = heads_that_share_the_l2(problem, device)
    return replace(
        rung,
        heads_together=together,
        constants=(*([("PAGE_BOX", box)] if (box := box_rows(problem, rung.tile)) else []), *features(problem)),
        persistent=drawn,
        dynamic=drawn,
        told=True,
        sorted=True,
    )


ABOUT = {
    "flash3_paged": FLASH3
    | {
        "load_q": "A warp finds the row tile's request among 32, the longest first, and tells the others. TMA brings the queries.",
        "load_k": "Walk on, from the last key tile to the first. Warps look its pages up. TMA brings boxes, or they copy rows.",
        "load_v": "Other warps do the same for the values of these keys.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash3_paged",
    flash3_paged,
    formula.flash3_paged,
    kernels=(
        Kernel(
            "flash3_paged",
            "flash3_paged",
            (*FORWARD, "sinks", *REQUESTS, "cu_seqlens_q", "drawn"),
            (("q", "rows"), ("k", "page"), ("v", "page")),
            "sm_90a",
            persistent=True,
        ),
    ),
    support=replace(
        HOPPER,
        masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "varlen"),
        tile=accepts,
        tiles=(None, Tile(64, 64), Tile(128, 48), Tile(64, 128)),
        instead="paged",
    ),
    about=ABOUT,
    follows="flash3",
    rank=2,
    pays=pays,
    shown={"batch": 2, "lengths": [(128, 192), (128, 160)], "page_size": 16, "pages": 28, "tile": "64x48"},
)
