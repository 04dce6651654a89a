"""Attention over several ranks, by torch.distributed: NCCL between GPUs, gloo between CPUs, where kernels run on the emulator.

Each rank passes its own rows, as `shard` deals them. Partial outputs are merged by their LSEs. On the way back the output and the
LSE of all keys go into each part's kernel, so the parts' gradients add up. Partial dK and dV travel in float32 and are rounded
once, at home.

Under a causal mask, rank r of w has chunks r and 2w - 1 - r of 2w, by the layout "zigzag". All keys of an earlier rank's first
chunk are visible to all its queries, and those of its second chunk to none. Of a later rank both chunks are visible to its second
chunk of queries. So each pair of ranks is one launch without a mask, of the same size, and a rank with itself is a causal launch.

Every function has the same bits in each run where its kernels do: dq is added up by atomics, unless
`torch.use_deterministic_algorithms(True)` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from flashlab.parallel import layouts
from flashlab.parallel.transfers import Interrupted, Peers, counted, peers_of
from flashlab.run.autograd import check_axes, gradients_wanted, torch
from flashlab.run.call import attention as attention_here
from flashlab.run.facade import called
from simulator.errors import Said, UsageError, among, dtype_name
from simulator.fields import flag, integer
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.problem import FIELDS

__all__ = [
    "Interrupted",
    "all_gather_attention",
    "attention",
    "counted",
    "decode_attention",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]

AXES = "(batch, heads, length, head_dim)"
SM_MARGIN = 16
"""SMs that kernels leave to NCCL while rows are on their way. A persistent kernel that has all SMs keeps NCCL's blocks waiting until
it ends, and then nothing overlaps. NCCL has a block for each channel."""
EVERY = slice(None)


def ring_attention(
    q: Any, k: Any, v: Any, *, group: Any = None, causal: bool = False, layout: str = "zigzag", scale: float | None = None,
    lse: bool = False, sm_margin: int = SM_MARGIN,
) -> Any:  # fmt: skip
    """Attention of this rank's rows over the keys of all ranks. K and V go around the ring while kernels run (arXiv 2310.01889).

    q `(batch, heads, length, head_dim)`, k and v `(batch, kv_heads, length, head_dim)`: torch tensors of one dtype, float32,
    float16 or bfloat16, as long on each rank. Returns `out` like q, or with `lse=True` `(out, lse)`, the LSE float32 `(batch,
    heads, length)`. Gradients flow back to q, k and v, through the LSE too, if all ranks go back. `group` is a process group (None:
    all ranks), `layout` says which rows a rank has (`shard`): "zigzag" or "contiguous". `sm_margin` SMs are left to NCCL by
    persistent kernels. A rank holds two shares of K and V beside its own, and on the way back four of float32.

    Raises `UsageError` on all ranks where they don't agree on the call, before a row is sent, and `Interrupted` where a rank is
    gone or late: the group's time-out says when that is.
    """
    return _attention("ring", q, k, v, group, causal, layout, scale, lse, sm_margin)


def all_gather_attention(
    q: Any, k: Any, v: Any, *, group: Any = None, causal: bool = False, layout: str = "zigzag", scale: float | None = None,
    lse: bool = False, sm_margin: int = SM_MARGIN,
) -> Any:  # fmt: skip
    """The same as `ring_attention`, with one transfer: all K and V come to each rank, while it computes its own part.

    A rank holds K and V of all ranks meanwhile, and on the way back twice their gradients in float32. Where shares are short, or
    ranks are many, one large transfer takes less time than many small ones.
    """
    return _attention("all_gather", q, k, v, group, causal, layout, scale, lse, sm_margin)


def ulysses_attention(
    q: Any, k: Any, v: Any, *, group: Any = None, causal: bool = False, layout: str = "zigzag", scale: float | None = None,
    lse: bool = False,
) -> Any:  # fmt: skip
    """The same as `ring_attention` by all-to-all: each rank gets all rows of some heads, and gives its rows back (arXiv 2309.14509).

    The ranks divide `heads`, and `kv_heads` or their inverse: KV heads that are fewer than ranks are sent to several. Nothing
    overlaps, but one launch has all rows, and no part is merged.
    """
    return _attention("ulysses", q, k, v, group, causal, layout, scale, lse, 0)


def attention(
    q: Any, k: Any, v: Any, *, group: Any = None, scheme: str = "auto", causal: bool = False, layout: str = "zigzag",
    scale: float | None = None, lse: bool = False,
) -> Any:  # fmt: skip
    """The same by a `scheme`: "ring", "all_gather", "ulysses", or "auto" for the one that should be the fastest."""
    scheme = among("scheme", scheme, ("auto", *SCHEMES))
    if scheme == "auto":
        check_axes(AXES, q=q, k=k, v=v)
        scheme = fastest(peers_of(group).ranks, 2 * k.nbytes)
    return _attention(scheme, q, k, v, group, causal, layout, scale, lse, SM_MARGIN)


def fastest(ranks: int, share: int) -> str:
    """The scheme for so many ranks, each with a `share` of so many bytes of K and V.

    With two ranks both schemes make one transfer, and a ring's needs no copy before. With more, an all-gather is one transfer
    instead of several, each with a fixed cost, as long as all shares fit beside the rest.

    >>> fastest(2, 1 << 26), fastest(4, 1 << 26), fastest(64, 1 << 30)
    ('ring', 'all_gather', 'ring')
    """
    return "all_gather" if ranks > 2 and ranks * share <= MOST_GATHERED else "ring"


MOST_GATHERED = 8 << 30
"""Bytes of K and V of all ranks that "auto" gathers."""


def decode_attention(
    q: Any, k: Any, v: Any, *, group: Any = None, interleave: int = 1, block_table: Any = None, seq_lens: Any = None
) -> Any:
    """Attention of few queries over keys that are striped over ranks: key n lies on rank `n // interleave % ranks`.

    q `(batch, heads / ranks, len_q, head_dim)`: the rank's own heads. k and v: the rank's keys, of all KV heads, as
    `fl.attention` takes them, in rows or in pages with the rank's own `block_table` and `seq_lens`. A rank may have no key.
    Every query sees every key. Returns `out` like q: the rank's own heads over the keys of all ranks. Queries are gathered, and
    outputs go to their ranks with their LSEs, where they are merged: two transfers. It has no gradient.

    Raises as `ring_attention`.
    """
    link = peers_of(group)
    said: dict[str, Any] = {"scheme": "decode", "interleave": interleave}

    def check() -> None:
        integer("interleave", interleave, 1)
        check_axes(AXES, q=q, k=k, v=v)
        if gradients_wanted(q, k, v):
            raise UsageError(
                "q, k or v", Said("a tensor that requires a gradient"), "none: decoding has no backward pass"
            )
        said.update(
            {
                "q.shape": tuple(q.shape),
                "k.shape[1]": k.shape[1],
                "q.dtype": dtype_name(q),
                "paged": block_table is not None,
            }
        )

    _agree(link, said, check)
    pages = {} if block_table is None else {"block_table": block_table, "seq_lens": seq_lens}
    own, (b, h, rows, d) = q.contiguous(), q.shape
    (gathered,) = link.gather("gather queries", own, {"q": own.nbytes}).wait()
    out, lse = attention_here(
        gathered.permute(1, 0, 2, 3, 4).reshape(b, -1, rows, d), k, v, algorithm="auto" if not pages else "paged", lse=True,
        backend=_backend(q), **pages,
    )  # fmt: skip
    # one transfer: the bytes of each rank's heads, outputs and then LSEs
    of_ranks = [x.reshape(b, link.ranks, h, rows, -1).transpose(0, 1).contiguous() for x in (out, lse)]
    sizes = {name: x[0].nbytes for name, x in zip(("out", "lse"), of_ranks, strict=True)}
    packed = torch.cat([x.view(torch.uint8).reshape(link.ranks, -1) for x in of_ranks], 1)
    (received,) = link.exchange("merge outputs", packed, sizes).wait()
    outs, lses = (
        x.contiguous().view(like.dtype).reshape(like.shape)
        for x, like in zip(received.split([*sizes.values()], 1), of_ranks, strict=True)
    )
    weights = torch.softmax(
        lses.clamp(min=torch.finfo(torch.float32).min), 0
    )  # without keys the LSE is -inf, and the output 0
    return (weights * outs).sum(0).to(q.dtype)


def shard(x: Any, dim: int, *, group: Any = None, layout: str = "zigzag") -> Any:
    """This rank's rows of a tensor that all ranks have, along an axis. Gradients flow through it."""
    link = peers_of(group)
    found = layouts.chunks(layout, x.shape[dim], link.ranks, link.rank, argument=f"shape[{dim}]")
    return torch.cat([x.narrow(dim, rows.start, len(rows)) for rows in found], dim)


