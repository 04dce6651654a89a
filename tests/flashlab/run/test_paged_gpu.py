"""paged on a GPU: right, the bits of flash_decoding on the gathered keys, and lengths that a captured graph follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify.pages import repaged
from simulator.dtypes import numpy_dtype
from simulator.operations.paged import PAGED

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "long and short": {"lengths": [(1, 20_000), (1, 1), (1, 0), (1, 777)], "page_size": 16},
    "three levels": {"heads": 2, "kv_heads": 2, "lengths": [(1, 70_000), (1, 500)], "page_size": 64, "head_dim": 64},
    "several queries, causal": {"lengths": [(5, 3001), (5, 5), (5, 900)], "causal": True, "page_size": 32},
    "a window": {"lengths": [(9, 9000), (9, 40)], "window": (3000, 0), "page_size": 16},
    "large heads": {"lengths": [(2, 1500), (2, 700)], "head_dim": 256, "page_size": 256},
    "float32": {"lengths": [(1, 3000), (1, 2999)], "dtype": "float32", "page_size": 8},
    "pages of one key": {"lengths": [(1, 3000), (1, 100)], "page_size": 1},
    "an odd head dim": {"lengths": [(1, 3000), (1, 31)], "head_dim": 104, "dtype": "float16", "page_size": 5},
    "more requests than lanes": {"lengths": [(1, 61 * n % 700) for n in range(100)], "page_size": 16},
    "drafts": {"lengths": [(7, 3001), (7, 7), (7, 0), (7, 4), (7, 515)], "drafts": True, "page_size": 16},
    "32 drafts of large heads": {"lengths": [(32, 1500), (32, 527)], "drafts": True, "head_dim": 256, "page_size": 100},
}


def problem(case: str) -> fl.Problem:
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", **CASES[case]}
    p = fl.Problem(batch=len(sizes["lengths"]), **sizes)
    return p.replace(pages=p.pages + 3, len_kv=p.len_kv + 100)


def bits(x: Any) -> bytes:
    import cupy

    return cupy.asnumpy(x.view(np.uint8)).tobytes()


def on_the_gpu(arrays: Any) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(x) for name, x in arrays.items()}


def attended(p: fl.Problem, given: dict[str, Any]) -> tuple[Any, Any]:
    return fl.attention(**given, lse=True, causal=p.causal, window=p.window)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[fl.Problem, Any, dict[str, Any]]:
    """A problem, its inputs, and the same in GPU memory."""
    p = problem(request.param)
    arrays: Any = PAGED.draw(p, 1)
    return p, arrays, on_the_gpu(arrays)


def test_right(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    import cupy

    p, arrays, given = case
    out, lse = attended(p, given)
    truth = PAGED.judge(p, arrays)
    bounds = PAGED.bounds(p, arrays, truth)
    found = np.asarray(cupy.asnumpy(out.view(np.uint8))).view(numpy_dtype(p.dtype)).astype(np.float64)
    assert (np.linalg.norm(found - truth["out"], axis=-1) <= bounds["out"]).all()
    logs = cupy.asnumpy(lse)
    with np.errstate(invalid="ignore"):
        assert ((logs == truth["lse"]) | (np.abs(logs - truth["lse"]) <= bounds["lse"])).all()


def test_the_bits_are_those_of_gathered_keys_and_of_other_pages(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    import cupy

    p, arrays, given = case
    out, lse = attended(p, given)
    requests: Any = PAGED.gathered(p, arrays)
    for b, (plain, own) in list(enumerate(requests))[: 0 if p.drafts else 9]:  # flash_decoding takes no drafts
        q, k, v = (cupy.asarray(own[name]) for name in "qkv")
        alone = fl.attention(q, k, v, algorithm="flash_decoding", lse=True, **plain.masks)
        assert [bits(x) for x in alone] == [bits(x[b : b + 1].copy()) for x in (out, lse)]
    for size in (1, 16, 100):
        other, moved = repaged(p, arrays, range(p.batch), size, 5)
        assert [bits(x) for x in attended(other, on_the_gpu(moved))] == [bits(out), bits(lse)]
    swapped = {name: cupy.asarray(np.ascontiguousarray(arrays[name].swapaxes(1, 2))).swapaxes(1, 2) for name in "kv"}
    assert [bits(x) for x in attended(p, given | swapped)] == [bits(out), bits(lse)]
    for _ in range(100):
        assert [bits(x) for x in attended(p, given)] == [bits(out), bits(lse)]


def test_a_captured_graph_follows_the_lengths() -> None:
    import cupy

    p = problem("long and short")
    given = on_the_gpu(PAGED.draw(p, 1))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attended(p, given)
        stream.begin_capture()
        out, _ = attended(p, given)
        graph = stream.end_capture()
    for lengths in ([20_000, 1, 0, 777], [3, 1, 0, 700], [19_999, 0, 0, 12], [20_000, 1, 0, 777]):
        given["seq_lens"].set(np.array(lengths, np.int32), stream=stream)
        graph.launch(stream)
        stream.synchronize()
        replayed = bits(out)
        assert replayed == bits(attended(p, {**given, "seq_lens": cupy.array(lengths, cupy.int32)})[0])


def test_offsets_beyond_32_bits() -> None:
    """A pool of over 4 GB, of which the last pages are used."""
    import cupy

    p = fl.Problem(
        batch=1, heads=8, kv_heads=8, lengths=[(1, 300)], head_dim=128, dtype="bfloat16", page_size=64, pages=35_000
    )
    small = p.replace(pages=5)
    drawn: Any = PAGED.draw(small, 3)
    wanted = attended(small, on_the_gpu(drawn))[0]
    given = on_the_gpu(drawn)
    for name in "kv":
        pool = cupy.zeros((p.pages, p.kv_heads, 64, 128), np.uint16)  # CuPy copies bits, and no bfloat16
        pool[-5:] = given[name].view(np.uint16)
        given[name] = pool.view(given[name].dtype)
    given["block_table"] = given["block_table"] + cupy.int32(p.pages - 5)
    assert given["k"].nbytes > 2**32
    assert bits(attended(p, given)[0]) == bits(wanted)
