"""A thread block, as a tile program sees it: counted loads and stores, SRAM, matrix products, masks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import product
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from simulator import misuse
from simulator.config import padded
from simulator.counts import Box
from simulator.dtypes import Array, round_to
from simulator.errors import Said, SramOverflow, UsageError, misnamed
from simulator.philox import random_bytes
from simulator.places import Places
from simulator.problem import WIDTH, Problem, Walk, round_up
from simulator.registers import Registers
from simulator.tensors import Batches, HbmTensor, SramTile

if TYPE_CHECKING:
    from simulator.machine import Machine

Split = Literal["rows", "cols", "none"] | int
Rows = int | np.ndarray[Any, np.dtype[np.int64]]
"""The index of a tile: a number, or the block's own index (an array over the blocks in lockstep)."""


class Index(np.ndarray[Any, np.dtype[np.int64]]):
    """The row tiles of all blocks that run in lockstep. Python asks for one number in `if`, `range` and `int`: there is none."""

    def _refuse(self) -> Any:
        if not self.ndim:
            return self.item()
        raise UsageError(
            "block.i in a condition or a range",
            Said("all blocks that run in lockstep"),
            "another `walk` in m.launch for these blocks; or block.i[0], where apart=lambda i: … has the same value for them",
        )

    def __bool__(self) -> bool:
        return bool(self._refuse())

    def __index__(self) -> int:
        return self._refuse()

    def __int__(self) -> int:
        return int(self._refuse())


