"""Latent attention (MLA) on Hopper: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import PARTIAL
from simulator.algorithms.flash_decoding import passes
from simulator.algorithms.mla import ABOUT as MLA
from simulator.algorithms.mla import LATENT
from simulator.config import Config, features
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import mla_hopper as formula
from simulator.formulas.mla_hopper import sram_bytes
from simulator.problem import Problem, Tile
from simulator.programs.mla_hopper import HALVES, STAGES, WARPS, merges, mla_hopper, splits
from simulator.time.schedules import mla_hopper as schedule

TILE = Tile(64, 64)
FEW = 4
"""Chunks that such a warp asks for at once where no row has more. Else it asks for 16, which takes registers."""


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for the tile that the warpgroups' registers are shared out for, else what is accepted."""
    del problem
    return None if tile == TILE else "64x64: registers and SRAM are shared out for this tile"


@mla_hopper.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """64 rows and 64 keys. (Smaller tiles are a last resort for small GPUs, where the kernel doesn't run anyway.)"""
    candidates = [TILE, Tile(32, 32), Tile(16, 16)] if tile is None else [Tile.parse(tile)]
    for chosen in candidates:
        needed = sram_bytes(problem, chosen)
        if needed <= device.sram_per_block:
            s = splits(problem.padded, chosen)
            constants = (
                ("RUN", 1),
                ("TILES_PER_CHUNK", s.chunk),
                ("VALUE_DIM", problem.head_dim_v),
                *([("FEW_CHUNKS", 1)] if s.runs <= FEW else []),
                *features(problem),
            )
            return Config(
                tile=chosen, warps=WARPS, stages=STAGES, consumers=HALVES, blocks_per_sm=1, persistent=True,
                walks=passes(problem, 1) * WARPS if problem.apart else 0, constants=constants,
            )  # fmt: skip
    needed = sram_bytes(problem, candidates[-1])
    raise SramOverflow("tile", str(candidates[-1]), needed=needed, limit=device.sram_per_block, device=device.name)


ABOUT = {
    "mla_hopper": {
        "load_q": "The scores' warpgroup fetches the queries of up to 64 heads: rows of one tile, which share the latent rows.",
        "load_latent": "TMA brings the next tile of latent rows: once, as K and as V. It comes in five sets of columns.",
        "scores": "One warpgroup multiplies the queries by all 576 columns, while others still have the tile before.",
        "mask": MLA["mla"]["mask"],
        "softmax": "The row maximum m, and P = exp(S − m). P and α = exp(m_old − m_new) go to the output's warpgroups by SRAM.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: the accumulator times α.",
        "output": "Two warpgroups weigh the first 512 columns of the same tile with P, half of the columns each.",
        "share_sum": "The scores' warpgroup tells the others ℓ.",
        "store_partial": "Other blocks have other keys of these rows: what this one has goes to HBM.",
        "store_o": MLA["mla"]["store_o"],
        "store_lse": MLA["mla"]["store_lse"],
    },
    "mla_hopper_merge": {
        "merge": "Fetch what all chunks have of a row, and add it up, each weighed with exp(m − the largest m).",
        "store_o": MLA["mla"]["store_o"],
        "store_lse": MLA["mla"]["store_lse"],
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


def launches(*, ragged: bool) -> tuple[Kernel, ...]:
    """The launches for a ragged batch or for a plain one."""
    further = "lse", "sinks", *("offsets_kv",) * ragged, *PARTIAL
    return (
        Kernel(
            "mla_hopper",
            "mla_hopper",
            ("q", "latent", "out", *further),
            (("latent", "cols"),),
            "sm_90a",
            persistent=True,
            when=lambda p: p.ragged == ragged,
        ),
        Kernel(
            "mla_hopper",
            "mla_hopper_merge",
            ("out", *further),
            arch="sm_90a",
            when=lambda p: p.ragged == ragged and merges(p, TILE),
        ),
    )


LATENT_HOPPER = replace(LATENT, only=(9, 0), tile=accepts, tiles=(None,), instead="mla")
ROW = Algorithm(
    "mla_hopper",
    mla_hopper,
    formula.mla_hopper,
    schedule=schedule.launches,
    kernels=(*launches(ragged=False), *launches(ragged=True)),
    support=LATENT_HOPPER,
    about=ABOUT,
    follows="mla",
    rank=2,
)
