"""Gradients through torch's autograd, and the functions of flash-attn, on the emulator."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.host import from_numpy, to_numpy
from tests.simulator.test_backward import ratios

pytestmark = [pytest.mark.torch, pytest.mark.compiler]

P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=20, len_kv=30, head_dim=24, dtype="float32", causal=True)
NAMES = ("q", "k", "v")


def torch() -> Any:
    return importlib.import_module("torch")


def door(name: str = "torch") -> Any:
    return importlib.import_module(f"flashlab.integrations.{name}")


def leaves(p: fl.Problem = P, seed: int = 0, wanted: tuple[str, ...] = NAMES) -> list[Any]:
    """q, k and v as torch's tensors, some of which require grad."""
    tensors = [from_numpy(x, "torch") for x in fl.random_inputs(p, seed)]
    return [x.requires_grad_(name in wanted) for name, x in zip(NAMES, tensors, strict=True)]


def swapped(*tensors: Any) -> list[Any]:
    """Sequences before heads, as flash-attn has them: copies, which are leaves."""
    return [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in tensors]


def judged(p: fl.Problem, tensors: list[Any], out: Any, lse: Any, dout: Any, **more: Any) -> float:
    """The worst row of the tensors' gradients, as a share of the rule's bound."""
    named: dict[str, Any] = dict(zip(NAMES, tensors, strict=True)) | {"out": out, "lse": lse, "dout": dout} | more
    arrays = {name: to_numpy(name, x) for name, x in named.items()}
    found = {f"d{name}": to_numpy(name, x.grad) for name, x in zip(NAMES, tensors, strict=True)}
    return max(ratios(p, arrays, found).values())


