"""`flashlab cache`: where compiled kernels are kept, and how to be rid of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flashlab.cli import options, output
from flashlab.cli.options import Json
from simulator.errors import unknown


def register(app: typer.Typer) -> None:
    options.add(
        app,
        cache,
        "flashlab cache dir",
        "flashlab cache clean",
    )


def cache(
    action: Annotated[
        str, typer.Argument(metavar="dir|clean", help="dir prints the folder; clean deletes what flashlab keeps there.")
    ] = "dir",
    json: Json = False,
) -> None:
    """The folder where compiled kernels are kept: NVRTC's, and the emulator's libraries. FLASHLAB_CACHE moves it.

    Whatever is deleted is compiled again when it is needed. CuPy has a cache of its own (CUPY_CACHE_DIR), which stays.
    """
    from flashlab.base import cache as kept

    if action not in ("dir", "clean"):
        raise unknown("action", action, ["dir", "clean"])
    found = kept.held() if action == "dir" else kept.clean()
    if json:
        output.document(asdict(found))
    elif action == "dir":
        print(found.folder)
    else:
        print(f"deleted {found.entries:,} entries ({found.bytes:,} bytes) from {found.folder}")
