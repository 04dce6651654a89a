"""Attention that torch differentiates: both passes as operators of torch's, `torch.ops.flashlab.attention` and its backward.

`fl.attention` comes here when a gradient is asked for. As operators the passes work with autograd, `torch.utils.checkpoint` and
`torch.compile`, which never look inside them. Each calls `fl.attention` or `fl.attention_backward`.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any, Unpack

from flashlab.base.host import check_no_tangent, no_tangent, refused
from flashlab.run.backward import attention_backward
from flashlab.run.call import attention as attention_forward
from flashlab.run.choose import elsewhere, one_order
from flashlab.run.randomness import state_of
from simulator import catalogue
from simulator.devices import DEVICES, Device
from simulator.errors import Said, Unavailable, UsageError, unknown
from simulator.fields import flag
from simulator.names import Backend, DeviceName
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.problem import FIELDS, MASKS, Masks, Problem, Tile, spell_masks
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["attention", "check_axes", "check_tensors", "gradients_wanted", "integers", "offsets", "torch"]

try:
    torch: Any = import_module("torch")
except ImportError as error:
    raise Unavailable(f"flashlab.integrations.torch needs PyTorch ({error}): pip install torch") from None


@spell_masks
def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "auto", lse: bool = False, tile: TileLike = None,
    backend: Backend | None = None, device: Device | DeviceName | None = None, sinks: Any = None, alibi_slopes: Any = None,
    mask: Any = None, seed: int | None = None, offset: int = 0, rng_state: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, deterministic: bool = False, **masks: Unpack[Masks],
) -> Any:  # fmt: skip
    """`fl.attention` for torch tensors, through which gradients flow back to q, k, v and `sinks`. `out` lies in memory as q does.

    It may stand in a function that `torch.compile` compiles, too. `backend=None` runs where the tensors lie: those on a CPU go to
    the emulator. `algorithm` and `tile` are the forward pass's; the backward pass is the fastest that takes the problem.
    `cu_seqlens_q` and `cu_seqlens_k`, contiguous int32 tensors, say where the sequences of a ragged batch begin, and where the
    last one ends; `lengths` says the same in numbers. With `deterministic`, dq has the same bits in each run. Gradients flow
    through the LSE, too, and none flows twice. `torch.func.grad`, `vjp` and `vmap` work. Tensors with a tangent (`jvp`) are
    refused: no kernel has forward-mode derivatives. What has no backward pass raises `UsageError` at once if a gradient is
    wanted, not when the loss is known.

    >>> import torch
    >>> from flashlab.integrations.torch import attention
    >>> q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in "qkv")
    >>> attention(q, k, v, causal=True).square().sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 40, 32])
    """
    check_tensors(q=q, k=k, v=v)
    for name, x in {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}.items():
        check_no_tangent(name, x)
    if not isinstance(algorithm, str):
        raise UsageError("algorithm", type(algorithm).__name__, "a name where gradients are wanted")
    for name in masks:
        if name not in MASKS:
            raise unknown("keyword", name, MASKS)
    said: Any = {name: FIELDS[name].checked(value) for name, value in masks.items()}
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    state = state_of(said.get("dropout"), seed, offset, rng_state)
    if state is not None:
        rng_state = torch.from_numpy(state).to(q.device)
    if (lengths := said.get("lengths")) is not None:
        if cu_seqlens_q is not None:
            raise UsageError("lengths", Said(f"{len(lengths):,} sequences"), "None with cu_seqlens_q, which say them")
        each = list(zip(*lengths, strict=True))
        for numbers, x, field, words in zip(each, (q, k), ("len_q", "len_kv"), ("queries", "keys"), strict=True):
            if sum(numbers) != x.shape[2]:
                raise UsageError("lengths", Said(f"{sum(numbers):,} {words} in all"), f"{x.shape[2]:,}, the {field}")
        cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, *numbers]).cumsum(0, dtype=torch.int32) for numbers in each)
    out, logs = _FORWARD(
        q, k, v, sinks, alibi_slopes, mask, algorithm, None if tile is None else list(Tile.parse(tile)),
        gradients_wanted(q, k, v, sinks),
        rng_state, cu_seqlens_q, cu_seqlens_k, backend or ("gpu" if q.is_cuda else "emulator"), _named(device),
        flag("deterministic", deterministic),
        *(_plain(said.get(name, FIELDS[name].default)) for name in _MASKS),
    )  # fmt: skip
    return (out, logs) if lse else out


def check_tensors(**named: Any) -> None:
    """Raises `UsageError` for anything but a torch tensor with strides."""
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            raise UsageError(name, type(x).__name__, "a torch tensor")
        if x.is_nested or x.layout != torch.strided:
            accepted = "a dense one: sequences of any lengths lie one behind the other, with cu_seqlens"
            raise UsageError(name, Said("a nested tensor" if x.is_nested else "a sparse tensor"), accepted)


def check_axes(accepted: str, **named: Any) -> None:
    """Raises `UsageError` for anything but a torch tensor. The text `accepted` says how many axes it has."""
    check_tensors(**named)
    for name, x in named.items():
        if len(x.shape) != accepted.count(",") + 1:
            raise UsageError(f"{name}.shape", tuple(x.shape), accepted)


def integers(name: str, x: Any, accepted: str) -> list[int]:
    """The numbers in a tensor of int32 or int64 along one axis. One on a GPU is waited for. Raises `UsageError`."""
    check_axes(accepted, **{name: x})
    if x.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"{name}.dtype", str(x.dtype), "torch.int32")
    return x.tolist()


def offsets(cu_seqlens_q: Any, cu_seqlens_k: Any, rows_q: int, rows_k: int) -> list[list[int]]:
    """Where sequences begin, and where the last one ends: in the rows of q, and in those of k. Raises `UsageError`."""
    found: list[list[int]] = []
    for side, given, rows in (("q", cu_seqlens_q, rows_q), ("k", cu_seqlens_k, rows_k)):
        name = f"cu_seqlens_{side}"
        numbers = integers(name, given, "(sequences + 1)")
        found.append(numbers)
        if len(numbers) < 2:
            raise UsageError(name, Said(f"{len(numbers)} offsets"), "at least 2: where a sequence begins and ends")
        if len(numbers) != len(found[0]):
            raise UsageError(name, Said(f"{len(numbers)} offsets"), f"{len(found[0])}, as cu_seqlens_q has")
        if numbers[0] != 0:
            raise UsageError(f"{name}[0]", numbers[0], "0: the first sequence begins with the first row")
        for i, (begin, end) in enumerate(pairwise(numbers), 1):
            if end < begin:
                raise UsageError(f"{name}[{i}]", end, f"at least {begin}, where the sequence begins")
        if numbers[-1] != rows:
            raise UsageError(f"{name}[{len(numbers) - 1}]", numbers[-1], f"{rows}, the rows of {side}")
    return found


def gradients_wanted(*tensors: Any) -> bool:
    """Is a gradient to flow through any of them?"""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _named(device: Device | DeviceName | None) -> str | None:
    """A device's name, which an operator takes. Raises `UsageError` for a device of one's own."""
    if device is None:
        return None
    found = Device.named(device)
    if DEVICES.get(found.name) != found:
        raise UsageError("device", found.name, "one of flashlab.DEVICES where gradients are wanted")
    return found.name


_TYPES = {bool: "bool", float: "float?", tuple: "int[]?"}
"""In an operator's schema, by the kind of a mask's values. A pair is a list, in which -1 stands for None."""
_MASKS = [name for name in MASKS if FIELDS[name].kind in _TYPES and name != "block_size"]
"""All but the lengths, which offsets say, and what no backward pass knows."""
_OPTIONS = ", ".join((
    "Tensor? rng_state, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, str backend, str? device, bool deterministic",
    *(f"{_TYPES[FIELDS[name].kind]} {name}" for name in _MASKS),
))  # fmt: skip
"""What both operators take at the end."""


def _plain(value: Any) -> Any:
    """A mask's value as an operator takes it."""
    return (
        value if value is None or isinstance(value, bool | float) else [-1 if side is None else side for side in value]
    )


