"""The rungs below flash_decoding and paged on a GPU: right, and the same bits alone, in a batch, and over pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.dtypes import numpy_dtype
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "a long sequence": {"len_kv": 70_000},
    "a key more than a chunk": {"len_kv": 129, "dtype": "float16"},
    "two tiles of heads": {"heads": 40, "len_kv": 3001},
    "large heads": {"len_kv": 1500, "head_dim": 256},
    "an odd head dim": {"len_kv": 3000, "head_dim": 111, "dtype": "float16"},
    "no keys": {"len_kv": 0},
}


def problem(case: str) -> fl.Problem:
    sizes: dict[str, Any] = {"batch": 3, "heads": 8, "kv_heads": 2, "len_q": 1, "head_dim": 128, "dtype": "bfloat16"}
    return fl.Problem(**sizes | CASES[case])


def host(x: Any) -> Any:
    import cupy

    return cupy.asnumpy(x.view(np.uint8))


def attended(name: str, arrays: Any) -> tuple[Any, Any]:
    import cupy

    given = {key: cupy.asarray(x) for key, x in arrays.items()}
    return fl.attention(**given, algorithm=name, lse=True)


def right(operation: Any, p: fl.Problem, arrays: Any, found: tuple[Any, Any]) -> None:
    truth = operation.judge(p, arrays)
    bounds = operation.bounds(p, arrays, truth)
    out, lse = host(found[0]).view(numpy_dtype(p.dtype)).astype(np.float64), host(found[1]).view(np.float32)
    empty: Any = np.isneginf(truth["lse"])
    assert (np.isneginf(lse) == empty).all()
    assert (np.linalg.norm(out - truth["out"], axis=-1) <= bounds["out"]).all()
    assert (np.abs(lse[~empty] - truth["lse"][~empty]) <= bounds["lse"][~empty]).all()


@pytest.mark.parametrize("name", ["flash_decoding_1", "flash_decoding_2"])
@pytest.mark.parametrize("case", CASES)
def test_right_and_the_same_bits_in_any_batch(name: str, case: str) -> None:
    p = problem(case)
    arrays: Any = ATTENTION.draw(p, 1)
    found = attended(name, arrays)
    right(ATTENTION, p, arrays, found)
    for b in range(p.batch):
        alone = attended(name, {key: x[b : b + 1].copy() for key, x in arrays.items()})
        assert [host(x).tobytes() for x in alone] == [host(x[b : b + 1].copy()).tobytes() for x in found]
    for _ in range(20):
        assert [host(x).tobytes() for x in attended(name, arrays)] == [host(x).tobytes() for x in found]


@pytest.mark.parametrize("name", ["flash_decoding_1", "flash_decoding_2"])
def test_a_captured_call_replays(name: str) -> None:
    import cupy

    first, second = (
        {key: cupy.asarray(x) for key, x in ATTENTION.draw(problem("a long sequence"), n).items()} for n in (1, 2)
    )
    buffers = {key: x.copy() for key, x in first.items()}
    expected = [host(fl.attention(**given, algorithm=name)).tobytes() for given in (first, second)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = fl.attention(**buffers, algorithm=name)  # warmed up, on the stream that captures
        stream.synchronize()
        stream.begin_capture()
        fl.attention(**buffers, algorithm=name, out=out)
        graph = stream.end_capture()
    for given, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for key, buffer in buffers.items():
            buffer[...] = given[key]
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert host(out).tobytes() == wanted


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_pages_have_the_bits_of_gathered_keys(size: int) -> None:
    lengths = [(1, n) for n in (3000, 0, 1, 129)]
    p = fl.Problem(
        batch=4, heads=8, kv_heads=2, lengths=lengths, head_dim=128, dtype="bfloat16", page_size=size, len_kv=4096
    )
    arrays: Any = PAGED.draw(p, 1)
    found = attended("paged_1", arrays)
    right(PAGED, p, arrays, found)
    for b, (_, own) in enumerate(PAGED.gathered(p, arrays)):
        alone = attended("flash_decoding_1", own)
        assert [host(x).tobytes() for x in alone] == [host(x[b : b + 1].copy()).tobytes() for x in found]
