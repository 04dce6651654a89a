"""What a warm call costs in Python: `python -m studies overhead [--out docs/results] [--force]`.

`fl.attention` gets small arrays (1 × 1 head × 128 × 128, float16), and `plan.run` a small problem of each algorithm that
serves. `out=` is given, and plan and descriptors are cached. What is timed, in microseconds, is how long the call takes to
return while the kernel still runs: the median of many calls. The floor is CuPy's bare call of the driver for a kernel
without arguments. This needs a Hopper GPU, CuPy and torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import median
from typing import Any

import flashlab as fl
from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.run.host import from_numpy
from simulator import CATALOGUE, Problem
from simulator.operations.latent import latent_problem

CALLS = 3000
CALLED = ("flash2", "flash3")
"""The algorithms that `fl.attention` calls."""
SERVED = {
    "flash_decoding": Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=1024, head_dim=128, dtype="float16"),
    "paged": Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=1024, head_dim=128, dtype="float16", page_size=16),
    "mla_hopper_paged": latent_problem(batch=2, heads=16, len_kv=1024, dtype="float16", page_size=64),
}
"""What plans are run for."""


def microseconds(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median time of many calls. Now and then it waits for the GPU, untimed, so that no queue fills up."""
    taken: list[float] = []
    for i in range(CALLS):
        if i % 50 == 0:
            wait()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    wait()
    return 1e6 * median(taken[CALLS // 10 :])


def rows() -> list[dict[str, Any]]:
    """The floor, then a row per algorithm and framework."""
    cupy: Any = import_module("cupy")
    torch: Any = import_module("torch")
    arrays = {
        "cupy": [cupy.ones((1, 1, 128, 128), "float16") for _ in range(4)],
        "torch": [torch.ones((1, 1, 128, 128), dtype=torch.float16, device="cuda") for _ in range(4)],
    }
    wait, served = cupy.cuda.runtime.deviceSynchronize, {name: run_of(name, cupy) for name in SERVED}
    launch = cupy.cuda.driver.launchKernel
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty").kernel.ptr
    floor = microseconds(lambda: launch(empty, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0), wait)
    return (
        [{"algorithm": "an empty kernel", "framework": "the driver alone", "microseconds": floor}]
        + [
            {
                "algorithm": algorithm,
                "framework": framework,
                "microseconds": microseconds(
                    lambda a=algorithm, x=x: fl.attention(*x[:3], algorithm=a, out=x[3]), wait
                ),
            }
            for algorithm in CALLED
            for framework, x in arrays.items()
        ]
        + [
            {"algorithm": f"{name}, plan.run", "framework": "cupy", "microseconds": microseconds(run, wait)}
            for name, run in served.items()
        ]
    )


def run_of(name: str, cupy: Any) -> Callable[[], object]:
    """A call of `plan.run` with `out=`."""
    plan, operation = fl.plan(name, SERVED[name]), CATALOGUE[name].operation
    arrays = {name: from_numpy(x, "cupy") for name, x in operation.draw(SERVED[name]).items()}
    arrays["out"] = cupy.empty_like(plan.run(arrays)["out"])
    return lambda: plan.run(arrays)


class Row(Data):
    """The time of one algorithm with one framework's arrays, or the floor."""

    algorithm: str
    framework: str
    microseconds: float


class Overhead(Data):
    """Medians of `calls` calls."""

    calls: int
    rows: tuple[Row, ...]


def headline(data: Overhead) -> str:
    """One sentence: every row's time."""
    each = ", ".join(f"{row.microseconds:.1f} µs ({row.algorithm}, {row.framework})" for row in data.rows)
    return f"a warm call from Python: {each}"


def table(data: Overhead) -> str:
    """A Markdown table with one row per algorithm and framework."""
    rows = [(row.algorithm, row.framework, f"{row.microseconds:.1f}") for row in data.rows]
    return markdown_table(("algorithm", "arrays", "µs per call"), rows)


KIND = Kind(
    "overhead",
    "Speed: what a call costs before the GPU works",
    "a warm call from Python, until it returns: of `fl.attention`, and of a plan",
    "python -m studies overhead",
    Overhead,
    headline,
    table,
)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--out", default=results.FOLDER, help="folder of the file")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    given = parser.parse_args(words)
    found = rows()
    path = results.save(
        KIND,
        [*CALLED, *SERVED],
        {"calls": CALLS, "rows": found},
        subject="calls",
        folder=given.out,
        replace=given.force,
    )
    for row in found:
        print(f"{row['algorithm']}, {row['framework']}: {row['microseconds']:.1f} µs")
    print(path)
