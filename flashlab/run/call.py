"""Attention on a GPU: arrays of any framework in, the same kind out; whatever a call decides is decided once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

from flashlab.run import arrays, host
from flashlab.run import plan as plans
from flashlab.run.arrays import Framework, Place, View
from flashlab.run.plan import Plan, Ready
from flashlab.run.randomness import state_of
from simulator.devices import Device
from simulator.errors import UsageError, among
from simulator.names import Backend, DeviceName
from simulator.operations.attention import ATTENTION, OPTIONAL
from simulator.operations.paged import PAGED
from simulator.problem import FIELDS, Masks, output_dtype, spell_masks
from simulator.program import Program
from simulator.simulate import Scales, TileLike

__all__ = ["attention"]

_INPUTS = ("q", "k", "v")
_SCALES = {f"scales.{name}": f"{name}_scale" for name in _INPUTS}  # as an error names them, as a plan does
_MOST_CALLS = 1024  # kept with all that is decided for their arrays


@spell_masks
def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "flash2", lse: bool = False, out: Any = None,
    tile: TileLike = None, backend: Backend = "gpu", device: Device | DeviceName | None = None, scales: Scales | None = None,
    sinks: Any = None, alibi_slopes: Any = None, mask: Any = None, block_mask: Any = None, seed: int | None = None,
    offset: int = 0, rng_state: Any = None, block_table: Any = None, seq_lens: Any = None, draft_mask: Any = None,
    k_scale: Any = None, v_scale: Any = None, **masks: Unpack[Masks],
) -> Any:  # fmt: skip
    """Attention by one of the kernels: arrays of CuPy, torch or JAX in GPU memory in, the same kind out.

    `backend="emulator"` runs the kernel on the CPU as built for `device` (None: "h100"): it takes NumPy arrays, too, and
    raises `EmulationError` for every misuse of the machine that it sees.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, head_dim)`, strided or not, float32, float16
    or bfloat16. Returns `out` like q; with `lse=True` `(out, lse)`, the LSE float32 `(batch, heads, len_q)`, natural
    logarithm. `flash3_fp8` takes float8_e4m3fn (of CuPy, which has no such dtype, arrays of uint8) and returns bfloat16;
    `scales` are what its operands are to be multiplied with, contiguous arrays of the same kind (None: 1). Its LSE is that of
    the rounded weights; with `exact_lse=True` it is that of the weights before they are rounded.

    `lengths=[100, (1, 300)]` says that the rows of a batch of 1 are sequences of these lengths (queries and keys, or as many
    of both), one behind the other: each query sees keys of its own sequence. They are numbers of Python's, which the plan is
    made for: what `cu_seqlens` holds is made of them. `flash2` and `flash3` take them, and `flash_decoding` if
    all sequences have as many queries.

    `causal` is aligned bottom-right, `window=(left, right)` inclusive; `soft_cap` bounds the scores. `sinks`, a logit per
    head that joins each row's denominator (and the LSE), and `alibi_slopes` are float32 `(heads,)`, contiguous, of the same
    kind. `mask` is bool or uint8 `(len_q, len_kv)`, True where a key is visible, for all batches and heads, beside `causal`
    and `window`; or uint8 with a bit for each pair, one row of pairs behind the other, the lowest bit first (FlashInfer's packed
    masks). Of a ragged batch only the pairs of a sequence with itself count: bits have no others, and each sequence's begin with
    a byte. `block_mask` says it instead by lists of blocks of `block_size` queries and keys: `fl.block_mask` makes them of
    torch's BlockMask, or of indptr and indices. A kernel's tile has to divide a block. `flash2` and `flash3` take them. On a GPU
    nobody looks for NaN in them. `tile=None` is the default for GPU, head dim and dtype.

    With `block_table`, int32 `(batch, pages)`, K and V lie in pools of pages, `(pages, kv_heads, page_size, head_dim)`: key n of
    request b is row `n % page_size` of page `block_table[b, n // page_size]`. A pool `(pages, page_size, kv_heads, head_dim)`
    goes in as `pool.swapaxes(1, 2)`, and isn't copied. `seq_lens`, int32 `(batch,)`, says how many keys each request has; the
    kernel reads it, so a captured graph follows it. Left out, they are those of `lengths`, or the table is full. The algorithm is
    `paged`, or on Hopper `flash3_paged`, which "auto" takes where requests have many queries. On a GPU nobody looks at the numbers
    of pages: one that isn't there is read all the same.

    Beside a `block_table`, `draft_mask` says which of its drafts a query sees: the last `len_q` keys of each request, up to 32.
    It has a word of 32 bits for each query, contiguous uint32 or int32 `(batch, len_q)`, whose bit j shows the j-th draft.
    Earlier keys are visible, but for what `causal` and `window` hide. The algorithm is `paged`.

    k and v may be quantised, float8_e4m3fn (of CuPy uint8) or int8 beside q of 16 bits: `fl.quantize_cache` makes them.
    `k_scale` and `v_scale` are what they are to be multiplied with (None: 1), contiguous float32 arrays of the same kind, from
    0 to 1e30: `(1,)`, `(kv_heads,)`, `(batch, kv_heads, len_kv)` with a scale for each key, of K also
    `(kv_heads, head_dim)`. In pages a key's scale lies like the key, `(pages, kv_heads, page_size)`. The algorithm is
    `flash_decoding`, or `paged`.

    `dropout=0.1, seed=7, offset=0` drops weights, and multiplies the others so that nothing is biased. `flash2`, `flash3` and
    `standard` do. Equal seeds and offsets drop the same: another call raises `offset` by at least batch × heads.
    `attention_backward` is told the same numbers. `rng_state` says both instead, contiguous int64 `(2,)` of the same kind: kernels
    read it when they run, so that a CUDA graph may drop other weights at each replay. The rate is rounded to a multiple of 1/256.

    Runs on the framework's current stream, on the GPU where the arrays lie. `out=` (CuPy, torch) is
    written in place and returned. Inputs never change; those that a kernel can't take as they lie are copied.
    `algorithm="auto"` is the fastest that takes the problem there, for few queries `flash_decoding`.

    Gradients flow through `out` and the LSE back to torch tensors q, k, v and sinks that require them. What `attention_backward`
    doesn't take is refused then. `flashlab.integrations.torch` is for functions that `torch.compile` compiles.

    Raises `UsageError` for bad input, `Unavailable` without a GPU or CuPy.

    >>> import cupy, flashlab as fl                                                    # doctest: +SKIP
    >>> q, k, v = (cupy.random.rand(1, 8, 1024, 64).astype("float16") for _ in "qkv")  # doctest: +SKIP
    >>> fl.attention(q, k, v, causal=True).shape                                       # doctest: +SKIP
    (1, 8, 1024, 64)
    """
    among("backend", backend, ["gpu", "emulator"])
    if block_table is not None or seq_lens is not None:
        from flashlab.run import paged

        named = {
            "scales": scales,
            "alibi_slopes": alibi_slopes,
            "mask": mask,
            "rng_state": rng_state,
        }
        for name, x in named.items():
            if x is not None:
                raise host.refused(name, type(x).__name__, "None with a block_table")
        state_of(masks.get("dropout"), seed, offset, rng_state)  # which refuses a seed that nothing needs
        default = isinstance(algorithm, str) and algorithm == "flash2"
        named = {"q": q, "k": k, "v": v, "block_table": block_table, "seq_lens": seq_lens, "draft_mask": draft_mask}
        return paged.attention(
            PAGED, named | {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale},
            algorithm="paged" if default else algorithm, lse=lse, tile=tile, backend=backend, device=device, out=out,
            **masks,
        )  # fmt: skip
    if draft_mask is not None:
        raise host.refused("draft_mask", type(draft_mask).__name__, "None without a block_table")
    if any(host.wants_gradient(x) for x in (q, k, v, sinks)):
        from flashlab.integrations import torch

        refused = {"out": out, "scales": scales, "block_mask": block_mask, "k_scale": k_scale, "v_scale": v_scale}
        for name, x in refused.items():
            if x is not None:
                raise host.refused(name, type(x).__name__, "None where q, k or v requires grad")
        return torch.attention(
            q, k, v, algorithm=algorithm, lse=lse, tile=tile, backend=backend, device=device, sinks=sinks,
            alibi_slopes=alibi_slopes, mask=mask, seed=seed, offset=offset, rng_state=rng_state, **masks,
        )  # fmt: skip
    state = state_of(masks.get("dropout"), seed, offset, rng_state)
    if isinstance(algorithm, str) and algorithm in ("flash2", "auto") and _quantized(q, k):
        algorithm = "flash_decoding"
    if backend == "emulator":
        from flashlab.run.emulated import attention as emulated

        return emulated(
            q, k, v, algorithm=plans.elsewhere(algorithm, ATTENTION), lse=lse, out=out, tile=tile, device=device,
            scales=scales, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, block_mask=block_mask,
            rng_state=rng_state if state is None else state, k_scale=k_scale, v_scale=v_scale, **masks,
        )  # fmt: skip
    if device is not None:
        raise UsageError("device", device, "None: backend 'gpu' runs where the arrays lie")
    named = {
        "q": q,
        "k": k,
        "v": v,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "mask": mask,
        "block_mask": block_mask,
        "rng_state": rng_state,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "out": out,
    }
    given = {name: x for name, x in named.items() if x is not None or name in _INPUTS}
    if scales is not None:
        given |= zip(_SCALES, Scales.of(scales), strict=True)
    if (lengths := masks.get("lengths")) is not None:
        masks["lengths"] = FIELDS["lengths"].checked(lengths)  # a plan is kept by them, and not by a list
    framework = arrays.framework_of(given)
    if out is not None and not framework.writable:
        raise UsageError("out", "an immutable array", "None: only CuPy and torch arrays are written in place")
    held = framework.shared(given)
    places = {name: framework.place(name, x) for name, x in held.items()}
    options = plans.ARCH, algorithm, tile, lse
    with framework.stream(places["q"][-1]):
        if state is not None:
            held["rng_state"] = framework.numbers(state)
            places["rng_state"] = framework.place("rng_state", held["rng_state"])
        if out is None:
            views = framework.views(places)
            first = views["q"]
            _kept(_cached_plan, _shapes(views), first.device, *options, **masks)  # raises before anything is allocated
            out = framework.empty(first.shape, output_dtype(first.dtype))
            places["out"] = framework.place("out", out)
        logs = framework.empty(places["q"][1][:3], "float32") if lse else None
        if logs is not None:
            places["lse"] = framework.place("lse", logs)
        key = tuple(places.items())
        try:
            call = _cached_call(framework, key, *options, **masks)
        except TypeError:  # as in `_kept`, but a warm call packs its keywords no second time
            call = _cached_call.__wrapped__(framework, key, *options, **masks)
        if call.ready is not None:
            call.ready.launch(allocate=framework.allocate)
        else:
            call.plan.launch_padded(_operands(framework.views(places)), allocate=framework.allocate)
        out = framework.hand_back(out, q)
        return out if logs is None else (out, framework.hand_back(logs, q))


def _quantized(q: Any, k: Any) -> bool:
    """Has k 8 bits, and q more? What is no array is refused later."""
    return getattr(getattr(k, "dtype", None), "itemsize", 0) == 1 < getattr(getattr(q, "dtype", None), "itemsize", 0)


_Shape = tuple[str, tuple[int, ...], str]


class _Call(NamedTuple):
    """What is decided once for arrays that lie where they lie: the plan, and the plan made ready for them, unless some must
    go through padded buffers."""

    plan: Plan
    ready: Ready | None


def _kept(cached: Any, *key: Any, **masks: Any) -> Any:
    """What a cached function has for a key; made anew for one that can't be kept (with a list, say, for a tile)."""
    try:
        return cached(*key, **masks)
    except TypeError:
        return cached.__wrapped__(*key, **masks)


@functools.lru_cache(maxsize=_MOST_CALLS, typed=True)
def _cached_call(
    framework: Framework,
    places: tuple[tuple[str, Place], ...],
    arch: str | None,
    algorithm: str | Program,
    tile: TileLike,
    lse: bool,
    /,
    **masks: Unpack[Masks],
) -> _Call:
    """The one look-up of a warm call: whatever its checks depend on is part of the key, so that each is made once.

    `places` are those of q, k, v, out, lse if asked for, and perhaps of scales and optional inputs.
    """
    views = framework.views(dict(places))
    plan = _kept(_cached_plan, _shapes(views), views["q"].device, arch, algorithm, tile, lse, **masks)
    arrays.check_out(views)
    if not views.keys().isdisjoint(_SCALES):
        Scales(*(views[name] for name in _SCALES)).named(plan.counts.problem, plan.counts.tile)
    operands = _operands(views)
    for name, view in views.items():
        if name in _SCALES or plan.counts.tensors[name].vector:
            arrays.check_contiguous(name, view)
    fit = all(plan.fits(name, view) for name, view in operands.items())
    return _Call(plan, plan.ready(operands) if fit else None)


def _operands(views: Mapping[str, View]) -> dict[str, View]:
    """Views by the names of the plan's operands."""
    return {_SCALES.get(name, name): view for name, view in views.items()}


def _shapes(views: Mapping[str, View]) -> tuple[_Shape, ...]:
    """Of the inputs what a plan depends on."""
    return tuple([(name, x.shape, x.dtype) for name, x in views.items() if name in _INPUTS or name in OPTIONAL])


@functools.lru_cache(maxsize=4096, typed=True)
def _cached_plan(
    shapes: tuple[_Shape, ...],
    device: int,
    arch: str | None,
    algorithm: str | Program,
    tile: TileLike,
    lse: bool,
    /,
    **masks: Unpack[Masks],
) -> Plan:
    """The plan for inputs of these shapes and dtypes on the current device."""
    del device  # part of the key
    inputs = {name: SimpleNamespace(shape=shape, dtype=dtype) for name, shape, dtype in shapes}
    problem = ATTENTION.problem(inputs, **masks)
    ATTENTION.check(problem, inputs)
    algorithm = plans.on_the_gpu(algorithm, ATTENTION, problem, tile, arch)
    return plans.gpu_plan(algorithm, problem, tile=tile, lse=lse, arch=arch)
