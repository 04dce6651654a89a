"""Published kernels on the emulator: `python -m flashlab.measure.corpus CHECKOUT… [--jobs N]`.

Every `.cu` file with a `__global__` below the checkouts is tried as it is: built, all its kernels at once (of templates the
instances that the file names), then each kernel is run with generated arguments, in a process of its own with limits of time
and memory. Nothing of the checkouts is copied; the result names their commits. Numbers are judged where `corpus_answers` knows
what a kernel computes. `--jobs` files are tried at the same time. Native code of strangers runs here: use it on repositories
that you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import Any

from rich.console import Console
from rich.progress import Progress

from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.process import end_child
from simulator.errors import UsageError

__all__ = ["KIND", "commit_of", "measured", "sources"]

_SILENCE = 240
"""Seconds for a build, or for a kernel with its judgement: after either of them the child says something."""
_KERNEL_SECONDS = 60
_MOST_RESTARTS = 40  # after kernels that end their process


class KernelRow(Data):
    """A kernel, or an instance of a template, run with generated arguments."""

    name: str
    ran: bool
    """It came to its end. What was found on the way isn't judged: the arguments are made up."""
    right: bool | None
    """Its numbers are NumPy's; None: nobody wrote down what it computes."""
    reason: str | None
    """Why it didn't come to its end, or why it isn't right."""


class FileRow(Data):
    """A file: whether all its kernels build, unchanged."""

    path: str
    built: bool
    reason: str | None
    kernels: tuple[KernelRow, ...]


class CheckoutRow(Data):
    """A repository at a commit."""

    repository: str
    commit: str
    files: tuple[FileRow, ...]


class Corpus(Data):
    """What became of the files of some repositories."""

    checkouts: tuple[CheckoutRow, ...]


def sources(checkout: Path) -> list[Path]:
    """The `.cu` files below a folder that have a kernel, by their names."""
    found = (path for path in sorted(checkout.rglob("*.cu")) if path.is_file())
    return [path for path in found if "__global__" in path.read_text(encoding="utf-8", errors="replace")]


