"""mla and mla_hopper on a GPU: right over many chunks and requests, the same bits in pages of any size and in any batch, and
lengths that a graph follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.devices import gpu_device
from flashlab.verify.pages import repaged
from simulator.dtypes import numpy_dtype
from simulator.operations.latent import LATENT, PAGED_LATENT
from tests.flashlab.run.test_paged_gpu import bits, on_the_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DENSE: dict[str, dict[str, Any]] = {
    "a long sequence": {"heads": 128, "len_kv": 20_000},
    "few heads": {"batch": 5, "heads": 16, "len_kv": 3001, "dtype": "float16"},
    "several queries, causal": {"batch": 2, "heads": 16, "len_q": 3, "len_kv": 700, "causal": True},
    "one key": {"heads": 3, "len_kv": 1},
    "more units than blocks at a time": {"batch": 140, "heads": 1, "len_kv": 10},
    "several units of a block, of several tiles": {"batch": 40, "heads": 128, "len_kv": 2500, "dtype": "float16"},
    "steep": {"batch": 2, "heads": 64, "len_kv": 3000, "scale": 1.0},
}
PAGED: dict[str, dict[str, Any]] = {
    "long and short": {"heads": 128, "lengths": [(1, 9000), (1, 1), (1, 0), (1, 777)], "page_size": 64},
    "pages of one row": {"heads": 16, "lengths": [(1, 3000), (1, 100)], "page_size": 1, "dtype": "float16"},
    "several queries, causal": {"heads": 8, "lengths": [(5, 1001), (5, 5)], "causal": True, "page_size": 7},
}


def judged(operation: Any, p: fl.Problem, arrays: Any, out: Any, lse: Any) -> None:
    import cupy

    truth = operation.judge(p, arrays)
    bounds = operation.bounds(p, arrays, truth)
    found = np.asarray(cupy.asnumpy(out.view(np.uint8))).view(numpy_dtype(p.dtype)).astype(np.float64)
    assert (np.linalg.norm(found - truth["out"], axis=-1) <= bounds["out"]).all()
    logs = cupy.asnumpy(lse)
    with np.errstate(invalid="ignore"):
        assert ((logs == truth["lse"]) | (np.abs(logs - truth["lse"]) <= bounds["lse"])).all()


@pytest.fixture(params=["mla", "mla_hopper"])
def algorithm(request: pytest.FixtureRequest) -> str:
    """A kernel that runs on this GPU."""
    name: str = request.param
    if (said := fl.CATALOGUE[name].refuses(fl.latent_problem(heads=1, len_kv=1), gpu_device(None))) is not None:
        pytest.skip(said)
    return name


@pytest.mark.parametrize("name", DENSE)
def test_right(name: str, algorithm: str) -> None:
    p = fl.latent_problem(**DENSE[name])
    arrays = LATENT.draw(p, 1)
    given, how = on_the_gpu(arrays), {"algorithm": algorithm, "causal": p.causal, "scale": p.scale, "lse": True}
    out, lse = fl.mla(**given, **how)
    judged(LATENT, p, arrays, out, lse)
    for _ in range(100):
        assert [bits(x) for x in fl.mla(**given, **how)] == [bits(out), bits(lse)]
    for b in range(0, p.batch, 7):  # alone, the last bit is the same
        alone = fl.mla(**{name: x[b : b + 1] for name, x in given.items()}, **how)
        assert [bits(x) for x in alone] == [bits(out[b : b + 1]), bits(lse[b : b + 1])]


@pytest.mark.parametrize("name", PAGED)
def test_right_in_pages(name: str, algorithm: str) -> None:
    p = fl.latent_problem(batch=len(PAGED[name]["lengths"]), **PAGED[name])
    p = p.replace(pages=p.pages + 3, len_kv=p.len_kv + 100)
    arrays: Any = PAGED_LATENT.draw(p, 1)
    how = {"algorithm": f"{algorithm}_paged", "causal": p.causal, "lse": True}
    out, lse = fl.mla(**on_the_gpu(arrays), **how)
    judged(PAGED_LATENT, p, arrays, out, lse)
    for size in (1, 16, 100):
        _, moved = repaged(p, arrays, range(p.batch), size, 5, PAGED_LATENT)
        assert [bits(x) for x in fl.mla(**on_the_gpu(moved), **how)] == [bits(out), bits(lse)]
    gathered: Any = PAGED_LATENT.gathered(p, arrays)
    for b, (_, own) in enumerate(gathered):  # and so it is in one piece
        alone = fl.mla(**on_the_gpu(own), **{**how, "algorithm": algorithm})
        assert [bits(x) for x in alone] == [bits(out[b : b + 1]), bits(lse[b : b + 1])]


def test_a_captured_graph_follows_the_lengths() -> None:
    import cupy

    p = fl.latent_problem(batch=4, **PAGED["long and short"])
    given = on_the_gpu(PAGED_LATENT.draw(p, 1))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fl.mla(**given)
        stream.begin_capture()
        out = fl.mla(**given)
        graph = stream.end_capture()
    for lengths in ([9000, 1, 0, 777], [3, 1, 0, 700], [8999, 0, 0, 12]):
        given["seq_lens"].set(np.array(lengths, np.int32), stream=stream)
        graph.launch(stream)
        stream.synchronize()
        assert bits(out) == bits(fl.mla(**{**given, "seq_lens": cupy.array(lengths, cupy.int32)}))
