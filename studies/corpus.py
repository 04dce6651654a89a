"""Published kernels on the emulator: `python -m studies corpus CHECKOUT… [--jobs N]`.

Every `.cu` file with a `__global__` below the checkouts is tried as it is (with `--python` every `.py` file with CUDA in a string,
and each string of it): built, all its kernels at once (of templates the
instances that the file names), then each kernel is run with generated arguments, in a process of its own with limits of time
and memory. Nothing of the checkouts is copied; the result names their commits. `--jobs` files are tried at the same time. Native
code of strangers runs here: use it on repositories that you trust.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from flashlab.base.process import end_child
from flashlab.emulator.build import BuildError, build, survey
from flashlab.emulator.library import Arena, Library, Parameter
from flashlab.emulator.source import Survey
from flashlab.emulator.strings import DOORS, Own, embedded
from flashlab.measure import results
from flashlab.measure.results import Kind, markdown_table
from simulator.errors import Said, UsageError
from studies.rows import row

ROOT = Path(__file__).resolve().parents[1]
_SILENCE = 240
"""Seconds for a build, or for a kernel: after either of them the child says something."""
_KERNEL_SECONDS = 60
_MOST_RESTARTS = 40  # after kernels that end their process
_MEMORY, _ARRAY = (
    12 << 30,
    16 << 20,
)  # bytes of address space, and behind each pointer: more than kernels of these sizes index
_MOST_INSTANCES = 3  # of one template
_MOST_SRAM = 96 * 1024  # bytes, where a launch doesn't say how many
_ATTEMPTS = (
    (64, (2, 2, 1), (128, 1, 1)), (32, (1, 1, 1), (32, 1, 1)), (16, (1, 1, 1), (16, 16, 1)), (128, (1, 1, 1), (256, 1, 1)),
    (8, (1, 1, 1), (64, 1, 1)), (1, (1, 1, 1), (1, 1, 1)),
)  # fmt: skip
"""Ways to make up arguments: every integer is the first number; grid and block where the file doesn't say."""

KERNEL = row(
    "KernelRow", "A kernel, or an instance of a template, run with generated arguments: did it come to its end, or why not? What"
    " was found on the way isn't judged. `right`: its numbers are NumPy's; None: nobody wrote down what it computes.",
    name=str, ran=bool, right=bool | None, reason=str | None,
)  # fmt: skip
FILE = row("FileRow", "A file: whether all its kernels build, unchanged.", path=str, built=bool, reason=str | None,
           kernels=tuple[KERNEL, ...])  # fmt: skip
CHECKOUT = row("CheckoutRow", "A repository at a commit.", repository=str, commit=str, files=tuple[FILE, ...])
CORPUS = row("Corpus", "What became of the files of some repositories.", checkouts=tuple[CHECKOUT, ...])


