"""Latent attention as a model decodes: the heads of one query, and a few queries, against one row per token.

A tile of the latent cache is loaded once. It serves as K with all of its 576 columns, and as V with the first 512. Chunks of keys
run in parallel, and the tree of flash_decoding merges what they have: so a result is the same bit for bit, whatever lies beside it.
"""

from __future__ import annotations

from math import inf

from simulator.config import Config, features, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.machine import Machine
from simulator.operations.latent import LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding import ABOUT as DECODING
from simulator.programs.flash_decoding import Splits, Tree, climb, passes
from simulator.programs.scores import soft_cap
from simulator.tensors import HbmTensor

CHUNK = 512
"""Keys of a chunk, whatever the tile is."""
STAGES = 2
WALKS = 2
"""How often each warp walks over its block's units: to compute them, and to merge what lies in several."""


def row_warps(tile: Tile) -> int:
    """How many warps share the rows of S. The others of a block share its keys."""
    return padded(tile.rows) // 16


def warps_of(tile: Tile) -> int:
    """A warp for each 16 rows and 16 keys of S, up to eight. Each also has a part of the output's columns."""
    return min(8, row_warps(tile) * (padded(tile.cols) // 16))


def splits(problem: Problem, tile: Tile) -> Splits:
    """How a problem is split: into chunks of `CHUNK` keys unless callers say how many, and no runs, because a block has registers
    for one output only."""
    return Splits(problem, tile, 1, max(1, (problem.chunk or CHUNK) // tile.cols))


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for a tile whose output a block's warps can hold, else what is accepted."""
    del problem
    if tile.rows in (16, 32, 64) and tile.cols in (32, 64):
        return None
    return "16, 32 or 64 rows and 32 or 64 columns: a block's warps hold an output of 512 columns"


def sram_bytes(problem: Problem, tile: Tile, warps: int) -> int:
    """SRAM per block: queries, two tiles of the latent cache, P, and a maximum and a sum per row of each warp."""
    d, rows, cols = padded(problem.head_dim), padded(tile.rows), padded(tile.cols)
    statistics = 2 * (warps // row_warps(tile)) * rows * 4
    return (rows * d + STAGES * cols * d + rows * cols) * problem.itemsize + statistics


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


@program(configure=configure, operation=LATENT)
def mla(m: Machine, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434): see `attend`."""
    return attend(m, "mla", q, latent, problem, tile)


def attend(
    m: Machine, name: str, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), split as Flash-Decoding.

    q (batch, heads, len_q, 576); latent (batch, 1, len_kv, 576); out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32,
    natural logarithm. There is one unit of work per row tile and chunk of 512 keys, or as many as the problem
    says. For S, the warps split rows and keys. For the output they split the columns: 512 of them don't fit into one warp's
    registers. So P and the maxima go through SRAM.
    """
    c, d, w = m.config, problem.head_dim_v, m.config.warps
    s, by_rows = splits(problem, tile), row_warps(tile)
    by_keys = max(1, w // by_rows)
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    q = m.packed(q)
    tree = Tree.of(m, s, q, w)
    for block in m.launch(name, rows=s.row_tiles, cols=s.runs, walk=s.walk, of=q, warps=w):
        row_tile = int(block.i.min()) if not isinstance(block.i, int) else block.i
        chunks = s.chunks_of(row_tile, block.j)
        if not chunks:
            continue  # this row tile sees fewer chunks
        q_i = block.alloc("q", tile.rows, q.cols, q.dtype)
        block.alloc("latent", tile.cols, latent.cols, latent.dtype, copies=c.stages)
        p_i = block.alloc("p", tile.rows, tile.cols, q.dtype)
        m_warps, l_warps = (block.alloc(name, tile.rows, copies=by_keys) for name in ("m_warps", "l_warps"))
        if block.walk:
            block.step("load_q")
            q_i = block.load(q, block.i, tile.rows)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, d, 0.0)
        for j in block.walk:
            block.step("load_latent")
            block.look_up(latent, j, tile.cols)  # where it lies in pages
            k_j = block.load(latent, j, tile.cols, stages=c.stages)
            block.step("scores")
            x = block.matmul(q_i, k_j.T, split=(by_keys, by_rows), scale=problem.scale)
            x = soft_cap(block, x, problem)
            block.step("mask")
            x = block.mask(x, block.i, j, group=s.group)
            block.step("softmax")
            block.put(m_warps, x.max(), copies=by_keys)
            m_new = block.maximum(m_i, block.get(m_warps, "none"))
            p = block.exp(x - m_new.finite())
            block.put(p_i, p.round(problem.dtype))
            block.step("rescale")
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            acc = acc * alpha
            m_i = m_new
            block.step("output")
            v_j = k_j.columns(0, d)  # the same tile
            acc = block.matmul(p_i, v_j, split=("none", "cols"), acc=acc)
        block.step("join")
        block.put(l_warps, l_i, copies=by_keys)
        l_i = block.get(l_warps, "none")
        climb(m, block, s, tree, (acc, m_i, l_i), chunks[-1], outputs, owners=w, together=8)
    return outputs


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
