"""The rungs below Flash-Decoding: their configurations, the player's words, and their rows of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import FORWARD, PARTIAL
from simulator.config import Config, choose, padded
from simulator.devices import Device
from simulator.formulas import flash_decoding_1 as formula_1
from simulator.formulas import flash_decoding_2 as formula_2
from simulator.formulas.flash_decoding_1 import sram_bytes
from simulator.problem import Problem, Tile
from simulator.programs.flash_decoding_1 import flash_decoding_1
from simulator.programs.flash_decoding_2 import LEAST_TILES, MOST_CHUNKS, flash_decoding_2
from simulator.support import Support

TILE = Tile(16, 32)
"""A tile: as many rows as a product of the tensor cores has, and a key for each lane of a warp."""


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile that one warp has registers for, else what is accepted."""
    most = 64 if padded(problem.head_dim) <= 128 else 32
    if tile.rows == TILE.rows and tile.cols in (16, 32, 64) and tile.cols <= most:
        return None
    return f"16 rows, and 16, 32 or 64 columns, up to {most} with this head dim"


@flash_decoding_1.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """A block that is one warp. Its ring is deep, because bytes on their way are what decoding needs."""
    stages = 4 if padded(problem.head_dim) <= 128 else 2
    chosen = choose([TILE, Tile(16, 16)], tile, device, lambda each: sram_bytes(problem, each, stages))
    return Config(tile=chosen, warps=1, stages=stages)


@flash_decoding_2.configured
def configure_chunks(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The same, and the kernel is told how chunks are made."""
    constants = (("LEAST_TILES", LEAST_TILES), ("MOST_CHUNKS", MOST_CHUNKS))
    return replace(configure(problem, device, tile), constants=constants)


RUNG = Support(
    dtypes=("float16", "bfloat16"),
    masks=("causal", "scale"),
    least=(8, 0),
    tile=accepts,
    tiles=(None, Tile(16, 16), Tile(16, 64)),
    few_queries=True,
    queries=1,
    instead="flash_decoding",
)
"""What the rungs take: one query per sequence, from which a causal mask hides nothing. The rest is for `flash_decoding`."""

WALK = {
    "load_q": "Fetch the queries of all heads that share this KV head: they are rows of one tile.",
    "load_k": "Fetch the next tile of keys, some tiles ahead. It is fetched once for all of these heads.",
    "scores": "Multiply the queries by the keys. A product has 16 rows, whether all of them are heads or not.",
    "mask": "Set the scores beyond the last key to −∞, so that their exponential is 0.",
    "softmax": "The new row maximum m, and P = exp(S − m).",
    "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α.",
    "load_v": "Fetch the values of the same keys.",
    "output": "Weigh the values with P, and add them to the accumulator.",
}
END = {
    "normalize": "After the last key, divide the accumulator by ℓ.",
    "store_o": "Write the finished rows of the output to HBM.",
    "store_lse": "Write each row's log-sum-exp to HBM.",
}
"""What the steps of a walk over keys are for, and those after it: the player's words."""

SHOWN = {"heads": 8, "kv_heads": 2, "len_q": 1, "len_kv": 300}

FIRST = Algorithm(
    "flash_decoding_1",
    flash_decoding_1,
    formula_1.flash_decoding_1,
    kernels=(Kernel("flash_decoding_1", "flash_decoding_1", FORWARD),),
    support=RUNG,
    about={"flash_decoding_1": WALK | END},
    follows="flash2",
    lesson="12_one_token",
    shown=SHOWN,
)
SECOND = Algorithm(
    "flash_decoding_2",
    flash_decoding_2,
    formula_2.flash_decoding_2,
    kernels=(
        Kernel("flash_decoding_2", "flash_decoding_2", ("q", "k", "v", *PARTIAL)),
        Kernel("flash_decoding_2", "flash_decoding_2_merge", (*PARTIAL, "out", "lse")),
    ),
    support=RUNG,
    about={
        "flash_decoding_2": WALK
        | {
            "load_k": "Fetch the next tile of this chunk's keys, some tiles ahead.",
            "store_partial": "Write what this chunk has of each row to HBM: O, which isn't divided yet, m and ℓ.",
        },
        "flash_decoding_2_merge": {
            "load_partial": "Fetch what the next chunk has of this row.",
            "merge": "Weigh both sides by their maxima, and add them up. A chunk without keys weighs nothing.",
            **END,
            "normalize": "After the last chunk, divide by ℓ: once, for all chunks.",
        },
    },
    follows="flash_decoding_1",
    lesson="12_one_token",
    shown=SHOWN,
)
ROWS = (FIRST, SECOND)
