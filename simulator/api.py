"""The entry points: simulate, count, check_formula."""

from __future__ import annotations

from operator import index
from typing import Any, Literal

import numpy as np

from simulator import catalogue
from simulator.algorithm import Formula
from simulator.counts import Book, Counts
from simulator.devices import Device
from simulator.dtypes import as_numpy
from simulator.errors import UsageError, among, unknown
from simulator.fields import flag
from simulator.names import DeviceName, DType
from simulator.operations.softmax import SOFTMAX, vector_problem
from simulator.problem import ITEMSIZE, Problem, spell_masks
from simulator.program import Program
from simulator.ragged import in_closed_form
from simulator.simulate import Run, Scales, TileLike, run_on_data, run_on_shapes


@spell_masks
def simulate(
    algorithm: str | Program, *arrays: Any, tile: TileLike = None, device: Device | DeviceName = "h100", lse: Any = False,
    trace: bool | tuple[int, int] = False, check_finite: bool = False, scales: Scales | None = None, **named: Any,
) -> Run:  # fmt: skip
    """Run an algorithm's tile program on arrays: the numbers, and every byte counted.

    The arrays are the inputs of the algorithm's operation, in order or by name. They may be of NumPy, CuPy, torch or JAX, and
    are never changed; the results are NumPy's. Attention takes q `(batch, heads, len_q, head_dim)`, k and v
    `(batch, kv_heads, len_kv, …)`: float32, float16 or bfloat16, all of one dtype. `flash3_fp8` takes float8_e4m3fn, and
    `scales` (None: 1). A backward pass takes q, k, v, out, lse, dout. Masks and scale are as `Problem` has them.
    `lse=True` asks for the LSE as an output. `trace=(batch, head)` (True: the first) records that head. `check_finite`
    refuses NaN and inf, also where a mask hides them: a kernel multiplies a hidden key's value by 0, and 0 times NaN is NaN.
    An LSE and a sink may be -inf: that stands for a row without keys, and for a head without a sink.

    Raises `UsageError` for bad input, and `SramOverflow` for a tile that does not fit.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
    >>> run = fl.simulate("flash2", *fl.random_inputs(p, seed=0), causal=True, tile=(64, 64))
    >>> run.out.shape, run.counts.hbm.read
    ((1, 2, 128, 64), 131072)
    """
    row = catalogue.get(algorithm)
    if not isinstance(lse, bool):  # of a backward pass an input
        named, lse = {"lse": lse, **named}, False
    inputs, masks = row.operation.apart(named)
    given = {name: as_numpy(name, x) for name, x in row.operation.bound(arrays, inputs).items()}
    problem = row.operation.problem(given, **masks)
    if flag("check_finite", check_finite):
        for name, x in given.items():
            values = x.astype(np.float32)
            spread = ~np.isfinite(values)
            if row.operation.operand(name).dtype == "float32":  # numbers per row or per head, in every problem
                spread &= ~np.isneginf(values)
            if spread.any():
                raise UsageError(name, "NaN or inf", "finite values (check_finite=True)")
    head = _traced(trace, problem)
    row.check(problem)
    program, on = row.program, Device.named(device)
    if scales is not None:
        given |= Scales.of(scales).as_numpy().named(problem, program.configure(problem, on, tile).tile)
    return run_on_data(program, given, problem, tile=tile, device=on, asked=_asked(lse), trace=head)


def _traced(trace: Any, problem: Problem) -> tuple[int, int] | None:
    """The head that `trace` asks for."""
    if trace is not None and trace is not False and problem.ragged:
        raise UsageError("trace", trace, "None for a ragged batch: trace a sequence alone")
    if trace is None or isinstance(trace, bool):
        return (0, 0) if trace else None
    try:
        batch, head = map(index, trace)
    except (TypeError, ValueError):
        batch = head = -1
    if not (0 <= batch < problem.batch and 0 <= head < problem.heads):
        raise UsageError("trace", trace, f"(batch, head) under ({problem.batch}, {problem.heads})")
    return batch, head


