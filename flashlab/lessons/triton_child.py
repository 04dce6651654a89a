"""The child process of a check of a kernel in Triton: `TRITON_INTERPRET=1 python -m flashlab.lessons.triton_child FOLDER`.

It finds a job in the folder, runs the learner's kernel on each launch by Triton's interpreter, and writes down what came
out; the parent judges.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.base.host import Empty
from flashlab.base.process import end_with_parent
from flashlab.emulator.library import Arena
from flashlab.lessons.kernel_exercise import Launch
from flashlab.run import interpreter
from simulator.dtypes import Array
from simulator.errors import Unavailable


def main(folder: Path) -> None:
    end_with_parent()
    job: dict[str, Any] = pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment
    try:
        (folder / "ready").touch()
        for n, launch in enumerate(job["launches"]):
            result = run(Path(job["path"]), job["kernel"], launch, job["seconds"])
            np.savez(folder / f"arrays{n}.npz", **result.pop("arrays"))
            _write(folder / f"launch{n}.json", result)
            if result["findings"]:
                break
    except BaseException as error:  # whatever goes wrong is a verdict, not an accident of ours
        _write(folder / "error.json", explain(error, Path(job["path"]).name))
    _write(folder / "done.json", {})


def run(path: Path, kernel: str, launch: Launch, limit: float) -> dict[str, Any]:
    """A launch as `kernel_child.run` has it: its outputs as `arrays`, `findings`, what it `moved`, bytes `unwritten`."""
    arena, values, dtypes, held = Arena(), dict[str, Any](), dict[str, str](), dict[str, Array]()
    for name, x in launch.arguments.items():
        empty = isinstance(x, Empty)
        if not empty and not x.ndim:
            values[name] = x.item()
            continue
        array: Array = np.empty(x.shape, x.dtype) if empty else x
        held[name] = arena.put(name, array, written=not empty)
        arena.buffers[name].read_only = not empty
        values[name], dtypes[name] = arena.pointer(name), array.dtype.name
    done = interpreter.launch(path, kernel, launch.grid[0], values, arena, dtypes, time_limit=limit)
    return {
        "findings": [(x.kind, str(x), x.line.number if x.line else 0) for x in done.findings],
        "unwritten": {name: int((arena.buffers[name].written == 0).sum()) for name in launch.truth},
        "where": "emulator",
        "flops": done.flops,
        "moved": [asdict(row) | {"what": row.what} for row in done.moved],
        "arrays": {name: held[name].copy() for name in launch.truth},
    }


def explain(error: BaseException, file: str) -> dict[str, Any]:
    """What went wrong, as a verdict: its kind, and a message in one line. Triton's interpreter wraps what a line raises."""
    if isinstance(error, Unavailable):
        return {"kind": "unavailable", "message": str(error)}
    inner, line = error, 0
    while inner.__cause__ is not None:
        inner = inner.__cause__
    at = inner.__traceback__
    while at is not None:
        line = at.tb_lineno if Path(at.tb_frame.f_code.co_filename).name == file else line
        at = at.tb_next
    message = (str(inner) or type(inner).__name__).splitlines()[0]
    where = f"{file}:{line}: " if line else f"{file}: "
    return {"kind": "crash", "message": f"{where}{type(inner).__name__}: {message}"}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
