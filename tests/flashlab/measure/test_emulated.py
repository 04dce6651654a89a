"""Every kernel of the catalogue, executed on the CPU: numbers by the rule, bytes by step and tensor, no misuse."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.measure import emulated
from flashlab.measure.agreement import distance
from flashlab.measure.problems import matrix
from flashlab.measure.workload import Case
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.memory import frame_named, place
from flashlab.verify.rule import expect, judge
from simulator.counts import Entry
from simulator.operations.attention import ATTENTION
from tests.simulator.problems import scores, taken_by
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

ALGORITHMS = fl.catalogue.with_kernels(ATTENTION, language="cuda")
HOPPER = [name for name in ALGORITHMS if fl.CATALOGUE[name].arch]
ELSEWHERE = [name for name in ALGORITHMS if fl.CATALOGUE[name].support.least <= (7, 5) and name not in HOPPER]
IN_THEIR_DTYPES = [(name, dtype) for name in ALGORITHMS for dtype in fl.CATALOGUE[name].dtypes]
SMALL = (32, 16)
"""A tile that leaves several each way at lengths that take no time."""


def small(algorithm: str) -> tuple[int, int]:
    """The same for an algorithm whose warpgroups have 64 rows each, whose 8-bit products want 64 keys, or whose only warp has 16
    rows."""
    if fl.CATALOGUE[algorithm].support.queries == 1:
        return 16, 16
    return (64, 64) if algorithm == "flash3_fp8" else (64, 16) if algorithm in HOPPER else SMALL


def native(algorithm: str, dtype: str) -> str:
    """A dtype that the algorithm takes: the one asked for, or its only one."""
    taken = fl.CATALOGUE[algorithm].dtypes
    return dtype if dtype in taken else taken[0]


@st.composite
def problems(draw: st.DrawFn, dtype: str) -> fl.Problem:
    """Few keys and queries, but with this tile more than three tiles each way; every mask, GQA, odd head dims, no rows."""
    kv_heads = draw(st.sampled_from([1, 2]))
    left = draw(st.one_of(st.none(), st.integers(0, 60)))
    right = draw(st.one_of(st.none(), st.integers(0, 60)))
    return fl.Problem(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        len_q=draw(st.one_of(st.integers(0, 140), st.sampled_from([1, 96, 97, 128]))),
        len_kv=draw(st.one_of(st.integers(0, 140), st.sampled_from([1, 48, 64, 97]))),
        head_dim=draw(st.sampled_from([16, 40, 33])),
        dtype=dtype,
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, (left, right)])),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        **draw(scores),
    )


def fitted(algorithm: str, **sizes: Any) -> fl.Problem:
    """A problem with no more queries than an algorithm takes."""
    return fl.CATALOGUE[algorithm].fitted(fl.Problem(**sizes))


def emulate(algorithm: str, p: fl.Problem, arrays: Any, **options: Any) -> fl.Emulation:
    return fl.emulate(algorithm, *arrays, **p.masks, lse=True, **options)


@pytest.mark.alike("flash2", "flash3", "flash_decoding")
@pytest.mark.parametrize("pair", one_of_each(IN_THEIR_DTYPES, lambda pair: pair[0], "-".join))
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_right_and_counted(pair: tuple[str, str], data: st.DataObject) -> None:
    check_right_and_counted(*pair, data)


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "dtype"), IN_THEIR_DTYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_right_and_counted_far_and_wide(algorithm: str, dtype: str, data: st.DataObject) -> None:
    check_right_and_counted(algorithm, dtype, data)


def check_right_and_counted(algorithm: str, dtype: str, data: st.DataObject) -> None:
    p = taken_by(algorithm, data.draw(problems(dtype)))
    inputs = data.draw(st.sampled_from(["normal", "large", "rising"]))
    layout = data.draw(st.sampled_from(list(LAYOUTS)))
    plain: Any = ATTENTION.draw(p, 1, inputs)
    placed = {name: place(frame_named("numpy"), x, layout, float("nan")) for name, x in plain.items()}
    views: Any = {name: x.view for name, x in placed.items()}
    tile = data.draw(st.sampled_from([small(algorithm), None]))
    run = fl.emulate(algorithm, **views, **p.masks, lse=True, tile=tile)
    assert run.complaints() == []
    assert run.passed
    assert [x.harm() for x in placed.values() if x.harm()] == []
    judgement = judge(expect(p, **plain), run.out, run.lse)
    assert judgement.passed, judgement.message


@pytest.mark.alike("flash1", "flash2")
@pytest.mark.parametrize("algorithm", ELSEWHERE)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "float16"])
def test_without_cp_async(algorithm: str, dtype: str) -> None:
    """A T4's kernels copy by registers."""
    p = fl.Problem(batch=1, heads=2, len_q=97, len_kv=130, head_dim=40, dtype=dtype, causal=True)
    arrays = fl.random_inputs(p)
    run = emulate(algorithm, p, arrays, device="t4")
    assert run.complaints() == []
    assert judge(expect(p, *arrays), run.out, run.lse).passed
    assert all(row.op != "ldgsts" for launch in run.launches for row in launch.moved)


