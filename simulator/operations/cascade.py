"""Attention of requests that begin with the same keys: a system prompt, say. Its operands, and a judge that repeats the prefix.

`k_prefix` and `v_prefix` hold the prefix once. k and v hold what each request has of its own, the suffix. Of how many rows of these
are a request's, `seq_lens` tell, if requests have different ones. Masks are aligned bottom-right in the suffix: query i sits at own
key n - len_q + i of n. A window counts back from there, on into the prefix. A causal mask, and what is visible to the right, is
about own keys. As the prefix comes first, that is attention over both, unless a request has fewer keys of its own than queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from simulator.counts import Spec
from simulator.dtypes import Array
from simulator.errors import UsageError
from simulator.operations.attention import ATTENTION, check_sinks
from simulator.operations.operation import Arrays, Operand, Operation, storage_dtypes
from simulator.operations.problems import SHORT, UNSEQUENCED, Problems, Sizes, crossed
from simulator.problem import Problem, Tile
from simulator.support import Support
from simulator.tensors import Batches


class Shared(Operand):
    """K or V of the prefix. All batches have the same rows."""

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        _, heads, rows, cols = self.shape(problem, tile)
        return Spec(self.name, heads, rows, cols, self.dtype_in(problem), role)


class Sides(NamedTuple):
    """The two parts of the keys, each as a plain problem. To the prefix, the queries of all requests are those of one. Where a
    window begins there, `first_keys` tells. Of own keys there are as many as there is room for."""

    prefix: Problem
    suffix: Problem

    @classmethod
    def of(cls, problem: Problem) -> Sides:
        """Of a problem with a prefix.

        >>> p = Problem(batch=3, heads=8, kv_heads=2, len_q=2, len_kv=50, len_prefix=1000, head_dim=64, dtype="float16")
        >>> [(side.batch, side.len_q, side.len_kv) for side in Sides.of(p)]
        [(1, 6, 1000), (3, 2, 50)]
        """
        p = problem
        plain = p.replace(len_prefix=None, lengths=None, len_q=p.len_q, len_kv=p.len_kv)
        every = {"batch": 1, "len_q": p.batch * p.len_q, "len_kv": p.len_prefix or 0}
        window = None if p.left is None else (p.left, None)
        return cls(plain.replace(**every, causal=False, window=window), plain)


def alike(problem: Problem) -> dict[int, Batches]:
    """Which requests have so many own keys.

    >>> p = Problem(batch=3, heads=8, lengths=[(1, 7), (1, 90), (1, 7)], len_prefix=1000, head_dim=64, dtype="float16")
    >>> alike(p)
    {7: (0, 2), 90: (1,)}
    """
    if problem.lengths is None:
        return {problem.len_kv: range(problem.batch)}
    places = defaultdict[int, list[int]](list)
    for b, keys in enumerate(problem.seq_lens):
        places[keys].append(b)
    return {keys: tuple(each) for keys, each in places.items()}


def aligned(problem: Problem, queries: Array, own: int | Array) -> Array:
    """The keys that queries of requests with so many own keys sit at, of prefix and own keys together."""
    return (problem.len_prefix or 0) + own - problem.len_q + queries


def first_keys(problem: Problem, queries: Array, own: int | Array) -> Array:
    """The first key of the prefix that each of some queries sees. It is `len_prefix` for one that sees none of it.

    >>> p = Problem(batch=1, heads=8, len_q=1, len_kv=30, len_prefix=100, window=(40, 0), head_dim=64, dtype="float16")
    >>> first_keys(p, np.zeros(3, int), np.array([10, 30, 90])).tolist()  # of one query, with three numbers of own keys
    [69, 89, 100]
    """
    at = aligned(problem, queries, own)
    return np.zeros_like(at) if problem.left is None else np.clip(at - problem.left, 0, problem.len_prefix or 0)


def _attended(problem: Problem, arrays: Arrays, does: Callable[[Array, Problem, Arrays], Arrays]) -> dict[str, Array]:
    """What attention `does` for all requests: it is given some of them, which have as many keys, as plain attention."""
    found = dict[str, Array]()
    for places, one, own in repeated(problem, arrays):
        for name, x in does(places, one, own).items():
            found.setdefault(name, np.empty((problem.batch, *x.shape[1:]), x.dtype))[places] = x
    return found


_AXES = {
    "q": "(batch, heads, len_q, head_dim)",
    "k": "(batch, kv_heads, len_kv, head_dim)",
    "v": "(batch, kv_heads, len_kv, head_dim)",
    "k_prefix": "(1, kv_heads, len_prefix, head_dim)",
    "v_prefix": "(1, kv_heads, len_prefix, head_dim)",
}
PREFIX = 128
"""The length of a prefix where a person gives lengths alone."""
_COUNTED: Problems = {
    "a-query": {"batch": 9, "heads": 8, "len_q": 1, "len_kv": 300, "len_prefix": 2999, "head_dim": 128},
    "some-queries": {"batch": 7, "heads": 8, "len_q": 5, "len_kv": 700, "len_prefix": 1024, "sinks": True},
    "soft-cap": {"batch": 2, "heads": 8, "len_q": 2, "len_kv": 300, "len_prefix": 1024, "soft_cap": 5.0},
    "wide-heads": {"batch": 3, "heads": 4, "len_q": 2, "len_kv": 99, "len_prefix": 600, "head_dim": 256},
    "odd-rows": {"batch": 3, "heads": 6, "len_q": 1, "len_kv": 0, "len_prefix": 799, "head_dim": 40},
    "no-prefix": {"batch": 3, "heads": 2, "len_q": 3, "len_kv": 600, "len_prefix": 0},
    "window": {"batch": 7, "heads": 8, "len_q": 3, "len_kv": 90, "len_prefix": 4500, "window": (900, 1)},
    "own-lengths": {
        "batch": 5, "heads": 8, "lengths": [(2, n) for n in (700, 0, 1, 513, 90)], "len_kv": 1100, "len_prefix": 2999,
    },
    "own-lengths window": {
        "batch": 40, "heads": 8, "lengths": [(1, 37 * n) for n in range(40)], "len_prefix": 2999, "window": (800, 0),
    },
}  # fmt: skip
"""Requests with a prefix in several chunks, for one tile of rows and for two."""
_SMALL: Sizes = {"batch": 5, "heads": 8, "kv_heads": 2, "len_q": 3, "head_dim": 64}


class CascadeAttention(Operation):
    """The forward pass over a shared prefix and each request's own keys."""

    name = "attention with a shared prefix"
    shares_prefix = True
    probes = "prefix"
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
        "own lengths": {
            "batch": 5, "heads": 4, "kv_heads": 2, "lengths": [(1, 530), (1, 0), (1, 7), (1, 64), (1, 7)], "len_prefix": 130,
        },
        "own lengths, causal, more room": {
            "batch": 3, "heads": 2, "kv_heads": 1, "lengths": [(5, 9), (5, 70), (5, 2)], "len_kv": 600, "len_prefix": 90,
            "causal": True,
        },
        "a window": {"batch": 3, "heads": 4, "kv_heads": 1, "len_q": 3, "len_kv": 20, "len_prefix": 2300, "window": (120, 1)},
        "a window that ends before the prefix": {
            "batch": 2, "heads": 2, "len_q": 2, "len_kv": 1100, "len_prefix": 80, "window": (300, 0),
        },
        "own lengths, a window": {
            "batch": 4, "heads": 4, "kv_heads": 1, "lengths": [(2, 700), (2, 30), (2, 0), (2, 160)], "len_prefix": 2200,
            "window": (150, 0), "sinks": True,
        },
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {
        "batch": 4, "lengths": [(1, 32), (1, 48), (1, 16), (1, 40)], "len_prefix": 96, "tile": "16x16",
    }  # fmt: skip
    sanitized: ClassVar[Problems] = {
        **UNSEQUENCED,
        "chunks, causal": {**_SMALL, "len_kv": 70, "len_prefix": 2100, "causal": True},
        "no prefix, sinks": {**_SMALL, "len_kv": 600, "len_prefix": 0, "sinks": True},
        "no own keys": {**_SMALL, "len_kv": 0, "len_prefix": 99},
        "own lengths, window": {**_SMALL, "len_q": None, "lengths": SHORT, "len_prefix": 2100, "window": (200, 0)},
    }
    inputs = (
        ATTENTION.operand("q"),
        Operand(name="k", axes=("batch", "kv_heads", "len_kv", "head_dim")),
        Operand(name="v", axes=("batch", "kv_heads", "len_kv", "head_dim_v")),
        Shared(name="k_prefix", axes=("whole", "kv_heads", "len_prefix", "head_dim")),
        Shared(name="v_prefix", axes=("whole", "kv_heads", "len_prefix", "head_dim_v")),
        Operand(name="seq_lens", axes=("batch",), dtype="int32", when=lambda p: p.lengths is not None,
                default=lambda p: p.seq_lens),
        ATTENTION.operand("sinks"),
    )  # fmt: skip
    outputs = ATTENTION.outputs

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, Sizes]:
        return crossed({name: {"head_dim": 64, "kv_heads": 2, **sizes} for name, sizes in _COUNTED.items()})

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        for name, axes in _AXES.items():
            x = arrays[name]
            if len(getattr(x, "shape", ())) != 4:
                raise UsageError(f"{name}.shape", tuple(x.shape) if hasattr(x, "shape") else type(x).__name__, axes)
        dtype = storage_dtypes(arrays, tuple(_AXES), "float16 or bfloat16")
        (batch, heads, len_q, dim), (_, kv_heads, len_kv, _), (*_, dim_v) = (tuple(arrays[n].shape) for n in "qkv")
        lens, given = arrays.get("seq_lens"), masks.get("lengths") is not None
        if lens is not None and not given:
            masks["lengths"] = [(len_q, len_kv)] * batch  # until values are looked at
        problem = Problem(
            batch=batch, heads=heads, kv_heads=kv_heads, len_q=len_q, len_kv=len_kv, len_prefix=arrays["k_prefix"].shape[2],
            head_dim=dim, head_dim_v=dim_v, dtype=dtype, sinks=arrays.get("sinks") is not None, **masks,
        )  # fmt: skip
        self.check(problem, {name: x for name, x in arrays.items() if x is not None})
        said = list(problem.seq_lens)
        if isinstance(lens, np.ndarray) and given and lens.tolist() != said:
            raise UsageError("seq_lens", lens.tolist(), f"{said}, as lengths say: it may be left out")
        return problem

    def settled(self, problem: Problem, arrays: Mapping[str, Any]) -> Problem:
        lens = arrays.get("seq_lens")
        if not isinstance(lens, np.ndarray):
            return problem
        self.check(problem, {"seq_lens": lens})
        return problem.replace(len_kv=problem.len_kv, lengths=[(problem.len_q, int(n)) for n in lens])

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation, with a look at NumPy's lengths and sinks."""
        super().check(problem, arrays, tile)
        check_sinks(arrays)
        if isinstance(lens := arrays.get("seq_lens"), np.ndarray):
            lengths: list[int] = lens.tolist()
            for b, n in enumerate(lengths):
                if not 0 <= n <= problem.len_kv:
                    accepted = f"an integer from 0 to {problem.len_kv:,}: k has room for so many keys"
                    raise UsageError(f"seq_lens[{b}]", n, accepted)

    def fitted(self, problem: Problem) -> Problem:
        if problem.page_size is not None or problem.ragged:
            return problem  # which is refused
        return problem if problem.len_prefix is not None else problem.replace(len_prefix=problem.len_kv)

    def batched(self, lengths: Sequence[Any]) -> dict[str, Any]:
        return {"batch": len(lengths), "len_prefix": PREFIX}

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """Keys and values as attention draws them, for each request anew. The prefix is what the first one begins with. Rows that
        are no request's are NaN."""
        p = problem
        drawn = ATTENTION.draw(Sides.of(p).suffix.replace(len_kv=(p.len_prefix or 0) + p.len_kv), seed, kind)
        shared = {f"{name}_prefix": drawn[name][:1, :, : p.len_prefix] for name in "kv"}
        own = {name: drawn[name][:, :, p.len_prefix :] for name in "kv"}
        lens = {} if p.lengths is None else {"seq_lens": np.array(p.seq_lens, np.int32)}
        for b, n in enumerate(p.seq_lens):
            for x in own.values():
                x[b, :, n:] = np.nan
        return lens | {name: np.ascontiguousarray(x) for name, x in {**drawn, **own, **shared}.items()}

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        return _attended(problem, arrays, lambda _, one, own: ATTENTION.judge(one, own))

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        return _attended(
            problem, arrays,
            lambda places, one, own: ATTENTION.bounds(one, own, {name: x[places] for name, x in truth.items()}),
        )  # fmt: skip

    def flops(self, problem: Problem) -> int:
        """Those of both sides: only among its own keys does a causal mask halve them."""
        prefix, suffix = Sides.of(problem)
        each = (suffix.replace(batch=len(places), len_kv=n) for n, places in alike(problem).items())
        return sum(map(ATTENTION.flops, (prefix, *each)))


def repeated(problem: Problem, arrays: Arrays) -> Iterable[tuple[Array, Problem, dict[str, Array]]]:
    """Requests with as many keys, as plain attention in which each has the prefix before its own keys. A mask says which of these a
    query sees."""
    p, (_, suffix) = CASCADE.settled(problem, arrays), Sides.of(problem)
    before = p.len_prefix or 0
    for n, requests in alike(p).items():
        places = np.array(requests)
        own = suffix.replace(batch=len(places), len_kv=n)
        visible = np.zeros((p.len_q, before + n), bool)
        for row in range(p.len_q):
            seen = own.visible_keys(row)
            visible[row, int(first_keys(p, np.array(row), n)) : before] = True
            visible[row, before + seen.start : before + seen.stop] = True
        whole = own.replace(len_kv=before + n, causal=False, window=None, mask="dense")
        both = {
            name: np.concatenate(
                [np.repeat(arrays[f"{name}_prefix"], len(places), axis=0), arrays[name][places, :, :n]], axis=2
            )
            for name in "kv"
        }
        sinks = {"sinks": arrays["sinks"]} if "sinks" in arrays else {}
        yield places, whole, {"q": arrays["q"][places], **sinks, **both, "mask": visible}


CASCADE = CascadeAttention()
