"""Where the project is to be had: what pyproject.toml states once, and the commands and links that follow from it.

`repository` is the address of the source, empty while there is none. `released` says whether a package index has the project. Until
then no text tells anybody to install from one, and what needs an address isn't said.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = "notebooks/00_memory.ipynb"


@dataclass(frozen=True)
class Release:
    """What pyproject.toml states, under `tool.hatch.metadata.hooks.custom`."""

    name: str
    repository: str
    released: bool

    def requirement(self, extra: str = "") -> str | None:
        """What pip is to be told, or None where a stranger can't have it yet."""
        named = f"{self.name}[{extra}]" if extra else self.name
        if self.released:
            return named
        return f"{named} @ git+{self.repository}" if self.repository else None

    def pip(self, extra: str = "") -> str:
        """The command that installs the library with an extra."""
        what = self.requirement(extra) or (f".[{extra}]" if extra else ".")
        return f"pip install {what}" if what in (".", self.name) else f'pip install "{what}"'

    @property
    def where(self) -> str:
        """Where `pip` is to be run, in words, with a blank in front; nothing where that doesn't matter."""
        return "" if self.released or self.repository else " in a checkout"

    def clone(self) -> str:
        """The commands that bring the source and set it up."""
        address = self.repository or "<where you found this>"
        return f"git clone {address} flashlab && cd flashlab"

    @property
    def github(self) -> str:
        """The place on GitHub ("us/it"), or nothing."""
        host, _, place = self.repository.partition("://")[2].partition("/")
        return place if host == "github.com" else ""

    def links(self) -> list[str]:
        """The links that README begins with: the first lesson in a browser, and badges."""
        found: list[str] = []
        if self.github:
            at = f"https://mybinder.org/v2/gh/{self.github}/HEAD?labpath={FIRST}"
            colab = f"https://colab.research.google.com/github/{self.github}/blob/HEAD/{FIRST}"
            found += [f"**[Run lesson 00 in your browser]({at})**", f"[on Colab]({colab})"]
            found.append(
                f"[![tests]({self.repository}/actions/workflows/test.yml/badge.svg)]({self.repository}/actions)"
            )
        if self.released:
            found.append(f"[on PyPI](https://pypi.org/project/{self.name}/)")
        return found


@cache
def stated() -> Release:
    """What pyproject.toml says today."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    custom = text["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    return Release(text["project"]["name"], custom["repository"], custom["released"])
