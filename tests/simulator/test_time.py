"""The model of time: properties that hold on any problem, the engine and the scheduler against plain restatements of them."""

from __future__ import annotations

import importlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator.time import beside, costs, engine, order, prediction, rates, schedule
from simulator.time.engine import SM, UNITS
from simulator.time.launch import Work, rows_inside
from simulator.time.schedules import flash2, flash3_backward, flash3_backward_deterministic, flash3_fp8
from tests.simulator.problems import taken_by
from tests.tiers import examples

ALGORITHMS = tuple(name for name, row in fl.CATALOGUE.items() if row.schedule and not row.support.few_queries)
"""Those for many queries. The others are in test_time_decoding.py."""
DIFFERENT = tuple(name for name in ALGORITHMS if not name.endswith(("_deterministic", "backward_1", "backward_2")))
"""Without those that walk as another one does."""

problems = st.builds(
    fl.Problem,
    batch=st.integers(1, 4),
    heads=st.integers(1, 20),
    len_q=st.integers(0, 3000),
    len_kv=st.integers(0, 3000),
    head_dim=st.sampled_from([64, 128, 256]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(0, 500), st.integers(0, 500))),
)
algorithms = st.sampled_from(ALGORITHMS)


def cell(length: int = 4096, head_dim: int = 128, causal: bool = True) -> fl.Problem:
    return fl.Problem(
        batch=16384 // length, heads=2048 // head_dim, len_q=length, head_dim=head_dim, dtype="bfloat16", causal=causal
    )


# every prediction


def breaks(t: fl.Timeline) -> str | None:
    """What of a prediction can't be, if anything: units busy over 100 %, or a bound of the hardware undercut."""
    device, counts = t.device, fl.count(t.algorithm, t.problem, device=t.device)
    exps_per_second = rates.EXP * device.sms * rates.Rates(device, t.problem.dtype).boost
    for launch, moved in zip(t.launches, counts.launches, strict=True):
        if any(not 0 <= share <= 1 + 1e-9 for share in launch.utilisation.values()):
            return f"{launch.name}: utilisation {launch.utilisation}"
        if not 0 <= launch.balance <= 1 + 1e-9:
            return f"{launch.name}: balance {launch.balance}"
        nbytes = sum(counts.distinct(moved, way) for way in ("read", "write"))
        for what, floor in (
            ("FLOPs", moved.flops_matmul / device.flops(t.problem.dtype)),
            ("bytes", nbytes / device.bandwidth),
        ):
            if launch.seconds < floor * (1 - 1e-9):
                return f"{launch.name}: {what} alone take {floor}, not {launch.seconds}"
    if t.seconds < counts.exp / exps_per_second * (1 - 1e-9):
        return "exponentials"
    return None


@examples(60)
@given(algorithms, problems)
def test_no_prediction_undercuts_the_hardware(algorithm: str, problem: fl.Problem):
    assert breaks(fl.timeline(algorithm, taken_by(algorithm, problem), device="h200")) is None


@pytest.mark.alike("flash2", "flash3", "flash2_backward", "flash3_backward", "flash1")
@pytest.mark.parametrize("algorithm", DIFFERENT)
@pytest.mark.parametrize("causal", [False, True])
def test_no_large_prediction_undercuts_the_hardware(algorithm: str, causal: bool):
    for head_dim in (64, 128, 256):
        problem = taken_by(algorithm, cell(16384, head_dim, causal))
        assert breaks(fl.timeline(algorithm, problem, device="h200")) is None


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("warpgroup_matmul", lambda self, flops: flops / (2 * self.tensor)),
        ("exp", lambda self, elements: elements / 64),
        ("copy", lambda self, nbytes, dram=0.0: nbytes / 1e6),
        ("warp_matmul", lambda self, flops: flops / (4 * self.tensor)),
    ],
)
def test_a_rate_that_the_hardware_does_not_have_is_found(
    name: str, wrong: Callable[..., float], monkeypatch: pytest.MonkeyPatch
):
    """Seeded mistakes: units that are too fast break a bound, or stand out as ones that nothing waits for."""
    before = {a: fl.timeline(a, cell(16384, 64, False), device="h200") for a in ("flash2", "flash3", "standard")}
    monkeypatch.setattr(rates.Rates, name, wrong)
    after = {a: fl.timeline(a, cell(16384, 64, False), device="h200") for a in before}
    if name == "copy":
        assert after["standard"].seconds < 0.8 * before["standard"].seconds
        assert after["standard"].bound.startswith("DRAM") or after["standard"].utilisation["copy"] < 0.1
    elif name == "warp_matmul":
        assert after["flash2"].utilisation["tensor"] < 0.5 * before["flash2"].utilisation["tensor"]
    else:
        monkeypatch.setattr(rates, "AT_REST", 1.0)
        monkeypatch.setattr(rates, "DRAWN", 0.0)
        monkeypatch.setattr(rates, "MOVED", 0.0)
        later = fl.timeline("flash3", cell(16384, 256 if name == "warpgroup_matmul" else 64, False), device="h200")
        assert later.seconds < before["flash3"].seconds and (breaks(later) or name == "exp")


