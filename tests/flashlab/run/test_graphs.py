"""CUDA graphs: a captured call replays bit-equal, also on new data in the same buffers. And plans on a GPU: warm when they are
made, called by name and from threads, compiled once for all processes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.operations.attention import ATTENTION
from tests.flashlab.run.gpu import cannot_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=200, head_dim=64, dtype="float16", causal=True)
ALGORITHMS = [
    name
    for name in fl.catalogue.with_kernels(ATTENTION)
    if P.dtype in fl.CATALOGUE[name].dtypes and fl.CATALOGUE[name].support.queries is None
]


def here(algorithm: str) -> None:
    """Skips what this GPU can't run."""
    if reason := cannot_run(algorithm, P):
        pytest.skip(reason)


@pytest.mark.parametrize("head_dim", [64, 36], ids=["as they lie", "padded"])
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
    tensors = plan.counts.tensors.values()
    assert plan.workspace == sum(x.nbytes for x in tensors if x.role == "workspace" and not x.zeros)  # counters stay


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CuPy compiles or loads from its cache, its own code for copies included."""
    compiler: Any = importlib.import_module("cupy.cuda.compiler")
    compile_really, found = compiler._compile_module_with_cache, list[str]()

    def counted(source: str, *args: Any, **options: Any) -> Any:
        found.append(source)
        return compile_really(source, *args, **options)

    monkeypatch.setattr(compiler, "_compile_module_with_cache", counted)
    return found


@pytest.mark.parametrize("head_dim", [64, 36], ids=["as they lie", "padded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_first_call_of_a_plan_is_captured(algorithm: str, head_dim: int, compiles: list[str]) -> None:
    torch: Any = pytest.importorskip("torch")
    here(algorithm)
    p = P.replace(head_dim=head_dim, len_q=301 + head_dim)
    q, k, v = (torch.from_numpy(x).cuda() for x in fl.random_inputs(p))
    plan: Any = fl.plan(algorithm, p)
    compiles.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan.run(q=q, k=k, v=v)["out"]
        direct = fl.attention(q, k, v, algorithm=algorithm, causal=True)
    graph.replay()
    torch.cuda.synchronize()
    assert compiles == []
    expected = plan.run(q=q, k=k, v=v)["out"]
    assert torch.equal(captured, expected) and torch.equal(direct, expected)


PROCESS = """
import json, sys
import cupy.cuda.compiler as compiler
import flashlab as fl
from flashlab.run import nvrtc

compiled = []
compile_by_cupy, compile_by_us = compiler._NVRTCProgram.compile, nvrtc._compile

def by_cupy(self, *args):
    compiled.append(self.src)
    return compile_by_cupy(self, *args)

def by_us(library, path, *args, **options):
    compiled.append(path.name)
    return compile_by_us(library, path, *args, **options)

compiler._NVRTCProgram.compile, nvrtc._compile = by_cupy, by_us
fl.plan(sys.argv[1], fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16"))
print(json.dumps([text for text in compiled if text]))  # CuPy compiles an empty one, to know its compiler
"""


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if fl.CATALOGUE[name].language == "cuda"])
def test_another_process_finds_the_kernels_on_disk(algorithm: str, tmp_path: Path) -> None:
    here(algorithm)
    caches = {"CUPY_CACHE_DIR": str(tmp_path / "cupy"), "FLASHLAB_CACHE": str(tmp_path / "flashlab")}
    command = [sys.executable, "-c", PROCESS, algorithm]
    environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    said = [subprocess.run(command, env=environment, capture_output=True, check=True).stdout for _ in range(2)]
    first, second = map(json.loads, said)
    assert first != [] and second == []


def test_a_thread_that_has_called_nothing_yet_can_launch() -> None:
    cupy: Any = importlib.import_module("cupy")
    q, k, v = (cupy.asarray(x) for x in fl.random_inputs(P))
    out = cupy.empty_like(q)
    wanted = fl.attention(q, k, v, causal=True).copy()  # leaves its workspace in the pool
    cupy.cuda.Device().synchronize()
    failed: list[Exception] = []

    def work() -> None:
        try:
            fl.attention(q, k, v, causal=True, out=out)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    cupy.cuda.Device().synchronize()
    assert (out == wanted).all()


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
