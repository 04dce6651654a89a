"""Gradients through torch's autograd on a GPU: by the rule, on other streams, compiled, checkpointed, over sequences."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import flashlab as fl
from flashlab.base.host import from_numpy, to_numpy
from tests.simulator.test_backward import ratios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),
]  # the frameworks' warnings are theirs

P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=300, len_kv=333, head_dim=64, dtype="bfloat16", causal=True)
NAMES = ("q", "k", "v")


def torch() -> Any:
    return importlib.import_module("torch")


def flash_attn() -> Any:
    return importlib.import_module("flashlab.integrations.flash_attn")


def leaves(p: fl.Problem, *, swapped: bool = False) -> list[Any]:
    """q, k and v on the GPU, with sequences before heads if `swapped`."""
    tensors = [from_numpy(x, "torch", "cuda") for x in fl.random_inputs(p)]
    return [(x.transpose(1, 2).contiguous() if swapped else x).requires_grad_() for x in tensors]


def judged(p: fl.Problem, **named: Any) -> float:
    """The worst row of the gradients of q, k and v, as a share of the rule's bound."""
    arrays = {name: to_numpy(name, x) for name, x in named.items()}
    found = {f"d{name}": to_numpy(name, named[name].grad) for name in NAMES}
    return max(ratios(p, arrays, found).values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("masks", [{"causal": True}, {"window": (50, 20)}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("algorithm", ["auto", "flash2"])
def test_the_rule(algorithm: str, masks: dict[str, Any], dtype: str) -> None:
    p = P.replace(dtype=dtype, causal=False).replace(**masks)
    q, k, v = leaves(p)
    out, lse = fl.attention(q, k, v, algorithm=algorithm, lse=True, **masks)
    dout = torch().randn_like(out)
    out.backward(dout)
    assert judged(p, q=q, k=k, v=v, out=out, lse=lse, dout=dout) <= 1


def test_over_sequences() -> None:
    p = P.replace(batch=1, len_q=None, len_kv=None, lengths=[(70, 141), 0, (3, 100), (164, 64), (33, 0), (0, 5)])
    q, k, v = leaves(p)
    out, lse = fl.attention(q, k, v, algorithm="auto", lengths=p.lengths, causal=True, lse=True)
    out.sum().backward()
    assert judged(p, q=q, k=k, v=v, out=out, lse=lse, dout=torch().ones_like(out)) <= 1
    ends = [
        torch().tensor([0, *n], device="cuda").cumsum(0, dtype=torch().int32)
        for n in zip(*p.lengths or (), strict=True)
    ]
    packed = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    again = flash_attn().flash_attn_varlen_func(*packed, *ends, 164, 141, causal=True)
    again.sum().backward()
    assert torch().equal(again.transpose(0, 1)[None], out)
    assert torch().equal(packed[1].grad.transpose(0, 1)[None], k.grad), "no atomic adds up dk"


def test_on_another_stream() -> None:
    """Autograd runs the backward pass on the stream of the forward pass. Its inputs come late on that one."""
    plain = leaves(P)
    fl.attention(*plain, causal=True).square().sum().backward()
    torch().cuda.synchronize()
    stream, late = torch().cuda.Stream(), [x.detach().clone().requires_grad_() for x in plain]
    with torch().cuda.stream(stream):
        torch().cuda._sleep(100_000_000)
        given = [x * 1 for x in late]
        fl.attention(*given, causal=True).square().sum().backward()
    stream.synchronize()
    for a, b in zip(plain[1:], late[1:], strict=True):
        assert torch().equal(a.grad, b.grad)


def test_compiled_and_checkpointed_with_dropout() -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    attend = flash_attn().flash_attn_func

    def layer(*x: Any) -> Any:
        return attend(*x, causal=True, dropout_p=0.25) * 2

    found: list[Any] = []
    runs = (layer, torch().compile(layer, fullgraph=True), lambda *x: checkpoint(layer, *x, use_reentrant=False))
    for run in runs:
        tensors = leaves(P, swapped=True)
        torch().manual_seed(6)
        out = run(*tensors)
        assert out.is_contiguous()
        out.sum().backward()
        found.append([out, *(x.grad for x in tensors[1:])])
    for a, b in zip(found[0], found[2], strict=True):
        assert torch().equal(a, b)
    assert [x.shape for x in found[1]] == [x.shape for x in found[0]]  # a compiler may draw another seed


def test_the_way_that_flash_attn_is_called_for_training() -> None:
    """A projection's output, sliced, in half precision, under a scaled loss."""
    qkv = torch().randn(2, 128, 3, 4, 64, device="cuda", dtype=torch().float16, requires_grad=True)
    out = flash_attn().flash_attn_func(*qkv.unbind(2), causal=True)
    (out.float().square().mean() * 1024).backward()
    assert qkv.grad.shape == qkv.shape and bool(qkv.grad.isfinite().all()) and bool(qkv.grad.any())
