"""Faults in published kernels: edits of single lines of files that aren't here, and what must be found.

`published_faults.json` has two tables. A launch says which kernel of which file of which repository (as owner/name, at a
commit) is run on what. A fault says which line of that launch's file becomes what, and of what kind a finding must be at which
lines. The line's old text is known by its digest alone, for the file is another's.

`python -m tests.flashlab.emulator.published FOLDER` runs them all on the checkouts in a folder (owner__name).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import flashlab as fl
from flashlab.emulator.apart import emulate_apart
from flashlab.emulator.build import survey

TABLE = Path(__file__).parent / "published_faults.json"

ALIKE = "the numbers are the same with whatever the variable holds"
LATE = "it is found at the store that depends on the variable, not at the variable: g++ 12 doesn't warn of it"
MISSED = {
    ("llm softmax 2", 133): ALIKE,
    ("flash minimal", 43): ALIKE,
    ("sgemm 8x8", 128): LATE,
    ("sgemm 8x8 bcf dbuf", 365): LATE,
    ("llm matmul 4", 142): LATE,
}
"""The faults that aren't caught at their line, by launch and line, and why."""


@dataclass(frozen=True)
class Launch:
    """A launch of a published kernel. `args` are in order: numbers, or dtype[shape] with what it holds behind a colon."""

    repo: str
    commit: str
    file: str
    kernel: str
    grid: list[int]
    block: list[int]
    args: list[Any]
    sram: int = 0

    def path(self, checkouts: Path) -> Path:
        return checkouts / self.repo.replace("/", "__") / self.file


@dataclass(frozen=True)
class Fault:
    """One line changed: `cut` characters from `column` on become `put`. `was` is the start of the SHA-256 of the line's old text,
    without the blanks around it. A finding of one of the `kinds` at one of the `lines` is the right one."""

    launch: str
    line: int
    was: str
    column: int
    cut: int
    put: str
    kinds: list[str]
    lines: list[int]

    def edited(self, text: str) -> str:
        lines = text.split("\n")
        if digest(lines[self.line - 1]) != self.was:
            raise ValueError(f"line {self.line} of {self.launch} isn't what it was: another commit?")
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.column] + self.put + old[self.column + self.cut :]
        return "\n".join(lines)

    def found_in(self, findings: Iterable[fl.emulator.Finding]) -> bool:
        """Is a finding of one of its kinds at one of its lines, as the line that did it or as the other party's?"""
        return any(
            x.kind in self.kinds and {y.number for y in (x.at, x.other_at) if y} & set(self.lines) for x in findings
        )


def digest(line: str) -> str:
    return hashlib.sha256(line.strip().encode()).hexdigest()[:12]


def table() -> tuple[dict[str, Launch], list[Fault]]:
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return (
        {name: Launch(**row) for name, row in content["launches"].items()},
        [Fault(**row) for row in content["faults"]],
    )


def run(launch: Launch, checkouts: Path, text: str | None = None) -> tuple[fl.emulator.Finding, ...]:
    """The findings of a launch, of the file as it is or with another text."""
    path = launch.path(checkouts)
    root = checkouts / launch.repo.replace("/", "__")
    names = [x.parameters for x in survey(path).kernels if x.name == launch.kernel.split("<")[0]]
    given = {name: value(arg, i) for i, (name, arg) in enumerate(zip(names[0], launch.args, strict=True))}
    with TemporaryDirectory() as folder:
        file = path
        if text is not None:
            file = Path(folder) / path.name
            file.write_text(text, encoding="utf-8")
        includes = [path.parent, *(x for x in path.parents if root in x.parents or x == root)]
        done = emulate_apart(
            file, given, kernel=launch.kernel, grid=launch.grid, block=launch.block, sram=launch.sram, time_limit=20,
            includes=list(dict.fromkeys(includes)) if text is not None else [],
        )  # fmt: skip
    return done.launched.findings


def value(arg: Any, seed: int) -> Any:
    """An argument: a number, or an array as the table spells it."""
    if not isinstance(arg, str):
        return arg
    described, _, holds = arg.partition(":")
    dtype, _, extents = described.rstrip("]").partition("[")
    shape = tuple(map(int, extents.split(",")))
    if holds == "out":
        return fl.Empty(shape, dtype)
    if holds == "zeros":
        return np.zeros(shape, dtype)
    if holds == "-inf":
        return np.full(shape, -np.inf, dtype)
    random = np.random.default_rng(seed)
    return (
        random.standard_normal(shape).astype(dtype) if dtype[0] == "f" else random.integers(0, 100, shape).astype(dtype)
    )


def faulty(fault: Fault, launches: Mapping[str, Launch], checkouts: Path) -> tuple[fl.emulator.Finding, ...]:
    launch = launches[fault.launch]
    text = launch.path(checkouts).read_text(encoding="utf-8-sig")
    return run(launch, checkouts, fault.edited(text))


def main(checkouts: Path) -> int:
    """Run everything, print what was missed, and return how many faults were."""
    launches, faults = table()
    with ThreadPoolExecutor(2) as pool:
        originals = dict(zip(launches, pool.map(lambda x: run(x, checkouts), launches.values()), strict=True))
        for name, findings in originals.items():
            for finding in findings:
                print(f"original {name}: {finding}")
        results = list(pool.map(lambda x: faulty(x, launches, checkouts), faults))
    missed = [(x, found) for x, found in zip(faults, results, strict=True) if not x.found_in(found)]
    for fault, found in missed:
        said = "; ".join(map(str, found)) or "nothing"
        print(f"missed: {fault.launch}, line {fault.line}, {fault.put!r} for {fault.cut} characters: {said}")
    alarms = sum(map(bool, originals.values()))
    print(f"{len(faults) - len(missed)} of {len(faults)} faults, {alarms} findings in {len(launches)} originals")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) > 0)
