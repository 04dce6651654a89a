"""What torch asks of an operator beside gradients: autocast, batches of 0, narrow values, rows that nobody uses, and to be seen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.host import to_numpy
from flashlab.run import arrays, nvrtc, tma
from tests.flashlab.integrations.test_torch import NAMES, P, door, leaves, swapped, torch
from tests.flashlab.run.fake import FakeCupy, Kernel, installed
from tests.work import calls

pytestmark = [pytest.mark.torch, pytest.mark.compiler]

OURS = str(Path(fl.__file__).parent)


def gradients(out: Any, tensors: Any) -> list[Any]:
    return list(torch().autograd.grad(out.float().square().sum(), tensors))


@pytest.mark.parametrize("by", ["torch.attention", "fl.attention", "without gradients"])
def test_autocast(by: str) -> None:
    """q, k and v become autocast's dtype, as they do in torch's own attention. Gradients have the dtype of the leaves."""
    half = torch().bfloat16
    tensors = leaves(P.replace(kv_heads=4, len_kv=20))
    tensors[1] = tensors[1].detach().to(torch().float16).requires_grad_()
    options: dict[str, Any] = {"causal": True} | ({} if by == "torch.attention" else {"backend": "emulator"})
    attend = door().attention if by == "torch.attention" else fl.attention
    with torch().autocast("cpu", half), torch().set_grad_enabled(by != "without gradients"):
        out = attend(*tensors, **options)
        theirs = torch().nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    assert out.dtype == theirs.dtype == half
    plain = [x.detach().to(half).requires_grad_() for x in tensors]
    right = attend(*plain, **options)
    assert torch().equal(out, right)
    if by != "without gradients":
        for x, found, wanted in zip(tensors, gradients(out, tensors), gradients(right, plain), strict=True):
            assert found.dtype == x.dtype and torch().equal(found, wanted.to(x.dtype))


def test_autocast_leaves_doubles_alone() -> None:
    """SDPA leaves them, too, and no kernel takes them."""
    q, k, v = (x.detach().double() for x in leaves())
    with torch().autocast("cpu", torch().bfloat16), pytest.raises(fl.UsageError, match=r"q.dtype = 'float64'"):
        door().attention(q, k, v)


def test_autocast_of_another_device_changes_nothing() -> None:
    torch().set_autocast_enabled("cuda", True)  # the context manager warns where there is no GPU
    try:
        assert fl.attention(*(x.detach() for x in leaves()), backend="emulator").dtype == torch().float32
    finally:
        torch().set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("by", ["torch.attention", "fl.attention"])
def test_values_of_fewer_columns(by: str) -> None:
    """They are padded and cropped: `out` and gradients are those of attention spelt out."""
    q, k, v = leaves()
    v = v.detach()[..., :16].requires_grad_()
    options = {"causal": True, "lse": True} | ({} if by == "torch.attention" else {"backend": "emulator"})
    out, lse = (door().attention if by == "torch.attention" else fl.attention)(q, k, v, **options)
    right = fl.naive(*(to_numpy(name, x) for name, x in zip(NAMES, (q, k, v), strict=True)), causal=True)
    assert out.shape == (2, 4, 20, 16)
    assert np.allclose(to_numpy("out", out), right.out, atol=1e-5)
    assert np.allclose(to_numpy("lse", lse), right.lse, atol=1e-5)
    found = gradients(out, (q, k, v))
    again = [x.detach().requires_grad_() for x in (q, k, v)]
    heads = [x.repeat_interleave(4 // x.shape[1], 1) for x in again]
    hidden = torch().ones(20, 30, dtype=torch().bool).triu(11)
    weights = (heads[0] @ heads[1].mT * P.scale).masked_fill(hidden, -torch().inf).softmax(-1)
    for a, b in zip(found, gradients(weights @ heads[2], again), strict=True):
        assert torch().allclose(a, b, rtol=1e-3, atol=1e-4)


def test_narrow_values_without_gradients_and_of_sequences() -> None:
    q, k, v = (x.detach() for x in leaves(P.replace(batch=1, len_q=30)))
    v = v[..., :16]
    ends = torch().tensor([0, 12, 30], dtype=torch().int32)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    out = door("flash_attn").flash_attn_varlen_func(*rows, ends, ends, 18, 18, causal=True)
    for cut in (slice(0, 12), slice(12, 30)):
        alone = fl.attention(*(x[:, :, cut] for x in (q, k, v)), causal=True, backend="emulator")
        assert torch().equal(out[cut].transpose(0, 1)[None], alone)


def test_the_copy_of_narrow_values_is_counted() -> None:
    """`padded` says what the padding reads and writes, and the problem that the kernels get then."""
    p = P.replace(head_dim_v=16)
    whole, copy = door().padded(p)
    assert fl.count("flash2", whole).hbm.read > 0 and whole == P
    q, k, v = leaves(P)
    wide = {"v": v, "dout": q}
    assert copy == {name: x.nbytes + x[..., :16].numel() * x.element_size() for name, x in wide.items()}
    assert door().padded(P) == (P, {"v": 0, "dout": 0})
    with pytest.raises(fl.UsageError, match="head_dim_v = 32: expected at most 24, the head_dim"):
        door().padded(P.replace(head_dim_v=32))


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_batch_of_none(compiled: bool) -> None:
    """Its output is empty, its gradients have no elements, and a sink's are 0."""
    tensors = [x.detach()[:0].requires_grad_() for x in leaves()]
    sinks, attend = torch().zeros(4, requires_grad=True), door().attention

    def run(*x: Any) -> Any:  # a compiler doesn't enter `importlib`
        return attend(*x[:3], sinks=x[3], causal=True, lse=True)

    out, lse = (torch().compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*tensors, sinks)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 4, 20, 24), (0, 4, 20), torch().float32)
    out.sum().backward()
    assert [x.grad.shape for x in tensors] == [x.shape for x in tensors] and not sinks.grad.any()
    with torch().no_grad():
        assert fl.attention(*tensors, backend="emulator").shape == (0, 4, 20, 24)


