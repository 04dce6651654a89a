"""Published programs on the emulator: `python -m studies programs CHECKOUT… [--most N] [--true FILE]`.

Every `.cu` file with a `main` below the checkouts, or `--most` of each that a seed draws, is run unchanged by `flashlab run`,
without arguments, in the folder that it lies in. Nothing of the checkouts is copied; the result names their commits. What was
found isn't judged here: a person reads the source, and writes the paths whose findings are the program's own faults into the
file of `--true`, a line each. Native code of strangers runs here: use it on repositories that you trust.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from flashlab.measure import results
from flashlab.measure.results import Kind, markdown_table
from simulator.errors import UsageError
from studies.corpus import commit_of
from studies.rows import row

_MAIN = re.compile(r"^\s*(?:int|void|auto)\s+main\s*\(", re.MULTILINE)
_WRONG = re.compile(
    r"\b(fail(s|ed|ure)?|mismatch(es)?|incorrect|wrong|(doesn't|does not|do not) match)\b", re.IGNORECASE
)
_SLACK = 900  # seconds beside the limit, of a busy machine
_SHOWN = 400

PROGRAM = row(
    "ProgramRow", "A program, run unchanged and without arguments. `ended` is how: passed (status 0, nothing found), found (with"
    " findings), failed (another status), crash, time limit, not built, refused. `wrong`: its own output says that something is"
    " wrong. `true`: a person has read what was found, and it is a fault of the program's; None: nobody has.",
    path=str, ended=str, status=int | None, launches=int, findings=tuple[str, ...], notes=tuple[str, ...], wrong=bool,
    reason=str | None, true=bool | None,
)  # fmt: skip
CHECKOUT = row("ProgramsOf", "A repository at a commit.", repository=str, commit=str, programs=tuple[PROGRAM, ...])
PROGRAMS = row(
    "Programs", "What became of the programs of some repositories, each within so many seconds of processor time.",
    checkouts=tuple[CHECKOUT, ...], seconds=float,
)  # fmt: skip


def drawn(folder: Path, most: int | None, seed: int = 0) -> list[Path]:
    """The programs of a checkout, or so many of them."""
    sources = (path for path in sorted(folder.rglob("*.cu")) if path.is_file())
    found = [path for path in sources if _MAIN.search(path.read_text(encoding="utf-8", errors="replace"))]
    return found if most is None or most >= len(found) else sorted(Random(seed).sample(found, most))


def tried(path: Path, folder: Path, seconds: float, true: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What became of one program, as plain data for `PROGRAM`."""
    path, name = path.resolve(), str(path.relative_to(folder))
    said: dict[str, Any] = {
        "path": name, "ended": "refused", "status": None, "launches": 0, "findings": [], "notes": [], "wrong": False,
        "reason": None, "true": None,
    }  # fmt: skip
    command = [sys.executable, "-m", "flashlab", "run", str(path), "--json", "--time-limit", str(seconds)]
    try:
        done = subprocess.run(
            command, cwd=path.parent, capture_output=True, text=True, errors="replace", timeout=seconds + _SLACK, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return said | {"ended": "time limit", "reason": "it never came back"}
    if not done.stdout.startswith("{"):
        told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        built = any(word in done.stderr for word in ("doesn't compile", "can't be linked", "can't be preprocessed"))
        first = next((line for line in told if " error: " in line), told[0])
        return said | {"ended": "not built" if built else "refused", "reason": first[:_SHOWN]}
    document = json.loads(done.stdout)
    rows = [*document["findings"], *(x for each in document["launches"] for x in each["launch"]["findings"])]
    kinds = {x["kind"] for x in rows}
    ended = (
        "time limit" if "time limit" in kinds else "crash" if "crash" in kinds else "found" if rows
        else "failed" if document["status"] else "passed"
    )  # fmt: skip
    return said | {
        "ended": ended, "status": document["status"], "launches": sum(x["times"] for x in document["launches"]),
        "findings": [x["text"][:_SHOWN] for x in rows], "notes": [x["text"][:_SHOWN] for x in document["notes"]],
        "wrong": bool(_WRONG.search(document["printed"])),
        "reason": document["printed"].strip()[-_SHOWN:] if ended in ("failed", "crash") else None,
        "true": name in true if rows and true else None,
    }  # fmt: skip


def measured(
    checkouts: Sequence[Path], *, most: int | None, seconds: float, jobs: int, seed: int = 0,
    true: frozenset[str] = frozenset(),
) -> list[dict[str, Any]]:  # fmt: skip
    """What became of the programs of checkouts, as plain data for `CHECKOUT`. Raises `UsageError` for what is no checkout."""
    rows: list[dict[str, Any]] = [
        {"repository": x.resolve().name.replace("__", "/"), "commit": commit_of(x), "programs": []} for x in checkouts
    ]

    def one(of: dict[str, Any], path: Path, folder: Path) -> dict[str, Any]:
        done = tried(path, folder, seconds, true)
        told = done["findings"][0] if done["findings"] else done["reason"] or ""
        print(f"{of['repository']} {done['path']}: {done['ended']} {told[:200]}", file=sys.stderr, flush=True)
        return done

    with ThreadPoolExecutor(jobs) as pool:
        tries = [
            (of, pool.submit(one, of, path, folder))
            for of, folder in zip(rows, checkouts, strict=True)
            for path in drawn(folder, most, seed)
        ]
        for of, done in tries:
            of["programs"].append(done.result())
    return rows


def good(program: Any) -> bool:
    """Did it come to its end with its own check passing, or with a true finding?"""
    return bool(program.true) or (program.ended == "passed" and not program.wrong)


def headline(of: Any) -> str:
    """One line."""
    programs = [x for checkout in of.checkouts for x in checkout.programs]
    return (
        f"{sum(map(good, programs))} of {len(programs)} programs of {len(of.checkouts)} repositories came to their end with "
        f"their own check passing, or with a true finding ({sum(bool(x.true) for x in programs)})"
    )


def table(of: Any) -> str:
    """A row per repository."""
    kinds = ("passed", "found", "failed", "crash", "time limit", "not built", "refused")
    rows: list[tuple[str, ...]] = []
    for x in of.checkouts:
        n = Counter(each.ended for each in x.programs)
        true = sum(bool(each.true) for each in x.programs)
        rows.append((x.repository, x.commit[:9], str(len(x.programs)), *(str(n[kind]) for kind in kinds), str(true)))
    return markdown_table(("repository", "commit", "programs", *kinds, "true findings"), rows)


KIND = Kind(
    "programs", "Coverage: published programs on the emulator",
    "which programs of public repositories the emulator runs unchanged, host code and all", "python -m studies programs", PROGRAMS,
    headline, table,
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m studies programs", description=KIND.holds)
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT", type=Path, help="a repository's folder")
    parser.add_argument("--most", type=int, help="programs of a repository (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--seconds", type=float, default=120, help="of processor time for a program (120)")
    parser.add_argument("--true", type=Path, help="a file with the paths whose findings are true, a line each")
    parser.add_argument("--subject", default="courses", help="a word for the repositories, for the file's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="programs tried at the same time (the cores)")
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    if given.jobs < 1:
        raise UsageError("jobs", given.jobs, "a number from 1 on")
    true = frozenset(given.true.read_text(encoding="utf-8").split("\n")) if given.true else frozenset[str]()
    rows = measured(
        given.checkouts, most=given.most, seconds=given.seconds, jobs=given.jobs, seed=given.seed, true=true
    )
    data: dict[str, Any] = {"checkouts": rows, "seconds": given.seconds}
    print(results.save(KIND, [], data, subject=given.subject, folder=given.out, replace=given.force))
