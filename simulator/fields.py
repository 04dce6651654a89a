"""What is known of each field of a problem: checks, command line, sweeps, tables and words follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from operator import index
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints, overload

import numpy as np

from simulator.errors import UsageError, unknown

T = TypeVar("T")
_SAID = 8  # lengths in words
_SMALLEST = 2.0**-126  # of float32, in which kernels compute, without subnormals
_MOST = 2**62  # kernels and NumPy reckon in 64 bits, and add to sizes
LARGEST_FACTOR = 1e30
"""The largest number that scores are multiplied with, or that joins them. Then sums and products of them don't leave float32."""
Pair = tuple[int | None, int | None]
Lengths = Sequence[int | tuple[int, int]]
"""The queries and the keys of each sequence. A number stands for as many of both."""


class Follows(Generic[T]):
    """The default of a field that may be left out: it then reads as what follows from the others, by a rule and in words.

    What was given is kept beside (`Problem.given`), so that a copy with other fields follows them.
    """

    def __init__(self, rule: Callable[[Any], T], words: str) -> None:
        self.rule, self.words = rule, words

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
        return self.rule(instance) if given is None else given

    def __set__(self, instance: object, value: T | None) -> None:
        instance.__dict__[self._name] = None if value is self else value  # itself: the default of a field left out


def described(
    text: str,
    *,
    default: Any = MISSING,
    axis: str = "",
    unit: str = "",
    least: int = 0,
    among: Collection[str] = (),
    aliases: tuple[str, ...] = (),
    none: float | None = None,
    operand: str = "",
) -> Any:
    """A dataclass's field with all that is known of it but its name and type: see `Field`."""
    known = {"help": text, "axis": axis, "unit": unit, "least": least, "among": among, "aliases": aliases}
    known |= {"none": none, "operand": operand}
    return field(default=default, metadata=known)


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a problem.

    `annotation` is the type that a caller may give, `kind` the one among bool, int, float, str, tuple (a pair, each side an
    integer or None) and list (`Lengths`, kept as a tuple of pairs) that its values have. `axis` says what an axis of an array
    counts whose size it is ("queries", in the `unit` "tokens"); fields that size no axis have none. `least` is the smallest
    integer, `among` are all texts that are accepted, and `aliases` are names that other libraries have for it. `default` is
    what it has when left out, None where it then follows others, as `follows` says. A number that may not be negative says
    with `none` which number stands for None. A caller of a function says a field with an `operand` by passing that array.
    """

    name: str
    annotation: Any
    kind: type
    default: Any
    follows: Follows[Any] | None
    help: str
    axis: str
    unit: str
    least: int
    among: Collection[str]
    aliases: tuple[str, ...]
    none: float | None
    operand: str

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.name.replace("_", " ")

    @property
    def label(self) -> str:
        """What an axis of a plot that shows it is called, with the unit."""
        return f"{self.axis or self.words} ({self.unit})" if self.unit else self.axis or self.words

    def left_out(self, instance: Any) -> Any:
        """What it reads as in this problem where it is left out."""
        return self.default if self.follows is None else self.follows.rule(instance)

    def text(self, value: Any) -> str:
        """A value as the command line takes it: a pair as "128,none", lengths as "100,200:300"."""
        if self.kind is list and value is not None:
            return ",".join(str(n) if n == m else f"{n}:{m}" for n, m in value)
        if isinstance(value, tuple):
            return ",".join(str(side).lower() for side in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return f"{value:g}" if isinstance(value, float) else str(value)

    def said(self, value: Any) -> str:
        """Field and value in words: "causal", "window 128,0", "scale 0.3". Of many lengths these are the first ones."""
        if self.kind is list and len(value) > _SAID:
            return f"{self.words} {self.text(value[:_SAID])},… ({len(value):,} sequences)"
        return self.words if value is True else f"{self.words} {self.text(value)}"

    def checked(self, value: Any) -> Any:
        """The value as a problem keeps it. Raises `UsageError` naming the field."""
        if value is None and self.default is None:
            return None
        if self.kind is int:
            return integer(self.name, value, self.least)
        if self.kind is tuple:
            return self._pair(value)
        if self.kind is list:
            return self._lengths(value)
        if self.kind is float:
            return self._finite(value)
        if self.kind is bool and not isinstance(value, bool):
            raise UsageError(self.name, value, "True or False")
        if self.kind is str and not (isinstance(value, str) and value in self.among):
            raise unknown(self.name, value, self.among)
        return value

    def _pair(self, value: Any) -> Pair:
        accepted = f"a pair (left, right), each None or an integer of at least {self.least}"
        try:
            left, right = value
        except (TypeError, ValueError):
            raise UsageError(self.name, value, accepted) from None
        left, right = (
            None if side is None else integer(self.name, side, self.least, accepted) for side in (left, right)
        )
        return left, right

    def _lengths(self, value: Any) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        accepted = "a list with the length of each sequence: n, or (queries, keys)"
        for i, each in enumerate(listed(self.name, value, accepted)):
            try:
                n, m = each
            except (TypeError, ValueError):
                n = m = each
            name, one = f"{self.name}[{i}]", f"an integer of at least {self.least}, or a pair of them, (queries, keys)"
            found.append((integer(name, n, self.least, one), integer(name, m, self.least, one)))
        if not found:
            raise UsageError(self.name, cast("object", value), accepted)
        return tuple(found)

    def _finite(self, value: Any) -> float | None:
        try:
            finite = type(value) not in (bool, np.bool_) and math.isfinite(value)
        except (TypeError, ValueError, OverflowError):
            finite = False
        held = finite and (value == 0 or _SMALLEST <= abs(value) <= LARGEST_FACTOR)
        beyond = "" if held or not finite else f" up to {LARGEST_FACTOR:g}" if abs(value) > 1 else " that float32 holds"
        if self.none is not None and not (held and value >= self.none):
            raise UsageError(self.name, value, f"a finite number of at least 0{beyond}; {self.none:g} or None is none")
        if not held:
            left_out = f", or None for {self.follows.words}" if self.follows else ", or None" * (self.default is None)
            raise UsageError(self.name, value, f"a finite number{beyond}{left_out}")
        return None if value == self.none else float(value)


def flag(name: str, value: Any) -> bool:
    """An argument that is a yes or a no. Raises `UsageError`."""
    if type(value) not in (bool, np.bool_):
        raise UsageError(name, value, "True or False")
    return bool(value)


def listed(name: str, value: Any, accepted: str) -> list[Any]:
    """The members of an argument that is a collection of any kind, but no text. Raises `UsageError`."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return list(value)
    except TypeError:
        raise UsageError(name, value, accepted) from None


