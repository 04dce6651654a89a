"""Flash-Decoding: few queries against many keys. Chunks of keys run in parallel, and a tree merges their partial results.

All queries of all heads that share a KV head are rows of one tile, so K and V are read once for all of them. A chunk begins at a
multiple of its own size, whatever the batch, the grid or the other sequences are. Chunks are merged two by two, by their numbers.
That is one binary tree. Every fifth level of it goes through HBM, where a node has up to 32 children. So a result is the same bit
for bit, whichever block computes a part of it, and whenever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from math import inf
from typing import NamedTuple

import numpy as np

from simulator.block import Block
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.lanes import least, most
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.programs.packed_variant import PackedVariant
from simulator.programs.scores import join_sink, of_packed_heads
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

TILES_PER_CHUNK = 4
CHILDREN = 32
"""The most children of a node in HBM. A block merges them two by two. 32 is a power of two, so all merges are one binary tree."""


MOST_ROW_TILES = 1 << 22
"""The most row tiles of a head. Each tile's splits are worked out by themselves, which takes seconds for so many."""
MOST_KEYS = 1 << 62
"""All row tiles together have fewer keys than this: sums of them have 64 bits."""
FRAGMENT = 8
"""The rows of a fragment: queries are the columns of a product of the tensor cores (mma.sync m16n8k16), and keys its rows."""
AT_A_TIME = 4096
"""Row tiles that are looked at together, if so many numbers of lanes don't make it fewer."""
NUMBERS_AT_A_TIME = 1 << 18


class Node(NamedTuple):
    """A node of the tree on its way up: its place in the workspace, its parent's counter, and the parent's children.

    `siblings` are the places of the parent's children, by their number along the keys. `last` says whether this is the last
    child.
    """

    place: int
    counter: int
    siblings: dict[int, int]
    last: bool


