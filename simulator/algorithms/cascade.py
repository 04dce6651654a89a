"""Attention of requests that share a prefix (cascade): its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.config import Config, features, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import cascade as formula
from simulator.formulas.cascade import sram_bytes
from simulator.problem import COMMON_MASKS, Problem, Tile
from simulator.programs.cascade import ROWS, STAGES, SUFFIX_CHUNK, cascade, rows_for, splits, warp_rows, warps
from simulator.support import Support


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile whose rows a block's warps share out, else what is accepted."""
    most = 64 if padded(problem.head_dim) <= 128 else 32
    if tile.rows in ROWS and tile.cols % 16 == 0 and SUFFIX_CHUNK % tile.cols == 0 and tile.cols <= most:
        return None
    return f"16, 32, 64 or 128 rows, and 16, 32 or 64 columns, up to {most} with this head dim"


@cascade.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As many rows as all requests have queries and heads in a group, up to 128, or as SRAM has room for.

    The columns follow the head dim alone: with others, a row would have other bits.
    """
    if tile is not None:
        candidates = [Tile.parse(tile)]
    else:
        cols = 64 if padded(max(problem.head_dim, problem.head_dim_v)) <= 128 else 32
        most = rows_for(problem.batch * problem.len_q * problem.queries_per_kv)
        candidates = [Tile(rows, cols) for rows in reversed(ROWS) if rows <= most]
    for chosen in candidates:
        if sram_bytes(problem, chosen) <= device.sram_per_block:
            prefix, suffix = splits(problem, chosen)
            has = {"WINDOW": problem.left is not None, "LENGTHS": problem.lengths is not None}
            constants = (
                ("PREFIX_TILES", prefix.chunk),
                ("PREFIX_WARP_ROWS", warp_rows(prefix)),
                ("SUFFIX_ROWS", suffix.tile.rows),
                ("SUFFIX_TILES", suffix.chunk),
                ("SUFFIX_WARP_ROWS", warp_rows(suffix)),
                *features(problem),
                *((name, 1) for name, asked in has.items() if asked),
            )
            return Config(tile=chosen, warps=warps(prefix), stages=STAGES, constants=constants)
    needed = sram_bytes(problem, candidates[-1])
    raise SramOverflow("tile", str(candidates[-1]), needed=needed, limit=device.sram_per_block, device=device.name)


_PART = {
    "load_q": "Fetch the queries of all heads that share this KV head, of many requests: they are rows of one tile.",
    "load_k": "Fetch the next tile of the prefix's keys, a tile ahead. It is fetched once for all of these rows.",
    "load_v": "Fetch the values of the same keys.",
    "scores": "Multiply the queries by the keys. Each warp has 16 or 32 rows, and all keys.",
    "mask": "Set the scores beyond the last key to −∞, so that their exponential is 0.",
    "softmax": "The new row maximum m, and P = exp(S − m).",
    "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α.",
    "output": "Weigh the values with P, and add them to the accumulator.",
    "store_part": "Divide by ℓ, and write what this chunk says of each row to HBM: an output and its log-sum-exp.",
}


ABOUT = {
    "cascade_prefix": _PART,
    "cascade_suffix": _PART
    | {
        "load_q": "Fetch the queries of all heads that share this KV head, of one request.",
        "load_k": "Fetch the next tile of this request's own keys, a tile ahead.",
        "mask": "Set the scores that the mask hides to −∞. A causal mask is about these keys alone.",
    },
    "cascade_merge": {
        "load_part": "Fetch a row's next partial result and its log-sum-exp: the prefix's first, in their order.",
        "merge": "Weigh what there is and what comes by their log-sum-exps. One of −∞ saw no key, and changes nothing.",
        "normalize": "A sink joins here, once. Then divide by the sum of the weights.",
        "store_o": "Write the finished row of the output to HBM.",
        "store_lse": "Write the row's log-sum-exp to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


def launches(*, lengths: bool) -> tuple[Kernel, ...]:
    """The launches with own lengths of the requests or without."""
    entries = {
        "prefix": ("q", "k_prefix", "v_prefix", "partial", "partial_lse"),
        "suffix": ("q", "k", "v", "partial", "partial_lse"),
        "merge": ("partial", "partial_lse", "sinks", "out", "lse"),
    }
    own = ("seq_lens",) * lengths
    return tuple(
        Kernel("cascade", f"cascade_{entry}", (*each, *own), when=lambda p: (p.lengths is not None) == lengths)
        for entry, each in entries.items()
    )


ROW = Algorithm(
    "cascade",
    cascade,
    formula.cascade,
    kernels=(*launches(lengths=False), *launches(lengths=True)),
    support=Support(
        dtypes=("float16", "bfloat16"),
        least=(8, 0),
        masks=(*COMMON_MASKS, "soft_cap", "sinks", "lengths"),
        tile=accepts,
        tiles=(None, Tile(16, 16), Tile(32, 32)),
        instead=None,
    ),
    about=ABOUT,
    follows="flash_decoding",
    lesson="13_pages",
)
