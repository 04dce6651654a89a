"""Runs the defects of published kernels on the emulator, and records what it says: `python -m flashlab.measure.found CHECKOUT…`.

Each file is taken as it stands in a checkout of its repository; the commit goes on record. docs/found-in-public-kernels.md is
drawn from the newest result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.progress import track

from flashlab.measure import results
from flashlab.measure.corpus_defects import DEFECTS, Defect
from flashlab.measure.results import Data, Kind, markdown_table

__all__ = ["KIND", "command", "run"]


class Row(Data):
    """One defect, and what the emulator said of the launch that shows it."""

    repository: str
    file: str
    commit: str
    """The checkout's, in full."""
    kernel: str
    findings: list[str]
    """As `flashlab emulate` prints them, without the folder of the checkout."""
    lines: list[int]
    """The lines that the findings name."""


class Found(Data):
    """What the emulator found in published kernels."""

    rows: list[Row]


def command(defect: Defect, file: str) -> list[str]:
    """The words after `flashlab` that show a defect in a file."""
    sizes = {"--grid": defect.grid, "--block": defect.block}
    words = ["emulate", file, "--kernel", defect.kernel]
    words += [word for name, size in sizes.items() for word in (name, ",".join(map(str, size)))]
    if defect.sram:
        words += ["--sram", str(defect.sram)]
    return words + [word for text in defect.arguments for word in ("--arg", text)]


def run(defect: Defect, checkout: Path, commit: str) -> Row:
    """Run one defect's launch. Raises `RuntimeError` with what was said if there was none."""
    path = checkout / defect.file
    done = subprocess.run(
        [sys.executable, "-m", "flashlab", *command(defect, str(path)), "--json"], capture_output=True, encoding="utf-8"
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{defect.kernel} of {path}: {done.stderr.strip() or done.stdout.strip()}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["launch"]["findings"]
    texts = [each["text"] for each in found]
    places = [each[party] for each in found for party in ("at", "other_at") if each[party]]
    lines = sorted({line for file, line in places if Path(file).name == path.name})
    return Row(
        repository=defect.repository, file=defect.file, commit=commit, kernel=defect.kernel, findings=texts, lines=lines
    )


def checkouts(folders: list[Path]) -> dict[str, tuple[Path, str]]:
    """Folder and commit of each repository of the table, found by a file of it."""
    found: dict[str, tuple[Path, str]] = {}
    for defect in DEFECTS:
        for folder in folders:
            if (folder / defect.file).is_file() and defect.repository.split("/")[1] in folder.name:
                said = subprocess.run(
                    ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, encoding="utf-8"
                )
                found[defect.repository] = folder, said.stdout.strip()
    return found


def headline(data: Found) -> str:
    """How many of the defects the emulator names at a line that takes part in them."""
    named = sum(bool(row.findings) for row in data.rows)
    return f"defects of published kernels: {named} of {len(data.rows)} found by the emulator"


def table(data: Found) -> str:
    """A row for each defect."""
    return markdown_table(("file", "kernel", "lines"), [
        (f"{row.repository}: {row.file}", f"`{row.kernel}`", ", ".join(map(str, row.lines)) or "not found") for row in data.rows
    ])  # fmt: skip


KIND = Kind(
    "found",
    "Correctness: defects of published kernels",
    "what the emulator says of kernels of public repositories that misuse memory or barriers",
    "python -m flashlab.measure.found CHECKOUT…",
    Found,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "checkouts", nargs="+", type=Path, help="folders of repositories; their names end in the repository's"
    )
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args()
    where = checkouts(given.checkouts)
    rows = [run(each, *where[each.repository]) for each in track(DEFECTS, "kernels") if each.repository in where]
    print(results.save(KIND, [], {"rows": [row.model_dump() for row in rows]}, subject="kernels", folder=given.out,
                       replace=given.force))  # fmt: skip


if __name__ == "__main__":
    main()
