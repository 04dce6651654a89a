"""The functions of the package flash-attn, by our kernels: the same names, signatures and layouts, with gradients.

    from flashlab.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

What our kernels don't have is refused in one line. Every keyword stands in the signatures, because Transformers reads these and
drops what isn't named. `num_splits` and `pack_gqa` say how FlashAttention-3 is to be fast: they are taken, and nothing follows
from them. Tensors on a CPU run on the emulator, which is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

from flashlab.base.host import refused
from flashlab.run.autograd import attention, check_axes, check_tensors, integers, offsets, torch, used
from flashlab.run.call import attention as over_pages
from flashlab.run.pools import append_kv
from simulator.errors import Said, UsageError
from simulator.fields import flag
from simulator.problem import FIELDS, Pair

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


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
    (sequences,), say how many of a sequence's rows are used, from its first: of the others `out` and gradients are 0, as they are
    of rows behind the last sequence. What else is taken is as in `flash_attn_func`.

    With `block_table`, int32 (sequences, pages), k and v are pools (pages, page_size, heads, head_dim). Nothing is fetched then:
    the kernel reads `cu_seqlens_q`, and how many keys each sequence has, `seqused_k` or the differences of `cu_seqlens_k`. No
    gradient flows, and dropout, ALiBi, chunks and `seqused_q` are refused.

    >>> import torch
    >>> q, k, v = (torch.randn(50, 2, 16) for _ in "qkv")
    >>> ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, ends, ends, 30, 30, causal=True).shape
    torch.Size([50, 2, 16])
    """
    del max_seqlen_k, num_splits, pack_gqa
    if block_table is not None:
        _check_absent(
            sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, seqused_q=seqused_q
        )
        check_axes("(total, heads, head_dim)", q=q)
        check_axes("(pages, page_size, heads, head_dim)", k=k, v=v)
        check_axes("(sequences, pages)", block_table=block_table)
        check_tensors(cu_seqlens_q=cu_seqlens_q)
        if seqused_k is None:
            check_tensors(cu_seqlens_k=cu_seqlens_k)
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        options = _over_pages(
            q, softmax_scale, causal, window_size, softcap, s_aux, learnable_sink, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
            attention_chunk=attention_chunk,
        )  # fmt: skip
        one_each = max_seqlen_q == 1 and len(q) == len(block_table)
        out, lse = _attended(
            q, k.transpose(1, 2), v.transpose(1, 2), block_table, seqused_k, None if one_each else cu_seqlens_q, options
        )
        return (out, lse, None) if flag("return_attn_probs", return_attn_probs) else out
    del max_seqlen_q
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
    total_q = len(q)
    if not torch.compiler.is_compiling():
        q, cu_seqlens_q = _of_sequences("cu_seqlens_q", cu_seqlens_q, q)
        k, cu_seqlens_k = _of_sequences("cu_seqlens_k", cu_seqlens_k, k)
        v = v[: len(k)]
    if chunk:
        ends_q, ends_k = offsets(cu_seqlens_q, cu_seqlens_k, len(q), len(k))
        stops = (used(*each) for each in (("seqused_q", seqused_q, ends_q), ("seqused_k", seqused_k, ends_k)))
        cu_seqlens_q, cu_seqlens_k = _cut(ends_q, ends_k, chunk, *([rows.stop for rows in x or ()] for x in stops))
        seqused_q = seqused_k = None
    out, lse = _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, {**options, "seqused_q": seqused_q, "seqused_k": seqused_k})
    if behind := total_q - len(q):
        out, lse = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, behind)), torch.nn.functional.pad(lse, (0, behind))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False, *,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    attention_chunk: int = 0, scheduler_metadata: Any = None, pack_gqa: bool | None = None, sm_margin: int = 0, s_aux: Any = None,
    learnable_sink: Any = None,
) -> Any:  # fmt: skip
    """Attention of new queries over a cache, to which new keys and values are appended first: `out`, or `(out, softmax_lse)`.

    q is (batch, seqlen_q, heads, head_dim), and so is `out`; the LSE is (batch, heads, seqlen_q). With `cu_seqlens_q`, int32 (batch
    + 1,), q is (total_q, heads, head_dim), one request's queries behind another's, and the LSE (heads, total_q). The caches are
    (cache_batch, seqlen_cache, kv_heads, head_dim), where `cache_batch_idx`, (batch,), says which line each request has. Or with
    `block_table`, int32 (cache_batch, pages), FlashAttention-3's `page_table`, they are pools (pages, page_size, kv_heads,
    head_dim). `cache_seqlens`, a number or int32 (batch,), says how many keys a request has already; left out, all of them.

    k and v (batch, seqlen_new, kv_heads, head_dim), or (total_new, kv_heads, head_dim) with `cu_seqlens_k_new`, are written behind
    these, in place. With `rotary_cos` and `rotary_sin`, (positions, rotary_dim / 2), q and k are turned first: a key by its
    position, and a query by that of the new key of its number if `causal` or a window says so, else by that of the first new key.
    Positions begin at `cache_seqlens`, or at `rotary_seqlens`, (batch,). `rotary_interleaved` turns neighbours, and otherwise the
    first half with the second.

    Masks are aligned bottom-right, with the last key. Nothing is fetched from the GPU. `num_splits`, `pack_gqa`,
    `scheduler_metadata` and `max_seqlen_q` are taken, and nothing follows from them. `cache_leftpad`, `alibi_slopes`,
    `qv` and the descales are refused. `cu_seqlens_q` needs Hopper. No gradient flows.

    >>> import torch
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    >>> k_cache, v_cache = torch.zeros(2, 2, 32, 2, 16)
    >>> held = torch.tensor([7, 0], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[0, 7] == k[0, 0]).all())
    True
    """
    del num_splits, pack_gqa, scheduler_metadata, max_seqlen_q
    if cache_leftpad is not None:
        raise refused(
            "cache_leftpad",
            type(cache_leftpad).__name__,
            "None: a request's keys begin with the first row of its cache",
        )
    _check_absent(sm_margin, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if block_table is not None and page_table is not None:
        raise refused("page_table", "torch tensor", "None with block_table, which says the same")
    options = _over_pages(
        q, softmax_scale, causal, window_size, softcap, s_aux, learnable_sink, alibi_slopes=alibi_slopes,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    check_axes("(batch, seqlen_cache, kv_heads, head_dim)", k_cache=k_cache, v_cache=v_cache)
    cache = _Cache.of(
        k_cache,
        v_cache,
        page_table if block_table is None else block_table,
        cache_batch_idx,
        cache_seqlens,
        q,
        cu_seqlens_q,
    )
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        missing = next(
            name
            for name, x in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin))
            if x is None
        )
        raise UsageError(missing, None, "both of k and v, and both of rotary_cos and rotary_sin, or neither")
    if k is None and rotary_cos is not None:
        raise UsageError("k", None, "new keys: rotary_cos and rotary_sin turn these, and queries with them")
    lengths = cache.lengths
    if k is not None:
        if cache_seqlens is None:
            raise UsageError("cache_seqlens", None, "how many keys each request has before the new ones")
        which, place, counts = _rows(k, cache.table.shape[0], cu_seqlens_k_new, "k", "cu_seqlens_k_new")
        positions = cache.lengths[which] + place
        if rotary_cos is not None:
            check_axes("(positions, rotary_dim / 2)", rotary_cos=rotary_cos, rotary_sin=rotary_sin)
            along = bool(options["causal"]) or tuple(options["window"] or ()) not in ((), (None, None))
            of_q, at, _ = _rows(q, cache.table.shape[0], cu_seqlens_q, "q", "cu_seqlens_q")
            first = cache.lengths
            if rotary_seqlens is not None:
                check_axes("(batch)", rotary_seqlens=rotary_seqlens)
                first = rotary_seqlens
            flag("rotary_interleaved", rotary_interleaved)
            q = _turned(q, rotary_cos, rotary_sin, first[of_q] + (at if along else 0), rotary_interleaved)
            k = _turned(k, rotary_cos, rotary_sin, first[which] + place, rotary_interleaved)
        cache.append(k, v, which.flatten(), positions.flatten())
        lengths = lengths + counts
    out, lse = _attended(q, cache.k, cache.v, cache.table, lengths.int(), cu_seqlens_q, options)
    return (out, lse) if flag("return_softmax_lse", return_softmax_lse) else out


