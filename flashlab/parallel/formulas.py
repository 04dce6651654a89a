"""What ranks send, receive and launch, in closed form: no data, any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from flashlab.parallel.ledger import Event, Launched, ParallelCounts, Received, Sent, Sizes
from flashlab.parallel.problems import check, scheme_of
from flashlab.parallel.schemes import SCHEMES
from simulator import api, catalogue
from simulator.devices import Device
from simulator.errors import Said, UsageError
from simulator.fields import flag
from simulator.names import DeviceName
from simulator.problem import Problem
from simulator.program import Program

__all__ = ["count"]


def count(
    scheme: str, problem: Problem, *, ranks: int, layout: str = "zigzag", algorithm: str | Program = "flash2",
    interleave: int = 1, backward: bool = False, device: Device | DeviceName = "h100",
) -> ParallelCounts:  # fmt: skip
    """What each rank of a scheme sends, receives and launches, by formula. It equals what `simulate` counts, event by event.

    `problem` is that of all ranks together. With `backward` the way back is counted, too. Raises `UsageError`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=32, kv_heads=8, len_q=1_048_576, head_dim=128, dtype="bfloat16", causal=True)
    >>> [fl.parallel.count(name, p, ranks=8).sent[0] >> 20 for name in ("ring", "all_gather", "ulysses", "heads")]  # MiB
    [3584, 3584, 2240, 0]
    """
    plan = scheme_of(scheme)
    if plan is not SCHEMES.get(plan.name):
        raise UsageError(
            "scheme", Said(f"{plan.name}, one of your own"), f"one of {', '.join(SCHEMES)}: they have formulas"
        )
    backward = flag("backward", backward)
    check(plan, problem, ranks, layout, interleave, backward=backward)
    share = _Share(problem, ranks, layout, algorithm, interleave, Device.named(device))
    forward, back = _FORMULAS[plan.name]
    events = [tuple(event for way in (forward, *[back] * backward) for event in way(share, r)) for r in range(ranks)]
    return ParallelCounts(plan.name, problem, layout, tuple(events))


class _Share:
    """A problem dealt to `n` ranks: the sizes of messages, and launches on parts of it."""

    def __init__(
        self, problem: Problem, n: int, layout: str, algorithm: str | Program, interleave: int, device: Device
    ) -> None:
        self.p, self.n, self.layout, self.interleave = problem, n, layout, interleave
        self.rows, self.keys, self.parts = problem.len_q // n, problem.len_kv // n, 2 if layout == "zigzag" else 1
        back = f"{catalogue.get(algorithm).name}_backward"
        plain = problem.replace(len_q=1, len_kv=1, lengths=None, causal=False) if problem.page_size is None else problem

        @cache
        def launch(way: str, heads: int, kv_heads: int, rows: int, keys: int, causal: bool, partial: bool) -> Launched:
            one = plain.replace(heads=heads, kv_heads=kv_heads, len_q=rows, len_kv=keys, causal=causal, partial=partial)
            forward = way == "forward"
            return Launched(way, api.count(algorithm if forward else back, one, device=device, lse=forward))

        @cache
        def paged(**sizes: Any) -> Launched:
            return Launched(
                "forward", api.count(algorithm, problem.replace(causal=False, **sizes), device=device, lse=True)
            )

        self._launch, self.paged = launch, paged

    def launch(
        self, way: str, rows: int, keys: int, *, causal: bool, heads: int | None = None, kv_heads: int | None = None,
        partial: bool = True,
    ) -> Launched:  # fmt: skip
        heads, kv_heads = heads or self.p.heads, kv_heads or self.p.kv_heads
        return self._launch(way, heads, kv_heads, rows, keys, causal, partial and way == "backward")

    def queries(self, name: str, heads: int, rows: int, dim: int) -> Sizes:
        """A message of something that is shaped as Q, in the storage dtype."""
        return ((name, self.p.batch * heads * rows * dim * self.p.itemsize),)

    def kv(self, heads: int, keys: int, *, gradients: bool = False, itemsize: int | None = None) -> Sizes:
        """A message of K and V, or of their gradients, which are float32 where they are parts of sums."""
        each = self.p.batch * heads * keys * (itemsize or (4 if gradients else self.p.itemsize))
        before = "d" if gradients else ""
        return (f"{before}k", each * self.p.head_dim), (f"{before}v", each * self.p.head_dim_v)

    def of_ring(self, way: str, rank: int, of: int) -> list[Launched]:
        """The launch of a rank's rows over the keys of another, if any is seen."""
        rows, keys = self.rows, self.keys
        if self.p.causal and of > rank:
            if self.parts == 1:
                return []
            rows //= 2
        elif self.p.causal and of < rank:
            keys //= self.parts
        return [self.launch(way, rows, keys, causal=self.p.causal and of == rank)]

    def of_chunks(self, way: str, rank: int) -> Iterator[Launched]:
        """The launches of a rank's chunks of rows over all keys that they may see."""
        if not self.p.causal:
            yield self.launch(way, self.rows, self.p.len_kv, causal=False)
            return
        rows = self.rows // self.parts
        for chunk in (rank, 2 * self.n - 1 - rank)[: self.parts]:
            yield self.launch(way, rows, (chunk + 1) * rows, causal=True)

    def striped(self, length: int, rank: int) -> int:
        """How many keys of a striped cache a rank has."""
        whole, rest = divmod(length, self.n * self.interleave)
        return whole * self.interleave + min(max(rest - rank * self.interleave, 0), self.interleave)

    def exchange(self, step: str, rank: int, tensors: Sizes) -> Iterator[Event]:
        """All to all: the same to each other rank, and the same from each."""
        for i in range(1, self.n):
            yield Sent(step, (rank + i) % self.n, tensors)
        for i in range(1, self.n):
            yield Received(step, (rank - i) % self.n, tensors)