def _asked(lse: bool) -> tuple[str, ...]:
    return ("lse",) if flag("lse", lse) else ()


def softmax(name: str, x: Any, *, tile: int = 128) -> Run:
    """Run a vector's softmax (`softmax_naive`, `softmax_safe`, `softmax_online`, `softmax_merge`), `tile` elements at a time.

    x is a 1-D array of a storage dtype, of NumPy, CuPy, torch or JAX; `run.out` is its softmax, NumPy's. Raises `UsageError`.

    >>> import numpy as np, flashlab as fl
    >>> run = fl.softmax("softmax_online", np.array([1.0, 2.0, 3.0], np.float32))
    >>> [f"{y:.4f}" for y in run.out]
    ['0.0900', '0.2447', '0.6652']
    """
    x = as_numpy("x", x)
    if x.ndim != 1:
        raise UsageError("x.shape", x.shape, "a vector, (length,)")
    given = {"x": x.reshape(1, -1)}
    problem, on = SOFTMAX.problem(given), Device.named("h100")
    run = run_on_data(_vector_program(name), given, problem, tile=(1, tile), device=on)
    return Run({"out": run.out.reshape(-1)}, run.counts, None)


def _vector_program(name: str) -> Program:
    known = catalogue.of(SOFTMAX)
    if not isinstance(name, str) or name not in known:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("name", name, known)
    return known[name].program


def count(
    algorithm: str | Program,
    problem: Problem | None = None,
    *,
    tile: TileLike = None,
    device: Device | DeviceName = "h100",
    lse: bool = False,
    length: int | None = None,
    dtype: DType = "float32",
) -> Counts:
    """What an algorithm moves and computes, from its formula, at any size; one's own program runs on shapes.

    The softmax of a vector is counted by `count("softmax_safe", length=…, dtype=…)`.

    Raises `UsageError`, and `SramOverflow` for a tile that does not fit the device.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=32, len_q=1_000_000, head_dim=128, dtype="float16", causal=True)
    >>> fl.count("standard", p).hbm.peak > 1000 * fl.count("flash2", p).hbm.peak
    True
    >>> fl.count("softmax_safe", length=1024, dtype="float32").hbm.read // 4
    3072
    """
    row, on, lse = catalogue.get(algorithm), Device.named(device), flag("lse", lse)
    if row.operation is SOFTMAX and problem is None:
        if length is None:
            raise UsageError("length", None, f"an integer of at least 1: {row.name} is the softmax of a vector")
        problem = vector_problem(length, dtype)
    elif length is not None:
        raise UsageError("length", length, f"nothing: {row.name} isn't the softmax of a vector, or the problem says it")
    elif among("dtype", dtype, ITEMSIZE) != "float32":
        raise UsageError("dtype", dtype, "nothing: the problem says it")
    if problem is None:
        raise UsageError("problem", None, "a Problem, or for the softmax of a vector length=…")
    problem = Problem.checked(problem)
    row.check(problem)
    if row.formula is None:
        return run_on_shapes(row.program, problem, tile=tile, device=on, asked=_asked(lse), infer=True)
    return _evaluate(row.formula, row.program, problem, tile, on, lse)


def shape_run(
    algorithm: str | Program,
    problem: Problem,
    *,
    tile: TileLike = None,
    device: Device | DeviceName = "h100",
    lse: bool = False,
) -> Counts:
    """The counts from running the tile program on shapes alone; `count` must equal it.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=100, head_dim=40, dtype="bfloat16", window=(30, 0))
    >>> fl.shape_run("flash2", p) == fl.count("flash2", p)
    True
    """
    row = catalogue.get(algorithm)
    row.check(Problem.checked(problem))
    return run_on_shapes(row.program, problem, tile=tile, device=Device.named(device), asked=_asked(lse))


