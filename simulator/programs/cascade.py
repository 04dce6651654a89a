"""Cascade: requests that begin with the same keys. A tile's rows are queries of many requests, so the prefix is read once for them.

There are three launches. The first goes over the prefix, and the second over what each request has of its own. Both do the same:
each tile of rows gets a partial result for each chunk of keys, with an LSE. The third launch merges a row's partial results in
their order. A chunk begins at a multiple of its size, so a request has the same bits alone and in any batch.

With a window, or with own lengths, a row may see no key of a chunk. The merge then leaves out that chunk's partial result. Where no
row of a tile sees a key, the block ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from math import inf
from typing import NamedTuple

import numpy as np

from simulator.block import Block, Rows
from simulator.config import padded
from simulator.dtypes import Array
from simulator.lanes import Lanes
from simulator.machine import Machine
from simulator.operations.cascade import CASCADE, Sides, aligned, alike, first_keys
from simulator.problem import WIDTH, Problem, Tile
from simulator.program import program
from simulator.programs.flash_decoding import AT_A_TIME, Splits
from simulator.programs.variant import Variant
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

PREFIX_CHUNK, SUFFIX_CHUNK = 2048, 512
"""Keys of a chunk, whatever the tile is. Many rows share a chunk of the prefix. So a few long chunks keep all SMs busy, and leave
few partial results."""
STAGES = 2
ROWS = (16, 32, 64, 128)
"""The rows that a tile may have."""


def rows_for(packed: int, most: int = ROWS[-1]) -> int:
    """The fewest rows of a tile that has room for `packed` rows, up to `most`.

    >>> rows_for(4), rows_for(40), rows_for(1000), rows_for(1000, 32)
    (16, 64, 128, 32)
    """
    return min(most, next((rows for rows in ROWS if packed <= rows), ROWS[-1]))


class PrefixSplits(Splits):
    """How a prefix is split. Its queries are those of all requests, and a window begins where their own keys say."""

    def __init__(self, whole: Problem, tile: Tile) -> None:
        super().__init__(Sides.of(whole).prefix, tile, 1, max(1, PREFIX_CHUNK // tile.cols))
        self.whole = whole

    @cached_property
    def _own(self) -> Array:
        return np.array(self.whole.seq_lens, np.int64)

    def _places(self, queries: Array) -> tuple[Array, Array]:
        """For each of some queries: its number within its request, and how many keys the request has of its own."""
        request, query = np.divmod(queries, self.whole.len_q)
        return query, self._own[request]

    def aligned(self, queries: Array) -> Array:
        """The keys that some of the queries sit at."""
        return aligned(self.whole, *self._places(queries))

    def requests(self, i: Array) -> tuple[Array, Array]:
        """The requests that have rows in each of some row tiles: the first one, and the one after the last."""
        first, of_request = i * self.tile.rows, self.group * self.whole.len_q
        return first // of_request, (np.minimum(first + self.tile.rows, self.rows) - 1) // of_request + 1

    def lengths_of(self, i: Rows) -> list[tuple[int, int, int, int]]:
        """The parts of the lengths that row tiles need, as `Block.request` takes them."""
        ends = zip(*(x.tolist() for x in self.requests(np.atleast_1d(i))), strict=True)
        return [(r, r + 1, 0, WIDTH["int32"]) for first, end in ends for r in range(first, end)]

    def tiles(self, i: int) -> range:
        if self.problem.left is None:
            return super().tiles(i)
        return range(*(int(end) for _, *ends in self._spans(i, i + 1) for (end,) in ends))

    def spans(self) -> Iterator[tuple[Array, Array, Array]]:
        return super().spans() if self.problem.left is None else self._spans(0, self.row_tiles)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Array, Array, Array]]:
        """`spans` of some row tiles."""
        rows, cols, keys = self.tile.rows, self.tile.cols, self.problem.len_kv
        for begin in range(start, stop, AT_A_TIME):
            first = np.arange(begin, min(begin + AT_A_TIME, stop), dtype=np.int64) * rows
            inside = np.minimum(rows, self.rows - first)
            queries = np.stack([first // self.group, (first + inside - 1) // self.group + 1], 1)
            every: Array = np.arange(int(queries[0, 0]), int(queries[-1, 1]))
            sees = np.append(first_keys(self.whole, *self._places(every)), keys)
            least = np.minimum.reduceat(sees, (queries - queries[0, 0]).reshape(-1))[::2]
            yield inside, np.where(least < keys, least // cols, 0), np.where(least < keys, -(-keys // cols), 0)


def own_splits(problem: Problem, tile: Tile, keys: int | Lanes, requests: int) -> Splits:
    """How so many `requests` with `keys` own keys each are split. Each has fewer queries than all, so its tiles have fewer rows.
    The keys may have lanes."""
    suffix = Sides.of(problem).suffix.replace(batch=requests)
    suffix = suffix.with_lanes(len_kv=keys) if isinstance(keys, Lanes) else suffix.replace(len_kv=keys)
    own = Tile(rows_for(suffix.len_q * suffix.queries_per_kv, tile.rows), tile.cols)
    return Splits(suffix, own, 1, max(1, SUFFIX_CHUNK // tile.cols))


def splits(problem: Problem, tile: Tile) -> tuple[PrefixSplits, Splits]:
    """How prefix and suffix are split into chunks. Here each request has as many own keys as there is room for."""
    return PrefixSplits(problem, tile), own_splits(problem, tile, problem.len_kv, problem.batch)


def warp_rows(s: Splits) -> int:
    """Rows of a warp: 16, or 32 of a full tile if its registers have room for their outputs. A window needs registers, too."""
    most = 128 if s.problem.left is None else 64
    full = padded(s.tile.rows) >= ROWS[-1] and padded(max(s.problem.head_dim, s.problem.head_dim_v)) <= most
    return 32 if full else 16


def warps(s: Splits) -> int:
    """Warps of a block: they split its rows."""
    return padded(s.tile.rows) // warp_rows(s)


def parts_of(s: Splits) -> int:
    """How many chunks the keys of one side have."""
    return -(-s.problem.len_kv // (s.chunk * s.tile.cols))


def parts(problem: Problem, tile: Tile) -> tuple[int, int]:
    """How many partial results a row has for the prefix, and how many for its own keys. Without own keys it still has one for them:
    so there is something to merge."""
    prefix, suffix = map(parts_of, splits(problem, tile))
    return prefix, max(1, suffix)


def uneven(problem: Problem) -> bool:
    """May a row see no key of some chunks? Then the merge reads the partial results of the others only."""
    return problem.left is not None or problem.lengths is not None


def parts_seen(problem: Problem, tile: Tile, queries: Array, own: int | Array) -> tuple[Array, Array]:
    """The partial results of some queries, in a request with `own` keys of its own, or in several: the first, and the one after
    the last.

    There is no gap between them. A window that begins within the prefix has the prefix's last key and the first own one.

    >>> p = Problem(batch=1, heads=8, len_q=2, len_kv=700, len_prefix=5000, window=(900, 0), head_dim=64, dtype="float16")
    >>> parts_seen(p, Tile(16, 64), np.arange(2), 700)  # two own ones, and the last one of three of the prefix
    (array([2, 2]), array([5, 5]))
    """
    of_prefix, of_suffix = parts(problem, tile)
    if not uneven(problem):
        return np.zeros_like(queries), np.full_like(queries, of_prefix + of_suffix)
    prefix, suffix = (s.chunk * tile.cols for s in splits(problem, tile))
    first, at = first_keys(problem, queries, own), own - problem.len_q + queries
    start = np.zeros_like(at) if problem.left is None else np.maximum(0, at - problem.left)
    stop = np.zeros_like(at) + own if problem.right is None else np.minimum(own, at + problem.right + 1)
    begin = np.where(first < (problem.len_prefix or 0), first // prefix, of_prefix + start // suffix)
    return begin, np.maximum(begin, of_prefix + np.where(start < stop, -(-stop // suffix), 0))


def walk_of_parts(problem: Problem, tile: Tile, own: int) -> Callable[[int], range]:
    """The partial results that the merge reads for each query of a request with `own` keys of its own."""
    begin, end = (x.tolist() for x in parts_seen(problem, tile, np.arange(problem.len_q), own))
    return lambda i: range(begin[i], end[i])


def reserve(block: Block, q: HbmTensor, k: HbmTensor, v: HbmTensor, tile: Tile) -> SramTile:
    """SRAM for keys, values and queries. It returns the queries' buffer."""
    for x in (k, v):
        block.alloc(x.name, tile.cols, x.cols, x.dtype, copies=STAGES)
    return block.alloc(q.name, tile.rows, q.cols, q.dtype)


