"""Pages copied to others: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, features
from simulator.devices import Device
from simulator.formulas import copy_pages as formula
from simulator.problem import COMMON_MASKS, OF_CACHES, Problem, Tile
from simulator.programs.copy_pages import copy_pages
from simulator.support import Support


def accepts(tile: Tile, problem: Problem) -> None:
    """Any tile: it means nothing here."""
    del tile, problem


@copy_pages.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """Four warps share out the rows of a page. A tile means nothing: a block has a page of a head."""
    del device
    return Config(tile=Tile(16, 16) if tile is None else Tile.parse(tile), warps=4, constants=features(problem))


ABOUT = {
    "copy_pages": {
        "load_pair": "Read which page is copied, and to which page.",
        "load_k": "Read the keys of one head into registers, and their scales where they have some.",
        "load_v": "The same for the values.",
        "store_k": "Write the keys to the other page.",
        "store_v": "The same for the values.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "copy_pages",
    copy_pages,
    formula.copy_pages,
    kernels=(Kernel("copy_pages", "copy_pages", ("k_pool", "v_pool", "pairs", "k_scale", "v_scale")),),
    support=Support(masks=(*COMMON_MASKS, *OF_CACHES), tile=accepts, instead=None),
    about=ABOUT,
    rank=1,
)
