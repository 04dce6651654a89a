"""Flash-Decoding: few queries against many keys. Chunks of keys run in parallel, and a tree merges their partial results.

All query heads that share a KV head, and all queries, are rows of one tile, so K and V are read once for all of them. A chunk
begins at a multiple of its own size, whatever the batch, the grid or the other sequences are. Nodes of a tree over the chunks
have up to 16 children, which are merged two by two. So a result is the same bit for bit whoever computes what, and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from simulator.block import Block
from simulator.config import Config, padded
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.errors import SramOverflow, UsageError
from simulator.machine import Machine
from simulator.problem import Problem, Tile
from simulator.program import program
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

TILES_PER_CHUNK = 4
CHILDREN = 16
"""The most children of a node of the tree."""


MOST_ROW_TILES = 1 << 22
"""The most row tiles of a head. How they are split is looked at for each, and takes seconds for so many."""
_AT_A_TIME = 4096  # row tiles that are looked at together


class Node(NamedTuple):
    """A node of the tree on its way up: its place in the workspace, its parent's counter, and the parent's children.

    `places` are those of the children in the workspace, by their number along the keys. `last` says whether this one is the
    last child.
    """

    place: int
    counter: int
    places: dict[int, int]
    last: bool


class Splits:
    """How a problem is split: which chunks each row tile sees, and where the nodes of the tree over them lie.

    >>> p = Problem(batch=1, heads=4, kv_heads=1, len_q=1, len_kv=1000, head_dim=64, dtype="float16", window=(500, 0))
    >>> s = Splits(p, Tile(16, 64))
    >>> s.chunks(0), s.walk(0, 0)
    (range(1, 4), range(7, 8))
    """

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.problem, self.tile, self.group = problem, tile, problem.queries_per_kv
        self.rows = problem.len_q * self.group
        self.row_tiles = -(-self.rows // tile.rows)
        if self.row_tiles > MOST_ROW_TILES:
            most = MOST_ROW_TILES * tile.rows // self.group
            raise UsageError(
                "len_q", problem.len_q, f"at most {most:,} for flash_decoding, which is for few: use flash2"
            )

    def tiles(self, i: int) -> range:
        """The key tiles that row tile i sees."""
        first = i * self.tile.rows
        last = min(first + self.tile.rows, self.rows) - 1
        keys = self.problem.keys_of_rows(first // self.group, last // self.group)
        return range(keys.start // self.tile.cols, -(-keys.stop // self.tile.cols)) if keys else range(0)

    def spans(self) -> Iterator[tuple[Array, Array, Array]]:
        """The same for many row tiles at a time, as arrays: the rows inside, the first key tile, the one after the last."""
        p, rows, cols = self.problem, self.tile.rows, self.tile.cols
        for begin in range(0, self.row_tiles, _AT_A_TIME):
            first = np.arange(begin, min(begin + _AT_A_TIME, self.row_tiles), dtype=np.int64) * rows
            inside = np.minimum(rows, self.rows - first)
            aligned, last = first // self.group + p.offset, (first + inside - 1) // self.group + p.offset
            start = np.maximum(0, aligned - (p.len_kv + self.rows if p.left is None else p.left))
            stop = np.minimum(p.len_kv, last + (p.len_kv + self.rows if p.right is None else p.right) + 1)
            seen = start < stop
            yield inside, np.where(seen, start // cols, 0), np.where(seen, -(-stop // cols), 0)

    def chunks(self, i: int) -> range:
        """The chunks of which row tile i sees a key."""
        tiles = self.tiles(i)
        return range(tiles.start // TILES_PER_CHUNK, -(-tiles.stop // TILES_PER_CHUNK)) if tiles else range(0)

    def walk(self, i: int, j: int) -> range:
        """The key tiles of row tile i in the j-th of the chunks that it sees."""
        tiles, first = self.tiles(i), (self.chunks(i).start + j) * TILES_PER_CHUNK
        start, stop = max(tiles.start, first), min(tiles.stop, first + TILES_PER_CHUNK)
        return range(start, stop) if start < stop else range(0)

    @cached_property
    def most(self) -> int:
        """The most chunks of a row tile, at least 1: even a row without keys needs a block that writes its output."""
        chunks = (-(-stop // TILES_PER_CHUNK) - first // TILES_PER_CHUNK for _, first, stop in self.spans())
        return max((int(n.max()) for n in chunks), default=1) or 1

    @cached_property
    def room(self) -> list[int]:
        """How many places the nodes of each level have, from the chunks on. The level that has one node for sure has none."""
        room, n = list[int](), self.most
        chunks = -(-self.problem.key_tiles(self.tile) // TILES_PER_CHUNK) if n > 1 else 1
        while chunks > 1:
            room.append(n)
            n, chunks = (n - 2) // CHILDREN + 2, -(-chunks // CHILDREN)
        return room

    @property
    def counters(self) -> int:
        """How many counters a row tile has: one for each place of a parent."""
        return sum(self.room[1:]) + 1

    def upward(self, chunks: range, chunk: int) -> Iterator[Node]:
        """The nodes from a chunk up to the root's child."""
        first, last, at, place, counter = chunks.start, chunks.stop - 1, chunk, 0, 0
        level = 0
        while first < last:
            parent = at // CHILDREN
            children = range(max(first, parent * CHILDREN), min(last, parent * CHILDREN + CHILDREN - 1) + 1)
            places = {child: place + child - first for child in children}
            yield Node(places[at], counter + parent - first // CHILDREN, places, at == children[-1])
            place += self.room[level]
            counter += self.room[level + 1] if level + 1 < len(self.room) else 0
            first, last, at, level = first // CHILDREN, last // CHILDREN, parent, level + 1


def sram_bytes(problem: Problem, tile: Tile, warps: int, stages: int) -> int:
    """SRAM per block: Q, what the warps tell each other of their rows, and the ring of K and V. At the end the warps' outputs
    lie where the ring was."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    rows, cols = padded(tile.rows), padded(tile.cols)
    ring, outputs = stages * cols * (d + dv) * problem.itemsize, warps * rows * dv * 4
    return rows * d * problem.itemsize + 2 * warps * rows * 4 + max(ring, outputs)


def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """As many rows as a group of heads has, up to 32. Each warp has 16 keys of a tile: 64 keys, or fewer for large heads.

    A chunk is four tiles, whatever the device has. Bytes in flight are all that counts, so the ring of each warp is as deep
    as two blocks per SM leave room for.
    """
    d, half = padded(max(problem.head_dim, problem.head_dim_v)), problem.itemsize == 2
    if tile is not None:
        candidates = [Tile.parse(tile)]
    else:
        rows = 32 if half and d <= 128 and problem.len_q * problem.queries_per_kv > 16 else 16
        widest = max(16, min(64, 64 * 256 // (d * problem.itemsize) // 16 * 16))
        candidates = [Tile(rows, cols) for cols in (64, 32, 16) if cols <= widest]
    needed = dict[int, int]()
    for chosen in candidates:
        warps = padded(chosen.cols) // 16
        # without cp.async there is nothing to load ahead
        depths = (4, 3, 2, 1) if device.compute_capability >= (8, 0) else (1,)
        needed = {stages: sram_bytes(problem, chosen, warps, stages) for stages in depths}
        fitting = [n for n in depths if n > 1 and needed[n] <= device.sram_per_block // 2]
        fitting += [n for n in (2, 1) if n in needed and needed[n] <= device.sram_per_block]
        if fitting:
            in_registers = half and padded(chosen.rows) * d <= 16 * 128
            return Config(tile=chosen, warps=warps, stages=fitting[0], q_in_registers=in_registers, blocks_per_sm=2)
    raise SramOverflow("tile", str(candidates[-1]), needed=needed[1], limit=device.sram_per_block, device=device.name)


def merged(block: Block, parts: dict[int, tuple[Registers, Registers]]) -> tuple[Registers, Registers]:
    """Partial outputs and their LSEs, by number: two by two, a number and the next one if the first is even."""
    rows = next(iter(parts.values()))[0].rows
    nodes = {at: (o, top, block.full(rows, 1, 1.0)) for at, (o, top) in parts.items()}
    while len(nodes) > 1:
        above = dict[int, tuple[Registers, Registers, Registers]]()
        for at, right in nodes.items():
            if at // 2 not in above:
                above[at // 2] = right
                continue
            left = above[at // 2]
            top = block.maximum(left[1], right[1])
            a, b = block.exp(left[1] - top.finite()), block.exp(right[1] - top.finite())
            above[at // 2] = left[0] * a + right[0] * b, top, left[2] * a + right[2] * b
        nodes = above
    ((o, top, total),) = nodes.values()
    return o / total.nonzero(), top + block.log(total)


@program(configure=configure)
def flash_decoding(
    m: Machine, q: HbmTensor, k: HbmTensor, v: HbmTensor, problem: Problem, tile: Tile
) -> tuple[HbmTensor, ...]:
    """Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with its merge in the same launch.

    q, out (batch, heads, len_q, d); k, v (batch, kv_heads, len_kv, d); lse (batch, heads, len_q) float32, natural logarithm.
    There is one block per KV head, row tile and chunk of 4 Bc keys. Its warps split the keys, so each has a softmax of its own,
    and they join at the end. The block that comes last to a counter merges what the others have left in HBM, and counts up
    itself, until the root is done.
    """
    c, s, d, w = m.config, Splits(problem, tile), v.cols, m.config.warps
    outputs = tuple(m.output(name) for name in (("out", "lse") if m.lse else ("out",)))
    q = m.packed(q)
    partial = partial_lse = arrivals = q  # a single chunk needs none of them
    if s.room:
        parts = {"parts": sum(s.room)}
        partial = m.workspace("partial", d, rows=q.rows, of=q, axes=parts, flat=True)
        partial_lse = m.workspace("partial_lse", 1, rows=q.rows, of=q, axes=parts, vector=True)
        nodes = {"nodes": s.counters}
        arrivals = m.workspace("arrivals", 1, "int32", rows=s.row_tiles, of=q, axes=nodes, vector=True, zeros=True)
    for block in m.launch("flash_decoding", rows=s.row_tiles, cols=s.most, walk=s.walk, of=q, warps=w):
        i, chunks = block.i, s.chunks(int(np.min(block.i)))  # those of all blocks in lockstep
        if block.j >= max(1, len(chunks)):
            continue  # this row tile sees fewer chunks
        m_warps, l_warps = (block.alloc(name, tile.rows, copies=w) for name in ("m_warps", "l_warps"))
        block.step("load_q")
        q_i: SramTile | Registers = block.load(q, i, tile.rows)
        if c.q_in_registers:
            q_i = block.to_registers(q_i, "none")
        m_i = block.full(tile.rows, 1, -inf)
        l_i = block.full(tile.rows, 1, 0.0)
        acc = block.full(tile.rows, d, 0.0)
        ring = list[SramTile]()
        for j in block.walk:
            block.step("load_k")
            k_j = block.load(k, j, tile.cols, stages=c.stages)
            block.step("scores")
            x = block.matmul(q_i, k_j.T, split=("none", "rows"), scale=problem.scale)
            block.step("mask")
            x = block.mask(x, i, j, group=s.group)
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
            block.step("output")
            acc = block.matmul(p.round(problem.dtype), v_j, split=("rows", "rows"), acc=acc)
            ring = [k_j, v_j]
        block.step("join")
        for buffer in ring:
            block.free(buffer)
        o_warps = block.alloc("o_warps", tile.rows, d, copies=w)
        for buffer, x in ((m_warps, m_i), (l_warps, l_i), (o_warps, acc)):
            block.put(buffer, x, copies=w)
        m_i, l_i, acc = (block.get(buffer) for buffer in (m_warps, l_warps, o_warps))
        block.step("normalize")
        o, log = acc / l_i.nonzero(), m_i + block.log(l_i)
        for node in s.upward(chunks, chunks.start + block.j):
            block.step("store_partial")
            block.store(partial.at(parts=node.place), o, i, tile.rows)
            block.store(partial_lse.at(parts=node.place), log, i, tile.rows)
            block.step("arrive")
            block.arrive(arrivals.at(nodes=node.counter), i)
            if not node.last:
                break
            block.step("merge")
            found = {
                child: tuple(block.fetch(x.at(parts=at), i, tile.rows) for x in (partial, partial_lse))
                for child, at in node.places.items()
            }
            o, log = merged(block, found)  # pyright: ignore[reportArgumentType]
        else:
            block.step("store_o")
            block.store(m.packed(outputs[0]), o, i, tile.rows)
            if m.lse:
                block.step("store_lse")
                block.store(m.packed(outputs[1]), log, i, tile.rows)
    return outputs


ABOUT = {
    "flash_decoding": {
        "load_q": "Fetch the queries of all heads that share this KV head: they are rows of one tile.",
        "load_k": "Fetch the next tile of this chunk's keys. Each warp fetches 16 of them for itself, well ahead.",
        "scores": "Multiply the queries by the keys. Each warp has all rows, and its own keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "softmax": "The new row maximum m, and P = exp(S − m). Each warp has its own m and ℓ.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α.",
        "load_v": "Fetch the values of the same keys.",
        "output": "Weigh the values with P, and add them to the warp's accumulator.",
        "join": "The warps meet for the first time: what each has of O, m and ℓ goes through SRAM, and is added up.",
        "normalize": "Divide by ℓ: the attention over this chunk alone, and its LSE.",
        "store_partial": "Write this partial result to HBM, where the block that comes last will find it.",
        "arrive": "Count up, by an atomic. Whoever isn't the last one is done. The last one finds the counter at 0 again.",
        "merge": "Read the partial results of up to 16 siblings, and merge them two by two, weighed by their LSE.",
        "store_o": "Write the finished rows of the output to HBM.",
        "store_lse": "Write each row's log-sum-exp to HBM.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""