class Splits:
    """How a problem is split: which chunks each row tile sees, and where the nodes of the tree over them lie.

    A chunk has `chunk` tiles. A run has `run` chunks, which one block computes.

    >>> p = Problem(batch=1, heads=4, kv_heads=1, len_q=1, len_kv=1000, head_dim=64, dtype="float16", window=(500, 0))
    >>> s = Splits(p, Tile(16, 64), run=2)
    >>> s.chunks(0), s.chunks_of(0, 1), s.tiles_of(0, 1)
    (range(1, 4), range(2, 4), range(7, 8))
    """

    def __init__(self, problem: Problem, tile: Tile, run: int, chunk: int | None = None) -> None:
        self.problem, self.tile, self.group, self.run = problem, tile, problem.queries_per_kv, run
        self.chunk = TILES_PER_CHUNK if chunk is None else chunk
        self.rows = problem.len_q * self.group
        self.row_tiles = -(-self.rows // tile.rows)
        if self.row_tiles > MOST_ROW_TILES:
            most = MOST_ROW_TILES * tile.rows // self.group
            raise UsageError(
                "len_q", problem.len_q, f"at most {most:,} for flash_decoding, which is for few: use flash2"
            )
        if self.row_tiles * problem.len_kv >= MOST_KEYS:
            most = (MOST_KEYS - 1) // self.row_tiles
            raise UsageError("len_kv", problem.len_kv, f"at most {most:,} for as many queries: sums have 64 bits")

    def tiles(self, i: int) -> range:
        """The key tiles that row tile i sees."""
        first = i * self.tile.rows
        last = min(first + self.tile.rows, self.rows) - 1
        keys = self.problem.keys_of_rows(first // self.group, last // self.group)
        return range(keys.start // self.tile.cols, -(-keys.stop // self.tile.cols)) if keys else range(0)

    def spans(self) -> Iterator[tuple[Array, Array, Array]]:
        """For many row tiles at a time, arrays of their rows inside, of their first key tiles, and of the ones after the last.
        If the keys have lanes, these are the second axis."""
        p, rows, cols = self.problem, self.tile.rows, self.tile.cols
        offset, n = np.asarray(p.offset), np.asarray(p.len_kv)
        at_a_time = min(AT_A_TIME, max(1, NUMBERS_AT_A_TIME // n.size))
        for begin in range(0, self.row_tiles, at_a_time):
            first = np.arange(begin, min(begin + at_a_time, self.row_tiles), dtype=np.int64) * rows
            first = first.reshape(-1, *[1] * n.ndim)
            inside = np.minimum(rows, self.rows - first)
            aligned, last = first // self.group + offset, (first + inside - 1) // self.group + offset
            start = np.zeros_like(aligned) if p.left is None else np.maximum(0, aligned - p.left)
            behind = n - 1 - last  # keys behind the last one of the diagonal
            stop = last + 1 + (behind if p.right is None else np.minimum(p.right, behind))
            seen = start < stop
            yield inside, np.where(seen, start // cols, 0), np.where(seen, -(-stop // cols), 0)

    def chunks(self, i: int) -> range:
        """The chunks in which row tile i sees a key."""
        tiles = self.tiles(i)
        return range(tiles.start // self.chunk, -(-tiles.stop // self.chunk)) if tiles else range(0)

    def chunks_of(self, i: int, j: int) -> range:
        """The chunks of row tile i in the j-th of the runs that it sees. Rows without keys have one chunk, without keys."""
        chunks = self.chunks(i) or range(1)
        first = (chunks.start // self.run + j) * self.run
        start, stop = max(chunks.start, first), min(chunks.stop, first + self.run)
        return range(start, max(start, stop))

    def tiles_of(self, i: int, chunk: int) -> range:
        """The key tiles of a chunk that row tile i sees."""
        tiles, first = self.tiles(i), chunk * self.chunk
        start, stop = max(tiles.start, first), min(tiles.stop, first + self.chunk)
        return range(start, stop) if start < stop else range(0)

    def walk(self, i: int, j: int) -> range:
        """The key tiles of row tile i in the j-th of the runs that it sees."""
        chunks = self.chunks_of(i, j)
        if not chunks:
            return range(0)
        first, last = self.tiles_of(i, chunks[0]), self.tiles_of(i, chunks[-1])
        return range(first.start, last.stop)

    @cached_property
    def most(self) -> int:
        """The most chunks that a row tile may see, at least 1: even a row without keys needs a unit that writes its output.

        A stretch of n keys touches (n + c - 2) // c + 1 chunks of c keys at most.
        """
        p, c = self.problem, self.chunk * self.tile.cols
        chunks = most(1, -(-p.len_kv // c))
        if p.left is None or p.right is None:
            return chunks
        queries = min(p.len_q, (self.tile.rows - 2) // self.group + 2)
        return least(chunks, (p.left + p.right + queries + c - 2) // c + 1)

    @property
    def runs(self) -> int:
        """The most runs of chunks that a row tile may see."""
        chunks = most(1, -(-self.problem.len_kv // (self.chunk * self.tile.cols)))
        return least((self.most - 2 + self.run) // self.run + 1, -(-chunks // self.run))

    @cached_property
    def room(self) -> list[int]:
        """How many places the nodes of each level have, from the runs on. The level that can have one node only has none."""
        room, n = list[int](), self.runs
        runs = -(-self.problem.len_kv // (self.chunk * self.tile.cols * self.run)) if n > 1 else 1
        while runs > 1:
            room.append(n)
            n, runs = (n - 2) // CHILDREN + 2, -(-runs // CHILDREN)
        return room

    @property
    def counters(self) -> int:
        """How many counters a row tile has: one for each place of a parent."""
        return sum(self.room[1:]) + 1

    def upward(self, i: int, chunk: int) -> Iterator[Node]:
        """The nodes from the run of a chunk that row tile i sees up to the root's child."""
        chunks = self.chunks(i) or range(1)
        first, last, at, place, counter = chunks[0] // self.run, chunks[-1] // self.run, chunk // self.run, 0, 0
        level = 0
        while first < last:
            parent = at // CHILDREN
            children = range(max(first, parent * CHILDREN), min(last, parent * CHILDREN + CHILDREN - 1) + 1)
            places = {child: place + child - first for child in children}
            yield Node(places[at], counter + parent - first // CHILDREN, places, at == children[-1])
            place += self.room[level]
            counter += self.room[level + 1] if level + 1 < len(self.room) else 0
            first, last, at, level = first // CHILDREN, last // CHILDREN, parent, level + 1


def told(problem: Problem) -> list[tuple[int, int]]:
    """What a warp tells itself about a unit: pairs of how often it reads something, and how many bytes that is.

    To copy and to compute, a warp needs the row tile, the run, the keys, and the KV head among those of all sequences. In a ragged
    batch it also needs to know where the keys begin, to copy them. Where units follow from the grid, it tells itself nothing.
    """
    return [(2, 16), (1, 4)][: 1 + problem.ragged] if problem.apart else []


def told_words(problem: Problem, stages: int) -> int:
    """Words of SRAM in which a warp tells itself its next units: room for each unit that it may be ahead."""
    ahead = 8 if stages <= 5 else 16
    return ahead * sum(nbytes for _, nbytes in told(problem)) // 4


Part = tuple[Registers, Registers, Registers]
"""A partial result: the output, and the maximum and the sum that it is relative to."""


def joined(block: Block, left: Part, right: Part) -> Part:
    """Two neighbours in one."""
    top = block.maximum(left[1], right[1])
    a, b = block.exp(left[1] - top.finite()), block.exp(right[1] - top.finite())
    return left[0] * a + right[0] * b, top, left[2] * a + right[2] * b


def merged(block: Block, parts: dict[int, Part]) -> Part:
    """Partial results by number, merged into one: two by two, each even number with the next one."""
    while len(parts) > 1:
        above = dict[int, Part]()
        for at, part in parts.items():
            above[at // 2] = joined(block, above[at // 2], part) if at // 2 in above else part
        parts = above
    (whole,) = parts.values()
    return whole


class Tree(NamedTuple):
    """Where partial results lie in HBM, and the counters of the nodes. Each of `warps` warps has its own counter at each node."""

    parts: tuple[HbmTensor, HbmTensor, HbmTensor]
    arrivals: HbmTensor
    warps: int

    @classmethod
    def of(cls, m: Machine, s: Splits, q: HbmTensor, warps: int) -> Tree:
        """The workspaces for packed queries. A single run needs none of them."""
        if not s.room:
            return cls((q, q, q), q, warps)
        parts, nodes = {"parts": sum(s.room)}, {"nodes": s.counters}
        return cls(
            (
                m.workspace("partial", s.problem.head_dim_v, rows=q.rows, of=q, axes=parts, flat=True),
                m.workspace("partial_m", 1, rows=q.rows, of=q, axes=parts, vector=True),
                m.workspace("partial_l", 1, rows=q.rows, of=q, axes=parts, vector=True),
            ),
            m.workspace("arrivals", 1, "int32", rows=s.row_tiles * warps, of=q, axes=nodes, vector=True, zeros=True),
            warps,
        )


def climb(
    m: Machine,
    block: Block,
    s: Splits,
    tree: Tree,
    part: Part,
    chunk: int,
    outputs: tuple[HbmTensor, ...],
    owners: int = 1,
    together: int = 1,
) -> None:
    """The partial result of the run that ends with `chunk` goes up the tree: to HBM, or to the outputs if there is no other part.

    Each row of a run lies in `owners` warps, which have some of its columns each. Each of them requests the sinks of `together`
    rows at a time. Where runs are merged, one warp has a row.
    """
    rows, row_tile = s.tile.rows, int(np.min(block.i))
    for node in s.upward(row_tile, chunk):
        block.step("store_partial")
        for tensor, x in zip(tree.parts, part, strict=True):
            block.store(tensor.at(parts=node.place), x, block.i, rows)
        block.step("arrive")
        block.arrive(tree.arrivals.at(nodes=node.counter), block.i, tree.warps)
        if not node.last:
            return
        block.step("merge")
        owners = together = 1
        part = merged(block, {
            child: tuple(block.fetch(x.at(parts=at), block.i, rows) for x in tree.parts)
            for child, at in node.siblings.items()
        })  # fmt: skip  # pyright: ignore[reportArgumentType]
    o, m_i, l_i = part
    block.step("store_o")
    m_i, l_i, o = join_sink(
        block, of_packed_heads("sinks", m, block, rows, together=together, warps=owners), m_i, l_i, o
    )
    block.store(m.packed(outputs[0]), o / l_i.nonzero(), block.i, rows)
    if m.lse:
        block.step("store_lse")
        block.store(m.packed(outputs[1]), m_i + block.log(l_i), block.i, rows)


Find = Callable[[Block, int], None]
"""`find(block, j)` is how the warps that fetch key tile j find out where it lies."""


class Room(NamedTuple):
    """SRAM of a block, for queries and where warps join: each has maxima, sums and outputs. `top` has the maxima of all."""

    maxima: SramTile
    sums: SramTile
    outputs: SramTile
    top: SramTile
    q: SramTile

    @classmethod
    def of(cls, m: Machine, block: Block, q: HbmTensor, k: HbmTensor, v: HbmTensor, variant: PackedVariant) -> Room:
        """Reserve it, and beside it the rings of K and V, what the variant needs, and what a warp tells itself."""
        c, w, alloc = m.config, m.config.warps, partial(block.alloc, rows=m.tile.rows, fragment=FRAGMENT)
        maxima, sums = (alloc(name, copies=w) for name in ("m_warps", "l_warps"))
        outputs, top = alloc("o_warps", cols=v.cols, copies=w), alloc("m")
        for x in (k, v):
            block.alloc(x.name, m.tile.cols, x.cols, x.dtype, copies=c.stages)
        q_i = alloc(q.name, cols=q.cols, dtype=q.dtype, copies=c.stages + 1)
        variant.reserve(block)
        if words := told_words(m.problem, c.stages):
            block.alloc("units", words, dtype="int32", copies=w, fragment=4)  # words, which no tensor core reads
        return cls(maxima, sums, outputs, top, q_i)


@program
def flash_decoding(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with its merge in the same launch: see `decode`."""

    def contiguous(block: Block, j: int) -> None:
        """Rows of K and V lie one behind the other: there is nothing to look up."""

    return decode(m, "flash_decoding", q, k, v, problem, tile, contiguous)


def decode(
    m: Machine, name: str, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile, find: Find
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with its merge in the same launch.

    q, out (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); lse (batch, heads, len_q) float32, natural logarithm.
    There is one unit of work per KV head, row tile and chunk of 4 Bc keys. On a GPU a block takes one after the other. Its warps
    split the keys, so each has a softmax of its own, and they join at the end. Other warps write what they have together. The
    one that comes last to a counter merges what the others have left in HBM. It then counts up itself, until the root is done.
    `find` is how a block finds the keys of a tile. The `variant` is what a quantised cache, a soft cap and drafts change.
    """
    c, w = m.config, m.config.warps
    s = Splits(problem, tile, dict(c.constants)["RUN"])
    variant = PackedVariant(m, s.group, k.table)
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    q = m.packed(q)
    tree = Tree.of(m, s, q, w)
    for block in m.launch(name, rows=s.row_tiles, cols=s.runs, walk=s.walk, of=q, warps=2 * w, readers=w):
        row_tile = int(np.min(block.i))  # one of those in lockstep, which see the same chunks
        chunks, found = s.chunks_of(row_tile, block.j), dict[int, Part]()
        if not chunks:
            continue  # this row tile sees fewer runs
        room = Room.of(m, block, q, k, v, variant)
        q_i: SramTile | Registers = room.q
        if block.walk:
            block.step("load_q")
            for readers, nbytes in told(problem):
                block.tell("units", readers, nbytes * w)  # by each warp to itself
            q_i = block.load(q, block.i, tile.rows, stages=c.stages + 1, fragment=FRAGMENT)
            variant.begin(block, q_i)
            if c.q_in_registers:
                q_i = block.to_registers(q_i, "none")
            q_i = variant.keep(block, q_i)
        scale, passes = variant.scale, variant.passes
        for chunk in chunks:
            m_i, l_i = block.full(tile.rows, 1, -inf), block.full(tile.rows, 1, 0.0)
            acc, base = block.full(tile.rows, v.cols, 0.0), variant.first_base(block)
            for j in s.tiles_of(row_tile, chunk):
                block.step("load_k")
                find(block, j)
                k_j = block.load(k, j, tile.cols, stages=c.stages)
                variant.load(block, "k", j)
                block.step("scores")
                x = block.matmul(variant.queries(block, q_i), k_j.T, split=("none", "rows"), scale=scale, passes=passes)
                x = variant.bend(block, x)
                block.step("mask")
                x = variant.mask(block, x, j)
                block.step("softmax")
                m_new = block.maximum(m_i, x.max())
                p = block.exp(x - m_new.finite())
                block.step("rescale")
                alpha = block.exp(m_i - m_new.finite())
                l_i = l_i * alpha + p.sum()
                acc = acc * alpha
                m_i = m_new
                block.step("load_v")
                v_j = block.load(v, j, tile.cols, stages=c.stages)
                variant.load(block, "v", j)
                block.step("output")
                p, acc, base = variant.weigh(block, p, acc, base)
                acc = block.matmul(p.round(problem.operand_dtype), v_j, split=("rows", "rows"), acc=acc)
            if block.walk:  # without keys there is nothing to join
                block.step("join")
                block.put(room.maxima, m_i, copies=w)
                m_i = block.get(room.maxima, "none")  # of all warps: each weighs its own results with it
                factor = block.exp(m_i - m_i.finite())
                block.put(room.sums, l_i * factor, copies=w)
                block.put(room.outputs, acc * variant.joined(factor, base), copies=w)
                block.put(room.top, m_i)
                m_i, l_i, acc = (block.get(buffer) for buffer in (room.top, room.sums, room.outputs))
            found[chunk] = acc, m_i, l_i
        block.step("merge_run")
        climb(m, block, s, tree, merged(block, found), chunks[-1], outputs)
    return outputs
