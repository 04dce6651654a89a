"""A server's day: real tokens are those of naive attention, waste and bounds hold, and the distributions give the known shares."""

from __future__ import annotations

import functools
import subprocess
import sys
from random import Random
from typing import Any

import pytest

import flashlab as fl
from flashlab.serve import traces
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Costs, Model
from flashlab.serve.day import Day, serve
from flashlab.serve.real import TINY, Engine, Tiny
from flashlab.serve.requests import Request
from flashlab.serve.scheduler import Scheduler
from flashlab.serve.traces import Arrival
from simulator import memory

ONE = Model(layers=1)


@functools.cache
def costs(size: int) -> Costs:
    """They remember the lengths that they have counted."""
    return Costs(ONE, size)


def a_day(arrivals: list[Arrival], *, pages: int = 512, size: int = 16, caching: bool = True, **limits: Any) -> Day:
    manager = KVCacheManager(pages, size, enable_caching=caching)
    return serve(arrivals, Scheduler(manager, **limits), costs(size), changes=True)


# -- real numbers


def crowd(seed: int, requests: int) -> list[Arrival]:
    """Short requests, some of which begin alike, and come at about the same time."""
    random, found = Random(seed), list[Arrival]()
    for i in range(requests):
        ids = tuple(random.randint(1, 2) if n < 2 else 10 * i + n + 10 for n in range(random.randint(1, 5)))
        prompt = random.randint(4 * len(ids) - 3, 4 * len(ids))
        found.append(Arrival(random.random() * 1e-5, prompt, random.randint(1, 12), ids, every=4))
    return sorted(found, key=lambda one: one.seconds)


def answered(arrivals: list[Arrival], backend: str, pages: int, **limits: Any) -> tuple[Day, list[Request]]:
    """A real day, and its requests with all their tokens."""
    manager = KVCacheManager(pages, 4)
    scheduler, tiny = Scheduler(manager, **limits), Tiny()
    seen = list[Request]()
    add = scheduler.add

    def kept(request: Request, answer: int) -> Any:
        seen.append(request)
        return add(request, answer)

    scheduler.add = kept  # type: ignore[method-assign]
    return serve(arrivals, scheduler, Costs(TINY, 4), engine=Engine(manager, tiny, backend)), seen


def held(arrivals: list[Arrival], requests: list[Request]) -> None:
    """Each request's tokens are those of naive attention, request by request."""
    tiny = Tiny()
    for i, (one, request) in enumerate(zip(arrivals, requests, strict=True)):
        alone = one.request(i).tokens
        for _ in range(one.answer):
            alone.append(tiny.alone(alone))
        assert request.tokens == alone, request.name


@pytest.mark.parametrize(
    ("chunk", "pages", "policy", "seed"),
    [(64, 60, "fcfs", 0), (3, 60, "shortest", 1), (7, 9, "fcfs", 0), (16, 9, "shortest", 1)],
)
def test_real_tokens_are_those_of_naive_attention(chunk: int, pages: int, policy: str, seed: int) -> None:
    """For small and large chunks, in any order, and where requests are preempted and blocks evicted."""
    arrivals = crowd(seed, 6)
    day, requests = answered(arrivals, "simulator", pages, max_num_batched_tokens=chunk, max_num_seqs=4, policy=policy)
    held(arrivals, requests)
    assert sum(one.reused for one in day.requests) > 0
    assert (sum(one.preempted for one in day.requests) > 0) == (pages < 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 30))
def test_many_real_days(seed: int) -> None:
    random = Random(seed)
    limits: Any = {"max_num_batched_tokens": random.choice([1, 2, 5, 16, 100]), "max_num_seqs": random.randint(1, 8)}
    arrivals = crowd(seed, 10)
    held(
        arrivals,
        answered(arrivals, "simulator", random.randint(8, 40), **limits, policy=random.choice(["fcfs", "shortest"]))[1],
    )


@pytest.mark.long
@pytest.mark.compiler
def test_real_tokens_by_the_kernels_on_the_emulator() -> None:
    arrivals = crowd(5, 3)
    held(arrivals, answered(arrivals, "emulator", 9, max_num_batched_tokens=8)[1])


@pytest.mark.gpu
def test_real_tokens_by_the_kernels_on_a_gpu() -> None:
    arrivals = crowd(6, 12)
    held(arrivals, answered(arrivals, "gpu", 20, max_num_batched_tokens=16)[1])


def test_a_wrong_row_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here one row of K and V goes into its neighbour's slot."""
    right = Engine._write

    def wrong(self: Engine, algorithm: str, pools: list[Any], **arrays: Any) -> None:
        right(self, algorithm, pools, **arrays)
        if algorithm == "append_kv":
            k, v, slots = arrays["k"], arrays["v"], arrays["slot_mapping"]
            right(self, algorithm, pools, k=k[:, :, :1], v=v[:, :, :1], slot_mapping=slots[:1] ^ 1)

    monkeypatch.setattr(Engine, "_write", wrong)
    arrivals = crowd(0, 6)
    with pytest.raises(AssertionError):
        held(arrivals, answered(arrivals, "simulator", 60)[1])


def test_a_request_too_long_for_the_tiny_model_is_refused() -> None:
    with pytest.raises(fl.UsageError, match="4,097 tokens.*at most 4,096 with real numbers"):
        answered([Arrival(0.0, 4097, 1)], "simulator", 1200, max_num_batched_tokens=5000)


# -- counted days


