"""Attention that torch differentiates: both passes as operators of torch's, `torch.ops.flashlab.attention` and its backward.

`fl.attention` comes here when a gradient is asked for. As operators the passes work with autograd, `torch.utils.checkpoint` and
`torch.compile`, which never look inside them. Each calls what `fl.attention` or `fl.attention_backward` call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

from flashlab.base.host import autocast, check_no_tangent, refused
from flashlab.run.choose import elsewhere, one_order
from flashlab.run.facade import called
from flashlab.run.operators import operator, torch
from flashlab.run.randomness import state_of
from simulator import catalogue
from simulator.devices import DEVICES, Device
from simulator.errors import Said, UsageError, unknown
from simulator.fields import flag
from simulator.names import Backend, DeviceName
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.problem import FIELDS, MASKS, Masks, Problem, Tile, spell_masks
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = [
    "attention",
    "backward_pass",
    "check_axes",
    "check_tensors",
    "forward_pass",
    "gradients_wanted",
    "integers",
    "offsets",
    "padded",
    "torch",
]


@spell_masks
def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "auto", lse: bool = False, tile: TileLike = None,
    backend: Backend | None = None, device: Device | DeviceName | None = None, sinks: Any = None, alibi_slopes: Any = None,
    mask: Any = None, seed: int | None = None, offset: int = 0, rng_state: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, deterministic: bool = False, seqused_q: Any = None, seqused_k: Any = None, **masks: Unpack[Masks],
) -> Any:  # fmt: skip
    """`fl.attention` for torch tensors, through which gradients flow back to q, k, v and `sinks`. `out` lies in memory as q does,
    and each gradient as its tensor does.

    It may stand in a function that `torch.compile` compiles, too. `backend=None` runs where the tensors lie: those on a CPU go to
    the emulator. `algorithm` and `tile` are the forward pass's; the backward pass is the fastest that takes the problem.
    `cu_seqlens_q` and `cu_seqlens_k`, contiguous int32 tensors, say where the sequences of a ragged batch begin, and where the
    last one ends; `lengths` says the same in numbers. `seqused_q` and `seqused_k`, int32 `(sequences,)`, say how many of a
    sequence's rows are used, from its first: of the others `out` and gradients are 0, and the LSE is -inf. With `deterministic`,
    dq has the same bits in each run. Gradients flow through the LSE, too, and none flows twice. `torch.func.grad`, `vjp` and
    `vmap` work. Tensors with a tangent (`jvp`) are refused: no kernel has forward-mode derivatives. What has no backward pass
    raises `UsageError` at once if a gradient is wanted, not when the loss is known.

    Under `torch.autocast` q, k and v become tensors of its dtype, as in torch's own attention. A batch of 0 has an empty output.
    v may have fewer columns than q and k: it is padded with zeros, and `out` has as many columns as v. `padded` counts the copies.

    >>> import torch
    >>> from flashlab.integrations.torch import attention
    >>> q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in "qkv")
    >>> attention(q, k, v, causal=True).square().sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 40, 32])
    """
    check_tensors(q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    more = {"sinks": sinks, "alibi_slopes": alibi_slopes, "mask": mask, "rng_state": rng_state}
    if not sinks is alibi_slopes is mask is rng_state is None:
        check_tensors(**{name: x for name, x in more.items() if x is not None})
    if torch.autograd.forward_ad._current_level >= 0:
        for name, x in ({"q": q, "k": k, "v": v} | more).items():
            check_no_tangent(name, x)
    if (lengths := masks.get("lengths")) is not None:
        masks["lengths"] = FIELDS["lengths"].checked(lengths)  # what is decided is kept by them, and not by a list
    known = decided(algorithm, tile, device, deterministic, masks)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        if known.lengths is not None:
            raise UsageError(
                "lengths", Said(f"{len(known.lengths):,} sequences"), "None with cu_seqlens_q, which say them"
            )
    elif known.lengths is not None:
        cu_seqlens_q, cu_seqlens_k = _offsets_of(known.lengths, q, k)
    if not seqused_q is seqused_k is None:
        for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
            if x is None:
                continue
            if cu_seqlens_q is None:
                raise refused(name, type(x).__name__, "None without cu_seqlens_q, which say where sequences begin")
            check_tensors(**{name: x})
    if known.dropout or not seed is rng_state is None or offset.__class__ is not int or offset:
        state = state_of(known.dropout, seed, offset, rng_state)
        if state is not None:
            rng_state = torch.from_numpy(state).to(q.device)
    columns = v.shape[-1] if len(q.shape) == len(v.shape) == 4 and v.shape[-1] != q.shape[-1] else None
    if columns is not None:
        if columns > q.shape[-1]:
            raise UsageError("v.shape", tuple(v.shape), f"at most {q.shape[-1]} columns, as many as q has")
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - columns))
    out, logs = _FORWARD(
        q, k, v, sinks, alibi_slopes, mask, known.algorithm, known.tile, gradients_wanted(q, k, v, sinks), rng_state, cu_seqlens_q,
        cu_seqlens_k, backend or ("gpu" if q.is_cuda else "emulator"), known.device, known.deterministic, *known.masks,
        seqused_q, seqused_k,
    )  # fmt: skip
    if columns is not None:
        out = out[..., :columns]
    return (out, logs) if lse else out


def forward_pass(q: Any, k: Any, v: Any, *, alibi_slopes: Any = None, **options: Any) -> tuple[Any, Any]:
    """`(out, lse)`, where torch differentiates an operator of its own that calls this. `options` are those of `_settled`."""
    wanted = gradients_wanted(q, k, v)
    with torch.no_grad():
        return _forward(q, k, v, None, alibi_slopes, None, "auto", None, wanted, *_settled(q, **options))


def backward_pass(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> list[Any]:
    """`[dq, dk, dv]` of the same. They lie in memory as q, k and v do."""
    with torch.no_grad():
        return list(_backward(dout, q, k, v, out, lse.contiguous(), None, None, *_settled(q, **options))[:3])


def _settled(
    q: Any, rng_state: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_k: Any = None, **masks: Any
) -> tuple[Any, ...]:  # fmt: skip
    """What an operator takes at the end. As torch's own operators have it, it says which results have the same bits in each run."""
    known = decided("auto", None, None, torch.are_deterministic_algorithms_enabled(), masks)
    backend = "gpu" if q.is_cuda else "emulator"
    return rng_state, cu_seqlens_q, cu_seqlens_k, backend, None, known.deterministic, *known.masks, None, seqused_k


