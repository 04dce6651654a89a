"""The lessons' notebooks, as they are installed: `flashlab lessons` copies them to where their reader works on them.

No cell of theirs has run, for a reader is to predict first. The site has what the cells give.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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


def copy(folder: str | Path) -> Copies:
    """Copy the notebooks into a folder, which is made. A file that is there already stays as it is.

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
                    file.write(path.read_text(encoding="utf-8"))
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
