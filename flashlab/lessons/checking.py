"""Check a learner's program: run it in a child process, judge it here.

It guards against accidents and against fooling oneself, not against strangers: what is checked runs with the rights of
whoever checks it.
"""

from __future__ import annotations

import json
import linecache
import os
import pickle
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from flashlab.base.process import IN_A_BROWSER, run_child
from flashlab.base.scratch import scratch
from flashlab.lessons import classes, record
from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, KERNEL_EXERCISES, TRITON_EXERCISES, solution
from flashlab.lessons.exercise import Budget, Case, Exercise, Truth
from flashlab.lessons.lines import at_line, squeezed
from flashlab.lessons.reasons import told_apart
from flashlab.lessons.rules import Did
from flashlab.lessons.verdict import PATIENCE, TAMPERED, UNREADABLE, Line, Place, Verdict, stopped, unsent
from flashlab.lessons.watch import REGISTERS
from simulator import CATALOGUE, Device, Program, Tile, Trace
from simulator.dtypes import Array
from simulator.errors import UsageError, unknown

SECONDS = 5.0
"""The processor time that a program may take for all its problems together; a correct one takes half a second. By the clock it
is `PATIENCE` times as long, and so long a reader waits for an endless loop at most."""
CHILD = "flashlab.lessons.child"
_DAY = 86_400


def check(answer: Any, *, exercise: str, seconds: float = SECONDS) -> Verdict:
    """Check a tile program, a class, a function of a rank, or a `.cu` file, against an exercise. The verdict shows itself.

    Nothing is raised.

    The program runs in a child process, with limits on time and memory and a folder of its own, on problems drawn anew.
    `seconds` are of a processor's time, so a busy machine makes no hang; by the clock it may take four times as long. Its
    numbers must be right, and its bytes must equal the budget, tensor by tensor. That guards against accidents and short
    cuts; it is no sandbox for strangers' code, which runs with your rights.

    A class is held to a model, by many histories of calls: the shortest that breaks it is shown. A function of a rank runs on
    several ranks in NumPy, and its bytes on the link are counted.

    A `.cu` file is run on the emulator, which counts its bytes and finds its misuse of the machine, and, where there is a
    GPU, there too: its numbers are then the GPU's. What has wrong numbers or bytes runs in step with the solution, and the
    verdict's `tutor` names the first difference.

    >>> import os; os.environ["FLASHLAB_HOME"] = os.getcwd()
    >>> import flashlab as fl
    >>> fl.check("flash2", exercise="00.1")
    00.1  Short cut: "flash2" is the library's own: the exercise is to write one
    """
    name = str(exercise)
    if type(seconds) not in (int, float) or not 0 < seconds <= _DAY:
        return Verdict(name, "usage", str(UsageError("seconds", seconds, "a number of seconds above 0, up to a day")))
    posed = {**EXERCISES, **KERNEL_EXERCISES, **TRITON_EXERCISES, **CLASS_EXERCISES}
    if name not in posed:
        return Verdict(name, "usage", str(unknown("exercise", exercise, posed)))
    end = ".cu" if name in KERNEL_EXERCISES else ".py" if name in TRITON_EXERCISES else ""
    is_file = isinstance(answer, str | os.PathLike) and Path(answer).suffix in (".cu", ".py")  # pyright: ignore[reportUnknownArgumentType]
    if (Path(answer).suffix if is_file else "") != end:  # pyright: ignore[reportUnknownArgumentType]
        a_class = f"{CLASS_EXERCISES[name].asked}: the thing itself, no text" if name in CLASS_EXERCISES else ""
        a_file = f'the name of a {end} file, as in fl.check("mine{end}", exercise="{name}")'
        return Verdict(
            name,
            "usage",
            f"exercise {name} takes {a_file if end else a_class or 'a tile program'}",
        )
    if end and IN_A_BROWSER:
        needs = "a C++ compiler" if end == ".cu" else "Triton"
        return Verdict(name, "usage", f"a {end} file needs {needs}, and a browser has none: see `flashlab lessons`")
    if end == ".py":
        from flashlab.lessons import tritons

        verdict = tritons.check(Path(answer), TRITON_EXERCISES[name], seconds)  # pyright: ignore[reportUnknownArgumentType]
    elif end:
        from flashlab.lessons import kernels  # it brings the emulator

        verdict = kernels.check(Path(answer), KERNEL_EXERCISES[name], seconds)  # pyright: ignore[reportUnknownArgumentType]
    elif name in CLASS_EXERCISES:
        verdict = classes.check(answer, CLASS_EXERCISES[name], seconds)
    else:
        program, refusal = _program(answer, EXERCISES[name])
        verdict = refusal or _judged(program, EXERCISES[name], seconds)
    if verdict.kind != "not started":
        before = record.read()["exercises"].get(name, {})
        tries = before.get("tries", 0)
        record.note(
            "exercises",
            name,
            tries=(tries if isinstance(tries, int) else 0) + 1,
            passed=verdict.passed or bool(before.get("passed")),
        )
    return verdict


