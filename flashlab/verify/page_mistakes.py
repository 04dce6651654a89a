"""The likely mistake behind wrong attention over pages, found by trying: each known mistake, beside what was returned.

A mistake is in what is gathered for a request, or in the plain attention on it. What no request owns holds numbers here, not NaN,
so that a mistake that reads it shows which it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.subject import Subject, worst
from simulator import Problem
from simulator.dtypes import Array
from simulator.errors import Unavailable
from simulator.operations.paged import PAGED, rows_of

__all__ = ["likely"]

SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Keys per page that a kernel may take for a pool's own number."""
MOST_PAIRS = 1 << 19
"""The most (query, key) pairs, over batch and heads, of a problem that mistakes are tried on."""
Arrays = Mapping[str, Array]
Places = Callable[["_Scene", int, Array], tuple[Array, Array]]
"""The pages and rows that a mistake takes the keys of a request from, of (scene, request, keys)."""


class _Scene:
    """A problem and its arrays, whose pools are numbers throughout."""

    def __init__(self, problem: Problem, arrays: Arrays) -> None:
        self.p, self.arrays = problem, arrays
        self.size, self.table = problem.page_size or 1, arrays["block_table"]
        self.lengths = [int(n) for n in arrays["seq_lens"]]

    def right(self, b: int, keys: Array) -> tuple[Array, Array]:
        return self.table[b, np.minimum(keys // self.size, self.table.shape[1] - 1)], keys % self.size

    def keys(self, b: int) -> Array:
        return np.arange(self.lengths[b])

    def result(
        self, places: Places, keys: Callable[[int], Array], values: Places | None = None, order: Array | None = None,
        of_k: bool = False, lse: Callable[[Array], Array] = lambda x: x, shown: Callable[[Array, Array, int], Array] | None = None,
        **masks: Any,
    ) -> tuple[dict[str, Array], dict[str, Array]]:  # fmt: skip
        """Outputs and bounds where the keys of a request lie at `places`, its values at `values`, and attention has other masks."""
        found, bounds = list[Arrays](), list[Arrays]()
        for b, one in enumerate(self.p.sequences):
            own = keys(b)
            rows = {"q": rows_of(self.p, self.arrays["q"], b)}
            for name, at in (("k", places), ("v", values or places)):
                pages, slots = at(self, b, own)
                pool = self.arrays["k" if of_k else name]
                gathered = pool[np.clip(pages, 0, len(pool) - 1), :, np.clip(slots, 0, self.size - 1)]
                gathered = gathered if order is None else gathered[:, order]
                rows[name] = np.ascontiguousarray(gathered.swapaxes(0, 1)[None])
            if "sinks" in self.arrays and masks.get("sinks", True):
                rows["sinks"] = self.arrays["sinks"]
            if shown is not None:  # in place of the causal mask
                len_q: int = one.len_q
                rows["mask"], masks = (
                    shown(np.arange(len_q)[:, None], np.arange(len(own)), len(own) - len_q),
                    {**masks, "causal": False, "mask": "dense"},
                )
            p = one.gathered.replace(**{"len_kv": len(own), **masks})
            truth = PAGED.plain.judge(p, rows)
            bounds.append(PAGED.plain.bounds(p, rows, truth))
            found.append({**truth, "lse": lse(truth["lse"])})
        axis = 2 if self.p.varlen else 0
        return tuple(
            {name: np.concatenate([x[name] for x in each], axis) for name in each[0]} for each in (found, bounds)
        )  # type: ignore[return-value]


def _wrong_places(c: _Scene) -> Iterator[tuple[str, Places]]:
    size, table = c.size, c.table
    flat, batch = table.reshape(-1), len(table)

    def of(line: Callable[[int], int]) -> Places:
        return lambda c, b, n: (table[line(b), np.minimum(n // size, table.shape[1] - 1)], n % size)

    def paged(page: Callable[[int, Array], Array], slot: Callable[[Array], Array] = lambda n: n % size) -> Places:
        return lambda c, b, n: (page(b, n), slot(n))

    def entry(b: int, i: Array) -> Array:
        return table[b, np.clip(i, 0, max(0, -(-c.lengths[b] // size) - 1))]

    if batch > 1:
        yield "each request has the block table of request 0", of(lambda b: 0)
        yield "each request has the block table of the next one", of(lambda b: (b + 1) % batch)
        yield "each request has the block table of the one before", of(lambda b: b - 1)
        yield (
            "the block table is transposed",
            paged(lambda b, n: flat[np.minimum(n // size * batch + b, flat.size - 1)]),
        )
    yield (
        "the block table is ignored: the pages of a request are read one behind the other",
        paged(lambda b, n: table[b, 0] + n // size),
    )
    yield "the block table is ignored: every request's pages begin with page 0", paged(lambda b, n: n // size)
    yield (
        "a request's pages are read in their order in the pool",
        paged(lambda b, n: np.sort(table[b, : max(1, -(-c.lengths[b] // size))])[n // size]),
    )
    yield "a request's pages are read backwards", paged(lambda b, n: entry(b, -(-c.lengths[b] // size) - 1 - n // size))
    yield (
        "the page is off by one at an edge: the last key of a page is read from the next one",
        paged(lambda b, n: entry(b, (n + 1) // size)),
    )
    yield (
        "the page is off by one at an edge: the first key of a page is read from the one before",
        paged(lambda b, n: entry(b, (n - 1) // size)),
    )
    yield "the page is one too far", paged(lambda b, n: entry(b, n // size + 1))
    yield "all keys are read from a request's first page", paged(lambda b, n: entry(b, 0 * n))
    yield (
        "a key's row within its page is one too far",
        paged(lambda b, n: entry(b, n // size), lambda n: np.minimum(n % size + 1, size - 1)),
    )
    yield (
        "the rows of a page are read backwards",
        paged(lambda b, n: entry(b, n // size), lambda n: size - 1 - n % size),
    )
    for other in SIZES:
        if other != size:
            yield (
                f"the page size is taken for {other}",
                paged(
                    lambda b, n, x=other: (entry(b, n // x) * x + n % x) // size,
                    lambda n, x=other: n % x % size,
                ),
            )


def _wrong_keys(c: _Scene) -> Iterator[tuple[str, Callable[[int], Array]]]:
    size, lengths, room = c.size, c.lengths, c.table.shape[1] * c.size

    def all_but(dropped: Callable[[Array, int], Any]) -> Callable[[int], Array]:
        return lambda b: c.keys(b)[~np.broadcast_to(dropped(c.keys(b), lengths[b]), c.keys(b).shape)]

    def first(number: Callable[[int], int]) -> Callable[[int], Array]:
        return lambda b: np.arange(min(max(0, number(b)), room))

    yield "the first key of each page is dropped", all_but(lambda n, _: n % size == 0)
    yield "the last key of each page is dropped", all_but(lambda n, _: n % size == size - 1)
    yield "the last page is dropped, where it is not full", all_but(lambda n, last: n >= last - last % size)
    yield "the last page is dropped", all_but(lambda n, last: n // size == (last - 1) // size)
    yield "the first page is dropped", all_but(lambda n, _: n < size)
    yield (
        "the whole last page is read, also what is no key of the request",
        first(lambda b: -(-lengths[b] // size) * size),
    )
    yield "the newest key is dropped", first(lambda b: lengths[b] - 1)
    yield "one key too many is read", first(lambda b: lengths[b] + 1 if lengths[b] else 0)
    yield "a request's length is taken without its new tokens", first(lambda b: lengths[b] - c.p.pairs[b][0])
    yield "a request's new tokens are counted twice", first(lambda b: lengths[b] + c.p.pairs[b][0])
    if len(lengths) > 1:
        yield "each request has the length of the longest", first(lambda b: max(lengths))
        yield "each request has the length of request 0", first(lambda b: lengths[0])
        yield "each request has the length of the next one", first(lambda b: lengths[(b + 1) % len(lengths)])


def _suspects(c: _Scene) -> Iterator[tuple[str, tuple[dict[str, Array], dict[str, Array]]]]:
    p, right = c.p, _Scene.right
    for words, places in _wrong_places(c):
        yield words, c.result(places, c.keys)
        yield f"{words} (K alone)", c.result(places, c.keys, right)
        yield f"{words} (V alone)", c.result(right, c.keys, places)
    for words, keys in _wrong_keys(c):
        yield words, c.result(right, keys)
    yield "the values are read from K's pool", c.result(right, c.keys, of_k=True)
    if p.queries_per_kv > 1:
        yield (
            "KV heads are interleaved: head h reads KV head h % kv_heads",
            c.result(right, c.keys, order=np.arange(p.heads) % p.kv_heads, kv_heads=p.heads),
        )
        yield "all heads read KV head 0", c.result(right, c.keys, order=np.zeros(p.heads, int), kv_heads=p.heads)
    yield 'the LSE is to base 2 (if that is meant: lse="2")', c.result(right, c.keys, lse=lambda x: x / math.log(2))
    masks: dict[str, dict[str, Any]] = {
        "the scale is 1: it is missing": {"scale": 1.0},
        "the scale is 1/head_dim": {"scale": 1 / p.head_dim},
        "the scale is 1/sqrt(head_dim), whatever was asked for": {"scale": 1 / math.sqrt(p.head_dim)},
        "the scale is applied twice": {"scale": p.scale**2},
    }
    if p.causal:
        masks["the causal mask is ignored"] = {"causal": False}
    if p.window is not None:
        masks["the window is ignored"] = {"window": None}
        left, right_side = p.left, p.right
        for side, step in (("wide", 1), ("narrow", -1)):
            if left is not None and left + step >= 0:
                masks[f"the window's left side is one key too {side}"] = {"window": (left + step, right_side)}
    if p.soft_cap is not None:
        masks["the soft cap is ignored"] = {"soft_cap": None}
    if p.sinks:
        masks["the sinks are ignored"] = {"sinks": False}
    for words, changes in masks.items():
        yield words, c.result(right, c.keys, **changes)
    if p.causal:
        for words, shift in (
            ("a causal row misses its last key: < where <= belongs", -1),
            ("a causal row sees one key too many", 1),
        ):
            yield words, c.result(right, c.keys, shown=lambda i, j, offset, x=shift: j <= i + offset + x)
        yield "the causal mask is aligned top-left", c.result(right, c.keys, shown=lambda i, j, offset: j <= i)


def _scene(p: Problem, seed: int) -> _Scene:
    """A problem whose pools are numbers throughout, and whose table names pages throughout."""
    arrays, rng = PAGED.draw(p, seed), np.random.default_rng((seed, 7))
    for name in PAGED.pools:
        lost = np.isnan(arrays[name].astype(np.float32))
        arrays[name][lost] = rng.standard_normal(int(lost.sum())).astype(arrays[name].dtype)
    table = arrays["block_table"]
    stray = table >= p.pages
    table[stray] = rng.integers(0, p.pages, int(stray.sum()))
    return _Scene(p, arrays)


def _matching(subject: Subject, p: Problem, seed: int, *, failing: bool) -> dict[str, bool] | None:
    """Whether each mistake explains the outputs of a problem, in order. None if it says nothing."""
    rows = sum(n * m for n, m in p.pairs)
    if p.quantized or p.drafts or subject.refuses(p) or rows * p.heads > MOST_PAIRS:
        return None
    c = _scene(p, seed)
    try:
        found = {name: np.asarray(x, np.float64) for name, x in subject.run(p, c.arrays).items()}
    except Unavailable:
        raise
    except (Exception, SystemExit):  # it raises or refuses: that says nothing of its numbers
        return None

    def fits(of: tuple[Arrays, Arrays]) -> bool:
        wanted = {name: x for name, x in of[0].items() if name in found}
        try:
            worst(PAGED, (wanted, {name: 2 * x for name, x in of[1].items()}), found)
        except Failure:
            return False
        return True

    with np.errstate(all="ignore"):
        right = fits(c.result(_Scene.right, c.keys))
        if failing and right:
            return None
        tried = dict[str, bool]()
        for words, of in _suspects(c):
            tried[words] = tried.get(words, False) or fits(of)
    return tried if right else tried | {"": False}


def likely(subject: Subject, failing: Problem, others: Sequence[Problem], seed: int) -> str:
    """The mistake that explains a problem that fails and all of the `others`, or nothing. At most two are named, with an "or"."""
    named = list[str]()
    for start in (failing, *others):
        found = _matching(subject, start, seed, failing=True)
        named = [words for words, fits in (found or {}).items() if fits]
        for p in others:
            if named and (more := _matching(subject, p, seed, failing=False)) is not None:
                named = [words for words in named if more.get(words, "" not in more)]
        if named:
            break
    plain = [words for words in named if not words.endswith(" alone)")] or named
    return "; or ".join(plain) if len(plain) <= 2 else ""
