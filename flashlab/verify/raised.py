"""Kinds of problems that a function from elsewhere doesn't take, told by what it raises.

A function that knows no grouped heads raises the same exception for each of them. That is a convention that nobody has stated
yet, so the report gives it one line, with the option that leaves the kind out. What is wrong in numbers comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashlab.verify.report import Row

SAID = 90
"""The most characters of an exception's message in a line."""
_RAISED = re.compile(r"raised (\w+): (.*)")


@dataclass(frozen=True)
class Kind:
    """Problems that an option of `verify` leaves out. `domain` are the same words for `fl.Domain`."""

    name: str
    option: str
    domain: Mapping[str, Any]
    has: Callable[[Sequence[str]], bool]
    """Is a problem of this kind, by its sizes as `describe` writes them: batch, heads, len_q, len_kv, head_dim?"""

    def of(self, row: Row) -> bool:
        sizes = row.problem.partition(" ")[0].split("x")
        return len(sizes) == 5 and self.has(sizes)


KINDS = (
    Kind("grouped heads", "--groups 1", {"groups": 1}, lambda sizes: ":" in sizes[1]),
    Kind("no queries or no keys", "--no-empty", {"empty": False}, lambda sizes: "0" in sizes[2:4]),
)


@dataclass(frozen=True)
class Raised:
    """A kind of problems, every failure of which is the same exception."""

    kind: Kind
    rows: Sequence[Row]

    def __str__(self) -> str:
        found = _RAISED.match(self.rows[0].detail)
        assert found is not None
        said = found[2] if len(found[2]) <= SAID else f"{found[2][:SAID]}…"
        domain = ", ".join(f"{name}={value}" for name, value in self.kind.domain.items())
        return (
            f"failed ({len(self.rows)}): every failure with {self.kind.name} is a {found[1]} ({said}). "
            f"If the function takes none: {self.kind.option}, or fl.Domain({domain})"
        )


def raised(rows: Sequence[Row]) -> list[Raised]:
    """The kinds of which all that failed raised the same exception, where no problem of another kind did."""
    failed, found, told = [row for row in rows if row.status == "failed"], list[Raised](), set[int]()
    ran = [row for row in rows if row.status != "not run"]
    plain = {_message(row) for row in failed if not any(kind.of(row) for kind in KINDS)}
    for kind in KINDS:
        mine = [row for row in failed if kind.of(row) and id(row) not in told]
        alone = [row for row in mine if not any(other.of(row) for other in KINDS if other is not kind)]
        names = {_error(row) for row in mine}
        if all(kind.of(row) for row in ran):  # it is for nothing else
            continue
        if alone and len(names) == 1 and None not in names and not plain & {_message(row) for row in mine}:
            found.append(Raised(kind, mine))
            told |= {id(row) for row in mine}
    return found


def _error(row: Row) -> str | None:
    """The exception that a row's target raised, by its name, or None."""
    found = _RAISED.match(row.detail)
    return found and found[1]


def _message(row: Row) -> str:
    """What a row's target raised, whatever the sizes were."""
    return re.sub(r"\d+", "", row.detail)