@examples(30)
@given(algorithms, problems)
def test_a_prediction_is_the_same_each_time(algorithm: str, problem: fl.Problem):
    device = "h100" if fl.CATALOGUE[algorithm].arch else "a100"
    first, second = (fl.timeline(algorithm, taken_by(algorithm, problem), device=device) for _ in range(2))
    assert first == second


@examples(30)
@given(st.sampled_from(["flash1", "standard"]), problems, st.integers(1, 200), st.integers(1, 200))
def test_more_sms_are_never_slower(algorithm: str, problem: fl.Problem, few: int, more: int):
    """Each SM as it is, with its own part of bandwidths and rates: so are those multiplied."""
    base = fl.DEVICES["l40s"]

    def with_sms(n: int) -> fl.Device:
        part = n / base.sms
        return base.replace(
            sms=n,
            bandwidth=base.bandwidth * part,
            tensor_flops=base.tensor_flops * part,
            fp32_flops=base.fp32_flops * part,
        )

    small, large = sorted((few, more))
    slow, fast = (fl.timeline(algorithm, problem, device=with_sms(n)).seconds for n in (small, large))
    assert fast <= slow * (1 + 1e-9)


# one SM


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_unit_does_one_thing_at_a_time(algorithm: str):
    assert overlaps(fl.timeline(algorithm, taken_by(algorithm, cell(1024)), device="h200").events) == []


def overlaps(events: tuple[engine.Event, ...]) -> list[tuple[engine.Event, engine.Event]]:
    by_unit: dict[str, list[engine.Event]] = defaultdict(list)
    for event in events:
        by_unit[event.unit].append(event)
    return [
        (a, b)
        for each in by_unit.values()
        for a, b in zip(sorted(each, key=lambda e: e.start), sorted(each, key=lambda e: e.start)[1:], strict=False)
        if b.start < a.end - 1e-6
    ]


def test_a_unit_that_forgets_it_is_busy_is_found(monkeypatch: pytest.MonkeyPatch):
    def forgetful(self: SM, unit: str, cycles: float, name: str, *, after: float = 0.0) -> float:
        start = max(self.now, after)
        self.events.append(engine.Event(self.actor, unit, name, start, start + cycles))
        return start + cycles

    monkeypatch.setattr(SM, "use", forgetful)
    assert overlaps(fl.timeline("flash2", cell(1024), device="h200").events)


def test_every_key_tile_is_loaded_multiplied_and_exponentiated():
    """flash3's first SM at 1k, full: two row tiles of eight key tiles, by two warpgroups; a tile's products are eight
    instructions, its exponentials eight pieces."""
    t = fl.timeline("flash3", cell(1024, causal=False), device="h200")
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for event in t.events:
        seen[event.unit, event.name] += 1
    assert {key: n for key, n in seen.items() if key[0] in ("copy", "tensor", "exp")} == {
        ("copy", "load_q"): 2,
        ("copy", "load_k"): 16,
        ("copy", "load_v"): 16,
        ("copy", "store_o"): 4,
        ("tensor", "scores"): 8 * 32,
        ("tensor", "output"): 8 * 32,
        ("exp", "softmax"): 8 * 32,
    }


def eight(length: int = 1024, head_dim: int = 128) -> fl.Problem:
    return cell(length, head_dim, causal=False).replace(dtype="float8_e4m3fn")


def events_of(problem: fl.Problem, actor: str) -> dict[tuple[str, str], list[engine.Event]]:
    """What flash3_fp8's actor did, by unit and name, in order."""
    found: dict[tuple[str, str], list[engine.Event]] = defaultdict(list)
    for event in fl.timeline("flash3_fp8", problem, device="h200").events:
        if event.actor == actor:
            found[event.unit, event.name].append(event)
    return {key: sorted(events, key=lambda e: e.start) for key, events in found.items()}


@pytest.mark.parametrize("consumer", ["consumer 0", "consumer 1"])
def test_fp8_multiplies_beside_its_softmax_and_then_folds(consumer: str):
    """To head dim 128, of each of two row tiles with eight key tiles: S of the next goes before P V of one, the maximum is looked
    for beside P V, and P V is there before the exponentials, beside which it is added to O."""
    tiles, steps, pieces = 8, 4, 8
    found = events_of(eight(), consumer)
    scores, output = found["tensor", "scores"], found["tensor", "output"]
    exponentials = found["exp", "softmax"]
    softmax = found["alu", "softmax"]  # of each key tile, pieces for the maximum, then for the exponentials
    assert len(scores) == len(output) == 2 * tiles * steps
    assert len(exponentials) == len(softmax) // 2 == 2 * tiles * pieces
    for j in (*range(1, tiles), *range(tiles + 1, 2 * tiles)):
        before = output[(j - 1) * steps : j * steps]
        assert scores[(j + 1) * steps - 1].end <= before[0].start and before[-1].end <= exponentials[j * pieces].start
        assert softmax[2 * j * pieces].start < before[-1].end
    assert len(found["alu", "output"]) == 2 * pieces  # the last key tile's have nothing beside them


