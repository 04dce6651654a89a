"""Paged attention, rung 1: `flash_decoding_1` over K and V in pages. A lane looks up where each key lies."""

from __future__ import annotations

from functools import partial

from simulator.machine import Machine
from simulator.operations.paged import PAGED
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding_1 import all_tiles, attend, finish, outputs_of, row_tiles
from simulator.tensors import HbmTensor


@program(operation=PAGED)
def paged_1(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """PagedAttention (arXiv 2309.06180), one request.

    q, out (batch, heads, 1, d); k, v (pages, kv_heads, page_size, d); block_table (batch, pages of a request) int32; seq_lens
    (batch) int32; lse (batch, heads, 1) float32, natural logarithm. Key n of a request is row n % page_size of page
    block_table[request, n // page_size]. There is one block per request, KV head and Br heads of its group. It reads how many keys
    its request has. The lanes of its warp look up the pages of a tile's keys, a key each.
    """
    outputs, q, k, v = outputs_of(m), m.packed(q), m.paged(k, block_table), m.paged(v, block_table)
    rows = [m.packed(x) for x in outputs]
    for block in m.launch("paged_1", rows=row_tiles(problem, tile), warps=1, of=q, walk=partial(all_tiles, m)):
        acc, m_i, l_i = attend(m, block, q, k, v)
        finish(block, rows, acc, m_i, l_i, tile.rows)
    return outputs
