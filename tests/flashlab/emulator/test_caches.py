"""Quantised K and V on the emulator: each byte is the formula's, the rule holds, and pages change no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.emulated import emulate_problem
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED
from simulator.problem import CACHES, SCALES
from tests.simulator.test_caches import within

pytestmark = pytest.mark.compiler
CASES = [
    ("float16", "int8", "token", "token"),
    *(
        pytest.param(dtype, kv_dtype, of_k, of_v, marks=pytest.mark.long)
        for dtype in ("float16", "bfloat16")
        for kv_dtype in CACHES
        for of_k, of_v in [(None, None), *((form, form) for form in SCALES[:-1]), ("channel", "token")]
        if (dtype, kv_dtype, of_k) != ("float16", "int8", "token")
    ),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "of_k", "of_v"), CASES)
def test_right_and_counted_and_the_bits_of_gathered_keys(dtype: Any, kv_dtype: str, of_k: str, of_v: str) -> None:
    fields: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 40, "dtype": dtype}
    fields |= {"kv_dtype": kv_dtype, "k_scale": of_k, "v_scale": of_v, "causal": True}
    p = fl.Problem(batch=2, lengths=[(2, 150), (2, 33)], page_size=7, **fields)
    paged: Any = PAGED.draw(p, 1)
    run = emulate_problem(fl.CATALOGUE["paged"], p, paged, lse=True, tile=(16, 32))
    assert run.complaints() == []
    gathered: Any = PAGED.gathered(p, paged)
    for b, (plain, own) in enumerate(gathered):
        alone = emulate_problem(fl.CATALOGUE["flash_decoding"], plain, own, lse=True, tile=(16, 32))
        truth = ATTENTION.judge(plain, own)
        assert alone.complaints() == []
        assert within(dict(alone.outputs), truth, ATTENTION.bounds(plain, own, truth))
        assert alone.out.tobytes() == run.out[b : b + 1].tobytes()


def test_the_call() -> None:
    """The default algorithm gives way to the one that takes the cache."""
    p = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=2, len_kv=70, head_dim=40, dtype="float16")
    q, k, v = fl.random_inputs(p)
    cache = fl.quantize_cache(k, v)
    out, lse = fl.attention(q, **cache._asdict(), lse=True, backend="emulator", tile=(16, 32))
    assert np.abs(out - fl.naive(q, k, v).out).max() < 0.03
    truth = fl.naive(q, **cache._asdict())
    assert np.abs(lse - truth.lse).max() < 2e-5
    with pytest.raises(fl.UsageError, match="kv_dtype = 'int8': expected nothing: flash1 knows"):
        fl.attention(q, **cache._asdict(), algorithm="flash1", backend="emulator")


@pytest.mark.long
def test_verified() -> None:
    report = fl.verify("flash_decoding", backend="emulator", dtypes=["float16"], checks=["caches"], tile=(16, 32))
    assert report.passed and all(row.status == "passed" for row in report.rows)