def test_a_day_by_hand() -> None:
    """Two requests with 32 tokens in common: the second finds them, and computes the rest."""
    shared = [Arrival(0.0, 40, 2, (1, 2, 3), every=16), Arrival(1.0, 36, 3, (1, 2, 4), every=16)]
    day = a_day(shared)
    assert [step.tokens for step in day.steps] == [40, 1, 4, 1, 1]
    assert [one.reused for one in day.requests] == [0, 32]
    assert (day.bound.steps, day.bound.tokens) == (3, 32 + 8 + 1 + 4 + 2)
    assert day.bound.kv_bytes == ONE.token_bytes * (40 + 41 + 36 + 37 + 38)
    first, second = day.requests
    assert first.first_token == day.steps[0].seconds and first.per_token == pytest.approx(day.steps[1].seconds)
    assert second.seconds == 1.0 == day.steps[2].begin
    assert second.per_token == pytest.approx((day.steps[3].seconds + day.steps[4].seconds) / 2)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_waste_is_below_a_block_a_request(size: int) -> None:
    day = a_day(traces.read("lognormal:alpaca", requests=12, rate=4000.0), size=size, pages=3000 // size)
    assert all(0 <= step.wasted <= (size - 1) * (step.requests + step.waiting) for step in day.steps)
    assert (day.waste == 0) == (size == 1)


def test_a_block_that_ends_a_prompt_is_computed_by_its_request_and_hit_by_others() -> None:
    day = a_day([Arrival(0.0, 8, 1, (7,)), Arrival(1.0, 12, 1, (7,))], size=4)
    assert day.bound.tokens == day.summary()["computed"] == 8 + 4


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_nothing_is_below_the_bound_and_all_is_accounted_for(policy: str) -> None:
    """With so few pages that requests are preempted; tokens are computed once, found, or computed again."""
    arrivals = crowd(7, 60)
    day = a_day(arrivals, pages=24, size=4, max_num_seqs=12, max_num_batched_tokens=32, policy=policy)
    s = day.summary()
    assert s["preempted"] > 0 and s["reused"] > 0
    assert day.bound.steps <= s["steps"] and day.bound.kv_bytes <= s["kv_bytes"] and day.bound.seconds <= s["busy"]
    assert day.bound.tokens <= s["computed"]
    assert s["peak_blocks"] <= 23 and s["peak_bytes"] <= s["peak_bytes_unshared"]
    owed = sum(one.prompt + one.answer - 1 for one in arrivals)
    preempted = [one for one in day.requests if one.preempted]
    assert sum(step.tokens for step in day.steps) + s["reused"] >= owed
    assert all(one.recomputed == 0 for one in day.requests if one not in preempted)


def test_without_caching_nothing_is_found() -> None:
    day = a_day(crowd(7, 20), size=4, caching=False)
    assert day.summary()["reused"] == 0 and day.saved == 0 and day.bound.tokens == day.summary()["computed"]


def test_changes_lead_to_the_owners() -> None:
    """Played in order, they give the blocks in use of every step, and in the end nobody owns any."""
    day = a_day(crowd(7, 20), pages=40, size=4, max_num_seqs=6)
    owners = dict[int, int]()
    for n, step in enumerate(day.steps):
        owners |= {change.block: change.owners for change in step.changes}
        if n + 1 < len(day.steps):
            assert sum(n > 0 for n in owners.values()) == step.blocks
            assert sum(owners.values()) == step.tables
    assert set(owners.values()) == {0}


def test_a_pool_that_is_too_small_is_told_so() -> None:
    with pytest.raises(fl.UsageError, match="r0, 41 tokens.*at most 33"):
        a_day([Arrival(0.0, 36, 5)], pages=3)
    with pytest.raises(fl.UsageError, match="page_size = 8: expected 16"):
        serve([Arrival(0.0, 3, 1)], Scheduler(KVCacheManager(4, 16)), Costs(ONE, 8))


def test_a_counted_day_needs_nothing_that_a_browser_lacks() -> None:
    """What it loads beyond flashlab itself starts no process or thread, and loads no C library."""
    code = """
import sys
import flashlab
before = set(sys.modules)
from flashlab.serve import blocks, costs, day, scheduler, traces
manager = blocks.KVCacheManager(64, 16)
arrivals = traces.read("lognormal:alpaca", requests=2)
day.serve(arrivals, scheduler.Scheduler(manager), costs.Costs(costs.Model(), 16))
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(done.stdout.split())
    assert "flashlab.serve.day" in loaded
    slow = {"subprocess", "ctypes", "threading", "multiprocessing", "matplotlib", "typer", "hypothesis", "cupy"}
    assert not loaded & slow
    assert not {name for name in loaded if name.startswith(("flashlab.run", "flashlab.emulator", "flashlab.measure"))}


# -- the reference's distributions


@pytest.mark.parametrize(
    ("name", "way", "share"),
    [("sharegpt", "the maximum", 0.222), ("sharegpt", "a power of two", 0.514), ("sharegpt", "an oracle", 0.608),
     ("sharegpt", "pages of 16", 0.984), ("alpaca", "pages of 16", 0.918), ("sharegpt", "pages of 64", 0.935),
     ("alpaca", "pages of 64", 0.725)],
)  # fmt: skip
def test_shares_of_pages_in_use_from_the_distributions(name: str, way: str, share: float) -> None:
    """What was simulated elsewhere from the same distributions, with other draws: 0.006 is what draws differ by."""
    from flashlab.serve.shares import shares

    assert shares(name)[way] == pytest.approx(share, abs=0.006)


def test_pools_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda: 1 << 30)
    with pytest.raises(fl.UsageError, match="what is known of 4,398,046,511,104 blocks, 640 TiB: expected at most"):
        KVCacheManager(2**42, 16)
    with pytest.raises(fl.UsageError, match="23 pages of 2,199,023,255,552 tokens, .* PiB: expected at most"):
        Engine(KVCacheManager(23, 2**41), Tiny())
