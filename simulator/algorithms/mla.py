"""Latent attention (MLA): its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import TREE
from simulator.algorithms.flash_decoding import ABOUT as DECODING
from simulator.algorithms.flash_decoding import passes
from simulator.config import Config, features, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import mla as formula
from simulator.formulas.mla import STAGES, sram_bytes
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.mla import mla, row_warps, splits
from simulator.support import Support

WALKS = 2
"""How often each warp walks over its block's units: to compute them, and to merge what lies in several."""


def warps_of(tile: Tile) -> int:
    """A warp for each 16 rows and 16 keys of S, up to eight. Each also has a part of the output's columns."""
    return min(8, row_warps(tile) * (padded(tile.cols) // 16))


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile whose output a block's warps can hold, else what is accepted."""
    del problem
    if tile.rows in (16, 32, 64) and tile.cols in (32, 64):
        return None
    return "16, 32 or 64 rows and 32 or 64 columns: a block's warps hold an output of 512 columns"


@mla.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As many rows as there are heads and queries, up to 64, and 64 keys. Where SRAM is short, fewer keys, then fewer rows."""
    if tile is not None:
        candidates = [Tile.parse(tile)]
    else:
        packed = problem.padded.len_q * problem.queries_per_kv
        rows = next((n for n in (16, 32) if packed <= n), 64)
        candidates = [Tile(n, cols) for n in (64, 32, 16) if n <= rows for cols in (64, 32)]
    needed = 0
    for chosen in candidates:
        warps = warps_of(chosen)
        needed = sram_bytes(problem, chosen, warps)
        if needed <= device.sram_per_block:
            constants = (
                ("RUN", 1),
                ("TILES_PER_CHUNK", splits(problem, chosen).chunk),
                ("VALUE_DIM", problem.head_dim_v),
                *features(problem),
            )
            return Config(
                tile=chosen,
                warps=warps,
                stages=STAGES,
                blocks_per_sm=1,
                persistent=True,
                walks=passes(problem, 1) * WALKS * warps if problem.apart else 0,
                constants=constants,
            )
    raise SramOverflow("tile", str(candidates[-1]), needed=needed, limit=device.sram_per_block, device=device.name)


_SHARED = ("mask", "store_partial", "arrive", "merge", "store_o", "store_lse")
ABOUT = {
    "mla": {
        "load_q": "Fetch the queries of up to 64 heads: they are rows of one tile, because all share the latent rows.",
        "load_latent": "Fetch the next tile of latent rows, 1,152 bytes each. It is fetched once, as K and as V.",
        "scores": "Multiply the queries by all 576 columns. The warps split the rows, and the keys.",
        "softmax": "The warps tell each other their maxima through SRAM. P = exp(S − m) goes there, too, in 16 bits.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α.",
        "output": "Weigh the first 512 columns of the same tile with P. Each warp has its own columns of the output.",
        "join": "The warps add up what each has of ℓ.",
        **{step: DECODING["flash_decoding"][step] for step in _SHARED},
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ARGUMENTS = ("q", "latent", "out", "lse", "sinks")
LATENT = Support(
    dtypes=("float16", "bfloat16"),
    least=(8, 0),
    masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths", "chunk"),
    head_dims=range(576, 577),
    head_dim_v=512,
    tile=accepts,
    tiles=(None, Tile(16, 32), Tile(32, 64)),
    instead=None,
    few_queries=True,
    same_queries="make a call for each number",
)
ROW = Algorithm(
    "mla",
    mla,
    formula.mla,
    kernels=(
        Kernel("mla", "mla", (*ARGUMENTS, *TREE), persistent=True, when=lambda p: not p.ragged),
        Kernel("mla", "mla", (*ARGUMENTS, "offsets_kv", *TREE), persistent=True, when=lambda p: p.ragged),
    ),
    support=LATENT,
    about=ABOUT,
    lesson="15_cost",
    follows="flash_decoding",
    rank=1,
)
