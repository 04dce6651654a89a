"""Torch's own attention by our kernels, on the emulator: SDPA and `varlen_attn`, eager and compiled, and what is refused."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import flashlab as fl

pytestmark = [pytest.mark.torch, pytest.mark.compiler]

B, HEADS, ROWS, COLUMNS = 2, 4, 20, 24
"""float32 and this head dim are those of test_torch.py, so the same builds of the kernels serve both."""


def torch() -> Any:
    return importlib.import_module("torch")


def choices() -> Any:
    return importlib.import_module("torch.nn.attention")


def sdpa(*given: Any, **options: Any) -> Any:
    return torch().nn.functional.scaled_dot_product_attention(*given, **options)


def leaves(kv_heads: int = HEADS, keys: int = ROWS, seed: int = 0) -> list[Any]:
    random = torch().manual_seed(seed)
    shapes = ((B, HEADS, ROWS, COLUMNS), (B, kv_heads, keys, COLUMNS), (B, kv_heads, keys, COLUMNS))
    return [torch().randn(shape, generator=random).requires_grad_() for shape in shapes]


def answers(attend: Any, tensors: list[Any]) -> list[Any]:
    """The output and the gradients."""
    out = attend(*tensors)
    return [out, *torch().autograd.grad(out.square().sum(), tensors)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes that our kernels make while they are active."""
    module, made = importlib.import_module("flashlab.integrations.sdpa"), list[str]()
    for name in ("forward_pass", "backward_pass"):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, n=name, f=function, **y: made.append(n) or f(*x, **y))
    module.register_sdpa(cpu=True)
    choices().activate_flash_attention_impl("flashlab")
    yield made
    choices().restore_flash_attention_impl(_raise_warn=False)


BOTH = ["forward_pass", "backward_pass"]


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("masks", [{"is_causal": True, "enable_gqa": True}, {"scale": 0.3}], ids=str)
def test_sdpa_runs_our_kernels(calls: list[str], masks: dict[str, Any], compiled: bool) -> None:
    """`out` and gradients are those of torch's own kernels, which are back when ours are given back."""
    tensors, function = (
        leaves(2 if "enable_gqa" in masks else HEADS),
        torch().nn.functional.scaled_dot_product_attention,
    )

    def attend(*x: Any) -> Any:  # a compiler doesn't enter `importlib`
        return function(*x, **masks)

    run = torch().compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    ours = answers(run, tensors)
    assert calls == BOTH
    choices().restore_flash_attention_impl()
    theirs = answers(attend, tensors)
    assert calls == BOTH and choices().current_flash_attention_impl() is None
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride() and torch().allclose(a, b, atol=2e-5)
    assert not torch().equal(ours[0], theirs[0]), "two kernels hardly ever round alike"


@pytest.mark.long
def test_sdpa_compiled_by_inductor(calls: list[str]) -> None:
    """Which asserts that each result lies in memory as the operator said."""
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves(2)]

    function = torch().nn.functional.scaled_dot_product_attention

    def attend(*x: Any) -> Any:
        return function(*x, is_causal=True, enable_gqa=True).sin()

    found, right = answers(torch().compile(attend, fullgraph=True), tensors), answers(attend, tensors)
    assert calls == BOTH * 2
    for a, b in zip(found, right, strict=True):
        assert torch().allclose(a, b, atol=1e-5)


def test_a_call_with_a_mask_is_torchs_own(calls: list[str]) -> None:
    tensors, mask = leaves(), torch().ones(ROWS, ROWS, dtype=torch().bool).tril()
    found = answers(lambda *x: sdpa(*x, attn_mask=mask), tensors)
    assert calls == []
    choices().restore_flash_attention_impl()
    for a, b in zip(found, answers(lambda *x: sdpa(*x, attn_mask=mask), tensors), strict=True):
        assert torch().equal(a, b)


def test_dropout_has_the_seed_that_the_operator_returns(calls: list[str]) -> None:
    """Out is linear in v: its product with dout is that of v with dv, for the same dropped weights alone."""
    q, k, v = leaves()
    forward = torch().ops.aten._scaled_dot_product_flash_attention
    torch().manual_seed(5)
    out, _, _, _, _, _, state, *_ = forward(q, k, v, 0.5, False)
    dout = torch().randn(out.shape, generator=torch().manual_seed(6))
    (dv,) = torch().autograd.grad(out, v, dout)
    assert calls == BOTH and state.dtype == torch().uint64
    assert torch().allclose((out * dout).sum(), (v * dv).sum(), rtol=1e-4)
    with torch().no_grad():
        torch().manual_seed(5)
        assert torch().equal(forward(q, k, v, 0.5, False)[0], out)
        assert not torch().equal(forward(q, k, v, 0.5, False)[0], out)


