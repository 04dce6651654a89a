"""Makes what `make lite` serves in JupyterLite: the lessons that a browser's Python can run, as notebooks.

`python -m docs._site.lite FOLDER` writes them. Each begins with a cell that installs flashlab from the wheel beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from docs._site.pages import IN_THE_BROWSER, NOTEBOOKS

INSTALL = "%pip install --quiet flashlab-attention  # from this site, with what it needs from Pyodide"


FETCHING = (
    "*Your browser is fetching Python now: about 10 MB, and then its packages, once. Until the mark at the top "
    "right says idle, cells wait. Without a network the mark stays red, and nothing can run: take the notebook to a Python of your "
    "own then, with `flashlab lessons`.*"
)
"""What a reader sees first: it is there before any Python is."""


def text(path: Path) -> str:
    """A lesson's notebook for Pyodide's kernel. In front stand words for the time until Python is there, and an install cell."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["kernelspec"] = {"name": "python", "display_name": "Python (Pyodide)", "language": "python"}
    notebook.cells[:0] = [new_markdown_cell(FETCHING, id="fetching"), new_code_cell(INSTALL, id="install")]
    return nbformat.writes(notebook, indent=1) + "\n"


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in IN_THE_BROWSER:
        (folder / name).write_text(text(NOTEBOOKS / name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