REFUSED: list[tuple[str, Any, str]] = [
    ("k", (2, 2, 30, 24), r"k.shape = \(2, 2, 30, 24\): expected batch 0, as q has"),
    ("v", (2, 2, 30, 24), r"v.shape = \(2, 2, 30, 24\): expected batch 0, as q has"),
    ("k", (0, 2, 30, 16), r"k.shape = \(1, 2, 30, 16\): expected batch 1 and head_dim 24, as q has"),
    ("q", (0, 3, 20, 24), "kv_heads = 2: expected a divisor of heads"),
]


@pytest.mark.parametrize(("name", "shape", "line"), REFUSED, ids=[line for *_, line in REFUSED])
def test_what_a_batch_of_none_is_refused_for(name: str, shape: Any, line: str) -> None:
    given = {each: x.detach()[:0] for each, x in zip(NAMES, leaves(), strict=True)}
    with pytest.raises(fl.UsageError, match=line) as refused:
        door().attention(**given | {name: torch().zeros(shape)})
    assert "\n" not in str(refused.value)


def test_more_columns_of_values_are_refused() -> None:
    q, k, v = leaves(P.replace(head_dim=32))
    line = r"v.shape = \(2, 2, 30, 32\): expected at most 24 columns, as many as q has"
    with pytest.raises(fl.UsageError, match=line):
        door().attention(q[..., :24], k[..., :24], v)
    line = r"v.shape = \(2, 2, 30, 16\): expected 32 columns, as q has: flashlab.integrations.torch.attention pads"
    options = [None, None, None, "emulator", None, False, True, None, None, None, False, None, False]
    with pytest.raises(fl.UsageError, match=line):
        torch().ops.flashlab.attention(q, k, v[..., :16], None, None, None, "auto", None, True, *options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_refused(layout: str) -> None:
    nested = torch().nested.nested_tensor(
        [torch().zeros(3, 2, 8), torch().zeros(5, 2, 8)], layout=getattr(torch(), layout)
    )
    with pytest.raises(
        fl.UsageError, match="q = a nested tensor: expected a dense one: sequences of any lengths"
    ) as refused:
        door().attention(nested, nested, nested)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_used_rows_need_offsets(name: str) -> None:
    with pytest.raises(fl.UsageError, match=f"{name} = Tensor: expected None without cu_seqlens_q"):
        door().attention(*leaves(), **{name: torch().tensor([3, 3])})


def test_used_rows_compile_in_one_frame() -> None:
    """They are read inside the operator, so other numbers need no other graph."""
    attend, frames = door("flash_attn").flash_attn_varlen_func, []

    def counted(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    def layer(q: Any, k: Any, v: Any, ends: Any, used: Any) -> Any:
        return attend(q, k, v, ends, ends, 18, 18, causal=True, seqused_q=used, seqused_k=used).sin()

    compiled = torch().compile(layer, fullgraph=True, backend=counted)
    tensors = [x[0].detach().requires_grad_() for x in swapped(*leaves(P.replace(batch=1, len_q=30)))]
    ends = torch().tensor([0, 12, 30], dtype=torch().int32)
    for used in ([3, 18], [12, 7], [12, 18]):
        numbers = torch().tensor(used, dtype=torch().int32)
        found, right = compiled(*tensors, ends, numbers), layer(*tensors, ends, numbers)
        assert torch().equal(found, right)
        for a, b in zip(gradients(found, tensors), gradients(right, tensors), strict=True):
            assert torch().allclose(a, b, atol=1e-5)
    assert len(frames) == 1


def test_offsets_on_a_gpu_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph can't wait for them. (On a GPU: test_torch_gpu.py.)"""

    class Far(torch().Tensor):
        is_cuda = True

    q, k, v = (x.detach()[0].transpose(0, 1) for x in leaves(P.replace(batch=1, len_q=30)))
    ends = torch().tensor([0, 12, 30], dtype=torch().int32)
    monkeypatch.setattr(torch().cuda, "is_current_stream_capturing", lambda: True)
    line = "cu_seqlens_q = torch tensor on a GPU: expected one on the CPU while a CUDA graph is captured"
    with pytest.raises(fl.UsageError, match=line) as refused:
        door("flash_attn").flash_attn_varlen_func(q, k, v, ends.as_subclass(Far), ends, 18, 18)
    assert "\n" not in str(refused.value)
    assert door("flash_attn").flash_attn_varlen_func(q, k, v, ends, ends, 18, 18).shape == q.shape


def test_a_mode_sees_the_operators() -> None:
    """And what it sees gives the bits that a call gives which passes by the dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    tensors = leaves()
    plain = fl.attention(*tensors, causal=True, backend="emulator")
    wanted = [plain, *gradients(plain, tensors)]
    assert seen == []
    with Watch():
        out = fl.attention(*tensors, causal=True, backend="emulator")
        found = [out, *gradients(out, tensors)]
    for a, b in zip(found, wanted, strict=True):
        assert torch().equal(a, b)
    names = [name for name in seen if name.startswith("flashlab")]
    assert names == ["flashlab.attention.default", "flashlab.attention_backward.default"]


def test_one_checkpoint_of_each_kind() -> None:
    """Reentrant, not reentrant, and one that keeps what the operator returned."""
    kinds = importlib.import_module("torch.utils.checkpoint")
    policy = kinds.CheckpointPolicy

    def kept(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        ours = op == torch().ops.flashlab.attention.default
        return policy.MUST_SAVE if ours else policy.PREFER_RECOMPUTE

    def layer(*x: Any) -> Any:
        return fl.attention(*x, causal=True, backend="emulator").sin()

    options: list[dict[str, Any]] = [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": lambda: kinds.create_selective_checkpoint_contexts(kept)},
    ]
    tensors = leaves()
    right = gradients(layer(*tensors), tensors)
    for each in options:
        fresh = [x.detach().clone().requires_grad_() for x in tensors]
        kinds.checkpoint(layer, *fresh, **each).square().sum().backward()
        for a, b in zip(right, fresh, strict=True):
            assert torch().allclose(a, b.grad, atol=1e-5)


@pytest.mark.parametrize("used", [None, 13], ids=["", "some rows"])
def test_gradients_lie_as_their_tensors(used: int | None) -> None:
    """In flash-attention's layout they are what a projection's backward pass takes without a copy. A compiler is told so."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in swapped(*leaves(P.replace(batch=1, len_kv=20))))
    ends, rows = (None, None) if used is None else (torch().tensor(x, dtype=torch().int32) for x in ([0, 20], [used]))
    ragged: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_q": rows, "seqused_k": rows}
    out, lse = door().attention(q, k, v, causal=True, lse=True, **ragged)
    found = torch().autograd.grad(out.sum(), (q, k, v))
    assert [x.stride() for x in (out, *found)] == [x.stride() for x in (q, q, k, v)]
    options = [None, ends, ends, "emulator", None, False, True, None, None, None, False, None, False, rows, rows]
    given = [x.detach() for x in (torch().ones_like(out), q, k, v, out, lse)]
    backward = torch().ops.flashlab.attention_backward
    torch().library.opcheck(backward, (*given, None, None, *options), test_utils=("test_schema", "test_faketensor"))
    for a, b in zip(found, backward(*given, None, None, *options), strict=False):
        assert torch().equal(a, b)


# On a stand-in for a GPU, whose memory is the CPU's


class OnTheCpu(arrays._TorchArrays):
    """Torch's tensors on the CPU, as if they were on that GPU."""

    def view(self, name: str, x: Any) -> arrays.View:
        dtype = self._names[x.dtype]
        strides = tuple(n * arrays.WIDTH[dtype] for n in x.stride())
        return arrays.View(x.data_ptr(), tuple(x.shape), strides, dtype, 0, x)

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        del device
        return partial(torch().empty, shape, dtype=self._dtypes[dtype])

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        return arrays.from_the_pool(nbytes)

    def queue(self, device: int) -> int:
        return 1234 + device

    def stream(self, device: int) -> Any:
        return arrays._ANYWHERE


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The operator on it. Kernels do nothing there."""
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda *_, arch: nvrtc.Compiled(image=arch.encode(), log=""))
    monkeypatch.setattr(tma, "descriptor", lambda *_: np.zeros((), tma.DESCRIPTOR)[()])
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    with installed(FakeCupy()):
        attend, made = door().attention, OnTheCpu()
        monkeypatch.setattr(arrays, "_framework_named", lambda root: made)
        yield lambda *x: attend(*x, causal=True, backend="gpu")


def test_a_warm_call_does_little(on_gpu: Any) -> None:
    """Function calls that flashlab makes: without gradients, with a graph for them, and forward and backward together."""
    tensors = leaves(P.replace(dtype="float16", kv_heads=4, len_kv=20))
    plain, dout = [x.detach() for x in tensors], torch().ones_like(tensors[0])

    def both() -> None:
        torch().autograd.grad(on_gpu(*tensors), tensors, dout)

    made = list[int]()
    for call in (lambda: on_gpu(*plain), lambda: on_gpu(*tensors), both):
        call()
        made.append(min(calls(call, by=OURS) for _ in range(9)))  # the first at an address looks at more
    assert made[0] <= 76 and made[1] <= 84 and made[2] <= 168, made


def test_gradients_on_a_gpu_lie_as_their_tensors(on_gpu: Any) -> None:
    """The kernels write them there, which tests with a GPU look at."""
    tensors = [
        x.detach().transpose(1, 2).requires_grad_() for x in swapped(*leaves(P.replace(dtype="float16", head_dim=32)))
    ]
    tensors[1] = tensors[1].detach().contiguous().requires_grad_()
    found = torch().autograd.grad(on_gpu(*tensors).sum(), tensors)
    assert [x.stride() for x in found] == [x.stride() for x in tensors]


def test_what_has_no_backward_pass_is_refused_after_a_call_without_gradients(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for a call that wants no gradient isn't taken for one that does."""
    tensors = leaves(P.replace(dtype="float16"))
    on_gpu(*(x.detach() for x in tensors))

    def refuses(*_: Any, **__: Any) -> None:
        raise fl.UsageError("q", "this", "that")

    monkeypatch.setattr(importlib.import_module("flashlab.run.autograd"), "_check_shapes", refuses)
    with pytest.raises(fl.UsageError, match="q = 'this'"):
        on_gpu(*tensors)
    on_gpu(*(x.detach() for x in tensors))
