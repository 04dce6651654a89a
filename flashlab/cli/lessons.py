"""`flashlab lessons` copies the notebooks to where their reader works on them, and opens the first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Annotated

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json
from flashlab.views import tables


def register(app: typer.Typer) -> None:
    options.add(app, lessons, "flashlab lessons", "flashlab lessons my-course --no-open")


def lessons(
    folder: Annotated[str, typer.Argument(help="Where they go. What lies there already stays.")] = "flashlab-lessons",
    opened: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the first one in JupyterLab; with --json, none.")
    ] = True,
    json: Json = False,
) -> None:
    """Copy the lessons' notebooks into a folder, without outputs, and open the first in JupyterLab. Nothing is overwritten."""
    from flashlab.lessons import notebooks

    with options.spelled(folder="FOLDER"):
        found = notebooks.copy(folder)
    if json:
        output.document({"folder": str(found.folder), "copied": found.copied, "kept": found.kept})
        return
    kept = f", {len(found.kept)} were there and stay as they are" if found.kept else ""
    tables.line(f"{found.folder}: {len(found.copied)} lessons copied{kept}")
    if not opened:
        return
    if importlib.util.find_spec("jupyterlab") is None:
        checkout = (notebooks.originals()[0].parents[1] / "Makefile").is_file()
        how = "make lab, where you have the source" if checkout else "pip install jupyterlab ipykernel ipywidgets"
        tables.line(f"to open them: {how}, or any editor of notebooks")
        return
    sys.stdout.flush()
    # As root Jupyter refuses to run unless told, since whoever reaches its port is root then. It listens on this machine alone,
    # and asks for a token.
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    raise typer.Exit(subprocess.run([sys.executable, "-m", "jupyterlab", *root, str(found.first)]).returncode)
