"""Torch's own attention by our kernels on a GPU: the profiler sees them, they keep to the rule, and graphs are captured."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import flashlab as fl
from studies import clients, families
from tests.flashlab.integrations.test_torch_gpu import NAMES, flash_attn, judged, leaves, torch

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.filterwarnings("default")]

P = fl.Problem(batch=2, heads=4, len_q=300, head_dim=64, dtype="bfloat16", causal=True)
GQA = P.replace(kv_heads=2)


def choices() -> Any:
    return importlib.import_module("torch.nn.attention")


def sdpa(*given: Any, **options: Any) -> Any:
    """On the flash backend, or not at all."""
    with choices().sdpa_kernel(choices().SDPBackend.FLASH_ATTENTION):
        return torch().nn.functional.scaled_dot_product_attention(*given, **options)


@pytest.fixture
def active() -> Iterator[None]:
    importlib.import_module("flashlab.integrations.torch").register_sdpa()
    choices().activate_flash_attention_impl("flashlab")
    yield
    choices().restore_flash_attention_impl(_raise_warn=False)


def kernels(run: Any) -> set[str]:
    """The names of the kernels that run, by torch's profiler."""
    run()  # whatever is compiled, is compiled by now
    torch().cuda.synchronize()
    activities = torch().profiler.ProfilerActivity
    with torch().profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        run()
        torch().cuda.synchronize()
    return {event.name for event in profile.events() if str(event.device_type).endswith("CUDA")}


def test_the_profiler_sees_our_kernels(active: None) -> None:
    """And none of torch's own, which are back when ours are given back."""
    tensors = leaves(P)

    def both() -> None:
        torch().autograd.grad(sdpa(*tensors, is_causal=True).sum(), tensors)

    ours = kernels(both)
    choices().restore_flash_attention_impl()
    theirs = kernels(both)
    assert any("pytorch_flash" in name for name in theirs)
    assert not any("pytorch_flash" in name for name in ours)
    forward, backward = ({name for name in ours - theirs if part in name} for part in ("flash", "backward"))
    assert forward - backward and backward, ours


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "GQA"])
def test_the_rule(active: None, shared: bool, dtype: str) -> None:
    p = (GQA if shared else P).replace(dtype=dtype)
    q, k, v = leaves(p)
    out = sdpa(q, k, v, is_causal=True, enable_gqa=shared)
    dout = torch().randn_like(out)
    out.backward(dout)
    lse = fl.attention(*(x.detach() for x in (q, k, v)), algorithm="auto", causal=True, lse=True)[1]
    assert judged(p, q=q, k=k, v=v, out=out.detach(), lse=lse, dout=dout) <= 1


def test_rows_that_lie_before_heads(active: None) -> None:
    """As a model's projections give them. Compiled, torch asserts that each result lies in memory as the operator said."""
    function = torch().nn.functional.scaled_dot_product_attention
    tensors = [x.transpose(1, 2) for x in leaves(P, swapped=True)]
    plain = sdpa(*tensors, is_causal=True)
    with choices().sdpa_kernel(choices().SDPBackend.FLASH_ATTENTION):
        compiled = torch().compile(lambda *x: function(*x, is_causal=True), fullgraph=True)(*tensors)
    assert torch().equal(plain, compiled) and plain.stride() == tensors[0].stride()
    for a, b in zip(
        torch().autograd.grad(plain.sum(), tensors), torch().autograd.grad(compiled.sum(), tensors), strict=True
    ):
        assert a.stride() == b.stride() and torch().allclose(a, b, atol=1e-2, rtol=1e-2)


def test_dropout(active: None) -> None:
    """Out is linear in v: its product with dout is that of v with dv, for the same dropped weights alone."""
    q, k, v = leaves(P.replace(dtype="float16"))
    torch().manual_seed(5)
    out = sdpa(q, k, v, dropout_p=0.5)
    dout = torch().randn_like(out)
    (dv,) = torch().autograd.grad(out, v, dout)
    left, right = (out.double() * dout.double()).sum(), (v.double() * dv.double()).sum()
    assert torch().allclose(left, right, rtol=2e-2)
    torch().manual_seed(5)
    assert torch().equal(sdpa(q, k, v, dropout_p=0.5), out) and not torch().equal(sdpa(q, k, v, dropout_p=0.5), out)


