"""`flashlab diff` compares two results: what differs, in a table or as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json
from flashlab.views import tables
from simulator.errors import UsageError

SHOWN = 40
"""The most differences in the table. `--json` has them all."""


def register(app: typer.Typer) -> None:
    options.add(
        app,
        diff,
        "flashlab diff before.json after.json",
        "flashlab diff before.json after.json --tolerance 0.1",
    )


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A document of --json, or a file of docs/results.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of the same command or kind.")],
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Compare times, too: 0.1 allows 10%. Without it, they aren't compared."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two results, number by number. The exit status is 1 if they differ, 2 if they can't be compared."""
    from flashlab.views import differences

    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise UsageError("--tolerance", tolerance, "a share of at least 0, as in 0.1")
    found = differences.compare(differences.read("A", a), differences.read("B", b), tolerance)
    if json:
        output.document({"a": a, "b": b, **found.to_dict()})
    else:
        if found.found:
            tables.table(f"{a} and {b}", ("", "A", "B", "change"), found.cells[:SHOWN])
        if len(found.found) > SHOWN:
            tables.line(f"... and {len(found.found) - SHOWN:,} more")
        times = f"; {found.skipped:,} times not compared (--tolerance compares them)" if found.skipped else ""
        tables.line(f"{len(found.found):,} of {found.equal + len(found.found):,} values differ{times}")
    if found.found:
        raise typer.Exit(1)
