"""Probes of attention over pages: what surrounds a request, and where its keys lie, changes not a bit of its output.

A probe takes a subject (`general.Subject`), a problem and a seed, and raises `Failure`. NaN fills what no request owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from flashlab.verify.adapter import Failure
from simulator import Problem
from simulator.dtypes import Array
from simulator.operations.paged import PAGED, PagedAttention

if TYPE_CHECKING:
    from flashlab.verify.general import Subject

Arrays = Mapping[str, Array]


def repaged(
    p: Problem, given: Arrays, order: Sequence[int], size: int, seed: int, operation: PagedAttention = PAGED
) -> tuple[Problem, dict[str, Array]]:
    """Some of the requests in another order, in pages of another size that lie elsewhere."""
    other = p.replace(
        batch=len(order), lengths=[(p.len_q, p.seq_lens[b]) for b in order], page_size=size, pages=None, len_kv=p.len_kv
    )
    moved = operation.draw(other.replace(pages=other.pages + 2), seed)
    owned = operation.gathered(p, given)
    scales = [name for name in ("k_scale", "v_scale") if getattr(p, name) == "token"]
    moved |= {name: given[name] for name in ("k_scale", "v_scale") if name in given and name not in scales}
    for line, b in enumerate(order):
        moved["q"][line] = given["q"][b]
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
        if x[list(order)].tobytes() != other[name].tobytes():
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


CHECKS: Mapping[str, Callable[[Subject, Problem, int], None]] = {"pages": pages, "requests": requests}
"""The probes by name."""
