"""Runs the defects of published kernels on the emulator, and records what it says.

    python -m flashlab.measure.found CHECKOUT… [--out docs/results] [--force]

Each file is taken as it stands in a checkout of its repository; the commit goes on record. docs/found-in-public-kernels.md is
drawn from the newest result. `flashlab.measure.found_gpu` runs the same launches on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.progress import track

from flashlab.cli.emulate import values
from flashlab.measure import results
from flashlab.measure.corpus import commit_of
from flashlab.measure.corpus_defects import DEFECTS, NUMBERS, Defect
from flashlab.measure.found_answers import error, nans
from flashlab.measure.results import Data, Kind, markdown_table
from simulator.errors import UsageError

__all__ = ["KIND", "blob_of", "command", "here", "parser", "run"]


class Row(Data):
    """One defect, and what the emulator said of the launch that shows it."""

    repository: str
    file: str
    commit: str
    """The checkout's, in full."""
    blob: str
    """git's name for the file's content, as `git rev-parse COMMIT:FILE` says it."""
    kernel: str
    findings: list[str]
    """As `flashlab emulate` prints them, without the folder of the checkout."""
    lines: list[int]
    """The lines that the findings name."""
    nans: int
    """Elements that are NaN in the arrays that the launch left; 0 if a finding stopped it."""
    error: float | None
    """How far an element is at most from NumPy's in float64; None if a finding stopped the launch."""


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
    with TemporaryDirectory() as folder:
        left = Path(folder) / "left.npz"
        words = [*command(defect, str(path)), "--json", "--out", str(left)]
        done = subprocess.run([sys.executable, "-m", "flashlab", *words], capture_output=True, encoding="utf-8")
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{defect.kernel} of {path}: {done.stderr.strip() or done.stdout.strip()}")
        with np.load(left) as file:
            arrays = {name: file[name] for name in file.files}
    launch: dict[str, Any] = json.loads(done.stdout)["launch"]
    found: list[dict[str, Any]] = launch["findings"]
    texts = [each["text"] for each in found]
    places = [each[party] for each in found for party in ("at", "other_at") if each[party]]
    lines = sorted({line for file, line in places if Path(file).name == path.name})
    return Row(
        repository=defect.repository, file=defect.file, commit=commit, blob=blob_of(path), kernel=defect.kernel,
        findings=texts, lines=lines, nans=0 if launch["stopped"] else nans(arrays.values()),
        error=None if launch["stopped"] else error(defect, values("--arg", defect.arguments), arrays),
    )  # fmt: skip


def blob_of(path: Path) -> str:
    """git's name for a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def here(folders: Sequence[Path]) -> Iterator[tuple[Defect, Path]]:
    """The defects whose files are in these checkouts, each with its checkout. Raises `UsageError` if there are none."""
    found = [
        (defect, folder)
        for defect in (*DEFECTS, *NUMBERS)
        for folder in folders
        if (folder / defect.file).is_file() and defect.repository.split("/")[1] in folder.resolve().name
    ]
    if not found:
        names = ", ".join(dict.fromkeys(defect.repository for defect in DEFECTS))
        raise UsageError("checkouts", ", ".join(map(str, folders)), f"folders of {names}, with their names")
    yield from found


def headline(data: Found) -> str:
    """How many of the defects the emulator names at a line that takes part in them."""
    rows = [row for row in data.rows if not row.nans]
    named = sum(bool(row.findings) for row in rows)
    numbers = len(data.rows) - len(rows)
    return f"defects of published kernels: {named} of {len(rows)} found by the emulator; {numbers} more compute NaN"


def table(data: Found) -> str:
    """A row for each defect."""
    return markdown_table(("file", "kernel", "lines"), [
        (f"{row.repository}: {row.file}", f"`{row.kernel}`", ", ".join(map(str, row.lines)) or (
            f"{row.nans} NaN" if row.nans else "not found")) for row in data.rows
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


def parser(words: str | None) -> argparse.ArgumentParser:
    """The options of a command on checkouts; the first line of `words` says what it does."""
    made = argparse.ArgumentParser(description=(words or "").partition("\n")[0])
    made.add_argument(
        "checkouts", nargs="+", type=Path, help="folders of repositories; their names end in the repository's"
    )
    made.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the file (%(default)s)")
    made.add_argument("--force", action="store_true", help="replace the file of that name")
    return made


def main() -> int:
    given = parser(__doc__).parse_args()
    try:
        rows = [run(each, folder, commit_of(folder)) for each, folder in track(list(here(given.checkouts)), "kernels")]
        print(results.save(KIND, [], {"rows": [row.model_dump() for row in rows]}, subject="kernels", folder=given.out,
                           replace=given.force))  # fmt: skip
    except UsageError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
