"""What a tile program moves: handles to arrays in HBM, and buffers in SRAM."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from simulator.config import padded
from simulator.counts import Spec
from simulator.dtypes import Array
from simulator.errors import Said, UsageError, misnamed
from simulator.problem import WIDTH, round_up


def no_operator_multiplies() -> UsageError:
    """`a @ b` does not say how the warps share the bytes."""
    return UsageError("a @ b", Said("a product of tiles"), 'block.matmul(a, b, split=("rows", "none"))')


Batches = tuple[int, ...] | range
"""Some of the batches."""
Place = Callable[[Array], tuple[Array, Array]]
"""Where keys lie, by their numbers in a request: which entry of its line of the block table, and which row of that page."""


_METHODS = {"shape": "{0}.rows and {0}.cols", "transpose": "{0}.T of a tile in SRAM"}
"""What to write in place of methods that NumPy's arrays have."""


class _Stored:
    """What lies in HBM or in SRAM. A block computes with registers only."""

    name: str
    brought = ""
    """How its values get into registers."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UsageError("operand", Said(self.name), f"registers: {self.brought}")

    if not TYPE_CHECKING:  # a type checker knows each name there is

        def __getattr__(self, name: str) -> NoReturn:
            own = self.__dict__.get("name", "tile")
            known = _METHODS.get(name, f"registers: {self.brought}" if hasattr(np.ndarray, name) else None)
            raise misnamed(own, self, name, known and known.format(own))

    __array__ = __neg__ = __getitem__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse

    def __matmul__(self, other: object) -> NoReturn:
        raise no_operator_multiplies()

    __rmatmul__ = __matmul__


class HbmTensor(_Stored):
    """A handle to an array in HBM. Only counted loads reach its values.

    `rows` and `cols` are its shape per head, and `dtype` is its storage dtype. `head(g)` is a handle to one query head
    of each group. `at(…)` is a handle to one plane of a workspace that has `axes`. Rows of a handle with a `table` lie in pages,
    where `place` says.
    `group` says how many heads are rows, and `together` whether those of all batches are. Of a handle to `firsts` each row is the
    first one of `every` so many. A handle `of_batches` has some of the batches.

    >>> from flashlab import HbmTensor, Spec
    >>> q = HbmTensor(Spec("q", heads=2, rows=128, cols=64, dtype="float16", role="input"))
    >>> q.name, q.rows, q.cols, q.dtype
    ('q', 128, 64, 'float16')
    """

    brought = "block.load(...) or block.fetch(...), because only counted loads reach values in HBM"

    def __init__(
        self, spec: Spec, member: int | None = None, plane: int = 0, group: int = 0, table: HbmTensor | None = None,
        together: bool = False, every: int = 1, batches: Batches | None = None, place: Place | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.member, self.plane, self.group, self.table = spec, member, plane, group, table
        self.together, self.every, self.batches, self.place = together, every, batches, place
        self.name, self.rows, self.cols, self.dtype = spec.name, spec.rows, spec.cols, spec.dtype

    def head(self, g: int) -> HbmTensor:
        """A handle to query head g of each group, for launches with one block per KV head.

        Raises `UsageError` if the heads are packed: then they are rows.
        """
        if self.group:
            raise UsageError("head", g, f"{self.name} as it was before its heads were packed")
        return HbmTensor(self.spec, g, self.plane, every=self.every)

    def firsts(self, rows: int) -> HbmTensor:
        """A handle to the first row of each tile of so many rows: where a vector has one value for a tile, it lies there."""
        return HbmTensor(replace(self.spec, rows=-(-self.spec.rows // rows)), self.member, self.plane, every=rows)

    def of_batches(self, batches: Batches, of: int, rows: int) -> HbmTensor:
        """A handle to the first rows of some batches, of so many."""
        spec = replace(self.spec, heads=self.spec.heads // of * len(batches), rows=min(rows, self.spec.rows))
        return HbmTensor(
            spec, self.member, self.plane, self.group, self.table, self.together, self.every, batches, self.place
        )

    def at(self, **where: int) -> HbmTensor:
        """A handle to one plane of a workspace that has `axes`: `partial.at(splits=3)`.

        Raises `UsageError` for other axes, and for an index out of range.
        """
        plane, axes = 0, [name for name, _ in self.spec.axes]
        if list(where) != axes:
            raise UsageError("at", where, f"the axes of {self.name}: {', '.join(axes) or 'none'}")
        for name, n in self.spec.axes:
            if not 0 <= where[name] < n:
                raise UsageError(name, where[name], f"an integer from 0 to {n - 1}")
            plane = plane * n + where[name]
        return HbmTensor(self.spec, self.member, plane, self.group, together=self.together)


class SramTile(_Stored):
    """A buffer in a block's SRAM: `rows` x `cols` of a dtype, padded to the fragment. `.T` is its transpose at no cost.

    Columns are padded to a multiple of `panel`: a fragment's 16, or the width of a TMA box (128 bytes, one swizzled
    tile). `padded_shape` is (rows, columns) with the padding, `multiplied_shape` those that a product goes over. A
    vector has one value per row. `values` is None in a run on shapes, else float32 with the axes `(batch, kv_head,
    query_in_group, block, rows, cols)`.

    >>> from flashlab import SramTile
    >>> SramTile("k", 64, 40, "float16", None).footprint == 64 * 48 * 2
    True
    """

    brought = "block.to_registers(tile), because this tile is in SRAM"

    def __init__(
        self,
        name: str,
        rows: int,
        cols: int,
        dtype: str,
        data: Array | None,
        *,
        vector: bool = False,
        panel: int = 16,
        fragment: int = 16,
    ) -> None:
        self.name, self.rows, self.cols, self.dtype, self.values, self.vector = name, rows, cols, dtype, data, vector
        self.fragment = fragment
        self.padded_shape = padded(rows, fragment), 1 if vector else round_up(cols, panel)
        self.multiplied_shape = self.padded_shape
        self.held = 0  # columns that stay in registers, so that products don't read them
        self.empty = False  # a buffer in which nothing was put yet
        self._scaled: tuple[float, Array] | None = None

    @property
    def T(self) -> SramTile:
        """The transpose, without a copy: the tensor cores can read either layout."""
        data = None if self.values is None else self.values.swapaxes(-1, -2)
        transposed = SramTile(self.name, self.cols, self.rows, self.dtype, data)
        transposed.padded_shape, transposed.multiplied_shape = self.padded_shape[::-1], self.multiplied_shape[::-1]
        transposed.empty = self.empty
        return transposed

    @property
    def whole(self) -> SramTile:
        """The same tile for a product that goes over the columns of its boxes, too, which are zeros."""
        tile = SramTile(self.name, self.rows, self.cols, self.dtype, self.values)
        tile.padded_shape = tile.multiplied_shape = self.padded_shape
        return tile

    def columns(self, chunk: int, width: int) -> SramTile:
        """Columns `chunk * width` to `(chunk + 1) * width`, or to the last one."""
        start = chunk * width
        cols = min(width, self.cols - start)
        data = None if self.values is None else self.values[..., start : start + cols]
        return SramTile(self.name, self.rows, cols, self.dtype, data)

    def with_ones(self, rows: int) -> SramTile:
        """The tile with `rows` rows of ones below its own, which the block keeps in SRAM.

        A product with the transpose then also has the row sums of the other operand.
        """
        data = self.values
        if data is not None:
            data = np.concatenate([data, np.ones((*data.shape[:-2], rows, data.shape[-1]), data.dtype)], axis=-2)
        tile = SramTile(self.name, self.rows + rows, self.cols, self.dtype, data)
        tile.padded_shape = self.padded_shape[0] + rows, self.padded_shape[1]
        tile.multiplied_shape = tile.padded_shape
        return tile

    def scaled(self, scale: float) -> Array:
        """The values times a scale, for S = (scale Q) K^T. The result is kept, because one Q_i meets many K_j."""
        if self._scaled is None or self._scaled[0] != scale:
            assert self.values is not None
            self._scaled = scale, self.values * np.float32(scale)
        return self._scaled[1]

    @property
    def footprint(self) -> int:
        """Bytes, with rows and columns padded. The one column of a vector is not padded."""
        return math.prod(self.padded_shape) * WIDTH[self.dtype]

    @property
    def multiplied_bytes(self) -> int:
        """The bytes that a product reads."""
        return (math.prod(self.multiplied_shape) - self.multiplied_shape[0] * self.held) * WIDTH[self.dtype]