def integer(name: str, value: Any, least: int, accepted: str | None = None) -> int:
    """An argument as an integer of at least `least`, up to 2^62. Raises `UsageError`, with what is `accepted` in words."""
    accepted = accepted or f"an integer of at least {least}"
    try:
        number = index(value)
    except TypeError:
        raise UsageError(name, value, accepted) from None
    if isinstance(value, bool) or number < least:
        raise UsageError(name, value, accepted)
    if number > _MOST:
        raise UsageError(name, value, f"{accepted}, up to 2^62")
    return number


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass whose fields are all `described`, by name."""
    hints = get_type_hints(cls)
    return {each.name: _field(each.name, hints[each.name], each.default, each.metadata) for each in fields(cls)}


def _field(name: str, hint: Any, default: Any, known: Any) -> Field:
    follows: Follows[Any] | None = default if isinstance(default, Follows) else None  # pyright: ignore[reportUnknownVariableType]
    if follows is not None:
        hint, default = get_args(hint)[0] | None, None
    kinds = [each for each in (get_args(hint) if NoneType in get_args(hint) else (hint,)) if each is not NoneType]
    kind: Any = get_origin(kinds[0]) or kinds[0]
    kind = {Sequence: list, Literal: str}.get(kind, kind)
    assert len(kinds) == 1 and kind in (bool, int, float, str, tuple, list), f"{name}: {hint}"
    return Field(name=name, annotation=hint, kind=kind, default=default, follows=follows, **known)
