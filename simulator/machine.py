"""The machine that tile programs run on: HBM, blocks with a capacity-limited SRAM, registers, warps.

A tile program is written for one block. The machine runs many blocks in lockstep: all batches and heads, and the row
blocks that walk over the same key tiles, lie on leading array axes `(batch, kv_head, query_in_group, block)`. On data
it computes and counts. On shapes alone it only counts. It counts bytes where the accounting contract says:

- `block.load` and `block.store` request bytes from HBM: the rows inside the problem, padded to 16 bytes.
- The whole tile lands in SRAM, padded to the fragment (16 x 8 x 16).
- `block.matmul` reads each SRAM operand once for each warp (or warpgroup) that uses it. With `"rows"` or `"cols"` the
  warps split it, and with `"none"` every warp reads all of it.
- `block.put` and `block.get` are transfers between warps through SRAM. Shuffles and registers count nothing.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np

from simulator import misuse
from simulator.block import Block, Index
from simulator.config import Config
from simulator.counts import Book, Counts, Entry, Spec
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Said, UsageError, misnamed
from simulator.fields import integer
from simulator.memory import check_memory
from simulator.operations.operation import Operand, Operation
from simulator.problem import Problem, Walk
from simulator.representatives import MOST_STEPS, Cost, Intervals, Representatives, united
from simulator.tensors import Batches, HbmTensor, Place
from simulator.trace import Recorder

Own = Mapping[int, tuple[Batches, Callable[..., Walk]]]
"""Of each number of keys: the batches that have so many, and what their blocks walk over."""
_WORK = ("flops_matmul", "flops_other", "exp")  # what a page has beside its ledger that adds up
# elements of S over all blocks of a lockstep group: enough for large matrix products, few enough for the CPU's cache
_LOCKSTEP_ELEMENTS = 1 << 18


class Machine:
    """What a tile program runs on: it has `m.device`, `m.config`, `m.lse` (was the LSE asked for?) and launches blocks.

    >>> import flashlab as fl
    >>> @fl.program
    ... def scores_only(m, q, k, v, problem, tile):
    ...     out = m.output("out")
    ...     for block in m.launch("scores", rows=problem.row_tiles(tile), warps=4):
    ...         block.step("load")
    ...         q_i, k_j = block.load(q, block.i, tile.rows), block.load(k, 0, tile.cols)
    ...         block.step("scores")
    ...         s = block.matmul(q_i, k_j.T, split=("rows", "none"))
    ...         block.store(out, s, block.i, tile.rows)
    ...     return out
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    >>> fl.count(scores_only, p, tile=(64, 64)).flops.matmul == 2 * 64**3
    True
    """

    def __init__(
        self, name: str, operation: Operation, problem: Problem, config: Config, device: Device, *, asked: Collection[str] = (),
        data: Mapping[str, Array] | None, recorder: Recorder | None = None, stop: Event | None = None, first_head: int = 0,
        infer: bool = False,
    ) -> None:  # fmt: skip
        self._stop = stop or Event()
        self.operation, self.problem, self.device = operation, problem, device
        self.config, self.tile = config, config.tile
        self.asked, self.recorder, self.data = frozenset(asked), recorder, data is not None
        self.book = Book(name, problem, config.tile, device, config)
        self.heads = problem.batch * problem.heads
        self._infer = infer  # may rows of blocks be inferred from others?
        self.first_head = first_head  # among the heads of all batches, where the problem is one of them
        self._given = data or {}
        self.values: dict[str, Array] = {}
        self._leads: dict[str, tuple[int, int, int]] = {}
        self._axes = {operand.name: operand.axes for operand in operation.taken(problem)}
        self._written = set[str]()
        self._touched: defaultdict[_Touched, set[tuple[int, int, int, int]]] = defaultdict(set)
        for operand in operation.taken(problem):  # they are in HBM, even if no block reads them
            self.book.tensor(operand.spec(problem, config.tile, "input"))
        written = {x.name: x for x in operation.written(problem)}
        self.outputs = {
            x.name: self._input(x) if x.name in operation.in_place else self._output(x) for x in written.values()
        }
        self.inputs = tuple(self.outputs.get(x.name) or self._input(x) for x in self._required())

    if not TYPE_CHECKING:  # a type checker knows each name there is

        def __getattr__(self, name: str) -> NoReturn:
            raise misnamed("m", self, name)

    # -- for tile programs --------------------------------------------------------------------------------------

    @property
    def lse(self) -> bool:
        """Was the LSE asked for?"""
        return "lse" in self.asked

    def output(self, name: str = "out") -> HbmTensor:
        """A handle to an output of the operation. Raises `UsageError` for another name.

        Attention's outputs are `out` (batch, heads, len_q, head_dim_v) and `lse` (batch, heads, len_q).
        """
        if name not in self.outputs:
            known = list(dict.fromkeys(operand.name for operand in self.operation.outputs))
            if name not in known:
                raise UsageError("output", name, " or ".join(map(repr, known)))
            self.outputs[name] = self._output(self.operation.operand(name, self.problem))
        return self.outputs[name]

    def optional(self, name: str) -> HbmTensor:
        """A handle to an input that callers may leave out. If they do, it is full of its default."""
        return self._input(self.operation.operand(name, self.problem))

    def packed(self, tensor: HbmTensor, *, together: bool = False) -> HbmTensor:
        """The query heads of each group as rows of one matrix, (batch, kv_heads, len_q * group, cols).

        Row `i * group + g` is query i of head g, where `group` is the number of query heads per KV head. This is for
        launches with one block per KV head, as in decoding. `block.mask` needs to know: pass it `group=group`. With `together`,
        the rows of all batches follow one another, (1, kv_heads, batch * len_q * group, cols), for keys that all share. So
        a vector has the numbers of all batches one below the other. Raises `UsageError` for one that is packed already.
        """
        if tensor.group:
            raise UsageError("packed", tensor.name, f"{tensor.name} as it was before its heads were packed")
        (batches, _, group), spec = self._leads[tensor.name], tensor.spec
        batches = batches if together else 1
        rows, heads = spec.rows * group * batches, spec.heads // (group * batches)
        return HbmTensor(replace(spec, heads=heads, rows=rows), plane=tensor.plane, group=group, together=together)

    def paged(self, pool: HbmTensor, table: HbmTensor, place: Place | None = None) -> HbmTensor:
        """The keys of a request in their order, (1, kv_heads, len_kv, cols), through its line of the block table.

        Loads of it count what they read from the pool. Who looks pages up says so: `block.look_up`. `place(n)` says where key n
        lies, for an array of keys: which entry of the line has its page, and which row of the page it is. Left out, that is
        `(n // page_size, n % page_size)`.
        """
        return HbmTensor(replace(pool.spec, rows=self.problem.len_kv), table=table, place=place)

    def workspace(
        self,
        name: str,
        cols: int,
        dtype: str = "float32",
        *,
        rows: int | None = None,
        vector: bool = False,
        of: HbmTensor | None = None,
        axes: Mapping[str, int] | None = None,
        flat: bool = False,
        zeros: bool = False,
        shared: bool = False,
    ) -> HbmTensor:
        """A new array in HBM: per head `rows` (None: len_q) x `cols` of a dtype. A `vector` is not padded.

        It has as many heads as the queries, or as `of`; one that is `shared` has none. `axes` gives each head several
        planes of rows and columns, by name. With `axes={"splits": 4}`, `tensor.at(splits=j)` is one plane. `flat` and
        `zeros` are as in `Spec`.
        """
        rows = self.problem.len_q if rows is None else rows
        lead = self._lead_of(() if shared else ("batch", "heads")) if of is None else self.lead(of)
        planes = tuple((axes or {}).items())
        spec = Spec(
            name,
            math.prod(lead),
            rows,
            cols,
            dtype,
            "workspace",
            vector=vector,
            axes=planes,
            flat=flat,
            zeros=zeros,
            shared=shared,
        )
        return self._new(spec, lead)

    def launch(
        self,
        name: str,
        *,
        warps: int,
        rows: int = 1,
        cols: int = 1,
        walk: Callable[..., Walk] | None = None,
        apart: Callable[[int], object] | None = None,
        readers: int | None = None,
        of: HbmTensor | None = None,
        along: str = "len_q",
        across: int = 0,
        own: Own | None = None,
    ) -> Iterator[Block]:
        """Launch `rows` x `cols` blocks for every batch and head (of the queries, or of `of`).

        Yields blocks, each of which stands for a group that runs in lockstep. `walk(i)` or `walk(i, j)` is what
        block (i, j) loops over, for instance the key tiles that the mask leaves. Blocks with equal walks share a
        group, if `apart(i)` is equal, too. `readers` is how many read an operand that is not split: the warps, or the
        warpgroups if those multiply. Nothing is launched if the operation has nothing to write. `along` and `across` say
        how blocks of a ragged batch lie (`LaunchCounts`). If batches have different numbers of keys, `own` says for each number
        which ones they are, and what these walk over. Of arrays with an axis `len_kv`, their blocks see so many rows.
        Raises `UsageError` for fewer than one warp.
        """
        lead = self._lead_of(("batch", "heads")) if of is None else self.lead(of)
        heads = math.prod(lead)
        warps = integer("warps", warps, 1)
        rows, cols = integer("rows", rows, 0), integer("cols", cols, 0)
        rows = 0 if self.operation.idle(self.problem) else rows
        if own is None:
            shares = [_Share(walk)]
        elif self.recorder:  # a batch after the other, so that each is seen
            each = {b: _Share(walk, keys, (b,)) for keys, (batches, walk) in own.items() for b in batches}
            shares = [each[b] for b in sorted(each)]
        else:
            shares = [_Share(walk, keys, batches) for keys, (batches, walk) in own.items()]
        # blocks of a row in different columns don't walk alike, and nor do those of other batches
        row_walk = shares[0].walk if cols == 1 and len(shares) == 1 else None
        together = self.config.heads_together
        shared = of is not None and any(
            x.name == of.name and {"heads", "kv_heads"}.isdisjoint(x.axes) for x in self.operation.taken(self.problem)
        )
        self.book.launch(
            name, rows * cols * heads, warps, together, walk=row_walk, along=along, across=across, shared=shared, cols=cols
        )  # fmt: skip
        self._touched.clear()
        most = rows  # blocks per lockstep group: on shapes alone a group costs the same at any size
        if self.data:
            most = max(1, _LOCKSTEP_ELEMENTS // (self.heads * self.tile.rows * self.tile.cols))
        if self.recorder:
            self.recorder.launch(name)
            most = 1
        for share in shares:
            walks = _walks(share.walk, rows, cols)
            alone = lead if share.batches is None else (len(share.batches), *lead[1:])

            def in_lockstep(
                start: int, stop: int, share: _Share = share, walks: list[tuple[Walk, ...]] = walks, lead: _Lead = alone
            ) -> Iterator[Block]:
                for j in range(cols):
                    block = Block(
                        self, np.arange(start, stop).view(Index), j, walks[start][j], warps, readers or warps, lead,
                        share.batches, share.keys,
                    )  # fmt: skip
                    if self.recorder:
                        request = share.batches[0] if share.batches and self.problem.batch > 1 else None
                        self.recorder.block(block, request)
                    yield block

            groups = _groups(walks if apart is None else [(walk, apart(i)) for i, walk in enumerate(walks)], most)
            inferred = self._infer and len(shares) == 1 and apart is None and _steps(walks, groups) > MOST_STEPS
            if inferred and all(type(w) is range for row in walks for w in row):
                yield from self._inferred(walks, in_lockstep)
            else:
                for start, stop in groups:
                    yield from in_lockstep(start, stop)
        if self.recorder:
            self.recorder.end()
        self._close_launch()

    # -- inside -------------------------------------------------------------------------------------------------

    def _inferred(
        self, walks: Sequence[tuple[Walk, ...]], in_lockstep: Callable[[int, int], Iterator[Block]]
    ) -> Iterator[Block]:
        """The blocks of a few rows, and what all rows cost, from what these do."""
        chosen = Representatives(walks, self.tile.cols // math.gcd(self.tile.rows, self.tile.cols))
        while rows := chosen.wanted():
            for i in rows:
                with self.book.apart() as page:
                    yield from in_lockstep(i, i + 1)
                work = {name: getattr(page, name) for name in _WORK}
                sums: dict[Hashable, int] = {**page.ledger, **work}
                chosen.ran(i, Cost(sums, page.sram_peak, self._intervals()))
                self._touched.clear()
        page, total = self.book.page, chosen.sums()
        for name in _WORK:
            setattr(page, name, total.pop(name))
        page.ledger.update(cast("dict[Entry, int]", total))
        page.sram_peak, page.inferred = chosen.peak, chosen.inferred
        for (touched, first, end), intervals in cast("dict[Any, Any]", chosen.reached()).items():
            self._touched[touched] |= {(*rows, first, end) for rows in intervals}

    def _intervals(self) -> dict[Hashable, Intervals]:
        """The rows that were touched of each tensor, way and range of bytes."""
        found = defaultdict[Hashable, list[tuple[int, int]]](list)
        for touched, rectangles in self._touched.items():
            for first, end, start, stop in rectangles:
                found[touched, start, stop].append((first, end))
        return {what: united(np.array(rows, np.int64).T) for what, rows in found.items()}

    def go_on(self) -> None:
        """Raises `Stopped` once nobody waits for the run any more."""
        if self._stop.is_set():
            raise Stopped

    def touch(self, tensor: HbmTensor, way: str, rectangle: tuple[int, int, int, int]) -> None:
        """Note a rectangle (first row, end row, first byte, end byte) that a launch reaches in each head."""
        if way == "write":
            self._written.add(tensor.name)
        else:
            self.check_written(tensor)
        heads = tensor.spec.heads if tensor.member is None else tensor.spec.heads // self.problem.queries_per_kv
        self._touched[_Touched(tensor.name, way, tensor.member, tensor.plane, heads, tensor.batches)].add(rectangle)

    def check_written(self, tensor: HbmTensor) -> None:
        """Raises `UsageError` for an array of the program's own in which nothing was written yet."""
        if tensor.name not in self._written and tensor.spec.role != "input" and not tensor.spec.zeros:
            found = f"an {tensor.spec.role}" if tensor.spec.role == "output" else "a workspace"
            raise UsageError(
                tensor.name, Said(f"{found} that is read before it is written"), "a block.store into it before"
            )

    def lead(self, tensor: HbmTensor) -> tuple[int, int, int]:
        """How many batches, KV heads and query heads per group a handle has. It is 1 where all blocks share one."""
        batch, kv_heads, group = self._leads[tensor.name]
        batch = batch if tensor.batches is None else len(tensor.batches)
        return 1 if tensor.together else batch, kv_heads, 1 if tensor.group or tensor.member is not None else group

    def of_share(self, tensor: HbmTensor, batches: Batches, keys: int) -> HbmTensor:
        """What blocks of some batches see of an array: what each of these has, and of rows of `len_kv` so many."""
        batch = self._leads[tensor.name][0]
        rows = keys if "len_kv" in self._axes.get(tensor.name, ()) else tensor.spec.rows
        if tensor.together or (batch in (1, len(batches)) and rows == tensor.spec.rows):
            return tensor
        return tensor.of_batches(batches, batch, rows)

    def read(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int) -> Array:
        """The values in rows first:last and columns start:stop, (batch, kv_head, query_in_group, rows, cols)."""
        values = self._plane(tensor)
        if tensor.batches is not None:
            values = values[list(tensor.batches)]
        if tensor.table is not None:
            return values[:, :, :, self.pool_rows(tensor, first, last), start:stop]
        if tensor.together:
            batch, row, member = _apart(values, tensor, first, last)
            return values[batch, :, member, row, start:stop].swapaxes(0, 1)[None, :, None]
        if tensor.group:
            rows = np.arange(first, last)
            return values[:, :, None, rows % tensor.group, rows // tensor.group, start:stop]
        return values[:, :, :, first:last, start:stop]

    def pool_rows(self, tensor: HbmTensor, first: int, last: int) -> Array:
        """The rows of the pool in which keys first:last of a request lie. Raises `UsageError` for a `place` that isn't there."""
        assert tensor.table is not None
        size, keys = self.problem.page_size or 1, np.arange(first, last)
        line = self.values[tensor.table.name].reshape(-1)
        entry, row = (
            (keys // size, keys % size) if tensor.place is None else misuse.places(tensor.place, keys, len(line), size)
        )
        return line[entry].astype(np.int64) * size + row

    def numbers(self, tensor: HbmTensor, first: int, last: int) -> Array:
        """The integers in rows first:last of a vector that all heads share."""
        return self.values[tensor.name].reshape(-1)[first:last].astype(np.int64)

    def rows(self, tensor: HbmTensor, rows: Array) -> Array:
        """The values in rows of any numbers, (batch, kv_head, query_in_group, rows, cols)."""
        return self._plane(tensor)[:, :, :, rows]

    def write_rows(self, tensor: HbmTensor, rows: Array, x: Array) -> None:
        """Put values into rows of any numbers."""
        self._plane(tensor)[:, :, :, rows] = x

    def write(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int, x: Array) -> None:
        """Put values into rows first:last and columns start:stop."""
        values = self._plane(tensor)
        if tensor.batches is not None:
            whole, values = values, values[list(tensor.batches)]
            self._put(tensor, values, first, last, start, stop, x)
            whole[list(tensor.batches)] = values
        else:
            self._put(tensor, values, first, last, start, stop, x)

    @staticmethod
    def _put(tensor: HbmTensor, values: Array, first: int, last: int, start: int, stop: int, x: Array) -> None:
        if tensor.together:
            batch, row, member = _apart(values, tensor, first, last)
            values[batch, :, member, row, start:stop] = x[0, :, 0].swapaxes(0, 1)
        elif tensor.group:
            rows = np.arange(first, last)
            values[:, :, rows % tensor.group, rows // tensor.group, start:stop] = x[:, :, 0]
        else:
            values[:, :, :, first:last, start:stop] = x

    def _plane(self, tensor: HbmTensor) -> Array:
        """A view of the values that a handle stands for: one plane, or one KV head's member of the group."""
        values = self.values[tensor.name]
        if tensor.spec.axes:
            values = values[:, :, :, tensor.plane]
        values = values[..., :: tensor.every, :]
        return values if tensor.member is None else values[:, :, tensor.member : tensor.member + 1]

    def unwritten(self, name: str) -> int:
        """How many bytes of an output no launch has written. It is 0 where there is nothing to launch."""
        if self.operation.idle(self.problem) or name in self.operation.in_place:
            return 0
        return self.outputs[name].spec.nbytes - self.book.reached(name, "write")

    def close(self) -> Counts:
        """The counts of all launches, once the program is done."""
        return self.book.close()

    def result(self, name: str) -> Array:
        """The values of an output, in its own shape. Only a run on data has them."""
        operand = self.operation.operand(name, self.problem)
        return np.ascontiguousarray(operand.from_heads(self.values[name], operand.shape(self.problem, self.tile)))

    def _close_launch(self) -> None:
        reached: defaultdict[tuple[str, str], int] = defaultdict(int)
        for touched, rectangles in self._touched.items():
            reached[touched.name, touched.way] += _area(rectangles) * touched.heads
        for (name, way), nbytes in reached.items():
            self.book.distinct(name, way, nbytes)

    def _required(self) -> list[Operand]:
        """The inputs that the program takes, in the forms that the problem has."""
        return [self.operation.operand(x.name, self.problem) for x in self.operation.required]

    def _input(self, operand: Operand) -> HbmTensor:
        """A handle to an input. Its values are the caller's array, or else the default. Of what is read and written they are a
        copy."""
        in_place = operand.name in self.operation.in_place
        spec = self.book.tensor(operand.spec(self.problem, self.tile, "output" if in_place else "input"))
        lead = self._leads[spec.name] = self._lead_of(operand.lead)
        if in_place:
            self._written.add(spec.name)
        if self.recorder:
            self.recorder.tensor(spec)
        if self.data:
            x = self._given.get(operand.name)
            if x is None:
                x = operand.left_out(self.problem, self.tile)
            values = operand.by_head(x, lead, spec)
            if in_place:
                self.values[spec.name] = values.copy()
                return HbmTensor(spec)
            # nobody computes with integers, which are states and places: float32 would lose their digits
            self.values[spec.name] = values if values.dtype.kind in "iu" else values.astype(np.float32, copy=False)
        return HbmTensor(spec)

    def _output(self, operand: Operand) -> HbmTensor:
        return self._new(operand.spec(self.problem, self.tile, "output"), self._lead_of(operand.lead))

    def _new(self, spec: Spec, lead: tuple[int, int, int]) -> HbmTensor:
        """A handle to an array that the program writes. Until then it is NaN (an integer: the least one), so that a
        forgotten store shows."""
        self.book.tensor(spec)
        if self.recorder:
            self.recorder.tensor(spec)
        self._leads[spec.name] = lead
        if self.data:
            dtype = numpy_dtype(spec.dtype)
            unwritten = np.nan if dtype.kind in "fV" else np.iinfo(dtype).min
            planes = (spec.planes,) if spec.axes else ()
            check_memory(f"{spec.name} of {self.book.algorithm}", spec.nbytes)
            self.values[spec.name] = np.full((*lead, *planes, spec.rows, spec.cols), unwritten, dtype)
        return HbmTensor(spec)

    def _lead_of(self, axes: tuple[str, ...]) -> tuple[int, int, int]:
        """The lengths of axes of batch and heads, as (batch, kv_head, query_in_group), with 1 for a missing axis."""
        p = self.problem
        batch = p.batch if "batch" in axes else 1
        kv_heads = p.kv_heads if "heads" in axes or "kv_heads" in axes else 1
        return batch, kv_heads, p.queries_per_kv if "heads" in axes else 1


def _apart(values: Array, tensor: HbmTensor, first: int, last: int) -> tuple[Array, Array, Array]:
    """Of rows that are packed over all batches: the batch of each, its row there, and its head's place in the group."""
    rows, member = np.divmod(np.arange(first, last), tensor.group)
    batch, row = np.divmod(rows, values.shape[3])
    return batch, row, member


class Stopped(Exception):
    """Ends a thread whose run was interrupted, or has failed in another thread."""


class _Touched(NamedTuple):
    """Which part of a tensor a launch reaches: all its heads or one of each group (`member`), which plane, and of which batches."""

    name: str
    way: str
    member: int | None
    plane: int
    heads: int
    batches: Batches | None


_Lead = tuple[int, int, int]


class _Share(NamedTuple):
    """Blocks of a launch that may run in lockstep: their walks, how many keys their batches have, and which ones these are."""

    walk: Callable[..., Walk] | None
    keys: int = 0
    batches: Batches | None = None


def _groups(walks: Sequence[tuple[object, ...]], most: int) -> list[tuple[int, int]]:
    """Neighbouring rows with equal walks, at most so many together: from which one to which."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(walks):
        stop = start + 1
        while stop < len(walks) and stop - start < most and walks[stop] == walks[start]:
            stop += 1
        found.append((start, stop))
        start = stop
    return found


def _steps(walks: Sequence[tuple[Walk, ...]], groups: Sequence[tuple[int, int]]) -> int:
    """Over how many tiles all groups walk together."""
    return sum(len(walk) for start, _ in groups for walk in walks[start])


def _walks(walk: Callable[..., Walk] | None, rows: int, cols: int) -> list[tuple[Walk, ...]]:
    """For each row block, the walks of its columns."""
    if walk is None:
        return [(range(0),) * cols] * rows
    misuse.walk(walk)
    parameters = inspect.signature(walk).parameters.values()
    # a parameter with a default binds a value of the program's (`lambda i, tile=tile: ...`): it isn't the column
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    by_column = len(required) > 1
    check_memory(f"the walks of {rows * cols:,} blocks", 200 * rows * cols)
    found = [tuple(walk(i, j) if by_column else walk(i) for j in range(cols)) for i in range(rows)]
    for each in {type(w): w for row in found for w in row}.values():
        misuse.walked(each)
    return found


def _area(rectangles: set[tuple[int, int, int, int]]) -> int:
    """The area that rectangles (first row, end row, first byte, end byte) cover together."""
    r = np.array(list(rectangles), np.int64)
    ys, xs = np.unique(r[:, :2]), np.unique(r[:, 2:])
    covered = np.zeros((len(ys) - 1, len(xs) - 1), bool)
    for y0, y1, x0, x1 in zip(*np.searchsorted(ys, r[:, :2]).T, *np.searchsorted(xs, r[:, 2:]).T, strict=True):
        covered[y0:y1, x0:x1] = True
    return int((np.diff(ys)[:, None] * np.diff(xs)[None, :] * covered).sum())
