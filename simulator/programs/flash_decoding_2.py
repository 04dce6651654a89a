"""Decoding, rung 2: each chunk of the keys has a block of its own, and a second launch merges what the blocks have."""

from __future__ import annotations

from math import inf

from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding_1 import attend, finish, outputs_of, row_tiles
from simulator.tensors import HbmTensor

LEAST_TILES = 4
"""The fewest key tiles of a chunk: partial results cost bytes."""
MOST_CHUNKS = 64
"""The most chunks of a sequence: a single warp merges those of a row. Longer sequences have longer chunks."""


def chunk_tiles(problem: Problem, tile: Tile) -> int:
    """How many key tiles a chunk has. The sequence's own length says it, so its bits are the same in every batch.

    >>> p = Problem(batch=1, heads=8, kv_heads=2, len_q=1, len_kv=1000, head_dim=64, dtype="float16")
    >>> [chunk_tiles(p.replace(len_kv=n), Tile(16, 32)) for n in (1000, 8192, 65_536)]
    [4, 4, 32]
    """
    return max(LEAST_TILES, -(-problem.key_tiles(tile) // MOST_CHUNKS))


def chunks(problem: Problem, tile: Tile) -> int:
    """How many chunks the keys have, at least one: without keys there is an output to write, too."""
    return max(1, -(-problem.key_tiles(tile) // chunk_tiles(problem, tile)))


@program
def flash_decoding_2(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding as it was published (Dao, Haziza, Massa, Sizov 2023), with a launch that merges.

    q, out (batch, heads, 1, d); k, v (batch, kv_heads, len_kv, d); lse (batch, heads, 1) float32, natural logarithm. Of each row a
    chunk leaves the output, which isn't divided yet, its maximum and its sum, all float32.
    """
    outputs, packed, n, size = outputs_of(m), m.packed(q), chunks(problem, tile), chunk_tiles(problem, tile)
    parts = [m.workspace("partial", v.cols, axes={"parts": n}, flat=True)]
    parts += [m.workspace(name, 1, axes={"parts": n}, vector=True) for name in ("partial_m", "partial_l")]

    def tiles(_: int, chunk: int) -> range:
        return range(chunk * size, min((chunk + 1) * size, problem.key_tiles(tile)))

    def all_chunks(_: int) -> range:
        return range(n)

    rows = row_tiles(problem, tile)
    for block in m.launch("flash_decoding_2", rows=rows, cols=n, warps=1, of=packed, walk=tiles):
        found = attend(m, block, packed, k, v)
        block.step("store_partial")
        for part, x in zip(parts, found, strict=True):
            block.store(m.packed(part).at(parts=block.j), x, block.i, tile.rows)

    for block in m.launch("flash_decoding_2_merge", rows=problem.len_q, warps=1, walk=all_chunks):
        m_i, l_i = block.full(1, 1, -inf), block.full(1, 1, 0.0)
        acc = block.full(1, v.cols, 0.0)
        for chunk in block.walk:
            block.step("load_partial")
            o_n, m_n, l_n = (block.fetch(part.at(parts=chunk), block.i, 1) for part in parts)
            block.step("merge")
            m_new = block.maximum(m_i, m_n)
            alpha, beta = block.exp(m_i - m_new.finite()), block.exp(m_n - m_new.finite())
            acc = acc * alpha + o_n * beta
            l_i = l_i * alpha + l_n * beta
            m_i = m_new
        finish(block, outputs, acc, m_i, l_i, 1)
    return outputs
