"""cuDNN's FP8 as a peer: what its graph is asked for, by a stand-in for the library and for torch, and what isn't timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashlab as fl
from flashlab.integrations.peers import cudnn_graph
from flashlab.measure import fp8
from simulator.errors import Unavailable

P = fl.Problem(batch=2, heads=3, len_q=40, head_dim=64, dtype="bfloat16", causal=True)
EIGHT, SIXTEEN = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


class Tensor(np.ndarray[Any, Any]):
    """What of torch's the peer uses, in NumPy."""

    device = "cuda"

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.itemsize for n in self.strides)

    def transpose(self, *axes: Any) -> Any:
        return self.swapaxes(*axes)

    def contiguous(self) -> Any:
        return self.copy("C")

    def float(self) -> Any:
        return self.astype(np.float32)

    def square(self) -> Any:
        return np.square(self)

    def mean(self, *_: Any, **__: Any) -> Any:
        return np.asarray(np.mean(np.asarray(self))).view(Tensor)

    def sqrt(self) -> Any:
        return np.sqrt(self)


class Node:
    """A tensor of a graph."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def __getattr__(self, name: str) -> Callable[[Any], Node]:
        def say(value: Any) -> Node:
            self.said[name.removeprefix("set_")] = value
            return self

        return say


class NotSupported(Exception):
    pass


class Graph:
    """A graph that computes attention by `naive`, `factor` times. It has no plan for an output in any of `unknown`."""

    asked: dict[str, Any]
    made: tuple[Any, ...]

    def __init__(self, unknown: tuple[str, ...], factor: float) -> None:
        self.unknown, self.factor, self.steps = unknown, factor, list[str]()

    def tensor(self, **said: Any) -> Node:
        return Node(**said)

    def sdpa_fp8(self, **asked: Any) -> tuple[Any, ...]:
        self.asked, self.made = asked, (Node(), None, Node(), Node())
        return self.made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: self.steps.append(name)

    def check_support(self) -> None:
        self.steps.append("check_support")
        if self.made[0].said["data_type"] in self.unknown:
            raise NotSupported("no plan for this output")

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, bound: dict[Any, Any], workspace: Any, *, handle: Any) -> None:
        assert handle == "handle" and len(workspace) == 1 and {*self.made} - {None} <= bound.keys()
        q, k, v = (np.asarray(bound[self.asked[name]]).astype(np.float32) for name in "qkv")
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        factors = {name: float(bound[self.asked[name]].reshape(())) for name in names}
        assert factors.pop("scale_s") * factors.pop("descale_s") == 1 and set(factors.values()) == {1.0}
        causal = self.asked.get("right_bound") == 0
        out = fl.naive(q, k, v, scale=self.asked["attn_scale"], causal=causal).out
        bound[self.made[0]][...] = (self.factor * out).astype(bound[self.made[0]].dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Graph]]:
    """Puts stand-ins for torch and cuDNN in place, and returns the graphs that are made."""

    def put(unknown: tuple[str, ...] = (), factor: float = 1.0) -> list[Graph]:
        made: list[Graph] = []

        def graph(**_: Any) -> Graph:
            made.append(Graph(unknown, factor))
            return made[-1]

        def filled(shape: Any, value: float, *, dtype: Any, device: str) -> Any:
            assert device == "cuda"
            return np.full(shape, value, dtype).view(Tensor)

        stream = SimpleNamespace(cuda_stream=7)
        torch = SimpleNamespace(
            float8_e4m3fn=EIGHT, bfloat16=SIXTEEN, float32=np.dtype(np.float32), uint8=np.dtype(np.uint8), full=filled,
            zeros=lambda shape, **how: filled(shape, 0, **how), empty=lambda n, **how: filled(n, 0, **how),
            empty_like=lambda x, dtype: np.empty_like(x, dtype), cuda=SimpleNamespace(current_stream=lambda: stream),
        )  # fmt: skip
        cudnn = SimpleNamespace(
            data_type=SimpleNamespace(FP8_E4M3="e4m3", BFLOAT16="bfloat16", FLOAT="float"), pygraph=graph,
            heur_mode=SimpleNamespace(A="a", FALLBACK="b"), cudnnGraphNotSupportedError=NotSupported,
            create_handle=lambda: "handle", set_stream=lambda *, handle, stream: None,
            __version__="1.0", backend_version_string=lambda: "9.1.0",
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "cudnn", cudnn)
        return made

    return put


def operands(p: fl.Problem = P) -> list[Any]:
    return [x.astype(np.float32).astype(EIGHT).view(Tensor) for x in fl.random_inputs(p)]


def ours(p: fl.Problem = P) -> Any:
    return fl.naive(*(np.asarray(x).astype(np.float32) for x in operands(p)), causal=p.causal).out.view(Tensor)


@pytest.mark.parametrize("causal", [False, True])
def test_the_graph_is_asked_for_attention(library: Callable[..., list[Graph]], causal: bool) -> None:
    made, p = library(), P.replace(causal=causal)
    out = fp8.cudnn_beside(p, operands(p), lambda: ours(p))()
    (graph,) = made
    assert out.dtype == SIXTEEN and out.shape == (2, 3, 40, 64)
    assert graph.asked["generate_stats"] is False
    assert graph.asked["q"].said["stride"] == [40 * 3 * 64, 64, 3 * 64, 1], "a token's heads lie side by side"
    assert graph.made[0].said["stride"] == graph.asked["q"].said["stride"]
    assert graph.steps == [
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
        "build_plans",
    ]
    assert cudnn_graph.versions() == "nvidia-cudnn-frontend 1.0, cuDNN 9.1.0"


def test_an_output_in_8_bits_where_there_is_no_other(library: Callable[..., list[Graph]]) -> None:
    made = library(("bfloat16",))
    assert fp8.cudnn_beside(P, operands(), ours)().dtype == EIGHT
    assert len(made) == 2
    library(("bfloat16", "e4m3"))
    with pytest.raises(NotSupported, match="no plan"):
        fp8.cudnn_beside(P, operands(), ours)


@pytest.mark.parametrize("wrong", ["factor", "mask"])
def test_a_wrong_result_is_not_timed(library: Callable[..., list[Graph]], wrong: str) -> None:
    library(factor=1.25 if wrong == "factor" else 1.0)
    p = P.replace(causal=False) if wrong == "mask" else P
    with pytest.raises(ValueError, match="the result is wrong"):
        fp8.cudnn_beside(p, operands(), ours)


def test_where_it_is_missing_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(Unavailable, match=r"^cudnn cannot be imported \(.*\): pip install nvidia-cudnn-frontend$"):
        cudnn_graph.versions()


CELL = {"head_dim": 128, "causal": False, "length": 1024}
ROW = {**CELL, "tflops": 9.0, "tflops_bfloat16": 8.0, "ratio": 1.1, "ratio_of_calls": 1.0}
BESIDE = {"tflops_cudnn": 7.0, "ratio_to_cudnn": 1.29, "ratio_of_calls_to_cudnn": 1.2, "cudnn_out": "bfloat16"}


def test_results_with_and_without_it_are_valid() -> None:
    data = {"passed": True, "device": "x", "inputs": "y", "accuracy": [], "speed": [ROW, ROW | BESIDE]}
    old, new = fp8.Eight.model_validate(data), fp8.Eight.model_validate(data | {"cudnn": "1.0", "not_run": ["why"]})
    assert old.cudnn is None and new.cudnn == "1.0" and new.not_run == ("why",)
    without, with_it = fp8.table(new).splitlines()[-2:]
    assert with_it.endswith("| 1.29 |") and without.endswith("|  |")
