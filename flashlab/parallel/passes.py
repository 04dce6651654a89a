"""What each rank does in each scheme, forwards and back: it sends and receives rows, and launches kernels on parts.

Under a causal mask, rank r of w has chunks r and 2w - 1 - r of 2w, by the layout "zigzag". All keys of an earlier rank's first
chunk are visible to all its queries, and those of its second chunk to none. Of a later rank both chunks are visible to its second
chunk of queries. So each pair of ranks is one launch without a mask, of the same size, and a rank with itself is a causal launch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from flashlab.parallel import layouts
from flashlab.parallel.merging import merge_into
from flashlab.parallel.transfers import Peers
from flashlab.run.autograd import torch
from flashlab.run.facade import called
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD

__all__ = ["EVERY", "SCHEMES", "Call", "Given", "in_order", "to_heads", "to_rows"]

EVERY = slice(None)


class Call(NamedTuple):
    """What all ranks have agreed on."""

    peers: Peers
    scheme: str
    causal: bool
    layout: str
    scale: float | None
    sm_margin: int
    backend: Any

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool = False, margin: bool = False) -> tuple[Any, Any]:
        """`(out, lse)` of a part. With a `margin` a transfer runs meanwhile, which begins first and has SMs left to it."""
        if margin:
            self.peers.head_start(q)
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
        arrays: dict[str, Any] = {
            name: x if rows == EVERY or x is None else x[:, :, rows] for name, x in given._asdict().items()
        }
        for name in ("lse", "dlse"):
            arrays[name] = arrays[name] if arrays[name] is None else arrays[name].contiguous()
        return called(
            BACKWARD, {**arrays, "k": k, "v": v}, {"causal": causal, "scale": self.scale, "partial": partial}, algorithm="auto",
            one_order=torch.are_deterministic_algorithms_enabled(), tile=None, backend=self.backend, device=None,
            sm_margin=self.sm_margin if margin else 0,
        )  # fmt: skip

    def seen(self, of: int, rows: int, keys: int) -> tuple[slice, slice] | None:
        """Of another rank's keys: which of this rank's `rows` see which of its `keys`. None: no row sees any."""
        found = layouts.seen(self.layout, self.peers.rank, of, rows, keys, causal=self.causal)
        return None if found is None else found[:2]


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
        merge_into(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

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
    peers, n = c.peers, c.peers.ranks
    coming = peers.shift("forward 0", k=k, v=v) if n > 1 else None
    total = Total(*c.forward(q, k, v, causal=c.causal, margin=n > 1), n)
    for i in range(1, n):
        assert coming is not None
        k, v = coming.wait()
        coming = peers.shift(f"forward {i}", k=k, v=v) if i < n - 1 else None
        if (part := c.seen((peers.rank - i) % n, q.shape[2], k.shape[2])) is not None:
            rows, keys = part
            total.merge(rows, *c.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], margin=coming is not None))
    return total.result()


def _ring_backward(c: Call, given: Given, k: Any, v: Any) -> tuple[Any, ...]:
    """K and V go around again. One step behind go their gradients: from the rank after their own, growing at each, to their own."""
    peers, n = c.peers, c.peers.ranks
    if n == 1:
        return c.backward(EVERY, given, k, v, causal=c.causal, partial=False)
    coming, growing = peers.shift("backward 0", k=k, v=v), None
    dq, *own = c.backward(EVERY, given, k, v, causal=c.causal, margin=True)
    total, length = Sum(dq, n), k.shape[2]
    for i in range(1, n):
        k, v = coming.wait()
        coming = peers.shift(f"backward {i}", k=k, v=v) if i < n - 1 else coming
        parts, keys = None, EVERY
        if (part := c.seen((peers.rank - i) % n, given.q.shape[2], length)) is not None:
            rows, keys = part
            dq, *parts = c.backward(rows, given, k[:, :, keys], v[:, :, keys], margin=True)
            total.add(rows, dq)
        if growing is not None:
            sums = growing.wait()
            for x, y in zip(sums, parts or (), strict=False):
                x[:, :, keys].add_(y)
        elif parts is not None:
            sums = [
                x if keys.stop == length else torch.nn.functional.pad(x, (0, 0, 0, length - keys.stop)) for x in parts
            ]
        else:
            sums = [torch.zeros_like(x) for x in own]
        growing = peers.shift(f"backward {i}", dk=sums[0], dv=sums[1])
    assert growing is not None
    dk, dv = (_rounded(x, y, k.dtype) for x, y in zip(growing.wait(), own, strict=True))
    return total.result(), dk, dv


def _rounded(x: Any, y: Any, dtype: Any) -> Any:
    """x + y, rounded once."""
    return torch.add(x, y, out=torch.empty_like(x, dtype=dtype))


def _gathered(c: Call, step: str, k: Any, v: Any) -> Any:
    """K and V of all ranks, on their way: (ranks, length, 2, batch, kv_heads, head_dim). Rows come first, so ranks' rows join."""
    packed = torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], 1)
    return c.peers.gather(step, packed, {"k": k.nbytes, "v": v.nbytes})


