"""What is computed (`Problem`), in which pieces (`Tile`), and which pieces the mask leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import index
from typing import NamedTuple, Self

from simulator.errors import UsageError, unknown

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of an element of each storage dtype."""
FP8 = "float8_e4m3fn"
"""Of 8 bits: 4 of exponent, 3 of mantissa, up to 448, no infinities. Only `flash3_fp8` computes in it; its output is bfloat16."""
DTYPES = tuple(name for name in ITEMSIZE if name != FP8)
"""What every other algorithm stores Q, K, V and its output in."""


def output_dtype(dtype: str) -> str:
    """The output's dtype for operands of a storage dtype: the same, or bfloat16 where that has 8 bits only."""
    return "bfloat16" if dtype == FP8 else dtype


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n: `round_up(40, 16) == 48`."""
    return -(-n // multiple) * multiple


def row_bytes(elements: int, itemsize: int) -> int:
    """Bytes in which a row of `elements` lies in HBM: padded to 16."""
    return round_up(elements * itemsize, 16)


class Tile(NamedTuple):
    """`Tile(rows, cols)`: Br rows of queries by Bc columns of keys.

    >>> Tile.parse("64x32")
    Tile(rows=64, cols=32)
    """

    rows: int
    cols: int

    @classmethod
    def parse(cls, tile: Tile | tuple[int, int] | str) -> Tile:
        """A tile from `Tile`, a pair, or text as in "64x64"."""
        accepted = "rows x cols of at least 1 each, as in (64, 64) or '64x64'"
        try:
            pair = tile.lower().split("x") if isinstance(tile, str) else tile
            rows, cols = (int(n) if isinstance(n, str) else index(n) for n in pair)
        except (TypeError, ValueError):
            raise UsageError("tile", tile, accepted) from None
        if rows < 1 or cols < 1:
            raise UsageError("tile", tile, accepted)
        return cls(rows, cols)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The shapes of one attention call; the only way shapes are said here.

    Queries are `(batch, heads, len_q, head_dim)`, keys `(batch, kv_heads, len_kv, head_dim)`, values
    `(batch, kv_heads, len_kv, head_dim_v)`. What is None stays None and follows: `kv_heads` the heads, `len_kv` the
    `len_q`, `head_dim_v` the `head_dim`, `scale` 1/sqrt(head_dim); the properties `num_kv_heads`, `kv_length`,
    `value_dim` and `softmax_scale` hold what is meant. Masks are aligned bottom-right: `window=(left, right)` is
    inclusive around key `i + len_kv - len_q`, either side may be None, and `causal` makes right 0.

    Raises `UsageError` naming the field for anything out of range.

    >>> p = Problem(batch=1, heads=8, kv_heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    >>> p.num_kv_heads, p.kv_length, p.softmax_scale, p.right
    (2, 128, 0.125, 0)
    """

    batch: int
    heads: int
    kv_heads: int | None = None
    len_q: int
    len_kv: int | None = None
    head_dim: int
    head_dim_v: int | None = None
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("heads", 1), ("kv_heads", 1), ("len_q", 0), ("len_kv", 0), ("head_dim", 1),
                          ("head_dim_v", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "len_kv", "head_dim_v"):
                continue
            object.__setattr__(self, name, _integer(name, value, low))
        if self.heads % self.num_kv_heads:
            raise UsageError("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if self.dtype not in ITEMSIZE:
            raise unknown("dtype", self.dtype, ITEMSIZE)
        if not isinstance(self.causal, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("causal", self.causal, "True or False")
        if self.window is not None:
            accepted = "a pair (left, right), each None or an integer of at least 0"
            try:
                left, right = self.window
            except (TypeError, ValueError):
                raise UsageError("window", self.window, accepted) from None
            sides = tuple(None if side is None else _integer("window", side, 0, accepted) for side in (left, right))
            object.__setattr__(self, "window", sides)
        if self.scale is not None:
            try:
                finite = math.isfinite(self.scale)
            except TypeError:
                finite = False
            if not finite:
                raise UsageError("scale", self.scale, "a finite number, or None for 1/sqrt(head_dim)")
            object.__setattr__(self, "scale", float(self.scale))

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; what is None still follows."""
        known = {field.name for field in fields(self)}
        for name in changes:
            if name not in known:
                raise unknown("field", name, sorted(known))
        return type(self)(**{name: changes.get(name, getattr(self, name)) for name in known})  # pyright: ignore

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.num_kv_heads

    @property
    def kv_length(self) -> int:
        return self.len_q if self.len_kv is None else self.len_kv

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the storage dtype."""
        return ITEMSIZE[self.dtype]

    @property
    def out_dtype(self) -> str:
        """The output's dtype: the storage dtype, or bfloat16 where that has 8 bits only."""
        return output_dtype(self.dtype)

    @property
    def offset(self) -> int:
        """The key that query 0 is aligned with: `len_kv - len_q`."""
        return self.kv_length - self.len_q

    @property
    def left(self) -> int | None:
        """Keys visible before the aligned one; None for all."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """Keys visible after the aligned one; None for all."""
        if self.causal:
            return 0
        return None if self.window is None else self.window[1]

    def visible_keys(self, row: int) -> range:
        """The keys that query `row` attends to."""
        return self.keys_of_rows(row, row)

    def keys_of_rows(self, first: int, last: int) -> range:
        """The keys that any of the queries first..last (inclusive) attends to; one contiguous range."""
        start = 0 if self.left is None else max(0, first + self.offset - self.left)
        stop = self.kv_length if self.right is None else min(self.kv_length, last + self.offset + self.right + 1)
        return range(start, max(start, stop))

    def row_tiles(self, tile: Tile) -> int:
        """Tr, the number of row tiles."""
        return -(-self.len_q // tile.rows)

    def key_tiles(self, tile: Tile) -> int:
        """Tc, the number of key tiles."""
        return -(-self.kv_length // tile.cols)

    def tiles_of_row(self, i: int, tile: Tile) -> range:
        """The key tiles that the mask leaves to row tile i; the others hold no visible pair."""
        first = i * tile.rows
        keys = self.keys_of_rows(first, min(first + tile.rows, self.len_q) - 1)
        return range(keys.start // tile.cols, -(-keys.stop // tile.cols)) if keys else range(0)


def _integer(name: str, value: object, low: int, accepted: str | None = None) -> int:
    accepted = accepted or f"an integer of at least {low}"
    try:
        number = index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UsageError(name, value, accepted) from None
    if isinstance(value, bool) or number < low:
        raise UsageError(name, value, accepted)
    return number
