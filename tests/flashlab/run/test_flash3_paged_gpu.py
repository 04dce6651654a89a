"""flash3_paged on a GPU: right, bits that neither pages nor other requests change, and lengths that a captured graph follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.devices import current_device
from flashlab.verify.pages import repaged
from simulator.dtypes import numpy_dtype
from simulator.operations.paged import PAGED
from tests.flashlab.run.test_paged_gpu import bits, on_the_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CASES: dict[str, dict[str, Any]] = {
    "an append": {"lengths": [(512, 9000), (512, 512), (512, 2777)], "causal": True, "page_size": 16},
    "pages of one key": {"lengths": [(300, 3000), (300, 301)], "causal": True, "page_size": 1},
    "large pages": {"lengths": [(129, 3000), (129, 100)], "page_size": 256},
    "an odd page": {"lengths": [(200, 1500), (200, 77)], "page_size": 7, "causal": True},
    "a window": {"lengths": [(300, 4000), (300, 400)], "window": (1000, 0), "page_size": 64},
    "rows without keys": {"lengths": [(300, 40), (300, 0)], "causal": True, "page_size": 16},
    "head dim 64": {"lengths": [(400, 3001), (400, 900)], "head_dim": 64, "causal": True, "page_size": 16},
    "head dim 192": {"lengths": [(400, 3001), (400, 900)], "head_dim": 192, "causal": True, "page_size": 16},
    "head dim 256": {"lengths": [(400, 2001), (400, 900)], "head_dim": 256, "causal": True, "page_size": 16},
    "an odd head dim": {"lengths": [(300, 1000), (300, 31)], "head_dim": 104, "dtype": "float16", "page_size": 5},
    "a soft cap": {"lengths": [(300, 1000), (300, 31)], "soft_cap": 20.0, "causal": True, "page_size": 16},
    "more requests than are sorted together": {"lengths": [(140, 61 * n % 700) for n in range(70)], "page_size": 16},
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[fl.Problem, Any, dict[str, Any]]:
    """A problem, its inputs, and the same in GPU memory, where pages have a key behind the other."""
    if current_device().compute_capability != (9, 0):
        pytest.skip("flash3_paged needs Hopper")
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", **CASES[request.param]}
    p = fl.Problem(batch=len(sizes["lengths"]), **sizes)
    p = p.replace(pages=p.pages + 3, len_kv=p.len_kv + 100)
    arrays: Any = PAGED.draw(p, 1)
    given = on_the_gpu({name: x.swapaxes(1, 2).copy() if name in "kv" else x for name, x in arrays.items()})
    return p, arrays, given | {name: given[name].swapaxes(1, 2) for name in "kv"}


def attended(p: fl.Problem, given: dict[str, Any]) -> tuple[Any, Any]:
    masks: Any = {"causal": p.causal, "window": p.window, "soft_cap": p.soft_cap}
    return fl.attention(**given, lse=True, algorithm="flash3_paged", **masks)


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


def test_the_bits_are_those_of_other_pages_and_of_each_run(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    p, arrays, given = case
    out, lse = attended(p, given)
    for _ in range(20):
        again = attended(p, given)
        assert bits(again[0]) == bits(out) and bits(again[1]) == bits(lse)
    order = list(range(p.batch))[::-1]
    other, moved = repaged(p, arrays, order, 33, 7)
    for mine, its in zip((out, lse), attended(other, on_the_gpu(moved)), strict=True):
        assert [bits(its[i : i + 1]) for i in order] == [bits(mine[i : i + 1]) for i in range(p.batch)]


def test_a_captured_graph_follows_the_lengths(case: tuple[fl.Problem, Any, dict[str, Any]]) -> None:
    import cupy

    p, arrays, given = case
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attended(p, given)
        stream.begin_capture()
        out, _ = attended(p, given)
        graph = stream.end_capture()
        for fewer in (0, 1, 17, 0):
            lengths = np.maximum(arrays["seq_lens"] - fewer, 0)
            given["seq_lens"].set(lengths, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            replayed = bits(out)
            assert replayed == bits(attended(p, {**given, "seq_lens": cupy.asarray(lengths)})[0])


def test_auto() -> None:
    """The fastest of both, wherever this runs."""
    p = fl.Problem(
        batch=8, heads=16, kv_heads=4, lengths=[(256, 700)] * 8, head_dim=128, dtype="bfloat16", page_size=16
    )
    arrays: Any = PAGED.draw(p, 1)
    given = on_the_gpu(arrays)
    wanted = "flash3_paged" if current_device().compute_capability == (9, 0) else "paged"
    assert bits(fl.attention(**given, algorithm="auto")) == bits(fl.attention(**given, algorithm=wanted))