# -- before anything runs -----------------------------------------------------------------------------------------


def _program(answer: Any, exercise: Exercise) -> tuple[Program, Verdict | None]:
    """The learner's program, or why it is none of theirs."""
    own = {row.name: row.program for row in CATALOGUE.values()}
    nobody = next(iter(own.values()))
    for name, program in own.items():
        if answer is program or (isinstance(answer, str) and answer == name):
            message = f'"{name}" is the library\'s own: the exercise is to write one'
            return nobody, Verdict(exercise.name, "short cut", message)
    if not isinstance(answer, Program):
        what = getattr(answer, "__name__", type(answer).__name__)
        message = f"{what} is no tile program: write @fl.program above it, and hand over the function itself"
        return nobody, Verdict(exercise.name, "usage", message)
    if answer.operation.name != (due := solution(exercise.name).operation.name):
        above = "@fl.program" if due == "attention" else f'@fl.program(operation="{due}")'
        message = f"{answer.name} is a program of {answer.operation.name}, and this asks for one of {due}: write {above} above it"
        return nobody, Verdict(exercise.name, "usage", message)
    if _code_of(answer) == squeezed(exercise.skeleton):
        return answer, Verdict(
            exercise.name, "not started", "fill in what is missing, run its cell, then this one again"
        )
    return answer, None


def _code_of(program: Program) -> str | None:
    """The text of the cell or file that a program is from, without what does not matter."""
    lines = linecache.getlines(program.body.__code__.co_filename)
    return squeezed("".join(lines)) if lines else None


# -- the child ----------------------------------------------------------------------------------------------------


def _job(
    program: Program, exercise: Exercise, cases: list[Case], seconds: float, head: tuple[int, int] | None = None, *,
    values: bool = True,
) -> bytes:  # fmt: skip
    """Everything that the child needs; the program goes by value, with the text that its lines are in.

    With a `head` it runs that one (batch, head) of the case in step with the solution, and else all cases. It then compares
    `values`, or only what is moved.
    """
    file = program.body.__code__.co_filename
    job: dict[str, Any] = {
        "program": cloudpickle.dumps(program),  # pyright: ignore[reportUnknownMemberType]
        "file": file,
        "lines": linecache.getlines(file),
        "cases": cases,
        "exercise": exercise.name,
        "seconds": seconds,
        "head": head,
        "values": values,
        "path": [os.path.abspath(entry) for entry in sys.path],
    }
    return pickle.dumps(job)


def fresh() -> random.Random:
    """Where a check's problems are drawn from: anew each time."""
    return random.Random()


# -- the judge ----------------------------------------------------------------------------------------------------


def _judged(program: Program, exercise: Exercise, seconds: float) -> Verdict:
    cases = exercise.cases(fresh())
    file = program.body.__code__.co_filename
    with scratch() as folder:
        try:
            (folder / "job.pickle").write_bytes(_job(program, exercise, cases, seconds))
        except Exception as error:
            return unsent(exercise.name, error)
        outcome = run_child(folder, PATIENCE * seconds, CHILD)
        if (ended := stopped(exercise.name, outcome, folder, file, seconds)) is not None:
            return ended
        verdicts: list[Verdict] = []
        for n, case in enumerate(cases):
            try:
                if not (folder / f"case{n}.json").exists():
                    return _tutored(_failed(exercise, case, folder, file, outcome.printed), program, exercise, case)
                verdicts.append(_judged_case(exercise, case, folder, n, outcome.printed))
            except UNREADABLE:
                return Verdict(exercise.name, "exit", TAMPERED, printed=outcome.printed)
            if not verdicts[-1].passed:
                return _tutored(verdicts[-1], program, exercise, case)
    drawn = f"on this problem and {len(cases) - 1} that were drawn for this check"
    return replace(verdicts[0], message=drawn)  # the first problem is the same in every check


def _failed(exercise: Exercise, case: Case, folder: Path, file: str, printed: str) -> Verdict:
    """A case that did not come to its end."""
    error = _read(folder / "error.json")
    message = f"{error['message']}{at_line(error['line'], file)} (on {_said(case)})"
    if case.own_tile and error["tile"]:
        message += f": {_which(error['tile'], exercise, case)}"
    return Verdict(exercise.name, error["kind"], message, printed=printed)


