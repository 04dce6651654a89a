"""Builds one published file and runs its kernels with generated arguments: the process that `corpus` starts.

It prints a JSON document per line: first what became of the build, then a line for each kernel.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.emulator.build import BuildError, build, survey
from flashlab.emulator.library import Arena, Launched, Library, Parameter
from flashlab.emulator.source import Survey
from flashlab.measure import corpus_answers
from simulator.errors import Said, UsageError

_MEMORY = 12 << 30  # bytes of address space
_ARRAY = 16 << 20  # bytes behind each pointer: more than kernels of these sizes index
_MOST_INSTANCES = 3  # of one template
_MOST_SRAM = 96 * 1024  # bytes, where a launch doesn't say how many


@dataclass(frozen=True)
class Attempt:
    """A way to make up arguments: every integer is `size`; `block` and `grid` where the file doesn't say."""

    size: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


_ATTEMPTS = (
    Attempt(64, (2, 2, 1), (128, 1, 1)),
    Attempt(32, (1, 1, 1), (32, 1, 1)),
    Attempt(16, (1, 1, 1), (16, 16, 1)),
    Attempt(128, (1, 1, 1), (256, 1, 1)),
    Attempt(8, (1, 1, 1), (64, 1, 1)),
    Attempt(1, (1, 1, 1), (1, 1, 1)),
)


def main() -> None:
    path, first, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        found = survey(path)
        names = entries_of(found)
        library = build(path, entries=names)
    except (BuildError, UsageError) as error:
        say({"built": False, "reason": reason_of(str(error)), "names": []})
        return
    say({"built": True, "reason": None, "names": names})
    for name in names[first:]:
        ran, reason = run(library, found, name, seconds)
        right, wrong = corpus_answers.judged(path, library, name) if ran else (None, None)
        say({"kernel": name, "ran": ran, "right": right, "reason": reason or wrong})


def say(line: dict[str, Any]) -> None:
    print(json.dumps({"corpus": line}), flush=True)


def reason_of(said: str) -> str:
    """A build's failure in one line: what failed where, and the compiler's first error."""
    lines = said.splitlines()
    errors = [line.partition(" error: ")[2] for line in lines if " error: " in line]
    return " ".join([lines[0], *errors[:1]])


def entries_of(found: Survey) -> list[str]:
    """All kernels of a file, of each template the first instances that the file names.

    Raises `UsageError` for a file that has none.
    """
    names = [kernel.name for kernel in found.kernels]
    entries: list[str] = []
    for kernel in found.kernels:
        if not kernel.template and names.count(kernel.name) == 1:
            entries.append(kernel.name)
        elif kernel.template:
            entries += found.instances(kernel.name)[:_MOST_INSTANCES]
    if not entries:
        only = Said(", ".join(names) or "none")  # prototypes aren't among them
        raise UsageError("kernels", only, "one with its body, or a named instance of a template")
    return list(dict.fromkeys(entries))


def run(library: Library, found: Survey, entry: str, seconds: float) -> tuple[bool, str | None]:
    """Whether a kernel comes to its end with any of the generated arguments; if not, what the first attempt met."""
    reasons: list[str] = []
    for attempt in _ATTEMPTS:
        try:
            launched = launch(library, found, entry, attempt, seconds / len(_ATTEMPTS))
        except (UsageError, ValueError, MemoryError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if not launched.stopped:
            return True, None
        reasons.append(str(launched.findings[-1]) if launched.findings else "stopped")
    return False, reasons[0]


def launch(library: Library, found: Survey, entry: str, attempt: Attempt, seconds: float) -> Launched:
    arena = Arena()
    given = [argument(arena, i, wanted, attempt.size) for i, wanted in enumerate(library.parameters(entry))]
    grid, block, sram = next(shapes(found, entry, attempt))
    return library.launch(entry, grid, block, given, arena, sram=sram, workers=1, time_limit=seconds)


def shapes(found: Survey, entry: str, attempt: Attempt) -> Iterator[tuple[Sequence[int], Sequence[int], int]]:
    """Grid, block and dynamic SRAM: the file's where it says them in constants."""
    launches = found.of(entry.partition("<")[0])
    launches = [x for x in launches if x.instance == entry] or launches
    grid = next((x.grid for x in launches if x.grid and np.prod(x.grid) <= 64), attempt.grid)
    block = next((x.block for x in launches if x.block and np.prod(x.block) <= 1024), attempt.block)
    sram = next((x.sram for x in launches if x.sram), _MOST_SRAM)
    yield grid, block, min(sram, 227 * 1024)


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
            values = (
                random.random(_ARRAY // 2).astype("f2") if wanted.size == 2 else random.random(_ARRAY // 4).astype("f4")
            )
        arena.put(f"arg{index}", values)
        return np.uint64(arena.pointer(f"arg{index}")).tobytes()
    if wanted.kind in "iu":
        return np.array(min(size, 127 if wanted.size == 1 else size)).astype(f"{wanted.kind}{wanted.size}").tobytes()
    if wanted.kind == "f":
        return np.array(0.5).astype(f"f{wanted.size}").tobytes()
    return bytes(wanted.size)


if __name__ == "__main__":
    main()
