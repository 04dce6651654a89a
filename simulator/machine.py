"""The machine that tile programs run on: HBM, blocks with a capacity-limited SRAM, registers, warps.

A tile program is written for one block. The machine runs many blocks in lockstep: all batches and heads, and the row
blocks that walk the same key tiles, lie on leading array axes `(batch, kv_head, query_in_group, block)`. With data it
computes and counts; on shapes alone it only counts. Bytes are counted where the contract says:

- `block.load` and `block.store` request bytes from HBM: the rows inside the problem, padded to 16 bytes;
- what lands in SRAM is the whole tile, padded to the fragment (16 x 8 x 16);
- `block.matmul` reads each SRAM operand once for each warp (or warpgroup) that uses it: `"rows"` or `"cols"` splits it
  over the warps, `"none"` has every warp read all of it;
- `block.put` and `block.get` are transfers between warps through SRAM; shuffles and registers count nothing.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Counts, Spec
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import SramOverflow, UsageError
from simulator.operations.operation import Operand, Operation
from simulator.problem import Problem, round_up
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile
from simulator.trace import Recorder

Split = Literal["rows", "cols", "none"]
Rows = int | np.ndarray[Any, np.dtype[np.int64]]
"""The index of a tile: a number, or the block's own (an array over the blocks in lockstep)."""

_LOCKSTEP_ELEMENTS = 1 << 18  # of S over all blocks of a group: large matrix products, tiles that stay in the cache


