"""Problems to run on a GPU under another program's eyes (ncu, compute-sanitizer), in a process of their own.

`python -m flashlab.measure.workload FILE` launches the kernels of every case in FILE, in order, each once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulator import Counts, Problem, Tile, count
from simulator.catalogue import get
from simulator.config import features
from simulator.devices import Device
from simulator.dtypes import numpy_dtype
from simulator.operations.draws import random_optional
from simulator.operations.operation import Operand
from simulator.simulate import run_on_data

__all__ = ["Case", "command", "counted", "environment", "inputs", "launch", "read", "warm", "write"]

_FRESH = 1 << 20
"""Random numbers drawn for an array; a larger one repeats them, for counters don't look at values."""

_SEED = 0
"""Of what a case is run on, everywhere: a mask decides what is counted."""


@dataclass(frozen=True)
class Case:
    """An algorithm on a problem; `tile=None` is the kernel's default."""

    name: str
    algorithm: str
    problem: Problem
    tile: Tile | None = None
    lse: bool = False

    @property
    def entries(self) -> tuple[str, ...]:
        """The kernels that it launches, by entry point, in order."""
        return tuple(kernel.entry for kernel in get(self.algorithm).launched(self.problem))


def write(cases: Sequence[Case], folder: Path) -> Path:
    """Put cases into a file, for `command`."""
    path = folder / "cases.json"
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="utf-8")
    return path


def read(path: Path) -> list[Case]:
    """The cases of a file, as `write` left them."""
    return [_case(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def _case(*, problem: dict[str, Any], tile: Sequence[int] | None, **fields: Any) -> Case:
    return Case(problem=Problem(**problem), tile=None if tile is None else Tile(*tile), **fields)


def command(path: Path, *options: str) -> list[str]:
    """What runs the cases of a file. `--exact`: every array in an allocation of its own, to the byte. `--counted`: built
    so that ncu counts the kernels' copies right (`copy_async` in memory.cuh says what it misreads)."""
    return [sys.executable, "-m", "flashlab.measure.workload", str(path), *options]


def environment() -> dict[str, str]:
    """The environment for `command`: Python finds there the packages that this process found, installed or not."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def warm(cases: Sequence[Case]) -> None:
    """Compile the kernels of all cases, many at a time; other processes find them in the cache."""
    from flashlab.run.plan import gpu_plan

    # one problem stands for all that compile to the same code
    different = {
        (c.algorithm, c.problem.dtype, c.problem.head_dim, c.problem.chunk, c.tile, features(c.problem)): c
        for c in cases
    }
    with ThreadPoolExecutor() as pool:
        for future in [
            pool.submit(gpu_plan, c.algorithm, c.problem, tile=c.tile, lse=c.lse) for c in different.values()
        ]:
            future.result()


def counted(case: Case, device: Device) -> Counts:
    """What a case is to move and compute on this device, by the formula.

    What a mask hides is data, which no formula sees: with one, this is what a run counts on the mask that `inputs` draws.
    """
    row, p = get(case.algorithm), case.problem
    if not p.mask:
        return count(case.algorithm, p, tile=case.tile, device=device, lse=case.lse)
    asked, drawn = ("lse",) if case.lse else (), row.operation.draw(p, _SEED)
    return run_on_data(row.program, drawn, p, tile=case.tile, device=device, asked=asked).counts


def inputs(algorithm: str, problem: Problem, seed: int = _SEED) -> dict[str, Any]:
    """An algorithm's operands by name, as CuPy arrays of random numbers."""
    from flashlab.base.host import from_numpy

    random = np.random.default_rng(seed)

    def array(operand: Operand) -> Any:
        shape, dtype = operand.shape(problem), numpy_dtype(operand.dtype_in(problem))
        few = random.standard_normal(min(math.prod(shape), _FRESH), np.float32).astype(dtype)
        return np.resize(few, shape)

    operation = get(algorithm).operation
    if operation.in_pages or problem.quantized:  # neither a block table nor a scale is any numbers
        drawn = operation.draw(problem, seed)
    else:
        drawn = {x.name: array(x) for x in operation.required} | random_optional(
            problem, seed
        )  # masks as `draw` has them
    return {name: from_numpy(x, "cupy") for name, x in drawn.items()}


def launch(cases: Sequence[Case], *, exact: bool = False, counted: bool = False) -> None:
    """Launch every case once on this machine's GPU, and wait for it."""
    from flashlab.run import launch as launches
    from flashlab.run import nvrtc, tritonc
    from flashlab.run.arrays import cupy
    from flashlab.run.plan import gpu_plan

    if exact:
        launches.APART = True
        cupy().cuda.set_allocator(None)  # CuPy's pool would hide what lies outside of an array, or was never written
    if counted:
        nvrtc.OPTIONS = (*nvrtc.OPTIONS, "-DCOUNTED")
        tritonc.OPTIONS = {**tritonc.OPTIONS, "num_stages": 1}  # no pipeline: the same requests, by plain loads
    warm(cases)
    for case in cases:
        plan = gpu_plan(case.algorithm, case.problem, tile=case.tile, lse=case.lse)
        plan.run(inputs(case.algorithm, case.problem))
        cupy().cuda.runtime.deviceSynchronize()
    print(f"launched {len(cases)} cases")


if __name__ == "__main__":
    launch(read(Path(sys.argv[1])), exact="--exact" in sys.argv, counted="--counted" in sys.argv)
