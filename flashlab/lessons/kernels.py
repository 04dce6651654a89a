"""Check a learner's `.cu` file: run it in a child process, judge it here."""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from flashlab.base.process import ONE_THREAD, run_child
from flashlab.base.scratch import scratch
from flashlab.emulator import kernels_of
from flashlab.emulator.files import parameters_of
from flashlab.emulator.scan import Tokens
from flashlab.lessons.exercise import Truth
from flashlab.lessons.kernel_exercise import KernelExercise, Launch
from flashlab.lessons.reasons import told_apart
from flashlab.lessons.verdict import PATIENCE, TAMPERED, UNREADABLE, Line, Verdict, unended
from simulator.dtypes import Array

CHILD = "flashlab.lessons.kernel_child"
TUTORED = ("numbers", "bytes")
"""The kinds of verdicts that the first difference from the solution explains."""
ROUNDS = "passes"
"""The kind that a round too many of a loop explains."""
UNCHECKED = "bytes and misuse unchecked: that needs a C++ compiler"
"""Said of numbers that no emulator has watched."""
MORE_TIME = "If this has an end, more seconds= let it come there."
_VECTOR = re.compile(r"(?:u?(?:char|short|int|longlong)|float|double)[234]")
_OPERAND, _ENDS_A_NAME = re.compile(r"[\w.(]"), re.compile(r"[\w)\]>]$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def check(path: Path, exercise: KernelExercise, seconds: float) -> Verdict:
    """Judge a file by an exercise, on launches drawn anew. Raises nothing."""
    text, refusal = _text(path, exercise)
    if refusal:
        return refusal
    launches = exercise.launches(fresh())
    return _tutored(run_apart(path, text, exercise, launches, seconds), path, exercise, launches, seconds)


def run_apart(
    path: Path, text: str, exercise: KernelExercise, launches: Sequence[Launch], seconds: float, child: str = CHILD,
    environment: Mapping[str, str] = ONE_THREAD,
) -> Verdict:  # fmt: skip
    """The verdict on a file that a child process runs in such an environment."""
    with scratch() as folder:
        job = {"path": str(path.resolve()), "kernel": exercise.kernel, "launches": launches, "seconds": seconds}
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        outcome = run_child(folder, PATIENCE * seconds, child, environment)
        if outcome.kind == "no end":
            return unended(exercise.name, f"{path.name}: {outcome.message}", seconds, outcome.printed)
        if outcome.kind != "done":
            return Verdict(exercise.name, outcome.kind, f"{path.name}: {outcome.message}", printed=outcome.printed)
        try:
            verdict = of_files(exercise, text, launches, folder)
        except UNREADABLE:
            verdict = Verdict(exercise.name, "exit", TAMPERED)
    return replace(verdict, printed=outcome.printed)


def of_files(exercise: KernelExercise, text: str, launches: Sequence[Launch], folder: Path) -> Verdict:
    """The verdict on what the child wrote down."""
    results: list[dict[str, Any]] = []
    for n in range(len(launches)):
        if not (folder / f"launch{n}.json").exists():
            break
        arrays = dict(np.load(folder / f"arrays{n}.npz", allow_pickle=False))
        results.append(json.loads((folder / f"launch{n}.json").read_text(encoding="utf-8")) | {"arrays": arrays})
    error = folder / "error.json"
    why = json.loads(error.read_text(encoding="utf-8")) if error.exists() else None
    if not results and why is None:
        return Verdict(exercise.name, "exit", TAMPERED)
    verdict = judge(exercise, text, launches, results)
    return Verdict(exercise.name, why["kind"], why["message"]) if verdict.passed and why else verdict


def _tutored(
    verdict: Verdict, path: Path, exercise: KernelExercise, launches: Sequence[Launch], seconds: float
) -> Verdict:
    """The verdict with the first difference from the solution, on the launch at fault. Without a compiler there is none."""
    if verdict.kind not in (*TUTORED, ROUNDS) or UNCHECKED in verdict.sram:
        return verdict
    launch = next(launch for launch in launches if launch.said == verdict.problem)
    with scratch() as folder:
        tutor = {
            "exercise": exercise.name,
            "launch": launch,
            "moved": moved_of(verdict),
            "rounds": verdict.kind == ROUNDS,
        }
        job = {"path": str(path.resolve()), "kernel": exercise.kernel, "tutor": tutor, "seconds": seconds}
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        run_child(folder, PATIENCE * seconds, CHILD)
        try:
            found = json.loads((folder / "tutor.json").read_text(encoding="utf-8"))
            return replace(verdict, tutor=str(found["words"]), step=str(found["step"]))
        except UNREADABLE:  # the tutor has nothing to say
            return verdict


def moved_of(verdict: Verdict) -> tuple[str, str] | None:
    """The array of which a kernel moves other bytes than it should, and the way; None if the numbers are wrong."""
    off = next((line for line in verdict.budget if not line.equal), None)
    return (off.tensor, off.way) if off and verdict.kind == "bytes" else None


def fresh() -> Random:
    """Where a check's launches are drawn from: anew each time."""
    return Random()


# -- before anything runs -----------------------------------------------------------------------------------------


def text_of(path: Path, exercise: KernelExercise) -> tuple[str, Verdict | None]:
    """The file's text, or why there is none to judge yet."""
    if not path.is_file():
        message = f"file = {str(path)!r}: expected a {exercise.suffix} file, and there is none of this name"
        return "", Verdict(exercise.name, "usage", message)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return "", Verdict(
            exercise.name, "usage", f"file = {str(path)!r}: expected a source that can be read ({error})"
        )
    if _squeezed(text) == _squeezed(exercise.skeleton):
        message = f"fill in what is missing in {path.name}, then check it again"
        return text, Verdict(exercise.name, "not started", message)
    return text, None


def _text(path: Path, exercise: KernelExercise) -> tuple[str, Verdict | None]:
    """The file's text, or why it need not be compiled."""
    text, refusal = text_of(path, exercise)
    if refusal:
        return text, refusal
    if exercise.kernel not in (found := kernels_of(text)):
        has = "has " + ", ".join(found) if found else "has no __global__ function"
        message = f"expected __global__ void {exercise.kernel}({exercise.parameters}), and {path.name} {has}"
        return text, Verdict(exercise.name, "missing kernel", message)
    if (yours := _parameters(text, exercise.kernel)) != _normal(exercise.parameters) or not parameters_of(
        text, exercise.kernel
    ):
        message = f"{exercise.kernel} takes ({exercise.parameters}); yours takes ({', '.join(yours)})"
        return text, Verdict(exercise.name, "parameters", message)
    if found := _cast_to_a_vector(text):
        line, vector = found
        message = (
            f"{path.name}:{line}: error: ({vector}) is no cast of one number: make_{vector}(…) makes a {vector}, and "
            f"*reinterpret_cast<const {vector}*>(p) loads one  |  {text.splitlines()[line - 1].strip()}"
        )
        return text, Verdict(exercise.name, "compile error", message)
    return text, None


def _cast_to_a_vector(text: str) -> tuple[int, str] | None:
    """Line and type of the first cast as in `(float4)x[i]`, which nvcc refuses. g++ takes it, by the emulator's constructors."""
    tokens = Tokens.of(text)
    for i, (before, opens, vector, closes, behind) in enumerate(
        zip(*(tokens.words[n:] for n in range(5)), strict=False)
    ):
        is_cast = opens == "(" and closes == ")" and _VECTOR.fullmatch(vector) and _OPERAND.match(behind)
        if is_cast and (before == "return" or not _ENDS_A_NAME.search(before)):
            return text.count("\n", 0, tokens.starts[i + 1]) + 1, vector
    return None


def _squeezed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _parameters(text: str, kernel: str) -> list[str]:
    """A kernel's parameters, written in one way."""
    found = re.search(rf"__global__[^;{{]*?\b{kernel}\s*\(([^)]*)\)\s*{{", _COMMENT.sub("", text))
    return _normal(found[1]) if found else []


def _normal(parameters: str) -> list[str]:
    """`const` first, stars at the type, no promises about aliasing."""

    def one(part: str) -> str:
        words = re.findall(r"\w+|\*", re.sub(r"\b__restrict__\b|\bconst\b", "", part))
        const = "const " if "const" in part and "*" in part else ""
        return const + " ".join(words[:-1]).replace(" *", "*") + f" {words[-1]}" if words else ""

    return [one(part) for part in parameters.split(",")]


# -- the judge ----------------------------------------------------------------------------------------------------


def judge(
    exercise: KernelExercise, text: str, launches: Sequence[Launch], results: Sequence[Mapping[str, Any]]
) -> Verdict:
    """The verdict on what came out of the launches; what never ran is not judged."""
    source = text.splitlines()
    verdicts: list[Verdict] = []
    for launch, result in zip(launches, results, strict=False):
        verdicts.append(_of_launch(exercise, source, launch, result))
        if not verdicts[-1].passed:
            return verdicts[-1]
    if not verdicts:
        return Verdict(exercise.name, "passed")
    if message := _other_bits(launches, results):
        return replace(verdicts[0], kind="bits", message=message, afterwards=exercise.slips.get("bits", ""))
    if exercise.rule and (found := exercise.rule(text)):
        line, what = found
        message = _with_its_line(f"{exercise.file}:{line}: {what}", source, line)
        return replace(verdicts[0], kind="asked", message=message, afterwards="")
    drawn = f"on this launch and {len(launches) - 1} that were drawn for this check"
    return replace(verdicts[0], message=drawn)  # the first is the same in every check


def _of_launch(exercise: KernelExercise, source: Sequence[str], launch: Launch, result: Mapping[str, Any]) -> Verdict:
    found = [_with_its_line(text, source, line) for _, text, line in result["findings"]]
    if found:
        kinds = {"deadlock": "hang", "time limit": "hang", "out of bounds": "out of bounds"}
        first = result["findings"][0][0]
        return Verdict(
            exercise.name, kinds.get(first, "misuse"), found[0], findings=tuple(found[1:]), problem=launch.said,
            afterwards=MORE_TIME if first == "time limit" else exercise.slips.get(first, ""),
        )  # fmt: skip
    moved = result["moved"]
    lines = () if moved is None else _lines(moved, launch.budget)
    where = "numbers from the GPU" if result["where"] == "gpu" else "run on the emulator"
    if moved is None:
        where += f"; {UNCHECKED}"
    passed = Verdict(exercise.name, "passed", "", lines, launch.said, sram=where, afterwards=exercise.afterwards)
    for name, truth in launch.truth.items():
        if message := _wrong(name, truth, result["arrays"][name], launch, result["unwritten"].get(name, 0)):
            return replace(passed, kind="numbers", message=message, afterwards="")
    lines = tuple(replace(line, right=True) for line in lines)
    passed = replace(passed, budget=lines)
    if off := [line for line in lines if not line.equal]:
        first = off[0]
        message = f"{first.tensor} {first.way}: you moved {first.moved:,} bytes, the budget is {first.budget:,}: {first.verdict}"
        return replace(passed, kind="bytes", message=message, afterwards=exercise.slips.get(first.tensor, ""))
    if moved is not None and result["flops"] < launch.matmul:
        message = f"mma: {result['flops']:,} FLOPs of tensor cores, this takes {launch.matmul:,} (on {launch.said})"
        return replace(passed, kind="arithmetic", message=message, afterwards=exercise.slips.get("arithmetic", ""))
    if moved is not None and (extra := _over(exercise, launch, moved)):
        return replace(passed, kind=extra[0], message=extra[1], afterwards=exercise.slips.get(extra[0], ""))
    if moved is not None and exercise.score:
        return replace(passed, sram=f"{where}; {exercise.score(launch, moved)}")
    return passed


def _other_bits(launches: Sequence[Launch], results: Sequence[Mapping[str, Any]]) -> str:
    """The first output that has other bits than in a launch of the same data, in words; empty if there is none."""
    first: dict[str, tuple[Launch, Mapping[str, Array]]] = {}
    for launch, result in zip(launches, results, strict=False):
        before, due = first.setdefault(launch.alike or launch.said, (launch, result["arrays"]))
        for name, x in result["arrays"].items():
            if not np.array_equal(x, due[name]):
                place = tuple(int(n) for n in np.argwhere(x != due[name])[0])
                tile = f"row tile {place[-2 if x.ndim > 1 else -1] // launch.tile}"
                here, there = (f"{float(of[place]):.9g}" for of in (x, due[name]))
                return (
                    f"{name}[{', '.join(map(str, place))}], in {tile}, is {here} on {launch.said}, and {there} on {before.said}: "
                    "the same numbers, added in another order"
                )
    return ""


def _with_its_line(finding: str, source: Sequence[str], line: int) -> str:
    """A finding, and the learner's line that it is about."""
    return f"{finding}  |  {source[line - 1].strip()}" if 0 < line <= len(source) else finding


def _lines(moved: Sequence[Mapping[str, Any]], budget: Mapping[str, tuple[int, int]]) -> tuple[Line, ...]:
    """Every tensor that was moved between HBM and the chip, or should have been, against the budget."""
    mine: defaultdict[tuple[str, str], int] = defaultdict(int)
    for row in moved:
        if row["space"] == "hbm":
            mine[row["tensor"], "read" if row["what"] == "hbm.read" else "written"] += row["bytes"]
    names = [*budget, *dict.fromkeys(tensor for tensor, _ in mine if tensor not in budget)]
    lines = [
        Line(name, way, mine[name, way], budget.get(name, (0, 0))[w])
        for name in names
        for w, way in enumerate(("read", "written"))
    ]
    return tuple(line for line in lines if line.moved or line.budget)


def _wrong(name: str, truth: Truth, out: Array, launch: Launch, unwritten: int) -> str:
    """The first wrong element of an output and the tile that it is in, in words; empty if all are right."""
    wrong = truth.wrong(out)
    if not wrong.any():
        return ""
    place = tuple(int(n) for n in np.argwhere(wrong)[0])
    row = place[-2] if out.ndim > 1 else place[-1]
    tile = f"row tile {row // launch.tile}"
    yours, due = told_apart(float(out[place]), float(truth.out[place]))
    never = f"; {unwritten:,} bytes of {name} were never written" if unwritten else ""
    many = f"{int(wrong.sum()):,} of {wrong.size:,} elements are wrong" if wrong.sum() > 1 else "all others are right"
    ratio = ""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = (out[wrong] / truth.out[wrong]).astype(np.float64)
    if quotients.size > 1 and np.isfinite(quotients).all() and np.ptp(quotients) < 0.02 * abs(np.median(quotients)):
        ratio = f", all of them {np.median(quotients):.4g} times what they should be"
    element = f"{name}[{', '.join(map(str, place))}]"
    return f"{element}, in {tile}, is {yours} and should be {due} (on {launch.said}); {many}{ratio}{never}"


def _over(exercise: KernelExercise, launch: Launch, moved: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """What takes more instructions, sectors or passes over the banks than it needs, or waits where it could work."""
    for (tensor, way, quantity), most in launch.most.items():
        what = "hbm.read" if way == "read" else "hbm.write"
        mine = sum(row[quantity] for row in moved if (row["tensor"], row["what"]) == (tensor, what))
        if mine > most:
            unit = "sectors of 32 bytes" if quantity == "sectors" else "warp instructions"
            return quantity, f"{tensor} {way}: {mine:,} {unit}, the budget is {most:,} (on {launch.said})"
    on_chip = [row for row in moved if row["space"] != "hbm"]  # SRAM, and shuffles, which go the same way
    made = sum(row["wavefronts"] for row in on_chip)
    if launch.passes is not None and made > launch.passes:
        most = max(on_chip, key=lambda row: row["wavefronts"])
        way = {"sram.read": "read in SRAM", "sram.write": "written in SRAM"}.get(most["what"], most["what"])
        message = f"{most['tensor']} {way}: {most['wavefronts']:,} of {made:,} passes over the banks"
        return "passes", f"{message}; the budget is {launch.passes:,} in all (on {launch.said})"
    for tensor, least in launch.overlapped.items():
        mine = sum(row["overlapped"] for row in moved if (row["tensor"], row["what"]) == (tensor, "sram.read"))
        if mine < least:
            message = (
                f"{tensor} read in SRAM: {mine:,} bytes of it while a copy was on its way, where at least {least:,} "
                f"should be (on {launch.said})"
            )
            return "overlap", message
    if exercise.conflict_free:
        for row in moved:
            if row["wavefronts"] > row["ideal"]:
                way = "read" if row["what"] == "sram.read" else "written"
                message = (
                    f"{row['tensor']} {way} in SRAM: {row['wavefronts']:,} passes over the banks, "
                    f"{row['ideal']:,} would do: bank conflicts (on {launch.said})"
                )
                return "conflicts", message
    return None