def unshard(x: Any, dim: int, *, group: Any = None, layout: str = "zigzag") -> Any:
    """The opposite: all rows along an axis, in their order, on each rank. It has no gradient."""
    link = peers_of(group)

    def check() -> None:
        if gradients_wanted(x):
            raise UsageError(
                "x", Said("a tensor that requires a gradient"), "one without: a loss is of a rank's own rows"
            )
        layouts.check(layout, x.shape[dim] * link.ranks, link.ranks, argument=f"shape[{dim}] of all ranks")

    _agree(
        link,
        {"scheme": "unshard", "dim": dim, "shape": tuple(x.shape), "dtype": dtype_name(x), "layout": layout},
        check,
    )
    own = x.movedim(dim, 0).contiguous()
    (found,) = link.gather("unshard", own, {"x": own.nbytes}).wait()
    return _in_order(found, layout).movedim(0, dim).contiguous()


class Call(NamedTuple):
    """What all ranks have agreed on."""

    link: Peers
    scheme: str
    causal: bool
    layout: str
    scale: float | None
    sm_margin: int
    backend: Any

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool = False, margin: bool = False) -> tuple[Any, Any]:
        """`(out, lse)` of a part. With a `margin` it leaves SMs to transfers."""
        return called(
            ATTENTION, {"q": q, "k": k, "v": v}, {"causal": causal, "scale": self.scale}, algorithm="auto", tile=None,
            backend=self.backend, device=None, lse=True, sm_margin=self.sm_margin if margin else 0,
        )  # fmt: skip

    def backward(
        self,
        rows: Any,
        given: Given,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        partial: bool = True,
        margin: bool = False,
    ) -> tuple[Any, Any, Any]:
        """`(dq, dk, dv)` of a part: some of this rank's rows, some keys. With `partial` dk and dv are float32."""
        arrays = {name: x if rows == EVERY or x is None else x[:, :, rows] for name, x in given._asdict().items()}
        for name in ("lse", "dlse"):
            arrays[name] = None if arrays[name] is None else arrays[name].contiguous()
        return called(
            BACKWARD, {**arrays, "k": k, "v": v}, {"causal": causal, "scale": self.scale, "partial": partial}, algorithm="auto",
            one_order=torch.are_deterministic_algorithms_enabled(), tile=None, backend=self.backend, device=None,
            sm_margin=self.sm_margin if margin else 0,
        )  # fmt: skip

    def seen(self, of: int, rows: int, keys: int) -> tuple[slice, slice] | None:
        """Of another rank's keys: which of this rank's `rows` see which of its `keys`. None: no row sees any."""
        before, zigzag = of < self.link.rank, self.layout == "zigzag"
        if not self.causal or (before and not zigzag):
            return EVERY, EVERY
        if not zigzag:
            return None
        return (EVERY, slice(0, keys // 2)) if before else (slice(rows // 2, rows), EVERY)


class Given(NamedTuple):
    """What a backward pass has of a rank's rows."""

    dout: Any
    q: Any
    out: Any
    lse: Any
    dlse: Any


class Total:
    """The output of a rank's rows over more and more keys. Over more than two parts it is float32 in between."""

    def __init__(self, out: Any, lse: Any, parts: int) -> None:
        self._dtype, self._lse = out.dtype, lse
        self._out = out.float() if parts > 2 else out

    def merge(self, rows: slice, out: Any, lse: Any) -> None:
        """A part of some rows joins."""
        own, log = self._out[:, :, rows], self._lse[:, :, rows]
        both = torch.logaddexp(log, lse)
        kept, joins = ((x - both).exp_()[..., None] for x in (log, lse))
        torch.addcmul(own * kept, out, joins, out=own)
        log.copy_(both)

    def result(self) -> tuple[Any, Any]:
        return self._out.to(self._dtype), self._lse


class Sum:
    """dQ of a rank's rows over more and more keys, as `Total`."""

    def __init__(self, dq: Any, parts: int) -> None:
        self._dtype, self._sum = dq.dtype, dq.float() if parts > 2 else dq

    def add(self, rows: slice, dq: Any) -> None:
        self._sum[:, :, rows].add_(dq)

    def result(self) -> Any:
        return self._sum.to(self._dtype)


def _ring(c: Call, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    link, n = c.link, c.link.ranks
    coming = link.shift("forward 0", k=k, v=v) if n > 1 else None
    total = Total(*c.forward(q, k, v, causal=c.causal, margin=n > 1), n)
    for i in range(1, n):
        assert coming is not None
        k, v = coming.wait()
        coming = link.shift(f"forward {i}", k=k, v=v) if i < n - 1 else None
        if (part := c.seen((link.rank - i) % n, q.shape[2], k.shape[2])) is not None:
            rows, keys = part
            total.merge(rows, *c.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], margin=coming is not None))
    return total.result()


def _ring_backward(c: Call, given: Given, k: Any, v: Any) -> tuple[Any, ...]:
    """K and V go around again. One step behind go their gradients: from the rank after their own, growing at each, to their own."""
    link, n = c.link, c.link.ranks
    if n == 1:
        return c.backward(EVERY, given, k, v, causal=c.causal, partial=False)
    coming, growing = link.shift("backward 0", k=k, v=v), None
    dq, *own = c.backward(EVERY, given, k, v, causal=c.causal, margin=True)
    total, length = Sum(dq, n), k.shape[2]
    for i in range(1, n):
        k, v = coming.wait()
        coming = link.shift(f"backward {i}", k=k, v=v) if i < n - 1 else coming
        parts, keys = None, EVERY
        if (part := c.seen((link.rank - i) % n, given.q.shape[2], length)) is not None:
            rows, keys = part
            dq, *parts = c.backward(rows, given, k[:, :, keys], v[:, :, keys], margin=True)
            total.add(rows, dq)
        if growing is not None:
            sums = growing.wait()
            for x, y in zip(sums, parts or (), strict=False):
                x[:, :, keys].add_(y)
        elif parts is not None:
            sums = [x if keys == EVERY else torch.nn.functional.pad(x, (0, 0, 0, length - keys.stop)) for x in parts]
        else:
            sums = [torch.zeros_like(x) for x in own]
        growing = link.shift(f"backward {i}", dk=sums[0], dv=sums[1])
    assert growing is not None
    dk, dv = (_rounded(x, y, k.dtype) for x, y in zip(growing.wait(), own, strict=True))
    return total.result(), dk, dv


def _rounded(x: Any, y: Any, dtype: Any) -> Any:
    """x + y, rounded once."""
    return torch.add(x, y, out=torch.empty_like(x, dtype=dtype))


def _gathered(c: Call, step: str, k: Any, v: Any) -> Any:
    """K and V of all ranks, on their way: (ranks, length, 2, batch, kv_heads, head_dim). Rows come first, so ranks' rows join."""
    packed = torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 1)
    return c.link.gather(step, packed, {"k": k.nbytes, "v": v.nbytes})


