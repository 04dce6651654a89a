"""The child process of a check of a CUDA file: `python -m flashlab.lessons.kernel_child FOLDER`.

It finds a job in the folder, runs the learner's kernel on each launch (on the emulator, and on the GPU if there is one),
and writes down what came out; the parent judges. Or it runs one launch in step with the solution, for the tutor.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

import kernels_cu
from flashlab.base.process import end_with_parent
from flashlab.emulator import BuildError, Empty, build, emulate_file
from flashlab.emulator.library import Launched
from flashlab.lessons.kernel_exercise import Launch
from flashlab.run.arrays import cupy
from simulator import UsageError
from simulator.dtypes import Array
from simulator.errors import Unavailable

MEMORY = 8 << 30
"""Bytes of address space: the emulator's arrays lie far apart, and each lane has a stack of its own."""


def main(folder: Path) -> None:
    end_with_parent()
    gpu = _gpu()
    _limit(gpu)
    job: dict[str, Any] = pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment
    path, kernel, limit = Path(job["path"]), cast(str, job["kernel"]), job["seconds"] / A_LAUNCH
    if "tutor" in job:
        _write(folder / "tutor.json", in_step(path, limit, **job["tutor"]))
        return _write(folder / "done.json", {})
    try:
        emulator = _builds(path, kernel, gpu)
        (folder / "ready").touch()  # from here on the time counts: the compiler's is not the kernel's
        for n, launch in enumerate(cast("list[Launch]", job["launches"])):
            result = run(path, kernel, launch, limit) if emulator else dict(UNWATCHED)
            if gpu is not None and not result["findings"]:
                result |= {"arrays": on_gpu(gpu, path, kernel, launch), "where": "gpu"}
            np.savez(folder / f"arrays{n}.npz", **result.pop("arrays"))
            _write(folder / f"launch{n}.json", result)
            if result["findings"]:
                break
    except BaseException as error:  # whatever goes wrong is a verdict, not an accident of ours
        _write(folder / "error.json", explain(error))
    _write(folder / "done.json", {})


A_LAUNCH = 2
"""The part of a check's seconds that the emulator may take for one launch, of processor time. A right one takes one at most."""
UNWATCHED: dict[str, Any] = {"moved": None, "flops": 0, "findings": [], "unwritten": {}}
"""What is known of a launch that no emulator has watched."""


def run(path: Path, kernel: str, launch: Launch, limit: float) -> dict[str, Any]:
    """Emulate a launch: its outputs as `arrays`, `findings` as (kind, text, line), what it `moved`, `flops`, bytes `unwritten`."""
    done = emulate_file(path, launch.arguments, grid=launch.grid, block=launch.block, kernel=kernel, time_limit=limit)
    findings = [
        (x.kind, str(x), x.line.number if x.line and x.line.file == str(path) else 0) for x in done.launched.findings
    ]
    return {
        "findings": findings,
        "unwritten": done.unwritten,
        "where": "emulator",
        "flops": done.launched.flops,
        "moved": [asdict(row) | {"what": row.what} for row in done.launched.moved] + _shuffled(done.launched),
        "arrays": {name: done.arrays[name] for name in launch.truth},
    }


def _shuffled(launched: Launched) -> list[dict[str, Any]]:
    """Shuffles as a row of what was moved: no bytes of SRAM, but each takes a pass on the way that leads there."""
    row = {"tensor": "registers", "space": "lanes", "what": "shuffled", "bytes": 0, "overlapped": 0, "sectors": 0}
    return [row | dict.fromkeys(("instructions", "wavefronts", "ideal"), n)] if (n := launched.shuffles) else []


def in_step(
    path: Path, limit: float, exercise: str, launch: Launch, moved: tuple[str, str] | None, rounds: bool
) -> dict[str, Any]:
    """Where a file first differs from the solution of an exercise, as plain data; empty if nothing is found."""
    from flashlab.lessons import catalogue, kernel_tutor  # for a check that fails

    found = kernel_tutor.compare(path, catalogue.KERNEL_EXERCISES[exercise], launch, moved, limit, rounds=rounds)
    return asdict(found) if found else {}


def _builds(path: Path, kernel: str, gpu: Any) -> bool:
    """Whether the emulator can have it; without a compiler a GPU must do."""
    try:
        build(path, entries=[kernel])
    except Unavailable:
        if gpu is None:
            raise
        return False
    return True


def on_gpu(cp: Any, path: Path, kernel: str, launch: Launch) -> dict[str, Array]:
    """The outputs of a launch on the GPU; what it doesn't write stays NaN, or -1 where there is no NaN."""
    options = (
        "-std=c++17",
        f"-I{kernels_cu.include_dir()}",
        f"-I{path.parent}",
        "-DINFINITY=__int_as_float(0x7f800000)",
    )
    module = cp.RawModule(code=path.read_text(encoding="utf-8"), options=options, name_expressions=[kernel])
    given: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, Empty):
            given[name] = cp.full(value.shape, -1 if value.dtype.startswith("int") else np.nan, value.dtype)
        else:
            given[name] = cp.asarray(value) if isinstance(value, np.ndarray) else value
    module.get_function(kernel)(launch.grid, launch.block, tuple(given.values()))
    cp.cuda.Device().synchronize()
    return {name: cp.asnumpy(given[name]) for name in launch.truth}


def explain(error: BaseException) -> dict[str, Any]:
    """What went wrong, as a verdict: its kind, and a message in one line."""
    text = re.sub(r"(\S*/)?\w+\.cubin\.cu", "line ", str(error)) or type(error).__name__  # a name that CuPy makes up
    if isinstance(error, BuildError) or "CompileException" in type(error).__name__:
        found = re.search(r"((?:[^/\s:]+\.cu:|line \()\d+[^\n]*?error[^\n]*)", text) or re.search(
            r"([^\n]*error[^\n]*)", text
        )
        return {"kind": "compile error", "message": (found[1] if found else text.splitlines()[0]).strip()}
    kinds = (Unavailable, "unavailable"), (UsageError, "usage"), (MemoryError, "memory")
    kind = next((name for types, name in kinds if isinstance(error, types)), "crash")
    message = text.splitlines()[0]
    return {"kind": kind, "message": f"{type(error).__name__}: {message}" if kind == "crash" else message}


def _gpu() -> Any:
    """CuPy, if there is a GPU."""
    try:
        return cupy()
    except Unavailable:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _limit(gpu: Any) -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if gpu is None and sys.platform == "linux":  # a GPU's driver reserves more addresses than there is memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
