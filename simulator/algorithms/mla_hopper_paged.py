"""Latent attention (MLA) on Hopper over pages: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import mla_hopper
from simulator.algorithms.common import PARTIAL, REQUESTS
from simulator.algorithms.flash3_paged import box_rows
from simulator.algorithms.mla import ARGUMENTS
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import mla_hopper_paged as formula
from simulator.problem import Problem, Tile
from simulator.programs.mla_hopper_paged import mla_hopper_paged


@mla_hopper_paged.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As mla_hopper's, so that its bits are the same. Where a page fills a tile, or a tile pages, TMA brings boxes."""
    plain = mla_hopper.configure(problem, device, tile)
    box = box_rows(problem, plain.tile)
    constants = (*plain.constants, ("PAGED", 1), *([("PAGE_BOX", box)] if box else []))
    return replace(plain, constants=constants)


_MERGE = mla_hopper.ABOUT["mla_hopper_merge"]
ABOUT = {
    "mla_hopper_paged": mla_hopper.ABOUT["mla_hopper"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of up to 64 heads.",
        "load_latent": "Look the pages of the next tile up. TMA brings boxes of them, or warps fetch rows: once, as K and as V.",
    },
    "mla_hopper_paged_merge": _MERGE | {"merge": f"Look the request's length up. {_MERGE['merge']}"},
}
"""What each step is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "mla_hopper_paged",
    mla_hopper_paged,
    formula.mla_hopper_paged,
    kernels=(
        Kernel(
            "mla_hopper",
            "mla_hopper_paged",
            (*ARGUMENTS, *REQUESTS, *PARTIAL),
            (("latent", "page"),),
            "sm_90a",
            persistent=True,
        ),
        Kernel("mla_hopper", "mla_hopper_paged_merge", ("out", "lse", "sinks", "seq_lens", *PARTIAL), arch="sm_90a"),
    ),
    support=replace(mla_hopper.LATENT_HOPPER, instead="mla_paged"),
    about=ABOUT,
    follows="mla_hopper",
    rank=2,
)