class _Call(NamedTuple):
    """What else a call says, checked, as the operator takes it."""

    algorithm: str
    tile: tuple[int, int] | None
    device: str | None
    deterministic: bool
    dropout: float | None
    lengths: Any
    masks: tuple[Any, ...]


def decided(algorithm: Any, tile: TileLike, device: Any, deterministic: Any, masks: Any) -> _Call:
    """Decided once for options that can be kept. A list, say, for a tile can't, and a compiler doesn't look into what is kept."""
    if not torch.compiler.is_compiling():
        try:
            return _call(algorithm, tile, device, deterministic, **masks)
        except TypeError:
            pass
    return _call.__wrapped__(algorithm, tile, device, deterministic, **masks)


@functools.lru_cache(maxsize=4096, typed=True)
def _call(algorithm: Any, tile: TileLike, device: Any, deterministic: Any, **masks: Any) -> _Call:
    """Raises `UsageError`."""
    if not isinstance(algorithm, str):
        raise UsageError("algorithm", type(algorithm).__name__, "a name where gradients are wanted")
    for name in masks:
        if name not in MASKS:
            raise unknown("keyword", name, MASKS)
    said: Any = {name: FIELDS[name].checked(value) for name, value in masks.items()}
    return _Call(
        algorithm,
        None if tile is None else (Tile.parse(tile).rows, Tile.parse(tile).cols),
        _named(device),
        flag("deterministic", deterministic),
        said.get("dropout"),
        said.get("lengths"),
        tuple(_swapped(said.get(name, FIELDS[name].default), None, -1) for name in _MASKS),
    )


def _offsets_of(lengths: Any, q: Any, k: Any) -> list[Any]:
    """Where sequences of these lengths begin, in the rows of q and of k, as tensors. Raises `UsageError`."""
    check_axes("(batch, heads, length, head_dim)", q=q, k=k)
    each = list(zip(*lengths, strict=True)) or [(), ()]
    for numbers, x, field, words in zip(each, (q, k), ("len_q", "len_kv"), ("queries", "keys"), strict=True):
        if sum(numbers) != x.shape[2]:
            raise UsageError("lengths", Said(f"{sum(numbers):,} {words} in all"), f"{x.shape[2]:,}, the {field}")
    return [torch.tensor([0, *numbers]).cumsum(0, dtype=torch.int32) for numbers in each]


