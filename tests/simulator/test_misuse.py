"""Mistakes in a program of one's own: each is one line that names the call, on shapes as on data, before anything is counted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import Problem, UsageError
from tests.tiers import examples

P = Problem(batch=1, heads=2, len_q=100, head_dim=64, dtype="float16")
DATA = fl.random_inputs(P)


def refused(program: Any, says: str, problem: Problem = P, **options: Any) -> None:
    """Both ways to run a program raise one line that says so."""
    for run in (
        lambda: fl.count(program, problem, **options),
        lambda: fl.simulate(program, *(DATA if problem is P else fl.random_inputs(problem)), **options),
    ):
        with pytest.raises(UsageError, match=says) as error:
            run()
        assert "\n" not in str(error.value)


def with_mistake(mistake: Callable[..., object], **launch: Any) -> fl.Program:
    """A program that copies q, and makes a mistake on its way."""

    @fl.program
    def copied(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out, s = m.output("out"), m.workspace("s", q.cols)
        for block in m.launch("copied", rows=problem.row_tiles(tile), warps=4, **launch):
            block.step("copy")
            x, k_j = block.fetch(q, block.i, tile.rows), block.load(k, 0, tile.cols)
            mistake(block, x, k_j, q, out, s)
            block.store(out, x, block.i, tile.rows)
        return out

    return copied


def test_the_program_without_a_mistake_runs() -> None:
    right = with_mistake(lambda *_: None)
    run = fl.simulate(right, *DATA)
    assert fl.count(right, P) == run.counts
    np.testing.assert_array_equal(run.out, DATA[0])


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        # stores of what the tile hasn't: 25,600 bytes counted, NaN or a part in the output
        ("b.store(out, x.columns(0, 32), b.i, 64)", r"registers = \(64, 32\): expected \(64, 64\), as the"),
        ("b.store(out, x.sum(), b.i, 64)", r"block.store's registers = \(64, 1\): expected \(64, 64\)"),
        ("b.store(out, b.full(64, 128, 0.0), b.i, 64)", r"\(64, 128\): expected \(64, 64\), as the tile of out"),
        ("b.store(out, b.full(16, 64, 0.0), b.i, 64)", r"registers = \(16, 64\): expected \(64, 64\)"),
        ("b.store(out, x, b.i, 64, 1, 48)", r"\(64, 64\): expected \(64, 48\), or \(64, 16\) where out ends"),
        ("b.atomic_add(s, x.sum(), b.i, 64)", r"block.atomic_add's registers = \(64, 1\): expected \(64, 64\)"),
        ("b.atomic_add(out, x, b.i, 64)", "block.atomic_add's tensor = out, float16: expected one of float32"),
        ("b.atomic_add(k, x, b.i, 64)", r"tensor of block.atomic_add\(tensor, registers.* = k in SRAM"),
        ("b.store(q, x, b.i, 64)", "block.store's tensor = q, an input: expected an output or a workspace"),
        ("b.fetch(s, b.i, 64)", "s = a workspace that is read before it is written: expected a block.store"),
        ("b.atomic_add(s, x, b.i, 64)", "s = a workspace that is read before it is written"),
        ("b.load(out, b.i, 64)", "out = an output that is read before it is written"),
        # what Python or NumPy would say somewhere inside, or nowhere
        ("1 if b.i > 0 else 2", r"block.i in a condition or a range = all blocks .*apart=lambda i"),
        ("max(b.i, 1)", "block.i in a condition or a range"),
        ("range(b.i)", "block.i in a condition or a range"),
        ("int(b.i)", "block.i in a condition or a range"),
        ("b.exp(k)", r"operand of block.exp = k in SRAM: expected registers: block.to_registers\(tile\)"),
        ("b.exp(q)", r"operand of block.exp = q in HBM: expected registers: block.load"),
        ("b.exp(1.0)", "operand of block.exp = float: expected registers"),
        ("b.maximum(k, 0.0)", "operand of np.maximum = k in SRAM: expected registers: block.to_registers"),
        ("b.maximum(1.0, 0.0)", "operand of np.maximum = float: expected registers"),
        ("b.mask(k, b.i, 0)", "operand of block.mask = k in SRAM"),
        ("b.to_registers(q)", "q in HBM: expected a tile in SRAM, as block.load and block.alloc return"),
        ('b.get(b.alloc("sums", 16))', "block.get's buffer = sums, which is empty: expected block.put"),
        ("b.get(k)", "block.get's buffer = k, which is empty: expected block.put into it before, or block.to_registers"),
        ("b.to_registers(b.alloc('sums', 16))", "block.to_registers's tile = sums, which is empty: expected block.put"),
        ("b.matmul(x, b.alloc('w', 64, 16), split=('rows', 'none'))", "block.matmul's operand = w, which is empty"),
        ("b.matmul(b.full(16, 1, 0.0), k, split=('rows', 'none'))", r"\(16, 1\) @ \(64, 64\)': expected as many columns"),
        ('b.matmul(x, k.T, split=("rows", "none"), acc=x.sum())', r"acc = \(64, 1\): expected \(64, 64\)"),
        ("k.sum()", r"k.sum = unknown: expected registers: block.to_registers\(tile\)"),
        ("q.mean()", r"q.mean = unknown: expected registers: block.load"),
        ("q.shape", "q.shape = unknown: expected q.rows and q.cols"),
        ("q[0]", r"operand = q: expected registers: block.load"),
        ("k[0]", r"operand = k: expected registers: block.to_registers"),
        ("[*q]", r"operand = q: expected registers"),
        ("x[:, 0]", r"x\[…\] = a part of registers: expected x.columns\(start, width\)"),
        ("bool(x)", "if x = a condition on registers"),
        ("operator.eq(x, 0.0)", "a comparison of registers"),
        ("b.laod(q, 0, 64)", "^block.laod = unknown: expected block.load$"),
        ("b.qqq", "^block.qqq = unknown: expected one of alloc, arrive, "),
        ("b.load(q)", r"block.load = missing 2 .* 'i' and 'rows': expected block.load\(tensor, i, rows, j=0, "),
        ("b.load(q, 0, 64, tile=1)", r"block.load = got an unexpected keyword argument 'tile'"),
        ("b.matmul(x)", r"block.matmul = missing .*'b': expected block.matmul\(a, b, \*, split=\(\)"),
        ("x.columns(0)", r"x.columns = missing .*'width': expected x.columns\(start, width\)"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(typed: str, says: str) -> None:
    """In the block b: x in registers, k in SRAM, q, out and the workspace s in HBM."""
    refused(with_mistake(eval(f"lambda b, x, k, q, out, s: {typed}")), says)


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"walk": 3}, "^walk = 3: expected a function of a block's row"),
        ({"walk": lambda i: 3}, "^what walk returns = 3: expected a range, a list or a tuple"),
        ({"walk": lambda i: np.arange(3)}, "^what walk returns = array of int64"),
        ({"wrps": 2}, r"^m.launch = got an unexpected keyword argument 'wrps': expected m.launch\(name, \*, warps"),
    ],
)
def test_a_launch_with_a_mistake_is_named(launch: dict[str, Any], says: str) -> None:
    refused(with_mistake(lambda *_: None, **launch), says)


def test_a_condition_on_one_block_of_those_that_walk_alike_is_answered() -> None:
    """Where `apart` tells them from one another, the first one's number says it for all."""
    seen = list[int]()
    program = with_mistake(lambda b, *_: seen.append(len(b.i)) if b.i[0] > 0 else None, apart=lambda i: i > 0)
    fl.count(program, P.replace(len_q=300))
    assert seen == [4]
    assert (np.array([1]) == 1) is not None and bool((np.arange(2) < 3).all())


