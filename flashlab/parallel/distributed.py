"""Attention over several ranks, by torch.distributed: NCCL between GPUs, gloo between CPUs, where kernels run on the emulator.

Each rank passes its own rows, as `shard` deals them. Partial outputs are merged by their LSEs. On the way back the output and the
LSE of all keys go into each part's kernel, so the parts' gradients add up. Partial dK and dV travel in float32 and are rounded
once, at home.

Every function has the same bits in each run where its kernels do: dq is added up by atomics, unless
`torch.use_deterministic_algorithms(True)` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlab.parallel import layouts
from flashlab.parallel.passes import SCHEMES, Call, Given, in_order, to_heads, to_rows
from flashlab.parallel.transfers import Interrupted, Peers, counted, peers_of
from flashlab.run.autograd import check_axes, gradients_wanted, torch
from flashlab.run.call import attention as attention_here
from simulator.errors import Said, UsageError, among, dtype_name
from simulator.fields import flag, integer
from simulator.names import Backend
from simulator.operations.attention import ATTENTION
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
SM_MARGIN = 0
"""SMs that kernels leave to NCCL while rows are on their way. NCCL's blocks begin before a kernel's (`Peers.head_start`), so none
need be left."""


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
    """The same as `ring_attention` by all-to-all: each rank gets all rows of some heads, and gives its own back (2309.14509).

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
        ranks = peers_of(group).ranks
        back = gradients_wanted(q, k, v) and q.shape[1] % ranks == k.shape[1] % ranks == 0
        scheme = fastest(ranks, q.nbytes, k.nbytes, back)
    return _attention(scheme, q, k, v, group, causal, layout, scale, lse, SM_MARGIN)