def padded(problem: Problem) -> tuple[Problem, dict[str, int]]:
    """The problem that kernels get for one whose v has fewer columns, and the bytes that the padding reads and writes beside
    them, by tensor: "v" in the forward pass, and "dout" in the backward pass. What is cropped is a view.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=100, head_dim=192, head_dim_v=128, dtype="float16", causal=True)
    >>> same, copy = padded(p)
    >>> same.head_dim_v, copy["v"] == 2 * 100 * (128 + 192) * 2
    (192, True)
    """
    width, narrow = problem.head_dim, problem.head_dim_v
    if narrow > width:
        raise UsageError("head_dim_v", narrow, f"at most {width}, the head_dim")
    row = 0 if narrow == width else (narrow + width) * problem.itemsize
    rows = {"v": problem.kv_heads * problem.len_kv, "dout": problem.heads * problem.len_q}
    return problem.replace(head_dim_v=None), {name: problem.batch * n * row for name, n in rows.items()}


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
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        here = "one on the CPU while a CUDA graph is captured: a launch is planned for its numbers"
        raise refused(name, "torch tensor on a GPU", here)
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
    if torch.is_grad_enabled():
        for x in tensors:  # a loop takes half as long as `any` does
            if x is not None and x.requires_grad:
                return True
    return False


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
    "Tensor? seqused_q=None, Tensor? seqused_k=None",
))  # fmt: skip
"""What both operators take at the end."""


def _swapped(value: Any, old: int | None, new: int | None) -> Any:
    """A pair in which one side's value stands for another; anything else as it is."""
    pair: Any = value
    return tuple(new if side == old else side for side in pair) if isinstance(value, tuple | list) else value


@functools.lru_cache(maxsize=4096, typed=True)
def _said(*plain: Any) -> dict[str, Any]:
    """What an operator takes of masks, as masks again, without those that have their defaults."""
    said = {name: _swapped(x, -1, None) for name, x in zip(_MASKS, plain, strict=True)}
    return {name: x for name, x in said.items() if x != FIELDS[name].default}


class _Options(NamedTuple):
    """`_OPTIONS` as masks of a problem, as what else a call takes, whether dq is to have the same bits in each run, and the rows
    of q and k that are used (None: all)."""

    masks: Any
    call: dict[str, Any]
    deterministic: bool
    rows_q: Any
    rows_k: Any


def _options(
    q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, backend: Backend, device: DeviceName | None, deterministic: bool,
    *rest: Any,
) -> _Options:  # fmt: skip
    """Offsets that lie on a GPU are waited for: the plan of a call is made for lengths."""
    *plain, seqused_q, seqused_k = rest
    try:
        masks: Any = _said(*plain).copy()
    except TypeError:  # a dispatcher makes lists of pairs
        masks = _said(*(_swapped(x, -1, -1) for x in plain)).copy()
    call: dict[str, Any] = {"backend": backend, "device": device}
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _Options(masks, call, deterministic, None, None)
    check_axes("(batch, heads, length, head_dim)", q=q, k=k)
    both = offsets(cu_seqlens_q, cu_seqlens_k, q.shape[2], k.shape[2])
    found = [used(name, x, begins) for name, x, begins in zip(_USED, (seqused_q, seqused_k), both, strict=True)]
    rows = [
        None if x is None else torch.tensor([i for span in x for i in span], dtype=torch.int64, device=q.device)
        for x in found
    ]
    spans = [x or list(map(range, begins, begins[1:])) for x, begins in zip(found, both, strict=True)]
    masks["lengths"] = tuple(zip(*(map(len, each) for each in spans), strict=True))
    return _Options(masks, call, deterministic, *rows)


_USED = ("seqused_q", "seqused_k")