def check_formula(
    program: str | Program,
    formula: Formula,
    problem: Problem,
    *,
    tile: TileLike = None,
    device: Device | DeviceName = "h100",
    lse: bool = False,
    only: Literal["hbm", "sram", "flops"] | None = None,
) -> None:
    """Prove a formula on one problem: raise `UsageError` naming the first entry where it differs from the shape-only run.

    `formula(book, problem, tile, config, *, lse)` fills a `Book`. With `only` it is held to a part: "hbm" is the arrays, the
    launches, and what each requests of HBM, in all and once (`Book.distinct`); "sram" is what passes through SRAM, and the most
    that a block holds; "flops" is arithmetic, exponentials too. None is everything, grids included.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=100, head_dim=40, dtype="bfloat16")
    >>> fl.check_formula("flash2", fl.catalogue.get("flash2").formula, p)
    """
    row, on, problem, lse = catalogue.get(program), Device.named(device), Problem.checked(problem), flag("lse", lse)
    if not callable(formula):
        raise UsageError("formula", formula, "a function (book, problem, tile, config, *, lse)")
    row.check(problem)
    if only is not None:
        among("only", only, ("hbm", "sram", "flops"))
    counted, closed = (
        run_on_shapes(row.program, problem, tile=tile, device=on, asked=_asked(lse)),
        _evaluate(formula, row.program, problem, tile, on, lse),
    )
    if counted == closed:
        return
    for name, ran, said in _differences(counted, closed, only):
        raise UsageError(
            f"formula, {name}", said, f"{ran}, as the tile program counts for {problem} with tile {counted.tile}"
        )


_PARTS = {
    "sram": ("sram_peak",),
    "flops": ("flops_matmul", "flops_other", "exp"),
    "": ("blocks", "warps", "heads_together"),
}
"""The numbers of a launch by the part of its counts that they belong to."""


def _differences(a: Counts, b: Counts, only: str | None) -> list[tuple[str, object, object]]:
    found: list[tuple[str, object, object]] = []
    if a.tensors != b.tensors and only in (None, "hbm"):
        found.append(("tensors", sorted(a.tensors), sorted(b.tensors)))
    names = [x.name for x in a.launches], [x.name for x in b.launches]
    if names[0] != names[1]:
        return [*found, ("launches", *names)]
    for x, y in zip(a.launches, b.launches, strict=True):
        for key in dict.fromkeys([*x.ledger, *y.ledger]):
            if x.ledger.get(key, 0) != y.ledger.get(key, 0) and only in (None, key.what.split(".")[0]):
                found.append((f"{x.name}: {', '.join(key)}", x.ledger.get(key, 0), y.ledger.get(key, 0)))
        for key in dict.fromkeys([*x.distinct, *y.distinct]):
            if x.distinct.get(key, 0) != y.distinct.get(key, 0) and only in (None, "hbm"):
                said = f"{x.name}: distinct bytes of {key[0]}, {key[1]} (book.distinct)"
                found.append((said, x.distinct.get(key, 0), y.distinct.get(key, 0)))
        for part, attributes in _PARTS.items():
            for attribute in attributes if only in (None, part) else ():
                if getattr(x, attribute) != getattr(y, attribute):
                    found.append((f"{x.name}: {attribute}", getattr(x, attribute), getattr(y, attribute)))
    return found


def _evaluate(
    formula: Formula, program: Program, problem: Problem, tile: TileLike, device: Device, lse: bool
) -> Counts:
    config = program.configure(problem, device, tile)

    def evaluate(one: Problem) -> Counts:
        book = Book(program.name, one, config.tile, device, config)
        for operands, role in ((program.operation.taken(one), "input"), (program.operation.written(one), "output")):
            for operand in operands:
                book.tensor(operand.spec(one, config.tile, role))
        formula(book, one, config.tile, config, lse=lse)
        return book.close()

    return in_closed_form(problem, program.operation, config, evaluate)
