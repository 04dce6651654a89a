"""Attention: arrays of any framework in, the same kind out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from flashlab.base import host
from flashlab.run.facade import called
from flashlab.run.mixed import of_a_step
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.names import Backend, DeviceName
from simulator.operations.attention import ATTENTION
from simulator.operations.paged import PAGED
from simulator.problem import Masks, spell_masks
from simulator.program import Program
from simulator.simulate import Scales, TileLike

__all__ = ["attention"]


@spell_masks
def attention(
    q: Any, k: Any, v: Any, *, algorithm: str | Program = "flash2", lse: bool = False, out: Any = None,
    tile: TileLike = None, backend: Backend = "gpu", device: Device | DeviceName | None = None, scales: Scales | None = None,
    sinks: Any = None, alibi_slopes: Any = None, mask: Any = None, block_mask: Any = None, seed: int | None = None,
    offset: int = 0, rng_state: Any = None, block_table: Any = None, seq_lens: Any = None, cu_seqlens_q: Any = None,
    num_decodes: int | None = None, draft_mask: Any = None, k_scale: Any = None, v_scale: Any = None,
    **masks: Unpack[Masks],
) -> Any:  # fmt: skip
    """Attention by one of the kernels: arrays of CuPy, torch or JAX in GPU memory in, the same kind out.

    `backend="emulator"` runs the kernel on the CPU as built for `device` (None: "h100"): it takes NumPy arrays, too, and
    raises `EmulationError` for every misuse of the machine that it sees.

    q `(batch, heads, len_q, head_dim)`, k and v `(batch, kv_heads, len_kv, head_dim)`, strided or not, float32, float16
    or bfloat16. Returns `out` like q; with `lse=True` `(out, lse)`, the LSE float32 `(batch, heads, len_q)`, natural
    logarithm. `flash3_fp8` takes float8_e4m3fn (of CuPy, which has no such dtype, arrays of uint8) and returns bfloat16;
    `scales` multiply its operands. They are contiguous arrays of the same kind (None: 1). Its LSE is that of
    the rounded weights; with `exact_lse=True` it is that of the weights before they are rounded.

    `lengths=[100, (1, 300)]` says that the rows of a batch of 1 are sequences of these lengths (queries and keys, or as many
    of both), one behind the other: each query sees keys of its own sequence. They are Python's numbers, and the plan is
    made for them. A kernel's `cu_seqlens` follow from them. `flash2` and `flash3` take them, and `flash_decoding` if
    all sequences have as many queries.

    `causal` is aligned bottom-right, `window=(left, right)` inclusive; `soft_cap` bounds the scores. `sinks`, a logit per
    head that joins each row's denominator (and the LSE), and `alibi_slopes` are float32 `(heads,)`, contiguous, of the same
    kind. `mask` is bool or uint8 `(len_q, len_kv)`, True where a key is visible, for all batches and heads, beside `causal`
    and `window`; or uint8 with a bit for each pair, one row of pairs behind the other, the lowest bit first (FlashInfer's packed
    masks). In a ragged batch only pairs within a sequence count. Bits have no others, and those of each sequence begin with a new
    byte. `block_mask` says it instead by lists of blocks of `block_size` queries and keys: `fl.block_mask` makes them of
    torch's BlockMask, or of indptr and indices. A kernel's tile has to divide a block. `flash2` and `flash3` take them. On a GPU
    they aren't checked for NaN. `tile=None` is the default for GPU, head dim and dtype.

    With `block_table`, int32 `(batch, pages)`, K and V lie in pools of pages, `(pages, kv_heads, page_size, head_dim)`: key n of
    request b is row `n % page_size` of page `block_table[b, n // page_size]`. A pool `(pages, page_size, kv_heads, head_dim)`
    goes in as `pool.swapaxes(1, 2)`, and isn't copied. `seq_lens`, int32 `(batch,)`, says how many keys each request has; the
    kernel reads it, so a captured graph follows it. Left out, they are those of `lengths`, or the table is full. The algorithm is
    `paged`, or on Hopper `flash3_paged`, which "auto" takes where requests have many queries. On a GPU the numbers of pages
    aren't checked: a page that isn't there is read all the same.

    Requests may have different numbers of new tokens in one call. q is then `(1, heads, queries of all, head_dim)`, one request's
    behind another's, and `cu_seqlens_q`, contiguous int32 `(batch + 1,)`, says where each request's begin, from 0 to the end of the
    last. The kernel reads it like `seq_lens`, so a captured graph follows it. `causal` is aligned with each request's last key. The
    output is like q, the LSE `(1, heads, queries of all)`. The algorithm is `flash3_paged`, for Hopper. If the first requests have
    one query each, `num_decodes`, a number of the host, says how many: they take a launch of `paged`, and the rest one of
    `flash3_paged`. On a GPU nobody looks whether they do.

    Beside a `block_table`, `draft_mask` says which of its drafts a query sees: the last `len_q` keys of each request, up to 32.
    It has a word of 32 bits for each query, contiguous uint32 or int32 `(batch, len_q)`, whose bit j shows the j-th draft.
    Earlier keys are visible, but for what `causal` and `window` hide. The algorithm is `paged`.

    k and v may be quantised, float8_e4m3fn (of CuPy uint8) or int8 beside q of 16 bits: `fl.quantize_cache` makes them.
    `k_scale` and `v_scale` multiply them (None: 1). They are contiguous float32 arrays of the same kind, from
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
    doesn't take is refused then. It may stand in a function that `torch.compile` compiles. Forward-mode derivatives are refused.

    Raises `UsageError` for bad input, `Unavailable` without a GPU or CuPy.

    >>> import cupy, flashlab as fl                                                    # doctest: +SKIP
    >>> q, k, v = (cupy.random.rand(1, 8, 1024, 64).astype("float16") for _ in "qkv")  # doctest: +SKIP
    >>> fl.attention(q, k, v, causal=True).shape                                       # doctest: +SKIP
    (1, 8, 1024, 64)
    """
    in_pages = block_table is not None or seq_lens is not None
    varlen = in_pages and cu_seqlens_q is not None
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes, "mask": mask, "block_mask": block_mask,
             "rng_state": rng_state, "block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q,
             "draft_mask": draft_mask, "k_scale": k_scale, "v_scale": v_scale, "out": out}  # fmt: skip
    if in_pages and isinstance(algorithm, str) and algorithm == "flash2":
        algorithm = "flash3_paged" if varlen else "paged"
    more: Any = {
        "algorithm": algorithm,
        "lse": lse,
        "tile": tile,
        "backend": backend,
        "device": device,
        "scales": scales,
    }
    more |= {"seed": seed, "offset": offset}
    if not in_pages and host.asked_by_torch(q):  # before anything asks where an array lies
        given |= zip(("q", "k", "v"), host.autocast(q, k, v), strict=True)
        if host.traced(q):
            outputs = _by_torch(given, **more, **masks)
            return outputs if lse else outputs[0]
    if num_decodes is not None:
        if not varlen or block_table is None:
            raise UsageError("num_decodes", num_decodes, "None without a block_table and cu_seqlens_q")
        if not isinstance(algorithm, str) or algorithm not in ("auto", "flash3_paged"):
            raise UsageError("algorithm", algorithm, "auto, or nothing: with num_decodes there are two launches")
        if tile is not None:
            raise UsageError("tile", tile, "None: with num_decodes there are two launches")
        del more["algorithm"]
        outputs = of_a_step(given, masks, num_decodes, **more)
        return outputs if lse else outputs[0]
    differentiate = None if in_pages else _differentiated
    outputs = called(PAGED if in_pages else ATTENTION, given, masks, differentiate=differentiate, **more)
    return outputs if lse else outputs[0]


def _differentiated(given: Mapping[str, Any], *, lse: bool, **options: Any) -> tuple[Any, ...] | None:
    """Attention that torch differentiates, if a gradient is to flow through q, k, v or sinks, or if the kernels need its help."""
    wanted = any(host.wants_gradient(given[name]) for name in ("q", "k", "v", "sinks")) or _helped(given)
    return _by_torch(given, lse=lse, **options) if wanted else None


def _helped(given: Mapping[str, Any]) -> bool:
    """Are they tensors of torch's without a batch, or whose v has fewer columns than q? Torch pads and crops."""
    q, v = given["q"], given["v"]
    if not host.kind_of(q) == host.kind_of(v) == "torch" or not len(q.shape) == len(v.shape) == 4:
        return False
    return q.shape[0] == 0 or v.shape[3] < q.shape[3]


def _by_torch(given: Mapping[str, Any], *, lse: bool, **options: Any) -> tuple[Any, ...]:
    """Attention that torch differentiates, transforms or compiles."""
    from flashlab.run import autograd

    refused = {name: given[name] for name in ("out", "block_mask", "cu_seqlens_q", "k_scale", "v_scale")} | {
        "scales": options.pop("scales")
    }
    for name, x in refused.items():
        if x is not None:
            raise host.refused(name, type(x).__name__, "None where q, k or v requires grad, or torch compiles")
    passed = {name: given[name] for name in ("q", "k", "v", "sinks", "alibi_slopes", "mask", "rng_state")}
    return autograd.attention(**passed, **options, lse=True)[: 1 + lse]
