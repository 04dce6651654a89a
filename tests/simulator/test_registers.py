"""Registers take what NumPy's users type, and refuse the rest in a line that names the call to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator.dtypes import Array

PROBLEM = fl.Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float32")


def computed(f: Callable[..., Any]) -> tuple[Array, Array, int]:
    """q, f of q in registers, and the FLOPs that it counted. f gets registers of q, and tiles of q and k."""

    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("mine", rows=1, warps=4):
            x = block.fetch(q, block.i, 16)
            block.store(out, f(x, block.load(q, block.i, 16), block.load(k, 0, 16)), block.i, 16)
        return out

    q, k, v = fl.random_inputs(PROBLEM)
    run = fl.simulate(mine, q, k, v, tile=(16, 16))
    return q, run.out, run.counts.flops.other


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,
    "n - x": lambda x, n: n - x,
    "n * x": lambda x, n: n * x,
    "n / x": lambda x, n: n / x,
    "-x": lambda x, n: -x,
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(n=st.floats(-100, 100, width=32), numpy=st.booleans())
def test_numbers_may_stand_on_either_side(name: str, n: float, numpy: bool):
    number = np.float32(n) if numpy else n
    operation = OPERATIONS[name]

    def f(x: Any, *_: Any) -> Any:
        return operation(x, number)

    q, out, flops = computed(f)
    assert np.array_equal(out, operation(q, np.float32(n)))
    assert flops == q.size  # one per element, on whichever side the number stands


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("np.sqrt(x)", r"np.sqrt = .*block.elementwise\(np.sqrt, …\)"),
        ("np.exp(x)", r"np.exp = .*block.exp\(x\)"),
        ("np.maximum(x, x)", r"block.maximum\(a, b\)"),
        ("np.sum(x)", r"np.sum = .*x.sum\(\)"),
        ("np.add.reduce(x)", r"x.sum\(\) or x.max\(\)"),
        ("x**2", r"x \*\* 2 = .*x \* x"),
        ("x @ k", r"a @ b = .*block.matmul\(a, b, split="),
        ("q @ k", r"a @ b = .*block.matmul\(a, b, split="),
        ("q.T @ x", r"a @ b = .*block.matmul\(a, b, split="),
        ("np.matmul(x, k)", r"a @ b = "),
        ("x + k", r"operand of np.add = k in SRAM: expected registers: block.to_registers\(tile\)"),
        ("q * 2.0", r"operand = q: expected registers: block.to_registers\(tile\)"),
        ("2.0 * q", r"operand = q: expected registers"),
        ("np.sqrt(q)", r"operand = q: expected registers"),
        ("max(x, x)", r"a comparison of registers: expected block.maximum\(a, b\)"),
        ("abs(x)", r"block.elementwise\(np.abs, x\)"),
        ("x * block.full(8, 1, 1.0)", r"np.multiply = \(16, 16\) and \(8, 1\): .*is a .T missing"),
        ("block.matmul(q, k.T)", r"split = 'missing': expected .*'rows' or 'cols' .*, or 'none'"),
        ("block.matmul(q, k.T, split='rows')", r"split = 'rows': expected"),
        (
            "block.matmul(q, x, split=('rows', 'none'))",
            r"second operand = registers: expected a tile in SRAM.*block.put",
        ),
        ("block.matmul(hbm, k, split=('rows', 'none'))", r"first operand = q in HBM: expected .*block.load"),
        (
            "block.store(x, hbm, 0, 16)",
            r"the tensor of block.store\(tensor, registers, i, rows\) = registers: expected a tensor",
        ),
        ("block.store(hbm, k, 0, 16)", r"block.store's second operand = k in SRAM: expected registers"),
        ("block.fetch(x, 0, 16)", r"the tensor of block.fetch.* = registers"),
        ("block.load(x, 0, 16)", r"the tensor of block.load.* = registers"),
    ],
)
def test_what_registers_cannot_do_names_the_call_that_can(typed: str, says: str):
    """Of x in registers, the tiles q and k in SRAM, and q in HBM."""
    hbm = fl.HbmTensor(fl.Spec("q", heads=1, rows=16, cols=16, dtype="float32", role="input"))
    with pytest.raises(fl.UsageError, match=says) as raised:
        computed(eval(f"lambda x, q, k: (lambda block: {typed})(x._block)", {"np": np, "hbm": hbm}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"), [("mean", r"x.sum\(\) / x.cols"), ("shape", "x.rows"), ("nonsense", "one of .*nonzero")]
)
def test_what_registers_have_not_names_what_they_have(name: str, says: str):
    def f(x: Any, *_: Any) -> Any:
        return getattr(x, name)

    with pytest.raises(AttributeError, match=f"^x.{name} = unknown: expected .*{says}"):
        computed(f)


def test_a_tile_of_half_rows_is_told_where_it_is_chosen():
    with pytest.raises(fl.UsageError, match=r"^tile = Tile\(rows=32.0.*expected rows x cols, whole numbers"):
        fl.Config(tile=fl.Tile(32.0, 64), warps=4)  # pyright: ignore[reportArgumentType]
