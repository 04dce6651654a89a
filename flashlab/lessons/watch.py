"""The machine that a learner's program is checked on: it notices tiles out of bounds and short cuts.

It guards against accidents and against fooling oneself. It is no sandbox: nothing in one Python process could be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import simulator.block
import simulator.machine
import simulator.registers
from flashlab.lessons.rules import Did
from simulator import Block, HbmTensor, Machine, Registers, SramTile, UsageError
from simulator.block import Rows, Split
from simulator.dtypes import Array, round_to
from simulator.machine import Own
from simulator.problem import Walk

_SIMULATOR = Path(simulator.machine.__file__).parent
_LIBRARY = _SIMULATOR / "programs"
_INSIDE = {__file__, simulator.block.__file__, simulator.registers.__file__}
REGISTERS = 65_536 * 4
"""Bytes of an SM's registers: all that a block can have (CUDA C++ Programming Guide, technical specifications)."""


class OutOfBounds(IndexError):
    """A load or a store of a tile that lies outside of its tensor altogether."""


class Shortcut(RuntimeError):
    """Something else than the learner's own tile program did the work."""


class Held:
    """Which register tiles a program holds, and when: a tile takes registers until it is used for the last time.

    Time is the number of tiles made so far. What an operation reads for the last time gives its registers to the result.
    """

    def __init__(self) -> None:
        self._tiles: list[list[int]] = []  # bytes, and the time of the last use

    def made(self, nbytes: int) -> int:
        """A new tile, by its number."""
        self._tiles.append([nbytes, len(self._tiles)])
        return len(self._tiles) - 1

    def used(self, tile: int) -> None:
        self._tiles[tile][1] = len(self._tiles)

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        change = np.zeros(len(self._tiles) + 1, np.int64)
        for born, (nbytes, last) in enumerate(self._tiles):
            change[born] += nbytes
            change[last] -= nbytes
        return int(change.cumsum().max())


