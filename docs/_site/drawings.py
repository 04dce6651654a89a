"""Writes docs/pictures/drawn_*.svg, the drawings of docs/in-pictures.md: `python -m docs._site.drawings`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flashlab.base.files import replace_file
from flashlab.lessons.drawings import DRAWINGS

PICTURES = Path(__file__).resolve().parents[1] / "pictures"


def drawn() -> Iterator[tuple[Path, str]]:
    """Yields the file of each drawing and its text."""
    for name, draw in DRAWINGS.items():
        yield PICTURES / f"drawn_{name}.svg", draw().svg


if __name__ == "__main__":
    for path, svg in drawn():
        replace_file(path, svg)
