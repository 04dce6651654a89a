"""Merges attention over parts of the keys: partial outputs of the same queries, weighed by their LSE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import zip_longest
from typing import Any

import numpy as np

from flashlab.base.host import is_array, kind_of
from simulator.dtypes import numpy_dtype
from simulator.errors import Said, UsageError, dtype_name
from simulator.fields import listed

__all__ = ["merge"]

_OUTPUTS = "float16", "bfloat16", "float32", "float64"
_LSES = "float32", "float64"
_KINDS = "numpy", "cupy", "torch", "jax"


def merge(outs: Iterable[Any], lses: Iterable[Any]) -> tuple[Any, Any]:
    """Attention over all keys, `(out, lse)`, of attention over parts of them. The same queries, any number of parts.

    `outs` are `(…, len_q, head_dim)` and `lses` `(…, len_q)`, natural logarithm, float32 or float64: sequences of arrays of
    NumPy, CuPy, torch or JAX, or one array with an axis of parts in front. The same kind comes back, in the same dtypes. A
    row of a part that saw no key has LSE -inf; whatever its output is, it counts as 0. If no part saw a key, the result is 0
    and -inf.

    Parts are merged two by two, neighbours first, in a tree that their number alone decides. So parts without keys at the end
    change no bit. Sums are float32, or float64 for LSEs of float64. The arrays' own framework computes, where they lie; inputs
    never change. Raises `UsageError` for parts that don't belong together.

    >>> import flashlab as fl, numpy as np
    >>> p = fl.Problem(batch=1, heads=2, len_q=3, len_kv=40, head_dim=8, dtype="float32")
    >>> q, k, v = fl.random_inputs(p)
    >>> parts = [fl.naive(q, k[:, :, cut], v[:, :, cut]) for cut in (slice(0, 30), slice(30, 40), slice(40, 40))]
    >>> out, lse = fl.merge([part.out for part in parts], [part.lse for part in parts])
    >>> bool(np.allclose(out, fl.naive(q, k, v).out)), bool(np.allclose(lse, fl.naive(q, k, v).lse))
    (True, True)
    """
    parts, logs = (
        listed(name, x, "a sequence of arrays, one per part") for name, x in (("outs", outs), ("lses", lses))
    )
    _check(parts, logs)
    of, width = _namespace(parts[0]), dtype_name(logs[0])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nodes = [_leaf(of, _cast(of, out, width), lse) for out, lse in zip(parts, logs, strict=True)]
        while len(nodes) > 1:
            pairs = zip_longest(nodes[::2], nodes[1::2])
            nodes = [left if right is None else _joined(of, left, right) for left, right in pairs]
        total, top, weights = nodes[0]
        out = total / of.where(weights == 0, of.ones_like(weights), weights)[..., None]
        return _cast(of, out, dtype_name(parts[0])), top + of.log(weights)


_Node = tuple[Any, Any, Any]
"""A sum of weighed outputs, the LSE that its weights are relative to, and the sum of the weights."""


def _leaf(of: Any, out: Any, lse: Any) -> _Node:
    empty = lse == -np.inf
    weights = of.where(empty, of.zeros_like(lse), of.ones_like(lse))
    return of.where(empty[..., None], of.zeros_like(out), out), lse, weights


def _joined(of: Any, left: _Node, right: _Node) -> _Node:
    (x, a, m), (y, b, n) = left, right
    top = of.maximum(a, b)
    base = of.where(top == -np.inf, of.zeros_like(top), top)
    u, w = of.exp(a - base), of.exp(b - base)
    # with one side alone nothing is added: a sum with 0 would lose the sign of a 0
    alone = of.where((a == -np.inf)[..., None], y, x * u[..., None] + y * w[..., None])
    return of.where((b == -np.inf)[..., None], x, alone), top, m * u + n * w


def _namespace(x: Any) -> Any:
    """The module of an array's framework. What is called here has one name in all of them."""
    kind = kind_of(x)
    return import_module("jax.numpy" if kind == "jax" else kind)


def _cast(of: Any, x: Any, dtype: str) -> Any:
    return x.to(getattr(of, dtype)) if kind_of(x) == "torch" else x.astype(numpy_dtype(dtype))


def _check(outs: Sequence[Any], lses: Sequence[Any]) -> None:
    """Raise `UsageError` for parts that don't belong together, by kind, shape and dtype alone."""
    if not outs:
        raise UsageError("outs", Said("no parts"), "at least one")
    if len(lses) != len(outs):
        raise UsageError("lses", Said(f"{len(lses)} parts"), f"{len(outs)}, as many as outs has")
    first = outs[0]
    for name, parts, dtypes in (("outs", outs, _OUTPUTS), ("lses", lses, _LSES)):
        for i, x in enumerate(parts):
            if not is_array(x) or kind_of(x) != kind_of(first) or kind_of(x) not in _KINDS:
                raise UsageError(f"{name}[{i}]", type(x).__name__, f"an array of {', '.join(_KINDS)}, all of one kind")
            if kind_of(x) == "torch" and (x.is_nested or str(x.layout) != "torch.strided"):
                raise UsageError(
                    f"{name}[{i}]", Said("a nested tensor" if x.is_nested else "a sparse tensor"), "a dense one"
                )
            if (dtype := dtype_name(x)) not in dtypes or dtype != dtype_name(parts[0]):
                raise UsageError(f"{name}[{i}].dtype", dtype, f"{' or '.join(dtypes)}, in all parts the same")
            shape = tuple(first.shape) if name == "outs" else tuple(first.shape)[:-1]
            if tuple(x.shape) != shape or not first.shape:
                raise UsageError(
                    f"{name}[{i}].shape", tuple(x.shape), f"{shape or '(…, head_dim)'}, as outs[0] has its rows"
                )
