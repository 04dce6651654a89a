"""The block manager: held to a model without blocks, and what it does at its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import flashlab as fl
from flashlab.serve.blocks import NULL, KVCacheManager
from flashlab.serve.invariants import violations
from flashlab.serve.model import ACTIONS, Action, Pool, World, drive, replay, shrunk
from flashlab.serve.requests import Request
from tests.mutants.managers import MANAGERS

NUMBERS = st.integers(0, 4095)


class Held(RuleBasedStateMachine):
    """The rules of the driver, by Hypothesis."""

    @initialize(
        blocks=st.integers(3, 11), size=st.integers(1, 4), caching=st.booleans(), watermark=st.sampled_from([0, 0.3])
    )
    def begin(self, blocks: int, size: int, caching: bool, watermark: float) -> None:
        self.world = World(KVCacheManager, Pool(blocks, size, caching, watermark))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.do(Action("drain", 0, 0))


def _ruled(name: str) -> Any:
    def act(self: Held, a: int, b: int) -> None:
        self.world.do(Action(name, a, b))

    return rule(a=NUMBERS, b=NUMBERS)(act)


for _name in ACTIONS:
    setattr(Held, _name, _ruled(_name))
Held.TestCase.settings = settings(
    max_examples=100, stateful_step_count=100, derandomize=True, deadline=None, database=None
)
test_ten_thousand_steps_beside_the_model = Held.TestCase


def test_a_driven_run_is_repeated_to_the_letter() -> None:
    """The same seed finds the same run, and the run that is left fails for the reason that is told."""
    broken = next(bug for bug in MANAGERS if bug.name == "a shared block is written").manager()
    found = drive(broken, steps=2000, seed=3)
    assert found is not None and found == drive(broken, steps=2000, seed=3)
    pool, actions, said = found
    assert replay(broken, pool, actions) == said
    assert len(actions) <= 12
    assert all(replay(broken, pool, actions[:i] + actions[i + 1 :]) is None for i in range(len(actions)))
    assert replay(KVCacheManager, pool, actions) is None


def test_a_hit_that_only_a_launch_copies_from_is_not_free() -> None:
    """In this run a newcomer hits a block that is held for a copy, and in no table. To the model it was one of the free blocks."""
    assert drive(steps=100, seed=3355901424) is None


def test_what_fails_is_shrunk_to_what_it_needs() -> None:
    broken = next(bug for bug in MANAGERS if bug.name == "slots begin a token late").manager()
    # all launches run at the end of a run
    noise = [Action("answer", n, n) for n in range(20)]
    needed = [Action("arrive", 0, 3), Action("allocate", 0, 3), Action("launch", 0, 0), Action("run", 0, 0)]
    run = [action for each in needed for action in (*noise, each)]
    assert [action.name for action in shrunk(broken, Pool(), run)] == [
        "arrive",
        "allocate",
        "launch",
    ]  # all launches run at the end


# -- by hand


def begun(manager: KVCacheManager, name: str, tokens: list[int], n: int | None = None) -> Request:
    """A request with its first n tokens computed, by default all."""
    request = Request(name, tokens)
    assert manager.allocate_slots(request, len(tokens) if n is None else n) is not None
    manager.take_copies()
    manager.commit(request)
    return request


def test_blocks_are_evicted_tail_first_and_the_longest_unused_first() -> None:
    manager = KVCacheManager(8, 2, watermark=0)
    first, second = begun(manager, "first", [1, 1, 1, 1, 1]), begun(manager, "second", [2, 2, 2, 2])
    tables = manager.owned[first].table, manager.owned[second].table
    manager.free(first)
    manager.free(second)
    (a, b, c), (d, e) = tables  # c isn't full: nobody can find it
    assert list(manager.free_list)[:2] == [c, 6] and list(manager.free_list)[-4:] == [b, a, e, d]


def test_a_hit_is_full_blocks_and_never_the_whole_prompt() -> None:
    manager = KVCacheManager(9, 4)
    begun(manager, "first", [7] * 12)
    for length, found in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)):
        assert manager.get_computed_blocks(Request("r", [7] * length))[1] == found
    assert manager.get_computed_blocks(Request("r", [7] * 13, salt="adapter"))[1] == 0
    assert KVCacheManager(9, 4, enable_caching=False).get_computed_blocks(Request("r", [7] * 13)) == ([], 0)


def test_a_written_shared_block_is_copied_first() -> None:
    manager = KVCacheManager(8, 4)
    parent = begun(manager, "parent", [1, 2, 3, 4, 5])
    child = Request("child", [*parent.tokens, 6])
    manager.fork(parent, child)
    (source, tail), parent.tokens[5:] = manager.owned[parent].table, [7]
    assert manager.allocate_slots(child, 1) == [3] and manager.take_copies() == [(tail, 3)]
    assert manager.allocate_slots(parent, 1) == []  # the child has its own
    assert manager.block_table([parent, child]).tolist() == [[source, tail], [source, 3]]
    assert manager.slot_mapping([child, parent]).tolist() == [3 * 4 + 1, tail * 4 + 1]
    assert violations(manager) == []


def test_arrays_are_what_the_kernels_take() -> None:
    manager = KVCacheManager(8, 4)
    long, short = begun(manager, "long", [1] * 9), begun(manager, "short", [2])
    table = manager.block_table([short, long])
    assert table.dtype == np.int32 and table[0].tolist() == [manager.owned[short].table[0], NULL, NULL]
    short.tokens.append(3)
    manager.allocate_slots(short, 1)
    assert manager.slot_mapping([short]).dtype == np.int64
    assert manager.block_table([]).shape == (0, 0) and manager.slot_mapping([]).shape == (0,)


def test_an_exception_between_allocate_and_append() -> None:
    """No token is lost, and no page leaks: by the request that failed, by one of the same batch, and by one that came back."""
    manager = KVCacheManager(8, 2, watermark=0)
    running = begun(manager, "running", [1, 2, 3])
    newcomer, before = Request("newcomer", [1, 2, 9, 9]), manager.num_free_blocks
    running.tokens.append(4)
    assert manager.allocate_slots(running, 1) == [] and manager.allocate_slots(newcomer, 2) == [3]
    for request in (running, newcomer):
        manager.abandon(request)
    assert manager.num_computed_tokens(running) == 3 and manager.num_computed_tokens(newcomer) == 2  # found, not lost
    assert manager.num_free_blocks == before and violations(manager) == []
    manager.free(newcomer)
    assert manager.allocate_slots(running, 1) == []


def test_memory_out_in_the_middle_of_a_batch() -> None:
    manager = KVCacheManager(5, 2, watermark=0)
    a, b = begun(manager, "a", [1, 1]), begun(manager, "b", [2, 2])
    for request in (a, b):
        request.tokens += [3, 3, 3]
    assert manager.allocate_slots(a, 3) is not None
    state = list(manager.free_list), list(manager.refs)
    assert manager.allocate_slots(b, 3) is None
    assert (list(manager.free_list), manager.refs) == state
    manager.commit(a)
    manager.free(a)
    assert manager.allocate_slots(b, 3) is not None


def test_a_request_cancelled_while_its_launch_is_queued() -> None:
    manager = KVCacheManager(5, 2, watermark=0)
    request = Request("r", [1, 2, 3])
    manager.allocate_slots(request, 3)
    manager.free(request)
    assert manager.num_free_blocks == 2  # what the launch writes is still its own
    manager.commit(request)
    assert manager.num_free_blocks == 4 and manager.get_computed_blocks(Request("again", [1, 2, 3]))[1] == 2


@pytest.mark.parametrize("size", [1, 4, 16])
def test_waste_is_below_a_block_a_request(size: int) -> None:
    manager = KVCacheManager(200, size, watermark=0)
    for n in range(1, 40):
        request = begun(manager, "r", [n] * n)
        assert 0 <= len(manager.owned[request].table) * size - n <= size - 1
        manager.free(request)


def test_a_newcomer_leaves_a_reserve_unless_it_is_alone() -> None:
    manager = KVCacheManager(10, 1, watermark=0.3)
    first = begun(manager, "first", [1] * 9)
    manager.free(first)
    begun(manager, "second", [2] * 4)
    assert manager.allocate_slots(Request("third", [3] * 3), 3) is None
    assert manager.allocate_slots(Request("third", [3] * 2), 2) is not None


def test_a_request_that_never_fits_is_told_so() -> None:
    with pytest.raises(fl.UsageError, match="long, 9 tokens.*at most 8 tokens"):
        KVCacheManager(5, 2).allocate_slots(Request("long", [1] * 9), 9)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, r: m.free(Request("x", [1])), "request = 'x': expected a request that owns blocks"),
        (lambda m, r: m.commit(r), "request = 'r': expected a request in flight: allocate_slots comes first"),
        (lambda m, r: m.abandon(r), "request = 'r': expected a request in flight: allocate_slots comes first"),
        (lambda m, r: m.allocate_slots(r, 9), "num_new_tokens = 9: expected at most 1: r has no more tokens"),
        (lambda m, r: m.allocate_slots(r, 0), "num_new_tokens = 0: expected an integer of at least 1"),
        (lambda m, r: m.fork(r, r), "child = 'r': expected a request that owns no blocks"),
        (lambda m, r: m.fork(r, Request("c", [9, 9, 9])), "child = 'c': expected a request that begins with what r has computed"),
        (lambda m, r: m.block_table([Request("x", [1])]), "request = 'x': expected a request that owns blocks"),
        (lambda m, r: [m.allocate_slots(r, 1), m.allocate_slots(r, 1)], "request = 'r': expected a request that is in flight no"),
        (lambda m, r: [m.allocate_slots(r, 1), m.fork(r, Request("c", []))], "parent = 'r': expected a request that is not in"),
        (lambda m, r: KVCacheManager(1, 4), "num_blocks = 1: expected an integer of at least 2"),
        (lambda m, r: KVCacheManager(4, 0), "block_size = 0: expected an integer of at least 1"),
        (lambda m, r: KVCacheManager(4, 4, watermark=1), "watermark = 1: expected a share of the pool, from 0 to below 1"),
        (lambda m, r: KVCacheManager(4, 4, enable_caching=1), "enable_caching = 1: expected"),
    ],
)  # fmt: skip
def test_calls_out_of_order_are_refused_in_a_line(call: Any, said: str) -> None:
    manager = KVCacheManager(6, 2)
    request = begun(manager, "r", [1, 2, 3], 2)
    with pytest.raises(fl.UsageError) as refused:
        call(manager, request)
    assert str(refused.value).startswith(said)
    assert violations(manager) == []


def test_the_invariants_say_what_is_broken() -> None:
    """Each function of them can fail."""
    breaks: list[tuple[Any, str]] = [
        (lambda m: m.holds.__setitem__(1, 1), "is held 1 times"),
        (lambda m: m.free_list.__setitem__(1, None), "are free, and used"),
        (lambda m: m.free_list.popitem(), "are lost"),
        (lambda m: m.free_list.__setitem__(NULL, None), "the null block is free"),
        (lambda m: next(iter(m.owned.values())).table.append(5), "blocks for 3 tokens"),
        (lambda m: setattr(next(iter(m.owned.values())), "freed", True), "without a launch"),
        (lambda m: setattr(next(iter(m.owned.values())), "written", 9), "has room for 9 tokens"),
        (lambda m: m.cached.clear(), "the cache leads to"),
        (lambda m: next(iter(m.owned)).tokens.__setitem__(0, 5), "holds other tokens"),
        (lambda m: next(iter(m.owned.values())).table.__setitem__(1, 1), "has a block twice"),
    ]
    for do, said in breaks:
        manager = KVCacheManager(6, 2)
        begun(manager, "r", [1, 2, 3])
        assert violations(manager) == []
        do(manager)
        assert any(said in line for line in violations(manager)), said
