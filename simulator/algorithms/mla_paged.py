"""Latent attention (MLA) over pages: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import mla
from simulator.algorithms.common import REQUESTS, TREE
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import mla_paged as formula
from simulator.problem import Problem, Tile
from simulator.programs.mla_paged import mla_paged


@mla_paged.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As mla's, so that its bits are the same."""
    plain = mla.configure(problem, device, tile)
    return replace(plain, constants=(*plain.constants, ("PAGED", 1)))


ABOUT = {
    "mla_paged": mla.ABOUT["mla"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of up to 64 heads.",
        "load_latent": "Look the pages of the next tile's rows up, and fetch the rows. They are fetched once, as K and as V.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "mla_paged",
    mla_paged,
    formula.mla_paged,
    kernels=(Kernel("mla", "mla_paged", (*mla.ARGUMENTS, *REQUESTS, *TREE), persistent=True),),
    support=replace(mla.LATENT, instead="mla"),
    about=ABOUT,
    follows="mla",
    rank=1,
)