@pytest.mark.alike("(5, 0)")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)], ids=str)
def test_varlen_attn(calls: list[str], window: tuple[int, int]) -> None:
    """Each sequence is as if it were alone. Masks are aligned bottom-right."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    q, k, v = tensors = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in leaves(keys=26)]
    ends = [torch().tensor([0, 8, each], dtype=torch().int32) for each in (ROWS, 26)]
    found = answers(lambda *x: varlen(*x, *ends, 12, 18, window_size=window), tensors)
    assert calls == BOTH
    masks: Any = {"causal": window[1] == 0, "window": tuple(None if side < 0 else side for side in window)}
    pieces = [[x[cut].transpose(0, 1)[None] for x, cut in zip((q, k, v), cuts, strict=True)] for cuts in (
        [slice(0, 8)] * 3, [slice(8, 20), slice(8, 26), slice(8, 26)]
    )]  # fmt: skip
    right = torch().cat([fl.attention(*each, backend="emulator", **masks)[0] for each in pieces], 1).transpose(0, 1)
    for a, b in zip(found, answers(lambda *_: right, tensors), strict=True):
        assert torch().allclose(a, b, atol=1e-5)


def test_varlen_attn_of_used_rows_and_in_place(calls: list[str]) -> None:
    module = importlib.import_module("torch.nn.attention.varlen")
    if "seqused_k" not in inspect.signature(module.varlen_attn).parameters:
        pytest.skip("torch 2.11's has no seqused_k")
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in leaves())
    ends, used = (torch().tensor(each, dtype=torch().int32) for each in ([0, 8, ROWS], [3, 12]))
    out = module.varlen_attn(q, k, v, ends, ends, 12, 12, seqused_k=used)
    kept = torch().tensor([*range(3), *range(8, ROWS)])
    fewer = torch().tensor([0, 3, 15], dtype=torch().int32)
    assert torch().equal(out, module.varlen_attn(q, k[kept], v[kept], ends, fewer, 12, 12))
    into = torch().empty_like(q)
    module.varlen_attn_out(into, q, k, v, ends, ends, 12, 12, seqused_k=used)
    assert torch().equal(into, out)


def test_rows_before_heads(calls: list[str]) -> None:
    """`_flash_attention_forward` without offsets, whose causal mask is FlashAttention's, for any lengths."""
    tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves(keys=26)]
    forward = torch().ops.aten._flash_attention_forward
    found = answers(lambda *x: forward(*x, None, None, ROWS, 26, 0.0, True, False)[0], tensors)
    right = answers(
        lambda *x: fl.attention(*(y.transpose(1, 2) for y in x), causal=True, backend="emulator").transpose(1, 2),
        tensors,
    )
    assert calls == BOTH
    for a, b in zip(found, right, strict=True):
        assert torch().allclose(a, b, atol=1e-5)


def flash(*more: Any, **named: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """A call of the operator behind `varlen_attn`, without offsets."""
    return "_flash_attention_forward", (None, None, ROWS, ROWS, 0.0, False, *(more or (False,))), named


REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    r"is_causal = True: expected False with 20 queries and 26 keys: torch's mask is top-left": (
        "_scaled_dot_product_flash_attention", (0.0, True), {"keys": 26}
    ),
    r"is_causal = True: expected False with 20 queries and 27 keys": (
        "_scaled_dot_product_flash_attention_for_cpu", (0.0, True), {"keys": 27}
    ),
    r"return_debug_mask = True: expected False: no kernel writes the probabilities": (
        "_scaled_dot_product_flash_attention", (0.0, False, True), {}
    ),
    r"dropout_p = 0.5: expected 0.0: on a CPU the operator has no place for the seed": (
        "_scaled_dot_product_flash_attention_for_cpu", (0.5,), {}
    ),
    r"q.dtype = 'float64'": ("_scaled_dot_product_flash_attention", (), {"dtype": "float64"}),
    r"query.shape = \(4, 20, 24\): expected \(batch, heads, length, head_dim\)": (
        "_scaled_dot_product_flash_attention", (), {"squeezed": True}
    ),
    r"return_debug_mask = True: expected False": flash(True),
    r"seqused_k = torch tensor: expected None without cum_seq_k": flash(seqused_k=[3, 3]),
    r"block_table = torch tensor: expected None: keys and values lie in no pages here": flash(block_table=[[0], [1]]),
}  # fmt: skip


@pytest.mark.parametrize(("line", "call"), REFUSED.items(), ids=REFUSED)
def test_what_is_refused(calls: list[str], line: str, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    name, given, named = call
    named = dict(named)
    keys, dtype, squeezed = named.pop("keys", ROWS), named.pop("dtype", "float32"), named.pop("squeezed", False)
    if "block_table" in named and "block_table" not in str(torch().ops.aten._flash_attention_forward.default._schema):
        pytest.skip("torch 2.11's operator has no block_table")
    tensors = [x.detach().to(getattr(torch(), dtype)) for x in leaves(keys=keys)]
    tensors = [x[0] for x in tensors] if squeezed else tensors
    made = {key: torch().tensor(value, dtype=torch().int32) for key, value in named.items()}
    with pytest.raises(fl.UsageError, match=line) as refused:
        getattr(torch().ops.aten, name)(*tensors, *given, **made)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "line"), [({"name": 3}, "name = 3: expected a name"), ({"cpu": 1}, "cpu = 1: expected True")]
)
def test_what_register_sdpa_refuses(options: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError, match=line):
        importlib.import_module("flashlab.integrations.torch").register_sdpa(**options)


def test_a_torch_before_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(choices(), "register_flash_attention_impl")
    with pytest.raises(fl.Unavailable, match="register_sdpa needs torch 2.11 or newer, and this is"):
        importlib.import_module("flashlab.integrations.torch").register_sdpa()


def test_without_a_cpu_a_cpu_keeps_torchs_kernels() -> None:
    """A name of one's own, and operators of a GPU alone."""
    importlib.import_module("flashlab.integrations.torch").register_sdpa("ours")
    assert "ours" in choices().list_flash_attention_impls()
    tensors = leaves()
    theirs = sdpa(*tensors)
    choices().activate_flash_attention_impl("ours")
    try:
        assert torch().equal(sdpa(*tensors), theirs) and choices().current_flash_attention_impl() == "ours"
    finally:
        choices().restore_flash_attention_impl()
