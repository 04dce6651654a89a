"""CUDA graphs: a captured call replays bit-equal, also on new data in the same buffers. And plans on a GPU, by name."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run.devices import current_device

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=200, head_dim=64, dtype="float16", causal=True)
ALGORITHMS = [name for name in fl.catalogue.with_kernels() if P.dtype in fl.CATALOGUE[name].dtypes]


def here(algorithm: str) -> None:
    """Skips what this GPU can't run."""
    if reason := fl.CATALOGUE[algorithm].refuses(P, current_device()):
        pytest.skip(reason)


@pytest.mark.parametrize("head_dim", [64, 40], ids=["as they lie", "padded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_captured_call_replays_on_torch(algorithm: str, head_dim: int) -> None:
    torch: Any = pytest.importorskip("torch")
    here(algorithm)
    p = P.replace(head_dim=head_dim)
    first, second = ([torch.from_numpy(x).cuda() for x in fl.random_inputs(p, seed=seed)] for seed in (1, 2))
    buffers = [x.clone() for x in first]

    def call(inputs: list[Any]) -> Any:
        return fl.attention(*inputs, algorithm=algorithm, causal=True, lse=True)

    expected = [[x.clone() for x in call(inputs)] for inputs in (first, second)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(buffers)
    litter = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    for inputs, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(captured, wanted, strict=True))
    del litter


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_captured_call_replays_on_cupy(algorithm: str) -> None:
    cupy: Any = importlib.import_module("cupy")
    here(algorithm)
    first, second = ([cupy.asarray(x) for x in fl.random_inputs(P, seed=seed)] for seed in (1, 2))
    buffers = [x.copy() for x in first]
    expected = [fl.attention(*inputs, algorithm=algorithm, causal=True) for inputs in (first, second)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = fl.attention(*buffers, algorithm=algorithm, causal=True)  # warmed up, on the stream that captures
        stream.synchronize()
        stream.begin_capture()
        fl.attention(*buffers, algorithm=algorithm, causal=True, out=out)
        graph = stream.end_capture()
    litter = [cupy.full(1 << 20, np.nan, "float32") for _ in range(8)]
    for inputs, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer[...] = x
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (out == wanted).all()
    del litter


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_runs_by_name(algorithm: str) -> None:
    cupy: Any = importlib.import_module("cupy")
    here(algorithm)
    q, k, v = (cupy.asarray(x) for x in fl.random_inputs(P))
    plan: Any = fl.plan(algorithm, P, lse=True)
    got = plan.run(q=q, k=k, v=v)
    out, lse = fl.attention(q, k, v, algorithm=algorithm, causal=True, lse=True)
    assert (got["out"] == out).all() and (got["lse"] == lse).all()
    workspaces = [x.nbytes for x in plan.counts.tensors.values() if x.role == "workspace"]
    assert plan.workspace == sum(workspaces)


def test_a_plan_serves_several_threads() -> None:
    cupy: Any = importlib.import_module("cupy")
    plan: Any = fl.plan("flash1", P)
    data = [[cupy.asarray(x) for x in fl.random_inputs(P, seed=seed)] for seed in range(4)]
    wanted = [plan.run(q=q, k=k, v=v)["out"].copy() for q, k, v in data]
    cupy.cuda.Device().synchronize()
    wrong: list[int] = []

    def work(n: int) -> None:
        q, k, v = data[n]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                got = plan.run(q=q, k=k, v=v)["out"]
                stream.synchronize()
                if not bool((got == wanted[n]).all()):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
