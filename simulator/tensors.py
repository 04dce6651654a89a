"""What a tile program moves: handles of arrays in HBM, and buffers in SRAM."""

from __future__ import annotations

import numpy as np

from simulator.config import padded
from simulator.counts import Spec
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.problem import WIDTH, round_up


class HbmTensor:
    """A handle of an array in HBM. Its values are reached through counted loads only.

    `rows`, `cols` and `dtype` are its shape per head and its dtype. `head(g)` is one query head of each group, `at(…)` one
    plane of a workspace with axes of its own.

    >>> from flashlab import HbmTensor, Spec
    >>> q = HbmTensor(Spec("q", heads=2, rows=128, cols=64, dtype="float16", role="input"))
    >>> q.name, q.rows, q.cols, q.dtype
    ('q', 128, 64, 'float16')
    """

    def __init__(self, spec: Spec, member: int | None = None, plane: int = 0, group: int = 0) -> None:
        self.spec, self.member, self.plane, self.group = spec, member, plane, group
        self.name, self.rows, self.cols, self.dtype = spec.name, spec.rows, spec.cols, spec.dtype

    def head(self, g: int) -> HbmTensor:
        """The query head g of each group, for launches of a block per KV head."""
        if self.group:
            raise UsageError("head", g, f"{self.name} as it was before its heads were packed")
        return HbmTensor(self.spec, g, self.plane)

    def at(self, **where: int) -> HbmTensor:
        """One plane of a workspace that has `axes`: `partial.at(splits=3)`."""
        plane, axes = 0, [name for name, _ in self.spec.axes]
        if list(where) != axes:
            raise UsageError("at", where, f"the axes of {self.name}: {', '.join(axes) or 'none'}")
        for name, n in self.spec.axes:
            if not 0 <= where[name] < n:
                raise UsageError(name, where[name], f"an integer from 0 to {n - 1}")
            plane = plane * n + where[name]
        return HbmTensor(self.spec, self.member, plane, self.group)

    def __array__(self, *_: object, **__: object) -> Array:
        raise UsageError("tensor", self.name, "block.load(...): values of HBM are reached through counted loads")


class SramTile:
    """A buffer in a block's SRAM: `rows` x `cols` of a dtype, padded to the fragment. `.T` is its transpose, free.

    `panel`: columns lie in panels of so many, the last one padded (TMA's swizzled tiles have 64); `padded_shape` says how
    many rows and columns there are with the padding.

    >>> from flashlab import SramTile
    >>> SramTile("k", 64, 40, "float16", None).footprint == 64 * 48 * 2
    True
    """

    def __init__(
        self, name: str, rows: int, cols: int, dtype: str, data: Array | None, *, vector: bool = False, panel: int = 16
    ) -> None:
        self.name, self.rows, self.cols, self.dtype, self.values, self.vector = name, rows, cols, dtype, data, vector
        self.padded_shape = padded(rows), 1 if vector else round_up(cols, panel)
        self._scaled: tuple[float, Array] | None = None

    @property
    def T(self) -> SramTile:
        """The transpose, as the tensor cores read it: no copy."""
        data = None if self.values is None else self.values.swapaxes(-1, -2)
        transposed = SramTile(self.name, self.cols, self.rows, self.dtype, data)
        transposed.padded_shape = self.padded_shape[::-1]
        return transposed

    def columns(self, chunk: int, width: int) -> SramTile:
        """The columns `chunk * width` and on, `width` of them at the most."""
        start = chunk * width
        cols = min(width, self.cols - start)
        data = None if self.values is None else self.values[..., start : start + cols]
        return SramTile(self.name, self.rows, cols, self.dtype, data)

    def with_ones(self, rows: int) -> SramTile:
        """The tile with so many rows of ones behind its own, which the block keeps there: a product with the transpose has the sums
        of the other operand's rows besides."""
        data = self.values
        if data is not None:
            data = np.concatenate([data, np.ones((*data.shape[:-2], rows, data.shape[-1]), data.dtype)], axis=-2)
        tile = SramTile(self.name, self.rows + rows, self.cols, self.dtype, data)
        tile.padded_shape = self.padded_shape[0] + rows, self.padded_shape[1]
        return tile

    def scaled(self, scale: float) -> Array:
        """The values times a scale: S = (scale Q) K^T in float32; kept, because Q_i meets many K_j."""
        if self._scaled is None or self._scaled[0] != scale:
            assert self.values is not None
            self._scaled = scale, self.values * np.float32(scale)
        return self._scaled[1]

    @property
    def footprint(self) -> int:
        """Bytes, rows and columns padded to the fragment; a vector has no columns to pad."""
        rows, cols = self.padded_shape
        return rows * cols * WIDTH[self.dtype]