def commit_of(checkout: Path) -> str:
    """The commit of a checkout. Raises `UsageError` for what is none."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError("checkout", str(checkout), "a folder that git knows")
    return asked.stdout.strip()


def measured(checkouts: Sequence[Path], jobs: int = 1) -> list[dict[str, Any]]:
    """What became of the files of checkouts, as plain data for `CheckoutRow`; `jobs` files are tried at the same time.

    Raises `UsageError` for what is no checkout.
    """
    rows: list[dict[str, Any]] = [
        {"repository": _repository(folder), "commit": commit_of(folder), "files": []} for folder in checkouts
    ]
    files = [(row, folder, path) for row, folder in zip(rows, checkouts, strict=True) for path in sources(folder)]
    stopped = Event()
    pool = ThreadPoolExecutor(jobs)
    try:
        tries = [pool.submit(tried, path, folder, stopped) for _, folder, path in files]
        with Progress(console=Console(stderr=True)) as bar:
            for done in bar.track(as_completed(tries), total=len(tries), description="files"):
                bar.console.print(_said(done.result()), markup=False, highlight=False, soft_wrap=True)
    finally:
        stopped.set()  # an interrupt reaches this thread alone: the others end their children, and come home
        pool.shutdown(cancel_futures=True)
    for (row, _, _), done in zip(files, tries, strict=True):
        row["files"].append(done.result())
    return rows


def _repository(checkout: Path) -> str:
    return checkout.resolve().name.replace("__", "/")


def _said(file: dict[str, Any]) -> str:
    ran = sum(kernel["ran"] for kernel in file["kernels"])
    return f"{file['path']}: " + (
        f"built, {ran} of {len(file['kernels'])} kernels ran" if file["built"] else file["reason"]
    )


def tried(path: Path, checkout: Path, stopped: Event) -> dict[str, Any]:
    """What became of one file, as plain data for `FileRow`, unless it was `stopped` on the way."""
    row: dict[str, Any] = {"path": str(path.relative_to(checkout)), "built": False, "reason": None, "kernels": []}
    names: Sequence[str] = ()
    died = None
    for _ in range(_MOST_RESTARTS):
        said, died = _child(path, len(row["kernels"]), stopped)
        for line in said:
            if "kernel" in line:
                row["kernels"].append({"name": line.pop("kernel"), **line})
            else:
                names = line.pop("names")
                row |= line
        if died is None or stopped.is_set() or not row["built"] or len(row["kernels"]) >= len(names):
            break
        row["kernels"].append({"name": names[len(row["kernels"])], "ran": False, "right": None, "reason": died})
    if not row["built"]:
        row["reason"] = row["reason"] or died
    return {
        **row,
        "reason": _short(row["reason"], checkout),
        "kernels": [_shorter(k, checkout) for k in row["kernels"]],
    }


def _child(path: Path, first: int, stopped: Event) -> tuple[list[dict[str, Any]], str | None]:
    """What a process says that builds a file and runs its kernels from a number on, and why it ended before its time.

    When this returns, nothing that the process started is left: no compiler either.
    """
    command = [sys.executable, "-m", "flashlab.measure.corpus_child", str(path), str(first), str(_KERNEL_SECONDS)]
    with TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True)
        heard, deadline = 0, time.monotonic() + _SILENCE
        while process.poll() is None and time.monotonic() < deadline and not stopped.is_set():
            time.sleep(0.1)
            if (size := os.fstat(said.fileno()).st_size) > heard:
                heard, deadline = size, time.monotonic() + _SILENCE
        late = process.returncode is None
        end_child(process)
        said.seek(0)
        out = said.read().decode("utf-8", "replace")
    ended = f"the process ended with status {process.returncode}" if process.returncode else None
    return list(_lines(out)), "the process took too long" if late else ended


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():  # a kernel may print, too
        if line.startswith('{"corpus": '):
            yield json.loads(line)["corpus"]


def _shorter(kernel: dict[str, Any], checkout: Path) -> dict[str, Any]:
    return {**kernel, "reason": _short(kernel["reason"], checkout)}


def _short(reason: str | None, checkout: Path) -> str | None:
    """A reason in at most 300 letters, without this machine's folders."""
    if reason is None:
        return None
    return " ".join(reason.replace(f"{checkout.resolve()}/", "").replace(f"{checkout}/", "").split())[:300]


def headline(data: Corpus) -> str:
    """One sentence: how many files build, and how many kernels run."""
    files = [file for checkout in data.checkouts for file in checkout.files]
    built = [file for file in files if file.built]
    kernels = [kernel for file in built for kernel in file.kernels]
    ran = sum(kernel.ran for kernel in kernels)
    right = sum(kernel.right or False for kernel in kernels)
    return (
        f"published kernels: {len(built)} of {len(files)} files ({_share(len(built), len(files))}) build unchanged; "
        f"{ran} of their {len(kernels)} kernels ({_share(ran, len(kernels))}) run to an end, {right} of them held to NumPy"
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def table(data: Corpus) -> str:
    """A Markdown table with one row per repository."""
    rows: list[tuple[str, ...]] = []
    for checkout in data.checkouts:
        built = [file for file in checkout.files if file.built]
        kernels = [kernel for file in built for kernel in file.kernels]
        judged = [kernel for kernel in kernels if kernel.right is not None]
        counts = (
            len(checkout.files),
            len(built),
            len(kernels),
            sum(k.ran for k in kernels),
            sum(k.right or False for k in judged),
        )
        rows.append((checkout.repository, checkout.commit[:9], *map(str, counts)))
    return markdown_table(("repository", "commit", "files tried", "built", "kernels", "ran", "right"), rows)


KIND = Kind(
    "corpus",
    "Coverage: published kernels on the emulator",
    "which files of public repositories the emulator builds and runs unchanged",
    "python -m flashlab.measure.corpus",
    Corpus,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", type=Path, help="a repository's folder")
    parser.add_argument("--subject", default="repositories", help="a word for them, for the file's name")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="files tried at the same time (the cores)"
    )
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: expected a number from 1 on")
    data = {"checkouts": measured(given.checkouts, given.jobs)}
    print(results.save(KIND, [], data, subject=given.subject, folder=given.out, replace=given.force))


if __name__ == "__main__":
    main()