class Block:
    """One thread block, as a tile program sees it.

    `i` is its row tile, `j` its key tile (of grids that have one), `walk` the range that the launch gave it. Operations
    take tile indices: `block.load(k, j, 64)` is rows `64 j … 64 j + 63` of k.

    >>> import flashlab as fl
    >>> @fl.program
    ... def scores_only(m, q, k, v, problem, tile):
    ...     for block in m.launch("scores", rows=problem.row_tiles(tile), warps=4):
    ...         block.step("load")
    ...         q_i, k_j = block.load(q, block.i, tile.rows), block.load(k, 0, tile.cols)
    ...         block.step("scores")
    ...         s = block.matmul(q_i, k_j.T, split=("rows", "none"))
    ...     return m.output("out")
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    >>> fl.count(scores_only, p, tile=(64, 64)).by_tensor["k"].sram_read // fl.count(scores_only, p).by_tensor["q"].sram_read
    4
    """

    def __init__(
        self, machine: Machine, i: Rows, j: int, walk: range, warps: int, readers: int, lead: tuple[int, int, int]
    ) -> None:
        self._m, self.i, self.j, self.walk, self.warps, self.readers = machine, i, j, walk, warps, readers
        self._lead = lead
        self._heads = heads = math.prod(lead)
        self._step = ""
        self._sram: dict[str, int] = {}
        self._filled: dict[str, tuple[int, int, int]] = {}
        self.lockstep = heads * (len(i) if isinstance(i, np.ndarray) else 1)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        """Name what follows; the .cu has a mark of the same name."""
        self._step = name
        if self._m.recorder:
            self._m.recorder.step(name, _program_frame())

    # -- HBM ----------------------------------------------------------------------------------------------------

    def load(
        self,
        tensor: HbmTensor,
        i: Rows,
        rows: int,
        j: int = 0,
        cols: int | None = None,
        *,
        stages: int = 1,
        panel: int | None = None,
    ) -> SramTile:
        """HBM to SRAM: tile (i, j) of `rows` x `cols` (all columns if None), zero-filled outside the problem.

        The buffer bears the tensor's name and is reused by the next load of it; `stages` buffers are held for a ring.
        With `panel` TMA moves it, in boxes of so many columns, which count whole: rows and columns outside included.
        """
        cols = cols or tensor.cols
        read, data = self._read(tensor, i, rows, j, cols, 0.0)
        if panel:
            read = rows * round_up(cols, panel) * tensor.spec.itemsize * self.lockstep
        if data is not None and data.shape[-1] < cols:
            data = np.pad(data, ((0, 0),) * 5 + ((0, cols - data.shape[-1]),))
        tile = SramTile(tensor.name, rows, cols, tensor.dtype, data, panel=panel or 16)
        self._reserve(tile, stages)
        self._count(tensor.name, hbm_read=read, sram_write=tile.footprint * self.lockstep)
        return tile

    def fetch(
        self, tensor: HbmTensor, i: Rows, rows: int, j: int = 0, cols: int | None = None, *, fill: float = 0.0, warps: int = 1
    ) -> Registers:  # fmt: skip
        """HBM to registers, past the SRAM: tile (i, j); `fill` stands outside the problem. `warps` that each ask for all of it."""
        cols = cols or tensor.cols
        read, data = self._read(tensor, i, rows, j, cols, fill)
        self._count(tensor.name, hbm_read=warps * read)
        return Registers(self, rows, min(cols, tensor.cols - j * cols), data)

    def store(self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None) -> None:
        """Registers to HBM: tile (i, j), rounded to the tensor's dtype; what lies outside the problem is not written."""
        first, last, nbytes = self._extent(tensor, i, rows, j, cols or tensor.cols, "write")
        self._count(tensor.name, hbm_write=nbytes)
        if self._m.data and last > first:
            start = j * (cols or tensor.cols)
            stop = min(start + x.cols, tensor.cols)
            with np.errstate(over="ignore"):
                self._m.write(
                    tensor,
                    first,
                    last,
                    start,
                    stop,
                    self._rows_of(tensor, x, i, rows)[..., : last - first, : stop - start],
                )

    def atomic_add(
        self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None
    ) -> None:
        """Add registers to float32 HBM by atomics: every lane's bytes count, blocks that collide add up."""
        first, last, nbytes = self._extent(tensor, i, rows, j, cols or tensor.cols, "write")
        self._count(tensor.name, hbm_atomic=nbytes)
        if self._m.data and last > first:
            start = j * (cols or tensor.cols)
            stop = min(start + x.cols, tensor.cols)
            flat = self._rows_of(tensor, x, i, rows, add=True)[..., : last - first, : stop - start]
            self._m.write(tensor, first, last, start, stop, flat + self._m.read(tensor, first, last, start, stop))

    # -- SRAM ---------------------------------------------------------------------------------------------------

    def alloc(
        self, name: str, rows: int, cols: int | None = None, dtype: str = "float32", *, copies: int = 1, panel: int = 16
    ) -> SramTile:
        """Reserve a buffer in SRAM, `copies` of it (one a warp, say), columns padded to `panel`; without `cols` a vector,
        one value a row.

        Raises `SramOverflow` over the device's limit.
        """
        tile = SramTile(name, rows, cols or 1, dtype, None, vector=cols is None, panel=panel)
        self._reserve(tile, copies)
        return tile

    def free(self, tile: SramTile) -> None:
        """Give a buffer back."""
        self._sram.pop(tile.name, None)

    def put(self, buffer: SramTile, x: Registers, *, copies: int = 1) -> None:
        """Registers to SRAM, for other warps to read; `copies` when every warp writes a partial result of its own.

        The values of partial results are held summed up: what a reader gets is what the warps' sum (or max) is.
        """
        tile = SramTile(buffer.name, x.rows, x.cols, buffer.dtype, None, vector=buffer.vector)
        self._filled[buffer.name] = tile.footprint * copies, x.rows, x.cols
        buffer.values = x.values
        self._count(buffer.name, sram_write=tile.footprint * copies * self.lockstep)

    def get(self, buffer: SramTile, split: Split = "rows") -> Registers:
        """SRAM to registers: what was last `put`, once in all, or (`"none"`) once by every warp."""
        nbytes, rows, cols = self._filled[buffer.name]
        self._count(buffer.name, sram_read=nbytes * self._uses(split) * self.lockstep)
        return Registers(self, rows, cols, buffer.values)

    def to_registers(self, tile: SramTile) -> Registers:
        """SRAM to registers, once in all (the warps split the rows), to be used from there."""
        self._count(tile.name, sram_read=tile.footprint * self.lockstep)
        return Registers(self, tile.rows, tile.cols, tile.values)

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def full(self, rows: int, cols: int, value: float) -> Registers:
        """A register tile of one value."""
        return Registers(
            self, rows, cols, np.full((1, 1, 1, 1, rows, cols), value, np.float32) if self._m.data else None
        )

    def matmul(
        self,
        a: SramTile | Registers,
        b: SramTile,
        *,
        split: tuple[Split, Split],
        acc: Registers | None = None,
        scale: float = 1.0,
    ) -> Registers:
        """`scale * a @ b (+ acc)` in float32. `split` says how the warps share the bytes of a and of b.

        Operands in registers move nothing. FLOPs count the tile padded to the fragment, multiply-adds as 2.
        """
        if padded(a.cols) != padded(b.rows):
            shapes = f"({a.rows}, {a.cols}) @ ({b.rows}, {b.cols})"
            raise UsageError("matmul", shapes, "as many columns on the left as rows on the right (is a .T missing?)")
        for operand, way in zip((a, b), split, strict=True):
            if isinstance(operand, SramTile):
                self._count(operand.name, sram_read=operand.footprint * self._uses(way) * self.lockstep)
        (rows, depth), (depth_too, columns) = _padded_shape(a), _padded_shape(b)
        self._m.book.compute(matmul=2 * rows * columns * max(depth, depth_too) * self.lockstep)
        if scale != 1.0:
            self.count_flops(a.rows * b.cols)
        if a.values is None or b.values is None:
            return Registers(self, a.rows, b.cols, None)
        product = _product(a.values if scale == 1.0 else a.scaled(scale), b.values)
        if acc is not None:
            product += acc.array
        return Registers(self, a.rows, b.cols, product)

    def exp(self, x: Registers) -> Registers:
        """e to the x."""
        self._m.book.compute(exp=x.size * self.lockstep)
        return Registers(self, x.rows, x.cols, None if x.values is None else np.exp(x.values))

    def log(self, x: Registers) -> Registers:
        """The natural logarithm; of 0 it is -inf."""
        with np.errstate(divide="ignore"):
            return self.elementwise(np.log, x)

    def maximum(self, a: Registers, b: Registers | float) -> Registers:
        """The larger, element by element."""
        return self.elementwise(np.maximum, a, b)

    def elementwise(self, f: Callable[..., Array], *operands: Registers | float) -> Registers:
        """f of the operands, one FLOP an element of the (broadcast) result."""
        tiles = [x for x in operands if isinstance(x, Registers)]
        rows, cols = max(x.rows for x in tiles), max(x.cols for x in tiles)
        result = Registers(self, rows, cols, None)
        self.count_flops(result.size)
        if self._m.data:
            result.values = f(*(x.array if isinstance(x, Registers) else np.float32(x) for x in operands))
        return result

    def mask(self, s: Registers, i: Rows, j: Rows, *, group: int = 1) -> Registers:
        """-inf where tile (i, j) of S lies outside the mask or beyond the last key. `group`: rows of S that belong to one query,
        where the query heads of a group are packed."""
        p = self._m.problem
        if s.values is None:
            return s
        rows, keys = (
            np.asarray(n).reshape(-1, 1, 1) * size + np.arange(size).reshape(shape)
            for n, size, shape in ((i, s.rows, (-1, 1)), (j, s.cols, (1, -1)))
        )
        rows = rows // group + p.offset
        if (
            keys.max() < p.len_kv
            and (p.right is None or keys.max() <= rows.min() + p.right)
            and (p.left is None or keys.min() >= rows.max() - p.left)
        ):
            return s
        hidden = np.broadcast_to(keys >= p.len_kv, np.broadcast_shapes(rows.shape, keys.shape))
        if p.right is not None:
            hidden = hidden | (keys > rows + p.right)
        if p.left is not None:
            hidden = hidden | (keys < rows - p.left)
        masked = s.values.copy(order="K")
        np.copyto(masked, -np.inf, where=hidden)
        return Registers(self, s.rows, s.cols, masked)

    # -- inside -------------------------------------------------------------------------------------------------

    def count_flops(self, n: int) -> None:
        """Count n FLOPs of this block, outside the matrix products."""
        self._m.book.compute(other=n * self.lockstep)

    def sram_alive(self) -> dict[str, int]:
        """The buffers in SRAM now, bytes."""
        return dict(self._sram)

    def _uses(self, split: Split) -> int:
        if split not in ("rows", "cols", "none"):
            raise UsageError("split", split, "'rows', 'cols' or 'none'")
        return self.readers if split == "none" else 1

    def _count(self, tensor: str, **nbytes: int) -> None:
        self._m.book.add(self._step, tensor, **nbytes)
        if self._m.recorder:
            self._m.recorder.bytes(tensor, nbytes, _program_frame())

    def _reserve(self, tile: SramTile, copies: int) -> None:
        m = self._m
        if m.recorder:
            m.recorder.buffer(tile, copies)
        self._sram[tile.name] = max(tile.footprint * copies, self._sram.get(tile.name, 0))
        alive = sum(self._sram.values())
        m.book.page.sram_peak = max(m.book.page.sram_peak, alive)
        if alive > m.device.sram_per_block:
            raise SramOverflow("tile", str(m.tile), needed=alive, limit=m.device.sram_per_block, device=m.device.name)

    def _rows_of(self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, *, add: bool = False) -> Array:
        """Registers as rows of a tensor, (batch, kv_head, query_in_group, rows, cols): the blocks' tiles one below the other.

        Where one number names the tile, all blocks in lockstep have the same rows: the last one's stay, or they add up.
        """
        blocks = 1 if isinstance(i, int | np.integer) else len(i)
        lead = self._m.lead(tensor)
        values = x.array
        if add:  # every block adds its own, also where all have the same
            here = len(self.i) if isinstance(self.i, np.ndarray) else 1
            values = np.broadcast_to(values, (*self._lead, here, *values.shape[-2:]))
            axes = tuple(axis for axis, n in enumerate((*lead, blocks)) if n == 1 and values.shape[axis] > 1)
            values = values.sum(axes, keepdims=True) if axes else values
        elif blocks == 1:
            values = values[:, :, :, -1:]
        tiles = np.broadcast_to(values, (*lead, blocks, rows, x.cols))
        return tiles.reshape(*lead, blocks * rows, x.cols)

    def _extent(self, tensor: HbmTensor, i: Rows, rows: int, j: int, cols: int, way: str) -> tuple[int, int, int]:
        """First and last row inside the problem, and the bytes requested there by all heads."""
        spec = tensor.spec
        lo, hi = (int(i), int(i)) if isinstance(i, int | np.integer) else (int(i[0]), int(i[-1]))
        first, last = lo * rows, min((hi + 1) * rows, spec.rows)
        # the last tile of a row has the row's padding to 16 bytes with it
        start = j * cols * spec.itemsize
        stop = spec.row_bytes if (j + 1) * cols >= spec.cols else start + cols * spec.itemsize
        if last <= first or stop <= start:
            return first, first, 0
        self._m.touch(tensor, way, (first, last, start, stop))
        if self._m.recorder:
            self._m.recorder.range((first, last), (j * cols, min((j + 1) * cols, spec.cols)))
        # a tile that one number names is moved by every block, one that the block's own index names by that block alone
        sharing = self.lockstep if isinstance(i, int | np.integer) else self._heads
        return first, last, (last - first) * (stop - start) * sharing

    def _read(self, tensor: HbmTensor, i: Rows, rows: int, j: int, cols: int, fill: float) -> tuple[int, Array | None]:
        """The bytes requested, and the values: rows outside the problem filled, columns outside left out."""
        first, last, nbytes = self._extent(tensor, i, rows, j, cols, "read")
        if not self._m.data:
            return nbytes, None
        blocks = 1 if isinstance(i, int | np.integer) else len(i)
        part = self._m.read(tensor, first, last, j * cols, (j + 1) * cols)
        part = part.astype(np.float32, copy=tensor.spec.role != "input")  # what was loaded must outlive a later store
        missing = blocks * rows - part.shape[3]
        if missing:
            part = np.pad(part, ((0, 0),) * 3 + ((0, missing), (0, 0)), constant_values=fill)
        if blocks > 1:  # the rows of all blocks make one matrix product
            part = np.ascontiguousarray(part)
        return nbytes, part.reshape(*part.shape[:3], blocks, rows, part.shape[-1])


