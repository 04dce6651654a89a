"""The functions of the package flash-attn, by our kernels: the same names, signatures and layouts, with gradients.

    from flashlab.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

What our kernels don't have is refused in one line. Every keyword stands in the signatures, because Transformers reads these and
drops what isn't named. `num_splits` and `pack_gqa` say how FlashAttention-3 is to be fast: they are taken, and nothing follows
from them. Tensors on a CPU run on the emulator, which is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

from flashlab.base.host import refused
from flashlab.run.autograd import attention, check_axes, check_tensors, offsets, torch, used
from simulator.errors import UsageError
from simulator.fields import flag
from simulator.problem import FIELDS, Pair

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, s_aux: Any = None, learnable_sink: Any = None, *, attention_chunk: int = 0, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Attention over (batch, seqlen, heads, head_dim): `out`, or `(out, softmax_lse, None)` with `return_attn_probs`.

    Masks are aligned bottom-right. Dropout draws its seed from torch's generator, and rounds the rate to a multiple of 1/256.
    `s_aux`, (heads,), is a logit per head that joins each row's denominator, as FlashAttention-3 has it; FlashAttention-4 calls
    it `learnable_sink`. Its gradient flows, too. With `attention_chunk` a query sees only keys of its own chunk of so many keys;
    0 stands for no chunks. `qv`, the descales and `sm_margin` are refused but for their defaults.

    >>> import torch
    >>> q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in "qkv")
    >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    >>> v.grad.shape
    torch.Size([1, 20, 2, 16])
    """
    del num_splits, pack_gqa
    check_axes("(batch, seqlen, heads, head_dim)", q=q, k=k, v=v)
    _check_absent(sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    chunk = _chunk(attention_chunk)
    options = _options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, learnable_sink, deterministic
    )
    _check_promises(return_attn_probs, options)
    (batch, rows), keys = q.shape[:2], k.shape[1]
    fit = len(k) == len(v) == batch and v.shape[1] == keys  # what doesn't is refused below, by its own name
    if chunk and fit and not rows <= keys <= chunk:
        cu_q, cu_k = _cut([b * rows for b in range(batch + 1)], [b * keys for b in range(batch + 1)], chunk)
        out, lse = _ragged(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, options)
        out, lse = out.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1).contiguous()
    else:
        out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), lse=True, **options)
        out = out.transpose(1, 2).contiguous()
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Any = None, seqused_q: Any = None, seqused_k: Any = None,
    s_aux: Any = None, learnable_sink: Any = None, *, attention_chunk: int = 0, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Attention over sequences of any lengths, one behind the other: q is (total_q, heads, head_dim), and so are k and v.

    `cu_seqlens_q` and `cu_seqlens_k`, int32 (sequences + 1,), say where each begins, and where the last one ends. They are fetched
    from the GPU, because a launch is planned for the lengths. The longest sequence follows from them. `seqused_q` and `seqused_k`,
    (sequences,), say how many of a sequence's rows are used, from its first: of the others `out` and gradients are 0. What else is
    taken is as in `flash_attn_func`.

    >>> import torch
    >>> q, k, v = (torch.randn(50, 2, 16) for _ in "qkv")
    >>> ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, ends, ends, 30, 30, causal=True).shape
    torch.Size([50, 2, 16])
    """
    del max_seqlen_q, max_seqlen_k, num_splits, pack_gqa
    if block_table is not None:
        raise refused("block_table", type(block_table).__name__, "None: keys and values lie in no pages here")
    check_axes("(total, heads, head_dim)", q=q, k=k, v=v)
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _check_absent(sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    chunk = _chunk(attention_chunk)
    if len(v) != len(k):
        raise UsageError("v.shape", tuple(v.shape), f"{len(k)} rows, as k has")
    options = _options(
        q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, learnable_sink, deterministic
    )
    _check_promises(return_attn_probs, options)
    if chunk:
        ends_q, ends_k = offsets(cu_seqlens_q, cu_seqlens_k, len(q), len(k))
        stops = (used(*each) for each in (("seqused_q", seqused_q, ends_q), ("seqused_k", seqused_k, ends_k)))
        cu_seqlens_q, cu_seqlens_k = _cut(ends_q, ends_k, chunk, *([rows.stop for rows in x or ()] for x in stops))
        seqused_q = seqused_k = None
    out, lse = _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, {**options, "seqused_q": seqused_q, "seqused_k": seqused_k})
    return (out, lse, None) if return_attn_probs else out


def _ragged(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """`out` (total_q, heads, head_dim) and LSE (heads, total_q) of sequences one behind the other."""
    out, lse = attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), lse=True, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
    )  # fmt: skip
    return out[0].transpose(0, 1).contiguous(), lse[0]


def _cut(
    ends_q: list[int], ends_k: list[int], chunk: int, stops_q: Sequence[int] = (), stops_k: Sequence[int] = ()
) -> tuple[Any, Any]:
    """The offsets of sequences, each cut where the position of a key is a multiple of `chunk`, which begins with position 0.

    The last query of a sequence has the position of its last key, and so have those of a piece. Queries before the first key become
    a piece without keys, and chunks that no query is in become pieces without queries. `stops` say where the used rows of each
    sequence end. The other queries become a piece without keys, and the other keys one without queries.
    """
    pieces_q, pieces_k = [0], [0]
    spans = zip(pairwise(ends_q), pairwise(ends_k), stops_q or ends_q[1:], stops_k or ends_k[1:], strict=True)
    for (first_q, end_q), (first_k, end_k), stop_q, stop_k in spans:
        before = (stop_k - first_k) - (stop_q - first_q)
        for cut in range(0, stop_k - first_k, chunk):
            pieces_q.append(min(first_q + max(0, cut - before), stop_q))
            pieces_k.append(first_k + cut)
        pieces_q += [stop_q] if (stop_q, stop_k) == (end_q, end_k) else [stop_q, end_q, end_q]
        pieces_k += [stop_k] if (stop_q, stop_k) == (end_q, end_k) else [stop_k, stop_k, end_k]
    return torch.tensor(pieces_q, dtype=torch.int32), torch.tensor(pieces_k, dtype=torch.int32)


def _options(
    q: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    s_aux: Any,
    learnable_sink: Any,
    deterministic: Any,
) -> dict[str, Any]:
    """What both functions take, as `attention` takes it. Raises `UsageError` for what no kernel has."""
    if alibi_slopes is not None:
        check_axes("(heads)", alibi_slopes=alibi_slopes)
    dropout = _checked("dropout_p", "dropout", dropout_p)
    state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device) if dropout else None
    return {
        "scale": _checked("softmax_scale", "scale", softmax_scale),
        "causal": _checked("causal", "causal", causal),
        "window": _window(window_size),
        "soft_cap": _checked("softcap", "soft_cap", softcap),
        "alibi_slopes": alibi_slopes,
        "sinks": _sinks(s_aux, learnable_sink),
        "dropout": dropout,
        "rng_state": state,
        "deterministic": deterministic,
    }


def _chunk(attention_chunk: Any) -> int:
    """How many keys a chunk has. Raises `UsageError`."""
    if type(attention_chunk) is not int or attention_chunk < 0:
        raise UsageError("attention_chunk", attention_chunk, "0 for no chunks, or the keys of one")
    return attention_chunk


def _check_absent(sm_margin: Any, **tensors: Any) -> None:
    """Raises `UsageError` for what FlashAttention-3 has and our kernels don't."""
    for name, x in tensors.items():
        if x is not None:
            raise refused(name, type(x).__name__, "None: the kernels don't have it")
    if sm_margin != 0:
        raise UsageError("sm_margin", sm_margin, "0: the kernels leave no SM to others")


