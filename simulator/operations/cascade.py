"""Attention of requests that begin with the same keys: a system prompt, say. Its operands, and a judge that repeats the prefix.

`k_prefix` and `v_prefix` hold the prefix once. k and v hold what each request has of its own, the suffix. Every query sees all of
the prefix. A causal mask is about the suffix, where it is aligned bottom-right: as the prefix comes first, that is causal attention
over both, unless a request has fewer keys of its own than queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from simulator.counts import Spec
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.operations.attention import ATTENTION, check_sinks
from simulator.operations.operation import Arrays, Operand, Operation, storage_dtypes
from simulator.problem import Problem, Tile


class Shared(Operand):
    """K or V of the prefix. All batches have the same rows."""

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        _, heads, rows, cols = self.shape(problem, tile)
        return Spec(self.name, heads, rows, cols, self.dtype_in(problem), role)


class Sides(NamedTuple):
    """The two parts of the keys, each as a plain problem. To the prefix, the queries of all requests are those of one."""

    prefix: Problem
    suffix: Problem

    @classmethod
    def of(cls, problem: Problem) -> Sides:
        """Of a problem with a prefix.

        >>> p = Problem(batch=3, heads=8, kv_heads=2, len_q=2, len_kv=50, len_prefix=1000, head_dim=64, dtype="float16")
        >>> [(side.batch, side.len_q, side.len_kv) for side in Sides.of(p)]
        [(1, 6, 1000), (3, 2, 50)]
        """
        plain = problem.replace(len_prefix=None, len_kv=problem.len_kv)
        every = {"batch": 1, "len_q": problem.batch * problem.len_q, "len_kv": problem.len_prefix or 0}
        return cls(plain.replace(**every, causal=False), plain)


_AXES = {
    "q": "(batch, heads, len_q, head_dim)",
    "k": "(batch, kv_heads, len_kv, head_dim)",
    "v": "(batch, kv_heads, len_kv, head_dim)",
    "k_prefix": "(1, kv_heads, len_prefix, head_dim)",
    "v_prefix": "(1, kv_heads, len_prefix, head_dim)",
}


class CascadeAttention(Operation):
    """The forward pass over a shared prefix and each request's own keys."""

    name = "attention with a shared prefix"
    shares_prefix = True
    kinds: ClassVar[Mapping[str, str]] = ATTENTION.kinds
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one request": {"heads": 2, "len_q": 1, "len_kv": 40, "len_prefix": 200},
        "requests, GQA": {"batch": 5, "heads": 8, "kv_heads": 2, "len_q": 1, "len_kv": 30, "len_prefix": 130},
        "chunks": {"batch": 2, "heads": 2, "len_q": 1, "len_kv": 520, "len_prefix": 2060},
        "tiles of rows": {"batch": 9, "heads": 8, "kv_heads": 1, "len_q": 2, "len_kv": 20, "len_prefix": 70},
        "several new tokens, causal": {
            "batch": 3, "heads": 4, "kv_heads": 1, "len_q": 5, "len_kv": 70, "len_prefix": 33, "causal": True,
        },
        "fewer own keys than queries, causal": {"batch": 2, "heads": 2, "len_q": 20, "len_kv": 7, "len_prefix": 50, "causal": True},
        "many new tokens": {"batch": 1, "heads": 2, "kv_heads": 1, "len_q": 70, "len_kv": 90, "len_prefix": 40},
        "no prefix": {"batch": 2, "heads": 2, "len_q": 1, "len_kv": 60, "len_prefix": 0},
        "no own keys": {"batch": 3, "heads": 2, "len_q": 1, "len_kv": 0, "len_prefix": 60},
        "head dim 128, a scale": {
            "batch": 2, "heads": 1, "len_q": 2, "len_kv": 90, "len_prefix": 64, "head_dim": 128, "scale": 0.3,
        },
        "an odd head dim": {"batch": 2, "heads": 2, "len_q": 1, "len_kv": 33, "len_prefix": 40, "head_dim": 19},
        "a soft cap, sinks": {
            "batch": 3, "heads": 4, "kv_heads": 2, "len_q": 2, "len_kv": 40, "len_prefix": 90, "soft_cap": 2.0, "sinks": True,
        },
    }  # fmt: skip
    inputs = (
        ATTENTION.operand("q"),
        Operand(name="k", axes=("batch", "kv_heads", "len_kv", "head_dim")),
        Operand(name="v", axes=("batch", "kv_heads", "len_kv", "head_dim_v")),
        Shared(name="k_prefix", axes=("whole", "kv_heads", "len_prefix", "head_dim")),
        Shared(name="v_prefix", axes=("whole", "kv_heads", "len_prefix", "head_dim_v")),
        ATTENTION.operand("sinks"),
    )
    outputs = ATTENTION.outputs

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        for name, axes in _AXES.items():
            x = arrays[name]
            if len(getattr(x, "shape", ())) != 4:
                raise UsageError(f"{name}.shape", tuple(x.shape) if hasattr(x, "shape") else type(x).__name__, axes)
        dtype = storage_dtypes(arrays, tuple(_AXES), "float16 or bfloat16")
        (batch, heads, len_q, dim), (_, kv_heads, len_kv, _), (*_, dim_v) = (tuple(arrays[n].shape) for n in "qkv")
        problem = Problem(
            batch=batch, heads=heads, kv_heads=kv_heads, len_q=len_q, len_kv=len_kv, len_prefix=arrays["k_prefix"].shape[2],
            head_dim=dim, head_dim_v=dim_v, dtype=dtype, sinks=arrays.get("sinks") is not None, **masks,
        )  # fmt: skip
        self.check(problem, {name: x for name, x in arrays.items() if x is not None})
        return problem

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation, with a look at NumPy's sinks."""
        super().check(problem, arrays, tile)
        check_sinks(arrays)

    def fitted(self, problem: Problem) -> Problem:
        if problem.page_size is not None or problem.lengths is not None:
            return problem  # which is refused
        return problem if problem.len_prefix is not None else problem.replace(len_prefix=problem.len_kv)

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """Keys and values as attention draws them, for each request anew. The prefix is what the first one begins with."""
        p = problem
        drawn = ATTENTION.draw(Sides.of(p).suffix.replace(len_kv=(p.len_prefix or 0) + p.len_kv), seed, kind)
        shared = {f"{name}_prefix": drawn[name][:1, :, : p.len_prefix] for name in "kv"}
        own = {name: drawn[name][:, :, p.len_prefix :] for name in "kv"}
        return {name: np.ascontiguousarray(x) for name, x in {**drawn, **own, **shared}.items()}

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        return ATTENTION.judge(*repeated(problem, arrays))

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        return ATTENTION.bounds(*repeated(problem, arrays), truth)

    def flops(self, problem: Problem) -> int:
        """Those of both sides: only among its own keys does a causal mask halve them."""
        return sum(map(ATTENTION.flops, Sides.of(problem)))


def repeated(problem: Problem, arrays: Arrays) -> tuple[Problem, dict[str, Array]]:
    """Plain attention in which each request has the prefix before its own keys. A mask says which of these a query sees."""
    p, (_, suffix) = problem, Sides.of(problem)
    before = p.len_prefix or 0
    visible = np.zeros((p.len_q, before + p.len_kv), bool)
    for row in range(p.len_q):
        visible[row, : before + suffix.visible_keys(row).stop] = True
    whole = suffix.replace(len_kv=before + p.len_kv, causal=False, mask="dense")
    both = {
        name: np.concatenate([np.repeat(arrays[f"{name}_prefix"], p.batch, axis=0), arrays[name]], axis=2)
        for name in "kv"
    }
    rest = {name: arrays[name] for name in ("q", "sinks") if name in arrays}
    return whole, {**rest, **both, "mask": visible}


CASCADE = CascadeAttention()