def _judged_case(exercise: Exercise, case: Case, folder: Path, n: int, printed: str) -> Verdict:
    result = _read(folder / f"case{n}.json")
    budget = exercise.budget(case.problem, case.tile)
    lines = _lines(result["tensors"], budget.tensors) + _sram_lines(result["sram"], budget.sram)
    limit, peak = Device.named(case.device).sram_per_block, result["sram_peak"]
    held = result["registers"]
    sram = f"SRAM: {peak:,} of {limit:,} bytes of a block at most; registers: {-(-held // 1024)} of {REGISTERS // 1024} KB of an SM"
    passed = Verdict(
        exercise.name, "passed", "", lines, _said(case), sram=sram, afterwards=exercise.afterwards, printed=printed
    )
    truth = exercise.truth(case.problem, *case.arrays().values())
    for due in (truth, *truth.also):
        out: Array = np.load(folder / f"{due.of}{n}.npy", allow_pickle=False)
        if (wrong := due.wrong(out)).any():
            stored: Array = np.load(folder / f"{due.of}_stored{n}.npy", allow_pickle=False)
            place, message = _first_wrong_tile(exercise, case, due, out, wrong, stored)
            return replace(passed, kind="numbers", message=message, afterwards="", place=place)
    if truth.lse is not None and (found := _wrong_lse(case, truth, folder / f"lse{n}.npy")):
        return replace(passed, kind="numbers", message=found[1], afterwards="", place=found[0])
    lines = tuple(replace(line, right=True) for line in lines)
    passed = replace(passed, budget=lines)
    if case.own_tile and result["tile"] != str(case.tile):
        message = f"tile {result['tile']} on {_said(case)}: {_which(result['tile'], exercise, case)}"
        return replace(passed, kind="asked", message=message, afterwards="")
    if off := [line for line in lines if not line.equal]:
        first = off[0]
        where = "" if first.level == "HBM" else " (SRAM)"
        said = first.verdict
        if (first.way, first.level) == ("read", "HBM") and first.moved < result["sizes"].get(first.tensor, 0):
            said = "too few, and yet the numbers are right: it used data that it never loaded"
        message = f"{first.tensor} {first.way}{where}: {first.moved:,} bytes, the budget is {first.budget:,}: {said}"
        return replace(passed, kind="bytes", message=message, afterwards=exercise.slips.get(first.tensor, ""))
    if message := _computed_elsewhere(result, budget):
        return replace(passed, kind="arithmetic", message=message, afterwards="")
    for kind, message in result["remarks"].items():
        return replace(passed, kind=kind, message=message, afterwards="")
    if held > REGISTERS:
        message = (
            f"registers: a block holds {-(-held // 1024):,} KB of values that it still needs, of {REGISTERS // 1024} KB that "
            f"an SM has (on {_said(case)}): a long row does not fit, so take it tile by tile, and keep no tile"
        )
        return replace(passed, kind="registers", message=message, afterwards="")
    did = [Did(*x) for x in result["did"]]
    for rule in exercise.rules:
        if message := rule(did):
            return replace(passed, kind="asked", message=message, afterwards="")
    return passed


def _lines(moved: Mapping[str, list[int]], budget: Mapping[str, tuple[int, int]]) -> tuple[Line, ...]:
    """Every tensor that was moved or should have been, against the budget."""
    names = [*budget, *(name for name in moved if name not in budget)]
    pairs = [(name, moved.get(name, [0, 0]), budget.get(name, (0, 0))) for name in names]
    lines = [Line(name, way, mine[w], due[w]) for name, mine, due in pairs for w, way in enumerate(("read", "written"))]
    return tuple(line for line in lines if line.moved or line.budget)


def _sram_lines(moved: Mapping[str, list[int]], budget: Mapping[str, tuple[int, int]]) -> tuple[Line, ...]:
    """The tensors whose bytes of SRAM are on the budget."""
    return tuple(
        Line(name, way, moved.get(name, [0, 0])[w], due[w], "SRAM")
        for name, due in budget.items()
        for w, way in enumerate(("read", "written"))
    )


def _which(tile: str, exercise: Exercise, case: Case) -> str:
    """The side of a tile that the learner chose otherwise, and the slip or slips that it looks like."""
    mine, due = Tile.parse(tile), case.tile
    slips = exercise.tile_slips(case.problem, Device.named(case.device))
    slip = " (or: ".join(what for what, wrong in slips.items() if mine == wrong != due)
    which = f"{'Bc' if mine.rows == due.rows else 'Br'} is not the right one"
    return f"{which}: {slip}{')' * slip.count('(or: ')}" if slip else which


def _computed_elsewhere(result: Mapping[str, int], budget: Budget) -> str:
    if result["matmul"] != budget.matmul:
        return f"block.matmul did {result['matmul']:,} FLOPs, this takes {budget.matmul:,}"
    if result["exp"] < budget.exp:
        return f"block.exp computed {result['exp']:,} exponentials, this takes {budget.exp:,} at least"
    return ""