def _sinks(s_aux: Any, learnable_sink: Any) -> Any:
    """The sinks, in the dtype that kernels take. Transformers passes them to a function whose signature names them, and to any
    other it passes nothing, without a word."""
    given = {"s_aux": s_aux, "learnable_sink": learnable_sink}
    given = {name: x for name, x in given.items() if x is not None}
    if not given:
        return None
    check_axes("(heads)", **given)
    if len(given) == 2:
        raise refused("learnable_sink", "torch tensor", "None with s_aux, which says the same")
    (sinks,) = given.values()
    return sinks.to(torch.float32).contiguous()


def _checked(name: str, field: str, value: Any) -> Any:
    """A field's value, whose error has flash-attn's name for it."""
    try:
        return FIELDS[field].checked(value)
    except UsageError as error:
        raise UsageError(name, value, error.accepted) from None


def _window(window_size: Any) -> Pair:
    """A window in which -1 stands for no bound, as flash-attn says it. FlashAttention-3 also says None."""
    try:
        window_size = tuple(None if side is None or side == -1 else index(side) for side in window_size)
    except TypeError:  # no pair at all, which is refused
        pass
    return _checked("window_size", "window", window_size)


def _check_promises(return_attn_probs: Any, options: dict[str, Any]) -> None:
    """Raises `UsageError` for what a caller relies on and no kernel does."""
    if flag("return_attn_probs", return_attn_probs) and options["dropout"]:
        raise UsageError("return_attn_probs", True, "False with dropout: no kernel writes the probabilities")
