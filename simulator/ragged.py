"""Ragged batches: the counts of a launch whose rows are sequences of any lengths, one behind the other.

A launch does with each sequence what it does with that sequence alone. Beside that, each block finds its sequence. The row tiles
of a sequence begin at its first query, and only the offsets say where that is. Each sequence has places for its tiles, so that no
list of tiles is needed. Sequence s, whose first query is number `first`, has its first tile at place `first // rows + s`. There are
enough places. At most one place of each sequence stays empty, and its block ends at once.

A block searches offsets_q by halves. It looks for the last sequence whose first place isn't behind the block's own (sequences.cuh).
It then reads two numbers of offsets_kv, unless it needs to know nothing about keys. Each warp that needs the answer searches. Or
one thread searches, and tells the others (`Config.told`). A persistent block has a thread that does so for one tile after the
other, and says when none is left.

In a backward pass, blocks have tiles of keys instead. Then keys and queries change places in all of this. A block that has a whole
sequence knows which one: it searches for none, and reads two numbers of offsets_q.

The first launch of a backward pass may put the key tiles of all sequences in one order, the longest first (`Config.ordered`,
longest_first.cuh). A warp searches for the sequence of a place as above. Then it goes through all offsets, to count the tiles that
come before. It writes what it finds, 32 bytes, to HBM. A block of the main launch reads them, and searches for nothing.

Where few queries meet many keys, all sequences have the same number of queries, and the grid doesn't know how many keys they have.
A persistent block goes through offsets_kv, and deals out the units of all sequences as it goes (units.cuh). `Config.walks` says how
often its warps do so. Each time they read two numbers for each sequence. Workspaces have room as if all sequences were as long as
the longest.

Requests in pages are sequences, too, and the batch counts them. They have lengths in place of offsets, and blocks deal out units in
the same way. `Config.sorted` is another way: all requests have the same number of row tiles, and blocks draw tiles by number. A
block then looks only at the lengths of the 32 requests that are sorted together (requests.cuh). Where requests have different
numbers of queries (`varlen`), tiles have places, and a block searches cu_seqlens_q by halves, as above. Without either, a block has
a request, and reads its length. Workspaces have room for requests that fill the block table.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simulator.config import WORK, Config
from simulator.counts import Box, Counts, Entry, LaunchCounts, Spec, summed
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.lanes import largest, summed_over
from simulator.operations.operation import Operation
from simulator.problem import Problem, Tile

_NUMBER = 4  # bytes of an offset
_ORDERED_TILE = 32  # bytes of a key tile in the order
APART = ("len_q", "len_kv", "bit_bytes", "offsets", "sequences_of_lengths")
"""The axes along which sequences lie one behind the other."""


class _Side(NamedTuple):
    """Blocks along an axis: the side of their tile, their heads, their first step, the offsets that they search, and the offsets
    that they read two numbers of. A block that has a whole sequence has no tile, and searches nothing. A block that needs to know
    nothing about keys reads none."""

    tile: str | None
    heads: str
    step: str
    searched: str | None
    read: str | None

    def asking(self, launch: LaunchCounts, config: Config) -> int:
        """How many warps of a block search for their sequence."""
        if launch.shared or not (config.consumers and self.searched and self.read):
            return launch.warps
        return 1 if config.told else 4 * config.consumers + 1

    def places(self, problem: Problem, tile: Tile, along: str) -> Array:
        """How many blocks each sequence has in each head, empty ones included."""
        if self.tile is None:
            return np.ones(len(problem.pairs), np.int64)
        return places(problem, getattr(tile, self.tile), along)


_SIDES = {
    "len_q": _Side("rows", "heads", "load_q", "offsets_q", "offsets_kv"),
    "len_kv": _Side("cols", "kv_heads", "load_kv", "offsets_kv", "offsets_q"),
    "sequences_of_lengths": _Side(None, "heads", "dsinks", None, "offsets_q"),
    **{step: _Side("rows", "heads", step, "offsets_q", None) for step in ("delta", "convert_dq")},
}


def places(problem: Problem, rows: int, along: str = "len_q") -> Array:
    """How many places each sequence has for its row tiles of `rows` queries, or along "len_kv" for its tiles of `rows` keys.

    >>> p = Problem(batch=1, heads=1, lengths=[100, 28, 0, 65], head_dim=8, dtype="float16")
    >>> places(p, 64)  # they begin at the queries 0, 100, 128 and 128
    array([2, 2, 1, 2])
    """
    stops = np.cumsum(problem.pairs_in_numpy[:, int(along == "len_kv")])
    starts = np.concatenate([[0], stops[:-1]])
    return stops // rows - starts // rows + 1 if stops[-1] else stops[:0]


@functools.lru_cache(maxsize=4)
def halvings(sequences: int) -> Array:
    """How many offsets a block looks at until it has found its sequence, for each of `sequences`."""
    wanted = np.arange(sequences, dtype=np.int64)
    low, high, n = np.zeros_like(wanted), np.full_like(wanted, sequences), np.zeros_like(wanted)
    while (searching := high - low > 1).any():
        middle, n = (low + high) // 2, n + searching
        low, high = np.where(searching & (middle <= wanted), middle, low), np.where(middle <= wanted, high, middle)
    return n


def evaluated(problem: Problem, operation: Operation, config: Config, count: Callable[[Problem], Counts]) -> Counts:
    """The counts of a problem. `count` counts a plain problem, or one sequence. A plain problem is just counted."""
    if not problem.apart:
        return count(problem)
    once = {sequence: count(sequence) for sequence in problem.different}
    if any(launch.boxes for part in once.values() for launch in part.launches):  # boxes lie where their sequence does
        parts = [once[sequence] for sequence in problem.sequences]
        return joined(parts, [1] * len(parts), problem, operation, config, count)
    return joined(list(once.values()), list(problem.different.values()), problem, operation, config, count)


def in_closed_form(
    problem: Problem, operation: Operation, config: Config, count: Callable[[Problem], Counts]
) -> Counts:
    """`evaluated` for a formula: of many different sequences it counts those together that go one way through it."""
    if not problem.apart:
        return count(problem)
    parts, times = zip(*problem.of_sequences(count), strict=True)
    return joined(parts, times, problem, operation, config, count)


class Different(Collection[tuple[Counts, int]]):
    """The counts of each different sequence, and how many there are of it, counted when somebody asks. `parts` are the counts of
    those that were counted together, with lanes, and how many there are of each."""

    def __init__(
        self, problem: Problem, count: Callable[[Problem], Counts], parts: Sequence[tuple[Counts, int | Array]]
    ) -> None:
        self._problem, self._count, self.parts = problem, count, parts

    def __iter__(self) -> Iterator[tuple[Counts, int]]:
        return ((self._count(one), n) for one, n in self._problem.different.items())

    def __len__(self) -> int:
        return sum(np.size(times) for _, times in self.parts)

    def __contains__(self, x: object) -> bool:
        return any(x == each for each in self)

    def alone(self, part: Counts, lane: int) -> Counts:
        """The counts of one sequence of a part."""
        queries, keys = (int(np.ravel(n)[lane if np.ndim(n) else 0]) for n in (part.problem.len_q, part.problem.len_kv))
        return self._count(self._problem.sequence(queries, keys))


def joined(
    parts: Sequence[Counts],
    times: Sequence[int | Array],
    problem: Problem,
    operation: Operation,
    config: Config,
    count: Callable[[Problem], Counts],
) -> Counts:
    """The counts of a ragged batch. `parts` are those of its sequences, and `times` says how often each of them occurs. `count`
    counts another sequence. Where parts have boxes, they are all sequences in their order. A part may be that of many sequences,
    with lanes."""
    total, tile = summed(parts, problem, times), config.tile
    if problem.ragged and not config.walks:
        tensors = {name: _whole(spec, parts, times, problem, operation, tile) for name, spec in total.tensors.items()}
    else:
        longest = count(problem.sequence(problem.padded.len_q, problem.padded.len_kv))
        tensors = {name: _for_all(spec, problem, operation, tile) for name, spec in longest.tensors.items()}
    launches = tuple(_launch(launch, i, parts, problem, operation, config) for i, launch in enumerate(total.launches))
    if config.ordered:
        n = int(places(problem, tile.cols, "len_kv").sum())
        cols = _ORDERED_TILE // _NUMBER
        tensors["order"] = Spec("order", 1, n, cols, "int32", "workspace", flat=True, shared=True)
    return replace(total, launches=launches, tensors=tensors, sequences=_sequences(parts, times, problem, count))


def _sequences(
    parts: Sequence[Counts], times: Sequence[int | Array], problem: Problem, count: Callable[[Problem], Counts]
) -> Collection[tuple[Counts, int]]:
    """The different ones among parts, and how often each occurs. Those of lanes are counted when somebody asks."""
    same, different = Counter[Problem](), dict[Problem, Counts]()
    for part, n in zip(parts, times, strict=True):
        if not isinstance(n, int):
            return Different(problem, count, list(zip(parts, times, strict=True)))
        same[part.problem] += n
        different[part.problem] = part
    return tuple((different[one], n) for one, n in same.items())


def _whole(
    spec: Spec,
    parts: Sequence[Counts],
    times: Sequence[int | Array],
    problem: Problem,
    operation: Operation,
    tile: Tile,
) -> Spec:
    """An array of the whole batch. In a workspace, too, the sequences' parts lie one behind the other."""
    if spec.role != "workspace":
        return operation.operand(spec.name, problem).spec(problem, tile, spec.role)
    same = [part.tensors[spec.name] for part in parts]
    if spec.flat:  # a place has room for the row tile of any sequence
        planes = zip(*(each.axes for each in same), strict=True)
        axes = tuple((axis[0][0], max(largest(n) for _, n in axis)) for axis in planes)
        most = max(1, *(largest(part.problem.row_tiles(tile)) for part in parts))
        rows = int(places(problem, tile.rows).sum()) * (max(largest(each.rows) for each in same) // most)
        return replace(same[0], rows=rows, cols=max(largest(each.cols) for each in same), axes=axes)
    if len({(largest(each.cols), -largest(-each.cols)) for each in same}) == 1:
        return replace(same[0], rows=sum(summed_over(each.rows, n) for each, n in zip(same, times, strict=True)))
    nbytes = sum(summed_over(each.rows * each.row_bytes, n) for each, n in zip(same, times, strict=True))
    return replace(same[0], rows=1, cols=nbytes // spec.itemsize)


def _for_all(spec: Spec, problem: Problem, operation: Operation, tile: Tile) -> Spec:
    """An array of all requests, from that of the longest."""
    if spec.role == "workspace":
        return spec if spec.shared else replace(spec, heads=problem.padded.batch * spec.heads)
    return operation.operand(spec.name, problem).spec(problem, tile, spec.role)


def _launch(
    total: LaunchCounts, index: int, parts: Sequence[Counts], problem: Problem, operation: Operation, config: Config
) -> LaunchCounts:
    """A launch of the whole batch, where `total` is the sum over its sequences."""
    p, each = problem, [part.launches[index] for part in parts]
    if total.across:
        return _across(total, p)
    axes = {x.name: set(x.axes) for x in (*operation.taken(p), *operation.outputs)}
    if p.ragged and total.boxes:
        boxes = Counter[Box]()
        for launch, (rows, keys) in zip(each, p.spans, strict=True):
            for box, n in launch.boxes.items():
                first = rows.start if "len_q" in axes[box.tensor] else keys.start
                boxes[box._replace(row=first + box.row)] += n
        total = replace(total, boxes=boxes)
    if config.walks or not p.ragged:
        common = {x.name for x in operation.taken(p) if {"batch", "pages"}.isdisjoint(x.axes)}
        distinct = {
            (name, way): max(largest(launch.distinct.get((name, way), 0)) for launch in each) if name in common else n
            for (name, way), n in total.distinct.items()
        }
        peak = max(largest(launch.sram_peak) for launch in each)
        total = replace(total, sram_peak=peak, distinct=distinct)
        has_lengths = p.ragged or "seq_lens" in axes
        return _dealt(total, index, p, parts[0].device, config) if has_lengths else replace(total, walk=None)
    distinct = dict(total.distinct)
    for name, way in distinct:
        if name in axes and axes[name].isdisjoint(APART):  # all sequences share it
            distinct[name, way] = max(largest(launch.distinct.get((name, way), 0)) for launch in each)
    side, ledger = _SIDES[total.along], dict(total.ledger)
    if config.ordered and total.along == "len_kv":
        side = side._replace(searched=None, read=None)
    room = side.places(p, config.tile, total.along)
    tiles = int(room.sum())
    heads: int = 1 if total.shared else p.batch * getattr(p, side.heads)
    step = "load_mask" if total.shared else side.step
    asking = side.asking(total, config)
    searched = int((room * halvings(len(room))).sum())
    for name, looks, seen in ((side.searched, searched, len(room) - 1), (side.read, 2 * tiles, len(room) + 1)):
        if name and looks:
            ledger[Entry(step, name, "hbm.read")] = _NUMBER * looks * heads * total.cols * asking
            distinct[name, "read"] = _NUMBER * seen
    blocks = heads * tiles * total.cols
    if config.ordered and total.along == "len_kv":
        ledger[Entry(step, "order", "hbm.read")] = _ORDERED_TILE * blocks
        distinct["order", "read"] = _ORDERED_TILE * tiles
    if config.ordered and total.along == "delta":
        _put_in_order(ledger, distinct, step, places(p, config.tile.cols, "len_kv"))
    for entry, n in total.ledger.items():
        if entry.tensor == WORK:  # for each tile or place, and once that no tile is left
            told = total.blocks + config.grid(p, parts[0].device, blocks) if config.persistent else blocks
            ledger[entry] = n // total.blocks * told
        if entry.tensor == "drawn" and config.dynamic:  # an empty place, too
            ledger[entry] = n // total.blocks * blocks
    return replace(
        total,
        blocks=blocks,
        sram_peak=max(largest(launch.sram_peak) for launch in each),
        ledger=ledger,
        distinct=distinct,
        walk=None,
    )


def _put_in_order(ledger: dict[Entry, int], distinct: dict[tuple[str, str], int], step: str, room: Array) -> None:
    """The bytes of the first launch where it puts the key tiles of all sequences in an order. `room` is how many places each
    sequence has."""
    places, ends = int(room.sum()), len(room) + 1
    searched = int((room * halvings(len(room))).sum())
    read = {"offsets_q": 2 * places * ends, "offsets_kv": searched + 2 * places * len(room)}
    for name, looks in read.items():
        entry = Entry(step, name, "hbm.read")
        ledger[entry] = ledger.get(entry, 0) + _NUMBER * looks
        distinct[name, "read"] = _NUMBER * ends
    ledger[Entry(step, "order", "hbm.write")] = distinct["order", "write"] = _ORDERED_TILE * places


def _dealt(total: LaunchCounts, index: int, problem: Problem, device: Device, config: Config) -> LaunchCounts:
    """A launch whose persistent blocks deal out the units of all requests. In a further launch, or in one that deals out nothing,
    each block has one request, and every warp looks up its length."""
    ledger, distinct, requests = dict(total.ledger), dict(total.distinct), problem.padded.batch
    name, each = ("offsets_kv", 2 * _NUMBER) if problem.ragged else ("seq_lens", _NUMBER)
    if problem.varlen:
        return _of_requests(total, problem, device, config)
    if total.blocks:
        blocks = config.grid(problem, device, total.blocks)
        if index or not (config.walks or config.sorted):
            read = each * total.warps * total.blocks
        elif config.sorted:
            read = each * total.blocks // requests * sum(n * n for n in sorted_together(requests))
        else:
            read = each * requests * config.walks * blocks
        ledger[Entry("merge" if index else "load_q", name, "hbm.read")] = read
        distinct[name, "read"] = _NUMBER * (requests + problem.ragged)
        for entry, n in total.ledger.items():
            if entry.tensor == WORK and config.persistent:  # for each row tile, and once that none is left
                ledger[entry] = n // total.blocks * (total.blocks + blocks)
    return replace(total, ledger=ledger, distinct=distinct, walk=None)


def _of_requests(total: LaunchCounts, problem: Problem, device: Device, config: Config) -> LaunchCounts:
    """A launch whose blocks draw the row tiles of requests with different numbers of queries. One warp of a block finds the request
    of each place in `cu_seqlens_q` by halves, and looks its length up. An empty place is drawn like others, and told to nobody. But
    where each block has one place, it tells that there is nothing."""
    p, room = problem, places(problem, config.tile.rows)
    blocks = p.heads * int(room.sum())
    if not blocks:
        return replace(total, walk=None)
    ledger, distinct = dict(total.ledger), dict(total.distinct)
    looks = {"cu_seqlens_q": int((room * halvings(len(room))).sum()), "seq_lens": int(room.sum())}
    for name, n in looks.items():
        if n:
            ledger[Entry("load_q", name, "hbm.read")] = _NUMBER * n * p.heads
            distinct[name, "read"] = _NUMBER * (p.batch if name == "seq_lens" else p.batch - 1)
    told = total.blocks + config.grid(p, device, blocks) if config.persistent else blocks
    for entry, n in total.ledger.items():
        if entry.tensor == WORK:
            ledger[entry] = n // total.blocks * told
        if entry.tensor == "drawn":
            ledger[entry] = n // total.blocks * blocks
    return replace(total, blocks=blocks, ledger=ledger, distinct=distinct, walk=None)


def sorted_together(requests: int) -> list[int]:
    """How many neighbouring requests are sorted together by their lengths: 32, or fewer at the beginning.

    >>> sorted_together(70)
    [6, 32, 32]
    """
    return [requests % 32] * (requests % 32 > 0) + [32] * (requests // 32)


def _across(total: LaunchCounts, problem: Problem) -> LaunchCounts:
    """A launch whose blocks have rows of any sequences. Each moves what its rows need, and all compute alike."""
    p = problem
    heads, rows = (p.kv_heads, p.len_kv) if total.along == "len_kv" else (p.heads, p.len_q)
    blocks = p.batch * heads * -(-rows // total.across)
    return replace(total, blocks=blocks, flops_other=total.flops_other * blocks // max(1, total.blocks), walk=None)
