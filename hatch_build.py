"""What Hatchling asks for whenever it builds: the text for a package index, the URLs, and the notebooks in the wheel.

pyproject.toml states the address of the repository once (`tool.hatch.metadata.hooks.custom.repository`), and all links follow
from it. An index resolves no relative link: README's links and pictures become addresses in the repository. While that is
empty, a link becomes its words, a picture goes, and the project has no URLs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^]]*)\]\(((?!https?:|mailto:|#)[^)\s]+)\)\n*")
LINK = re.compile(r'(?<!!)\[([^]]*)\]\(((?!https?:|mailto:|#)[^)\s]+)(?: "[^"]*")?\)')


def description(text: str, repository: str | None) -> str:
    """README's text for an index."""
    if repository is None:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = PICTURE.sub(lambda found: found[0].replace(f"({found[2]})", f"({repository}/raw/main/{found[2]})"), text)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)


def urls(repository: str | None) -> dict[str, str]:
    """What an index links to."""
    if repository is None:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class ReadmeHook(MetadataHookInterface):
    """Fills in the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = self.config.get("repository") or None
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, repository)}
        metadata["urls"] = urls(repository)


class NotebooksHook(BuildHookInterface[Any]):
    """Puts the lessons into the wheel, as flashlab/notebooks. An editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            for path in sorted((Path(self.root) / "notebooks").glob("*.ipynb")):
                build_data["force_include"][str(path)] = f"flashlab/notebooks/{path.name}"
