"""What differs between two results: documents of `--json`, files of docs/results, or baselines of counts."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from flashlab.base.files import printable
from flashlab.base.jsonlines import document
from simulator.errors import Said, UsageError
from simulator.problem import FIELDS

__all__ = ["Difference", "Differences", "compare", "differences", "read"]

MEASURED = frozenset(
    ("seconds", "milliseconds", "microseconds", "nanoseconds", "clocks", "clocks_active", "gigahertz", "mhz", "watts",
     "tflops", "of_matmul", "before", "ratio", "quartiles", "rounds", "samples", "calls")
)  # fmt: skip
"""The keys of times, and of what follows from times: no two runs have the same."""
IDENTITY = (
    "algorithm", "kernel", "launch", "name", "case", "check", "problem", "target", "tool", "peer", "instruction", "device",
    "tile", *FIELDS, "length", "sram", "step", "tensor", "space", "op", "what", "mask", "at",
)  # fmt: skip
"""The keys that say which row of a list it is. Rows are found by them, so that one row more isn't a difference in all."""
MISSING = "-"


@dataclass(frozen=True)
class Difference:
    """A place that differs: its keys, and what either side has there ("-": it has no such place)."""

    where: str
    a: Any
    b: Any

    @property
    def change(self) -> str:
        """By how much, of numbers: "+64 (+1.6%)"."""
        if not (_number(self.a) and _number(self.b)):
            return ""
        off = self.b - self.a
        share = f" ({off / abs(self.a):+.1%})" if self.a and math.isfinite(off) else ""
        return (f"{off:+,}" if isinstance(off, int) else f"{off:+.4g}") + share


@dataclass(frozen=True)
class Differences:
    """All places that differ, how many places are equal, and how many times there are that were not compared."""

    found: Sequence[Difference]
    equal: int
    skipped: int

    @property
    def cells(self) -> list[tuple[str, str, str, str]]:
        """The rows of a table: where, a, b, change."""
        return [(printable(each.where), _shown(each.a), _shown(each.b), each.change) for each in self.found]

    @property
    def text(self) -> str:
        """The table as plain text, for a message."""
        rows = [("", "was", "is", "change"), *self.cells]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{row[0]:<{widths[0]}}" + "".join(f"  {row[i]:>{widths[i]}}" for i in (1, 2, 3)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(each) for each in self.found]
        return {"same": not self.found, "equal": self.equal, "not_compared": self.skipped, "differences": rows}


def differences(a: Any, b: Any, tolerance: float | None = None) -> Differences:
    """Compare two JSON values, place by place. Rows of lists are found by what they say of themselves (`IDENTITY`).

    Times (`MEASURED`) differ if they are further apart than the `tolerance`, a share such as 0.1. None: they aren't
    compared.

    >>> differences({"hbm": {"read": 64, "write": 8}}, {"hbm": {"read": 80, "write": 8}}).cells
    [('hbm.read', '64', '80', '+16 (+25.0%)')]
    """
    left, right = dict(_places(a)), dict(_places(b))
    found, equal, skipped = list[Difference](), 0, 0
    for place in dict.fromkeys([*left, *right]):
        x, y = left.get(place, MISSING), right.get(place, MISSING)
        if MEASURED.intersection(place) and _number(x) and _number(y):
            if tolerance is None:
                skipped += 1
                continue
            same = math.isclose(x, y, rel_tol=tolerance)
        else:
            same = x == y and type(x) is type(y)
        equal += same
        if not same:
            found.append(Difference(_words(place), x, y))
    return Differences(found, equal, skipped)


def compare(
    a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float | None = None, *, names: tuple[str, str] = ("A", "B")
) -> Differences:
    """Compare two documents. Of a result on record, only its data: machine, date and commit aren't compared.

    Raises `UsageError`, which names the second, for documents that can't be compared: of different kinds, schemas or
    commands.
    """
    on_record = all("kind" in x and "data" in x for x in (a, b))  # their schemas say how a file is written
    for key in ("kind",) if on_record else ("kind", "schema"):
        if a.get(key) != b.get(key):
            has, wanted = (printable(str(each.get(key))) for each in (b, a))
            raise UsageError(names[1], Said(f"a result of {key} {has}"), f"{key} {wanted}, as {names[0]} has")
    if on_record:
        return differences(a["data"], b["data"], tolerance)
    if 2 * len(a.keys() & b.keys()) < max(len(a), len(b)):
        wanted, has = (printable(", ".join(list(x)[:6])) for x in (a, b))
        raise UsageError(
            names[1], Said(f"a document of {has} …"), f"one of the command that wrote {names[0]}: {wanted} …"
        )
    return differences(a, b, tolerance)


def read(argument: str, path: Path | str) -> dict[str, Any]:
    """A JSON document from a file, or that of a file of JSON Lines. Raises `UsageError`."""
    return document(argument, path, "a JSON document, as --json prints it or docs/results has it")


def _places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every plain value with the keys that lead to it."""
    if isinstance(value, dict) and value:
        for key, part in cast("dict[str, Any]", value).items():
            yield from _places(part, (*path, key))
    elif isinstance(value, list) and value:
        yield from _rows(cast("list[Any]", value), path)
    else:
        yield path, value


def _rows(rows: list[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    labels = [_label(row) for row in rows]
    several = Counter(labels)
    met = Counter[str]()
    for index, (label, row) in enumerate(zip(labels, rows, strict=True)):
        number = met[label] if label else index
        met[label] += 1
        own = f"[{label}{f', {number}' if label and several[label] > 1 else '' if label else number}]"
        keys = _identity(row) if label else ()
        rest = {key: part for key, part in row.items() if key not in keys} if label else row
        yield from _places(rest, (*path, own))


def _identity(row: Any) -> tuple[str, ...]:
    return tuple(key for key in row if key in IDENTITY and not isinstance(row[key], dict | list))


def _label(row: Any) -> str:
    """What a row says of itself; nothing if it says nothing."""
    if not isinstance(row, dict):
        return ""
    found = cast("dict[str, Any]", row)
    words = [
        key if found[key] is True else str(found[key]) for key in _identity(row) if found[key] not in (None, False, "")
    ]
    return ", ".join(words)


def _words(place: Sequence[str]) -> str:
    return "".join(part if part.startswith("[") else f".{part}" for part in place).lstrip(".") or "(all of it)"


def _number(x: Any) -> bool:
    """Is it one that floats reckon with?"""
    return isinstance(x, float) or (isinstance(x, int) and not isinstance(x, bool) and abs(x) <= sys.float_info.max)


def _shown(x: Any) -> str:
    if _number(x):
        return f"{x:,}" if isinstance(x, int) else f"{x:.6g}"
    text = printable(x) if isinstance(x, str) else json.dumps(x)
    return text if len(text) <= 60 else f"{text[:57]}..."