def commit_of(checkout: Path) -> str:
    """The commit of a checkout. Raises `UsageError` for what is none."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise UsageError("checkout", str(checkout), "a folder that git knows")
    return asked.stdout.strip()


def sources_of(folder: Path, python: bool, most: int | None) -> list[Path]:
    """The files of a checkout that hold kernels; of many `most`, spread evenly over their order."""
    found: list[Path] = []
    for path in sorted(folder.rglob("*.py" if python else "*.cu")):
        if (
            path.is_file()
            and "__global__" in path.read_text(encoding="utf-8", errors="replace")
            and (not python or _holds(path))
        ):
            found.append(path)
    if most is None or len(found) <= most:
        return found
    return [found[i * len(found) // most] for i in range(most)]


def _holds(path: Path) -> bool:
    """Does a Python file give CUDA to one of the libraries that compile it?"""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        called = {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}
        return not called.isdisjoint(DOORS) and bool(embedded(path))
    except SyntaxError:  # of Python 2
        words = re.findall(r"(\w+)\(", path.read_text(encoding="utf-8", errors="replace"))
        return not DOORS.keys().isdisjoint(words) and bool(embedded(path))
    except (UsageError, ValueError):
        return False


def measured(
    checkouts: Sequence[Path], jobs: int = 1, python: bool = False, most: int | None = None
) -> list[dict[str, Any]]:
    """What became of the files of checkouts, as plain data for `CHECKOUT`. Raises `UsageError` for what is no checkout."""
    rows: list[dict[str, Any]] = []
    files: list[tuple[dict[str, Any], Path, Path]] = []
    for folder in checkouts:
        rows.append({"repository": folder.resolve().name.replace("__", "/"), "commit": commit_of(folder), "files": []})
        files += [(rows[-1], folder, path) for path in sources_of(folder, python, most)]
    stopped = Event()
    pool = ThreadPoolExecutor(jobs)
    try:
        tries = [pool.submit(tried, path, folder, stopped) for _, folder, path in files]
        with Progress(console=Console(stderr=True)) as bar:
            for done in bar.track(as_completed(tries), total=len(tries), description="files"):
                file = done.result()
                ran = f"built, {sum(x['ran'] for x in file['kernels'])} of {len(file['kernels'])} kernels ran"
                said = f"{file['path']}: {ran if file['built'] else file['reason']}"
                bar.console.print(said, markup=False, highlight=False, soft_wrap=True)
    finally:
        stopped.set()  # an interrupt reaches this thread alone: the others end their children, and come home
        pool.shutdown(cancel_futures=True)
    for (of, _, _), done in zip(files, tries, strict=True):
        of["files"].append(done.result())
    return rows


def tried(path: Path, checkout: Path, stopped: Event) -> dict[str, Any]:
    """What became of one file, as plain data for `FILE`, unless it was `stopped` on the way."""
    found: dict[str, Any] = {"path": str(path.relative_to(checkout)), "built": False, "reason": None, "kernels": []}
    names: Sequence[str] = ()
    died = None
    for _ in range(_MOST_RESTARTS):
        said, died = _child(path, len(found["kernels"]), stopped)
        for line in said:
            if "name" in line:
                found["kernels"].append({"right": None, **line})
            else:
                names = line.pop("names")
                found |= line
        if died is None or stopped.is_set() or not found["built"] or len(found["kernels"]) >= len(names):
            break
        found["kernels"].append({"name": names[len(found["kernels"])], "ran": False, "right": None, "reason": died})
    if not found["built"]:
        found["reason"] = found["reason"] or died
    for each in (found, *found["kernels"]):
        if each["reason"] is not None:  # at most 300 letters, without this machine's folders
            short = each["reason"].replace(f"{checkout.resolve()}/", "").replace(f"{checkout}/", "")
            each["reason"] = " ".join(short.split())[:300]
    return found


def _child(path: Path, first: int, stopped: Event) -> tuple[list[dict[str, Any]], str | None]:
    """What a process says that builds a file and runs its kernels from a number on, and why it ended before its time. Nothing that
    it started is left then: no compiler either."""
    command = [sys.executable, "-m", "studies", "corpus", "child", str(path.resolve()), str(first)]
    with TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)
        heard, deadline = 0, time.monotonic() + _SILENCE
        while process.poll() is None and time.monotonic() < deadline and not stopped.is_set():
            time.sleep(0.1)
            if (size := os.fstat(said.fileno()).st_size) > heard:
                heard, deadline = size, time.monotonic() + _SILENCE
        late = process.returncode is None
        end_child(process)
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").splitlines()  # a kernel may print, too
    ended = f"the process ended with status {process.returncode}" if process.returncode else None
    found = [json.loads(line)["corpus"] for line in lines if line.startswith('{"corpus": ')]
    return found, "the process took too long" if late else ended


# -- the process of a file --------------------------------------------------------------------------------------------


def child(path: Path, first: int) -> None:
    """Build a file and run its kernels. It prints a JSON document per line: of the build, then of each kernel."""

    def say(**line: Any) -> None:
        print(json.dumps({"corpus": line}), flush=True)

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    kernels: list[tuple[Library, Survey, str]] = []
    try:
        for options in builds_of(path):
            asked = options.pop("asked", ())
            found = survey(path, **options)
            names = entries_of(found, asked)
            library = build(path, entries=names, **options)
            kernels += [(library, found, name) for name in names]
    except (BuildError, UsageError) as error:
        lines = str(error).splitlines()  # what failed where, and the compiler's first error
        errors = [line.partition(" error: ")[2] for line in lines if " error: " in line]
        say(built=False, reason=" ".join([lines[0], *errors[:1]]), names=[])
        return
    say(built=True, reason=None, names=[name for _, _, name in kernels])
    for library, found, name in kernels[first:]:
        reason = run(library, found, name)
        say(name=name, ran=reason is None, reason=reason)


def builds_of(path: Path) -> list[dict[str, Any]]:
    """How a file is built: of a Python file each source in it, as the file says."""
    if path.suffix != ".py":
        return [{}]
    options = [(source, Own.of(source.options, path)) for source in embedded(path)]
    return [
        {
            "text": x.source,
            "macros": own.macros,
            "includes": own.includes,
            "std": own.std or "c++17",
            "asked": x.kernels,
        }
        for x, own in options
    ]


def entries_of(found: Survey, asked: Sequence[str] = ()) -> list[str]:
    """All kernels of a file, of each template the first instances that it names, or that are `asked` for.

    Raises `UsageError` for a file without any.
    """
    names = [kernel.name for kernel in found.kernels]
    entries = [name for name in asked if "<" in name][:_MOST_INSTANCES]
    for kernel in found.kernels:
        if not kernel.template and names.count(kernel.name) == 1:
            entries.append(kernel.name)
        elif kernel.template:
            entries += found.instances(kernel.name)[:_MOST_INSTANCES]
    if not entries:
        only = Said(", ".join(names) or "none")  # prototypes aren't among them
        raise UsageError("kernels", only, "one with its body, or a named instance of a template")
    return list(dict.fromkeys(entries))


def run(library: Library, found: Survey, entry: str) -> str | None:
    """None if a kernel comes to its end with any of the generated arguments; if not, what the first attempt met."""
    reasons: list[str] = []
    launches = found.of(entry.partition("<")[0])
    launches = [x for x in launches if x.instance == entry] or launches
    for size, grid, block in _ATTEMPTS:  # grid, block and dynamic SRAM are the file's where it says them in constants
        grid = next((x.grid for x in launches if x.grid and np.prod(x.grid) <= 64), grid)
        block = next((x.block for x in launches if x.block and np.prod(x.block) <= 1024), block)
        sram = min(next((x.sram for x in launches if x.sram), _MOST_SRAM), 227 * 1024)
        arena, limit = Arena(), _KERNEL_SECONDS / len(_ATTEMPTS)
        try:
            given = [argument(arena, i, wanted, size) for i, wanted in enumerate(library.parameters(entry))]
            launched = library.launch(entry, grid, block, given, arena, sram=sram, workers=1, time_limit=limit)
        except (UsageError, ValueError, MemoryError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if not launched.stopped:
            return None
        reasons.append(str(launched.findings[-1]) if launched.findings else "stopped")
    return reasons[0]


def argument(arena: Arena, index: int, wanted: Parameter, size: int) -> bytes:
    """The bytes of a generated argument: random numbers behind a pointer, small integers, one half, a struct of zeros."""
    random = np.random.default_rng(index)
    if wanted.passed != "v":
        n = _ARRAY // max(1, wanted.size)
        if wanted.kind in "iu":
            values = random.integers(0, 2, n).astype(f"{wanted.kind}{wanted.size or 1}")
        elif wanted.kind == "f":
            values = random.random(n).astype(f"f{wanted.size}")
        else:  # half, a vector, a struct: small halves are also small as floats
            values = random.random(_ARRAY // (2 if wanted.size == 2 else 4)).astype("f2" if wanted.size == 2 else "f4")
        arena.put(f"arg{index}", values)
        return np.uint64(arena.pointer(f"arg{index}")).tobytes()
    if wanted.kind in "iu":
        return np.array(min(size, 127 if wanted.size == 1 else size)).astype(f"{wanted.kind}{wanted.size}").tobytes()
    return np.array(0.5).astype(f"f{wanted.size}").tobytes() if wanted.kind == "f" else bytes(wanted.size)


# -- the result -------------------------------------------------------------------------------------------------------


def _counts(files: Sequence[Any]) -> tuple[int, ...]:
    """Files tried and built; their kernels, those that ran, and those whose numbers are right."""
    kernels = [kernel for file in files if file.built for kernel in file.kernels]
    ran, right = (sum(bool(getattr(kernel, name)) for kernel in kernels) for name in ("ran", "right"))
    return len(files), sum(file.built for file in files), len(kernels), ran, right


def headline(of: Any) -> str:
    tried, built, kernels, ran, right = _counts([file for checkout in of.checkouts for file in checkout.files])
    shares = [f"{100 * part / whole:.1f} %" if whole else "–" for part, whole in ((built, tried), (ran, kernels))]
    runs = f"{ran} of their {kernels} kernels ({shares[1]}) run to an end, {right} of them held to NumPy"
    return f"published kernels: {built} of {tried} files ({shares[0]}) build unchanged; {runs}"


def table(of: Any) -> str:
    """A row per repository."""
    rows = [(x.repository, x.commit[:9], *map(str, _counts(x.files))) for x in of.checkouts]
    return markdown_table(("repository", "commit", "files tried", "built", "kernels", "ran", "right"), rows)


KIND = Kind(
    "corpus", "Coverage: published kernels on the emulator",
    "which files of public repositories the emulator builds and runs unchanged", "python -m studies corpus", CORPUS,
    headline, table,
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    if words and words[0] == "child":
        child(Path(words[1]), int(words[2]))
        return
    parser = argparse.ArgumentParser("python -m studies corpus", description=KIND.holds)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", type=Path, help="a repository's folder")
    parser.add_argument("--python", action="store_true", help="try their .py files with CUDA in strings")
    parser.add_argument("--most", type=int, help="of a repository with more files so many, spread evenly")
    parser.add_argument("--subject", default="repositories", help="a word for them, for the file's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files tried at the same time (the cores)")
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    if given.jobs < 1:
        raise UsageError("jobs", given.jobs, "a number from 1 on")
    data = {"checkouts": measured(given.checkouts, given.jobs, given.python, given.most)}
    print(results.save(KIND, [], data, subject=given.subject, folder=given.out, replace=given.force))
