"""What a warm call costs in Python: `python -m studies overhead [--out docs/results] [--force]`.

All calls get small arrays (1 × 1 head × 128 × 128, float16), as people type them: forward, with `out=` and without, backward, and
`plan.run`. Torch's operator is called as a model calls it, too: without gradients, with a graph for them, and forward and backward
together. Beside them are torch's `scaled_dot_product_attention`, called the same ways, and `q + k`, which say how fast the host is.
`plan.run` also gets a small problem of each algorithm that serves. What is timed, in microseconds, is how long a call
takes to return while the kernel still runs: the median of many calls, made in turn, so that all of them see the same host. The
floor is CuPy's bare call of the driver for a kernel without arguments. This needs a Hopper GPU, CuPy and torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import flashlab as fl
from flashlab.base.host import from_numpy
from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from simulator import CATALOGUE, Problem
from simulator.operations.latent import latent_problem

CALLS = 3000
SIZES: dict[str, Any] = {"batch": 1, "heads": 1, "len_q": 128, "head_dim": 128, "dtype": "float16"}
CALLED = ("flash2", "flash3")
"""The algorithms that `fl.attention` calls with `out=`."""
SERVED = {
    "flash_decoding": Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=1024, head_dim=128, dtype="float16"),
    "paged": Problem(batch=2, heads=8, kv_heads=2, len_q=1, len_kv=1024, head_dim=128, dtype="float16", page_size=16),
    "mla_hopper_paged": latent_problem(batch=2, heads=16, len_kv=1024, dtype="float16", page_size=64),
}
"""What plans are run for."""
SDPA = "SDPA"
"""What the others are compared with: torch's forward pass."""
OPERATOR = "integrations.torch"
"""Our operator."""

Calls = Mapping[tuple[str, str], Callable[[], object]]
"""Calls by what they are of, and the framework of their arrays."""


def microseconds(calls: Calls, wait: Callable[[], object]) -> dict[tuple[str, str], float]:
    """The median time of each. Now and then it waits for the GPU, untimed, so that no queue fills up."""
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for i in range(CALLS):
        if i % 10 == 0:
            wait()
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begun)
    wait()
    return {name: 1e6 * median(each[CALLS // 10 :]) for name, each in taken.items()}


def rows() -> list[dict[str, Any]]:
    """A row for each call."""
    cupy: Any = import_module("cupy")
    calls = {**floor(cupy), **of_torch(import_module("torch")), **ours(), **served(cupy)}
    found = microseconds(calls, cupy.cuda.runtime.deviceSynchronize)
    return [
        {"algorithm": algorithm, "framework": framework, "microseconds": each}
        for (algorithm, framework), each in found.items()
    ]


def floor(cupy: Any) -> Calls:
    """The driver's own call."""
    launch = cupy.cuda.driver.launchKernel
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty").kernel.ptr
    return {("an empty kernel", "the driver alone"): lambda: launch(empty, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)}


def of_torch(torch: Any) -> Calls:
    """What torch does: the sum of two arrays, its own attention, and ours by its operator."""
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    q, k, v, dout = (torch.ones((1, 1, 128, 128), dtype=torch.float16, device="cuda") for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves)
    door = import_module("flashlab.integrations.torch").attention
    return {
        ("q + k", "torch"): lambda: q + k,
        (f"{SDPA}, backward", "torch"): lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        **as_a_model_calls(SDPA, torch, sdpa, leaves, dout),
        **as_a_model_calls(OPERATOR, torch, door, leaves, dout),
    }


def as_a_model_calls(name: str, torch: Any, attend: Callable[..., Any], leaves: Sequence[Any], dout: Any) -> Calls:
    """Without gradients, with a graph for them, and with both passes."""
    plain = [x.detach() for x in leaves]
    return {
        (name, "torch"): lambda: attend(*plain),
        (f"{name}, with a graph", "torch"): lambda: attend(*leaves),
        (f"{name}, both passes", "torch"): lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
    }


def ours() -> Calls:
    """Calls of `fl.attention`, of `fl.attention_backward`, and of a plan."""
    p, found = Problem(**SIZES), dict[tuple[str, str], Callable[[], object]]()
    plan = fl.plan("flash2", p)
    forward, backward = (CATALOGUE[name].operation.draw(p) for name in ("flash2", "flash2_backward"))
    for kind, device in (("cupy", None), ("torch", "cuda")):
        x, y = ({name: from_numpy(x, kind, device) for name, x in each.items()} for each in (forward, backward))
        out = fl.attention(**x)
        found["fl.attention", kind] = partial(fl.attention, **x)
        found["fl.attention_backward", kind] = partial(fl.attention_backward, **y)
        found["plan.run", kind] = partial(plan.run, x)
        for algorithm in CALLED:
            found[algorithm, kind] = partial(fl.attention, **x, algorithm=algorithm, out=out)
    return found


def served(cupy: Any) -> Calls:
    """Calls of `plan.run` with `out=`."""
    return {(f"{name}, plan.run", "cupy"): run_of(name, cupy) for name in SERVED}


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
    """Medians of `calls` calls each."""

    calls: int
    rows: tuple[Row, ...]


def headline(data: Overhead) -> str:
    """One sentence: every row's time."""
    each = ", ".join(f"{row.microseconds:.1f} µs ({row.algorithm}, {row.framework})" for row in data.rows)
    return f"a warm call from Python: {each}"


def table(data: Overhead) -> str:
    """A Markdown table with one row per call; its time also relative to torch's forward pass, where that was timed."""
    beside = next((row.microseconds for row in data.rows if row.algorithm == SDPA), None)
    rows = [
        (row.algorithm, row.framework, f"{row.microseconds:.1f}", f"{row.microseconds / beside:.2f}" if beside else "–")
        for row in data.rows
    ]
    return markdown_table(("call", "arrays", "µs per call", f"relative to {SDPA}"), rows)


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
    print(table(Overhead(calls=CALLS, rows=tuple(Row(**row) for row in found))))
    print(path)
