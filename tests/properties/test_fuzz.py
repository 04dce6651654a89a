"""A thousand calls that nobody meant, each time; a hundred thousand in `make test-long`. `fuzz.py` says what they are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.requests import Request
from simulator.operations.attention import ATTENTION
from tests.properties import fuzz, fuzz_serve, oracle
from tests.tiers import examples

EACH = 250
LONG = int(os.environ.get("FLASHLAB_FUZZ", "100000"))
"""How many calls the long test makes. FLASHLAB_FUZZ_SEED makes other ones."""


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    with fuzz.apart():
        yield


@pytest.mark.alike("0")
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_calls(part: int) -> None:
    for n in range(part * EACH, (part + 1) * EACH):
        fuzz.one(Random(f"0 {n}"))


@examples(100)
@given(
    name=st.sampled_from(sorted(fuzz.PARSERS)), content=st.binary(max_size=300) | st.text(max_size=100).map(str.encode)
)
def test_any_bytes(name: str, content: bytes) -> None:
    assert fuzz.parsed(name, content) in ("read", "refused")


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_calls() -> None:
    seed = os.environ.get("FLASHLAB_FUZZ_SEED", "long")
    for n in range(LONG):
        fuzz.one(Random(f"{seed} {n}"))


@pytest.mark.parametrize("operation", oracle.OPERATIONS)
def test_random_problems_beside_loops(operation: str) -> None:
    held = sum(oracle.held(oracle.problem(operation, Random(f"0 {n}"))) for n in range(25))
    assert held >= 20


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("operation", oracle.OPERATIONS)
def test_many_random_problems_beside_loops(operation: str) -> None:
    seed = os.environ.get("FLASHLAB_FUZZ_SEED", "long")
    held = sum(oracle.held(oracle.problem(operation, Random(f"{seed} {n}"))) for n in range(LONG // 50))
    assert held >= LONG // 60


@pytest.mark.parametrize(
    ("operation", "output"), [("backward", "dk"), ("paged", "out"), ("mla", "out"), ("cascade", "out")]
)
def test_a_wrong_output_is_found_beside_loops(monkeypatch: pytest.MonkeyPatch, operation: str, output: str) -> None:
    right = fl.simulate

    def wrong(*given: Any, **named: Any) -> Any:
        run = right(*given, **named)
        if output in run.outputs:
            run.outputs[output][..., -1, 0] += 0.1
        return run

    monkeypatch.setattr(fl, "simulate", wrong)
    with pytest.raises(AssertionError):
        for n in range(10):
            oracle.held(oracle.problem(operation, Random(n)))


def test_a_plan_s_raw_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        def run(self, **arrays: Any) -> Any:
            return {name: x.shape for name, x in arrays.items()}

    monkeypatch.setattr(fl, "plan", lambda *_, **__: Careless())
    with pytest.raises(AttributeError):
        for n in range(100):
            fuzz.planned(fuzz.a_plan(Random(n)))


def test_a_wrong_block_manager_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(manager: KVCacheManager, request: Request) -> None:
        manager.owned.pop(request, None)

    monkeypatch.setattr(KVCacheManager, "free", kept)
    with pytest.raises(AssertionError):
        for n in range(20):
            fuzz_serve.managed(fuzz_serve.a_manager(Random(n)))


def test_a_day_that_keeps_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCacheManager._release  # pyright: ignore[reportPrivateUsage]

    def keeps_one(manager: KVCacheManager, request: Request) -> None:
        manager.owned[request].table = manager.owned[request].table[1:]
        right(manager, request)

    monkeypatch.setattr(KVCacheManager, "_release", keeps_one)
    with pytest.raises(AssertionError):
        for n in range(20):
            fuzz_serve.served(fuzz_serve.a_day(Random(n)))


def test_a_call_of_a_run_follows_from_its_number() -> None:
    def became(n: int) -> fuzz.Became:
        return fuzz.made("a run", n)._replace(seconds=0.0)

    assert [became(n) for n in range(20)] == [became(n) for n in reversed(range(20))][::-1]


def test_a_process_that_ends_early_has_failed_at_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "part", dies_at_three)
    found = {each.number: each.what for each in fuzz.run("x", range(6), processes=2)}
    assert found == {0: "x", 1: "x", 2: "x", 3: "the process ended with 7", 4: "x", 5: "x"}


def dies_at_three(seed: str, numbers: range, to: Connection) -> None:
    for n in numbers:
        if n == 3:
            os._exit(7)
        to.send(fuzz.Became(n, "call", seed, 0.0))
    to.close()


def test_a_call_that_does_not_end_is_found() -> None:
    with pytest.raises(fuzz.TooLong), fuzz.limited(0.05):
        while True:
            pass


def test_every_public_call_is_drawn() -> None:
    """A new public function or class needs a call that is fine, or a reason."""
    # what calls return, or tile programs are given
    kept = {"Run", "Counts", "Emulation", "FileRun", "ProgramRun", "Report", "Sweep", "Comparison", "Timeline", "Trace", "Player",
            "FileKernel", "Reference", "Algorithm", "Config", "Book", "Spec", "Block", "Machine", "HbmTensor", "SramTile",
            "Registers", "Program", "Scales", "Tile", "QuantizedCache"}  # fmt: skip
    errors = {
        name for name in fl.__all__ if isinstance(getattr(fl, name), type) and issubclass(getattr(fl, name), Exception)
    }
    calls = {name for name in fl.__all__ if callable(getattr(fl, name))}
    kept |= {
        "parallel.Link",
        "parallel.ParallelCounts",
        "parallel.ParallelRun",
        "parallel.ParallelTimeline",
        "parallel.Rank",
    }
    kept |= {"parallel.Scheme", "parallel.Rates"}
    # what several processes call, with torch: tests/flashlab/parallel/test_distributed.py
    torchs = {"Interrupted", "all_gather_attention", "attention", "counted", "decode_attention", "ring_attention", "shard",
              "ulysses_attention", "unshard"}  # fmt: skip
    own = set(fl.parallel.__all__) - torchs
    calls |= {f"parallel.{name}" for name in own if callable(getattr(fl.parallel, name))}
    calls |= {f"testing.{name}" for name in fl.testing.__all__ if name not in ("ZOO", "Audit", "Audited")}
    assert calls - kept - errors - set(fuzz.NOT_CALLED) == set(fuzz.FIRST)


YES_OR_NO = [
    (name, p.name)
    for name in fuzz.FIRST
    for p in inspect.signature(fuzz.public(name)).parameters.values()
    if isinstance(p.default, bool) and (name, p.name) != ("simulate", "trace")  # a head, too
]


@pytest.mark.parametrize(("name", "argument"), YES_OR_NO)
@pytest.mark.parametrize("value", [np.zeros((3, 2)), "no", 0])
def test_a_yes_or_no_is_nothing_else(name: str, argument: str, value: Any) -> None:
    assert fuzz.outcome(fuzz.Call(name, {**fuzz.FIRST[name](Random(1)), argument: value})) == "refused"


def test_every_command_is_drawn() -> None:
    drawn = {fuzz.a_command(Random(n)).words[0] for n in range(400)}
    assert drawn == set(fuzz.commands())


def wrong_sign(*arrays: Any, **named: Any) -> Any:
    return fl.Run({"out": -fl.naive(**{name: x for name, x in named.items() if name != "algorithm"}).out}, None, None)  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "bug", "caught"),
    [
        ("simulate", lambda *_, **__: 1 / 0, ZeroDivisionError),
        ("simulate", wrong_sign, AssertionError),
        ("count", lambda **_: [][1], IndexError),
    ],
)
def test_what_is_seeded_is_found(monkeypatch: pytest.MonkeyPatch, name: str, bug: Any, caught: type[Exception]) -> None:
    monkeypatch.setattr(fl, name, bug)
    if bug is wrong_sign:
        monkeypatch.setattr(fl, name, lambda algorithm, **named: wrong_sign(**named))
    with pytest.raises(caught):
        for n in range(300):
            call = fuzz.Call(name, fuzz.FIRST[name](Random(n)))
            fuzz.outcome(call)


def test_an_error_of_two_lines_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_lines(**_: Any) -> None:
        raise fl.UsageError("x", 1, "a\nb")

    monkeypatch.setattr(fl, "count", two_lines)
    with pytest.raises(AssertionError, match="no line"):
        fuzz.outcome(fuzz.Call("count", {}))


def test_a_file_that_breaks_its_parser_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    file, content, _ = fuzz.PARSERS["load_inputs, .npz"]

    def careless(path: Any) -> Any:
        with open(path, "rb") as opened:
            return np.load(opened, allow_pickle=False)["q"]

    monkeypatch.setitem(fuzz.PARSERS, "load_inputs, .npz", (file, content, careless))
    with pytest.raises(Exception, match=".") as caught:
        for n in range(200):
            fuzz.parsed("load_inputs, .npz", fuzz.damaged(Random(n), content()))
    assert not isinstance(caught.value, fl.UsageError)


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (2, 1)}, {"scale": 0.3}, {"soft_cap": 1.5}])
def test_the_oracle_is_right(masks: Any) -> None:
    p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=5, len_kv=7, head_dim=8, dtype="float32", **masks)
    arrays = ATTENTION.draw(p)
    exact = oracle.oracle(*(arrays[name].astype(float) for name in "qkv"), p.masks)
    np.testing.assert_allclose(exact, fl.naive(**arrays, **p.masks).out, atol=1e-12)
