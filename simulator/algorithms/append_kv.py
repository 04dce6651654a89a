"""New rows into pages: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, features
from simulator.devices import Device
from simulator.formulas import append_kv as formula
from simulator.problem import COMMON_MASKS, OF_CACHES, Problem, Tile
from simulator.programs.append_kv import append_kv
from simulator.support import Support

WARPS = 4


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile whose rows a block's warps share out, else what is accepted."""
    del problem
    return None if tile.rows % WARPS == 0 and tile.rows <= 128 else f"a multiple of {WARPS} rows up to 128, any columns"


@append_kv.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """Eight tokens for each warp: as many as it can have under way at once. The columns of a tile mean nothing: rows are whole."""
    del device
    chosen = Tile(8 * WARPS, 16) if tile is None else Tile.parse(tile)
    return Config(tile=chosen, warps=WARPS, constants=features(problem))


ABOUT = {
    "append_kv": {
        "load_slots": "Read into which slot of the pool each new token goes. Below 0, the token is skipped.",
        "load_k": "Fetch the new keys of one head that have a slot. They stay in registers.",
        "load_v": "Fetch their values.",
        "store_k": "Write each key to its slot. For a pool of 8 bits, divide it by its scale first, and write that, too.",
        "store_v": "The same for the values.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "append_kv",
    append_kv,
    formula.append_kv,
    kernels=(
        Kernel(
            "append_kv", "append_kv", ("k", "v", "k_pool", "v_pool", "slot_mapping", "k_scale", "v_scale"),
        ),
    ),
    support=Support(
        masks=(*COMMON_MASKS, *OF_CACHES), tile=accepts, tiles=(None, Tile(8, 16), Tile(128, 16)), instead=None
    ),
    about=ABOUT,
    rank=1,
)  # fmt: skip