def test_fp8_beyond_head_dim_128_has_registers_for_two_parts_of_p_v():
    """Nothing of a consumer runs beside its softmax, and no part of P V begins before that two before is added to O."""
    parts, steps, pieces = 4, 4, 8
    found = events_of(eight(1024, 256), "consumer 0")
    output, folds = found["tensor", "output"], found["alu", "output"]
    assert len(output) // (parts * steps) == len(folds) // (parts * pieces) > 0
    for i in range(len(output) // steps):
        if i % parts > 1:
            assert output[steps * i].start >= folds[pieces * (i - 1) - 1].end
    products = found["tensor", "scores"] + output
    assert not any(a.start < b.end and b.start < a.end for a in products for b in found["exp", "softmax"])


def test_fp8_without_overlap_takes_longer(monkeypatch: pytest.MonkeyPatch):
    overlapped = fl.timeline("flash3_fp8", eight(16384), device="h200").seconds
    monkeypatch.setattr(flash3_fp8, "OVERLAPPED", 0)
    assert fl.timeline("flash3_fp8", eight(16384), device="h200").seconds > 1.05 * overlapped


BACKWARD = tuple(name for name in ALGORITHMS if "backward" in name)


def busy(algorithm: str, problem: fl.Problem, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, float], Any]]:
    """The work of the units in each launch, beside its counts: FLOPs, exponentials, and bytes from and to the L2."""
    for module, name in (
        *((beside, name) for name in ("VECTOR", "ALONE", "COMPARED", "PRODUCTS")),
        *((rates, name) for name in ("AT_REST", "LAUNCH")),
    ):
        monkeypatch.setattr(module, name, 0.0 if name == "LAUNCH" else 1.0)
    for name in ("DRAWN", "MOVED"):
        monkeypatch.setattr(rates, name, 0.0)
    for name in ("copy", "reduce"):
        monkeypatch.setattr(rates.Rates, name, lambda self, nbytes, *_, **__: nbytes)
    device, counts = fl.DEVICES["h200"], fl.count(algorithm, problem, device="h200")
    machine = rates.Rates(device, problem.dtype)
    flops = machine.tensor if "3" in algorithm else machine.tensor * rates.MMA_SHARE[9]
    found: list[tuple[dict[str, float], Any]] = []
    for launch, counted in zip(fl.timeline(algorithm, problem, device="h200").launches, counts.launches, strict=True):
        assert launch.name == counted.name
        cycles = launch.sm_seconds * machine.boost * device.sms
        per_cycle = {"tensor": flops, "exp": rates.EXP, "copy": 1.0}
        found.append(({unit: launch.utilisation[unit] * cycles * rate for unit, rate in per_cycle.items()}, counted))
    return found