def fastest(ranks: int, q: int, k: int, back: bool = False) -> str:
    """The scheme for so many ranks, each with so many bytes of q, and of k. `back` says that a backward pass follows, and that the
    heads can be dealt out.

    With two ranks all schemes make one transfer, and a ring's needs no copy before. With more, an all-gather is one transfer
    instead of several, each with a fixed cost, as long as all of K and V fit beside the rest. Ulysses makes two, and takes
    all tensors once where an all-gather takes K and V to each rank: that pays where it is less, and a way back doubles it.

    >>> fastest(2, 1 << 25, 1 << 25), fastest(4, 1 << 25, 1 << 25), fastest(4, 1 << 25, 1 << 25, back=True)
    ('ring', 'all_gather', 'ulysses')
    >>> fastest(4, 1 << 25, 1 << 22, back=True), fastest(64, 1 << 29, 1 << 29)
    ('all_gather', 'ring')
    """
    if ranks == 2:
        return "ring"
    if back and q < (ranks - 1) * k:
        return "ulysses"
    return "all_gather" if 2 * ranks * k <= MOST_GATHERED else "ring"


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
    peers = peers_of(group)
    paged = block_table is not None
    said: dict[str, Any] = {"scheme": "decode", "interleave": interleave, "paged": paged}

    def check() -> None:
        integer("interleave", interleave, 1)
        check_axes(AXES, q=q, k=k, v=v)
        if gradients_wanted(q, k, v):
            wanted = "none: decoding has no backward pass"
            raise UsageError("q, k or v", Said("a tensor that requires a gradient"), wanted)
        said.update({"q.shape": tuple(q.shape), "k.shape[1]": k.shape[1], "q.dtype": dtype_name(q)})

    _agree(peers, said, check, (q, k, v))
    pages = {"block_table": block_table, "seq_lens": seq_lens} if paged else {}
    own, (b, h, rows, d) = q.contiguous(), q.shape
    (gathered,) = peers.gather("gather queries", own, {"q": own.nbytes}).wait()
    out, lse = attention_here(
        gathered.permute(1, 0, 2, 3, 4).reshape(b, -1, rows, d), k, v, algorithm="paged" if paged else "auto", lse=True,
        backend=_backend(q), **pages,
    )  # fmt: skip
    # one transfer: the bytes of each rank's heads, LSEs and then outputs
    of_ranks = {
        "lse": lse.unflatten(1, (-1, h))[..., None].transpose(0, 1),
        "out": out.unflatten(1, (-1, h)).transpose(0, 1),
    }
    packed = torch.cat([x.reshape(peers.ranks, -1).view(torch.uint8) for x in of_ranks.values()], 1)
    sizes = {name: x.nbytes // peers.ranks for name, x in of_ranks.items()}
    (received,) = peers.exchange("merge outputs", packed, sizes).wait()
    lses, outs = (
        (x if received.shape[1] % 4 == 0 else x.contiguous()).view(like.dtype).unflatten(1, like.shape[1:])
        for x, like in zip(received.split([*sizes.values()], 1), of_ranks.values(), strict=True)
    )
    weights = torch.softmax(lses.clamp(min=_LEAST), 0)  # without keys the LSE is -inf, and the output 0
    return (weights * outs).sum(0).to(q.dtype)


_LEAST = torch.finfo(torch.float32).min


def shard(x: Any, dim: int, *, group: Any = None, layout: str = "zigzag") -> Any:
    """This rank's rows of a tensor that all ranks have, along an axis. Gradients flow through it."""
    peers = peers_of(group)
    found = layouts.chunks(layout, x.shape[dim], peers.ranks, peers.rank, argument=f"shape[{dim}]")
    return torch.cat([x.narrow(dim, rows.start, len(rows)) for rows in found], dim)


def unshard(x: Any, dim: int, *, group: Any = None, layout: str = "zigzag") -> Any:
    """The opposite: all rows along an axis, in their order, on each rank. It has no gradient."""
    peers = peers_of(group)

    def check() -> None:
        if gradients_wanted(x):
            raise UsageError(
                "x", Said("a tensor that requires a gradient"), "one without: a loss is of a rank's own rows"
            )
        layouts.check(layout, x.shape[dim] * peers.ranks, peers.ranks, argument=f"shape[{dim}] of all ranks")

    said = {"scheme": "unshard", "dim": dim, "shape": tuple(x.shape), "dtype": dtype_name(x), "layout": layout}
    _agree(peers, said, check, (x,))
    own = x.movedim(dim, 0).contiguous()
    (found,) = peers.gather("unshard", own, {"x": own.nbytes}).wait()
    return in_order(found, layout).movedim(0, dim).contiguous()


class _Differentiable(torch.autograd.Function):
    """A call through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, c: Call, lse: bool, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, logs, *saved = SCHEMES[c.scheme][0](c, q, k, v)
        ctx.call, ctx.lse, ctx.shapes = c, lse, (out.shape, k.shape)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(saved or (q, k, v, out)), logs)
        if saved and lse:  # the kernel's is of all rows of some heads
            logs = to_rows(c, "to rows forward, LSE", lse=logs[..., None])[0][..., 0]
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
                dlse = to_heads(c, "to heads backward, LSE", dlse=dlse[..., None])[0][..., 0]
            found = back(c, dout, dlse, (q, k, v, out, logs), kv_shape[1])
        else:
            found = back(c, Given(dout, q, out, logs, dlse), k, v)
        return None, None, *found


def _attention(
    scheme: str, q: Any, k: Any, v: Any, group: Any, causal: Any, layout: str, scale: Any, lse: Any, sm_margin: Any
) -> Any:
    peers = peers_of(group)
    said: dict[str, Any] = {"scheme": scheme, "layout": layout, "causal": causal, "scale": scale, "lse": lse}

    def check() -> None:
        check_axes(AXES, q=q, k=k, v=v)
        _check(scheme, q, k, v, flag("causal", causal), layout, peers.ranks)
        FIELDS["scale"].checked(scale)
        flag("lse", lse)
        integer("sm_margin", sm_margin, 0)
        shapes = {f"{name}.shape": tuple(x.shape) for name, x in (("q", q), ("k", k))}
        said.update({**shapes, "dtype": dtype_name(q), "gradients": gradients_wanted(q, k, v)})

    _agree(peers, said, check, (q, k, v), sm_margin)
    c = Call(peers, scheme, causal, layout, scale, sm_margin, _backend(q))
    q, k, v = q, k.contiguous(), v.contiguous()
    if gradients_wanted(q, k, v) or (lse and scheme == "ulysses"):
        out, logs = _Differentiable.apply(c, lse, q, k, v)
    else:
        out, logs, *_ = SCHEMES[scheme][0](c, q, k, v)
    return (out, logs) if lse else out


def _agree(peers: Peers, said: dict[str, Any], check: Callable[[], None], tensors: tuple[Any, ...], *more: Any) -> None:
    """Raises what `check` raises, and tells the other ranks so. What is called with the same again isn't checked again."""
    key: Any = None
    try:
        plain = *said.values(), *more, torch.is_grad_enabled()
        key = plain, [type(x) for x in plain], [(x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
    except AttributeError:
        pass  # what isn't a tensor is refused below
    if key is not None and key == peers.checked:
        return
    peers.checked = None
    try:
        check()
    except UsageError as error:
        peers.agree(said, error)
    peers.agree(said)
    peers.checked = key


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


def _backend(x: Any) -> Backend:
    return "gpu" if x.is_cuda else "emulator"