def _others(c: Call, rows: int, keys: int) -> list[tuple[slice, slice, slice]]:
    """Ranks, the rows that see them, and which of their keys: of all ranks before this one, and of all after it."""
    rank, n = c.peers.rank, c.peers.ranks
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
    peers, n, length = c.peers, c.peers.ranks, k.shape[2]
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
    (received,) = peers.exchange("reduce backward", sums, {"dk": sums[0].nbytes // 2, "dv": sums[0].nbytes // 2}).wait()
    ring = [received[(peers.rank + i) % n] for i in range(1, n)]  # in the order of the ring
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


def in_order(x: Any, layout: str) -> Any:
    """(ranks, length, …) of all ranks as (all rows, …), in the order of the sequence."""
    return _chunks(x.flatten(0, 1), layout, x.shape[0], to_ranks=False)


def to_heads(c: Call, step: str, **tensors: Any) -> list[Any]:
    """This rank's rows of all heads become all rows of some: of each tensor (batch, heads / ranks, all rows, head_dim)."""
    n = c.peers.ranks
    dealt = [
        x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4) for x in tensors.values()
    ]  # (ranks, length, batch, heads, head_dim)
    sizes = {name: x.nbytes // n for name, x in tensors.items()}
    (found,) = c.peers.exchange(step, torch.cat(dealt, 3), sizes).wait()
    parts = in_order(found, c.layout).split([x.shape[3] for x in dealt], 2)
    return [x.permute(1, 2, 0, 3) for x in parts]


def to_rows(c: Call, step: str, **tensors: Any) -> list[Any]:
    """The opposite."""
    n = c.peers.ranks
    dealt = [_chunks(x.permute(2, 0, 1, 3), c.layout, n, to_ranks=True).unflatten(0, (n, -1)) for x in tensors.values()]
    sizes = {name: x.nbytes // n for name, x in tensors.items()}
    (found,) = c.peers.exchange(step, torch.cat(dealt, 3), sizes).wait()
    parts = found.split([x.shape[3] for x in dealt], 3)
    return [x.permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous() for x in parts]


def _ulysses(c: Call, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    k, v = (x.repeat_interleave(max(1, c.peers.ranks // x.shape[1]), 1) for x in (k, v))
    q, k, v = to_heads(c, "to heads forward", q=q, k=k, v=v)
    all_rows, logs = c.forward(q, k, v, causal=c.causal)
    (out,) = to_rows(c, "to rows forward", out=all_rows)
    return out, logs, q, k, v, all_rows


def _ulysses_backward(c: Call, dout: Any, dlse: Any, saved: tuple[Any, ...], kv_heads: int) -> tuple[Any, ...]:
    """A KV head that several ranks have is added up at home."""
    q, k, v, all_rows, logs = saved
    (dout,) = to_heads(c, "to heads backward", dout=dout)
    shared = kv_heads < c.peers.ranks
    dq, dk, dv = c.backward(EVERY, Given(dout, q, all_rows, logs, dlse), k, v, causal=c.causal, partial=shared)
    if not shared:
        return tuple(to_rows(c, "to rows backward", dq=dq, dk=dk, dv=dv))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2).to(q.dtype) for x in to_rows(c, "to rows backward", dk=dk, dv=dv))
    return *to_rows(c, "to rows backward of q", dq=dq), dk, dv


SCHEMES: dict[str, tuple[Callable[..., tuple[Any, ...]], Callable[..., tuple[Any, ...]]]] = {
    "ring": (_ring, _ring_backward),
    "all_gather": (_all_gather, _all_gather_backward),
    "ulysses": (_ulysses, _ulysses_backward),
}
