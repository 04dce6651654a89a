"""Attention over K and V in pages, as servers keep them: its operands, and a judge that gathers the pages first.

A pool has `pages` pages of `page_size` keys each. The block table says which pages a request has, in the order of its keys:
key n of request b is row `n % page_size` of page `block_table[b, n // page_size]`. Nothing that a request doesn't own says
anything: neither the rest of its last page, nor the rest of its line of the table, nor other pages. Requests may share pages.

Once gathered, the keys of a request are those of plain attention with a batch of 1. So are the judge and the rule for errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from simulator.counts import Spec
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError
from simulator.operations.attention import ATTENTION, check_sinks
from simulator.operations.caches import check_scales, dtypes_of, quantized, scale_fields, scales_of
from simulator.operations.draws import random_optional
from simulator.operations.operation import Arrays, Operand, Operation
from simulator.operations.problems import SHORT, UNSEQUENCED, Problems, Sizes, crossed, served, shaped
from simulator.problem import DTYPES, Problem, Tile
from simulator.support import Support

STRAY = 2**31 - 1
"""What `draw` fills the rest of a block table with: no page has this number."""
PAGE_SIZE = 16
"""That of a problem that says none."""


class Pool(Operand):
    """K or V in pages. Each KV head has the rows of all pages, one page behind the other."""

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        _, heads, _, cols = self.shape(problem, tile)
        return Spec(self.name, heads, problem.pages * self.shape(problem)[2], cols, self.dtype_in(problem), role)

    def by_head(self, x: Array, lead: tuple[int, ...], spec: Spec) -> Array:
        return super().by_head(x.swapaxes(0, 1), lead, spec)

    def from_heads(self, x: Array, shape: tuple[int, ...]) -> Array:
        pages, heads, *rest = shape
        return x.reshape(heads, pages, *rest).swapaxes(0, 1)


class PoolOfScales(Pool):
    """The scales of keys or values in pages. They lie like K and V, without a head dim."""

    def spec(self, problem: Problem, tile: Tile | None, role: str) -> Spec:
        pages, heads, size = self.shape(problem, tile)
        return Spec(self.name, heads, pages * size, 1, "float32", role, vector=True)


def _scale(**known: Any) -> Operand:
    return (PoolOfScales if "pages" in known["axes"] else Operand)(**known)


def _by_batch(name: str, *axes: str, **known: Any) -> tuple[Operand, Operand]:
    """An array of all queries: by requests, or with those of all requests one behind the other."""
    return (
        Operand(name=name, axes=("batch", "heads", "len_q", *axes), when=lambda p: not p.varlen, **known),
        Operand(name=name, axes=("rows_batch", "heads", "len_q", *axes), when=lambda p: p.varlen, **known),
    )


_TOKENS = ("pages", "kv_heads", "page_size")

_REQUESTS: Sizes = {
    "head_dim": 64,
    "heads": 8,
    "kv_heads": 2,
    "batch": 4,
    "lengths": [(2, n) for n in (2999, 0, 1, 700)],
}
_PAGES: Problems = {
    label: sizes
    for n in (1, 16, 100)
    for label, sizes in crossed({f"requests page {n}": {**_REQUESTS, "page_size": n}}).items()
}
_DRAFTS: Problems = {
    "drafts": {**_REQUESTS, "lengths": [(7, n) for n in (2999, 0, 3, 519)], "page_size": 16, "drafts": True},
    "32 drafts window": {
        **_REQUESTS, "lengths": [(32, n) for n in (2999, 0, 20, 527)], "page_size": 100, "drafts": True, "window": (900, 0),
    },
}  # fmt: skip
_VARLEN: Problems = {
    f"varlen page {n} {word}": {
        **_REQUESTS, "batch": 5, "lengths": [(300, 2999), (0, 17), (1, 1), (70, 700), (5, 0)], "page_size": n, "causal": word ==
        "causal", "varlen": True,
    }
    for n in (16, 100) for word in ("full", "causal")
}  # fmt: skip
_SMALL: Sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True, "page_size": 16}


class PagedAttention(Operation):
    """The forward pass over pages."""

    name = "paged attention"
    in_pages = True
    probes = "pages"
    plain: ClassVar[Operation] = ATTENTION
    """What each request is once its pages are gathered."""
    pools: ClassVar[tuple[str, ...]] = ("k", "v")
    """The operands that lie in pages."""
    kinds: ClassVar[Mapping[str, str]] = ATTENTION.kinds
    shapes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one request": {"heads": 2, "len_q": 1, "len_kv": 200, "page_size": 16},
        "requests, GQA": {
            "batch": 4, "heads": 8, "kv_heads": 2, "lengths": [(1, 300), (1, 1), (1, 0), (1, 70)], "page_size": 16, "pages": 40,
        },
        "pages of one key": {"batch": 2, "heads": 2, "lengths": [(1, 90), (1, 33)], "page_size": 1},
        "large pages": {"batch": 2, "heads": 2, "lengths": [(1, 256), (1, 257)], "page_size": 256, "pages": 5},
        "an odd page": {"batch": 2, "heads": 3, "lengths": [(1, 100), (1, 7)], "page_size": 7, "len_kv": 500},
        "several new tokens, causal": {
            "batch": 3, "heads": 4, "kv_heads": 1, "lengths": [(5, 150), (5, 5), (5, 2)], "causal": True, "page_size": 8,
        },
        "many new tokens, causal": {
            "batch": 2, "heads": 2, "kv_heads": 1, "lengths": [(150, 310), (150, 150)], "causal": True, "page_size": 16,
        },
        "a window": {"batch": 2, "heads": 2, "lengths": [(3, 400), (3, 60)], "window": (90, 0), "page_size": 32},
        "head dim 128, a scale": {
            "batch": 2, "heads": 1, "head_dim": 128, "lengths": [(2, 130), (2, 64)], "scale": 0.3, "page_size": 64,
        },
        "an odd head dim": {"batch": 2, "heads": 2, "head_dim": 19, "lengths": [(1, 64), (1, 40)], "page_size": 4},
        "a soft cap, sinks, GQA": {
            "batch": 3, "heads": 6, "kv_heads": 2, "lengths": [(2, 300), (2, 0), (2, 41)], "page_size": 16, "soft_cap": 2.0,
            "sinks": True,
        },
        "sinks, causal": {
            "batch": 2, "heads": 2, "kv_heads": 1, "lengths": [(150, 310), (150, 90)], "causal": True, "page_size": 16,
            "sinks": True,
        },
        "different numbers of new tokens, causal": {
            "batch": 5, "heads": 4, "kv_heads": 2, "lengths": [(1, 150), (70, 70), (0, 9), (5, 2), (130, 300)], "causal": True,
            "page_size": 8, "varlen": True,
        },
        "different numbers, a window": {
            "batch": 3, "heads": 2, "lengths": [(3, 64), (150, 200), (1, 0)], "window": (40, 0), "page_size": 16, "varlen": True,
        },
        "drafts": {
            "batch": 3, "heads": 4, "kv_heads": 1, "lengths": [(5, 150), (5, 5), (5, 2)], "drafts": True, "page_size": 8,
        },
        "32 drafts, a window": {
            "batch": 2, "heads": 3, "lengths": [(32, 270), (32, 70)], "drafts": True, "window": (90, 20), "page_size": 16,
        },
    }  # fmt: skip
    shown: ClassVar[Mapping[str, Any]] = {
        "batch": 2, "lengths": [(2, 250), (2, 90)], "page_size": 16, "pages": 28, "tile": "16x16",
    }  # fmt: skip
    sanitized: ClassVar[Problems] = {
        **UNSEQUENCED,
        "requests": {**_SMALL, "batch": 5, "lengths": SHORT},
        "varlen": {**_SMALL, "batch": 4, "lengths": [(70, 97), (0, 5), (3, 3), (65, 130)], "varlen": True},
        "drafts": {**_SMALL, "batch": 3, "lengths": [(20, n) for n in (520, 0, 7)], "causal": False, "drafts": True},
    }
    inputs = (
        *_by_batch("q", "head_dim"),
        Pool(name="k", axes=("pages", "kv_heads", "page_size", "head_dim"), dtype="kv"),
        Pool(name="v", axes=("pages", "kv_heads", "page_size", "head_dim_v"), dtype="kv"),
        Operand(name="block_table", axes=("batch", "table_pages"), dtype="int32"),
        Operand(name="seq_lens", axes=("batch",), dtype="int32", default=lambda p: p.seq_lens),
        Operand(
            name="cu_seqlens_q",
            axes=("offsets",),
            dtype="int32",
            when=lambda p: p.varlen,
            default=lambda p: p.cu_seqlens_q,
        ),
        *scales_of("k", _TOKENS, _scale),
        *scales_of("v", _TOKENS, _scale),
        ATTENTION.operand("sinks"),
        Operand(name="draft_mask", axes=("batch", "len_q"), dtype="uint32", when=lambda p: p.drafts, default=2**32 - 1),
    )
    outputs = (*_by_batch("out", "head_dim_v", dtype="out"), *_by_batch("lse", dtype="float32", asked=True))

    def matrix(self, support: Support, dtype: str, *, boxes: bool) -> dict[str, Sizes]:
        request = _PAGES["requests page 16 causal"]
        return {
            **shaped(support, boxes),
            **_PAGES,
            **(_DRAFTS if "drafts" in support.masks else {}),
            **(_VARLEN if "varlen" in support.masks else {}),
            **served(support.masks, dtype, request, request),
        }

    def problem(self, arrays: Mapping[str, Any], **masks: Any) -> Problem:
        named = {name: arrays[name] for name in ("q", "k", "v", "block_table")}
        axes = {"q": "(batch, heads, len_q, head_dim)", "block_table": "(batch, pages per request)"}
        for name, x in named.items():
            wanted = axes.get(name, "(pages, kv_heads, page_size, head_dim)")
            if len(getattr(x, "shape", ())) != wanted.count(",") + 1:
                raise UsageError(f"{name}.shape", tuple(x.shape) if hasattr(x, "shape") else type(x).__name__, wanted)
        dtype, kv_dtype = dtypes_of(named, f"one of {', '.join(DTYPES)}")
        scales = scale_fields(dtype, kv_dtype, {name: arrays.get(name) for name in ("k_scale", "v_scale")})
        (batch, heads, len_q, dim), (pages, kv_heads, size, _), (*_, dim_v) = (
            tuple(named[name].shape) for name in "qkv"
        )
        varlen = arrays.get("cu_seqlens_q") is not None
        if varlen and batch != 1:
            raise UsageError(
                "q.shape", tuple(named["q"].shape), "(1, heads, queries of all requests, head_dim) with cu_seqlens_q"
            )
        batch = named["block_table"].shape[0] if varlen else batch
        if size < 1:
            raise UsageError("k.shape", tuple(named["k"].shape), "pages of at least one key")
        problem = Problem(
            batch=batch, heads=heads, kv_heads=kv_heads, len_q=len_q, len_kv=named["block_table"].shape[1] * size, head_dim=dim,
            head_dim_v=dim_v, dtype=dtype, page_size=size, pages=pages, drafts=arrays.get("draft_mask") is not None, varlen=varlen,
            sinks=arrays.get("sinks") is not None, **scales, **masks,
        )  # fmt: skip
        self.check_shapes(problem, arrays)
        return problem

    def check_shapes(self, problem: Problem, arrays: Mapping[str, Any]) -> None:
        """Raise `UsageError` for arrays that don't fit the problem, without a look at values."""
        super().check(problem, {name: x for name, x in arrays.items() if x is not None})

    def settled(self, problem: Problem, arrays: Mapping[str, Any]) -> Problem:
        told: dict[str, Array] = {
            name: arrays[name] for name in ("seq_lens", "cu_seqlens_q") if isinstance(arrays.get(name), np.ndarray)
        }
        if problem.lengths is not None or not told or (problem.varlen and "cu_seqlens_q" not in told):
            return problem
        self.check(problem, told)
        queries = np.diff(told["cu_seqlens_q"]).tolist() if problem.varlen else [problem.len_q] * problem.batch
        keys = told["seq_lens"].tolist() if "seq_lens" in told else problem.seq_lens
        pairs = tuple(zip(queries, keys, strict=True))
        if pairs == problem.pairs:
            return problem
        return problem.replace(len_q=problem.len_q, len_kv=problem.len_kv, pages=problem.pages, lengths=pairs)

    def check(self, problem: Problem, arrays: Mapping[str, Any], tile: Tile | None = None) -> None:
        """As for any operation. What NumPy's lengths and block table hold is looked at, too: to look at values on a GPU would wait
        for the GPU."""
        super().check(problem, arrays, tile)
        p, lens, table = problem, arrays.get("seq_lens"), arrays.get("block_table")
        check_sinks(arrays)
        if isinstance(arrays.get("cu_seqlens_q"), np.ndarray):
            _check_begins(p, arrays["cu_seqlens_q"])
        lengths: list[int] = lens.tolist() if isinstance(lens, np.ndarray) else list(p.seq_lens)
        if isinstance(lens, np.ndarray):
            for b, n in enumerate(lengths):
                room = f"an integer from 0 to {p.len_kv:,}: the block table has room for so many keys"
                if not 0 <= n <= p.len_kv:
                    raise UsageError(f"seq_lens[{b}]", n, room)
                if p.lengths is not None and n != p.seq_lens[b]:
                    raise UsageError(f"seq_lens[{b}]", n, f"{p.seq_lens[b]}, as lengths say: it may be left out")
        if isinstance(table, np.ndarray):
            entries: Array = table  # pyright: ignore[reportUnknownVariableType]
            for b, n in enumerate(lengths):
                own = entries[b, : -(-n // (p.page_size or 1))]
                wrong = np.flatnonzero((own < 0) | (own >= p.pages))
                if wrong.size:
                    accepted = f"a page of the pool, from 0 to {p.pages - 1:,}"
                    raise UsageError(f"block_table[{b}, {wrong[0]}]", int(own[wrong[0]]), accepted)
            if p.quantized:
                owned = self._owned(p, entries, lengths)[:, None]
                scales = {
                    name: arrays[name] for name in ("k_scale", "v_scale") if isinstance(arrays.get(name), np.ndarray)
                }
                check_scales(p, {name: np.where(owned, x, 1) if x.ndim == 3 else x for name, x in scales.items()})

    @staticmethod
    def _owned(problem: Problem, table: Array, lengths: list[int]) -> Array:
        """Which keys of the pool some request has, (pages, page_size)."""
        size = problem.page_size or 1
        owned = np.zeros((problem.pages, size), bool)
        for line, n in zip(table, lengths, strict=True):
            keys = np.arange(n)
            owned[line[keys // size], keys % size] = True
        return owned

    def fitted(self, problem: Problem) -> Problem:
        return problem if problem.page_size else problem.replace(page_size=PAGE_SIZE)

    def batched(self, lengths: Sequence[Any]) -> dict[str, Any]:
        return {"batch": len(lengths), "page_size": PAGE_SIZE}

    def idle(self, problem: Problem) -> bool:
        return not problem.len_q

    def draw(self, problem: Problem, seed: int = 0, kind: str = "normal") -> dict[str, Array]:
        """Requests as attention draws them, in pages of any order. All that no request owns is NaN, or a page that isn't there.

        Of drafts, a random half is visible.
        """
        p, drawn = problem, dict[str, Array]()
        if p.pages < p.pages_of_lengths:
            raise UsageError("pages", p.pages, f"at least {p.pages_of_lengths:,} for random inputs, which share none")
        plain = p.replace(dtype="float32", kv_dtype=None, k_scale=None, v_scale=None) if p.quantized else p
        each = [self.plain.draw(one.gathered, seed + i, kind) for i, one in enumerate(plain.sequences)]
        free = np.random.default_rng((seed, 5)).permutation(p.pages).tolist()
        table = drawn["block_table"] = np.full((p.batch, p.table_pages), STRAY, np.int32)
        drawn["q"] = np.concatenate([one["q"] for one in each], 2 if p.varlen else 0).astype(numpy_dtype(p.dtype))
        for name in self.pools:
            drawn[name] = np.full(self.operand(name).shape(p), np.nan, numpy_dtype(plain.dtype))
        for b, one in enumerate(each):
            for i, first in enumerate(range(0, p.seq_lens[b], p.page_size or 1)):
                page = table[b, i] = free.pop()
                for name in self.pools:
                    keys = one[name][0, :, first : first + (p.page_size or 1)]
                    drawn[name][page, :, : keys.shape[1]] = keys
        scales = dict[str, Array]()
        for name in "kv" if p.quantized else "":
            owned = ~np.isnan(drawn[name][..., 0])
            drawn[name], scale = quantized(drawn[name], p.kv_dtype, getattr(p, f"{name}_scale"), owned)
            if scale is not None:
                scales[f"{name}_scale"] = np.where(owned, scale, np.float32(np.nan)) if scale.ndim == 3 else scale
        shown = np.random.default_rng((seed, 6)).integers(0, 2**32, (p.batch, p.len_q), np.uint32)
        lens = {"seq_lens": np.array(p.seq_lens, np.int32)}
        if p.varlen:
            lens["cu_seqlens_q"] = np.array(p.cu_seqlens_q, np.int32)
        return (
            {x.name: drawn[x.name] for x in self.required}
            | scales
            | lens
            | random_optional(p, seed)
            | ({"draft_mask": shown} if p.drafts else {})
        )

    def pages(self, problem: Problem, arrays: Arrays) -> list[list[int]]:
        sequences = self.settled(problem, arrays).sequences
        return [line[: one.table_pages].tolist() for line, one in zip(arrays["block_table"], sequences, strict=True)]

    def gathered(self, problem: Problem, arrays: Arrays) -> list[tuple[Problem, dict[str, Array]]]:
        """Each request as plain attention: its problem, and its q, k and v."""
        found: list[tuple[Problem, dict[str, Array]]] = []
        settled = self.settled(problem, arrays)
        for b, one in enumerate(settled.sequences):
            pages = arrays["block_table"][b, : one.table_pages]
            rows = {name: arrays[name][pages].swapaxes(0, 1) for name in self.pools}  # (kv_heads, pages, page_size, …)
            flat = {name: x.reshape(1, x.shape[0], -1, x.shape[-1])[:, :, : one.len_kv] for name, x in rows.items()}
            for name in ("k_scale", "v_scale"):
                if name in arrays:
                    scale = arrays[name]
                    own = (
                        scale[pages].swapaxes(0, 1).reshape(1, one.kv_heads, -1)[..., : one.len_kv]
                        if scale.ndim == 3
                        else scale
                    )
                    flat[name] = own
            if one.sinks:
                flat["sinks"] = arrays["sinks"]
            if one.drafts:
                flat["mask"] = shown_drafts(one, arrays["draft_mask"][b])
            found.append((one.gathered, {"q": rows_of(settled, arrays["q"], b), **flat}))
        return found

    def judge(self, problem: Problem, arrays: Arrays) -> dict[str, Array]:
        each = [self.plain.judge(p, own) for p, own in self.gathered(problem, arrays)]
        return {name: np.concatenate([one[name] for one in each], 2 if problem.varlen else 0) for name in each[0]}

    def bounds(self, problem: Problem, arrays: Arrays, truth: Arrays) -> dict[str, Array]:
        settled = self.settled(problem, arrays)
        each = [
            self.plain.bounds(p, own, {name: rows_of(settled, x, b) for name, x in truth.items()})
            for b, (p, own) in enumerate(self.gathered(problem, arrays))
        ]
        return {name: np.concatenate([one[name] for one in each], 2 if problem.varlen else 0) for name in each[0]}

    def flops(self, problem: Problem) -> int:
        return sum(self.plain.flops(one.gathered) for one in problem.sequences)


def rows_of(problem: Problem, x: Array, request: int) -> Array:
    """What an array of all queries has of one request."""
    if not problem.varlen:
        return x[request : request + 1]
    return x[:, :, problem.cu_seqlens_q[request] : problem.cu_seqlens_q[request + 1]]


def _check_begins(problem: Problem, begins: Array) -> None:
    """Raises `UsageError` for offsets of queries that don't rise from 0 to all of them, or that lengths say otherwise."""
    numbers, last = begins.tolist(), problem.len_q
    for i, n in enumerate(numbers):
        low, high = (numbers[i - 1], last) if i else (0, 0)
        low = last if i == len(numbers) - 1 else low
        if not low <= n <= high:
            accepted = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            raise UsageError(f"cu_seqlens_q[{i}]", n, f"{accepted}: it rises from 0 to {last:,}, the rows of q")
        if problem.lengths is not None and n != problem.cu_seqlens_q[i]:
            raise UsageError(f"cu_seqlens_q[{i}]", n, f"{problem.cu_seqlens_q[i]}, as lengths say")


def shown_drafts(problem: Problem, words: Array) -> Array:
    """Which keys each query of a request sees, (len_q, len_kv): all but those drafts that its word hides.

    >>> p = Problem(batch=1, heads=1, lengths=[(2, 5)], head_dim=8, dtype="float16", page_size=4, drafts=True)
    >>> shown_drafts(p, np.array([0b01, 0b10], np.uint32)).astype(int).tolist()
    [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    """
    draft = np.arange(problem.len_kv) - problem.offset
    shown = words.astype(np.uint32)[:, None] >> np.maximum(draft, 0).astype(np.uint32) & 1
    return (draft < 0) | (shown > 0)


PAGED = PagedAttention()
