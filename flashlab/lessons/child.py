"""The child process of a check: `python -m flashlab.lessons.child FOLDER`.

It finds a job in the folder, runs the learner's program on each case, and writes down what came out; the parent judges.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import pickle
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from flashlab.base.process import end_with_parent
from flashlab.lessons.exercise import Case
from flashlab.lessons.tutor import compare
from flashlab.lessons.watch import OutOfBounds, Shortcut, WatchedMachine
from simulator import Device, HbmTensor, Program, SramOverflow
from simulator.dtypes import Array

MEMORY = 4 << 30
"""Bytes of address space; more is a `MemoryError`. Where the system knows such a limit: Linux."""
DISK = 256 << 20
"""Bytes of any one file."""


def main(folder: Path) -> None:
    """The whole of the process."""
    end_with_parent()
    limit_memory()
    job = _job(folder)
    with (folder / "where.txt").open("w", encoding="utf-8") as where:
        (folder / "ready").touch()  # from here on its time counts
        with limited(job["seconds"], where):
            work(folder)


@contextmanager
def limited(seconds: float, where: TextIO) -> Generator[None]:
    """Once so much processor time is used up, each thread's line is written down. A busy machine must not look like a hang."""
    if sys.platform == "win32":  # it has no such timer, only the clock's
        faulthandler.dump_traceback_later(seconds, file=where)
        yield
        return faulthandler.cancel_dump_traceback_later()
    faulthandler.register(signal.SIGPROF, file=where)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _job(folder: Path) -> dict[str, Any]:
    return pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment


def work(folder: Path) -> None:
    """The job in a folder, wherever it runs."""
    job = _job(folder)
    sys.path[:] = job["path"]
    linecache.cache[job["file"]] = (len("".join(job["lines"])), None, job["lines"], job["file"])
    try:
        with np.errstate(
            all="ignore"
        ):  # a division by zero shows in the numbers; a warning would name the library's lines
            program = cast(Program, pickle.loads(job["program"]))
            for n, case in enumerate(job["cases"] if job["head"] is None else ()):
                result = run(program, case)
                for name, x in result.pop("arrays").items():
                    np.save(folder / f"{name}{n}.npy", x)
                _write(folder / f"case{n}.json", result)
            if job["head"] is not None:
                _write(folder / "tutor.json", in_step(program, job))
    except BaseException as error:  # whatever a learner's program raises is a verdict, not an accident of ours
        _write(folder / "error.json", explain(error, job["file"]))
    _write(folder / "done.json", {})


def run(program: Program, case: Case) -> dict[str, Any]:
    """Run a program on a case: its outputs and what it stored of each, as "arrays", and its counts as plain data."""
    problem, device = case.problem, Device.named(case.device)
    config = program.configure(problem, device, None if case.own_tile else case.tile)
    machine = WatchedMachine(program.name, program.operation, problem, config, device, data=case.arrays())
    try:
        result: Any = program(machine, *machine.inputs, problem, config.tile)
    except SramOverflow as error:
        error.add_note(str(config.tile))  # which its verdict is about, where the program has to choose it
        raise
    out = cast(object, result[0] if type(result) is tuple and result else result)
    if not isinstance(out, HbmTensor) or out.name not in machine.outputs:
        names = " or ".join(f"m.output({x.name!r})" for x in program.operation.written(problem))
        raise Shortcut(f"it returned {_named(out)} where {names} is expected, filled tile by tile with block.store")
    counts = machine.close()
    outputs = {name: machine.result(name) for name in machine.outputs}
    stored = {
        f"{name}_stored": machine.stored.get(name, np.zeros((x.rows, x.cols), bool))
        for name, x in machine.outputs.items()
    }
    return {
        "arrays": outputs | stored,
        "remarks": machine.remarks,
        "sizes": {t.name: t.spec.heads * t.rows * t.spec.row_bytes for t in machine.inputs},
        "sram": {name: [t.sram_read, t.sram_write] for name, t in counts.by_tensor.items()},
        "tensors": {name: [t.hbm_read, t.hbm_write + t.hbm_atomic] for name, t in counts.by_tensor.items()},
        "sram_peak": counts.sram.peak,
        "registers": machine.held.peak,
        "did": machine.did,
        "tile": str(config.tile),
        "matmul": counts.flops.matmul,
        "exp": counts.exp,
    }


def in_step(program: Program, job: dict[str, Any]) -> dict[str, Any]:
    """Where a program first differs from the solution on one (batch, head), and the traces of both, as plain data."""
    difference, trace, due = compare(program, job["exercise"], job["cases"][0], job["head"], values=job["values"])
    found = None if difference is None else asdict(difference)
    return {"difference": found, "trace": trace.to_dict(), "due": due.to_dict()}


def explain(error: BaseException, file: str) -> dict[str, Any]:
    """An exception as a verdict: its kind, its message in one line, and the line of the learner's that it came from."""
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
        (OutOfBounds, "out of bounds"),
        (Shortcut, "short cut"),
        (SramOverflow, "sram"),
        (MemoryError, "memory"),
        ((SystemExit, KeyboardInterrupt), "exit"),
    )
    kind = next((name for types, name in kinds if isinstance(error, types)), "crash")
    message = (str(error) or type(error).__name__).splitlines()[0]
    if kind == "crash":
        message = f"{type(error).__name__}: {message}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    tile = next(iter(getattr(error, "__notes__", [])), None) if kind == "sram" else None
    return {"kind": kind, "message": message, "line": lines[-1] if lines else None, "tile": tile}


def _named(thing: object) -> str:
    return f"a NumPy array {cast(Array, thing).shape}" if isinstance(thing, np.ndarray) else type(thing).__name__


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def limit_memory() -> None:
    """Bytes of memory and of files that this process may have, where the system knows such limits."""
    try:
        import resource
    except ImportError:  # Windows has none; the parent's time limit holds there
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, DISK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
