"""Paged attention: flash_decoding over K and V in pages, with requests of any lengths.

A page may lie anywhere in the pool, and the block table says where. Chunks still begin at multiples of their size among a request's
own keys, and the tree over them is the same. So the result has the same bits as `flash_decoding` on the gathered keys, whatever the
pages, their size and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.config import Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.paged import PAGED
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs import flash_decoding
from simulator.programs.flash_decoding import CLASSES, SORTED
from simulator.tensors import HbmTensor


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As flash_decoding's, so that its bits are the same."""
    plain = flash_decoding.configure(problem, device, tile)
    return replace(plain, constants=(*plain.constants, ("PAGED", 1)))


def keys_of_blocks(lengths: Sequence[int], run: int, units: int, blocks: int) -> list[int]:
    """How many keys each block reads of requests of these lengths, as units.cuh deals out runs of `run` keys.

    Each run is there for so many `units`: KV heads, and tiles of rows. Full runs come first, then the last ones, the long ones
    first: `SORTED` requests at a time, and of more by `CLASSES`. Of each round a block takes one, in an order that turns round.

    >>> keys_of_blocks([100, 250, 30], run=100, units=2, blocks=4)  # 100 × 4; backwards 100, 100, 50, 50; 30, 30
    [180, 180, 200, 200]
    """
    last = [n - (n - 1) // run * run if n else 0 for n in lengths]
    dealt = [run] * sum((n - 1) // run for n in lengths if n) * units
    classes = CLASSES if len(lengths) > SORTED else 1
    for own in range(classes):
        for first in range(0, len(last), SORTED):
            together = sorted(last[first : first + SORTED], reverse=True)
            belong = [n for n in together if min((run - n) * classes // run, classes - 1) == own]
            dealt += [n for n in belong for _ in range(units)]
    keys = [0] * blocks
    for i, n in enumerate(dealt):
        turn, place = divmod(i, blocks)
        keys[blocks - 1 - place if turn % 2 else place] += n
    return keys


@program(configure=configure, operation=PAGED)
def paged(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, block_table: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding over pages (PagedAttention, arXiv 2309.06180), one request.

    q, out (batch, heads, len_q, d); k, v (pages, kv_heads, page_size, d); block_table (batch, pages of a request) int32; seq_lens
    (batch) int32; lse (batch, heads, len_q) float32. Each block goes through the lengths of all requests, so it knows which units
    of work there are, and takes every n-th. The warp that fetches keys looks their pages up, some tiles ahead. With drafts,
    draft_mask (batch, len_q) uint32 says which of the last len_q keys a query sees.
    """
    return flash_decoding.decode(m, "paged", q, m.paged(k, block_table), m.paged(v, block_table), problem, tile)


ABOUT = {
    "paged": flash_decoding.ABOUT["flash_decoding"]
    | {
        "load_q": "Find the unit from the lengths of all requests. Fetch the queries of all heads that share this KV head. "
        "Where keys are drafts, each warp also fetches a word for each query, which says the drafts that it sees.",
        "load_k": "Look the pages of the next tile's keys up, and fetch the keys. Each warp does so for its own, well ahead.",
    }
}
"""What each step is for, in a sentence or two: the player's words."""
