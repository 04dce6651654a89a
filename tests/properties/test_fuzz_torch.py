"""Calls of torch's doors that nobody meant: `fuzz.py` with tensors, flash-attention's functions, and what Transformers calls."""

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


def tensors(random: Random, *shapes: tuple[int, ...]) -> list[Any]:
    """Tensors of these shapes, of one dtype, or nearly so."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    one = random.choice(dtypes)
    return [tensor(random, one if random.random() < 0.95 else random.choice(dtypes), *shape) for shape in shapes]


def tensor(random: Random, dtype: Any, *shape: int) -> Any:
    """A tensor of this shape, or one that is nearly so."""
    x = torch.randn(shape).to(dtype)
    ways: list[Any] = [
        *[lambda: x] * 40, lambda: x.requires_grad_(), lambda: x.transpose(-1, -2),
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
    if random.random() < 0.3:
        return attended(random)
    if random.random() < 0.5:
        return "flash_attn_func", tuple(tensors(random, *((1, n, 2, 16) for n in (9, 12, 12)))), options
    ends = random.choice([[0, 4, 9], [0, 9], [0, -4, 9], [1, 9], [0, 40], [], [0.0, 9.0], 9])
    offsets = torch.tensor(ends, dtype=random.choice([torch.int32, torch.int64, torch.float32]))
    options |= {
        name: random.choice([torch.tensor([3, 2]), [3, 2], -1, None])
        for name in ("seqused_q", "seqused_k")
        if random.random() < 0.3
    }
    options |= {"max_seqlen_q": random.choice([9, 5, -1])} if random.random() < 0.3 else {}
    return "flash_attn_varlen_func", (*tensors(random, *[(9, 2, 16)] * 3), offsets, offsets), options


def attended(random: Random) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call as Transformers makes it, of queries that see as many keys, or more."""
    ones = torch.ones(1, 9, dtype=random.choice([torch.bool, torch.int64, torch.float32]))
    mask = random.choice(
        [None, None, ones, ones.clone().fill_(0), ones[:, :7], ones[0], ones[None], ones.repeat(1, 2), [1] * 9, 5]
    )
    values: dict[str, list[Any]] = {
        "dropout": [0.0, 0.5, -1], "scaling": [None, 0.5, float("inf")], "sliding_window": [None, 3, 100, 0, -1, 2.0, "x"],
        "softcap": [None, 3.0, -1.0], "is_causal": [None, True, False, 3], "s_aux": [None, torch.zeros(2), torch.zeros(3), 5],
        "position_ids": [torch.arange(9)[None], torch.arange(9)[None] % 4, torch.arange(9), torch.rand(1, 9), 5, None],
        "cu_seq_lens_q": [torch.tensor([0, 9]), [0, 9], None], "cu_seq_lens_k": [torch.tensor([0, 9], dtype=torch.int32), None],
        "position_bias": [None, 5], "use_cache": [True], "cache": [None, object()], "deterministic": [None, True, 1],
    }  # fmt: skip
    options = {name: random.choice(values[name]) for name in random.sample(list(values), random.choice([0, 0, 1, 2]))}
    keys = random.choice([9, 9, 12])
    return "attend", (None, *tensors(random, *((1, 2, n, 16) for n in (9, keys, keys))), mask), options


def outcome(name: str, given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What became of a call: "returned", "refused" or "unavailable". Anything else is raised."""
    from flashlab.integrations import flash_attn, transformers

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            getattr(transformers if name == "attend" else flash_attn, name)(*given, **options)
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
