"""A server's day: a trace through a scheduler and a block manager, with what it reaches beside the least that it could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Costs, Model
from flashlab.serve.real import Engine
from flashlab.serve.requests import Request
from flashlab.serve.scheduler import Job, Scheduler
from flashlab.serve.traces import Arrival
from simulator.errors import UsageError

__all__ = ["Change", "Day", "Served", "Step", "bound", "serve"]

FREE, KEPT = -1, -2
"""What a block is that nobody owns: free, or free with tokens that somebody may find."""


@dataclass(frozen=True)
class Served:
    """A request that was answered. Times are predicted, in seconds; `seconds` is when it came."""

    name: str
    seconds: float
    prompt: int
    answer: int
    first_token: float
    """From its arrival until its first token."""
    per_token: float
    """From token to token, on the average; 0 where there is one token."""
    reused: int
    recomputed: int
    preempted: int


class Change(NamedTuple):
    """A block changed hands: its first owner, as the number of a request, and how many own it."""

    block: int
    owner: int
    owners: int


@dataclass(frozen=True)
class Step:
    """A step: when it began and how long it takes, what it computed, and whose the blocks were in it."""

    begin: float
    seconds: float
    requests: int
    tokens: int
    launches: int
    nbytes: int
    kv_bytes: int
    waiting: int
    preempted: int
    blocks: int
    """That somebody owns."""
    tables: int
    """Entries of all tables: as many blocks as nobody sharing would take."""
    wasted: int
    """Rows of these blocks that hold no token."""
    changes: tuple[Change, ...] = field(default=(), repr=False)
    """Since the step before, where they were asked for."""
    parts: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """The numbers of its requests, how many tokens of each it computes, and how many blocks each has: where changes are."""


class Bound(NamedTuple):
    """The least that a trace's tokens need, if all pages are free and each shared block is computed once."""

    steps: int
    tokens: int
    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class Day:
    """What became of a trace."""

    trace: str
    backend: str
    device: str
    model: Model
    num_blocks: int
    block_size: int
    policy: str
    source: str
    bound: Bound
    requests: tuple[Served, ...]
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.steps[-1].begin + self.steps[-1].seconds if self.steps else 0.0

    @property
    def waste(self) -> float:
        """The share of owned rows that hold no token, over time."""
        owned = sum(step.seconds * step.blocks for step in self.steps) * self.block_size
        return sum(step.seconds * step.wasted for step in self.steps) / owned if owned else 0.0

    @property
    def saved(self) -> float:
        """The share of blocks that sharing saves, over time."""
        tables = sum(step.seconds * step.tables for step in self.steps)
        return 1 - sum(step.seconds * step.blocks for step in self.steps) / tables if tables else 0.0

    def summary(self) -> dict[str, Any]:
        """The numbers of the day. Bytes are of HBM, times are predicted."""
        block = self.block_size * self.model.token_bytes
        done, steps = self.requests, self.steps
        return {
            "requests": len(done),
            "steps": len(steps),
            "seconds": self.seconds,
            "busy": sum(step.seconds for step in steps),
            "first_token": _spread(one.first_token for one in done),
            "per_token": _spread(one.per_token for one in done if one.answer > 1),
            "prompt_tokens": sum(one.prompt for one in done),
            "answer_tokens": sum(one.answer for one in done),
            "computed": sum(step.tokens for step in steps),
            "reused": sum(one.reused for one in done),
            "recomputed": sum(one.recomputed for one in done),
            "preempted": sum(one.preempted for one in done),
            "launches": sum(step.launches for step in steps),
            "peak_blocks": max((step.blocks for step in steps), default=0),
            "peak_bytes": max((step.blocks for step in steps), default=0) * block,
            "peak_bytes_unshared": max((step.tables for step in steps), default=0) * block,
            "waste": self.waste,
            "saved": self.saved,
            "nbytes": sum(step.nbytes for step in steps),
            "kv_bytes": sum(step.kv_bytes for step in steps),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. The keys are the names of the attributes."""
        about = {
            name: getattr(self, name) for name in ("trace", "backend", "device", "num_blocks", "block_size", "policy")
        }
        steps = [{k: x for k, x in asdict(step).items() if k not in ("changes", "parts")} for step in self.steps]
        return {
            **about,
            "model": asdict(self.model),
            "rate": self.source,
            "summary": self.summary(),
            "bound": self.bound._asdict(),
            "requests": [asdict(one) for one in self.requests],
            "steps": steps,
        }


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, median and 99th percentile; zeros of no values."""
    found = sorted(values)
    if len(found) < 2:
        one = found[0] if found else 0.0
        return {"mean": one, "p50": one, "p99": one}
    cuts = quantiles(found, n=100, method="inclusive")
    return {"mean": fmean(found), "p50": cuts[49], "p99": cuts[98]}


def bound(arrivals: Sequence[Arrival], scheduler: Scheduler, costs: Costs) -> Bound:
    """The least that a trace needs. A request takes a step for each token of its answer, and each step reads all its keys."""
    size, blocks, last, tokens, keys = scheduler.manager.block_size, set[bytes](), set[bytes](), 0, 0
    for i, one in enumerate(arrivals):
        request, full = one.request(i), (one.prompt - 1) // size
        if one.shared and scheduler.manager.enable_caching:
            own = scheduler.manager.digests(request, one.prompt // size)
            last |= set(
                own[full:]
            )  # a hit is never the whole prompt: each request computes that block, for others, too
            own = set(own[:full])
        else:
            own = {f"{i} {n}".encode() for n in range(full)}
        blocks |= own
        tokens += one.prompt - full * size + one.answer - 1
        keys += one.prompt + sum(range(one.prompt + 1, one.prompt + one.answer))
    tokens += len(blocks - last) * size
    longest = max(one.answer for one in arrivals)
    filled = -(-tokens // scheduler.max_num_batched_tokens)
    steps = max(longest, filled, -(-sum(one.answer for one in arrivals) // scheduler.max_num_seqs))
    kv_bytes = keys * costs.model.token_bytes
    launches = steps * costs.model.layers * costs.rate.seconds_per_launch
    seconds = (kv_bytes + steps * costs.model.weights) / costs.rate.bytes_per_second + launches
    return Bound(steps, tokens, kv_bytes, seconds)


def serve(
    arrivals: Sequence[Arrival], scheduler: Scheduler, costs: Costs, *, engine: Engine | None = None, trace: str = "",
    changes: bool = False, progress: Callable[[Iterable[Arrival]], Iterable[Arrival]] = iter,
) -> Day:  # fmt: skip
    """Serve a trace, step by step: with real numbers by an engine, else counted. `changes` keeps whose each block was.

    The clock is the predicted time of the steps. Raises `UsageError` for a request that the pool can't hold.

    >>> from flashlab.serve.traces import read
    >>> scheduler = Scheduler(KVCacheManager(512, 16))
    >>> day = serve(read("lognormal:alpaca", requests=20), scheduler, Costs(Model(), 16))
    >>> len(day.requests), day.bound.steps <= len(day.steps), day.bound.seconds <= sum(step.seconds for step in day.steps)
    (20, True, True)
    """
    if not arrivals:
        raise UsageError("trace", trace, "a request at least")
    manager, least = scheduler.manager, bound(arrivals, scheduler, costs)
    if costs.page_size != manager.block_size:
        raise UsageError("page_size", costs.page_size, f"{manager.block_size}, as the manager has it")
    number, coming = dict[Request, int](), 0
    first, jobs, ended = dict[Request, float](), list[Job](), dict[int, Served]()
    steps, clock, owners = list[Step](), 0.0, dict[int, tuple[int, int]]()
    watched = iter(progress(arrivals))
    while coming < len(arrivals) or scheduler.jobs:
        if not scheduler.jobs:
            clock = max(clock, arrivals[coming].seconds)
        while coming < len(arrivals) and arrivals[coming].seconds <= clock:
            request = arrivals[coming].request(coming)
            jobs.append(scheduler.add(request, arrivals[coming].answer))
            number[request] = coming
            coming += 1
        step = scheduler.schedule()
        if not step:  # the only one that ran had to give its blocks back
            continue
        pairs = [(n, manager.num_computed_tokens(request) + n) for request, n in step.items()]
        cost, answers = costs.step(pairs), scheduler.answers()
        if engine is not None:
            tokens = engine.run(step, answers)
        else:
            manager.take_copies()
            tokens = {r: ((number[r] + 1) << 32) + len(r.tokens) for r in answers}
        tables, blocks, wasted = _owned(manager)
        found = tuple(_changed(manager, number, owners)) if changes else ()
        parts = tuple((number[r], n, len(manager.owned[r].table)) for r, n in step.items()) if changes else ()
        steps.append(
            Step(
                clock, cost.seconds, len(step), sum(step.values()), cost.launches, cost.nbytes, cost.kv_bytes,
                len(scheduler.waiting), len(scheduler.preempted), blocks, tables, wasted, found, parts,
            )
        )  # fmt: skip
        clock += cost.seconds
        for request in answers:
            first.setdefault(request, clock)
        for job in scheduler.update(tokens):
            i, at = number[job.request], first[job.request]
            came, answer = arrivals[i].seconds, arrivals[i].answer
            each = (clock - at) / (answer - 1) if answer > 1 else 0.0
            ended[i] = Served(
                job.request.name, came, job.prompt, answer, at - came, each, job.reused, job.recomputed, job.preempted
            )
            next(watched, None)
    for _ in watched:
        pass
    if changes and steps:  # the last hands are those after the last step
        steps[-1] = replace(steps[-1], changes=(*steps[-1].changes, *_changed(manager, number, owners)))
    return Day(
        trace, engine.backend if engine else "counted", costs.device.name, costs.model, manager.num_blocks, manager.block_size,
        scheduler.policy, costs.rate.source, least, tuple(ended[i] for i in range(len(arrivals))), tuple(steps),
    )  # fmt: skip


def _owned(manager: KVCacheManager) -> tuple[int, int, int]:
    """Entries of all tables, blocks that somebody owns, and rows of these that hold no token."""
    tables = wasted = 0
    for own in manager.owned.values():
        tables += len(own.table)
        wasted += len(own.table) * manager.block_size - own.written - own.reserved
    return tables, manager.num_blocks - 1 - manager.num_free_blocks, wasted


def _changed(
    manager: KVCacheManager, number: dict[Request, int], owners: dict[int, tuple[int, int]]
) -> Iterator[Change]:
    """The blocks whose owners aren't what `owners` says, which is brought up to date."""
    own, times = dict[int, int](), Counter[int]()
    for request, owned in manager.owned.items():
        times.update(owned.table)
        for block in owned.table:
            own.setdefault(block, number[request])
    for block in range(1, manager.num_blocks):
        kept = KEPT if manager.contents[block] is not None else FREE
        now = (own[block], times[block]) if block in own else (kept, 0)
        if owners.get(block, (FREE, 0)) != now:
            owners[block] = now
            yield Change(block, *now)
