"""The problems that a kernel is for. A domain shapes every check's problems, where `supports` only refuses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from flashlab.verify.cases import LAYOUTS, Case
from simulator import Problem, UsageError
from simulator.errors import among
from simulator.fields import integer
from simulator.names import DType
from simulator.problem import FEATURES, FIELDS

LONG = 513
"""Keys of a long row where there must be as many queries: the square of more would be slow."""
SHIFTS = 12
"""How often `Domain.another` makes a problem longer before it gives up."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Domain:
    """What a kernel takes. Every check then runs on problems of that kind: each is moved to the nearest one inside.

    `dtype`, `head_dim`, `batch`, `len_q` and `len_kv` are those of a `Problem`: one value, several, a `range`, or None
    for any. `groups` are the query heads that share one KV head: 1 for no grouped heads. Both lengths (tokens) are
    multiples of `multiple`, where `len_q` or `len_kv` doesn't say them. `same_lengths`: as many keys as queries.
    `empty`: may a length be 0? If not said, it may where lengths are multiples of 1. `causal`: True if every problem is
    causal, False if none is. `masks` names what it takes of causal, window, scale, soft_cap, sinks and alibi (None: what
    the function has a keyword for). `layouts` are those in `flashlab.verify.LAYOUTS` in which it takes arrays: "plain"
    if they must be contiguous. `pairs` is the most (query, key) pairs, over batch and heads, for a kernel that is slow.
    Raises `UsageError` for values that no problem can have.

    >>> import flashlab as fl
    >>> domain = fl.Domain(dtype="bfloat16", head_dim=128, multiple=64, groups=1)
    >>> domain.fit(fl.Problem(batch=1, heads=4, kv_heads=2, len_q=97, len_kv=5, head_dim=40, dtype="float16"))
    Problem(batch=1, heads=4, kv_heads=4, len_q=128, len_kv=64, head_dim=128, dtype='bfloat16')
    """

    dtype: str | Collection[str] | None = None
    head_dim: int | Collection[int] | None = None
    batch: int | Collection[int] | None = None
    groups: int | Collection[int] | None = None
    len_q: int | Collection[int] | None = None
    len_kv: int | Collection[int] | None = None
    multiple: int = 1
    same_lengths: bool = False
    empty: bool | None = None
    causal: bool | None = None
    masks: str | Collection[str] | None = None
    layouts: str | Collection[str] | None = None
    pairs: int | None = None

    def __post_init__(self) -> None:
        integer("multiple", self.multiple, 1)
        if self.pairs is not None:
            integer("pairs", self.pairs, 1)
        sizes: dict[str, Callable[[Any], Any]] = {
            name: FIELDS[name].checked for name in ("dtype", "head_dim", "batch", "len_q", "len_kv")
        }
        sizes["groups"] = lambda n: integer("groups", n, 1)
        sizes["masks"] = lambda name: _known("masks", name, FEATURES)
        sizes["layouts"] = lambda name: _known("layouts", name, LAYOUTS)
        for name, checked in sizes.items():
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _values(name, given, checked))
        for name in ("same_lengths", "empty", "causal"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name == "same_lengths"):
                raise UsageError(name, value, "True or False")

    def __repr__(self) -> str:
        said = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Domain({', '.join(f'{name}={_short(value)!r}' for name, value in said)})"

    @property
    def words(self) -> str:
        """What it restricts, in words: "head_dim 128, multiple 64". Nothing if it takes any problem."""
        said = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{name} {_listed(value)}" for name, value in said)

    @property
    def dtypes(self) -> tuple[DType, ...] | None:
        """The storage dtypes that it takes, or None for any."""
        return None if self.dtype is None else cast("tuple[DType, ...]", tuple(self.dtype))

    def fit(self, problem: Problem) -> Problem:
        """The nearest problem that lies in this domain: the same one, if it does."""
        p = problem
        if p.lengths is not None:  # it takes the lengths as they are, or none
            plain = self.fit(p.replace(lengths=None, len_q=p.len_q, len_kv=p.len_kv))
            same = (plain.batch, plain.len_q, plain.len_kv) == (p.batch, p.len_q, p.len_kv)
            takes = "lengths" in (FEATURES if self.masks is None else self.masks)
            return plain.replace(lengths=p.lengths) if same and takes else plain
        changes: dict[str, Any] = {
            name: FIELDS[name].default for name in FEATURES if self.masks is not None and name not in self.masks
        }
        if self.causal is not None:
            changes["causal"] = self.causal
        for name in ("head_dim", "batch"):
            changes[name] = _nearest(getattr(self, name), getattr(p, name))
        if self.dtype is not None and p.dtype not in self.dtype:
            changes["dtype"] = next(iter(self.dtype))
        group = _nearest(self.groups, p.queries_per_kv)
        heads = p.heads if p.heads % group == 0 else p.kv_heads * group
        changes |= {"heads": heads, "kv_heads": heads // group}
        len_q, len_kv = self._length("len_q", p.len_q), self._length("len_kv", p.len_kv)
        if self.same_lengths and len_q != len_kv:
            longer, shorter = max(p.len_q, p.len_kv), min(p.len_q, p.len_kv)
            len_q = len_kv = self._length("len_q", longer if longer <= LONG else max(shorter, LONG))
        if self.pairs is not None:
            len_q, len_kv = self._within(self.pairs // (changes["batch"] * heads), len_q, len_kv)
        changes |= {"len_q": len_q, "len_kv": len_kv}
        differ = {name: value for name, value in changes.items() if value != getattr(p, name)}
        for first, follows in (("len_q", "len_kv"), ("heads", "kv_heads")):
            if first in differ and changes[follows] != changes[first]:
                differ[follows] = changes[follows]  # else it might follow the first
        return p.replace(**differ) if differ else p

    def _length(self, name: str, n: int) -> int:
        values = getattr(self, name)
        if values is not None:
            return _nearest(values, n)
        empty = self.multiple == 1 if self.empty is None else self.empty
        if n == 0:
            return 0 if empty else self.multiple
        return max(1, (2 * n + self.multiple) // (2 * self.multiple)) * self.multiple

    def _within(self, most: int, len_q: int, len_kv: int) -> tuple[int, int]:
        """Lengths whose product is at most this: the longer one gives way, then both. As short as they may be, if none is."""
        if len_q * len_kv <= most:
            return len_q, len_kv
        side = math.isqrt(most)
        if self.same_lengths or min(len_q, len_kv) > side:
            longest = {"len_q": side, "len_kv": side}
        else:
            short, long = ("len_q", "len_kv") if len_q < len_kv else ("len_kv", "len_q")
            longest = {short: side, long: most // min(len_q, len_kv)}
        return self._at_most("len_q", min(len_q, longest["len_q"])), self._at_most(
            "len_kv", min(len_kv, longest["len_kv"])
        )

    def _at_most(self, name: str, n: int) -> int:
        """The greatest length of up to n, or else the least one that there is."""
        values = getattr(self, name)
        if values is None:
            return max(n // self.multiple, 1) * self.multiple
        return max((value for value in values if value <= n), default=min(values))

    def fit_case(self, case: Case) -> Case:
        """The nearest case that lies in this domain."""
        layout = case.layout if self.layouts is None or case.layout in self.layouts else next(iter(self.layouts))
        return replace(case, problem=self.fit(case.problem), layout=layout)

    def another(self, case: Case, taken: Collection[Case]) -> Case | None:
        """The case, fitted, or one of other lengths or of more sequences where that is taken. None if all are."""
        p = case.problem
        for more in range(SHIFTS):
            step = more * max(self.multiple, 16)
            for changes in (
                {},
                {"len_q": p.len_q + step},
                {"len_kv": p.len_kv + step},
                {"batch": p.batch + more},
                {"heads": p.heads + more * p.queries_per_kv, "kv_heads": p.kv_heads + more},
            ):
                found = self.fit_case(replace(case, problem=p.replace(**changes)))
                if found not in taken:
                    return found
        return None

    def outside(self, problem: Problem) -> str | None:
        """Why a problem lies outside, or None."""
        fitted = self.fit(problem)
        if fitted == problem:
            return None
        differ = [name for name in FIELDS if getattr(problem, name) != getattr(fitted, name)]
        said = [name for name in differ if name in problem.given] or differ
        return f"outside the domain: {', '.join(f'{name} = {getattr(problem, name)}' for name in said)}"


def _known(argument: str, name: Any, known: Iterable[str]) -> str:
    return among(argument, name, known)


def _values(name: str, given: Any, checked: Callable[[Any], Any]) -> tuple[Any, ...] | range:
    """Values of a field as a tuple, or as the range that was given. Raises `UsageError`."""
    if isinstance(given, range) and len(given):
        checked(given[0])
        checked(given[-1])
        return given if given.step > 0 else given[::-1]
    numbers: Any = cast("object", given)
    several = isinstance(given, Iterable) and not isinstance(given, str) and getattr(numbers, "shape", None) != ()
    values = tuple(numbers) if several else (numbers,)
    if not values and name != "masks":  # a kernel may take no mask, but some dtype
        raise UsageError(name, values, "at least one value, or None for any")
    return tuple(checked(value) for value in values)


def _nearest(values: Any, n: int) -> int:
    """The value nearest to n, the larger of two. Any value (None) is n itself."""
    if values is None or n in values:
        return n
    if isinstance(values, range):
        place = round((n - values.start) / values.step)
        return values[min(max(place, 0), len(values) - 1)]
    return min(values, key=lambda value: (abs(value - n), -value))


def _short(value: Any) -> Any:
    """One value instead of a tuple of one."""
    if not isinstance(value, tuple):
        return value
    values = cast("tuple[Any, ...]", value)
    return values[0] if len(values) == 1 else values


def _listed(value: Any) -> str:
    if isinstance(value, range):
        return f"{value[0]} to {value[-1]}" + (f" by {value.step}" if value.step != 1 else "")
    return "/".join(map(str, cast("tuple[Any, ...]", value))) or "none" if isinstance(value, tuple) else str(value)