class WatchedRegisters(Registers):
    """A register tile that notes when it is used."""

    __slots__ = ("_data", "_held", "_number")

    def __init__(self, block: Block, rows: int, cols: int, data: Array | None, held: Held) -> None:
        self._held, self._number = held, held.made(4 * rows * cols)
        super().__init__(block, rows, cols, data)

    @property
    def values(self) -> Array | None:
        self._held.used(self._number)
        return self._data

    @values.setter
    def values(self, data: Array | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._data = data


class LoadedTile(SramTile):
    """A tile in SRAM that knows by which of its tensor's loads it came. Its parts came by the same."""

    number = 0

    @property
    def T(self) -> SramTile:
        return self._part(super().T)

    def columns(self, chunk: int, width: int) -> SramTile:
        return self._part(super().columns(chunk, width))

    def with_ones(self, rows: int) -> SramTile:
        return self._part(super().with_ones(rows))

    def _part(self, tile: SramTile) -> SramTile:
        return numbered(tile, self.number)


def numbered(tile: SramTile, number: int) -> SramTile:
    """A tile that came by the load of that number."""
    tile.__class__ = LoadedTile
    assert isinstance(tile, LoadedTile)
    tile.number = number
    return tile


class WatchedBlock(Block):
    """A block that refuses tiles beyond a tensor's end, and notes what rules ask for, and products that no tensor core does so.

    It also notes where a tile is used that is no longer in SRAM: the next load of its tensor has taken its place.

    A ragged last tile is not beyond the end: it starts inside.
    """

    _m: WatchedMachine  # pyright: ignore[reportIncompatibleVariableOverride]

    def registers(self, rows: int, cols: int, data: Array | None) -> Registers:
        return WatchedRegisters(self, rows, cols, data, self._m.held)

    def load(self, tensor: HbmTensor, *tile: Any, **options: Any) -> SramTile:
        loaded = super().load(tensor, *tile, **options)
        self._note("load", of=tensor.name)
        number, _ = self._m.loads.get(tensor.name, (0, 1))
        self._m.loads[tensor.name] = number + 1, options.get("stages", 1)
        return numbered(loaded, number + 1)

    def to_registers(self, tile: SramTile, split: Split = "rows") -> Registers:
        self._still_there("block.to_registers", tile)
        return super().to_registers(tile, split)

    def _still_there(self, call: str, tile: SramTile | Registers) -> None:
        if not isinstance(tile, LoadedTile):
            return
        latest, places = self._m.loads[tile.name]
        if (later := latest - tile.number) >= places:
            times = "once more" if later == 1 else f"{later} times more"
            room = "is one place" if places == 1 else f"are {places} places"
            self._m.remarks.setdefault(
                "overwritten",
                f"{call} {self._where()}: {tile.name} was loaded {times} after this tile, and there {room} for it in SRAM: "
                "the tile is overwritten. Use it before the next load, or pay for n places: block.load(…, stages=n)",
            )

    def elementwise(self, f: Callable[..., Array], *operands: Registers | float) -> Registers:
        if f in (np.divide, np.reciprocal) and isinstance(operands[-1], Registers):
            self._note("division")
        return super().elementwise(f, *operands)

    def matmul(
        self,
        a: SramTile | Registers,
        b: SramTile,
        *,
        split: tuple[Split, Split] = (),  # pyright: ignore[reportArgumentType]  # as in `Block`
        acc: Registers | None = None,
        scale: float = 1.0,
        passes: int = 1,
    ) -> Registers:
        for operand in (a, b):
            self._still_there("block.matmul", operand)
        product = super().matmul(a, b, split=split, acc=acc, scale=scale, passes=passes)
        self._note("product", of=b.name, dtype=b.dtype, split=tuple(split), acc=acc is not None)
        where = self._where()
        remarks, dtype = self._m.remarks, self._m.problem.dtype
        if tuple(split) == ("none", "none") and self.warps > 1:
            remarks.setdefault(
                "repeated",
                f'block.matmul {where}: with split=("none", "none") each of the {self.warps} warps computes the whole '
                'product; ("rows", "none") shares out the rows of the first operand',
            )
        if isinstance(a, Registers) and not _rounded(a.array, dtype):
            remarks.setdefault(
                "unrounded",
                f"block.matmul {where}: the tensor cores multiply {dtype}, and the first operand is not rounded to it: "
                ".round(problem.dtype)",
            )
        return product

    def _note(self, what: str, **details: Any) -> None:
        self._m.did.append(Did(self._m.blocks, what, self._where(), **details))

    def _where(self) -> str:
        """The learner's line that is running."""
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code.co_filename in _INSIDE:
            frame = frame.f_back
        return f'in step "{self._step}", line {frame.f_lineno if frame else 0}'

    def store(self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None) -> None:
        super().store(tensor, x, i, rows, j, cols)
        self._tell(tensor, x)

    def atomic_add(
        self, tensor: HbmTensor, x: Registers, i: Rows, rows: int, j: int = 0, cols: int | None = None
    ) -> None:
        super().atomic_add(tensor, x, i, rows, j, cols)
        self._tell(tensor, x)

    def _tell(self, tensor: HbmTensor, x: Registers) -> None:
        """The tutor, if it listens, what was stored or added."""
        if note := getattr(self._m.recorder, "store", None):
            note(tensor.name, np.broadcast_to(x.array, (*x.array.shape[:-2], x.rows, x.array.shape[-1]))[0, 0, 0, 0])

    def _extent(self, tensor: HbmTensor, i: Rows, rows: int, j: Rows, cols: int, way: str) -> tuple[int, int, int]:
        if isinstance(j, np.ndarray):
            raise UsageError("column tile", j, "a number: block.i counts tiles of rows, block.j tiles of columns")
        low, high = (int(i), int(i)) if isinstance(i, int) or not i.shape else (int(i[0]), int(i[-1]))
        for index, size, length, axis in (
            (low, rows, tensor.rows, "row"),
            (high, rows, tensor.rows, "row"),
            (j, cols, tensor.cols, "column"),
        ):
            if index < 0 or (index > 0 and index * size >= length):
                raise OutOfBounds(
                    f"{tensor.name}: {axis} tile {index} (of {size} {axis}s each) is {'read' if way == 'read' else 'written'}, "
                    f"but the tensor has {length:,} {axis}s, the tiles 0 to {max(0, -(-length // size) - 1)}"
                )
        return super()._extent(tensor, i, rows, j, cols, way)


def _for_the_machine_alone() -> None:
    """Refuses a call from outside of the simulator to the function that asks."""
    caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    if _SIMULATOR not in Path(caller.f_code.co_filename).parents:
        raise Shortcut("it reached into HBM: values come through block.load and block.fetch, which count them")


def _rounded(x: Array, dtype: str) -> bool:
    return np.array_equal(round_to(x, dtype), x, equal_nan=True)


class WatchedMachine(Machine):
    """A machine whose HBM only its own blocks reach, and on which no program of the library runs."""

    blocks = 0
    """How many blocks have begun."""

    @cached_property
    def did(self) -> list[Did]:
        """What the program does, for the rules of an exercise."""
        return []

    @cached_property
    def held(self) -> Held:
        """The register tiles of the program."""
        return Held()

    @property
    def remarks(self) -> dict[str, str]:
        """What is wrong with a program beside its numbers and bytes: a kind of verdict, and the first such place in words."""
        return self.__dict__.setdefault("_remarks", {})

    @property
    def loads(self) -> dict[str, tuple[int, int]]:
        """By tensor, how often it was loaded to SRAM, and how many places it has there."""
        return self.__dict__.setdefault("_loads", {})

    @property
    def stored(self) -> dict[str, Array]:
        """Which elements of an output's heads, `(rows, cols)`, the program has stored."""
        return self.__dict__.setdefault("_stored", {})

    @property
    def values(self) -> dict[str, Array]:
        """The arrays in HBM, for the machine's own code."""
        _for_the_machine_alone()
        return self._values

    @values.setter
    def values(self, arrays: dict[str, Array]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._values = arrays

    def read(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int) -> Array:
        _for_the_machine_alone()
        if tensor.table is not None and (note := getattr(self.recorder, "gathered", None)):
            note(tensor.name, first, self.pool_rows(tensor, first, last), self.problem.page_size)
        return super().read(tensor, first, last, start, stop)

    def write(self, tensor: HbmTensor, first: int, last: int, start: int, stop: int, x: Array) -> None:
        _for_the_machine_alone()
        stored = self.stored.setdefault(tensor.name, np.zeros((tensor.rows, tensor.cols), bool))
        stored[first:last, start:stop] = True
        super().write(tensor, first, last, start, stop, x)

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
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if _LIBRARY in Path(frame.f_code.co_filename).parents:
                raise Shortcut(f"it calls the library's own program {Path(frame.f_code.co_filename).stem}")
            frame = frame.f_back
        blocks = super().launch(
            name,
            warps=warps,
            rows=rows,
            cols=cols,
            walk=walk,
            apart=apart,
            readers=readers,
            of=of,
            along=along,
            across=across,
            own=own,
        )
        return self._watched(blocks)

    def _watched(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            self.blocks += 1
            block.__class__ = WatchedBlock
            yield block
