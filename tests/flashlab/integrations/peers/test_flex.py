"""FlexAttention is asked for the same attention as ours: what its functions say, not compiled, agrees with the judge."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from flashlab.integrations.peers import flex
from simulator import Problem, naive, random_inputs
from simulator.errors import Unavailable
from simulator.operations.draws import random_optional

SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "len_q": 150, "head_dim": 16, "dtype": "float32"}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, more keys than queries": {"causal": True, "len_kv": 333, "kv_heads": 2},
    "window": {"window": (20, 5), "len_kv": 200},
    "causal window": {"window": (20, None), "causal": True},
    "soft cap": {"soft_cap": 1.5, "causal": True},
    "ALiBi": {"alibi": True, "len_kv": 170},
    "mask": {"mask": "dense", "causal": True},
    "documents": {"batch": 1, "len_q": None, "lengths": [40, (30, 50), 80], "causal": True, "alibi": True},
    "scale": {"scale": 0.7},
}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("asked", ASKED)
def test_its_functions_say_the_problem(asked: str) -> None:
    torch: Any = import_module("torch")
    p = Problem(**{name: value for name, value in (SIZES | ASKED[asked]).items() if value is not None})
    arrays, optional = random_inputs(p), random_optional(p)
    tensors = {name: torch.from_numpy(x) for name, x in optional.items()}
    attention: Any = import_module("torch.nn.attention.flex_attention").flex_attention
    found = attention(*map(torch.from_numpy, arrays), **flex.arguments(p, tensors, "cpu")).numpy()
    truth = naive(*arrays, **p.masks, **optional).out
    assert np.abs(found - truth).max() < 1e-4 < np.abs(found[:, ::-1] - truth).max()


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"sinks": True}, "sinks"), ({"mask": "bits"}, "as booleans"), ({"dropout": 0.1, "causal": True}, "dropout")],
)
def test_what_they_cannot_say_is_one_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(Unavailable, match=f"^FlexAttention.*{said}[^\n]*$"):
        flex.prepare(Problem(**SIZES, **asked), {}, {})
