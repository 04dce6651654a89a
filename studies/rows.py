"""Schemas of rows and tables of them, each in a line or two: what the kinds of the studies are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pydantic import create_model

from flashlab.measure.results import Data, markdown_table

__all__ = ["CELL", "Made", "data", "each", "grouped", "row", "shown"]

Made = dict[str, Callable[[Any], Any]]
"""What cells hold of a row, by their names."""

CELL: Mapping[str, Any] = {"dtype": str, "head_dim": int, "causal": bool, "length": int}
"""The fields of a cell of `flashlab bench`."""


def row(name: str, about: str, base: type[Data] = Data, /, **fields: Any) -> Any:
    """The schema of a row: its fields with their types, or with a type and a default in a tuple."""
    given: dict[str, Any] = {field: x if isinstance(x, tuple) else (x, ...) for field, x in fields.items()}
    # these fields have no docstrings: looking for them in the source of each caller takes a second in all
    return create_model(name, __base__=base, __doc__=about, __cls_kwargs__={"use_attribute_docstrings": False}, **given)


def data(name: str, about: str, of: Any, /, **head: Any) -> Any:
    """The schema of data: rows of a kind, and what stands beside them."""
    return row(name, about, **head, rows=tuple[of, ...])


def shown(columns: str, **made: Callable[[Any], Any]) -> Callable[[Any], str]:
    """Draws the table of data. Columns are `header=field:format`, or `header:format` where the field has the header's name.

    `made` are what cells hold that isn't a field of the row. None is an empty cell.

    >>> Toy = data("Toys", "Toys.", row("Toy", "A toy.", name=str, causal=bool, price=float))
    >>> print(shown("name | mask | €=price:.2f")(Toy(rows=[{"name": "top", "causal": True, "price": 3}])))
    | name | mask | € |
    | --- | --- | --- |
    | top | causal | 3.00 |
    """
    made = {"mask": lambda r: "causal" if r.causal else "full", **made}
    parts = [part.strip().partition("=") for part in columns.split(" | ")]
    fields = [(header.partition(":")[0], *(of or header).partition(":")[::2]) for header, _, of in parts]

    def cell(of: Any, name: str, spec: str) -> str:
        value = made[name](of) if name in made else getattr(of, name)
        return "" if value is None else format(value, spec)

    def table(of: Any) -> str:
        rows = [[cell(r, name, spec) for _, name, spec in fields] for r in of.rows]
        return markdown_table([header for header, *_ in fields], rows)

    return table


def each(names: Iterable[str], said: Callable[[str, Any], Any]) -> Made:
    """Cells that differ in a name."""
    return {name: partial(said, name) for name in names}


def grouped(rows: Iterable[Any], name: str, value: Callable[[Any], Any] = lambda r: r.ratio) -> dict[str, list[Any]]:
    """A value of each row, by a field of it."""
    found: dict[str, list[Any]] = {}
    for of in rows:
        found.setdefault(getattr(of, name), []).append(value(of))
    return found
