"""Probes of attention over pages: what surrounds a request, and where its keys lie, changes not a bit of its output.

A probe takes a subject (`subject.Subject`), a problem and a seed, and raises `Failure`. NaN fills what no request owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.subject import Check, Subject, worst
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.paged import PAGED, PagedAttention, rows_of
from simulator.problem import MOST_DRAFTS

Arrays = Mapping[str, Array]


def repaged(
    p: Problem, given: Arrays, order: Sequence[int], size: int, seed: int, operation: PagedAttention = PAGED
) -> tuple[Problem, dict[str, Array]]:
    """Some of the requests in another order, in pages of another size that lie elsewhere."""
    other = p.replace(
        batch=len(order), lengths=[p.pairs[b] for b in order], page_size=size, pages=None, len_kv=p.len_kv,
        len_q=None if p.varlen else p.len_q,
    )  # fmt: skip
    moved = operation.draw(other.replace(pages=other.pages + 2), seed)
    owned = operation.gathered(p, given)
    scales = [name for name in ("k_scale", "v_scale") if getattr(p, name) == "token"]
    of_queries = [name for name in ("q", "draft_mask") if name in given]
    of_all = [name for name in ("k_scale", "v_scale", "sinks") if name in given and name not in scales]
    moved |= {name: given[name] for name in of_all}
    for line, b in enumerate(order):
        for name in of_queries:
            rows_of(other, moved[name], line)[...] = rows_of(p, given[name], b)
        for name in (*operation.pools, *scales):
            rows = owned[b][1][name][0]
            for i, first in enumerate(range(0, rows.shape[1], size)):
                part = rows[:, first : first + size]
                moved[name][moved["block_table"][line, i], :, : part.shape[1]] = part
    return other.replace(pages=other.pages + 2), moved


def _same_bits(subject: Subject, p: Problem, seed: int, order: Sequence[int], size: int, what: str) -> None:
    operation = cast("PagedAttention", subject.operation)
    given = operation.draw(p, seed)
    found, other = subject.run(p, given), subject.run(*repaged(p, given, order, size, seed + 1, operation))
    for name, x in found.items():
        mine = np.concatenate([rows_of(p, x, b) for b in order], 2 if p.varlen else 0)
        if mine.tobytes() != other[name].tobytes():
            raise Failure(f"{name} changes with {what}")


def pages(subject: Subject, p: Problem, seed: int) -> None:
    """Requests in pages of other sizes, elsewhere in the pool, have the same bits."""
    for size in (1, 24):
        _same_bits(subject, p, seed, range(p.batch), size, f"its pages (now of {size})")


def requests(subject: Subject, p: Problem, seed: int) -> None:
    """Requests alone and in another order have the same bits."""
    orders = [[b] for b in range(p.batch)] + [np.random.default_rng(seed).permutation(p.batch).tolist()]
    for order in orders:
        _same_bits(subject, p, seed, order, p.page_size or 1, f"the other requests (now {order})")


def drafts(subject: Subject, p: Problem, seed: int) -> float | None:
    """A chain of drafts is a causal mask, and one in which all are visible is none, to the bit. A random tree obeys the rule, and
    what a draft holds that nobody sees changes no bit. More queries than a word has bits have no drafts: there is nothing to check.
    """
    if p.len_q > MOST_DRAFTS:
        return None
    plain, tree, rng = p.replace(drafts=False), p.replace(drafts=True), np.random.default_rng(seed)
    arrays, every = PAGED.draw(plain, seed), 2**MOST_DRAFTS - 1
    beyond = every << p.len_q & every  # bits that mean nothing
    for what, words, same in (
        ("all visible", [every] * p.len_q, plain),
        ("a chain", [(2 << i) - 1 | beyond for i in range(p.len_q)], plain.replace(causal=True)),
    ):
        _equal(subject.run(tree, _masked(p, arrays, words)), subject.run(same, arrays), f"drafts that are {what}")
    words = list[int]()
    for i in range(p.len_q):  # each draft but the first has one before it as its parent
        words.append(1 << i | (words[rng.integers(i)] if i else 0))
    given = _masked(p, arrays, words)
    found = worst(PAGED, subject.expect(tree, given), subject.run(tree, given))
    unseen = int(rng.integers(p.len_q))
    given = _masked(p, arrays, [word & ~(1 << unseen) for word in words])
    other = {**given, **{name: _with_draft(p, given, name, unseen) for name in PAGED.pools}}
    _equal(subject.run(tree, given), subject.run(tree, other), "what a hidden draft holds")
    return found


def _masked(p: Problem, arrays: Arrays, words: Sequence[int]) -> dict[str, Array]:
    """The arrays with the same mask of drafts for all requests."""
    return {**arrays, "draft_mask": np.tile(np.array(words, np.uint32), (p.batch, 1))}


def _with_draft(p: Problem, given: Arrays, name: str, draft: int) -> Array:
    """A pool in which a draft of each request that has it holds other numbers: large ones."""
    pool, size = given[name].copy(), p.page_size or 1
    for line, keys in zip(given["block_table"], p.seq_lens, strict=True):
        if (key := keys - p.len_q + draft) >= 0:
            pool[line[key // size], :, key % size] = 100
    return pool


def _equal(found: Arrays, other: Arrays, what: str) -> None:
    for name, x in found.items():
        if x.tobytes() != other[name].tobytes():
            raise Failure(f"{name} changes with {what}")


CHECKS: Mapping[str, Check] = {
    "pages": pages,
    "requests": requests,
    "drafts": drafts,
}
"""The probes by name."""
