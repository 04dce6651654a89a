"""A probe of attention with a shared prefix: a request's bits don't depend on the others, although they share tiles of rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flashlab.verify.adapter import Failure
from flashlab.verify.subject import Check, Subject
from simulator import Problem
from simulator.dtypes import Array


def some_of(problem: Problem, arrays: Mapping[str, Array], order: list[int]) -> tuple[Problem, dict[str, Array]]:
    """Some of the requests in another order, with the same prefix."""
    own = {name: np.ascontiguousarray(arrays[name][order]) for name in ("q", "k", "v", "seq_lens") if name in arrays}
    return problem.requests(order), {**arrays, **own}


def without_room(problem: Problem, arrays: Mapping[str, Array]) -> tuple[Problem, dict[str, Array]]:
    """The same requests, with room for no more own keys than the longest has."""
    most = max(problem.seq_lens)
    own = {name: np.ascontiguousarray(arrays[name][:, :, :most]) for name in ("k", "v")}
    return problem.replace(len_kv=most), {**arrays, **own}


def requests(subject: Subject, p: Problem, seed: int) -> None:
    """Requests alone, without room for further keys, and in another order have the same bits."""
    arrays = subject.operation.draw(p, seed)
    found = subject.run(p, arrays)
    orders = [[b] for b in range(p.batch)] + [np.random.default_rng(seed).permutation(p.batch).tolist()]
    for order in orders:
        other = subject.run(*without_room(*some_of(p, arrays, order)))
        for name, x in found.items():
            if x[order].tobytes() != other[name].tobytes():
                raise Failure(f"{name} changes with the other requests (now {order})")


CHECKS: Mapping[str, Check] = {"requests": requests}
"""The probes by name."""
