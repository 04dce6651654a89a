"""The lessons' notebooks, as they are installed: `flashlab lessons` copies them to where their reader works on them.

They are kept with what their cells give, for who reads them on the site. Their reader is to predict first: a copy has none of it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Copies:
    """Notebooks in a folder: those `copied` into it now, and those `kept` as they were, by their names."""

    folder: Path
    copied: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def first(self) -> Path:
        """The notebook to begin with."""
        return self.folder / min((*self.copied, *self.kept))


def originals() -> list[Path]:
    """The notebooks in their order: those of the installed package, or those of the checkout that it is run from."""
    installed = _PACKAGE / "notebooks"
    return sorted((installed if installed.is_dir() else _PACKAGE.parent / "notebooks").glob("*.ipynb"))


def without_outputs(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook whose cells have not run.

    >>> without_outputs({"cells": [{"cell_type": "code", "outputs": [1], "execution_count": 2}]})["cells"]
    [{'cell_type': 'code', 'outputs': [], 'execution_count': None}]
    """
    unrun: dict[str, Any] = {"outputs": [], "execution_count": None}
    cells = [cell | unrun if cell["cell_type"] == "code" else cell for cell in notebook["cells"]]
    return notebook | {"cells": cells}


def text_without_outputs(path: Path) -> str:
    """The text of a notebook in a file, as if no cell had run."""
    notebook = without_outputs(json.loads(path.read_text(encoding="utf-8")))
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def copy(folder: str | Path) -> Copies:
    """Copy the notebooks into a folder, which is made, without outputs. A file that is there already stays as it is.

    Raises `UsageError` for a folder that can't be written, which is left as it was.
    """
    target, copied, kept = Path(folder), list[str](), list[str]()
    new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in originals():
            try:
                with open(target / path.name, "x", encoding="utf-8") as file:  # never over another's work
                    copied.append(path.name)
                    file.write(text_without_outputs(path))
            except FileExistsError:
                kept.append(path.name)
    except OSError as error:
        with suppress(OSError):  # all of them, or none
            for name in copied:
                (target / name).unlink(missing_ok=True)
            if new:
                target.rmdir()
        raise UsageError("folder", str(folder), f"a folder that can be written ({error.strerror or error})") from None
    return Copies(target, tuple(copied), tuple(kept))
