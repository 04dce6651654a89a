"""flash_decoding on a GPU: right over many chunks, and the same bits whatever surrounds a sequence, however often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import numpy_dtype
from simulator.operations.attention import ATTENTION

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "a long sequence": {"len_q": 1, "len_kv": 20_000},
    "three levels": {"heads": 2, "kv_heads": 2, "len_q": 1, "len_kv": 70_000, "head_dim": 64},
    "several queries, causal": {"len_q": 5, "len_kv": 3001, "causal": True},
    "a window": {"len_q": 9, "len_kv": 9000, "window": (3000, 0)},
    "large heads": {"len_q": 2, "len_kv": 1500, "head_dim": 256},
    "float32": {"len_q": 1, "len_kv": 3000, "dtype": "float32"},
    "an odd head dim": {"len_q": 1, "len_kv": 3000, "head_dim": 111, "dtype": "float16"},
    "one chunk": {"len_q": 1, "len_kv": 256},
    "a key more": {"len_q": 1, "len_kv": 257},
}


def problem(case: str) -> fl.Problem:
    sizes: dict[str, Any] = {"batch": 3, "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", **CASES[case]}
    return fl.Problem(**sizes)


def bits(x: Any) -> bytes:
    import cupy

    return cupy.asnumpy(x.view(np.uint8)).tobytes()


def attended(p: fl.Problem, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    return fl.attention(q, k, v, algorithm="flash_decoding", lse=True, **p.masks)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[fl.Problem, Any, list[Any]]:
    """A problem, its inputs, and the same in GPU memory."""
    import cupy

    p = problem(request.param)
    arrays: Any = ATTENTION.draw(p, 1)
    return p, arrays, [cupy.asarray(arrays[name]) for name in "qkv"]


def test_right(case: tuple[fl.Problem, Any, list[Any]]) -> None:
    import cupy

    p, arrays, given = case
    out, lse = attended(p, *given)
    truth = ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    found = np.asarray(cupy.asnumpy(out.view(np.uint8))).view(numpy_dtype(p.dtype)).astype(np.float64)
    assert (np.linalg.norm(found - truth["out"], axis=-1) <= bounds["out"]).all()
    assert (np.abs(cupy.asnumpy(lse) - truth["lse"]) <= bounds["lse"]).all()


def test_neither_batch_nor_streams_nor_graphs_change_a_bit(case: tuple[fl.Problem, Any, list[Any]]) -> None:
    import cupy

    p, _, given = case
    out, lse = attended(p, *given)
    wanted = bits(out), bits(lse)
    for b in range(p.batch):
        alone = attended(p.replace(batch=1), *(x[b : b + 1].copy() for x in given))
        assert [bits(x) for x in alone] == [bits(out[b : b + 1].copy()), bits(lse[b : b + 1].copy())]
    for _ in range(100):
        assert tuple(map(bits, attended(p, *given))) == wanted
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    found: list[Any] = []
    for _ in range(10):  # all at the same time
        for stream in streams:
            with stream:
                found.append(attended(p, *given))
    for stream in streams:
        stream.synchronize()
    assert {tuple(map(bits, pair)) for pair in found} == {wanted}
    with streams[0]:
        streams[0].begin_capture()
        captured = attended(p, *given)
        graph = streams[0].end_capture()
    for _ in range(20):
        graph.launch(streams[1])
        with streams[2]:
            beside = attended(p, *given)
        for stream in streams:
            stream.synchronize()
        assert tuple(map(bits, captured)) == tuple(map(bits, beside)) == wanted