def does_what_is_counted(algorithm: str, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All FLOPs, all exponentials, and all bytes but for LSE and D, with so many query heads per KV head."""
    problem = cell(1024, widest(algorithm)).replace(batch=1, kv_heads=2048 // widest(algorithm) // shared)
    for found, counted in busy(algorithm, problem, monkeypatch):
        moved = sum(counted.bytes(f"hbm.{way}") for way in ("read", "write", "atomic"))
        assert found["tensor"] == pytest.approx(counted.flops_matmul, rel=1e-6), counted.name
        assert found["exp"] == pytest.approx(counted.exp, rel=1e-6), counted.name
        assert found["copy"] == pytest.approx(moved, rel=0.02), counted.name


def widest(algorithm: str) -> int:
    """The widest heads that its kernels take, in whole boxes."""
    return fl.CATALOGUE[algorithm].support.head_dims[-1] & ~63


@pytest.mark.parametrize("algorithm", BACKWARD)
@pytest.mark.parametrize("shared", [1, 4])
def test_a_backward_pass_does_what_is_counted(algorithm: str, shared: int, monkeypatch: pytest.MonkeyPatch):
    does_what_is_counted(algorithm, shared, monkeypatch)


@pytest.mark.parametrize("bug", ["a product", "additions", "heads of a group", "exponentials"])
def test_a_backward_pass_that_leaves_something_out_is_found(bug: str, monkeypatch: pytest.MonkeyPatch):
    def nothing(*given: Any, **named: Any) -> Iterator[Any]:
        yield from ()

    if bug == "a product":
        whole = flash3_backward.Product.of
        without = lambda *given, **named: whole(*given, **named).times(0 if named.get("in_registers") else 1)  # noqa: E731
        monkeypatch.setattr(flash3_backward.Product, "of", staticmethod(without))
    elif bug == "additions":
        monkeypatch.setattr(flash3_backward, "add", nothing)
    elif bug == "exponentials":
        monkeypatch.setattr(flash3_backward, "vector", nothing)
    else:
        alone = order.key_tiles
        monkeypatch.setattr(
            flash3_backward,
            "key_tiles",
            lambda p, config: alone(p.replace(heads=p.kv_heads), replace(config, constants=())),
        )
    with pytest.raises(AssertionError):
        does_what_is_counted("flash3_backward", 4, monkeypatch)


def test_a_dq_is_computed_a_tile_late_and_added_beside_the_next_products():
    """flash3_backward's first key tile, eight query tiles. Both consumers end a tile before dS of the next one is written."""
    found: dict[tuple[str, str, str], list[engine.Event]] = defaultdict(list)
    for event in fl.timeline("flash3_backward", cell(1024, causal=False).replace(len_q=512), device="h200").events:
        found[event.actor, event.unit, event.name].append(event)
    of = {(w, name): sorted(found[f"consumer {w}", "tensor", name], key=lambda e: e.start) for w in (0, 1) for name in
          ("scores", "dp", "dv", "dk", "dq")}  # fmt: skip
    steps = {"scores": 8, "dp": 8, "dv": 4, "dk": 4, "dq": 8}
    assert {key: len(events) for key, events in of.items()} == {
        (w, name): 8 * n for w in (0, 1) for name, n in steps.items()
    }
    stored = {w: sorted(found[f"consumer {w}", "sram", "ds"], key=lambda e: e.start) for w in (0, 1)}
    added = sorted(found["consumer 0", "sram", "add_dq"], key=lambda e: e.start)
    pieces = len(added) // 8
    for i in range(1, 8):
        dq = of[0, "dq"][8 * (i - 1) : 8 * i]
        assert of[0, "scores"][8 * i].start < dq[0].start < of[0, "dv"][4 * i].start
        assert max(of[w, "dk"][4 * i - 1].end for w in (0, 1)) <= min(stored[w][i].start for w in (0, 1))
        assert dq[-1].end <= added[pieces * (i - 1)].start < of[0, "dk"][4 * i + 3].end


@pytest.mark.parametrize("rung", [1, 2])
def test_a_dq_waits_for_both_consumers_in_the_lower_rungs(rung: int):
    """And S and dP are waited for together: no exponential before dP is done."""
    name = f"flash3_backward_{rung}"
    found: dict[tuple[str, str, str], list[engine.Event]] = defaultdict(list)
    for event in fl.timeline(name, cell(1024, causal=False).replace(len_q=512), device="h200").events:
        found[event.actor, event.unit, event.name].append(event)
    of = {key: sorted(events, key=lambda e: e.start) for key, events in found.items()}
    loader = "consumer 0" if rung == 1 else "producer"
    assert {actor for actor, _, name in of if name == "load_q"} == {loader}
    for w in (0, 1):
        dp, exp, dq = (
            of[f"consumer {w}", unit, name] for unit, name in (("tensor", "dp"), ("exp", "exp"), ("tensor", "dq"))
        )
        for i in range(8):
            assert dp[8 * i + 7].end <= exp[8 * i].start
            assert max(of[f"consumer {other}", "sram", "ds"][i].end for other in (0, 1)) <= dq[8 * i].start


def test_turns_take_time_and_cheaper_additions_save_some(monkeypatch: pytest.MonkeyPatch):
    p = cell(4096, causal=False)
    ordered, any_order = (fl.timeline(f"flash3_backward{x}", p, device="h200") for x in ("_deterministic", ""))
    assert [x.name.removeprefix("flash3_backward") for x in ordered.launches] == ["_delta", ""]
    assert ordered.launches[0].seconds < any_order.launches[0].seconds
    monkeypatch.setattr(flash3_backward_deterministic, "L2_LATENCY", 5000.0)
    assert fl.timeline("flash3_backward_deterministic", p, device="h200").seconds > 1.2 * ordered.seconds


def test_the_launches_of_a_backward_pass():
    """Parts of few KV heads are added up, and sinks have a launch. And the algorithms come in the order that they have on a GPU."""
    p = fl.Problem(
        batch=1, heads=8, kv_heads=2, len_q=4372, len_kv=6750, head_dim=64, dtype="bfloat16", causal=True, sinks=True
    )
    names = [x.name.removeprefix("flash3_backward") for x in fl.timeline("flash3_backward", p, device="h200").launches]
    assert names == ["_delta", "", "_convert", "_parts", "_sinks"]
    for first, second in (("flash3_backward", "flash3_backward_3"), ("flash3_backward_3", "flash3_backward_2"),
                          ("flash3_backward_3", "flash3_backward_1"),
                          ("flash3_backward_1", "flash2_backward"), ("flash2_backward", "flash2_backward_deterministic"),
                          ("flash2_backward", "standard_backward"), ("flash2_backward", "flash1_backward")):  # fmt: skip
        fast, slow = (
            fl.timeline(name, cell(2048, 64, causal=False), device="h200").seconds for name in (first, second)
        )
        assert fast < slow, (first, second)


@pytest.mark.parametrize("algorithm", BACKWARD)
def test_more_queries_take_a_backward_pass_longer(algorithm: str):
    p = cell(512, widest(algorithm), causal=False).replace(batch=2, heads=8)
    took = [fl.timeline(algorithm, p.replace(len_q=n), device="h200").seconds for n in (512, 2048, 8192)]
    assert took == sorted(took) and took[2] > 2 * took[1]


def test_additions_take_longer_where_the_sums_come_from_dram():
    machine = rates.Rates(fl.DEVICES["h200"], "bfloat16")
    assert machine.copy(1e6) < machine.reduce(1e6) < machine.reduce(1e6, 0.5) < machine.reduce(1e6, 1.0)


def test_actors_wait_for_units_and_barriers():
    sm = SM(record=True)
    ready = sm.barrier(2)

    def first() -> engine.Actor:
        yield sm.use("tensor", 10, "a")
        ready.arrive()

    def second() -> engine.Actor:
        end = sm.use("tensor", 5, "b")  # queued behind a
        ready.arrive_at(100)
        yield ready.opening(0)
        assert (sm.now, end) == (100, 15)
        yield sm.use("exp", 1, "c")

    sm.start("first", first())
    sm.start("second", second())
    assert sm.run() == 101
    assert [(e.name, e.start, e.end) for e in sm.events] == [("a", 0, 10), ("b", 10, 15), ("c", 100, 101)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_buffers_are_never_slower_than_one(head_dim: int, monkeypatch: pytest.MonkeyPatch):
    """In the middle of a walk, one block an SM; faster where what is loaded takes long to come. (Before the first tile, two buffers
    wait for V, too; and of two blocks each hides the other's loads.)"""
    assert a_tile(cell(16384, head_dim), 2) <= a_tile(cell(16384, head_dim), 1) + 1e-6
    monkeypatch.setattr(flash2, "L2_LATENCY", 3000.0)
    assert a_tile(cell(16384, head_dim), 2) < 0.8 * a_tile(cell(16384, head_dim), 1)


def a_tile(problem: fl.Problem, stages: int) -> float:
    """Cycles of flash2 that another key tile takes, the stages apart as it is configured."""
    config = replace(fl.CATALOGUE["flash2"].program.configure(problem, fl.DEVICES["h200"], None), stages=stages)
    launch = flash2.launches(problem, config, rates.Rates(fl.DEVICES["h200"], problem.dtype))[0]
    known = costs.Costs(launch, 1, 2000.0)
    return (known.of(Work(12)).cycles - known.of(Work(6)).cycles) / 6


def test_exponentials_and_products_slow_each_other_down():
    """Alone, beside a product that lasts, and the other way round."""

    def took(products: float) -> float:
        sm = SM()
        if products:
            beside.products(sm, products, "scores")
        sm.start("", beside.vector(sm, "softmax", exp=512.0))
        return sm.run() if products < 512 else max(sm.run() - products, sm.free["exp"])

    assert took(0) == pytest.approx(512 / rates.ALONE)
    assert took(1e4) == pytest.approx(512 / rates.VECTOR)
    sm = SM()
    sm.use("tensor", 1e4, "scores")
    sm.start("", beside.compared(sm, "softmax", 128.0))
    sm.run()
    assert sm.free["alu"] == pytest.approx(128 / rates.COMPARED)
    sm = SM()
    sm.use("exp", 100.0, "softmax")
    assert beside.products(sm, 50.0, "output") == pytest.approx(50 * rates.PRODUCTS)


def test_the_clock_falls_with_products_and_with_bytes():
    """And a little more in float16."""
    brain, half = (rates.Rates(fl.DEVICES["h200"], dtype) for dtype in ("bfloat16", "float16"))
    assert brain.loaded(0, 0) == brain.clock > brain.loaded(0.9, 0) > brain.loaded(0.9, 0.7) > half.loaded(0.9, 0.7)
    assert half.loaded(0, 0.7) == brain.loaded(0, 0.7)


def test_rows_outside_are_not_loaded():
    """281 rows are three tiles of 128, and as many bytes as 281 rows have."""
    problem = fl.Problem(batch=1, heads=8, len_q=281, head_dim=256, dtype="bfloat16")
    rows, keys = rows_inside(problem, fl.Tile(128, 64))
    assert (3 * rows, 5 * keys) == (pytest.approx(281), pytest.approx(281))
    assert rows_inside(problem.replace(len_q=0, len_kv=0), fl.Tile(128, 64)) == (0, 0)


@pytest.mark.parametrize("algorithm", ["flash3_1", "flash3_2", "flash3_fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_warpgroups_in_step_are_slower_than_apart(algorithm: str, head_dim: int):
    """And by chance, in between. The warpgroups of flash3_1 meet anyway, so there chance decides between blocks."""
    problem = taken_by(algorithm, cell(4096, head_dim))
    module = importlib.import_module(f"simulator.time.schedules.{algorithm}")
    config = fl.CATALOGUE[algorithm].program.configure(problem, fl.DEVICES["h200"], None)
    launch = module.launches(problem, config, rates.Rates(fl.DEVICES["h200"], problem.dtype))[-1]
    assert (launch.in_step is None) == (algorithm == "flash3_1" and launch.slots == 1)
    if launch.in_step is None:
        return
    apart, chance, step = (
        costs.Costs(replace(launch, chance=p), launch.slots, 370.0).of(Work(12)).cycles
        for p in (0.0, launch.chance, 1.0)
    )
    assert apart < step and chance == pytest.approx(apart + launch.chance * (step - apart))
    assert 0 < launch.chance <= 1


def test_a_long_walk_goes_on_as_a_short_one_did(monkeypatch: pytest.MonkeyPatch):
    """The straight line beside the simulation of every tile."""
    problems = {name: taken_by(name, cell(8192, causal=False)) for name in DIFFERENT}
    line = {name: fl.timeline(name, p, device="h200").seconds for name, p in problems.items()}
    monkeypatch.setattr(costs, "LONGEST_WALK", 300)
    for name, p in problems.items():
        assert fl.timeline(name, p, device="h200").seconds == pytest.approx(line[name], rel=0.03), name


def test_a_long_walk_through_masked_tiles_goes_on_as_a_short_one_did(monkeypatch: pytest.MonkeyPatch):
    """In a window, a block of a backward pass walks over the queries of 16 heads, and the mask cuts through nearly all."""
    p = fl.Problem(batch=1, heads=16, kv_heads=1, len_q=1024, head_dim=128, dtype="bfloat16", window=(300, 0))
    line = fl.timeline("flash2_backward", p, device="h200").seconds
    monkeypatch.setattr(costs, "MOST_MASKED", 10**6)
    assert fl.timeline("flash2_backward", p, device="h200").seconds == pytest.approx(line, rel=0.01)


# blocks over SMs


runs = st.lists(st.tuples(st.integers(1, 50).map(float), st.integers(0, 60)), max_size=8)


def one_by_one(blocks: list[float], slots: int) -> float:
    free = [0.0] * slots
    for duration in blocks:
        place = free.index(min(free))
        free[place] += duration
    return max(free)


@given(runs, st.integers(1, 9))
def test_blocks_go_to_the_place_that_is_free_first(order: list[tuple[float, int]], slots: int):
    blocks = [duration for duration, n in order for _ in range(n)]
    assert schedule.finish([(order, 1)], slots) == one_by_one(blocks, slots)
    assert schedule.finish([(order, 3), (order[:2], 2)], slots) == one_by_one(
        3 * blocks + 2 * [duration for duration, n in order[:2] for _ in range(n)], slots
    )


@given(runs, st.integers(1, 300), st.integers(1, 9))
def test_of_many_parts_the_middle_fills_all_slots_alike(order: list[tuple[float, int]], times: int, slots: int):
    blocks = times * [duration for duration, n in order for _ in range(n)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "STEPS", 40)
        found = schedule.finish([(order, times)], slots)
    assert found == pytest.approx(one_by_one(blocks, slots), abs=max(blocks, default=0.0))
    assert found >= sum(blocks) / slots * (1 - 1e-12)


@given(st.lists(st.tuples(runs, st.integers(0, 40)), max_size=3), st.integers(1, 9))
def test_persistent_blocks_take_every_nth_unit(parts: list[tuple[list[tuple[float, int]], int]], blocks: int):
    units = [duration for order, times in parts for _ in range(times) for duration, n in order for _ in range(n)]
    assert schedule.deal(parts, blocks) == max(sum(units[b::blocks]) for b in range(blocks))


@given(st.integers(1, 3000), st.integers(1, 300))
def test_waves_are_counted_whole(blocks: int, slots: int):
    assert schedule.finish([([(2.0, blocks)], 1)], slots) == 2.0 * math.ceil(blocks / slots)


@pytest.mark.parametrize("length", [1024, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_longest_first_is_never_slower_than_the_shortest_first(length: int, head_dim: int):
    problem = cell(length, head_dim)
    config = fl.CATALOGUE["flash2"].program.configure(problem, fl.DEVICES["h200"], None)
    launch = flash2.launches(problem, config, rates.Rates(fl.DEVICES["h200"], "bfloat16"))[0]
    known = costs.Costs(launch, launch.slots, 2000.0)
    durations = sorted(known.of(work).cycles for work in launch.taken())
    slots = launch.slots * 132
    assert schedule.finish([([(d, 1) for d in reversed(durations)], 1)], slots) <= schedule.finish(
        [([(d, 1) for d in durations], 1)], slots
    )


@given(problems, st.sampled_from([fl.Tile(64, 64), fl.Tile(128, 64), fl.Tile(64, 128), fl.Tile(192, 128)]))
def test_masked_tiles_are_those_with_a_hidden_pair(problem: fl.Problem, tile: fl.Tile):
    problem = problem.replace(len_q=problem.len_q % 700, len_kv=problem.len_kv % 700)
    for i, (work, n) in enumerate(order.in_order(problem, tile)):
        assert n == 1
        rows = range(i * tile.rows, min((i + 1) * tile.rows, problem.len_q))
        tiles = problem.tiles_of_row(i, tile)
        whole = sum(
            all(
                j * tile.cols >= k.start and (j + 1) * tile.cols <= k.stop
                for k in (problem.visible_keys(r) for r in rows)
            )
            for j in tiles
        )
        assert work == Work(len(tiles), len(tiles) - whole)


tiles_of_any_shape = st.builds(fl.Tile, st.integers(1, 40), st.integers(1, 40))


def alike(walks: Iterable[tuple[Work, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """How many walks there are, and how many tiles they have: short ones of each length, and long ones together."""
    found = defaultdict[tuple[int, int], tuple[int, int]](lambda: (0, 0))
    for work, n in walks:
        kind = work.masked, min(work.tiles, costs.LONGEST_WALK)
        many, tiles = found[kind]
        found[kind] = many + n, tiles + n * work.tiles
    return dict(found)


def groups_are_whole(problem: fl.Problem, tile: fl.Tile, listed: int = 16) -> None:
    exact = alike((order.work(problem, tile, i), 1) for i in range(problem.row_tiles(tile)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "LISTED", listed)
        patch.setattr(order, "GROUPS", 4)
        assert alike(order.in_order(problem, tile)) == exact


@given(problems, tiles_of_any_shape)
def test_groups_of_rows_walk_over_as_many_tiles(problem: fl.Problem, tile: fl.Tile):
    groups_are_whole(problem, tile)


@pytest.mark.parametrize("bug", ["_cuts", "margin", "period"])
def test_groups_that_are_not_alike_are_found(bug: str, monkeypatch: pytest.MonkeyPatch):
    if bug == "_cuts":
        monkeypatch.setattr(order, "_cuts", lambda *_: iter(()))
    elif bug == "margin":
        monkeypatch.setattr(order, "LONGEST_WALK", -2)
    else:
        monkeypatch.setattr(order, "gcd", max)
    p = fl.Problem(
        batch=1, heads=1, len_q=9000, len_kv=5000, head_dim=64, dtype="float16", causal=True, window=(700, 0)
    )
    with pytest.raises(AssertionError):
        for tile in (fl.Tile(7, 40), fl.Tile(40, 24), fl.Tile(16, 16), fl.Tile(13, 40)):
            groups_are_whole(p, tile)


@pytest.mark.parametrize("algorithm", DIFFERENT)
@pytest.mark.parametrize("causal", [False, True])
def test_groups_take_as_long_as_what_they_stand_for(algorithm: str, causal: bool, monkeypatch: pytest.MonkeyPatch):
    p = taken_by(algorithm, cell(16384, causal=causal)).replace(len_q=32768)
    listed = fl.timeline(algorithm, p, device="h200").seconds
    monkeypatch.setattr(order, "LISTED", 64)
    assert fl.timeline(algorithm, p, device="h200").seconds == pytest.approx(listed, rel=0.005)


@pytest.mark.alike("standard", "flash1", "flash2", "flash3", "flash2_backward", "flash3_backward")
@pytest.mark.parametrize("algorithm", DIFFERENT)
def test_any_length_is_predicted_in_as_many_steps(algorithm: str, monkeypatch: pytest.MonkeyPatch):
    """Blocks dealt out, units simulated or looked at, and pieces of work of an SM."""
    steps = 0

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def count(*given: Any, **named: Any) -> Any:
            nonlocal steps
            steps += 1
            return function(*given, **named)

        monkeypatch.setattr(module, name, count)

    for module, name in (
        (schedule.heapq, "heapreplace"),
        (order, "work"),
        (engine.heapq, "heappush"),
        (costs.Costs, "of"),
    ):
        counted(module, name)
    taken: list[int] = []
    for length, batch in ((2**17, 2), (2**20, 4), (2**30, 1), (2**30, 60_000), (100, 60_000)):
        steps = 0
        p = taken_by(
            algorithm, fl.Problem(batch=batch, heads=16, len_q=length, head_dim=128, dtype="float16", causal=True)
        )
        fl.timeline(algorithm, p, device="h200")
        taken.append(steps)
    p = taken_by(algorithm, cell()).replace(batch=2**62, heads=64)
    assert fl.timeline(algorithm, p, device="h200").seconds > 1e9  # more blocks than 63 bits count
    assert max(taken) < 400_000 and max(taken[1:]) < 4 * taken[0], taken


# what is printed and written


def test_the_trace_is_what_perfetto_reads(tmp_path: Path):
    t = fl.timeline("flash3", cell(1024), device="h200")
    trace = json.loads(t.to_chrome_trace(tmp_path / "trace.json").read_text(encoding="utf-8"))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X"}
    assert len(spans) == 2 * len(t.events)
    assert {(e["pid"], e["tid"]) for e in spans} <= set(named)
    assert set(UNITS) == {name for (pid, _), name in named.items() if pid == 1}
    assert any(name.startswith("consumer 1, tensor") for name in named.values())
    tracks: dict[tuple[int, int], float] = defaultdict(float)
    for e in sorted(spans, key=lambda e: e["ts"]):  # spans of a track that overlap would be drawn as nested
        assert e["dur"] > 0 and e["ts"] >= tracks[e["pid"], e["tid"]] - 1e-6
        tracks[e["pid"], e["tid"]] = e["ts"] + e["dur"]
    longest = max(e["ts"] + e["dur"] for e in spans)
    assert longest == pytest.approx(max(e.end for e in t.events) / t.clock * 1e6)


def test_what_binds_is_said():
    assert "tensor cores" in fl.timeline("flash3", cell(16384), device="h200").bound
    assert "exponential" in fl.timeline("flash3", cell(16384, 64), device="h200").bound
    assert "DRAM" in fl.timeline("standard", cell(4096), device="h200").bound
    assert "too few blocks" in fl.timeline("flash1", cell(4096), device="h200").bound
    assert "waiting" in fl.timeline("flash2", cell(4096), device="h200").bound


def test_operands_of_a_byte_take_less_time_and_no_unit_more_than_all():
    for head_dim in (128, 256):
        full, half = (
            fl.timeline(name, cell(4096, head_dim).replace(dtype=dtype), device="h200")
            for name, dtype in (("flash3", "bfloat16"), ("flash3_fp8", "float8_e4m3fn"))
        )
        assert breaks(half) is None and [x.name for x in half.launches] == ["flash3_fp8_transpose", "flash3_fp8"]
        assert full.seconds / 2 < half.seconds < full.seconds
        assert max(half.utilisation.values()) <= 1
    with pytest.raises(fl.UsageError, match="dtype"):
        fl.timeline("flash3_fp8", cell().replace(dtype="float32"))


def test_bad_input_is_one_line():
    with pytest.raises(fl.UsageError, match="algorithm"):
        fl.timeline("flash9", cell())

    @fl.program
    def mine(m, q, k, v, problem, tile):
        return m.output("out")

    with pytest.raises(fl.UsageError, match="algorithm"):
        fl.timeline(mine, cell())
    with pytest.raises(fl.SramOverflow):
        fl.timeline("flash2", cell(), tile=(4096, 4096))


def test_an_empty_problem_still_has_to_start():
    for name in ALGORITHMS:
        t = fl.timeline(name, taken_by(name, cell()).replace(len_q=0, len_kv=0))
        assert t.seconds >= rates.LAUNCH and max(t.utilisation.values()) <= 1
        assert prediction.UNIT_NAMES.keys() == t.utilisation.keys()


def test_a_barrier_that_never_opens_is_a_deadlock() -> None:
    sm = SM()
    full = sm.barrier(count=2)

    def consumer() -> Iterator[Any]:
        full.arrive()
        yield full.opening(0)

    sm.start("consumer", consumer())
    with pytest.raises(RuntimeError, match="deadlock: consumer wait for a barrier"):
        sm.run()


@pytest.mark.parametrize(
    ("algorithm", "changed", "where"),
    [
        ("flash3", {}, {"device": "a100"}),
        ("flash3", {}, {"device": "5090"}),
        ("flash3", {"dtype": "float32"}, {}),
        ("flash3", {}, {"tile": (100, 100)}),
        ("flash2", {"head_dim": 512}, {}),
    ],
)
def test_no_time_for_a_kernel_that_cannot_be(algorithm: str, changed: dict[str, Any], where: dict[str, Any]) -> None:
    p = fl.Problem(batch=1, heads=2, len_q=1024, head_dim=64, dtype="float16").replace(**changed)
    with pytest.raises((fl.UsageError, fl.Unavailable)):
        fl.timeline(algorithm, p, **where)


def test_a_program_without_a_schedule_is_told() -> None:
    """One's own, and ours: what it moves says nothing of when."""
    p = cell(128)
    for program in (fl.program(lambda m, q, k, v, problem, tile: m.output("out")), "paged"):
        with pytest.raises(fl.UsageError, match="^algorithm = .*: expected one with a schedule, .*: standard, "):
            fl.timeline(program, p)