@pytest.mark.alike("standard", "flash1", "flash3_1", "flash3_fp8")
@pytest.mark.parametrize("pair", one_of_each(IN_THEIR_DTYPES, lambda pair: pair[0], "-".join))
def test_nothing_bypasses_the_primitives(pair: tuple[str, str]) -> None:
    algorithm, dtype = pair
    p = fitted(algorithm, batch=1, heads=2, len_q=50, len_kv=70, head_dim=40, dtype=dtype, causal=True)
    run = emulate(algorithm, p, fl.random_inputs(p), tile=small(algorithm), watch=True)
    assert [launch.plain for launch in run.launches] == [0] * len(run.launches)
    assert run.passed


@pytest.mark.alike("online_softmax", "flash3", "flash_decoding")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_on_one_core_and_on_many(algorithm: str) -> None:
    p = fitted(algorithm, batch=2, heads=3, len_q=70, head_dim=16, dtype=native(algorithm, "bfloat16"))
    arrays = fl.random_inputs(p)
    one, many = (emulate(algorithm, p, arrays, tile=small(algorithm), workers=n) for n in (1, 5))
    assert one.out.tobytes() == many.out.tobytes()
    assert [x.ledger for x in one.launches] == [x.ledger for x in many.launches]


@pytest.mark.alike("online_softmax", "flash3", "flash_decoding")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_sanitizers_the_same(algorithm: str) -> None:
    p = fitted(algorithm, batch=1, heads=2, len_q=70, len_kv=50, head_dim=16, dtype=native(algorithm, "bfloat16"))
    arrays = fl.random_inputs(p)
    looked, blind = (emulate(algorithm, p, arrays, tile=small(algorithm), sanitize=s) for s in (True, False))
    assert looked.out.tobytes() == blind.out.tobytes()
    assert looked.launches == blind.launches


@pytest.mark.alike("flash1", "flash2", "flash3_2", "flash3_3", "flash3_fp8")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_of_the_counter_matrix(algorithm: str) -> None:
    """Its ragged problems with the smallest heads, in one dtype."""
    ragged = [c for c in matrix([algorithm]) if "ragged" in c.name and c.problem.dtype == native(algorithm, "float16")]
    least = min(c.problem.head_dim for c in ragged)
    check_matrix([c for c in ragged if c.problem.head_dim == least and c.problem.batch == 1])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_counter_matrix(algorithm: str) -> None:
    check_matrix(matrix([algorithm]))


def check_matrix(cases: list[Case]) -> None:
    report = emulated.run(cases, device="h200")
    assert report.errors == ()
    assert report.passed
    assert report.summary["equal"] == report.summary["compared"] > 0


@pytest.mark.long
def test_the_registers_option() -> None:
    """Tiles of which flash2 keeps Q in registers read it from SRAM once; two stages and one move the same bytes."""
    p = fl.Problem(batch=1, heads=1, len_q=130, len_kv=200, head_dim=64, dtype="float16", causal=True)
    arrays = fl.random_inputs(p)
    seen: set[tuple[int, bool]] = set()
    for device in ("h100", "t4", "l4", "a100"):
        for tile in ((64, 64), (64, 32), (128, 64), (128, 128), None):
            run = emulate("flash2", p, arrays, device=device, tile=tile)
            assert run.complaints() == []
            assert run.counts.config is not None
            seen.add((run.counts.config.stages, run.counts.config.q_in_registers))
    assert {stages for stages, _ in seen} == {1, 2}


def test_a_difference_is_told() -> None:
    """Bytes that aren't the formula's come out with step, tensor and both counts."""
    p = fl.Problem(batch=1, heads=1, len_q=32, head_dim=16, dtype="float16")
    run = emulate("flash2", p, fl.random_inputs(p), tile=SMALL)
    launch = run.counts.launches[0]
    ledger = {**launch.ledger, Entry("load_k", "k", "hbm.read"): launch.ledger[Entry("load_k", "k", "hbm.read")] - 32}
    wrong = replace(run, counts=replace(run.counts, launches=(replace(launch, ledger=ledger, flops_matmul=0),)))
    assert wrong.differences == [
        "flash2, step load_k, hbm.read of k: 1,024 bytes, the formula 992",
        f"flash2: {launch.flops_matmul:,} matmul FLOPs, the formula 0",
    ]
    assert not wrong.passed


def test_distance_of_outputs_is_measured_by_the_rule() -> None:
    case = matrix(["flash2"])[0]
    p = case.problem
    inputs = ATTENTION.draw(p)
    truth = expect(p, **inputs)
    out = truth.out.astype(p.dtype)
    moved = out.copy()
    moved[0, 0, 7, 0] += np.float32(truth.out_tolerance[0, 0, 7])
    assert distance(case, inputs, {"out": out}, {"out": out}) == 0
    assert distance(case, inputs, {"out": out}, {"out": moved}) == pytest.approx(1, rel=1e-3)
    moved[0, 0, 7, 0] = np.nan
    assert np.isnan(distance(case, inputs, {"out": out}, {"out": moved}))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_verified(algorithm: str) -> None:
    """The verifier's own probes and edges on the emulator; the whole of it: `flashlab verify ... --backend emulator`."""
    checks = ["key_sets", "hidden_keys", "split", "gqa", "prefix", "batch", "misaligned"]
    report = fl.verify(algorithm, backend="emulator", dtypes=[native(algorithm, "float16")], checks=checks)
    assert report.verdict == "passed", report.failing