def _first_wrong_tile(
    exercise: Exercise, case: Case, truth: Truth, out: Array, wrong: Array, stored: Array
) -> tuple[Place, str]:
    """The first wrong tile, and where it is and how wrong, in words. `stored` says what a head's program has stored.

    The place of an output of keys has the first query head of the group.
    """
    b, h, row, col = (int(n) for n in np.argwhere(wrong)[0])
    a_tile = case.tile.cols if truth.of_keys else case.tile.rows
    rows, cols = exercise.out_tile(case) if exercise.out_tile else (a_tile, out.shape[-1])
    i, j = row // rows, col // cols
    at = (b, h, slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols))
    tile, due = out[at].astype(np.float64), truth.out[at]
    which = f"row tile {i}" + (f", column tile {j}" if cols < out.shape[-1] else "")
    group = case.problem.queries_per_kv if truth.of_keys else 1
    last, head = i * rows + tile.shape[0] - 1, f"{'KV ' if group > 1 else ''}head {h}"
    where = f"{truth.of}, {which} (rows {i * rows} to {last}) of batch {b}, {head}, on {_said(case)}"
    place = Place(b, h * group, i, j)
    if not stored[at[2:]].any():
        return place, f"{where}: it was never stored"
    if np.isnan(tile).all():
        return place, f"{where}: it was stored, but it is NaN throughout"
    off = np.abs(tile - due)
    r, c = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
    r, c = int(r), int(c)
    ratio = ""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = tile[due != 0] / due[due != 0]
    steady = quotients.size > 1 and np.isfinite(tile).all() and np.ptp(quotients) < 0.02 * abs(np.median(quotients))
    if steady and abs(np.median(quotients) - 1) > 0.02:
        ratio = f"; the whole tile is {np.median(quotients):.4g} times what it should be"
    element = f"[{i * rows + r}, {j * cols + c}]"
    yours, right = told_apart(tile[r, c], due[r, c])
    return place, f"{where}: the worst element, {element}, is {yours} and should be {right}{ratio}"


def _wrong_lse(case: Case, truth: Truth, saved: Path) -> tuple[Place, str] | None:
    """The first tile whose LSE is wrong, and how, in words; None if there is none."""
    if not saved.exists():
        return Place(), 'lse: there is none; m.output("lse") makes it, and the program stores it'
    lse: Array = np.load(saved, allow_pickle=False)
    wrong = truth.wrong_lse(lse)
    if not wrong.any():
        return None
    assert truth.lse is not None
    b, h, row = (int(n) for n in np.argwhere(wrong)[0])
    i = row // case.tile.rows
    assert truth.lse_tolerance is not None
    yours, due = told_apart(lse[b, h, row], truth.lse[b, h, row])
    where = f"lse, row tile {i} of batch {b}, head {h}, on {_said(case)}"
    return Place(
        b, h, i
    ), f"{where}: row {row} is {yours} and should be {due}, give or take {truth.lse_tolerance[b, h, row]:.1g}"


TUTORED = ("numbers", "bytes", "out of bounds", "crash")
"""The kinds of verdicts that the first difference from the solution explains."""
OWN_WORDS = ("NameError", "UnboundLocalError", "TypeError", "AttributeError", "SyntaxError")
"""What Python says of these is all that there is to say: how far the program came explains nothing."""


def _tutored(verdict: Verdict, program: Program, exercise: Exercise, case: Case) -> Verdict:
    """The verdict with the first difference from the solution, on the head at fault, and the traces of both for the player.

    Where the learner has to choose the tile there is nothing to run in step.
    """
    if verdict.kind not in TUTORED or case.own_tile or verdict.message.startswith(OWN_WORDS):
        return verdict
    with scratch() as folder:
        (folder / "job.pickle").write_bytes(
            _job(program, exercise, [case], SECONDS, verdict.place[:2], values=verdict.kind != "bytes")
        )
        run_child(folder, PATIENCE * SECONDS, CHILD)
        if not (folder / "tutor.json").exists():
            return verdict
        found = _read(folder / "tutor.json")
    if not (difference := found["difference"]):
        return replace(verdict, trace=Trace.from_dict(found["trace"])) if verdict.kind == "numbers" else verdict
    trace, due = (Trace.from_dict(found[which]) for which in ("trace", "due"))
    return replace(
        verdict, tutor=difference["words"], step=difference["step"], trace=trace, due=due, at=difference["number"]
    )


def _said(case: Case) -> str:
    """A case by the shapes of its arrays, as NumPy says them."""
    p = case.problem
    pages = [f"in pages of {p.page_size}"] if p.page_size else []
    return ", ".join(
        [case.shapes, *pages, p.dtype, *p.words, f"device {case.device}" if case.own_tile else f"tile {case.tile}"]
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
