"""What is computed (`Problem`), in which pieces (`Tile`), and which pieces the mask leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from operator import index
from typing import Any, Generic, NamedTuple, Self, TypeVar, overload

from simulator.errors import UsageError, unknown

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of an element of each storage dtype."""
WIDTH = {**ITEMSIZE, "int32": 4, "int64": 8, "uint8": 1}
"""Bytes of an element of whatever an operand may hold: indices and lengths are no storage dtypes."""
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


T = TypeVar("T")
Windowed = tuple[int | None, int | None]


class Follows(Generic[T]):
    """A field of `Problem` that may be left out: it then reads as what follows from the others.

    What was given is kept beside (`Problem.given`), so that a copy with other fields follows them.
    """

    def __init__(self, rule: Callable[[Any], T]) -> None:
        self._rule = rule

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> None: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | None:
        if instance is None:
            return None  # the field's default, as dataclasses ask for it
        given = instance.__dict__.get(self._name)
        return self._rule(instance) if given is None else given

    def __set__(self, instance: object, value: T | None) -> None:
        instance.__dict__[self._name] = None if value is self else value  # itself: the default of a field left out


def _described(text: str, *, unit: str = "", follows: str = "", default: Any = MISSING) -> Any:
    """A field of `Problem` with what command line, sweeps and tables say of it: its help, its unit, what it follows."""
    return field(default=default, metadata={"help": text, "unit": unit, "follows": follows})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """The shapes of one attention call; the only way shapes are said here.

    Queries are `(batch, heads, len_q, head_dim)`, keys `(batch, kv_heads, len_kv, head_dim)`, values
    `(batch, kv_heads, len_kv, head_dim_v)`. What is left out (or None) follows: `kv_heads` the heads, `len_kv` the
    `len_q`, `head_dim_v` the `head_dim`, `scale` 1/sqrt(head_dim); fields read as what they come to. Masks are aligned
    bottom-right: `window=(left, right)` is inclusive around key `i + len_kv - len_q`, either side may be None, and `causal`
    makes right 0. Problems are equal that ask for the same, however they were said.

    Raises `UsageError` naming the field for anything out of range.

    >>> p = Problem(batch=1, heads=8, kv_heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    >>> p.kv_heads, p.len_kv, p.scale, p.right
    (2, 128, 0.125, 0)
    >>> p.replace(len_q=256).len_kv, p == p.replace(len_kv=128)
    (256, True)
    """

    batch: int = _described("Sequences")
    heads: int = _described("Query heads")
    kv_heads: Follows[int] = _described(
        "Key and value heads", follows="as many as the query's", default=Follows(lambda p: p.heads)
    )
    len_q: int = _described("Queries per head", unit="tokens")
    len_kv: Follows[int] = _described(
        "Keys per head", unit="tokens", follows="as many as queries", default=Follows(lambda p: p.len_q)
    )
    head_dim: int = _described("Elements per query and key")
    head_dim_v: Follows[int] = _described(
        "Elements per value", follows="the head dim", default=Follows(lambda p: p.head_dim)
    )
    dtype: str = _described(f"Storage dtype: {', '.join(DTYPES)}; of 8 bits {FP8}")
    causal: bool = _described("Mask out later keys", default=False)
    window: Windowed | None = _described("Keys visible left and right, as in 128,0; none for all", default=None)
    scale: Follows[float] = _described(
        "Factor of the scores", follows="1/sqrt(head dim)", default=Follows(lambda p: 1 / math.sqrt(p.head_dim))
    )

    def __post_init__(self) -> None:
        given = self.given
        for name, low in (
            ("batch", 1),
            ("heads", 1),
            ("kv_heads", 1),
            ("len_q", 0),
            ("len_kv", 0),
            ("head_dim", 1),
            ("head_dim_v", 1),
        ):
            if name in given:
                object.__setattr__(self, name, integer(name, given[name], low))
        if self.heads % self.kv_heads:
            raise UsageError("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise unknown("dtype", self.dtype, ITEMSIZE)
        if not isinstance(self.causal, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError("causal", self.causal, "True or False")
        if self.window is not None:
            accepted = "a pair (left, right), each None or an integer of at least 0"
            try:
                left, right = self.window
            except (TypeError, ValueError):
                raise UsageError("window", self.window, accepted) from None
            sides = tuple(None if side is None else integer("window", side, 0, accepted) for side in (left, right))
            object.__setattr__(self, "window", sides)
        if "scale" in given:
            try:
                finite = math.isfinite(self.scale)
            except (TypeError, ValueError, OverflowError):
                finite = False
            if not finite:
                raise UsageError("scale", self.scale, "a finite number, or None for 1/sqrt(head_dim)")
            object.__setattr__(self, "scale", float(self.scale))

    @classmethod
    def checked(cls, problem: Any) -> Self:
        """The problem itself. Raises `UsageError` for anything else, arrays above all."""
        if not isinstance(problem, cls):
            raise UsageError("problem", type(problem).__name__, "a Problem; fl.simulate takes arrays")
        return problem

    @property
    def given(self) -> dict[str, Any]:
        """The fields as they were given; what was left to follow isn't among them."""
        return {f.name: self.__dict__[f.name] for f in fields(self) if self.__dict__[f.name] is not None}

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed; what was left out still follows, and None leaves a field out."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise unknown("field", name, sorted(known))
        return type(self)(**{**self.given, **changes})  # pyright: ignore[reportArgumentType]

    def _key(self) -> tuple[Any, ...]:
        plain = [getattr(self, f.name) for f in fields(self) if f.name not in ("causal", "window")]
        return (*plain, self.left, self.right)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.given.items() if value is not False)
        return f"Problem({said})"

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

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
        return self.len_kv - self.len_q

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

    @property
    def transposed(self) -> Self:
        """The problem in which keys take the place of queries: a key sees the queries that see it.

        >>> p = Problem(batch=1, heads=1, len_q=3, len_kv=5, head_dim=8, dtype="float16", causal=True)
        >>> [list(p.transposed.visible_keys(j)) for j in range(p.len_kv)]
        [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2], [2]]
        """
        window = None if self.left is None and self.right is None else (self.right, self.left)
        return self.replace(len_q=self.len_kv, len_kv=self.len_q, causal=False, window=window)

    def visible_keys(self, row: int) -> range:
        """The keys that query `row` attends to."""
        return self.keys_of_rows(row, row)

    def keys_of_rows(self, first: int, last: int) -> range:
        """The keys that any of the queries first..last (inclusive) attends to; one contiguous range."""
        start = 0 if self.left is None else max(0, first + self.offset - self.left)
        stop = self.len_kv if self.right is None else min(self.len_kv, last + self.offset + self.right + 1)
        return range(start, max(start, stop))

    def row_tiles(self, tile: Tile) -> int:
        """Tr, the number of row tiles."""
        return -(-self.len_q // tile.rows)

    def key_tiles(self, tile: Tile) -> int:
        """Tc, the number of key tiles."""
        return -(-self.len_kv // tile.cols)

    def tiles_of_row(self, i: int, tile: Tile) -> range:
        """The key tiles that the mask leaves to row tile i; the others hold no visible pair."""
        first = i * tile.rows
        keys = self.keys_of_rows(first, min(first + tile.rows, self.len_q) - 1)
        return range(keys.start // tile.cols, -(-keys.stop // tile.cols)) if keys else range(0)


def integer(name: str, value: object, low: int, accepted: str | None = None) -> int:
    """An argument as an integer. Raises `UsageError`."""
    accepted = accepted or f"an integer of at least {low}"
    try:
        number = index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UsageError(name, value, accepted) from None
    if isinstance(value, bool) or number < low:
        raise UsageError(name, value, accepted)
    return number