class Machine:
    """Where a tile program runs: `m.device`, `m.config`, `m.lse` (was the LSE asked for), and launches of blocks.

    >>> import flashlab as fl
    >>> @fl.program
    ... def scores_only(m, q, k, v, problem, tile):
    ...     for block in m.launch("scores", rows=problem.row_tiles(tile), warps=4):
    ...         block.step("load")
    ...         q_i, k_j = block.load(q, block.i, tile.rows), block.load(k, 0, tile.cols)
    ...         block.step("scores")
    ...         s = block.matmul(q_i, k_j.T, split=("rows", "none"))
    ...     return m.output("out")
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    >>> fl.count(scores_only, p, tile=(64, 64)).flops.matmul == 2 * 64**3
    True
    """

    def __init__(
        self, name: str, operation: Operation, problem: Problem, config: Config, device: Device, *, asked: Collection[str] = (),
        data: Mapping[str, Array] | None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.operation, self.problem, self.config, self.device, self.tile = (
            operation,
            problem,
            config,
            device,
            config.tile,
        )
        self.asked, self.recorder, self.data = frozenset(asked), recorder, data is not None
        self.book = Book(name, problem, config.tile, device, config)
        self.heads = problem.batch * problem.heads
        self._given = data or {}
        self.values: dict[str, Array] = {}
        self._leads: dict[str, tuple[int, int, int]] = {}
        self._touched: defaultdict[_Touched, set[tuple[int, int, int, int]]] = defaultdict(set)
        self.inputs = tuple(self._input(operand) for operand in operation.required)
        self.outputs = {x.name: self._new(x.spec(problem, config.tile, "output"), x.lead) for x in operation.written}

    # -- for tile programs --------------------------------------------------------------------------------------

    @property
    def lse(self) -> bool:
        """Was the LSE asked for?"""
        return "lse" in self.asked

    def output(self, name: str = "out") -> HbmTensor:
        """An output of the operation: of attention `out` (batch, heads, len_q, head_dim_v), or `lse` (batch, heads, len_q)."""
        if name not in self.outputs:
            known = [operand.name for operand in self.operation.outputs]
            if name not in known:
                raise UsageError("output", name, " or ".join(map(repr, known)))
            operand = self.operation.operand(name)
            self.outputs[name] = self._new(operand.spec(self.problem, self.tile, "output"), operand.lead)
        return self.outputs[name]

    def optional(self, name: str) -> HbmTensor:
        """An input that callers may leave out: theirs, or full of its default."""
        return self._input(self.operation.operand(name))

    def packed(self, tensor: HbmTensor) -> HbmTensor:
        """The query heads of each group as rows of one matrix, (batch, kv_heads, len_q x group): row `i group + g` is query i of
        head g. For launches of a block per KV head; `block.mask(…, group=g)` knows of it."""
        group, spec = self.problem.queries_per_kv, tensor.spec
        return HbmTensor(replace(spec, heads=spec.heads // group, rows=spec.rows * group), group=group)

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
    ) -> HbmTensor:
        """An array in HBM, `cols` wide, `rows` (None: len_q) a head, of the queries or of `of`; a `vector` lies unpadded.

        `axes` gives each head several planes of rows, by name: `axes={"splits": 4}`, and `tensor.at(splits=j)` is one.
        """
        rows = self.problem.len_q if rows is None else rows
        heads = of.spec.heads if of else self.heads
        spec = Spec(name, heads, rows, cols, dtype, "workspace", vector=vector, axes=tuple((axes or {}).items()))
        return self._new(spec, ("batch", "heads") if of is None else self._leads[of.name])

    def launch(
        self,
        name: str,
        *,
        warps: int,
        rows: int = 1,
        cols: int = 1,
        walk: Callable[..., range] | None = None,
        readers: int | None = None,
        of: HbmTensor | None = None,
    ) -> Iterator[Block]:
        """Launch `rows` x `cols` blocks for every batch and head (of the queries, or of `of`), and run them in lockstep groups.

        `walk(i)`, or `walk(i, j)`, is the range that block i (of column j) loops over: the key tiles that the mask leaves,
        say. Blocks with equal walks share a group. `readers` share the bytes of an operand: the warps, unless it is
        warpgroups that multiply. An operation with nothing to write launches nothing.
        """
        lead = self._lead_of(("batch", "heads")) if of is None else self.lead(of)
        heads = math.prod(lead)
        if warps < 1:
            raise UsageError("warps", warps, "an integer of at least 1")
        rows = 0 if self.operation.idle(self.problem) else rows
        alone = walk if cols == 1 else None  # blocks of several columns don't walk alike
        self.book.launch(name, rows * cols * heads, warps, self.config.heads_together, walk=alone)
        self._touched.clear()
        walks = _walks(walk, rows, cols)
        most = (
            max(1, _LOCKSTEP_ELEMENTS // (self.heads * self.tile.rows * self.tile.cols)) if self.data else max(1, rows)
        )
        if self.recorder:
            self.recorder.launch(name)
            most = 1
        start = 0
        while start < rows:
            stop = start + 1
            while stop < rows and stop - start < most and walks[stop] == walks[start]:
                stop += 1
            for j in range(cols):
                block = Block(self, np.arange(start, stop), j, walks[start][j], warps, readers or warps, lead)
                if self.recorder:
                    self.recorder.block(block)
                yield block
            start = stop
        if self.recorder:
            self.recorder.end()
        self._close_launch()

    # -- inside -------------------------------------------------------------------------------------------------

    def touch(self, tensor: HbmTensor, way: str, rectangle: tuple[int, int, int, int]) -> None:
        """Note which bytes of a tensor (of each of its heads) a launch reaches."""
        heads = tensor.spec.heads if tensor.member is None else tensor.spec.heads // self.problem.queries_per_kv
        self._touched[_Touched(tensor.name, way, tensor.member, tensor.plane, heads)].add(rectangle)

    def lead(self, tensor: HbmTensor) -> tuple[int, int, int]:
        """Batches, KV heads and query heads of a group that a handle has; 1 where all share one."""
        batch, kv_heads, group = self._leads[tensor.name]
        return batch, kv_heads, 1 if tensor.group or tensor.member is not None else group

    def read(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int) -> Array:
        """The values of rows and columns, (batch, kv_head, query_in_group, rows, cols)."""
        values = self._plane(tensor)
        if tensor.group:
            rows = np.arange(first, last)
            return values[:, :, None, rows % tensor.group, rows // tensor.group, start:stop]
        return values[:, :, :, first:last, start:stop]

    def write(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int, x: Array) -> None:
        """Puts values there."""
        values = self._plane(tensor)
        if tensor.group:
            rows = np.arange(first, last)
            values[:, :, rows % tensor.group, rows // tensor.group, start:stop] = x[:, :, 0]
        else:
            values[:, :, :, first:last, start:stop] = x

    def _plane(self, tensor: HbmTensor) -> Array:
        values = self.values[tensor.name]
        if tensor.spec.axes:
            values = values[:, :, :, tensor.plane]
        return values if tensor.member is None else values[:, :, tensor.member : tensor.member + 1]

    def close(self) -> Counts:
        return self.book.close()

    def result(self, name: str) -> Array:
        """The values of an output, in its shape; only after a run on data."""
        shape = self.operation.operand(name).shape(self.problem, self.tile)
        return np.ascontiguousarray(self.values[name].reshape(shape))

    def _close_launch(self) -> None:
        reached: defaultdict[tuple[str, str], int] = defaultdict(int)
        for touched, rectangles in self._touched.items():
            reached[touched.name, touched.way] += _area(rectangles) * touched.heads
        for (name, way), nbytes in reached.items():
            self.book.distinct(name, way, nbytes)

    def _input(self, operand: Operand) -> HbmTensor:
        """The handle of an input, its values where the caller's array has them, or its default."""
        spec = self.book.tensor(operand.spec(self.problem, self.tile, "input"))
        lead = self._leads[spec.name] = self._lead_of(operand.lead)
        if self.recorder:
            self.recorder.tensor(spec)
        if self.data:
            x = self._given.get(operand.name)
            if x is None:
                x = np.full(operand.shape(self.problem, self.tile), operand.default, np.float32)
            self.values[spec.name] = x.reshape(*lead, spec.rows, spec.cols).astype(np.float32, copy=False)
        return HbmTensor(spec)

    def _new(self, spec: Spec, lead: tuple[str, ...] | tuple[int, int, int]) -> HbmTensor:
        self.book.tensor(spec)
        if self.recorder:
            self.recorder.tensor(spec)
        shape = self._leads[spec.name] = self._lead_of(lead)
        if self.data:  # NaN until written: a store that a program forgets shows
            dtype = numpy_dtype(spec.dtype)
            unwritten = np.nan if dtype.kind in "fV" else np.iinfo(dtype).min
            planes = (spec.planes,) if spec.axes else ()
            self.values[spec.name] = np.full((*shape, *planes, spec.rows, spec.cols), unwritten, dtype)
        return HbmTensor(spec)

    def _lead_of(self, axes: tuple[str, ...] | tuple[int, int, int]) -> tuple[int, int, int]:
        """Axes of batch and heads as (batch, kv_head, query_in_group)."""
        if axes and isinstance(axes[0], int):
            return axes  # pyright: ignore[reportReturnType]
        p, heads = self.problem, {"heads": (self.problem.kv_heads, self.problem.queries_per_kv)}
        kv_heads, group = heads.get("heads" if "heads" in axes else "", (p.kv_heads if "kv_heads" in axes else 1, 1))
        return p.batch if "batch" in axes else 1, kv_heads, group


class _Touched(NamedTuple):
    """Which part of a tensor a launch reaches: all its heads, or one of each group, and of which plane."""

    name: str
    way: str
    member: int | None
    plane: int
    heads: int


def _walks(walk: Callable[..., range] | None, rows: int, cols: int) -> list[tuple[range, ...]]:
    """By row block the walks of its columns."""
    if walk is None:
        return [(range(0),) * cols] * rows
    parameters = inspect.signature(walk).parameters.values()
    by_column = (
        sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1
    )
    return [tuple(walk(i, j) if by_column else walk(i) for j in range(cols)) for i in range(rows)]


def _padded_shape(x: SramTile | Registers) -> tuple[int, int]:
    """Rows and columns that a matrix product executes."""
    return x.padded_shape if isinstance(x, SramTile) else (padded(x.rows), padded(x.cols))


def _program_frame() -> FrameType:
    """The frame of the tile program that called the machine."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


def _product(a: Array, b: Array) -> Array:
    """a @ b; when all query heads of a group and all blocks share b, their rows make one large product.

    S = Q K^T is laid out key by key: the softmax's row maxima and sums then run along memory, three times as fast.
    """
    if b.shape[2:4] != (1, 1):
        return np.matmul(a, b)
    lead, shared = a.shape[:-1], b[:, :, 0, 0]
    rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
    if shared.strides[-1] == shared.itemsize:
        return np.matmul(rows, shared).reshape(*lead, b.shape[-1])
    by_key = np.matmul(shared.swapaxes(-1, -2), rows.swapaxes(-1, -2))
    return np.moveaxis(by_key.reshape(*lead[:2], b.shape[-1], *lead[2:]), 2, -1)


def _area(rectangles: set[tuple[int, int, int, int]]) -> int:
    """The area that rectangles (first row, last row, first byte, last byte) cover together."""
    r = np.array(list(rectangles), np.int64)
    ys, xs = np.unique(r[:, :2]), np.unique(r[:, 2:])
    covered = np.zeros((len(ys) - 1, len(xs) - 1), bool)
    for y0, y1, x0, x1 in zip(*np.searchsorted(ys, r[:, :2]).T, *np.searchsorted(xs, r[:, 2:]).T, strict=True):
        covered[y0:y1, x0:x1] = True
    return int((np.diff(ys)[:, None] * np.diff(xs)[None, :] * covered).sum())
