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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal

import numpy as np

from simulator.config import Config, padded
from simulator.counts import Book, Counts, Spec, io_tensors
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import SramOverflow, UsageError
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

    def __init__(self, machine: Machine, i: Rows, j: int, walk: range, warps: int, readers: int, heads: int) -> None:
        self._m, self.i, self.j, self.walk, self.warps, self.readers = machine, i, j, walk, warps, readers
        self._heads = heads
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
        self, tensor: HbmTensor, i: Rows, rows: int, j: int = 0, cols: int | None = None, *, stages: int = 1,
        panel: int | None = None,
    ) -> SramTile:  # fmt: skip
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
        values = self._m.values.get(tensor.name)
        if values is not None and last > first:
            start = j * (cols or tensor.cols)
            stop = min(start + x.cols, tensor.cols)
            tiles = np.broadcast_to(x.array, (*self._lead(tensor), rows, x.cols))[..., : stop - start]
            flat = tiles.reshape(*tiles.shape[:3], -1, stop - start)
            with np.errstate(over="ignore"):
                values[:, :, :, first:last, start:stop] = flat[:, :, :, : last - first]

    def atomic_add(self, tensor: HbmTensor, x: Registers, i: Rows, rows: int) -> None:
        """Add registers to float32 HBM by atomics: every lane's bytes count, blocks that collide add up."""
        first, last, nbytes = self._extent(tensor, i, rows, 0, tensor.cols, "write")
        self._count(tensor.name, hbm_atomic=nbytes)
        values = self._m.values.get(tensor.name)
        if values is not None and last > first:
            flat = np.broadcast_to(x.array, (*self._lead(tensor), rows, x.cols)).reshape(
                *self._lead(tensor)[:3], -1, x.cols
            )
            values[:, :, :, first:last] += flat[:, :, :, : last - first]

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

    def mask(self, s: Registers, i: Rows, j: int) -> Registers:
        """-inf where tile (i, j) of S lies outside the mask or beyond the last key."""
        p = self._m.problem
        if s.values is None:
            return s
        starts = np.asarray(i).reshape(-1, 1, 1) * s.rows + p.offset
        first_key, last_key = j * s.cols, (j + 1) * s.cols - 1
        if (
            last_key < p.kv_length
            and (p.right is None or last_key <= starts.min() + p.right)
            and (p.left is None or first_key >= starts.max() + s.rows - 1 - p.left)
        ):
            return s
        row, key = starts + np.arange(s.rows)[:, None], np.arange(first_key, last_key + 1)
        hidden = np.broadcast_to(key >= p.kv_length, (len(starts), s.rows, s.cols))
        if p.right is not None:
            hidden = hidden | (key > row + p.right)
        if p.left is not None:
            hidden = hidden | (key < row - p.left)
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

    def _lead(self, tensor: HbmTensor) -> tuple[int, ...]:
        p, groups = self._m.problem, tensor.spec.heads // (self._m.problem.batch * self._m.problem.num_kv_heads)
        return p.batch, p.num_kv_heads, groups, len(self.i) if isinstance(self.i, np.ndarray) else 1

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
        values = self._m.values.get(tensor.name)
        if values is None:
            return nbytes, None
        blocks = 1 if isinstance(i, int | np.integer) else len(i)
        part = values[:, :, :, first:last, j * cols : (j + 1) * cols]
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
        self, name: str, problem: Problem, config: Config, device: Device, *, lse: bool, data: Mapping[str, Array] | None,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.config, self.device, self.tile, self.lse = problem, config, device, config.tile, lse
        self.data, self.recorder = data is not None, recorder
        self.book = Book(name, problem, config.tile, device, config)
        self.heads = problem.batch * problem.heads
        self._touched: defaultdict[tuple[str, str], set[tuple[int, int, int, int]]] = defaultdict(set)
        specs = {spec.name: self.book.tensor(spec) for spec in io_tensors(problem)}
        self.values: dict[str, Array] = {name: self._grouped(x) for name, x in (data or {}).items()}
        if recorder:
            for spec in specs.values():
                recorder.tensor(spec)
        self.inputs = HbmTensor(specs["q"]), HbmTensor(specs["k"]), HbmTensor(specs["v"])
        self.outputs: dict[str, HbmTensor] = {}

    # -- for tile programs --------------------------------------------------------------------------------------

    def output(self, name: str = "out") -> HbmTensor:
        """The array `out` (batch, heads, len_q, head_dim_v), or `lse` (batch, heads, len_q), float32."""
        if name == "out":
            spec = self.book.tensors["out"]
        elif name == "lse":
            spec = Spec("lse", self.heads, self.problem.len_q, 1, "float32", "output", vector=True)
        else:
            raise UsageError("output", name, "'out' or 'lse'")
        self.outputs[name] = self._new(spec)
        return self.outputs[name]

    def workspace(
        self, name: str, cols: int, dtype: str = "float32", *, rows: int | None = None, vector: bool = False,
        of: HbmTensor | None = None,
    ) -> HbmTensor:  # fmt: skip
        """An array in HBM, `cols` wide, `rows` (None: len_q) a head, of the queries or of `of`; a `vector` lies unpadded."""
        rows = self.problem.len_q if rows is None else rows
        return self._new(Spec(name, of.spec.heads if of else self.heads, rows, cols, dtype, "workspace", vector=vector))

    def scales(self, of: HbmTensor, rows: int) -> HbmTensor:
        """What the values of an input are to be multiplied with, one float32 for every `rows` of its rows: `<name>_scale`.

        The caller's, or 1.
        """
        spec = Spec(f"{of.name}_scale", of.spec.heads, -(-of.rows // rows), 1, "float32", "input", vector=True)
        given = self.values.get(spec.name)
        tensor = self._new(spec)
        if self.data:
            self.values[spec.name][...] = np.float32(1) if given is None else given
        return tensor

    def launch(
        self, name: str, *, warps: int, rows: int = 1, cols: int = 1, walk: Callable[[int], range] | None = None,
        readers: int | None = None, of: HbmTensor | None = None,
    ) -> Iterator[Block]:  # fmt: skip
        """Launch `rows` x `cols` blocks for every batch and head (of the queries, or of `of`), and run them in lockstep groups.

        `walk(i)` is the range that row block i loops over (the key tiles that the mask leaves, say): blocks with equal
        walks share a group. `readers` share the bytes of an operand: the warps, unless it is warpgroups that multiply. A
        problem without queries launches nothing.
        """
        heads = of.spec.heads if of else self.heads
        if warps < 1:
            raise UsageError("warps", warps, "an integer of at least 1")
        rows = rows if self.problem.len_q else 0
        self.book.launch(name, rows * cols * heads, warps, self.config.heads_together)
        self._touched.clear()
        walks = [walk(i) for i in range(rows)] if walk else [range(0)] * rows
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
                block = Block(self, np.arange(start, stop), j, walks[start], warps, readers or warps, heads)
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
        self._touched[tensor.name, way].add(rectangle)

    def close(self) -> Counts:
        return self.book.close()

    def result(self, tensor: HbmTensor) -> Array:
        """The values of an output, `(batch, heads, rows, cols)`; only after a run on data."""
        p = self.problem
        return np.ascontiguousarray(self.values[tensor.name].reshape(p.batch, p.heads, tensor.rows, tensor.cols))

    def _close_launch(self) -> None:
        for (name, way), rectangles in self._touched.items():
            self.book.distinct(name, way, _area(rectangles) * self.book.tensors[name].heads)

    def _grouped(self, x: Array) -> Array:
        p = self.problem
        return x.reshape(p.batch, p.num_kv_heads, x.shape[1] // p.num_kv_heads, *x.shape[2:]).astype(
            np.float32, copy=False
        )

    def _new(self, spec: Spec) -> HbmTensor:
        self.book.tensor(spec)
        if self.recorder:
            self.recorder.tensor(spec)
        p = self.problem
        shape = (p.batch, p.num_kv_heads, spec.heads // (p.batch * p.num_kv_heads), spec.rows, spec.cols)
        if self.data:  # NaN until written: a store that a program forgets shows
            self.values[spec.name] = np.full(shape, np.nan, numpy_dtype(spec.dtype))
        return HbmTensor(spec)


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