def part_of_rows(
    block: Block, q_i: SramTile, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile,
    bend: Callable[[Block, Registers, int], Registers], mask: Callable[[Registers, Rows, int], Registers],
) -> tuple[Registers, Registers]:  # fmt: skip
    """The partial result of a tile of rows for a chunk of keys: the output, and its LSE.

    `q_i` is the buffer for the rows of q. `bend` and `mask` change the scores. Rows that see no key of the chunk have the output 0
    and the LSE -inf.
    """
    i = block.i
    m_i = block.full(tile.rows, 1, -inf)
    l_i = block.full(tile.rows, 1, 0.0)
    acc = block.full(tile.rows, v.cols, 0.0)
    if block.walk:
        block.step("load_q")
        q_i = block.load(q, i, tile.rows)
    for j in block.walk:
        block.step("load_k")
        k_j = block.load(k, j, tile.cols, stages=STAGES)
        block.step("load_v")
        v_j = block.load(v, j, tile.cols, stages=STAGES)
        block.step("scores")
        s = block.matmul(q_i, k_j.T, split=("rows", "none"), scale=problem.scale)
        s = bend(block, s, j)
        block.step("mask")
        s = mask(s, i, j)
        block.step("softmax")
        m_new = block.maximum(m_i, s.max())
        p = block.exp(s - m_new.finite())
        block.step("rescale")
        alpha = block.exp(m_i - m_new.finite())
        l_i = l_i * alpha + p.sum()
        acc = acc * alpha
        m_i = m_new
        block.step("output")
        acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=acc)
    return acc / l_i.nonzero(), m_i + block.log(l_i)


