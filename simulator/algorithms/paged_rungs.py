"""The rung below paged attention: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms import flash_decoding_rungs
from simulator.algorithms.common import FORWARD, REQUESTS
from simulator.algorithms.flash_decoding_rungs import END, RUNG, TILE, WALK
from simulator.config import Config
from simulator.devices import Device
from simulator.formulas import paged_1 as formula
from simulator.problem import Problem, Tile
from simulator.programs.paged_1 import paged_1


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile with a lane for each key, else what is accepted."""
    del problem
    if tile.rows == TILE.rows and tile.cols in (16, 32):
        return None
    return "16 rows, and 16 or 32 columns, a lane of the warp for each"


@paged_1.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As `flash_decoding_1`, so that its bits are the same."""
    return flash_decoding_rungs.configure(problem, device, tile)


ABOUT = {
    "paged_1": WALK
    | END
    | {
        "load_q": "Fetch how many keys the request has, and the queries of all heads that share this KV head.",
        "load_k": "Each lane looks up the page of a key in the block table. Then the keys are fetched, some tiles ahead.",
        "load_v": "Fetch the values of the same keys. They lie in the same pages.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""

FIRST = Algorithm(
    "paged_1",
    paged_1,
    formula.paged_1,
    kernels=(Kernel("paged_1", "paged_1", (*FORWARD, *REQUESTS)),),
    support=replace(
        RUNG,
        masks=(*RUNG.masks, "lengths"),
        tile=accepts,
        tiles=(None, Tile(16, 16)),
        instead="paged",
    ),
    about=ABOUT,
    follows="flash_decoding_1",
    lesson="13_pages",
    shown={"batch": 2, "heads": 8, "kv_heads": 2, "lengths": [(1, 200), (1, 70)], "page_size": 16, "pages": 22},
)
ROWS = (FIRST,)