@dataclass
class _Cache:
    """A cache as pools (pages, kv_heads, page_size, head_dim), the block table, and how many keys each request has."""

    k: Any
    v: Any
    table: Any
    lengths: Any

    @classmethod
    def of(
        cls, k_cache: Any, v_cache: Any, table: Any, index_of: Any, lengths: Any, q: Any, cu_seqlens_q: Any
    ) -> _Cache:
        """The pools are views of the caches. A line of a dense cache is a page. Raises `UsageError`."""
        size, device = k_cache.shape[1], k_cache.device
        if table is None:
            requests = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0]
            if index_of is None:
                if requests != len(k_cache):
                    raise UsageError(
                        "q.shape", tuple(q.shape), f"{len(k_cache)} requests, as k_cache has, or cache_batch_idx"
                    )
                index_of = torch.arange(requests, device=device)
            check_axes("(batch)", cache_batch_idx=index_of)
            table = index_of.int()[:, None].contiguous()
        elif index_of is not None:
            check_axes("(batch)", cache_batch_idx=index_of)
            table = table[index_of.long()]
        check_axes("(batch, pages)", block_table=table)
        if lengths is None or isinstance(lengths, int):
            held = table.shape[1] * size if lengths is None else lengths
            lengths = torch.full((len(table),), held, dtype=torch.int32, device=device)
        check_axes("(batch)", cache_seqlens=lengths)
        return cls(k_cache.transpose(1, 2), v_cache.transpose(1, 2), table, lengths)

    def append(self, k: Any, v: Any, which: Any, positions: Any) -> None:
        """Write rows of requests at positions. Rows that aren't whole chunks of 16 bytes are torch's to write."""
        size = self.k.shape[2]
        pages = self.table[which, positions.div(size, rounding_mode="floor")].long()
        rows = positions % size
        slots = torch.where(
            (positions < 0) | (pages < 0), -1, pages * size + rows
        )  # -1: a padded request, which is skipped
        new = [x.flatten(0, -3) for x in (k, v)]
        if all(x.shape[-1] * x.element_size() % 16 == 0 for x in (self.k, self.v)):
            backend: Any = "gpu" if self.k.is_cuda else "emulator"
            of_k, of_v = (x.transpose(0, 1)[None] for x in new)
            append_kv(of_k, of_v, self.k, self.v, slot_mapping=slots, backend=backend)
            return
        for pool, x in zip((self.k, self.v), new, strict=True):
            pool[pages, :, rows] = x


