"""Latent attention on Hopper: TMA brings tiles, one warpgroup has the scores, and two have the output.

The warpgroups of the output hold half of its columns each, which is all that their registers have room for. The third one computes
the scores of the next tile in the meantime, and hands P over through SRAM. Units of work and their tree are those of `mla`, with
chunks of 1,024 keys: there are half as many partial results.
"""

from __future__ import annotations

from math import inf

from simulator.config import Config, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.machine import Machine
from simulator.operations.latent import LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash3 import MBARRIERS, PANEL
from simulator.programs.flash_decoding import Splits, Tree, climb
from simulator.programs.mla import ABOUT as MLA
from simulator.tensors import HbmTensor

CHUNK = 1024
"""Keys of a chunk, whatever the tile is."""
STAGES = 2
WARPS = 16
HALVES = 2
"""Warpgroups that have the output, each half of its columns."""
OUTPUT_WARPS = 4 * HALVES


def splits(problem: Problem, tile: Tile) -> Splits:
    """How a problem is split: into chunks of `CHUNK` keys, and no runs."""
    return Splits(problem, tile, 1, max(1, CHUNK // tile.cols))


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for the tile that the warpgroups' registers are shared out for, else what is accepted."""
    del problem
    return None if tile == Tile(64, 64) else "64x64: registers and SRAM are shared out for this tile"


def sram_bytes(problem: Problem, tile: Tile) -> int:
    """SRAM per block: queries, two tiles of the latent cache, P, a number per row, the mbarriers."""
    d, rows, cols = padded(problem.head_dim), padded(tile.rows), padded(tile.cols)
    return (rows * d + STAGES * cols * d + rows * cols) * problem.itemsize + 4 * rows + 4 * MBARRIERS


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """64 rows and 64 keys. (Smaller tiles are a last resort for small GPUs, where the kernel doesn't run anyway.)"""
    candidates = [Tile(64, 64), Tile(32, 32), Tile(16, 16)] if tile is None else [Tile.parse(tile)]
    for chosen in candidates:
        needed = sram_bytes(problem, chosen)
        if needed <= device.sram_per_block:
            constants = (
                ("RUN", 1),
                ("TILES_PER_CHUNK", splits(problem, chosen).chunk),
                ("VALUE_DIM", problem.head_dim_v),
            )
            return Config(
                tile=chosen, warps=WARPS, stages=STAGES, consumers=HALVES, blocks_per_sm=1, persistent=True,
                constants=constants,
            )  # fmt: skip
    needed = sram_bytes(problem, candidates[-1])
    raise SramOverflow("tile", str(candidates[-1]), needed=needed, limit=device.sram_per_block, device=device.name)


@program(configure=configure, operation=LATENT)
def mla_hopper(m: Machine, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), on Hopper: see `attend`."""
    return attend(m, "mla_hopper", q, latent, problem, tile, panel=PANEL)


def attend(
    m: Machine, name: str, q: HbmTensor, latent: HbmTensor, problem: Problem, tile: Tile, panel: int | None
) -> tuple[HbmTensor, ...]:
    """Multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), split as Flash-Decoding, a warpgroup per task.

    q (batch, heads, len_q, 576); latent (batch, 1, len_kv, 576); out (batch, heads, len_q, 512); lse (batch, heads, len_q) float32,
    natural logarithm. There is one unit of work per row tile and chunk of 1,024 keys. Latent rows come in boxes of `panel` columns,
    or row by row. One warpgroup computes S, and hands on P, and what the output of the tiles before is multiplied with. Two
    warpgroups compute the output, each for half of its columns.
    """
    s, d = splits(problem, tile), problem.head_dim_v
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    q = m.packed(q)
    tree = Tree.of(m, s, q, OUTPUT_WARPS)
    for block in m.launch(name, rows=s.row_tiles, cols=s.runs, walk=s.walk, of=q, warps=WARPS, readers=HALVES):
        row_tile = int(block.i.min()) if not isinstance(block.i, int) else block.i
        chunks = s.chunks_of(row_tile, block.j)
        if not chunks:
            continue  # this row tile sees fewer chunks
        q_i = block.alloc("q", tile.rows, q.cols, q.dtype)
        block.alloc("latent", tile.cols, latent.cols, latent.dtype, copies=STAGES)
        p_i, alpha_i = block.alloc("p", tile.rows, tile.cols, q.dtype), block.alloc("alpha", tile.rows)
        block.alloc("mbarriers", MBARRIERS)
        if block.walk:
            block.step("load_q")
            q_i = block.load(q, block.i, tile.rows)
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, d, 0.0)
        for j in block.walk:
            block.step("load_latent")
            block.look_up(latent, j, tile.cols)  # where it lies in pages
            k_j = block.load(latent, j, tile.cols, stages=STAGES, panel=panel)
            block.step("scores")
            x = block.matmul(q_i, k_j.T, split=("rows", 1), scale=problem.scale)
            block.step("mask")
            x = block.mask(x, block.i, j, group=s.group)
            block.step("softmax")
            m_new = block.maximum(m_i, x.max())
            p = block.exp(x - m_new.finite())
            block.put(p_i, p.round(problem.dtype))
            alpha = block.exp(m_i - m_new.finite())
            l_i = l_i * alpha + p.sum()
            block.put(alpha_i, alpha)
            m_i = m_new
            block.step("rescale")
            acc = acc * block.get(alpha_i, HALVES)
            block.step("output")
            v_j = k_j.columns(0, d)  # the same tile
            acc = block.matmul(p_i, v_j, split=(HALVES, "cols"), acc=acc)
        block.step("share_sum")
        block.put(alpha_i, l_i)
        l_i = block.get(alpha_i, HALVES)
        climb(m, block, s, tree, (acc, m_i, l_i), chunks[-1], outputs)
    return outputs


ABOUT = {
    "mla_hopper": {
        **MLA["mla"],
        "load_q": "The scores' warpgroup fetches the queries of up to 64 heads: rows of one tile, which share the latent rows.",
        "load_latent": "TMA brings the next tile of latent rows: once, as K and as V. It comes in three sets of columns.",
        "scores": "One warpgroup multiplies the queries by all 576 columns, while others still have the tile before.",
        "softmax": "The row maximum m, and P = exp(S − m). P and α = exp(m_old − m_new) go to the output's warpgroups by SRAM.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: the accumulator times α.",
        "output": "Two warpgroups weigh the first 512 columns of the same tile with P, half of the columns each.",
        "share_sum": "The scores' warpgroup tells the others ℓ.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""
del ABOUT["mla_hopper"]["join"]
