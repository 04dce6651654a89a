"""cascade on a GPU: right, the bits of requests alone, and a captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify.shared import some_of
from simulator.dtypes import numpy_dtype
from simulator.operations.cascade import CASCADE
from tests.simulator.test_latent import within

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "a system prompt": {"batch": 40, "len_kv": 300, "len_prefix": 9000},
    "one request": {"batch": 1, "len_kv": 3000, "len_prefix": 700},
    "several queries, causal": {"batch": 9, "len_q": 5, "len_kv": 900, "len_prefix": 3001, "causal": True},
    "more queries than own keys, causal": {"batch": 3, "len_q": 40, "len_kv": 7, "len_prefix": 1024, "causal": True},
    "sinks": {"batch": 5, "len_kv": 513, "len_prefix": 511, "sinks": True},
    "large heads": {"batch": 33, "len_kv": 70, "len_prefix": 1500, "head_dim": 256},
    "small heads": {"batch": 64, "heads": 8, "kv_heads": 8, "len_kv": 70, "len_prefix": 1500, "head_dim": 64},
    "an odd head dim": {"batch": 3, "len_kv": 31, "len_prefix": 3000, "head_dim": 104, "dtype": "float16"},
    "no prefix": {"batch": 3, "len_kv": 900, "len_prefix": 0},
    "no own keys": {"batch": 3, "len_kv": 0, "len_prefix": 900},
    "no keys": {"batch": 3, "len_kv": 0, "len_prefix": 0},
    "a negative scale": {"batch": 3, "len_kv": 100, "len_prefix": 600, "scale": -0.1},
    "a window": {"batch": 9, "len_q": 3, "len_kv": 90, "len_prefix": 4500, "window": (900, 1)},
    "own lengths": {"batch": 40, "lengths": [(1, 37 * n) for n in range(40)], "len_prefix": 3001},
    "own lengths, a window": {
        "batch": 40,
        "lengths": [(1, 37 * n) for n in range(40)],
        "len_prefix": 3001,
        "window": (800, 0),
    },
    "own lengths, causal, more room": {
        "batch": 5,
        "lengths": [(7, n) for n in (0, 3, 1000, 64, 513)],
        "len_kv": 2000,
        "len_prefix": 700,
        "causal": True,
    },
}


def problem(case: str) -> fl.Problem:
    queries = {} if "lengths" in CASES[case] else {"len_q": 1}
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, **queries, "head_dim": 128, "dtype": "bfloat16", **CASES[case]}
    return fl.Problem(**sizes)


def bits(x: Any) -> bytes:
    import cupy

    return cupy.asnumpy(x.view(np.uint8)).tobytes()


def on_the_gpu(arrays: Any) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(x) for name, x in arrays.items()}


def attended(p: fl.Problem, given: dict[str, Any]) -> tuple[Any, Any]:
    return fl.cascade(**given, lse=True, causal=p.causal, window=p.window, scale=p.scale)


@pytest.mark.parametrize("case", CASES)
def test_right_and_the_bits_of_requests_alone(case: str) -> None:
    import cupy

    p = problem(case)
    arrays: Any = CASCADE.draw(p, 1)
    out, lse = attended(p, on_the_gpu(arrays))
    found = np.asarray(cupy.asnumpy(out.view(np.uint8))).view(numpy_dtype(p.dtype))
    assert within(CASCADE, {"out": found, "lse": cupy.asnumpy(lse)}, p, arrays)
    for order in ([0], list(range(p.batch))[::-1]):
        other = attended(*_given(some_of(p, arrays, order)))
        assert [bits(x) for x in other] == [bits(cupy.ascontiguousarray(x[order])) for x in (out.view(np.uint8), lse)]
    for _ in range(20):
        assert [bits(x) for x in attended(p, on_the_gpu(arrays))] == [bits(out), bits(lse)]


def _given(posed: tuple[fl.Problem, Any]) -> tuple[fl.Problem, dict[str, Any]]:
    return posed[0], on_the_gpu(posed[1])


def test_a_captured_graph() -> None:
    import cupy

    p = problem("a system prompt")
    given = on_the_gpu(CASCADE.draw(p, 1))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected, _ = attended(p, given)
        stream.begin_capture()
        out, _ = attended(p, given)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert bits(out) == bits(expected)


def test_a_captured_graph_reads_the_lengths_of_its_replay() -> None:
    import cupy

    p = problem("own lengths, causal, more room")
    arrays: Any = CASCADE.draw(p.replace(lengths=[(7, 2000)] * 5), 1)
    given = on_the_gpu(arrays)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attended(p, given)
        stream.begin_capture()
        out, lse = attended(p, given)
        graph = stream.end_capture()
        for lens in ([2000] * 5, [0, 3, 1000, 64, 513], [1, 1999, 5, 0, 700]):
            given["seq_lens"][...] = cupy.asarray(lens, np.int32)
            graph.launch(stream)
            expected = attended(p, given)
            stream.synchronize()
            assert [bits(out), bits(lse)] == [bits(x) for x in expected]