def _said(value: Any) -> Any:
    """The value again."""
    return value if value is None or isinstance(value, bool | float) else tuple(None if n == -1 else n for n in value)


def _options(
    q: Any, k: Any, rng_state: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, backend: Backend, device: DeviceName | None,
    deterministic: bool, *plain: Any,
) -> tuple[Masks, dict[str, Any], bool]:  # fmt: skip
    """`_OPTIONS` as masks of a problem, as what else a call takes, and whether dq is to have the same bits in each run.

    Offsets that lie on a GPU are waited for: the plan of a call is made for lengths.
    """
    masks: Any = {name: _said(value) for name, value in zip(_MASKS, plain, strict=True)}
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        both = offsets(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2])
        masks["lengths"] = list(zip(*([b - a for a, b in pairwise(each)] for each in both), strict=True))
    return masks, {"rng_state": rng_state, "backend": backend, "device": device}, deterministic


def _forward(
    q: Any, k: Any, v: Any, sinks: Any, alibi_slopes: Any, mask: Any, algorithm: str, tile: list[int] | None,
    differentiable: bool, *options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    masks, call, deterministic = _options(q, k, *options)
    optional = {"sinks": sinks, "alibi_slopes": alibi_slopes, "mask": mask}
    given = {name: x for name, x in optional.items() if x is not None}
    if differentiable:
        _check_gradients(ATTENTION.problem({"q": q, "k": k, "v": v, **given}, **masks), given, deterministic)
    into = torch.empty_like(q)
    call |= {"out": into} if call["backend"] == "gpu" else {}
    out, lse = attention_forward(
        q, k, v, algorithm=algorithm, lse=True, tile=None if tile is None else Tile(*tile), **given, **call, **masks
    )
    return into if out is into else into.copy_(out), lse


def _check_gradients(problem: Problem, given: dict[str, Any], deterministic: bool) -> None:
    """Raises `UsageError` if no backward pass takes the problem, or has the gradient that is wanted."""
    row = catalogue.get(one_order("auto", BACKWARD) if deterministic else elsewhere("auto", BACKWARD))
    for name, x in given.items():
        known = any(FIELDS[feature].operand == name for feature in row.support.masks)
        if (x.requires_grad and name != "sinks") or not known:
            accepted = f"one without a gradient: {row.name} has none" if known else f"None: {row.name} doesn't know it"
            raise refused(name, "torch tensor, and gradients are wanted", accepted)
    row.check(problem)


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, sinks: Any, *options: Any
) -> tuple[Any, Any, Any, Any]:
    masks, call, deterministic = _options(q, k, *options)
    more: Any = call | {"dlse": dlse, "sinks": sinks, "deterministic": deterministic}
    dq, dk, dv, *dsinks = attention_backward(dout, q, k, v, out, lse, **more, **masks)
    return dq, dk, dv, dsinks[0] if dsinks else q.new_empty(0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """What the backward pass needs."""
    q, k, v, sinks, *_ = inputs
    rng_state, cu_seqlens_q, cu_seqlens_k, *ctx.plain = inputs[9:]
    ctx.set_materialize_grads(False)  # most losses don't depend on the LSE, and its gradient is None then
    ctx.save_for_backward(q, k, v, *output, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = None if dlse is None else dlse.contiguous()
    found = _BACKWARD(dout, q, k, v, out, lse, dlse, *rest, *ctx.plain)
    gradients = [x if needed else None for x, needed in zip(found, ctx.needs_input_grad[:4], strict=True)]
    return *gradients, *[None] * (len(ctx.needs_input_grad) - 4)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    del ctx, inputs, output


def _never_twice(ctx: Any, *gradients: Any) -> None:
    del ctx, gradients
    raise UsageError("create_graph", True, "False: attention has no second derivatives")


def _never_forward(ctx: Any, *tangents: Any) -> None:
    del ctx, tangents  # those of `torch.func.jvp` around `torch.func.grad`, which the door sees no more
    raise no_tangent("q, k or v")


def _forward_shapes(q: Any, *_: Any) -> tuple[Any, Any]:
    """What a compiler is told of the outputs."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_shapes(
    _: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, sinks: Any, *__: Any
) -> tuple[Any, ...]:
    del out, lse, dlse
    return *(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _operator(name: str, function: Any, schema: str, shapes: Any, keep: Any, differentiate: Any) -> Any:
    """A function that calls the operator, now registered, and can be differentiated by autograd and by `torch.func`.

    An operator's own autograd isn't made for the transformations of `torch.func`, but a `Function` may be.
    """
    made = torch.library.custom_op(f"flashlab::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    made.register_autograd(differentiate, setup_context=keep)
    operator = getattr(torch.ops.flashlab, name)

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True
        setup_context = staticmethod(keep)
        backward = staticmethod(differentiate)
        jvp = staticmethod(_never_forward)

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

    def call(*inputs: Any) -> Any:
        return (Transformed.apply if torch._C._are_functorch_transforms_active() else operator)(*inputs)

    return call


_FORWARD = _operator(
    "attention", _forward,
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, str algorithm, int[]? tile, "
    f"bool differentiable, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward_shapes, _keep, _differentiate,
)  # fmt: skip
_BACKWARD = _operator(
    "attention_backward", _backward,
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? sinks, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_shapes, _keep_nothing, _never_twice,
)  # fmt: skip
