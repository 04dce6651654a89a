"""Latent attention as a model decodes: the heads of one query, and a few queries, against one row per token.

A tile of the latent cache is loaded once. It serves as K with all of its 576 columns, and as V with the first 512. Chunks of keys
run in parallel, and the tree of flash_decoding merges what they have: so a result is the same bit for bit, whatever lies beside it.
"""

from __future__ import annotations

from math import inf

from simulator.config import padded
from simulator.machine import Machine
from simulator.operations.latent import LATENT
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding import Splits, Tree, climb
from simulator.programs.scores import soft_cap
from simulator.tensors import HbmTensor

CHUNK = 512
"""Keys of a chunk, whatever the tile is."""


def row_warps(tile: Tile) -> int:
    """How many warps share the rows of S. The others of a block share its keys."""
    return padded(tile.rows) // 16


def splits(problem: Problem, tile: Tile) -> Splits:
    """How a problem is split: into chunks of `CHUNK` keys, or of as many as callers ask for. A run is one chunk: a block has no
    registers for a second output."""
    return Splits(problem, tile, 1, max(1, (problem.chunk or CHUNK) // tile.cols))


@program(operation=LATENT)
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