@pytest.mark.alike("float32", "bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_keep_to_the_rule(dtype: str) -> None:
    p = P.replace(dtype=dtype, window=(9, 0))
    tensors = leaves(p)
    out, lse = fl.attention(*tensors, **p.masks, lse=True, backend="emulator")
    dout = torch().randn(*out.shape, generator=torch().manual_seed(1)).to(out.dtype)
    out.backward(dout)
    assert judged(p, tensors, out, lse, dout) <= 1


@pytest.mark.parametrize("of_out", [True, False], ids=["and of out", "alone"])
def test_gradients_of_the_lse(of_out: bool) -> None:
    tensors, random = leaves(), torch().manual_seed(1)
    out, lse = fl.attention(*tensors, **P.masks, lse=True, backend="emulator")
    dout, dlse = (torch().randn(*x.shape, generator=random) for x in (out, lse))
    torch().autograd.backward([out, lse] if of_out else [lse], [dout, dlse] if of_out else [dlse])
    dout = dout if of_out else torch().zeros_like(out)
    assert judged(P.replace(dlse=True), tensors, out, lse, dout, dlse=dlse) <= 1
    assert judged(P.replace(dlse=True), tensors, out, lse, dout, dlse=0.9 * dlse) > 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_sinks(deterministic: bool) -> None:
    """As autograd has them of attention spelt out, with a column for the sink that no value belongs to."""
    mine, theirs = leaves(), leaves()
    sinks = [torch().tensor([0.5, -1.0, 2.0, float("-inf")], requires_grad=True) for _ in range(2)]
    out, lse = fl.attention(
        *mine, causal=True, lse=True, sinks=sinks[0], deterministic=deterministic, backend="emulator"
    )
    q, k, v = (x.repeat_interleave(P.heads // x.shape[1], 1) for x in theirs)
    hidden = torch().ones(P.len_q, P.len_kv, dtype=torch().bool).triu(P.len_kv - P.len_q + 1)
    scores = (q @ k.mT * P.scale).masked_fill(hidden, float("-inf"))
    scores = torch().cat([scores, sinks[1][:, None, None].expand(P.batch, -1, P.len_q, 1)], -1)
    loss = (scores.softmax(-1)[..., :-1] @ v).square().sum() + scores.logsumexp(-1).sin().sum()
    (out.square().sum() + lse.sin().sum()).backward()
    loss.backward()
    for a, b in zip([*mine, sinks[0]], [*theirs, sinks[1]], strict=True):
        assert torch().allclose(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.alike("True")
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_sinks_of_sequences(deterministic: bool) -> None:
    """They are the sums of those that each sequence gives alone."""
    p = P.replace(batch=1, len_q=None, len_kv=None, lengths=[(12, 14), (8, 2), (10, 14)])
    whole, alone = leaves(p), leaves(p)
    sinks = [torch().tensor([0.5, -1.0, 2.0, float("-inf")], requires_grad=True) for _ in range(2)]
    options: Any = {"causal": True, "deterministic": deterministic, "backend": "emulator"}
    fl.attention(*whole, **options, lengths=p.lengths, sinks=sinks[0]).square().sum().backward()
    for rows, keys in p.spans:
        cuts = [slice(x.start, x.stop) for x in (rows, keys, keys)]
        own = [x[:, :, cut] for x, cut in zip(alone, cuts, strict=True)]
        fl.attention(*own, **options, sinks=sinks[1]).square().sum().backward()
    for a, b in zip([*whole, sinks[0]], [*alone, sinks[1]], strict=True):
        assert torch().allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_parts_merged_by_their_lse() -> None:
    """What ring attention does: the gradients of attention over all keys reach both parts, through their LSEs, too."""
    p = P.replace(causal=False)
    whole, split = leaves(p), leaves(p)
    fl.attention(*whole, backend="emulator").square().sum().backward()
    q, k, v = split
    parts = [
        fl.attention(q, k[:, :, own], v[:, :, own], lse=True, backend="emulator")
        for own in (slice(11), slice(11, None))
    ]
    total = torch().logaddexp(parts[0][1], parts[1][1])
    sum((lse - total).exp()[..., None] * out for out, lse in parts).square().sum().backward()
    for a, b in zip(whole, split, strict=True):
        assert torch().allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_a_wrong_gradient_breaks_the_rule() -> None:
    tensors = leaves()
    out, lse = fl.attention(*tensors, causal=True, lse=True, backend="emulator")
    out.sum().backward()
    tensors[1].grad[0, 0, 3] *= 1.01
    assert judged(P, tensors, out, lse, torch().ones_like(out)) > 1


@pytest.mark.parametrize("wanted", [("q",), ("k", "v"), ("v",)], ids=" ".join)
def test_gradients_of_some(wanted: tuple[str, ...]) -> None:
    every, some = leaves(), leaves(wanted=wanted)
    for tensors in (every, some):
        fl.attention(*tensors, causal=True, backend="emulator").square().sum().backward()
    for name, a, b in zip(NAMES, every, some, strict=True):
        assert (b.grad is not None) == (name in wanted)
        assert b.grad is None or torch().allclose(a.grad, b.grad, atol=1e-5)


@pytest.mark.parametrize("lie", ["broadcast", "strided", "backwards"])
def test_however_dout_lies(lie: str) -> None:
    tensors = leaves()
    out, lse = fl.attention(*tensors, causal=True, lse=True, backend="emulator")
    whole = torch().randn(*out.shape[:3], 2 * out.shape[3], generator=torch().manual_seed(2))
    dout = {
        "broadcast": torch().ones(()).expand(out.shape),
        "strided": whole[..., ::2],
        "backwards": whole[..., : out.shape[3]].transpose(1, 2).contiguous().transpose(1, 2),
    }[lie]
    out.backward(dout)
    assert judged(P, tensors, out, lse, dout) <= 1


def test_without_gradients_nothing_is_kept() -> None:
    tensors = leaves()
    with torch().no_grad():
        assert fl.attention(*tensors, backend="emulator").grad_fn is None


def test_the_backward_pass_drops_what_the_forward_pass_dropped() -> None:
    """Out is linear in v: its product with dout is that of v with dv, for the same dropped weights alone."""
    q, k, v = leaves()
    options: dict[str, Any] = {"dropout": 0.5, "backend": "emulator"}
    out = fl.attention(q, k, v, **options, seed=7, offset=3)
    dout = torch().randn(*out.shape, generator=torch().manual_seed(4))
    out.backward(dout)
    for seed, equal in ((7, True), (8, False)):
        with torch().no_grad():
            again = fl.attention(q, k, v, **options, seed=seed, offset=3)
        assert torch().allclose((again * dout).sum(), (v * v.grad).sum(), rtol=1e-4) == equal


def test_checkpointed() -> None:
    """What is computed twice is the same twice, dropout included: its seed is of torch's generator."""
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    found: list[Any] = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        tensors = swapped(*leaves())
        torch().manual_seed(5)
        run(lambda *x: door("flash_attn").flash_attn_func(*x, dropout_p=0.5), *tensors).square().sum().backward()
        found.append([x.grad for x in tensors])
    for a, b in zip(*found, strict=True):
        assert torch().allclose(a, b, atol=1e-5)


def test_compiled_in_one_graph() -> None:
    """With a shape that changes, and a rate of dropout."""
    attend = door("flash_attn").flash_attn_func

    def layer(*x: Any) -> Any:
        return attend(*x, causal=True, window_size=(9, -1), dropout_p=0.25).sin()

    compiled = torch().compile(layer, fullgraph=True, backend="aot_eager")
    for p in (P, P.replace(len_q=24, len_kv=24)):
        found: list[Any] = []
        for function in (layer, compiled):
            tensors = swapped(*leaves(p))
            torch().manual_seed(6)
            out = function(*tensors)
            out.sum().backward()
            found.append([out, *(x.grad for x in tensors)])
        for a, b in zip(*found, strict=True):
            assert torch().allclose(a, b, atol=1e-5)


def test_an_operator_as_torch_wants_it() -> None:
    """Schema, autograd, and what a compiler is told of the outputs: also in flash-attn's layout."""
    assert door().attention
    tensors = [x.detach().transpose(1, 2).requires_grad_() for x in swapped(*leaves())]
    options = [None, None, None, "emulator", None, False, True, [9, -1], 0.3, None, False, None, False]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    found = torch().library.opcheck(
        torch().ops.flashlab.attention, (*tensors, None, None, None, "auto", None, True, *options), test_utils=checks
    )
    assert found == dict.fromkeys(checks, "SUCCESS")


def test_no_second_derivatives() -> None:
    q, k, v = leaves()
    (dq,) = torch().autograd.grad(fl.attention(q, k, v, backend="emulator").sum(), q, create_graph=True)
    with pytest.raises(fl.UsageError, match="create_graph = True: expected False: attention has no second derivatives"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, at the first tangent
@pytest.mark.parametrize("of", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("wanted", [False, True], ids=["", "and requires grad"])
@pytest.mark.parametrize("by", ["fl.attention", "torch.attention", "flash_attn_func"])
def test_a_tangent_is_refused(by: str, wanted: bool, of: str) -> None:
    """Forward-mode differentiation would find a derivative of 0."""
    forward = importlib.import_module("torch.autograd.forward_ad")
    named = dict(zip(NAMES, leaves(P.replace(kv_heads=4)), strict=True))
    named = {name: x.detach().requires_grad_(wanted) for name, x in (named | {"sinks": torch().zeros(4)}).items()}
    sinks = "s_aux" if by == "flash_attn_func" else "sinks"
    with forward.dual_level(), pytest.raises(fl.UsageError, match=f"{of} = torch tensor with a tangent") as refused:
        named[of] = forward.make_dual(named[of], torch().ones_like(named[of]))
        rest: dict[str, Any] = {sinks: named.pop("sinks")}
        if by == "flash_attn_func":
            door("flash_attn").flash_attn_func(**named, **rest)
        elif by == "fl.attention":
            fl.attention(**named, **rest, backend="emulator")
        else:
            door().attention(**named, **rest)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, at the first tangent
def test_a_tangent_is_refused_by_the_backward_pass() -> None:
    forward = importlib.import_module("torch.autograd.forward_ad")
    q, k, v = leaves(wanted=())
    out, lse = fl.attention(q, k, v, lse=True, backend="emulator")
    with forward.dual_level(), pytest.raises(fl.UsageError, match="dout = torch tensor with a tangent"):
        dout = forward.make_dual(out, torch().ones_like(out))
        fl.attention_backward(dout, q, k, v, out, lse, backend="emulator")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, at the first tangent
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls the kernel for each
def test_transformations_of_torch_func() -> None:
    """`grad`, `vjp` and `vmap` of `grad` have the gradients of autograd. Forward over reverse, as in a Hessian, is refused."""
    q, k, v = leaves(P.replace(batch=1))
    transforms = torch().func

    def loss(*x: Any) -> Any:
        return fl.attention(*x, causal=True, backend="emulator").square().sum()

    loss(q, k, v).backward()
    right = [x.grad for x in (q, k, v)]
    q, k, v = (x.detach() for x in (q, k, v))
    _, back = transforms.vjp(loss, q, k, v)
    each = transforms.vmap(transforms.grad(loss), (0, None, None))(torch().stack([q, q]), k, v)
    for found in (transforms.grad(loss, (0, 1, 2))(q, k, v), back(torch().ones(())), [each[1]]):
        for a, b in zip(right, found, strict=False):
            assert torch().allclose(a, b, atol=1e-4)
    for transformed in (lambda: transforms.jvp(loss, (q, k, v), (q, k, v)), lambda: transforms.hessian(loss)(q, k, v)):
        with pytest.raises(fl.UsageError, match="torch tensor with a tangent"):
            transformed()


@pytest.mark.parametrize("wanted", [(), NAMES], ids=["without gradients", "with gradients"])
def test_fl_attention_compiled_in_one_graph(wanted: tuple[str, ...]) -> None:
    tensors = leaves(wanted=wanted)
    compiled = torch().compile(
        lambda *x: fl.attention(*x, causal=True, lse=True, backend="emulator"), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(compiled(*tensors), fl.attention(*tensors, causal=True, lse=True, backend="emulator"), strict=True):
        assert torch().equal(a, b)


# flash-attn's functions


@pytest.mark.alike("window0-0.0", "window1-2.0")
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [(-1, -1), (7, 2)])
def test_flash_attn_func(window: tuple[int, int], soft_cap: float) -> None:
    q, k, v = swapped(*leaves())
    out, lse, _ = door("flash_attn").flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=window, softcap=soft_cap, return_attn_probs=True
    )
    left = None if window[0] == -1 else window[0]
    masks: Any = {"causal": True, "window": (left, 0), "scale": 0.3, "soft_cap": soft_cap}
    expected = fl.naive(*(x.transpose(1, 2) for x in (q, k, v)), **masks)
    assert np.allclose(to_numpy("out", out.transpose(1, 2)), expected.out, atol=1e-5)
    assert np.allclose(to_numpy("lse", lse), expected.lse, atol=1e-5)
    assert out.view(*out.shape[:2], -1).shape == (2, 20, 96), "whoever has flash-attn views its output so"
    out.sum().backward()
    assert [x.grad.shape == x.shape for x in (q, k, v)] == [True] * 3


def test_flash_attn_func_on_slices_of_one_projection() -> None:
    qkv = torch().randn(1, 20, 3, 2, 16, generator=torch().manual_seed(8)).requires_grad_()
    out = door("flash_attn").flash_attn_func(*qkv.unbind(2))
    assert out.is_contiguous()
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape and bool(qkv.grad.any())


@pytest.mark.alike("True")
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn_varlen_func(deterministic: bool) -> None:
    """Each sequence is as if it were alone, and so are its gradients."""
    q, k, v = whole = [x[0].detach().requires_grad_() for x in swapped(*leaves(P.replace(batch=1, len_q=30)))]
    ends_q, ends_k = (torch().tensor([0, n, n, 30], dtype=torch().int32) for n in (12, 14))
    out = door("flash_attn").flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, 18, 16, causal=True, deterministic=deterministic
    )
    out.square().sum().backward()
    for rows, keys in ((slice(0, 12), slice(0, 14)), (slice(12, 30), slice(14, 30))):
        own = [x.detach()[None, cut].requires_grad_() for x, cut in zip(whole, (rows, keys, keys), strict=True)]
        alone = door("flash_attn").flash_attn_func(*own, causal=True)
        alone.square().sum().backward()
        assert torch().equal(out[rows], alone[0])
        for x, y, cut in zip(whole, own, (rows, keys, keys), strict=True):
            assert torch().allclose(x.grad[cut], y.grad[0], atol=1e-5)


@pytest.mark.alike("True")
@pytest.mark.parametrize("of_queries", [False, True])
def test_rows_that_no_sequence_uses(of_queries: bool) -> None:
    """As if they weren't there, whatever they hold. What nobody used is 0, and so are its gradients."""
    whole = [x[0].detach().requires_grad_() for x in swapped(*leaves(P.replace(batch=1, len_q=30, len_kv=30)))]
    ends, used = (torch().tensor(each, dtype=torch().int32) for each in ([0, 14, 14, 30], [11, 0, 16]))
    rows = torch().tensor([*range(11), *range(14, 30)])
    spoilt = [x.detach().clone() for x in whole]
    for x in spoilt if of_queries else spoilt[1:]:
        x[11:14] = torch().nan
    spoilt = [x.requires_grad_() for x in spoilt]
    named = {"causal": True, "return_attn_probs": True, "seqused_k": used} | ({"seqused_q": used} if of_queries else {})
    out, lse, _ = door("flash_attn").flash_attn_varlen_func(*spoilt, ends, ends, 16, 16, **named)
    mine, fewer = slice(None) if not of_queries else rows, torch().tensor([0, 11, 11, 27], dtype=torch().int32)
    own = [whole[0][mine], whole[1][rows], whole[2][rows]]
    right, logs, _ = door("flash_attn").flash_attn_varlen_func(
        *own, fewer if of_queries else ends, fewer, causal=True, return_attn_probs=True
    )
    assert torch().equal(out[mine], right) and torch().equal(lse[:, mine], logs)
    out.square().sum().backward()
    right.square().sum().backward()
    for x, y in zip(spoilt, whole, strict=True):
        assert torch().allclose(x.grad, y.grad, atol=1e-5)
    if of_queries:
        assert not out[11:14].any() and bool((lse[:, 11:14] == -torch().inf).all())


def test_one_order_of_dq() -> None:
    """The same bits, and those of the algorithm that keeps it."""
    found = list[Any]()
    for _ in range(2):
        q, k, v = (x.detach().requires_grad_() for x in swapped(*leaves()))
        door("flash_attn").flash_attn_func(q, k, v, causal=True, deterministic=True).square().sum().backward()
        found.append(q.grad)
    assert torch().equal(*found)


def test_lengths_in_numbers() -> None:
    """The same as offsets in tensors, through `fl.attention`."""
    p = P.replace(batch=1, len_q=None, len_kv=None, lengths=[(12, 14), (8, 16)])
    tensors = leaves(p)
    out, lse = fl.attention(*tensors, lengths=[(12, 14), (8, 16)], causal=True, lse=True, backend="emulator")
    out.sum().backward()
    assert judged(p, tensors, out, lse, torch().ones_like(out)) <= 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"alibi_slopes": (2, 2)}, r"alibi_slopes.shape = \(2, 2\): expected \(heads\)"),
    ({"alibi_slopes": (4,)}, "alibi_slopes = torch tensor, and gradients are wanted: expected None"),
    ({"deterministic": 3}, "deterministic = 3: expected True or False"),
    ({"dropout_p": 0.1, "return_attn_probs": True}, "return_attn_probs = True: expected False with dropout"),
    ({"dropout_p": "a"}, "dropout_p = 'a'"),
    ({"softmax_scale": "a"}, "softmax_scale = 'a'"),
    ({"causal": 3}, "causal = 3: expected True or False"),
    ({"window_size": 3}, "window_size = 3: expected a pair"),
    ({"window_size": (-2, 0)}, r"window_size = \(-2, 0\): expected a pair"),
    ({"attention_chunk": -4}, "attention_chunk = -4: expected 0 for no chunks, or the keys of one"),
    ({"attention_chunk": True}, "attention_chunk = True: expected 0 for no chunks, or the keys of one"),
    ({"sm_margin": 8}, "sm_margin = 8: expected 0: the kernels leave no SM to others"),
    ({"qv": (2, 20, 4, 24)}, "qv = Tensor: expected None: the kernels don't have it"),
    ({"k": (2, 20, 24)}, r"k.shape = \(2, 20, 24\): expected \(batch, seqlen, heads, head_dim\)"),
    ({"s_aux": (2, 2)}, r"s_aux.shape = \(2, 2\): expected \(heads\)"),
    ({"s_aux": (4,), "learnable_sink": (4,)}, "learnable_sink = torch tensor: expected None with s_aux"),
    ({"v": (2, 20, 4, 24)}, r"v.shape = \(2, 4, 20, 24\): expected batch, heads and length \(2, 2, 30\)"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_what_flash_attn_func_refuses(change: dict[str, Any], line: str) -> None:
    given = dict(zip(NAMES, swapped(*leaves()), strict=True))
    shapes = ("alibi_slopes", "qv", "k", "v", "s_aux", "learnable_sink")
    made = {name: torch().ones(x) if name in shapes else x for name, x in change.items()}
    with pytest.raises(fl.UsageError, match=line) as refused:
        door("flash_attn").flash_attn_func(**given | made)
    assert "\n" not in str(refused.value)


def test_a_keyword_that_nobody_knows() -> None:
    with pytest.raises(TypeError, match=r"flash_attn_func\(\) got an unexpected keyword argument 'softmax_scal'"):
        door("flash_attn").flash_attn_func(*swapped(*leaves()), softmax_scal=1.0)


VARLEN: list[tuple[Callable[[Any], dict[str, Any]], str]] = [
    (lambda ends: {"cu_seqlens_k": ends[:-1]}, "cu_seqlens_k = 2 offsets: expected 3, as cu_seqlens_q has"),
    (lambda ends: {"cu_seqlens_q": ends.float()}, "cu_seqlens_q.dtype = 'torch.float32': expected torch.int32"),
    (lambda ends: {"cu_seqlens_q": ends + 1}, r"cu_seqlens_q\[0\] = 1: expected 0: the first sequence begins with"),
    (lambda ends: {"cu_seqlens_k": ends - 5}, r"cu_seqlens_k\[0\] = -5: expected 0: the first sequence begins with"),
    (lambda ends: {"cu_seqlens_k": ends * 2}, r"cu_seqlens_k\[2\] = 60: expected 30, the rows of k"),
    (
        lambda ends: {"cu_seqlens_q": ends[[0, 2, 1]]},
        r"cu_seqlens_q\[2\] = 12: expected at least 30, where the sequence",
    ),
    (
        lambda ends: {"cu_seqlens_q": ends[:1], "cu_seqlens_k": ends[:1]},
        "cu_seqlens_q = 1 offsets: expected at least 2",
    ),
    (lambda ends: {"cu_seqlens_k": ends[None]}, r"cu_seqlens_k.shape = \(1, 3\): expected \(sequences \+ 1\)"),
    (lambda ends: {"cu_seqlens_k": [0, 12, 30]}, "cu_seqlens_k = 'list': expected a torch tensor"),
    (lambda ends: {"block_table": ends}, r"k.shape = .*: expected \(pages, page_size, heads, head_dim\)"),
    (lambda ends: {"seqused_k": ends}, r"seqused_k.shape = \(3,\): expected \(2,\), one per sequence"),
    (lambda ends: {"seqused_q": ends[1:]}, r"seqused_q\[1\] = 30: expected 0 to 18, the rows of the sequence"),
    (lambda ends: {"seqused_k": -ends[:2]}, r"seqused_k\[1\] = -12: expected 0 to 18, the rows of the sequence"),
    (lambda ends: {"seqused_k": ends[1:].float()}, "seqused_k.dtype = 'torch.float32': expected torch.int32"),
    (lambda ends: {"seqused_q": -1}, "seqused_q = 'int': expected a torch tensor"),
    (lambda ends: {"v": torch().ones(12, 2, 24)}, r"v.shape = \(12, 2, 24\): expected 30 rows, as k has"),
]


@pytest.mark.parametrize("used", [False, True], ids=["", "seqused_k"])
@pytest.mark.parametrize(("change", "line"), VARLEN, ids=[line for _, line in VARLEN])
def test_what_flash_attn_varlen_func_refuses(change: Callable[[Any], dict[str, Any]], line: str, used: bool) -> None:
    """In the same words, whether `seqused_k` has the door look at the offsets, or the operator does."""
    q, k, v = (x[0].detach() for x in swapped(*leaves(P.replace(batch=1, len_q=30))))
    ends = torch().tensor([0, 12, 30], dtype=torch().int32)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    given |= {"seqused_k": torch().tensor([3, 3], dtype=torch().int32)} if used else {}
    given |= change(ends)
    with pytest.raises(fl.UsageError, match=line) as refused:
        door("flash_attn").flash_attn_varlen_func(**given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lengths": [12, 17]}, "lengths = 29 queries in all: expected 30, the len_q"),
        ({"lengths": [(12, 12), (18, 17)]}, "lengths = 29 keys in all: expected 30, the len_kv"),
        ({"cu_seqlens_q": [0, 30]}, "cu_seqlens_k = 'NoneType': expected a torch tensor"),
        ({"lengths": [30], "cu_seqlens_q": [0, 30], "cu_seqlens_k": [0, 30]}, "lengths = 1 sequences: expected None"),
    ],
)
def test_lengths_and_offsets_that_the_door_refuses(options: dict[str, Any], line: str) -> None:
    """By the name that the caller said."""
    tensors = leaves(P.replace(batch=1, len_q=30))
    made = {name: torch().tensor(x) if name.startswith("cu") else x for name, x in options.items()}
    with pytest.raises(fl.UsageError, match=line):
        door().attention(*tensors, **made)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, r"q = torch array on the CPU: expected a CuPy, torch or JAX array in GPU memory"),
        ({"backend": "emulator", "algorithm": fl.naive}, "algorithm = <function naive.*: expected one of"),
        ({"backend": "emulator", "device": fl.DEVICES["h100"].replace(sms=3)}, "device = 'h100': expected one of"),
        ({"backend": "emulator", "out": 3}, "out = int: expected None where q, k or v requires grad"),
        ({"backend": "emulator", "causl": True}, "keyword = 'causl'"),
    ],
)
def test_what_attention_refuses_where_gradients_are_wanted(options: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError, match=line) as refused:
        fl.attention(*leaves(), **options)
    assert "\n" not in str(refused.value)
