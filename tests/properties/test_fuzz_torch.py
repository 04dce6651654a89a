"""Calls of torch's doors that nobody meant: `fuzz.py` with tensors, and flash-attention's functions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from tests.properties import fuzz

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
LONG = int(os.environ.get("FLASHLAB_FUZZ", "100000")) // 10


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    with fuzz.apart():
        yield


def tensor(random: Random, *shape: int) -> Any:
    """A tensor of this shape, or one that is nearly so."""
    x = torch.randn(shape).to(random.choice([torch.float16, torch.float16, torch.bfloat16, torch.float32]))
    ways: list[Any] = [
        *[lambda: x] * 4, lambda: x.requires_grad_(), lambda: x.transpose(-1, -2),
        lambda: x[..., :0], lambda: x[0], lambda: x.double(),
        lambda: x.to(torch.int8), lambda: x.expand(2, *x.shape), lambda: x.to("meta"), lambda: x.to_sparse(), lambda: x.conj(),

        lambda: torch.nested.nested_tensor([x]), lambda: x.detach().float().numpy(), lambda: x.flip(-1), lambda: None,
        lambda: torch.full_like(x, float("nan")), lambda: x.to(torch.complex64),
    ]  # fmt: skip
    with warnings.catch_warnings():  # of torch: nested tensors are a prototype
        warnings.simplefilter("ignore")
        return random.choice(ways)()


OPTIONS: dict[str, list[Any]] = {
    "dropout_p": [0.0, 0.5, 1.0, -1], "softmax_scale": [None, 0.5, float("inf")], "causal": [True, False, 1],
    "window_size": [(-1, -1), (3, 0), (1,), None], "softcap": [0.0, 3.0, -1.0], "deterministic": [True, "x"],
    "return_attn_probs": [True, 0], "attention_chunk": [0, 4, 100, -1, 2.0], "sm_margin": [0, 1], "qv": [None, 5],
}  # fmt: skip


def a_call(random: Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call of one of the doors, its arrays and options each fine or nearly so."""
    options = {name: random.choice(OPTIONS[name]) for name in random.sample(list(OPTIONS), random.choice([0, 0, 1, 2]))}
    if random.random() < 0.2:
        options["s_aux"] = random.choice([torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int8), 5])
    if random.random() < 0.5:
        return "flash_attn_func", tuple(tensor(random, 1, n, 2, 16) for n in (9, 12, 12)), options
    ends = random.choice([[0, 4, 9], [0, 9], [0, -4, 9], [1, 9], [0, 40], [], [0.0, 9.0], 9])
    offsets = torch.tensor(ends, dtype=random.choice([torch.int32, torch.int64, torch.float32]))
    options |= {
        name: random.choice([torch.tensor([3, 2]), [3, 2], -1, None])
        for name in ("seqused_q", "seqused_k")
        if random.random() < 0.3
    }
    options |= {"max_seqlen_q": random.choice([9, 5, -1])} if random.random() < 0.3 else {}
    return "flash_attn_varlen_func", (*(tensor(random, 9, 2, 16) for _ in "qkv"), offsets, offsets), options


def outcome(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What became of a call: "returned", "refused" or "unavailable". Anything else is raised."""
    from flashlab.integrations import flash_attn

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            getattr(flash_attn, name)(*given, **options)
        except (fl.UsageError, fl.Unavailable) as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < 2000, f"no line: {said!r}"
            return "unavailable" if isinstance(error, fl.Unavailable) else "refused"
        return "returned"


def fuzzed(seed: object, calls: int) -> set[str]:
    """What became of so many calls."""
    found: set[str] = set()
    for n in range(calls):
        name, given, options = a_call(Random(f"{seed} {n}"))
        try:
            found.add(outcome(name, given, options))
        except Exception as error:
            error.add_note(f"{n}: {name}(*{[getattr(x, 'shape', x) for x in given]}, {options})"[:1000])
            raise
    return found


def test_some_calls() -> None:
    assert fuzzed(0, 400) >= {"refused", "unavailable"}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_calls() -> None:
    assert fuzzed("long", LONG) >= {"refused", "unavailable"}


def test_a_raw_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlab.integrations import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda q, *_, **__: q.shape[7])
    with pytest.raises((IndexError, AttributeError)):
        fuzzed(0, 50)