def used(name: str, counts: Any, begins: list[int]) -> list[range] | None:
    """The rows of each sequence that are used. None stands for all rows. Raises `UsageError`."""
    if counts is None:
        return None
    numbers, spans = integers(name, counts, "(sequences)"), list(pairwise(begins))
    if len(numbers) != len(spans):
        raise UsageError(f"{name}.shape", (len(numbers),), f"({len(spans)},), one per sequence")
    for s, (n, (begin, end)) in enumerate(zip(numbers, spans, strict=True)):
        if not 0 <= n <= end - begin:
            raise UsageError(f"{name}[{s}]", n, f"0 to {end - begin}, the rows of the sequence")
    found = [range(begin, begin + n) for n, (begin, _) in zip(numbers, spans, strict=True)]
    return found if sum(numbers) < begins[-1] else None


def _picked(rows: Any, *tensors: Any) -> Any:
    """Some of the rows of tensors (batch, heads, length, …); all of them where `rows` is None, and of None nothing."""
    return [x if rows is None or x is None else x[:, :, rows] for x in tensors]


def _put_back(rows: Any, into: Any, x: Any) -> Any:
    """The opposite: a tensor of the shape of all rows, in which the others are what they were."""
    return x if rows is None else into.index_copy_(2, rows, x)


def _forward(
    q: Any, k: Any, v: Any, sinks: Any, alibi_slopes: Any, mask: Any, algorithm: str, tile: Sequence[int] | None,
    differentiable: bool, rng_state: Any, *options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    masks, call, deterministic, rows_q, rows_k = _options(q, k, *options)
    if q.ndim == v.ndim == 4 and q.shape[3] != v.shape[3]:
        raise UsageError(
            "v.shape", tuple(v.shape), f"{q.shape[3]} columns, as q has: flashlab.integrations.torch.attention pads"
        )
    every = q
    if not rows_q is rows_k is None:
        if rows_k is not None:
            ATTENTION.problem({"q": q, "k": k, "v": v})  # v has those rows, too
        (q,), (k, v) = _picked(rows_q, q), _picked(rows_k, k, v)
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes, "mask": mask, "rng_state": rng_state}
    check, empty = _CHECKS[deterministic] if differentiable else None, q.ndim and not q.shape[0]
    if empty or check and not alibi_slopes is mask is None:
        _check(given, deterministic if differentiable else None, **masks)
        check = None  # it was, and whether these have gradients isn't seen in what a call keeps
    into = torch.empty_like(q)
    if empty:
        return into, q.new_empty(q.shape[:3], dtype=torch.float32)
    if call["backend"] == "gpu":
        given["out"] = into
    tile = None if tile is None else Tile(*tile)
    out, lse = called(ATTENTION, given, masks, algorithm=algorithm, lse=True, tile=tile, differentiate=check, **call)
    out = out if out is into else into.copy_(out)
    if rows_q is None:
        return out, lse
    empty_rows = every.new_full(every.shape[:3], -torch.inf, dtype=torch.float32)
    return _put_back(rows_q, torch.zeros_like(every), out), _put_back(rows_q, empty_rows, lse)


def _check(given: Mapping[str, Any], deterministic: bool | None, **masks: Any) -> None:
    """Raises `UsageError` if no backward pass takes the problem, or has the gradient of one of its arrays. With None, none is
    wanted."""
    named = {name: x for name, x in given.items() if x is not None and name in _CHECKED}
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in named.items())
    leaves = None if deterministic is None else frozenset(name for name, x in named.items() if x.requires_grad)
    _check_shapes(shapes, leaves and leaves - {"q", "k", "v"}, bool(deterministic), **masks)


_CHECKED = {"q", "k", "v", "sinks", "alibi_slopes", "mask"}


def _checker(deterministic: bool) -> Callable[..., None]:
    """`_check` as a façade calls it, which is before it decides. So it isn't called for what was decided."""

    def check(given: Mapping[str, Any], *, algorithm: Any, lse: bool, tile: Any, backend: Any, device: Any, scales: Any,
              seed: Any, offset: Any, **masks: Any) -> None:  # fmt: skip
        del algorithm, lse, tile, backend, device, scales, seed, offset
        _check(given, deterministic, **masks)

    return check


_CHECKS = {one_order: _checker(one_order) for one_order in (False, True)}


