"""Latent attention over sequences one behind the other: each has the bits that it has alone, whatever lies beside it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

import flashlab as fl

KEYS = st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65, 257])


def attended(algorithm: str, arrays: dict[str, Any], **masks: Any) -> tuple[Any, Any]:
    done = fl.emulate(algorithm, **arrays, lse=True, **masks)
    assert not done.findings
    return np.asarray(done.out), np.asarray(done.lse)


@pytest.mark.alike("mla")
@pytest.mark.compiler
@pytest.mark.parametrize("algorithm", ["mla", "mla_hopper"])
@settings(max_examples=3, deadline=None)
@given(
    heads=st.integers(1, 3),
    len_q=st.integers(1, 2),
    keys=st.lists(KEYS, min_size=1, max_size=4),
    loud=st.integers(0, 3),
    causal=st.booleans(),
)
@example(heads=2, len_q=1, keys=[50, 60], loud=1, causal=False)  # behind the first sequence's keys, in the same tile
def test_sequences_have_the_bits_that_they_have_alone(
    algorithm: str, heads: int, len_q: int, keys: list[int], loud: int, causal: bool
) -> None:
    """NaN in the rows of a neighbour changes no bit of a sequence."""
    masks: dict[str, Any] = {"causal": causal, "chunk": 256}
    p = fl.latent_problem(heads=heads, lengths=[(len_q, n) for n in keys], dtype="float16", **masks)
    arrays = fl.CATALOGUE[algorithm].operation.draw(p, 3)
    out, lse = attended(algorithm, arrays, lengths=p.lengths, **masks)
    loud %= len(keys)
    littered = {name: x.copy() for name, x in arrays.items()}
    for s, (rows, own) in enumerate(p.spans):
        queries, latents = slice(rows.start, rows.stop), slice(own.start, own.stop)
        if s == loud:
            littered["q"][:, :, queries] = littered["latent"][:, :, latents] = np.nan
        one = {"q": arrays["q"][:, :, queries], "latent": arrays["latent"][:, :, latents]}
        for found, whole in zip(attended(algorithm, one, **masks), (out, lse), strict=True):
            assert found.tobytes() == whole[:, :, queries].tobytes()
    others = np.repeat([s != loud for s in range(len(keys))], len_q)
    with np.errstate(invalid="ignore"):
        found = attended(algorithm, littered, lengths=p.lengths, **masks)
    for with_nan, whole in zip(found, (out, lse), strict=True):
        assert with_nan[:, :, others].tobytes() == whole[:, :, others].tobytes()
