"""Peers that get the pages of `paged`: what they are asked for, by stand-ins that compute what they were asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from studies import contenders
from studies.contenders import Decode

NAMES = list(contenders.IN_PAGES)
CELL = Decode(batch=2, heads=2, kv_heads=1, len_kv=20, page_size=3, longest=30)


def attention(q: Any, pools: Any, lists: list[Any], lengths: list[int], scale: float) -> Any:
    """Attention of rows (batch, heads, dim) over pools (pages, size, kv_heads, dim), by each request's list of pages."""
    outs = list[Any]()
    for row, pages, length in zip(q.float(), lists, lengths, strict=True):
        k, v = (pool[pages.long()].flatten(0, 1)[:length].float().transpose(0, 1) for pool in pools)
        k, v = (x.repeat_interleave(len(row) // len(x), 0) for x in (k, v))
        weights = (scale * row[:, None] @ k.transpose(1, 2)).softmax(-1)
        outs.append((weights @ v)[:, 0])
    return import_module("torch").stack(outs)


class Decode:
    """FlashInfer's wrapper for decoding."""

    def __init__(self, workspace: Any, layout: str, *, use_tensor_cores: bool) -> None:
        assert workspace.numel() >= 1 << 20 and layout == "NHD" and use_tensor_cores

    def plan(self, starts: Any, indices: Any, last: Any, heads: int, kv_heads: int, dim: int, size: int, **how: Any):
        assert all(str(x.dtype) == "torch.int32" for x in (starts, indices, last)) and (heads, kv_heads) == (2, 1)
        assert how["q_data_type"] == how["kv_data_type"]
        self.lists = [indices[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
        self.lengths = [(len(own) - 1) * size + int(n) for own, n in zip(self.lists, last, strict=True)]
        self.scale = how["sm_scale"]

    def run(self, q: Any, pools: Any, *, out: Any) -> Any:
        return out.copy_(attention(q, pools, self.lists, self.lengths, self.scale))


class Batch:
    """FlashInfer's wrapper for requests of all kinds."""

    def __init__(self, layout: str, device: Any) -> None:
        assert layout == "NHD"

    def plan(self, queries: Any, starts: Any, indices: Any, lengths: Any, *sizes: int, causal: bool, **how: Any):
        assert queries.tolist() == [0, 1, 2] and sizes == (2, 1, 128, 128, 3) and causal is False
        self.lists = [indices[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
        self.lengths, self.scale = lengths.tolist(), how["sm_scale"]

    def run(self, q: Any, pools: Any, *, out: Any, lse: Any) -> Any:
        assert lse.shape == q.shape[:2]
        return out.copy_(attention(q, pools, self.lists, self.lengths, self.scale)), lse


class Node:
    """A tensor of cuDNN's graph."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def __getattr__(self, name: str) -> Callable[[Any], Node]:
        return lambda value: Node.say(self, name, value)

    def say(self, name: str, value: Any) -> Node:
        self.said[name.removeprefix("set_")] = value
        return self


class Graph:
    """cuDNN's graph. `refused` are page sizes that it has no plan for, and `factor` makes it wrong."""

    refused: tuple[int, ...] = ()
    factor = 1.0
    asked: dict[str, Any]

    def __init__(self, **_: Any) -> None:
        self.made, self.steps = Node(), list[str]()

    def tensor(self, **said: Any) -> Node:
        return Node(**said)

    def sdpa(self, **asked: Any) -> tuple[Node, None]:
        self.asked = asked
        assert asked["generate_stats"] is False and asked["use_padding_mask"] is True
        return self.made, None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: self.steps.append(name)

    def check_support(self) -> None:
        self.steps.append("check_support")
        if self.asked["k"].said["dim"][2] in self.refused:
            raise ValueError("no plan:\nblock size")

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, bound: dict[Any, Any], workspace: Any, *, handle: Any) -> None:
        assert handle == "handle" and self.steps[-1] == "build_plans" and workspace.numel() == 1
        x = {name: bound[node] for name, node in self.asked.items() if isinstance(node, Node)}
        assert all(self.asked[name].said["stride"] == list(x[name].stride()) for name in x)
        assert x["seq_len_q"].tolist() == [[[[1]]], [[[1]]]]
        tables = x["paged_attention_k_table"]
        assert tables is x["paged_attention_v_table"] and tables.shape[1::2] == (1, 1)
        width, size = tables.shape[2], x["k"].shape[2]
        assert -(-self.asked["paged_attention_max_seq_len_kv"] // size) == width, "cuDNN refuses another width"
        lengths = x["seq_len_kv"].flatten().tolist()
        lists = [line[: -(-n // size)] for line, n in zip(tables[:, 0, :, 0], lengths, strict=True)]
        pools = [x[name].transpose(1, 2) for name in "kv"]
        found = attention(x["q"][:, :, 0], pools, lists, lengths, self.asked["attn_scale"])
        bound[self.made].copy_((self.factor * found)[:, :, None])


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts stand-ins for both libraries in place, and a CPU in the GPU's. Returns the streams that cuDNN is told."""
    told = list[int]()

    def tell(*, handle: str, stream: int) -> None:
        told.append(stream)

    cudnn = SimpleNamespace(
        data_type=SimpleNamespace(BFLOAT16="bfloat16", HALF="half", INT32="int32", FLOAT="float"), pygraph=Graph,
        heur_mode=SimpleNamespace(A="a", FALLBACK="b"), create_handle=lambda: "handle", set_stream=tell,
    )  # fmt: skip
    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode, BatchAttention=Batch)
    torch: Any = import_module("torch")
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    for name, value in (("DEVICE", "cpu"), ("BACKEND", "emulator"), ("LONGEST", 30)):
        monkeypatch.setattr(contenders, name, value)
    return told


def drawn(against: list[str], failed: dict[str, str]) -> dict[str, Any]:
    return contenders.contenders(import_module("torch"), "paged", CELL, against, failed)


@pytest.mark.torch
@pytest.mark.compiler
def test_peers_compute_the_same_over_the_same_pages(streams: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def dealt(qkv: Any, name: str) -> Callable[[], Any]:  # the emulator's, where a GPU's would be
        return lambda: contenders._attention(**dict(zip("qkv", qkv, strict=True)), algorithm=name)

    monkeypatch.setattr(contenders, "_peer", dealt)
    calls = drawn(["cudnn-paged", "flash_decoding", "flashinfer-batch", "flashinfer"], {})
    assert list(calls) == ["paged", "cudnn-paged", "flash_decoding", "flashinfer-batch", "flashinfer", "read"]
    shapes = {tuple(calls[name]().shape) for name in ("paged", *NAMES)}
    assert shapes == {(2, 2, 1, 128)} and set(streams) == {7}


@pytest.mark.torch
@pytest.mark.compiler
def test_a_wrong_peer_is_named(streams: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "factor", 1.5)
    with pytest.raises(RuntimeError, match=r"^paged and cudnn-paged differ at Decode"):
        drawn(NAMES, {})


@pytest.mark.torch
@pytest.mark.compiler
def test_a_peer_that_refuses_a_page_size_is_one_line(streams: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "refused", (3,))
    failed = dict[str, str]()
    assert list(drawn(NAMES, failed)) == ["paged", "flashinfer", "flashinfer-batch", "read"]
    assert failed == {"cudnn-paged": "ValueError: no plan: block size"}
    assert list(drawn(["cudnn-paged"], failed)) == ["paged", "read"]
