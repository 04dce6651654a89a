"""The scheduler: what a step has, who is preempted, and that no token is lost."""

from __future__ import annotations

from random import Random

import pytest

import flashlab as fl
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.invariants import violations
from flashlab.serve.requests import Request
from flashlab.serve.scheduler import Scheduler


def named(step: dict[Request, int]) -> dict[str, int]:
    return {request.name: n for request, n in step.items()}


def stepped(scheduler: Scheduler) -> dict[str, int]:
    step = scheduler.schedule()
    scheduler.manager.take_copies()
    scheduler.update(dict.fromkeys(scheduler.answers(), 5))
    return named(step)


def test_a_prompt_is_a_number_of_tokens_and_a_chunk_a_smaller_one() -> None:
    scheduler = Scheduler(KVCacheManager(64, 4), max_num_seqs=8, max_num_batched_tokens=10)
    a = scheduler.add(Request("a", [1] * 4), 3)
    scheduler.add(Request("b", [2] * 17), 2)
    assert [stepped(scheduler) for _ in range(4)] == [{"a": 4, "b": 6}, {"a": 1, "b": 9}, {"a": 1, "b": 2}, {"b": 1}]
    assert scheduler.schedule() == {} and not scheduler.jobs
    assert a.request.tokens == [1] * 4 + [5] * 3


def test_the_latest_is_preempted_and_computes_its_tokens_again() -> None:
    scheduler = Scheduler(KVCacheManager(8, 2, watermark=0, enable_caching=False), max_num_batched_tokens=20)
    first, second = (scheduler.add(Request(name, [n] * 6), 5) for n, name in enumerate(("first", "second")))
    steps = [stepped(scheduler) for _ in range(9)]
    assert steps[:3] == [{"first": 6, "second": 6}, {"first": 1}, {"first": 1}]
    assert steps[5] == {"second": 7}, "its prompt and the token that it had"
    assert (first.preempted, second.preempted, second.recomputed) == (0, 1, 6)
    assert len(second.request.tokens) == 11 and violations(scheduler.manager) == []


def test_who_waits_is_let_in_by_the_policy() -> None:
    for policy, names in (("fcfs", ["long", "short"]), ("shortest", ["short", "long"])):
        scheduler = Scheduler(KVCacheManager(64, 4), max_num_seqs=1, policy=policy)
        for name, n in (("long", 9), ("short", 3)):
            scheduler.add(Request(name, [n] * n), 1)
        assert [next(iter(stepped(scheduler))) for _ in range(2)] == names


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_failures_and_cancellations_loses_nothing(seed: int) -> None:
    """Steps fail, clients go, memory runs out: those that stay get all their tokens, and in the end all blocks are free."""
    random = Random(seed)
    manager = KVCacheManager(24, 2, watermark=0.1)
    scheduler = Scheduler(manager, max_num_seqs=6, max_num_batched_tokens=9)
    jobs = [scheduler.add(Request(f"r{i}", [random.randrange(2) for _ in range(random.randint(1, 9))]), random.randint(1, 9))
            for i in range(25)]  # fmt: skip
    gone = set[str]()
    for _ in range(2000):
        step = scheduler.schedule()
        if random.random() < 0.1 and scheduler.jobs:
            request = random.choice(list(scheduler.jobs))
            scheduler.cancel(request)
            gone.add(request.name)
        if random.random() < 0.2:
            scheduler.abandon()
        else:
            manager.take_copies()
            scheduler.update(dict.fromkeys(scheduler.answers(), 1))
        assert violations(manager) == []
        assert len(step) <= 6 and sum(step.values()) <= 9
        if not scheduler.jobs:
            break
    assert not scheduler.jobs and manager.num_free_blocks == 23
    assert all(len(job.request.tokens) == job.length for job in jobs if job.request.name not in gone)
    assert 0 < len(gone) < 25


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: Scheduler(s.manager, max_num_seqs=0), "max_num_seqs = 0: expected an integer of at least 1"),
        (lambda s: Scheduler(s.manager, policy="lifo"), "policy = 'lifo': expected one of fcfs, shortest"),
        (lambda s: s.add(Request("big", [1] * 60), 10), "request = 'big, 70 tokens': expected at most 61"),
        (lambda s: s.cancel(Request("x", [1])), "request = 'x': expected a request that is served"),
        (lambda s: s.add(next(iter(s.jobs)), 1), "request = 'a': expected a request that wasn't added before"),
        (lambda s: [s.schedule(), s.schedule()], "schedule = 'called twice': expected update or abandon"),
    ],
)
def test_what_is_refused(call: object, said: str) -> None:
    scheduler = Scheduler(KVCacheManager(16, 4))
    scheduler.add(Request("a", [1, 2]), 1)
    with pytest.raises(fl.UsageError) as refused:
        call(scheduler)  # type: ignore[operator]
    assert str(refused.value).startswith(said)
