"""Days of a server, and calls of its block manager, that nobody meant. What is served is held to what must be true of any day."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import flashlab as fl
from flashlab.serve import model
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Costs, Model
from flashlab.serve.day import Day, serve
from flashlab.serve.invariants import violations
from flashlab.serve.real import TINY, Engine, Tiny
from flashlab.serve.requests import Request
from flashlab.serve.scheduler import Scheduler
from flashlab.serve.traces import Arrival

JUNK: Sequence[Any] = (0, -1, 1, 2**31, 0.5, True, None, "x", (), float("nan"))
"""In place of an argument of the server."""


class Served(NamedTuple):
    """A trace, and what the block manager, the scheduler and the model are given."""

    arrivals: list[Arrival]
    manager: dict[str, Any]
    scheduler: dict[str, Any]
    model: dict[str, Any]
    backend: str | None


def a_day(random: Random) -> Served:
    """A day of a few requests. One argument in three days is replaced."""
    every = random.choice([4, 16])
    arrivals = [
        Arrival(
            random.random() * 0.01 * i,
            prompt := random.randint(1, 60),
            random.randint(1, 12),
            random.choice([(), tuple(random.randrange(3) for _ in range(-(-prompt // every)))]),
            every,
        )
        for i in range(random.randint(0, 6))
    ]
    manager: dict[str, Any] = {
        "num_blocks": random.randint(2, 60), "block_size": random.choice([1, 4, 16]),
        "enable_caching": random.random() < 0.8, "watermark": random.choice([0, 0.01, 0.3]),
    }  # fmt: skip
    scheduler: dict[str, Any] = {
        "max_num_seqs": random.randint(1, 6), "max_num_batched_tokens": random.choice([1, 7, 64, 2048]),
        "policy": random.choice(["fcfs", "shortest"]),
    }  # fmt: skip
    of_model: dict[str, Any] = {"layers": random.choice([1, 3]), "weights": random.choice([0, 10**9])}
    if random.random() < 0.3:
        changed = random.choice([manager, scheduler, of_model])
        changed[random.choice(list(changed))] = random.choice(JUNK)
    return Served(arrivals, manager, scheduler, of_model, random.choice([None, None, None, "simulator"]))


def served(drawn: Served) -> str:
    """What became of a day: "returned" or "refused". Anything else is raised."""
    try:
        manager = KVCacheManager(**drawn.manager)
        scheduler = Scheduler(manager, **drawn.scheduler)
        costs = Costs(TINY if drawn.backend else Model(**drawn.model), manager.block_size)
        engine = Engine(manager, Tiny(), drawn.backend) if drawn.backend else None
        day = serve(drawn.arrivals, scheduler, costs, engine=engine, changes=True)
    except fl.UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, str(error)
        return "refused"
    _hold(drawn, manager, day)
    return "returned"


def _hold(drawn: Served, manager: KVCacheManager, day: Day) -> None:
    """At the end nobody owns a block. Each request was answered after it came, and no step computes or reads too little."""
    assert not violations(manager), violations(manager)
    assert not manager.owned and manager.num_free_blocks == manager.num_blocks - 1, (
        "a block is owned after the last request"
    )
    assert [(one.prompt, one.answer) for one in day.requests] == [(one.prompt, one.answer) for one in drawn.arrivals]
    assert all(one.first_token > 0 and one.per_token >= 0 for one in day.requests)
    found = day.summary()
    assert (
        found["computed"] - found["recomputed"] == sum(one.prompt + one.answer - 1 - one.reused for one in day.requests)
        or (found["preempted"])
    ), found
    assert day.bound.steps <= found["steps"] and day.bound.kv_bytes <= found["kv_bytes"], found
    assert day.bound.tokens <= found["computed"] or drawn.manager["enable_caching"], found


class Managed(NamedTuple):
    """Calls of a block manager, each a method's name and its arguments; a number among them stands for a request."""

    pool: dict[str, Any]
    seed: int
    calls: list[tuple[str, tuple[Any, ...]]]


METHODS = {
    "allocate_slots": 2,
    "commit": 1,
    "abandon": 1,
    "free": 1,
    "fork": 2,
    "get_computed_blocks": 1,
    "num_computed_tokens": 1,
}
"""A block manager's methods that take a request, with how many arguments each has."""


def a_manager(random: Random) -> Managed:
    """A pool, and calls in any order: mostly out of order."""
    pool = {
        "num_blocks": random.randint(2, 9),
        "block_size": random.choice([1, 2, 4]),
        "watermark": random.choice([0, 0.3]),
    }
    calls = list[tuple[str, tuple[Any, ...]]]()
    for _ in range(random.randint(1, 40)):
        name = random.choice([*METHODS, *["allocate_slots"] * 3, *["commit"] * 2])
        of_request = random.randrange(4)
        second = [random.choice([1, 2, 5, *JUNK]) if name == "allocate_slots" else random.randrange(4)]
        calls.append((name, (of_request, *second[: METHODS[name] - 1])))
    return Managed(pool, random.randrange(2**32), calls)


def managed(drawn: Managed) -> str:
    """What became of the calls: "returned" if none was refused, else "refused". And a run of the model finds nothing."""
    random, manager, refused = Random(drawn.seed), KVCacheManager(**drawn.pool), False
    requests = [Request(f"r{i}", [random.randrange(2) for _ in range(random.randint(1, 12))]) for i in range(4)]
    for name, (which, *more) in drawn.calls:
        given = [requests[which], *(requests[x] if name == "fork" else x for x in more)]
        if name == "commit":
            manager.take_copies()
        try:
            getattr(manager, name)(*given)
        except fl.UsageError as error:
            assert "\n" not in str(error), str(error)
            refused = True
        assert not violations(manager), (name, violations(manager))
    wrong = model.drive(steps=100, seed=drawn.seed)
    assert wrong is None, wrong
    return "refused" if refused else "returned"