def _rows(x: Any, requests: int, begins: Any, name: str, said: str) -> tuple[Any, Any, Any]:
    """Of each new row its request and its number there, like x without heads and head dim; and how many each request has."""
    device = x.device
    if begins is None:
        check_axes("(batch, seqlen, heads, head_dim)", **{name: x})
        shape = x.shape[:2]
        which, place = (
            torch.arange(requests, device=device)[:, None].expand(shape),
            torch.arange(shape[1], device=device).expand(shape),
        )
        return which, place, shape[1]
    check_axes("(total, heads, head_dim)", **{name: x})
    check_axes("(batch + 1)", **{said: begins})
    rows = torch.arange(len(x), device=device)
    which = torch.searchsorted(begins[1:].contiguous(), rows, right=True, out_int32=False).clamp(max=requests - 1)
    return which, rows - begins[which], begins[1:] - begins[:-1]


def _turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rows turned by their positions, in float32 and then rounded: RoPE of the first columns, in pairs or in halves."""
    turning = 2 * cos.shape[-1]
    c, s = (each[positions.long()].float().unsqueeze(-2) for each in (cos, sin))
    head, rest = x[..., :turning].float(), x[..., turning:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    parts = a * c - b * s, b * c + a * s
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _over_pages(
    q: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    s_aux: Any,
    learnable_sink: Any,
    **absent: Any,
) -> dict[str, Any]:
    """What the kernels over pages take. Raises `UsageError` for what they don't have."""
    check_tensors(q=q)
    for name, x in absent.items():
        if x is not None and not (isinstance(x, int | float) and x == 0):
            raise UsageError(
                name,
                Said(type(x).__name__) if hasattr(x, "shape") else x,
                "nothing: the kernels over pages don't have it",
            )
    return {
        "scale": _checked("softmax_scale", "scale", softmax_scale),
        "causal": _checked("causal", "causal", causal),
        "window": _window(window_size),
        "soft_cap": _checked("softcap", "soft_cap", softcap),
        "sinks": _sinks(s_aux, learnable_sink),
    }


def _attended(
    q: Any, k: Any, v: Any, table: Any, lengths: Any, begins: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """`out` like q, and the LSE, over pools. q is (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""
    rows = (
        q[None].transpose(1, 2)
        if q.ndim == 3 and begins is not None
        else q.unsqueeze(-3).transpose(-3, -2)
        if q.ndim == 3
        else q.transpose(1, 2)
    )
    where: dict[str, Any] = {"backend": "gpu" if q.is_cuda else "emulator", "algorithm": "auto"}
    varlen = {} if begins is None else {"cu_seqlens_q": begins}
    out, lse = over_pages(
        rows,
        k,
        v,
        block_table=table.contiguous(),
        seq_lens=lengths.contiguous(),
        lse=True,
        **varlen,
        **where,
        **options,
    )
    if q.ndim == 4:
        return out.transpose(1, 2).contiguous(), lse
    return (
        (out[0].transpose(0, 1).contiguous(), lse[0])
        if begins is not None
        else (out[:, :, 0].contiguous(), lse[:, :, 0].T.contiguous())
    )


def _of_sequences(name: str, ends: Any, x: Any) -> tuple[Any, Any]:
    """The rows of an array that a sequence has, and the offsets on the CPU. Servers pad the last rows, for CUDA graphs."""
    numbers = integers(name, ends, "(sequences + 1)")
    held = x[: numbers[-1]] if numbers and 0 <= numbers[-1] < len(x) else x
    return held, torch.tensor(numbers, dtype=ends.dtype)


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
