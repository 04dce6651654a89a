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
        ("x + k", r"operand = k: expected registers: block.to_registers\(tile\)"),
        ("q * 2.0", r"operand = q: expected registers: block.to_registers\(tile\)"),
        ("2.0 * q", r"operand = q: expected registers"),
        ("np.sqrt(q)", r"operand = q: expected registers"),
    ],
)
def test_what_registers_cannot_do_names_the_call_that_can(typed: str, says: str):
    """Of x in registers and the tiles q and k in SRAM."""
    with pytest.raises(fl.UsageError, match=says) as raised:
        computed(eval(f"lambda x, q, k: {typed}", {"np": np}))
    assert "\n" not in str(raised.value)
