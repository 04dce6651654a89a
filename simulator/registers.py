"""Register tiles: what a block computes with. Each operation counts its FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from simulator.dtypes import Array, round_to
from simulator.errors import Said, UsageError, misnamed
from simulator.tensors import no_operator_multiplies

if TYPE_CHECKING:
    from simulator.block import Block


_OPERATORS = (np.add, np.subtract, np.multiply, np.divide, np.negative)
_CALLS = {"exp": "block.exp(x)", "log": "block.log(x)", "tanh": "block.tanh(x)", "maximum": "block.maximum(a, b)"}
"""The block's own calls, by the name of NumPy's function."""


_METHODS = {
    "mean": "x.sum() / x.cols, for each row",
    "min": "-(-x).max(), for each row",
    "shape": "x.rows and x.cols",
    "dot": "block.matmul(a, b, split=('rows', 'none'))",
    "exp": "block.exp(x)",
    "log": "block.log(x)",
    "transpose": "x.T",
}
"""What to write in place of methods that NumPy's arrays have."""


class Registers:
    """A tile of `rows` x `cols` float32 values in the registers of a block. With `cols = 1` it has one value per row.

    `+ - * /` take tiles and numbers, on either side. They broadcast one value per row over the columns, and count one
    FLOP per element of the result. `values` is None in a run on shapes, else it has the axes `(batch, kv_head,
    query_in_group, block, rows, cols)`. Registers move no bytes.

    >>> import flashlab as fl
    >>> @fl.program
    ... def scores_only(m, q, k, v, problem, tile):
    ...     out = m.output("out")
    ...     for block in m.launch("scores", rows=problem.row_tiles(tile), warps=4):
    ...         block.step("load")
    ...         q_i, k_j = block.load(q, block.i, tile.rows), block.load(k, 0, tile.cols)
    ...         block.step("scores")
    ...         s = block.matmul(q_i, k_j.T, split=("rows", "none"))
    ...         block.store(out, block.exp(s - s.max()), block.i, tile.rows)
    ...     return out
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    >>> fl.count(scores_only, p, tile=(64, 64)).flops.other == 2 * 64 * 64  # the maximum and the difference
    True
    """

    __slots__ = ("_block", "cols", "rows", "values")

    def __init__(self, block: Block, rows: int, cols: int, data: Array | None) -> None:
        self._block, self.rows, self.cols, self.values = block, rows, cols, data

    @property
    def array(self) -> Array:
        """The values. Only a run on data has them."""
        assert self.values is not None
        return self.values

    def scaled(self, scale: float) -> Array:
        """The values times a scale, as an array."""
        return self.array * np.float32(scale)

    @property
    def size(self) -> int:
        """Elements of the tile."""
        return self.rows * self.cols

    def __add__(self, other: Registers | float) -> Registers:
        return self._block.elementwise(np.add, self, other)

    def __sub__(self, other: Registers | float) -> Registers:
        return self._block.elementwise(np.subtract, self, other)

    def __mul__(self, other: Registers | float) -> Registers:
        return self._block.elementwise(np.multiply, self, other)

    def __truediv__(self, other: Registers | float) -> Registers:
        return self._block.elementwise(np.divide, self, other)

    def __radd__(self, other: float) -> Registers:
        return self._block.elementwise(np.add, other, self)

    def __rsub__(self, other: float) -> Registers:
        return self._block.elementwise(np.subtract, other, self)

    def __rmul__(self, other: float) -> Registers:
        return self._block.elementwise(np.multiply, other, self)

    def __rtruediv__(self, other: float) -> Registers:
        return self._block.elementwise(np.divide, other, self)

    def __neg__(self) -> Registers:
        return self._block.elementwise(np.negative, self)

    def __pow__(self, exponent: object) -> NoReturn:
        raise UsageError(
            f"x ** {exponent!r}", Said("a power of registers"), "x * x, or block.elementwise(np.power, x, n)"
        )

    def _compared(self, other: object) -> NoReturn:
        raise UsageError("a > b", Said("a comparison of registers"), "block.maximum(a, b), or -block.maximum(-a, -b)")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __hash__ = object.__hash__

    def __abs__(self) -> NoReturn:
        raise UsageError("abs(x)", Said("a function of registers"), "block.elementwise(np.abs, x)")

    if not TYPE_CHECKING:  # a type checker knows each name there is

        def __getattr__(self, name: str) -> NoReturn:
            raise misnamed("x", self, name, _METHODS.get(name))

    def __getitem__(self, index: object) -> NoReturn:
        raise UsageError("x[…]", Said("a part of registers"), "x.columns(start, width), or a load of fewer rows")

    def __bool__(self) -> NoReturn:
        raise UsageError(
            "if x", Said("a condition on registers"), "values for both cases, as block.maximum(a, b) chooses"
        )

    def __matmul__(self, other: object) -> NoReturn:
        raise no_operator_multiplies()

    __rmatmul__ = __matmul__

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: object) -> Registers:
        """A NumPy number on the left, `np.float32(2) * x`, is an operand like others. Other functions have a call of their own."""
        if method == "__call__" and ufunc in _OPERATORS and not options:
            return self._block.elementwise(ufunc, *operands)
        name = ufunc.__name__
        if ufunc is np.matmul:
            raise no_operator_multiplies()
        if method == "__call__":
            call = _CALLS.get(name, f"block.elementwise(np.{name}, …)")
            raise UsageError(f"np.{name}", Said("a function of registers"), call)
        raise UsageError(f"np.{name}.{method}", Said("a function of registers"), "x.sum() or x.max(), for each row")

    def __array_function__(self, f: Callable[..., object], *_: object) -> Registers:
        call = {"sum": "x.sum()", "max": "x.max()", "amax": "x.max()"}.get(
            f.__name__, "a method of registers or of the block"
        )
        raise UsageError(f"np.{f.__name__}", Said("a function of registers"), call)

    @property
    def T(self) -> Registers:
        """The transpose: rows become columns. It moves nothing. For values of other lanes, use `put` and `get`."""
        data = None if self.values is None else self.values.swapaxes(-1, -2)
        return self._block.registers(self.cols, self.rows, data)

    def columns(self, start: int, width: int) -> Registers:
        """`width` columns from `start` on. Beyond the last one they are zeros, as in a fragment's padding. It moves nothing."""
        data = None if self.values is None else self.values[..., start : start + width]
        if data is not None and data.shape[-1] < width:
            data = np.pad(data, ((0, 0),) * (data.ndim - 1) + ((0, width - data.shape[-1]),))
        return self._block.registers(self.rows, width, data)

    def max(self) -> Registers:
        """The maximum of each row."""
        return self._reduce(np.maximum)

    def sum(self) -> Registers:
        """The sum of each row."""
        return self._reduce(np.add)

    def _reduce(self, f: np.ufunc) -> Registers:
        self._block.count_flops(self.size)
        data = None if self.values is None else f.reduce(self.values, axis=-1, keepdims=True)
        return self._block.registers(self.rows, 1, data)

    def finite(self) -> Registers:
        """The tile with 0 in place of -inf, so that the maximum of an empty row can be subtracted."""
        data = None if self.values is None else np.where(np.isneginf(self.values), np.float32(0), self.values)
        return self._block.registers(self.rows, self.cols, data)

    def nonzero(self) -> Registers:
        """The tile with 1 in place of 0, so that one can divide by the sum of an empty row."""
        data = None if self.values is None else np.where(self.values == 0, np.float32(1), self.values)
        return self._block.registers(self.rows, self.cols, data)

    def round(self, dtype: str) -> Registers:
        """The tile rounded to a storage dtype, as an operand of the tensor cores is."""
        return self._block.registers(
            self.rows, self.cols, None if self.values is None else round_to(self.values, dtype)
        )