class Block:
    """One thread block, as a tile program sees it.

    `i` is its row tile, and `j` its key tile where the grid has key tiles. `walk` is what the launch gave it to walk over. `keys`
    is how many keys its batch has, where the launch said so. Operations take tile indices: `block.load(k, j, 64)` loads
    rows `64 j … 64 j + 63` of k.

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
    >>> fl.count(scores_only, p, tile=(64, 64)).by_tensor["k"].sram_read // fl.count(scores_only, p).by_tensor["q"].sram_read
    4
    """

    def __init__(
        self, machine: Machine, i: Rows, j: int, walk: Walk, warps: int, readers: int, lead: tuple[int, int, int],
        batches: Batches | None = None, keys: int = 0,
    ) -> None:  # fmt: skip
        self._m, self.i, self.j, self.walk, self.warps, self.readers = machine, i, j, walk, warps, readers
        self._lead, self._batches, self.keys = lead, batches, keys
        self._heads = heads = math.prod(lead)
        self._step = ""
        self._sram: dict[str, int] = {}
        self._filled: dict[str, tuple[int, int, int]] = {}
        self.lockstep = heads * (len(i) if isinstance(i, np.ndarray) else 1)

    if not TYPE_CHECKING:  # a type checker knows each name there is

        def __getattr__(self, name: str) -> NoReturn:
            raise misnamed("block", self, name)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        """Name the step that begins here. The `.cu` file has a mark of the same name: `// step: load_k`."""
        self._m.go_on()
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
        whole: bool = False,
        clear: bool = False,
        dtype: str | None = None,
        fragment: int = 16,
    ) -> SramTile:
        """HBM to SRAM: tile (i, j) of `rows` x `cols` (None: all columns), with zeros outside the problem.

        The buffer has the tensor's name, and the tensor's next load reuses it. A ring holds `stages` buffers. With
        `panel`, TMA moves the tile in boxes of that many columns. A box counts whole, also its rows and columns outside the
        problem. A product goes over the tile's own columns, or over those of its boxes if `whole`. With `clear`, the
        block writes zeros over the rows outside: where a sequence ends, TMA brings rows of the next one. With `dtype`,
        values of another dtype are rounded to it on their way. Rows are padded to `fragment`. Raises
        `SramOverflow` over the device's limit per block.
        """
        misuse.tensor("block.load(tensor, i, rows)", tensor)
        cols = cols or tensor.cols
        read, data = self._read(tensor, i, rows, j, cols, 0.0)
        inside = read // tensor.spec.row_bytes
        if panel:
            read = rows * round_up(cols, panel) * tensor.spec.itemsize * self.lockstep
            self._note_boxes(tensor, i, rows, range(j * cols, (j + 1) * cols, panel))
        if data is not None and data.shape[-1] < cols:
            data = np.pad(data, ((0, 0),) * 5 + ((0, cols - data.shape[-1]),))
        if dtype is not None and data is not None:
            data = round_to(data, dtype)
        tile = SramTile(
            tensor.name,
            rows,
            cols,
            dtype or tensor.dtype,
            data,
            vector=tensor.spec.vector,
            panel=panel or 16,
            fragment=fragment,
        )
        if not whole:
            tile.multiplied_shape = padded(rows, fragment), padded(cols)
        self._reserve(tile, stages)
        self._count(tensor.name, hbm_read=read, sram_write=tile.footprint * self.lockstep)
        if clear:
            outside = rows * self.lockstep - inside
            self._count(tensor.name, sram_write=outside * tile.padded_shape[1] * tensor.spec.itemsize)
        return tile

    def fetch(
        self, tensor: HbmTensor, i: Rows, rows: int, j: int = 0, cols: int | None = None, *, fill: float = 0.0, warps: int = 1
    ) -> Registers:  # fmt: skip
        """HBM to registers, not through SRAM: tile (i, j), with `fill` outside the problem.

        Each of `warps` warps requests all of the tile.
        """
        misuse.tensor("block.fetch(tensor, i, rows)", tensor)
        cols = cols or tensor.cols
        read, data = self._read(tensor, i, rows, j, cols, fill)
        self._count(tensor.name, hbm_read=warps * read)
        return self.registers(rows, min(cols, tensor.cols - j * cols), data)

    def look_up(self, tensor: HbmTensor, j: int, rows: int, shares: int | None = None, *, box: int = 0) -> None:
        """HBM to registers: the pages in which rows of tile j lie, if they lie in pages. The warps that read split the rows.

        Each reads an entry of the block table for each page that its rows touch. `shares` says into how many parts the rows are
        split, if not into one for each that reads. Of rows that come in boxes of `box` rows, one warp reads an entry for each.
        """
        if tensor.table is None:
            return
        size, share = self._m.problem.page_size or 1, -(-padded(rows) // (shares or self.readers))
        share = box or share
        end, entries = min((j + 1) * rows, tensor.rows), 0
        for first in range(j * rows, end, share):
            page, last = first // size, (min(first + share, end) - 1) // size
            entries += last - page + 1
            self._m.touch(tensor.table, "read", (page, last + 1, 0, tensor.table.spec.itemsize))
        self._count(tensor.table.name, hbm_read=entries * tensor.table.spec.itemsize * self.lockstep)

    def request(self, tensor: HbmTensor, parts: Sequence[tuple[int, int, int, int]], *, warps: int = 1) -> None:
        """HBM to registers: of an array that all heads share, parts (first row, end row, first byte, end byte) that are no tiles.

        In each head, each of `warps` warps requests each part. What they hold is the program's to know.
        """
        for part in parts:
            self._m.touch(tensor, "read", part)
        nbytes = sum((end - row) * (stop - byte) for row, end, byte, stop in parts)
        self._count(tensor.name, hbm_read=warps * nbytes * self._heads)

    def slots(self, tensor: HbmTensor, i: Rows, rows: int) -> Places:
        """HBM to registers: tile i of a vector that says into which row of a pool each of `rows` rows goes. Below 0 it goes
        nowhere.

        On shapes alone, the first `len_kv` rows of the problem have a place.
        """
        misuse.tensor("block.slots(tensor, i, rows)", tensor)
        first, last, nbytes = self._extent(tensor, i, rows, 0, 1, "read")
        self._count(tensor.name, hbm_read=nbytes)
        if not self._m.data:
            return Places(first, max(0, min(last, self._m.problem.len_kv) - first))
        found = np.full(-(-(last - first) // rows) * rows, -1, np.int64)
        found[: last - first] = self._m.numbers(tensor, first, last)
        return Places(first, int((found >= 0).sum()), found.reshape(-1, rows))

    def page_pair(self, tensor: HbmTensor, i: Rows, size: int, *, warps: int = 1) -> tuple[Places, Places]:
        """HBM to registers: pair i of a vector of pairs. It says two pages of `size` rows, as their rows in a pool.

        Each of `warps` warps requests it. On shapes alone, pair i says the pages 2 i and 2 i + 1.
        """
        misuse.tensor("block.page_pair(tensor, i, size)", tensor)
        first, last, nbytes = self._extent(tensor, i, 2, 0, 1, "read")
        self._count(tensor.name, hbm_read=warps * nbytes)
        count = (last - first) // 2 * size
        if not self._m.data:
            return Places(first * size, count), Places(first * size + count, count)
        pages = self._m.numbers(tensor, first, last).reshape(-1, 2, 1) * size + np.arange(size)
        return Places(first, count, pages[:, 0]), Places(first, count, pages[:, 1])

    def fetch_placed(self, tensor: HbmTensor, i: Rows, rows: int, places: Places) -> Registers:
        """HBM to registers: of tile i of `rows` rows those that have a place. The others are zeros, and aren't read."""
        if places.rows is None:
            return self.gather(tensor, places, rows)
        own = places.first + np.arange(places.rows.size, dtype=np.int64).reshape(-1, rows)
        return self.gather(tensor, places._replace(rows=np.where(places.rows >= 0, own, -1)), rows)

    def gather(self, tensor: HbmTensor, places: Places, rows: int) -> Registers:
        """HBM to registers: rows from their places, `rows` for each block."""
        misuse.tensor("block.gather(tensor, places)", tensor)
        self._count(tensor.name, hbm_read=self._reach(tensor, places, "read"))
        if places.rows is None:
            return self.registers(rows, tensor.cols, None)
        values = self._m.rows(tensor, np.maximum(places.rows, 0)).astype(np.float32)
        return self.registers(rows, tensor.cols, np.where(places.rows[..., None] >= 0, values, np.float32(0)))

    def scatter(self, tensor: HbmTensor, x: Registers, places: Places) -> None:
        """Registers to HBM: rows into their places, rounded to the tensor's dtype. A row without a place isn't written."""
        misuse.stored("block.scatter", tensor, x, x.rows, 0, None)
        self._count(tensor.name, hbm_write=self._reach(tensor, places, "write"))
        if places.rows is not None:
            has = places.rows >= 0
            values = np.broadcast_to(x.array, (*self._m.lead(tensor), *has.shape, x.cols))
            self._m.write_rows(tensor, places.rows[has], values[:, :, :, has])

    def _reach(self, tensor: HbmTensor, places: Places, way: str) -> int:
        """Note which rows are reached. And the bytes that all heads request there."""
        width = tensor.spec.row_bytes
        for first, last in places.runs():
            self._m.touch(tensor, way, (first, last, 0, width))
        return places.rows_in_all * width * self._heads

    def store(self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None) -> None:
        """Registers to HBM: tile (i, j), rounded to the tensor's dtype. Nothing outside the problem is written.

        `x` has as many rows and columns as the tile. Where the tensor ends within it, those inside are enough. Raises
        `UsageError` for another shape, and for an input: the caller's arrays aren't changed.
        """
        cols = misuse.stored("block.store", tensor, x, rows, j, cols)
        tensor = self._own(tensor)
        first, last, nbytes = self._extent(tensor, i, rows, j, cols, "write")
        self._count(tensor.name, hbm_write=nbytes)
        if self._m.data and last > first:
            start = j * cols
            stop = min(start + x.cols, tensor.cols)
            with np.errstate(over="ignore"):
                values = self._rows_of(tensor, x, i, rows)[..., : last - first, : stop - start]
                self._m.write(tensor, first, last, start, stop, values)

    def atomic_add(
        self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None
    ) -> None:
        """Add registers to float32 values in HBM by atomics. Every lane's bytes count. Blocks that collide add up.

        Raises `UsageError` as `store` does, for another dtype, and if nothing was stored there before.
        """
        cols = misuse.stored("block.atomic_add", tensor, x, rows, j, cols)
        tensor = self._own(tensor)
        if tensor.dtype != "float32":
            raise UsageError("block.atomic_add's tensor", Said(f"{tensor.name}, {tensor.dtype}"), "one of float32")
        self._m.check_written(tensor)
        first, last, nbytes = self._extent(tensor, i, rows, j, cols, "write")
        self._count(tensor.name, hbm_atomic=nbytes)
        if self._m.data and last > first:
            start = j * cols
            stop = min(start + x.cols, tensor.cols)
            values = self._rows_of(tensor, x, i, rows, add=True)[..., : last - first, : stop - start]
            self._m.write(tensor, first, last, start, stop, values + self._m.read(tensor, first, last, start, stop))

    def arrive(self, counter: HbmTensor, i: Rows, warps: int = 1) -> None:
        """Count up the i-th counter of a workspace of zeros, by an atomic that tells how many came before.

        The one that comes last sets it back to 0. The machine runs blocks in the order of their columns, so a program knows
        which one that is. With `warps`, each of so many warps has a counter of its own.
        """
        misuse.tensor("block.arrive(tensor, i)", counter)
        for way in ("read", "write"):
            *_, nbytes = self._extent(counter, i, warps, 0, 1, way)
        self._count(counter.name, hbm_atomic=nbytes)

    # -- SRAM ---------------------------------------------------------------------------------------------------

    def alloc(
        self,
        name: str,
        rows: int,
        cols: int | None = None,
        dtype: str = "float32",
        *,
        copies: int = 1,
        panel: int = 16,
        fragment: int = 16,
    ) -> SramTile:
        """Reserve a buffer in SRAM: `copies` of `rows` x `cols` (one per warp, say), padded to `fragment` and `panel`.

        Without `cols` it is a vector, with one value per row. Raises `SramOverflow` over the device's limit per block.
        """
        tile = SramTile(name, rows, cols or 1, dtype, None, vector=cols is None, panel=panel, fragment=fragment)
        tile.empty = True
        self._reserve(tile, copies)
        return tile

    def free(self, tile: SramTile) -> None:
        """Give a buffer back."""
        misuse.tile("block.free(tile)", tile)
        self._sram.pop(tile.name, None)

    def put(self, buffer: SramTile, x: Registers, *, copies: int = 1) -> None:
        """Registers to SRAM, for other warps to read. `copies` is how many warps write a partial result of their own.

        The machine does not know one warp's values from another's. It keeps what the warps have together: `get` returns
        the sum (or the maximum) over all of them.
        """
        misuse.tile("block.put(tile, registers)", buffer)
        vector, fragment = buffer.vector, buffer.fragment
        misuse.registers("block.put", x)
        tile = SramTile(buffer.name, x.rows, x.cols, buffer.dtype, None, vector=vector, fragment=fragment)
        nbytes = tile.footprint * copies
        if nbytes > (room := self._sram.get(buffer.name, 0)):
            asked = f"at most the {room:,} bytes that block.alloc reserves for {buffer.name}"
            raise UsageError("block.put's registers", Said(f"{nbytes:,} bytes"), asked)
        self._filled[buffer.name], buffer.empty = (nbytes, x.rows, x.cols), False
        buffer.values = x.values
        self._count(buffer.name, sram_write=nbytes * self.lockstep)

    def get(self, buffer: SramTile, split: Split = "rows") -> Registers:
        """SRAM to registers: what was last `put`. The warps split it as in `matmul`."""
        misuse.tile("block.get(tile)", buffer)
        if buffer.name not in self._filled:
            put = "block.put into it before, or block.to_registers(tile) for a tile that was loaded"
            raise UsageError("block.get's buffer", Said(f"{buffer.name}, which is empty"), put)
        nbytes, rows, cols = self._filled[buffer.name]
        self._count(buffer.name, sram_read=nbytes * self._uses(split) * self.lockstep)
        return self.registers(rows, cols, buffer.values)

    def tell(self, name: str, warps: int, nbytes: int = 4) -> None:
        """One thread tells `warps` warps something through SRAM: a number, say. It lies where mbarriers leave room."""
        self.leave(name, nbytes)
        self.hear(name, warps, nbytes)

    def leave(self, name: str, nbytes: int = 4) -> None:
        """One thread leaves something in SRAM, which warps `hear` in a later step."""
        self._count(name, sram_write=nbytes * self.lockstep)

    def hear(self, name: str, warps: int, nbytes: int = 4) -> None:
        """So many warps read what a thread has left."""
        self._count(name, sram_read=nbytes * warps * self.lockstep)

    def to_registers(self, tile: SramTile, split: Split = "rows") -> Registers:
        """SRAM to registers, as the warps split it (`matmul`). Products with it read no SRAM."""
        misuse.tile("block.to_registers(tile)", tile)
        if tile.empty:
            misuse.full("block.to_registers's tile", tile)
        self._count(tile.name, sram_read=tile.footprint * self._uses(split) * self.lockstep)
        return self.registers(tile.rows, tile.cols, tile.values)

    def hold(self, tile: SramTile, columns: int, split: Split = "rows") -> None:
        """The first columns of a tile to registers, where they stay. Products with the tile read only the others from SRAM."""
        rows, padded_columns = tile.multiplied_shape
        tile.held = min(columns, padded_columns)
        self._count(tile.name, sram_read=rows * tile.held * WIDTH[tile.dtype] * self._uses(split) * self.lockstep)

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def full(self, rows: int, cols: int, value: float) -> Registers:
        """A register tile that is full of one value."""
        return self.registers(
            rows, cols, np.full((1, 1, 1, 1, rows, cols), value, np.float32) if self._m.data else None
        )

    def matmul(
        self,
        a: SramTile | Registers,
        b: SramTile,
        *,
        split: tuple[Split, Split] = (),  # pyright: ignore[reportArgumentType]  # the error for a missing one names all choices
        acc: Registers | None = None,
        scale: float = 1.0,
        passes: int = 1,
    ) -> Registers:
        """`scale * a @ b (+ acc)` in float32. `split` says how the warps share the bytes of a and of b.

        `"rows"` or `"cols"`: the warps split the operand, so it is read once. `"none"`: every warp reads all of it. If the
        warps form a grid, a number says how many of them read each byte. Operands in registers move nothing. FLOPs count
        the tile padded to the fragment, and a multiply-add as 2. An operand whose values have more bits than the tensor cores
        take is multiplied in parts: `passes` is how many products that are. Raises
        `UsageError` for shapes that don't fit.
        """
        misuse.product(a, b, split, acc)
        for operand, way in zip((a, b), split, strict=True):
            if isinstance(operand, SramTile):
                self._count(operand.name, sram_read=operand.multiplied_bytes * self._uses(way) * self.lockstep)
        (rows, depth), (depth_too, columns) = self._multiplied_shape(a), self._multiplied_shape(b)
        self._m.book.compute(matmul=2 * rows * columns * max(depth, depth_too) * passes * self.lockstep)
        if scale != 1.0:
            self.count_flops(a.rows * b.cols)
        if a.values is None or b.values is None:
            return self.registers(a.rows, b.cols, None)
        product = _product(a.values if scale == 1.0 else a.scaled(scale), b.values)
        if acc is not None:
            product += acc.array
        return self.registers(a.rows, b.cols, product)

    def exp(self, x: Registers) -> Registers:
        """e to the power of x, element by element. It counts exponentials, not FLOPs."""
        misuse.registers("block.exp", x)
        self._m.book.compute(exp=x.size * self.lockstep)
        return self.registers(x.rows, x.cols, None if x.values is None else np.exp(x.values))

    def tanh(self, x: Registers) -> Registers:
        """The hyperbolic tangent, element by element."""
        return self.elementwise(np.tanh, x)

    def log(self, x: Registers) -> Registers:
        """The natural logarithm, element by element. That of 0 is -inf."""
        with np.errstate(divide="ignore"):
            return self.elementwise(np.log, x)

    def maximum(self, a: Registers, b: Registers | float) -> Registers:
        """The larger, element by element."""
        return self.elementwise(np.maximum, a, b)

    def elementwise(self, f: Callable[..., Array], *operands: Registers | float) -> Registers:
        """f of the operands, element by element. It counts one FLOP per element of the (broadcast) result."""
        tiles = [x for x in operands if isinstance(x, Registers)]
        if len(tiles) < len(operands) or getattr(f, "nin", len(operands)) != len(operands):
            misuse.elementwise(f, operands, tiles)
        rows, cols = tiles[0].rows, tiles[0].cols
        for x in tiles[1:]:
            if x.rows != rows or x.cols != cols:
                rows, cols = max(x.rows for x in tiles), max(x.cols for x in tiles)
                misuse.broadcast(f, tiles, rows, cols)
                break
        self.count_flops(rows * cols)
        if not self._m.data:
            return self.registers(rows, cols, None)
        return self.registers(
            rows, cols, f(*(x.array if isinstance(x, Registers) else np.float32(x) for x in operands))
        )

    def mask(
        self, s: Registers, i: Rows, j: Rows, *, group: int = 1, of: Problem | None = None,
        aligned: Callable[[Array], Array] | None = None,
    ) -> Registers:  # fmt: skip
        """Tile (i, j) of S, with -inf outside the mask and beyond the last key.

        `group` is how many rows of S belong to one query: with packed heads, the query heads per KV head. `of` is the problem
        whose queries and keys these are, where they are a part of the machine's. `aligned` tells the keys that some of its queries
        are aligned with, where their numbers don't.
        """
        misuse.registers("block.mask", s)
        p = of or self._m.problem
        if s.values is None:
            return s
        rows, keys = self._places((s.rows, s.cols), i, j, group, p)
        if aligned is not None:
            rows = aligned(np.minimum(rows - p.offset, p.len_q - 1))
        if (
            keys.max() < p.len_kv
            and (p.right is None or keys.max() <= rows.min() + p.right)
            and (p.left is None or keys.min() >= rows.max() - p.left)
        ):
            return s
        return self._without(s, self._hidden(rows, keys, p))

    def show(self, s: Registers, shown: Array, i: Rows, j: Rows, *, group: int = 1) -> Registers:
        """Tile (i, j) of S, with -inf for the pairs that aren't `shown`, (len_q, len_kv). `group` is as in `mask`."""
        if s.values is None:
            return s
        rows, keys = self._places((s.rows, s.cols), i, j, group)
        queries = rows - self._m.problem.offset
        inside = (np.minimum(x, n - 1) for x, n in zip((queries, keys), shown.shape, strict=True))
        return self._without(s, ~shown[tuple(inside)])

    def pack(self, x: Registers, i: Rows, j: Rows, cols: int) -> Registers:
        """Tile (i, j) of a mask, `x` with a 1 for each visible pair, as bits: one row of bytes, each row padded to 64 bits.

        Pairs that causal mask and window hide, or that lie outside the problem, become 0. It counts no FLOPs.
        """
        nbytes = x.rows * round_up(cols, 64) // 8
        if x.values is None:
            return self.registers(1, nbytes, None)
        hidden = self._hidden(*self._places((x.rows, cols), i, j, 1))
        visible = np.zeros((*x.values.shape[:-1], round_up(cols, 64)), bool)
        visible[..., : x.cols] = x.values != 0
        visible[..., :cols] &= ~hidden
        packed = np.packbits(visible, axis=-1, bitorder="little")
        return self.registers(1, nbytes, packed.reshape(*packed.shape[:-2], 1, nbytes).astype(np.float32))

    def hide(self, s: Registers, bits: Registers) -> Registers:
        """A tile of S, with -inf where the `bits` that `pack` made of that tile are 0."""
        if s.values is None:
            return s
        packed = bits.array.astype(np.uint8)
        packed = packed.reshape(*packed.shape[:-2], s.rows, -1)
        visible = np.unpackbits(packed, axis=-1, count=s.cols, bitorder="little")
        return self._without(s, visible == 0)

    def drop(self, p: Registers, i: Rows, j: Rows, cols: int | None = None, *, member: int | None = None) -> Registers:
        """Tile (i, j) of P, with 0 for the weights that dropout drops. Like a mask it selects, and counts no FLOPs.

        The others are as before: multiply with `256 / problem.kept` where that costs least. Tiles have `cols` columns (None:
        as many as P, of which the last one may have fewer). In a launch with one block per KV
        head, `member` says which query head of the group it is.
        """
        problem = self._m.problem
        if p.values is None:
            return p
        rows, keys = self._places((p.rows, cols or p.cols), i, j, 1)
        keys = keys[..., : p.cols]
        batch, kv_heads, group = problem.batch, problem.kv_heads, problem.queries_per_kv
        heads = self._m.first_head + np.arange(batch * kv_heads * group).reshape(batch, kv_heads, group)
        heads = heads if member is None else heads[:, :, member : member + 1]
        state = self._m.values["rng_state"].reshape(-1)
        drawn = random_bytes(state, heads, (rows - problem.offset).reshape(-1), keys.reshape(-1))
        shape = len(rows), p.rows, len(keys), p.cols
        kept = drawn.reshape(*heads.shape, *shape).swapaxes(-2, -3) < problem.kept
        kept = kept.reshape(*heads.shape, len(rows) * len(keys), p.rows, p.cols)  # one of the two is 1
        return self.registers(p.rows, p.cols, np.where(kept, p.values, np.float32(0)))

    def distances(self, s: Registers, i: Rows, j: Rows, *, group: int = 1) -> Registers:
        """For each score of tile (i, j) how far its key is from the one that its query is aligned with.

        That is `abs(i + len_kv - len_q - j)`, for ALiBi. `group` is as in `mask`. Like all indices, it counts no FLOPs.
        """
        misuse.registers("block.distances", s)
        if s.values is None:
            return self.registers(s.rows, s.cols, None)
        rows, keys = self._places((s.rows, s.cols), i, j, group)
        return self.registers(s.rows, s.cols, np.abs(rows - keys).astype(np.float32))

    def _places(
        self, tile: tuple[int, int], i: Rows, j: Rows, group: int, p: Problem | None = None
    ) -> tuple[Array, Array]:
        """The keys that the rows of tile (i, j) are aligned with, and the keys of its columns, to be broadcast."""
        rows, keys = (
            np.asarray(n).reshape(-1, 1, 1) * size + np.arange(size).reshape(shape)
            for n, size, shape in zip((i, j), tile, ((-1, 1), (1, -1)), strict=True)
        )
        return rows // group + (p or self._m.problem).offset, keys

    def _hidden(self, rows: Array, keys: Array, p: Problem | None = None) -> Array:
        """Which pairs causal mask and window hide, or have a key beyond the last one. `rows` are as in `_places`."""
        p = p or self._m.problem
        hidden = np.broadcast_to(keys >= p.len_kv, np.broadcast_shapes(rows.shape, keys.shape))
        if p.right is not None:
            hidden = hidden | (keys > rows + p.right)
        if p.left is not None:
            hidden = hidden | (keys < rows - p.left)
        return hidden

    def _without(self, s: Registers, hidden: Array) -> Registers:
        masked = s.array.copy(order="K")
        np.copyto(masked, -np.inf, where=hidden)
        return self.registers(s.rows, s.cols, masked)

    # -- inside -------------------------------------------------------------------------------------------------

    def registers(self, rows: int, cols: int, data: Array | None) -> Registers:
        """A new tile of registers."""
        return Registers(self, rows, cols, data)

    def count_flops(self, n: int) -> None:
        """Count n FLOPs of this block that are not part of a matrix product."""
        self._m.book.compute(other=n * self.lockstep)

    def sram_alive(self) -> dict[str, int]:
        """The bytes of each buffer that is in SRAM now, by name."""
        return dict(self._sram)

    def _uses(self, split: Split) -> int:
        if isinstance(split, int) and split > 0:
            return split
        if split not in ("rows", "cols", "none"):
            raise UsageError("split", split, "'rows', 'cols', 'none' or how many warps read each byte")
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
        """Registers as rows of a tensor, (batch, kv_head, query_in_group, rows, cols), with the blocks' tiles stacked.

        If one number names the tile, all blocks in lockstep have the same rows. Then the last block's values stay, or
        with `add` all of them add up.
        """
        blocks = 1 if isinstance(i, int | np.integer) else len(i)
        lead = self._m.lead(tensor)
        values = x.array
        if add:  # every block adds its own values, also where all name the same tile
            here = len(self.i) if isinstance(self.i, np.ndarray) else 1
            values = np.broadcast_to(values, (*self._lead, here, *values.shape[-2:]))
            axes = tuple(axis for axis, n in enumerate((*lead, blocks)) if n == 1 and values.shape[axis] > 1)
            values = values.sum(axes, keepdims=True) if axes else values
        elif blocks == 1:
            values = values[:, :, :, -1:]
        tiles = np.broadcast_to(values, (*lead, blocks, rows, x.cols))
        return tiles.reshape(*lead, blocks * rows, x.cols)

    def _own(self, tensor: HbmTensor) -> HbmTensor:
        """What the block's batches have of an array."""
        return tensor if self._batches is None else self._m.of_share(tensor, self._batches, self.keys)

    def _extent(self, tensor: HbmTensor, i: Rows, rows: int, j: int, cols: int, way: str) -> tuple[int, int, int]:
        """First row inside the problem, the row after the last one, and the bytes that all heads request there."""
        spec = tensor.spec
        lo, hi = (int(i), int(i)) if isinstance(i, int | np.integer) else (int(i[0]), int(i[-1]))
        if lo < 0 or j < 0:
            raise UsageError(f"tile of {tensor.name}", (lo if lo < 0 else hi, j), "indices of at least 0")
        if (lo > 0 and hi * rows >= spec.rows) or (j > 0 and j * cols >= spec.cols):
            tiles = -(-spec.rows // rows), -(-spec.cols // cols)
            raise UsageError(
                f"tile of {tensor.name}", (hi, j), f"one of {tiles[0]:,} x {tiles[1]:,} tiles, counted from 0"
            )
        first, last = lo * rows, min((hi + 1) * rows, spec.rows)
        # the last tile of a row includes the row's padding to 16 bytes
        start = j * cols * spec.itemsize
        stop = spec.row_bytes if (j + 1) * cols >= spec.cols else start + cols * spec.itemsize
        if last <= first or stop <= start:
            return first, first, 0
        self._m.touch(tensor, way, (first, last, start, stop))
        if self._m.recorder:
            plane = tensor.plane if spec.axes else None
            self._m.recorder.range((first, last), (j * cols, min((j + 1) * cols, spec.cols)), plane)
        # every block moves a tile that one number names; a tile that the block's own index names, only that block moves
        sharing = self.lockstep if isinstance(i, int | np.integer) else self._heads
        return first, last, (last - first) * (stop - start) * sharing

    def _note_boxes(self, tensor: HbmTensor, i: Rows, rows: int, columns: range) -> None:
        """Note the boxes of the tile of each block in lockstep: one for each panel of columns."""
        tiles = [int(i)] if isinstance(i, int | np.integer) else i.tolist()
        page = self._m.problem.page_size if tensor.table is not None else None
        size = min(page or rows, rows)  # of a box: it lies in one page
        for tile, part, column in product(tiles, range(0, rows, size), columns):
            row = tile * rows + part
            box = Box(tensor.name, row % page if page else row, column, size, columns.step)
            self._m.book.box(box, self.lockstep // len(tiles))

    def _multiplied_shape(self, x: SramTile | Registers) -> tuple[int, int]:
        """The rows and columns that a matrix product executes."""
        if isinstance(x, SramTile):
            return x.multiplied_shape
        return padded(x.rows, self._m.config.fragment_rows), padded(x.cols)

    def _read(self, tensor: HbmTensor, i: Rows, rows: int, j: int, cols: int, fill: float) -> tuple[int, Array | None]:
        """The bytes requested, and the values. Rows outside the problem are filled, columns outside are left out."""
        tensor = self._own(tensor)
        first, last, nbytes = self._extent(tensor, i, rows, j, cols, "read")
        if not self._m.data:
            return nbytes, None
        blocks = 1 if isinstance(i, int | np.integer) else len(i)
        part = self._m.read(tensor, first, last, j * cols, (j + 1) * cols)
        part = part.astype(np.float32, copy=tensor.spec.role != "input")  # later stores must not change what was loaded
        missing = blocks * rows - part.shape[3]
        if missing:
            part = np.pad(part, ((0, 0),) * 3 + ((0, missing), (0, 0)), constant_values=fill)
        if blocks > 1:  # then the rows of all blocks make one matrix product
            part = np.ascontiguousarray(part)
        return nbytes, part.reshape(*part.shape[:3], blocks, rows, part.shape[-1])


def _program_frame() -> FrameType:
    """The frame of the tile program that called the machine."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


def _product(a: Array, b: Array) -> Array:
    """a @ b. If all query heads of a group and all blocks share b, their rows make one large product.

    S = Q K^T is laid out key by key. Then the softmax's row maxima and sums run along memory, three times as fast.
    """
    if b.shape[2:4] != (1, 1):
        return np.matmul(a, b)
    lead, shared = a.shape[:-1], b[:, :, 0, 0]
    rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
    if shared.strides[-1] == shared.itemsize:
        return np.matmul(rows, shared).reshape(*lead, b.shape[-1])
    by_key = np.matmul(shared.swapaxes(-1, -2), rows.swapaxes(-1, -2))
    return np.moveaxis(by_key.reshape(*lead[:2], b.shape[-1], *lead[2:]), 2, -1)