@functools.lru_cache(maxsize=4096, typed=True)
def _check_shapes(shapes: tuple[Any, ...], leaves: frozenset[str] | None, deterministic: bool, **masks: Any) -> None:
    """Raises `UsageError` if no backward pass takes the problem, or has the gradient of one of the `leaves`. None: none is wanted.

    No problem has a batch of 0: such arrays are judged as if their batch were 1.
    """
    named = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, shape, dtype in shapes}
    if named["q"].shape[:1] == (0,):
        for name in ("q", "k", "v"):
            first, *rest = named[name].shape or (None,)
            if first != 0:
                raise UsageError(f"{name}.shape", named[name].shape, "batch 0, as q has")
            named[name].shape = (1, *rest)
    problem = ATTENTION.problem(named, **masks)
    if leaves is None:
        return
    row = catalogue.get(one_order("auto", BACKWARD) if deterministic else elsewhere("auto", BACKWARD))
    for name in named.keys() - {"q", "k", "v"}:
        known = any(FIELDS[feature].operand == name for feature in row.support.masks)
        if (name in leaves and name != "sinks") or not known:
            accepted = f"one without a gradient: {row.name} has none" if known else f"None: {row.name} doesn't know it"
            raise refused(name, "torch tensor, and gradients are wanted", accepted)
    row.check(problem)


def _backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, sinks: Any, rng_state: Any, *options: Any
) -> tuple[Any, Any, Any, Any]:
    masks, call, deterministic, rows_q, rows_k = _options(q, k, *options)
    every_q, every_k, every_v = q, k, v
    if not q.shape[0]:
        return *map(torch.empty_like, (q, k, v)), q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
    if not rows_q is rows_k is None:
        (dout, q, out, lse, dlse), (k, v) = _picked(rows_q, dout, q, out, lse, dlse), _picked(rows_k, k, v)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    given |= {"dlse": dlse, "sinks": sinks, "rng_state": rng_state}
    on_gpu, leaves = call["backend"] == "gpu", {"dq": q, "dk": k, "dv": v}
    into = {name: torch.empty_like(x) for name, x in leaves.items() if not x.is_contiguous()}
    dq, dk, dv, *dsinks = called(
        BACKWARD, given | into if on_gpu else given, masks, algorithm="auto", tile=None, one_order=deterministic, **call
    )
    if not on_gpu and into:
        dq, dk, dv = (into[x].copy_(y) if x in into else y for x, y in zip(leaves, (dq, dk, dv), strict=True))
    if rows_q is not None:
        dq = _put_back(rows_q, torch.zeros_like(every_q), dq)
    if rows_k is not None:
        dk, dv = (_put_back(rows_k, torch.zeros_like(every), x) for every, x in ((every_k, dk), (every_v, dv)))
    return dq, dk, dv, dsinks[0].sum(0) if dsinks else q.new_empty(0)  # the kernel writes one for each batch


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """What the backward pass needs."""
    q, k, v, sinks = inputs[:4]
    rng_state, cu_seqlens_q, cu_seqlens_k, *plain, seqused_q, seqused_k = inputs[9:]
    ctx.plain = plain
    ctx.set_materialize_grads(False)  # most losses don't depend on the LSE, and its gradient is None then
    ctx.save_for_backward(q, k, v, *output, sinks, rng_state, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> list[Any]:
    q, k, v, out, lse, *rest, seqused_q, seqused_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = None if dlse is None else dlse.contiguous()
    found = _BACKWARD(dout, q, k, v, out, lse, dlse, *rest, *ctx.plain, seqused_q, seqused_k)
    wanted = ctx.needs_input_grad
    return [*[x if wanted[i] else None for i, x in enumerate(found)], None, None]


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    del ctx, inputs, output


def _never_twice(ctx: Any, *gradients: Any) -> None:
    del ctx, gradients
    raise UsageError("create_graph", True, "False: attention has no second derivatives")


def _forward_shapes(q: Any, *_: Any) -> tuple[Any, Any]:
    """What a compiler is told of the outputs."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_shapes(
    _: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, sinks: Any, *__: Any
) -> tuple[Any, ...]:
    del out, lse, dlse
    return *map(torch.empty_like, (q, k, v)), q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


_FORWARD = operator(
    "attention", _forward,
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, str algorithm, int[]? tile, "
    f"bool differentiable, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward_shapes, _keep, _differentiate, 0, 6,
)  # fmt: skip
_BACKWARD = operator(
    "attention_backward", _backward,
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? sinks, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_shapes, _keep_nothing, _never_twice, 1, 8,
)  # fmt: skip
