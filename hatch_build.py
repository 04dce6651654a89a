"""What Hatchling asks for whenever it builds: the text for a package index, and the notebooks in the wheel.

An index shows README.md. It resolves no relative link. If pyproject.toml states the repository (`[project.urls]`, `Source`),
links and pictures
become addresses there; if not, a link becomes its words and a picture goes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^]]*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)\n*")
LINK = re.compile(r"(?<!!)\[([^]]*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)")


def description(text: str, repository: str | None) -> str:
    """README's text for an index."""
    if repository is None:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = PICTURE.sub(lambda found: found[0].replace(f"({found[2]})", f"({repository}/raw/main/{found[2]})"), text)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)


class ReadmeHook(MetadataHookInterface):
    """Fills in the dynamic field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, repository)}


class NotebooksHook(BuildHookInterface[Any]):
    """Puts the lessons into the wheel, as flashlab/notebooks. An editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            for path in sorted((Path(self.root) / "notebooks").glob("*.ipynb")):
                build_data["force_include"][str(path)] = f"flashlab/notebooks/{path.name}"