class Parts(NamedTuple):
    """Where partial results lie in HBM: their outputs and their LSEs, in the order of the keys."""

    outputs: HbmTensor
    lse: HbmTensor

    def packed(self, m: Machine, *, together: bool) -> Parts:
        """The same for packed rows, of all requests `together` or of each."""
        return Parts(*(m.packed(x, together=together) for x in self))


def over_prefix(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, results: Parts, problem: Problem, tile: Tile, variant: Variant
) -> None:
    """The launch over the prefix, whose tiles have rows of all requests."""
    side, _ = splits(problem, tile)
    q, to, w = m.packed(q, together=True), results.packed(m, together=True), warps(side)
    look = problem.lengths is not None and problem.left is not None  # then lengths say where windows begin
    for block in m.launch(
        "cascade_prefix", rows=side.row_tiles, cols=parts_of(side), walk=side.tiles_of, of=q, warps=w
    ):
        q_i = reserve(block, q, k, v, side.tile)
        if look:
            block.step("load_q")
            block.request(m.packed(m.optional("seq_lens"), together=True), side.lengths_of(block.i), warps=w)
        if uneven(problem) and not block.walk:
            continue
        mask = partial(block.mask, group=side.group, of=side.problem, aligned=side.aligned)
        acc, logsumexp = part_of_rows(block, q_i, q, k, v, problem, side.tile, variant.bend, mask)
        block.step("store_part")
        block.store(to.outputs.at(parts=block.j), acc, block.i, side.tile.rows)
        block.store(to.lse.at(parts=block.j), logsumexp, block.i, side.tile.rows)


