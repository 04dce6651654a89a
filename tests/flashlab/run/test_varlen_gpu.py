"""Requests with different numbers of new tokens on a GPU: right, the bits that each has alone, and offsets that a graph follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.devices import current_device
from simulator.dtypes import numpy_dtype
from simulator.operations.paged import PAGED
from tests.flashlab.run.test_paged_gpu import bits, on_the_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "a step": {"lengths": [*[(1, 61 * n % 700 + 1) for n in range(63)], (512, 4608)]},
    "chunks": {"lengths": [(300, 3000), (129, 129), (0, 40), (1, 900), (700, 1400)]},
    "many short": {"lengths": [(n % 5, 7 * n + 3) for n in range(200)]},
    "rows copied": {"lengths": [(200, 1500), (77, 77), (3, 900)], "page_size": 7},
    "wide heads": {"lengths": [(200, 1500), (0, 9), (3, 900)], "head_dim": 256},
    "narrow heads, a window": {"lengths": [(200, 1500), (90, 100), (3, 900)], "head_dim": 64, "window": (300, 0)},
    "sinks, a soft cap": {"lengths": [(200, 1500), (90, 100)], "soft_cap": 20.0, "sinks": True},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[fl.Problem, Any, dict[str, Any]]:
    """A problem, its inputs, and the same in GPU memory."""
    if current_device().compute_capability != (9, 0):
        pytest.skip("flash3_paged needs Hopper")
    sizes: dict[str, Any] = {
        "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", "page_size": 16, "causal": True, **CASES[request.param],
    }  # fmt: skip
    p = fl.Problem(batch=len(sizes["lengths"]), varlen=True, **sizes)
    p = p.replace(pages=p.pages + 3, len_kv=p.len_kv + 100)
    arrays: Any = PAGED.draw(p, 1)
    return p, arrays, on_the_gpu(arrays)


def attended(p: fl.Problem, given: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    masks: Any = {"causal": p.causal, "window": p.window, "soft_cap": p.soft_cap}
    return fl.attention(**given, lse=True, **masks, **options)


def check(p: fl.Problem, arrays: Any, out: Any, lse: Any) -> None:
    import cupy

    truth = PAGED.judge(p, arrays)
    bounds = PAGED.bounds(p, arrays, truth)
    found = np.asarray(cupy.asnumpy(out.view(np.uint8))).view(numpy_dtype(p.dtype)).astype(np.float64)
    assert (np.linalg.norm(found - truth["out"], axis=-1) <= bounds["out"]).all()
    logs = cupy.asnumpy(lse)
    with np.errstate(invalid="ignore"):
        assert ((logs == truth["lse"]) | (np.abs(logs - truth["lse"]) <= bounds["lse"])).all()


def test_right_and_the_bits_of_each_run(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    p, arrays, given = case
    out, lse = attended(p, given)
    check(p, arrays, out, lse)
    for _ in range(10):
        again = attended(p, given)
        assert bits(again[0]) == bits(out) and bits(again[1]) == bits(lse)


def test_each_request_has_the_bits_that_it_has_alone(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    import cupy

    p, _, given = case
    out, lse = attended(p, given)
    for b in (0, p.batch // 2, p.batch - 1):
        rows = slice(*p.cu_seqlens_q[b : b + 2])
        alone = {
            **given, "q": cupy.ascontiguousarray(given["q"][:, :, rows]), "block_table": given["block_table"][b : b + 1],
            "seq_lens": given["seq_lens"][b : b + 1],
        }  # fmt: skip
        del alone["cu_seqlens_q"]
        if rows.start < rows.stop:
            found, logs = attended(p, alone, algorithm="flash3_paged")
            assert bits(found) == bits(cupy.ascontiguousarray(out[:, :, rows]))
            assert bits(logs) == bits(cupy.ascontiguousarray(lse[:, :, rows]))


def test_a_captured_graph_follows_offsets_and_lengths(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    """A replay has other lengths, and queries that belong to other requests."""
    import cupy

    p, arrays, given = case
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attended(p, given)
        stream.begin_capture()
        out, _ = attended(p, given)
        graph = stream.end_capture()
        for moved in (0, 1, 2, 0):
            begins = np.array([0, *np.maximum(arrays["cu_seqlens_q"][1:-1] - moved, 0), p.len_q], np.int32)
            lengths = np.maximum(arrays["seq_lens"] - 3 * moved, 0)
            given["cu_seqlens_q"].set(begins, stream=stream)
            given["seq_lens"].set(lengths, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            replayed = bits(out)
            told = {"cu_seqlens_q": cupy.asarray(begins), "seq_lens": cupy.asarray(lengths)}
            assert replayed == bits(attended(p, {**given, **told})[0])


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_decodes_first(framework: str) -> None:
    if current_device().compute_capability != (9, 0):
        pytest.skip("flash3_paged needs Hopper")
    sizes: dict[str, Any] = {
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": "float16",
        "page_size": 16,
        "causal": True,
    }
    lengths = [*[(1, 61 * n % 700 + 1) for n in range(63)], (512, 4608), (0, 8), (40, 40)]
    p = fl.Problem(batch=len(lengths), varlen=True, lengths=lengths, **sizes)
    arrays: Any = PAGED.draw(p, 1)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        given: dict[str, Any] = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    else:
        given = on_the_gpu(arrays)
    out, lse = attended(p, given, num_decodes=63)
    whole, logs = attended(p, given)
    place: Any = {"out": whole.clone() if framework == "torch" else whole.copy()}
    assert attended(p, given, num_decodes=63, **place)[0] is place["out"]
    if framework == "torch":
        import cupy

        assert bool((place["out"] == out).all()) and bool((out[:, :, 63:] == whole[:, :, 63:]).all())
        out, lse = (cupy.asarray(x) for x in (out, lse))
    else:
        assert bits(place["out"]) == bits(out)
        assert bits(out[:, :, 63:].copy()) == bits(whole[:, :, 63:].copy()) and bits(lse[:, :, 63:].copy()) == bits(
            logs[:, :, 63:].copy()
        )
    check(p, arrays, out, lse)