def test_an_index_is_summed_up_as_any_array() -> None:
    found = list[Any]()
    program = with_mistake(lambda b, *_: found.append((int(b.i.min()), bool((b.i >= 0).all()), b.i.tolist())))
    fl.count(program, P)
    assert found == [(0, True, [0, 1])]


@pytest.mark.parametrize("rows", [0, 1])
def test_an_output_that_isnt_written_is_named(rows: int) -> None:
    """Nothing of it, or a part: a count of such a program would be right, and of nothing."""

    @fl.program
    def forgetful(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("forgetful", rows=rows, warps=4):
            block.step("store")
            block.store(out, block.full(64, v.cols, 1.0), block.i, 64)
        return out

    refused(forgetful, f"^output out of forgetful = {rows * 16_384:,} of 25,600 bytes written: expected all of it")
    nothing = Problem(batch=1, heads=1, len_q=0, len_kv=4, head_dim=64, dtype="float16")
    assert fl.count(forgetful, nothing, tile=(64, 64)).hbm.write == 0


def test_a_function_without_the_decorator_is_told() -> None:
    def forgot(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any: ...

    refused(forgot, "^algorithm = the function forgot: expected a tile program: write @fl.program above def forgot$")
    for call in (lambda: fl.verify(forgot), lambda: fl.sweep([forgot], P)):  # pyright: ignore
        with pytest.raises(UsageError, match="write @fl.program above def forgot"):
            call()


def test_a_program_with_other_parameters_is_told() -> None:
    @fl.program
    def few(m: Any, q: Any, k: Any, problem: Any, tile: Any) -> Any: ...

    refused(few, r"^program = few\(m, q, k, problem, tile\): expected a function few\(m, q, k, v, problem, tile\)$")


def test_a_type_error_of_ones_own_stays() -> None:
    program = with_mistake(lambda b, *_: len(3))  # pyright: ignore
    with pytest.raises(TypeError, match="has no len"):
        fl.count(program, P)


@examples(60)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["store", "atomic_add"]),
)
def test_what_is_counted_is_what_is_stored(rows: int, cols: int, x_rows: int, x_cols: int, call: str) -> None:
    """Of registers of any shape and tiles of any shape: refused, or written in full and counted so."""
    p = Problem(batch=1, heads=1, len_q=rows, len_kv=1, head_dim=32, dtype="float32")

    @fl.program
    def stored(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("stored", warps=1):
            block.step("zero")
            block.store(out, block.full(rows, v.cols, 0.0), 0, rows)
            block.step("store")
            getattr(block, call)(out, block.full(x_rows, x_cols, 1.0), 0, rows, 0, cols)
        return out

    fits = x_rows == rows and x_cols in (cols, min(cols, 32))
    if not fits:
        refused(stored, f"block.{call}'s registers = ", p)
        return
    run = fl.simulate(stored, *fl.random_inputs(p))
    assert 4 * np.count_nonzero(run.out == 1) == run.counts.launches[0].bytes(
        f"hbm.{'write' if call == 'store' else 'atomic'}", step="store"
    )


CALLS: dict[str, tuple[str, ...]] = {
    "load": ("any", "tile", "size"), "fetch": ("any", "tile", "size"), "store": ("any", "any", "tile", "size"),
    "atomic_add": ("any", "any", "tile", "size"), "alloc": ("name", "size", "size"), "put": ("any", "any"), "get": ("any",),
    "to_registers": ("any",), "full": ("size", "size", "number"), "matmul": ("any", "any", "split"), "exp": ("any",),
    "log": ("any",), "tanh": ("any",), "maximum": ("any", "any"), "elementwise": ("function", "any", "any"),
    "mask": ("any", "tile", "tile"), "distances": ("any", "tile", "tile"), "free": ("any",), "arrive": ("any", "tile"),
}  # fmt: skip
"""Calls of a block, and the kinds of their arguments. "any" is whatever a program has: tensors, tiles, registers, numbers."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "size": (16, 1, 8, 32, 40), "name": ("a", "b"), "number": (0.0, 2.0), "function": (np.sqrt, np.add),
    "split": (("rows", "none"), ("none", "rows")),
}  # fmt: skip
METHODS = ("sum", "max", "finite", "nonzero", "T", "rows", "shape", "mean")
OPERATORS = {"+": operator.add, "*": operator.mul}


STEP = st.tuples(st.sampled_from([*CALLS, *METHODS, *OPERATORS]), st.tuples(*[st.integers(0, 30)] * 4))


@examples(300)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_programs_that_nobody_meant(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    """Random calls with operands of any kind and size run and count the same on shapes as on data, or one line refuses them."""

    def make(step: str, numbers: tuple[int, ...], block: Any, has: list[Any]) -> Any:
        choices = CHOICES | {"any": has, "tile": (0, 1, block.i)}
        kinds = CALLS.get(step, ("any", "any"))
        given = [choices[kind][n % len(choices[kind])] for kind, n in zip(kinds, numbers, strict=False)]
        if step in METHODS:  # a number's are Python's
            found = None if isinstance(given[0], float | int) else getattr(given[0], step)
            return found() if callable(found) else found
        if step in OPERATORS:
            return OPERATORS[step](*given)
        split = {"split": given.pop()} if step == "matmul" else {}
        return getattr(block, step)(*given, **split)

    @fl.program
    def drawn(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out, s = m.output("out"), m.workspace("s", 40)
        for block in m.launch("drawn", rows=problem.row_tiles(tile), warps=4):
            block.step("s")
            x = block.fetch(q, block.i, tile.rows)
            has = [x, block.load(k, 0, 16), q, out, s, block.alloc("buffer", 16, 16), 2.0, x.sum()]
            for step, numbers in steps:
                found = make(step, numbers, block, has)
                has += [] if found is None else [found]
            block.store(out, x, block.i, tile.rows)
        return out

    p = Problem(batch=1, heads=2, len_q=20, head_dim=16, dtype="float32")
    simulated = partial(fl.simulate, drawn, *fl.random_inputs(p), tile=(16, 16))
    said: list[object] = []
    for run in (partial(fl.count, drawn, p, tile=(16, 16)), lambda: simulated().counts):
        with np.errstate(all="ignore"):
            try:
                said.append(run())
            except UsageError as error:
                assert "\n" not in str(error)
                said.append(str(error))
    assert said[0] == said[1]
