"""What a test of attention may use: the row rule alone, and audits of tests against wrong kernels.

`assert_attention_close` holds one result to the rule of `fl.verify`. `audit_test` and `audit_inputs` ask what a test, or a
tolerance, lets pass. `ZOO` are the wrong kernels by name, and `wrong_attention(name)` is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import numpy as np

from flashlab.base.host import operand
from flashlab.verify.audit import ZOO, Audit, Audited, audit_inputs, audit_test
from flashlab.verify.rule import Align, expect, judge
from flashlab.verify.zoo import Fault, tiled
from simulator.errors import UsageError, among, dtype_name, unknown
from simulator.operations.attention import problem_of
from simulator.problem import Masks

__all__ = ["ZOO", "Audit", "Audited", "assert_attention_close", "audit_inputs", "audit_test", "wrong_attention"]


def assert_attention_close(
    out: Any, q: Any, k: Any, v: Any, *, lse: Any = None, align: Align = "bottom-right", sinks: Any = None,
    alibi_slopes: Any = None, mask: Any = None, **masks: Unpack[Masks],
) -> float:  # fmt: skip
    """Assert that `out` is attention of q, k and v, by the row rule: no tolerance has to be chosen.

    Arrays are `(batch, heads, length, head_dim)` of NumPy, CuPy, torch or JAX, in float32, float16 or bfloat16. `lse` is
    `(batch, heads, len_q)`, the natural logarithm, and is unchecked if left out. The keywords are those of `fl.naive`:
    causal, window, scale, soft_cap, lengths. `align` is where a causal mask ends, "bottom-right" or "top-left". Returns the
    worst row's error over what the rule allows. Raises AssertionError that names the worst row, and `UsageError` for bad
    input.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=16, head_dim=32, dtype="float16", causal=True)
    >>> q, k, v = fl.random_inputs(p)
    >>> fl.testing.assert_attention_close(fl.naive(q, k, v, causal=True).out.astype(q.dtype), q, k, v, causal=True) < 1
    True
    """
    __tracebackhide__ = True
    among("align", align, ("bottom-right", "top-left"))
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes, "mask": mask}
    arrays = {name: operand(name, x) for name, x in given.items() if x is not None}
    p = problem_of(**arrays, **masks)
    if p.dropout:
        raise UsageError("dropout", p.dropout, "None: which weights were dropped isn't known here")
    if align == "top-left" and (p.lengths is not None or p.window is not None or p.alibi):
        raise UsageError("align", align, "bottom-right with lengths, a window or ALiBi")
    found = {"out": operand("out", out), **({} if lse is None else {"lse": operand("lse", lse)})}
    for name, x in found.items():
        if dtype_name(x) not in ("float16", "bfloat16", "float32", "float64"):
            raise UsageError(f"{name}.dtype", dtype_name(x), "float16, bfloat16, float32 or float64")
    with np.errstate(all="ignore"):
        verdict = judge(expect(p, **arrays, align=align), found["out"], found.get("lse"))
    if not verdict.passed:
        raise AssertionError(verdict.message)
    return verdict.worst


def wrong_attention(fault: str) -> Callable[..., Any]:
    """The wrong kernel of that name in `ZOO`: a function (q, k, v, causal=False, scale=None, window=None) of NumPy arrays.

    It returns (out, lse). Raises `UsageError` for a name that there isn't.

    >>> import flashlab as fl
    >>> len(fl.testing.ZOO) >= 60, fl.verify(fl.testing.wrong_attention("scale missing"), checks=["rule"]).verdict
    (True, 'failed')
    """
    if not isinstance(fault, str) or fault not in ZOO:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("fault", fault, ZOO)
    return tiled(cast("Fault", fault))
