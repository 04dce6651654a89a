"""Calls of torch's operators that nobody meant: of the door to ours, and of ours that stand behind torch's own attention."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import flashlab as fl
from tests.properties import fuzz

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
LONG = int(os.environ.get("FLASHLAB_FUZZ", "100000")) // 10
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
DOORS = {"attention": "torch", "_sdpa": "sdpa", "_sdpa_backward": "sdpa", "_flash": "sdpa", "_flash_backward": "sdpa"}
"""By function: the integration that it is in."""


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    with fuzz.apart():
        yield


def tensors(random: Random, *shapes: tuple[int, ...]) -> list[Any]:
    """Tensors of these shapes and one dtype, or nearly so."""
    dtype = random.choice([torch.float16, torch.bfloat16, torch.float32])
    return [
        nearly(random, torch.randn(shape).to(dtype)) if random.random() < 0.15 else torch.randn(shape).to(dtype)
        for shape in shapes
    ]


def nearly(random: Random, x: Any) -> Any:
    ways: list[Any] = [
        x.requires_grad_, lambda: x.transpose(-1, -2), lambda: x[..., :0], lambda: x.flatten(), lambda: x.sum(), x.double, x.float,
        lambda: x.to(torch.int8), lambda: x.expand(2, *x.shape), lambda: x.to("meta"), x.to_sparse, lambda: x[..., ::2],
        lambda: torch.nested.nested_tensor([x]), lambda: x.flip(-1), lambda: torch.full_like(x, torch.nan),
        lambda: x.to(torch.complex64), lambda: x.new_zeros(3),
    ]  # fmt: skip
    with warnings.catch_warnings():  # of torch: nested tensors are a prototype
        warnings.simplefilter("ignore")
        return random.choice(ways)()


MASKS: dict[str, list[Any]] = {
    "causal": [True, 1], "window": [(3, 0), (None, 2), (-1, 0), 3], "scale": [0.5, float("nan")], "soft_cap": [2.0, -1.0],
    "dropout": [0.5, 2.0], "seed": [1, "x"], "lengths": [[9], [(4, 5), (5, 7)], [], 0, "x"], "deterministic": [True, "x"],
    "algorithm": ["flash2", "flash9", 3], "tile": [(64, 64), [64, 64], (3, 5), "64x64"], "backend": ["emulator", "gpu", "x"],
    "device": ["a100", "x"], "lse": [True, 1], "exact_lse": [True], "causl": [True], "q": [None, 3], "v": [[1.0]],
    "sinks": [torch.zeros(2), torch.zeros(3), 5], "mask": [torch.ones(9, 12, dtype=torch.bool), torch.zeros(3), 5],
}  # fmt: skip


def a_call(random: Random) -> Call:
    """A call of one of the doors, its arrays and options each fine or nearly so."""
    name = random.choice(["attention", "attention", *DOORS])
    batch = random.choice([1, 1, 1, 0])
    rows, keys = (batch, 2, 9, 16), (batch, 2, random.choice([9, 12]), 16)
    *given, out, dout = tensors(random, rows, keys, (*keys[:3], random.choice([16, 16, 16, 8, 24])), rows, rows)
    lse = random.choice(
        [torch.zeros(batch, 2, 9), torch.zeros(batch, 2, 9), torch.zeros(2, 9), torch.zeros(1, 2, 9).half()]
    )
    ends = torch.tensor(random.choice([[0, 4, 9], [0, 4, 9], [0, 9], [0, -4, 9], [0, 40], []]), dtype=torch.int32)
    if name == "attention":
        options = {each: random.choice(MASKS[each]) for each in random.sample(list(MASKS), random.choice([0, 0, 1, 2]))}
        if random.random() < 0.3:
            options |= {"cu_seqlens_q": ends, "cu_seqlens_k": random.choice([ends, torch.tensor([0, 4, 12]), None])}
        if random.random() < 0.2:
            options["seqused_k"] = random.choice([torch.tensor([3, 2]), torch.tensor([-1]), [3, 2]])
        return name, (), dict(zip("qkv", given, strict=True)) | options
    # what follows has passed a schema of torch's: tensors are tensors, and numbers numbers
    dropout, causal, debug = random.choice([0.0, 0.0, 0.5, 2.0]), random.random() < 0.3, random.random() < 0.1
    scale: dict[str, Any] = {"scale": random.choice([None, 0.5, float("inf")])}
    state = random.choice([torch.zeros(2, dtype=torch.uint64), torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
    if name == "_sdpa":
        return name, (*given, dropout, causal, debug), scale
    if name == "_sdpa_backward":
        return name, (dout, *given, out, lse, None, None, 9, keys[2], dropout, causal, state, state), scale
    ragged = random.random() < 0.5
    *given, out, dout = (x.transpose(1, 2) if x.dim() == 4 and not x.is_nested else x for x in (*given, out, dout))
    if ragged and batch:
        *given, out, dout, lse = (x[0] if x.dim() > 2 and not x.is_nested else x for x in (*given, out, dout, lse))
    offsets = (ends, ends) if ragged else (None, None)
    if name == "_flash_backward":
        return name, (dout, *given, out, lse, *offsets, 9, keys[2], dropout, causal, state, state), scale
    more = {
        "seqused_k": torch.tensor([3, 2]),
        "block_table": torch.zeros(1, 1),
        "window_size_left": 3,
        "alibi_slopes": torch.zeros(2),
    }
    more = {each: more[each] for each in random.sample(list(more), random.choice([0, 0, 1]))}
    return name, (*given, *offsets, 9, keys[2], dropout, causal, debug), scale | more


def outcome(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What became of a call: "returned", "refused" or "unavailable". Anything else is raised."""
    module = importlib.import_module(f"flashlab.integrations.{DOORS[name]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            getattr(module, name)(*given, **options)
        except (fl.UsageError, fl.Unavailable) as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < 2000, f"no line: {said!r}"
            return "unavailable" if isinstance(error, fl.Unavailable) else "refused"
        return "returned"


def fuzzed(seed: object, calls: int) -> set[tuple[str, str]]:
    """What became of so many calls, by door."""
    found: set[tuple[str, str]] = set()
    for n in range(calls):
        name, given, options = a_call(Random(f"{seed} {n}"))
        try:
            found.add((name, outcome(name, given, options)))
        except Exception as error:
            shown = {key: getattr(x, "shape", x) for key, x in options.items() if not getattr(x, "is_nested", False)}
            error.add_note(f"{n}: {name}(*{[str(x)[:80] for x in given]}, {shown})"[:2000])
            raise
    return found


def test_some_calls() -> None:
    """Each door refuses some, and would run others."""
    assert fuzzed(0, 500) >= {(name, what) for name in DOORS for what in ("refused", "unavailable")}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_calls() -> None:
    assert fuzzed("long", LONG) >= {("attention", "refused"), ("attention", "unavailable")}


def test_a_raw_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("flashlab.integrations.torch")
    monkeypatch.setattr(module, "attention", lambda q, **_: q.shape[7])
    with pytest.raises((IndexError, AttributeError)):
        fuzzed(0, 50)
