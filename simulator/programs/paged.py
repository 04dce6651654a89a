"""Paged attention: flash_decoding over K and V in pages, with requests of any lengths.

A page may lie anywhere in the pool, and the block table says where. Chunks still begin at multiples of their size among a request's
own keys, and the tree over them is the same. So the result has the same bits as `flash_decoding` on the gathered keys, whatever the
pages, their size and their order.
"""

from __future__ import annotations

from simulator.block import Block
from simulator.machine import Machine
from simulator.operations.paged import PAGED
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding import decode
from simulator.tensors import HbmTensor


@program(operation=PAGED)
def paged(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding over pages (PagedAttention, arXiv 2309.06180), one request.

    q, out (batch, heads, len_q, d); k, v (pages, kv_heads, page_size, d); block_table (batch, pages of a request) int32; seq_lens
    (batch) int32; lse (batch, heads, len_q) float32. Each block goes through the lengths of all requests, so it knows which units
    of work there are, and takes every n-th. With drafts, draft_mask (batch, len_q) uint32 says which of the last len_q keys a query
    sees.

    Key n of a request is row n % page_size of page block_table[request, n // page_size]. The warp that fetches a tile's keys looks
    their pages up, some tiles ahead. Their values lie in the same pages.
    """
    k, v = m.paged(k, block_table), m.paged(v, block_table)

    def look_up(block: Block, j: int) -> None:
        """HBM to registers: the entries of block_table for the keys of tile j."""
        block.look_up(k, j, tile.cols)

    return decode(m, "paged", q, k, v, problem, tile, look_up)
