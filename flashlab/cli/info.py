"""`flashlab info` prints versions, and which of the tools that some commands need are found here."""

from __future__ import annotations

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json
from flashlab.views import progress, tables


def register(app: typer.Typer) -> None:
    options.add(
        app,
        info,
        "flashlab info",
        "flashlab info --json",
    )


def info(json: Json = False) -> None:
    """Print versions, what is found here (GPU, CuPy, ncu, compilers, a browser), and how to get what is missing."""
    from flashlab.measure import here

    with progress.busy("looking"):
        found = here.look()
    if json:
        output.document(found.to_dict())
        return
    tables.line(", ".join(f"{name} {number}" for name, number in found.versions.items()))
    for part in found.parts:
        tables.line(part.line)