def over_suffix(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, results: Parts, problem: Problem, tile: Tile, variant: Variant
) -> None:
    """The launch over what each request has of its own."""
    prefix, side = splits(problem, tile)
    alone = {n: (some, own_splits(problem, tile, n, len(some))) for n, some in alike(problem).items()}
    own = {n: (some, each.tiles_of) for n, (some, each) in alone.items()}
    q, to, w = m.packed(q), results.packed(m, together=False), warps(side)
    first, cols = parts_of(prefix), max(1, parts_of(side))
    for block in m.launch("cascade_suffix", rows=side.row_tiles, cols=cols, walk=side.tiles_of, of=q, warps=w, own=own):
        q_i = reserve(block, q, k, v, side.tile)
        if problem.lengths is not None:
            block.step("load_q")
            block.fetch(m.optional("seq_lens"), 0, 1, warps=w)
        if uneven(problem) and not block.walk:
            continue
        _, of_request = alone[block.keys]
        mask = partial(block.mask, group=side.group, of=of_request.problem)
        acc, logsumexp = part_of_rows(block, q_i, q, k, v, problem, side.tile, variant.bend, mask)
        block.step("store_part")
        block.store(to.outputs.at(parts=first + block.j), acc, block.i, side.tile.rows)
        block.store(to.lse.at(parts=first + block.j), logsumexp, block.i, side.tile.rows)


def merge(
    m: Machine, results: Parts, outputs: tuple[HbmTensor, ...], problem: Problem, tile: Tile, variant: Variant
) -> None:
    """The launch that merges the partial results of each row, in their order."""
    merged = {n: (some, walk_of_parts(problem, tile, n)) for n, some in alike(problem).items()}
    for block in m.launch("cascade_merge", rows=problem.len_q, warps=1, own=merged):
        if problem.lengths is not None:
            block.step("load_part")
            block.fetch(m.optional("seq_lens"), 0, 1)
        m_i = block.full(1, 1, -inf)
        l_i = block.full(1, 1, 0.0)
        acc = block.full(1, results.outputs.cols, 0.0)
        for n in block.walk:
            block.step("load_part")
            o_n = block.fetch(results.outputs.at(parts=n), block.i, 1)
            lse_n = block.fetch(results.lse.at(parts=n), block.i, 1, fill=-inf)
            block.step("merge")
            m_new = block.maximum(m_i, lse_n)
            alpha, beta = block.exp(m_i - m_new.finite()), block.exp(lse_n - m_new.finite())
            acc = acc * alpha + o_n * beta
            l_i = l_i * alpha + beta
            m_i = m_new
        block.step("normalize")
        m_i, l_i, acc = variant.finish(block, m_i, l_i, acc)
        acc = acc / l_i.nonzero()
        block.step("store_o")
        block.store(outputs[0], acc, block.i, 1)
        if m.lse:
            block.step("store_lse")
            block.store(outputs[1], m_i + block.log(l_i), block.i, 1)


@program(operation=CASCADE)
def cascade(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, k_prefix: HbmTensor, v_prefix: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:  # fmt: skip
    """Cascade inference (FlashInfer, arXiv 2501.01005), in chunks as Flash-Decoding has them.

    q, out (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); k_prefix, v_prefix (1, kv_heads, len_prefix, d); seq_lens
    (batch) int32; lse (batch, heads, len_q) float32, natural logarithm.

    There is a block per KV head, tile of rows, and chunk of keys: 2,048 of the prefix, or 512 own ones. Rows are heads of a group
    and queries: those of all requests over the prefix, those of one over its own keys. Warps split the rows. The grid has a block
    for each chunk of own keys that there is room for.
    """
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    axes = {"parts": sum(parts(problem, tile))}
    results = Parts(
        m.workspace("partial", v.cols, axes=axes, flat=True), m.workspace("partial_lse", 1, axes=axes, vector=True)
    )
    variant = Variant(m, tile, warps=1)
    over_prefix(m, q, k_prefix, v_prefix, results, problem, tile, variant)
    over_suffix(m, q, k, v, results, problem, tile, variant)
    merge(m, results, outputs, problem, tile, variant)
    return outputs