def _others(c: Call, rows: int, keys: int) -> list[tuple[slice, slice, slice]]:
    """Ranks, the rows that see them, and which of their keys: of all ranks before this one, and of all after it."""
    rank, n = c.link.rank, c.link.ranks
    found: list[tuple[slice, slice, slice]] = []
    for ranks in (slice(0, rank), slice(rank + 1, n)):
        if ranks.start < ranks.stop and (part := c.seen(ranks.start, rows, keys)) is not None:
            found.append((ranks, *part))
    return found


def _of_ranks(gathered: Any, ranks: slice, keys: slice) -> tuple[Any, Any]:
    """K and V of some ranks, as (batch, kv_heads, length, head_dim)."""
    k, v = gathered[ranks, keys].flatten(0, 1).unbind(1)
    return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def _all_gather(c: Call, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    coming = _gathered(c, "gather forward", k, v)
    others = _others(c, q.shape[2], k.shape[2])
    total = Total(*c.forward(q, k, v, causal=c.causal, margin=True), 1 + len(others))
    (gathered,) = coming.wait()
    for ranks, rows, keys in others:
        total.merge(rows, *c.forward(q[:, :, rows], *_of_ranks(gathered, ranks, keys)))
    return total.result()


def _all_gather_backward(c: Call, given: Given, k: Any, v: Any) -> tuple[Any, ...]:
    """K and V are gathered again, so nobody keeps them all. The parts of dK and dV go to the ranks whose keys they are of."""
    link, n, length = c.link, c.link.ranks, k.shape[2]
    coming = _gathered(c, "gather backward", k, v)
    others = _others(c, given.q.shape[2], length)
    dq, dk, dv = c.backward(EVERY, given, k, v, causal=c.causal, partial=n > 1, margin=True)
    total = Sum(dq, 1 + len(others))
    (gathered,) = coming.wait()
    sums = gathered.new_zeros(gathered.shape, dtype=torch.float32)
    for ranks, rows, keys in others:
        dq, *parts = c.backward(rows, given, *_of_ranks(gathered, ranks, keys))
        total.add(rows, dq)
        into = sums[ranks, keys]
        for i, x in enumerate(parts):
            into[:, :, i] = x.permute(2, 0, 1, 3).reshape(into[:, :, i].shape)
    if n == 1:
        return total.result(), dk, dv
    (received,) = link.exchange("reduce backward", sums, {"dk": sums[0].nbytes // 2, "dv": sums[0].nbytes // 2}).wait()
    ring = [received[(link.rank + i) % n] for i in range(1, n)]  # in the order of the ring
    for x in ring[1:]:
        ring[0] += x
    dk, dv = (_rounded(x, y.permute(1, 2, 0, 3), k.dtype) for x, y in zip((dk, dv), ring[0].unbind(1), strict=True))
    return total.result(), dk, dv


def _chunks(x: Any, layout: str, ranks: int, *, to_ranks: bool) -> Any:
    """Rows of all ranks along the first axis, from the order of the sequence to that of the ranks, or back."""
    if layout == "contiguous":
        return x
    order = [*chain(*((r, 2 * ranks - 1 - r) for r in range(ranks)))]
    order = order if to_ranks else [order.index(i) for i in range(2 * ranks)]
    parts = x.unflatten(0, (2 * ranks, -1))
    return torch.cat([parts[i] for i in order])


def _in_order(x: Any, layout: str) -> Any:
    """(ranks, length, …) of all ranks as (all rows, …), in the order of the sequence."""
    return _chunks(x.flatten(0, 1), layout, x.shape[0], to_ranks=False)


def _to_heads(c: Call, step: str, **tensors: Any) -> list[Any]:
    """This rank's rows of all heads become all rows of some: of each tensor (batch, heads / ranks, all rows, head_dim)."""
    n = c.link.ranks
    dealt = [
        x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4) for x in tensors.values()
    ]  # (ranks, length, batch, heads, head_dim)
    sizes = {name: x.nbytes // n for name, x in tensors.items()}
    (found,) = c.link.exchange(step, torch.cat(dealt, 3), sizes).wait()
    parts = _in_order(found, c.layout).split([x.shape[3] for x in dealt], 2)
    return [x.permute(1, 2, 0, 3) for x in parts]


def _to_rows(c: Call, step: str, **tensors: Any) -> list[Any]:
    """The opposite."""
    n = c.link.ranks
    dealt = [_chunks(x.permute(2, 0, 1, 3), c.layout, n, to_ranks=True).unflatten(0, (n, -1)) for x in tensors.values()]
    sizes = {name: x.nbytes // n for name, x in tensors.items()}
    (found,) = c.link.exchange(step, torch.cat(dealt, 3), sizes).wait()
    parts = found.split([x.shape[3] for x in dealt], 3)
    return [x.permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous() for x in parts]


def _ulysses(c: Call, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    k, v = (x.repeat_interleave(max(1, c.link.ranks // x.shape[1]), 1) for x in (k, v))
    q, k, v = _to_heads(c, "to heads forward", q=q, k=k, v=v)
    all_rows, logs = c.forward(q, k, v, causal=c.causal)
    (out,) = _to_rows(c, "to rows forward", out=all_rows)
    return out, logs, q, k, v, all_rows


def _ulysses_backward(c: Call, dout: Any, dlse: Any, saved: tuple[Any, ...], kv_heads: int) -> tuple[Any, ...]:
    """A KV head that several ranks have is added up at home."""
    q, k, v, all_rows, logs = saved
    (dout,) = _to_heads(c, "to heads backward", dout=dout)
    shared = kv_heads < c.link.ranks
    dq, dk, dv = c.backward(EVERY, Given(dout, q, all_rows, logs, dlse), k, v, causal=c.causal, partial=shared)
    if not shared:
        return tuple(_to_rows(c, "to rows backward", dq=dq, dk=dk, dv=dv))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2).to(q.dtype) for x in _to_rows(c, "to rows backward", dk=dk, dv=dv))
    return *_to_rows(c, "to rows backward of q", dq=dq), dk, dv


SCHEMES: dict[str, tuple[Callable[..., tuple[Any, ...]], Callable[..., tuple[Any, ...]]]] = {
    "ring": (_ring, _ring_backward),
    "all_gather": (_all_gather, _all_gather_backward),
    "ulysses": (_ulysses, _ulysses_backward),
}


class _Differentiable(torch.autograd.Function):
    """A call through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, c: Call, lse: bool, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, logs, *saved = SCHEMES[c.scheme][0](c, q, k, v)
        ctx.call, ctx.lse, ctx.shapes = c, lse, (out.shape, k.shape)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(saved or (q, k, v, out)), logs)
        if saved and lse:  # the kernel's is of all rows of some heads
            logs = _to_rows(c, "to rows forward, LSE", lse=logs[..., None])[0][..., 0]
        return out, logs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        c, (q, k, v, out, logs) = ctx.call, ctx.saved_tensors
        shape, kv_shape = ctx.shapes
        dout = q.new_zeros(shape) if dout is None else dout.contiguous()
        back = SCHEMES[c.scheme][1]
        if c.scheme == "ulysses":
            if ctx.lse:  # all ranks send it, or none
                dlse = q.new_zeros(shape[:3], dtype=torch.float32) if dlse is None else dlse
                dlse = _to_heads(c, "to heads backward, LSE", dlse=dlse[..., None])[0][..., 0]
            found = back(c, dout, dlse, (q, k, v, out, logs), kv_shape[1])
        else:
            found = back(c, Given(dout, q, out, logs, dlse), k, v)
        return None, None, *found


def _attention(
    scheme: str, q: Any, k: Any, v: Any, group: Any, causal: Any, layout: str, scale: Any, lse: Any, sm_margin: Any
) -> Any:
    link = peers_of(group)
    said: dict[str, Any] = {"scheme": scheme, "layout": layout, "causal": causal, "scale": scale, "lse": lse}

    def check() -> None:
        check_axes(AXES, q=q, k=k, v=v)
        _check(scheme, q, k, v, flag("causal", causal), layout, link.ranks)
        FIELDS["scale"].checked(scale), flag("lse", lse), integer("sm_margin", sm_margin, 0)
        shapes = {f"{name}.shape": tuple(x.shape) for name, x in (("q", q), ("k", k))}
        said.update({**shapes, "dtype": dtype_name(q), "gradients": gradients_wanted(q, k, v)})

    _agree(link, said, check)
    c = Call(link, scheme, causal, layout, scale, sm_margin, _backend(q))
    q, k, v = q, k.contiguous(), v.contiguous()
    if said["gradients"] or (lse and scheme == "ulysses"):
        out, logs = _Differentiable.apply(c, lse, q, k, v)
    else:
        out, logs, *_ = SCHEMES[scheme][0](c, q, k, v)
    return (out, logs) if lse else out


def _agree(link: Peers, said: dict[str, Any], check: Callable[[], None]) -> None:
    """Raises what `check` raises, and tells the other ranks so."""
    try:
        check()
    except UsageError as error:
        link.agree(said, error)
    link.agree(said)


def _check(scheme: str, q: Any, k: Any, v: Any, causal: bool, layout: str, ranks: int) -> None:
    """Raises `UsageError` for tensors that a rank can't pass, whatever the others have."""
    problem = ATTENTION.problem({"q": q, "k": k, "v": v}, causal=causal)
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise UsageError(f"{name}.device", str(x.device), f"{q.device}, as q has")
    if v.shape != k.shape:
        raise UsageError("v.shape", tuple(v.shape), f"{tuple(k.shape)}, as k has")
    among("layout", layout, layouts.LAYOUTS)
    if causal:
        if problem.len_q != problem.len_kv:
            raise UsageError("k.shape", tuple(k.shape), f"{problem.len_q} rows, as q has: they are the same tokens")
        if layout == "zigzag" and ranks > 1 and problem.len_q % 2:
            raise UsageError("q.shape", tuple(q.shape), "an even number of rows: zigzag deals two chunks to each rank")
    if not problem.len_q * problem.len_kv:
        raise UsageError("q.shape", tuple(q.shape), "at least a row on each rank")
    if scheme == "ulysses":
        if problem.heads % ranks:
            raise UsageError("heads", problem.heads, f"a multiple of {ranks}, the ranks")
        if problem.kv_heads % ranks and ranks % problem.kv_heads:
            raise UsageError("kv_heads", problem.kv_heads, f"a multiple or a divisor of {ranks}, the ranks")
        if layout == "zigzag" and problem.len_q % 2:
            raise UsageError("q.shape", tuple(q.shape), "an even number of rows: zigzag deals two chunks to each rank")


def _backend(x: Any) -> str:
    return "gpu" if x.is_cuda else "emulator"