def test_varlen_attn(active: None) -> None:
    """The same bits as by flash-attention's door."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    p = GQA.replace(batch=1, len_q=500)
    packed = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in leaves(p)]
    ends = torch().tensor([0, 130, 130, 500], device="cuda", dtype=torch().int32)
    grouped = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen).parameters else {}
    )  # torch 2.11 has none
    found = varlen(*packed, ends, ends, 370, 370, window_size=(-1, 0), **grouped)
    again = flash_attn().flash_attn_varlen_func(*packed, ends, ends, 370, 370, causal=True)
    assert torch().equal(found, again)
    pairs = zip(*(torch().autograd.grad(x.float().square().sum(), packed) for x in (found, again)), strict=True)
    assert all(torch().allclose(a, b, atol=1e-2, rtol=1e-2) for a, b in pairs)


@pytest.mark.transformers
def test_transformers_sdpa(active: None) -> None:
    """A model of Transformers with `sdpa` trains on our kernels: its mean errors in bfloat16 are at most 1.1 times torch's own."""
    transformers: Any = importlib.import_module("transformers")
    small = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    given = small | {"num_key_value_heads": 2, "head_dim": 64}
    torch().manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given, attn_implementation="eager")).cuda().eval()
    tokens = torch().randint(256, (2, 256), generator=torch().Generator().manual_seed(0)).cuda()

    def answers() -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        with choices().sdpa_kernel([choices().SDPBackend.FLASH_ATTENTION, choices().SDPBackend.MATH]):
            logits = model(tokens, use_cache=False).logits.float()
            logits.square().mean().backward()
        return {"logits": logits.detach()} | {name: x.grad.float() for name, x in model.named_parameters()}

    right = answers()
    model.set_attn_implementation("sdpa")
    model.bfloat16()
    names = kernels(answers)
    ours = families.mean_error(answers(), right)
    choices().restore_flash_attention_impl()
    theirs = families.mean_error(answers(), right)
    assert not any("pytorch_flash" in name for name in names) and any("flash" in name for name in names), names
    assert ours <= clients.LIMIT * theirs


def test_a_captured_call(active: None) -> None:
    """It replays on other data in the same buffers."""
    first, second = ([x.detach() for x in leaves(p)] for p in (P, P.replace(causal=False)))
    second = [x.flip(2) for x in second]
    buffers = [x.clone() for x in first]
    expected = [sdpa(*x, is_causal=True) for x in (first, second)]
    torch().cuda.synchronize()
    graph = torch().cuda.CUDAGraph()
    with torch().cuda.graph(graph):
        captured = sdpa(*buffers, is_causal=True)
    for inputs, wanted in zip((first, second), expected, strict=True):
        for buffer, x in zip(buffers, inputs, strict=True):
            buffer.copy_(x)
        graph.replay()
        torch().cuda.synchronize()
        assert torch().equal(captured, wanted)


def test_offsets_on_the_gpu_cannot_be_captured() -> None:
    """One line of ours, and the stream goes on. Offsets on the CPU can."""
    packed = [x.detach()[0].transpose(0, 1).contiguous() for x in leaves(GQA.replace(batch=1, len_q=500))]
    near = torch().tensor([0, 130, 500], dtype=torch().int32)
    far = near.cuda()
    attend = flash_attn().flash_attn_varlen_func
    wanted = attend(*packed, near, near, 370, 370, causal=True)
    torch().cuda.synchronize()
    line = "cu_seqlens_q = torch tensor on a GPU: expected one on the CPU while a CUDA graph is captured"
    graph = torch().cuda.CUDAGraph()
    with torch().cuda.graph(graph):
        with pytest.raises(fl.UsageError, match=line):
            attend(*packed, far, far, 370, 370, causal=True)
        captured = attend(*packed, near, near, 370, 370, causal=True)
    graph.replay()
    torch().cuda.synchronize()
    assert torch().equal(captured, wanted)


def test_autocast() -> None:
    """As torch has it: float32 under autocast runs, and is answered, in its dtype."""
    tensors = leaves(P.replace(dtype="float32"))
    with torch().autocast("cuda", torch().bfloat16):
        out = fl.attention(*tensors, causal=True)
    out.float().sum().backward()
    assert out.dtype == torch().bfloat16 and [x.grad.dtype for x in tensors] == [torch().float32] * len(NAMES)