def _ring(s: _Share, rank: int) -> Iterator[Event]:
    left, right, kv = (rank - 1) % s.n, (rank + 1) % s.n, s.kv(s.p.kv_heads, s.keys)
    for i in range(s.n):
        if i < s.n - 1:
            yield Sent(f"forward {i}", right, kv)
        yield from s.of_ring("forward", rank, (rank - i) % s.n)
        if i < s.n - 1:
            yield Received(f"forward {i}", left, kv)


def _ring_backward(s: _Share, rank: int) -> Iterator[Event]:
    left, right, kv = (rank - 1) % s.n, (rank + 1) % s.n, s.kv(s.p.kv_heads, s.keys)
    sums = s.kv(s.p.kv_heads, s.keys, gradients=True)
    for i in range(s.n):
        if i < s.n - 1:
            yield Sent(f"backward {i}", right, kv)
        yield from s.of_ring("backward", rank, (rank - i) % s.n)
        if i > 1:
            yield Received(f"backward {i - 1}", left, sums)
        if i > 0:
            yield Sent(f"backward {i}", right, sums)
        if i < s.n - 1:
            yield Received(f"backward {i}", left, kv)
    if s.n > 1:
        yield Received(f"backward {s.n - 1}", left, sums)


def _all_gather(s: _Share, rank: int) -> Iterator[Event]:
    yield from s.exchange("gather forward", rank, s.kv(s.p.kv_heads, s.keys))
    yield from s.of_chunks("forward", rank)


def _all_gather_backward(s: _Share, rank: int) -> Iterator[Event]:
    yield from s.exchange("gather backward", rank, s.kv(s.p.kv_heads, s.keys))
    yield from s.of_chunks("backward", rank)
    yield from s.exchange("reduce backward", rank, s.kv(s.p.kv_heads, s.keys, gradients=True))


def _ulysses(s: _Share, rank: int) -> Iterator[Event]:
    p, heads, kv_heads = s.p, s.p.heads // s.n, max(1, s.p.kv_heads // s.n)
    to_heads = (*s.queries("q", heads, s.rows, p.head_dim), *s.kv(kv_heads, s.keys))
    yield from s.exchange("to heads forward", rank, to_heads)
    yield s.launch("forward", p.len_q, p.len_kv, causal=p.causal, heads=heads, kv_heads=kv_heads)
    yield from s.exchange("to rows forward", rank, s.queries("out", heads, s.rows, p.head_dim_v))


def _ulysses_backward(s: _Share, rank: int) -> Iterator[Event]:
    p, heads, kv_heads = s.p, s.p.heads // s.n, max(1, s.p.kv_heads // s.n)
    shared = p.kv_heads < s.n
    yield from s.exchange("to heads backward", rank, s.queries("dout", heads, s.rows, p.head_dim_v))
    yield s.launch("backward", p.len_q, p.len_kv, causal=p.causal, heads=heads, kv_heads=kv_heads, partial=shared)
    sums = s.kv(kv_heads, s.keys, gradients=True, itemsize=4 if shared else p.itemsize)
    yield from s.exchange("to rows backward", rank, (*s.queries("dq", heads, s.rows, p.head_dim), *sums))


def _heads(way: str) -> Callable[[_Share, int], Iterator[Event]]:
    def events(s: _Share, rank: int) -> Iterator[Event]:
        del rank
        p, own = s.p, {"heads": s.p.heads // s.n, "kv_heads": s.p.kv_heads // s.n}
        yield s.launch(way, p.len_q, p.len_kv, causal=p.causal, partial=False, **own)

    return events


def _dcp(s: _Share, rank: int) -> Iterator[Event]:
    p, heads = s.p, s.p.heads // s.n
    yield from s.exchange("gather queries", rank, s.queries("q", heads, p.len_q, p.head_dim))
    if p.page_size is None:
        yield s.launch("forward", p.len_q, s.striped(p.len_kv, rank), causal=False)
    else:
        lens = tuple(s.striped(n, rank) for n in p.seq_lens)
        used = [-(-n // p.page_size) for n in lens]
        pairs = tuple((p.len_q, n) for n in lens)
        yield s.paged(lengths=pairs, len_kv=max(used) * p.page_size, pages=sum(used))
    lse = ("lse", p.batch * heads * p.len_q * 4)
    yield from s.exchange("merge outputs", rank, (*s.queries("out", heads, p.len_q, p.head_dim_v), lse))


_FORMULAS: dict[str, tuple[Callable[[_Share, int], Iterator[Event]], ...]] = {
    "ring": (_ring, _ring_backward),
    "all_gather": (_all_gather, _all_gather_backward),
    "ulysses": (_ulysses, _ulysses_backward),
    "heads": (_heads("forward"), _heads("backward")),
    "dcp": (_dcp, _dcp),
}
