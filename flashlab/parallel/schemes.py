"""The schemes: what each rank does, forwards and on the way back. A generator's `yield` waits for a message.

K, V and partial outputs travel in the storage dtype, LSEs and partial dK and dV in float32.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import numpy as np

from flashlab.parallel import layouts
from flashlab.parallel.rank import Rank, Scheme, Values, Wanted
from flashlab.run.merge import merge
from simulator.dtypes import Array

__all__ = ["SCHEMES", "all_gather", "dcp", "heads", "heads_of", "ring", "ulysses"]


def ring(rank: Rank) -> Generator[Wanted, Any, Values]:
    """K and V travel around the ring while products run (Ring Attention, arXiv 2310.01889)."""
    k, v, parts = rank.k, rank.v, dict[int, Any]()
    for i in range(rank.ranks):
        of = (rank.index - i) % rank.ranks  # whose keys these are
        if i < rank.ranks - 1:
            rank.send(rank.right, f"forward {i}", k=k, v=v)
        parts[of] = rank.attend(k, v, of)
        if i < rank.ranks - 1:
            k, v = yield rank.receive(rank.left)
    outs, lses = zip(*(parts[of] for of in range(rank.ranks)), strict=True)
    return merge(outs, lses)


def ring_backward(rank: Rank) -> Generator[Wanted, Any, Values]:
    """K and V travel again. Their gradients follow one product behind: from the rank after their own they grow at each rank, and
    come home in the end."""
    k, v, n = rank.k, rank.v, rank.ranks
    dq, own = np.zeros(rank.q.shape, np.float32), (k, v)
    for i in range(n):
        if i < n - 1:
            rank.send(rank.right, f"backward {i}", k=k, v=v)
        dq_part, dk, dv = rank.attend_back(k, v, of=(rank.index - i) % n)
        dq += dq_part
        if i == 0:
            own = dk, dv  # to be added when all others have added theirs
        else:
            if i > 1:
                so_far = yield rank.receive(rank.left)
                dk, dv = so_far[0] + dk, so_far[1] + dv
            rank.send(rank.right, f"backward {i}", dk=dk, dv=dv)
        if i < n - 1:
            k, v = yield rank.receive(rank.left)
    if n > 1:
        so_far = yield rank.receive(rank.left)
        own = so_far[0] + own[0], so_far[1] + own[1]
    return dq, *own


def all_gather(rank: Rank) -> Generator[Wanted, Any, Values]:
    """Each rank gets all of K and V first, and then computes its rows, chunk by chunk."""
    k, v = yield from _gathered(rank, "gather forward")
    out = np.empty((*rank.q.shape[:3], v.shape[3]), rank.q.dtype)
    lse = np.empty(rank.q.shape[:3], np.float32)
    for rows, keys in _chunks(rank):
        out[:, :, rows], lse[:, :, rows] = rank.attention(
            rank.q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=rank.problem.causal
        )
    return out, lse


def all_gather_backward(rank: Rank) -> Generator[Wanted, Any, Values]:
    """K and V are gathered again, so nobody keeps them all. The parts of dK and dV go to the ranks whose keys they are of."""
    k, v = yield from _gathered(rank, "gather backward")
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (rank.q, k, v))
    for rows, keys in _chunks(rank):
        own = (x[:, :, rows] for x in (rank.out, rank.lse, rank.dout))
        dq[:, :, rows], dk_part, dv_part = rank.gradients(
            rank.q[:, :, rows], k[:, :, keys], v[:, :, keys], *own, causal=rank.problem.causal
        )
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    rows_of = [rank.rows_of(peer, k.shape[2]) for peer in range(rank.ranks)]
    got = yield from rank.exchange(
        "reduce backward", lambda peer: {"dk": dk[:, :, rows_of[peer]], "dv": dv[:, :, rows_of[peer]]}
    )
    dk, dv = (cast("Array", sum(parts)) for parts in zip(*got, strict=True))  # in the order of the ranks
    return dq, dk, dv


def _gathered(rank: Rank, step: str) -> Generator[Wanted, Any, list[Array]]:
    """K and V of all ranks, in the order of the sequence."""
    got = yield from rank.exchange(step, lambda _: {"k": rank.k, "v": rank.v})
    return [rank.in_order(parts) for parts in zip(*got, strict=True)]


def _chunks(rank: Rank) -> list[tuple[slice, slice]]:
    """A rank's rows in chunks that lie in one piece, and the keys that each may see. Without a mask it is one chunk."""
    p, found, begin = rank.problem, list[tuple[slice, slice]](), 0
    if not p.causal:
        return [(slice(0, p.len_q // rank.ranks), slice(0, p.len_kv))]
    for chunk in layouts.chunks(rank.layout, p.len_q, rank.ranks, rank.index):
        found.append((slice(begin, begin + len(chunk)), slice(0, chunk.stop)))
        begin += len(chunk)
    return found


def ulysses(rank: Rank) -> Generator[Wanted, Any, Values]:
    """All to all: rows of all heads become all rows of some heads, and back (DeepSpeed Ulysses, arXiv 2309.14509)."""

    def give(peer: int) -> dict[str, Array]:
        kv = _kv_heads_of(rank, peer)
        return {"q": rank.q[:, heads_of(rank.problem.heads, rank.ranks, peer)], "k": rank.k[:, kv], "v": rank.v[:, kv]}

    got = yield from rank.exchange("to heads forward", give)
    q, k, v = (rank.in_order(parts) for parts in zip(*got, strict=True))
    out, lse = rank.attention(q, k, v, causal=rank.problem.causal)
    rank.saved = q, k, v, out, lse
    got = yield from rank.exchange("to rows forward", lambda peer: {"out": out[:, :, rank.rows_of(peer)]})
    return np.concatenate(got, axis=1), lse


def ulysses_backward(rank: Rank) -> Generator[Wanted, Any, Values]:
    """dO becomes all rows of some heads, and the gradients go back to the rows. A KV head that several ranks have is added up."""
    p, n = rank.problem, rank.ranks
    got = yield from rank.exchange("to heads backward", lambda peer: {"dout": rank.dout[:, heads_of(p.heads, n, peer)]})
    q, k, v, out, lse = rank.saved
    dq, dk, dv = rank.gradients(q, k, v, out, lse, rank.in_order(got), causal=p.causal, partial=p.kv_heads < n)

    def give(peer: int) -> dict[str, Array]:
        keys = rank.rows_of(peer, p.len_kv)
        return {"dq": dq[:, :, rank.rows_of(peer)], "dk": dk[:, :, keys], "dv": dv[:, :, keys]}

    got = yield from rank.exchange("to rows backward", give)
    sums = [np.zeros(x.shape, np.float32) for x in (rank.k, rank.v)]
    for peer, (_, *parts) in enumerate(got):
        for total, part in zip(sums, parts, strict=True):
            total[:, _kv_heads_of(rank, peer)] += part
    return np.concatenate([part[0] for part in got], axis=1), sums[0], sums[1]


def heads_of(heads: int, ranks: int, rank: int) -> slice:
    """The heads of a rank."""
    return slice(rank * heads // ranks, (rank + 1) * heads // ranks)


def _kv_heads_of(rank: Rank, peer: int) -> slice:
    """The KV heads that a rank's query heads share: if there are fewer than ranks, one that other ranks have, too."""
    kv, n = rank.problem.kv_heads, rank.ranks
    return heads_of(kv, n, peer) if kv >= n else slice(peer * kv // n, peer * kv // n + 1)


def heads(rank: Rank) -> Values:
    """Tensor parallel: each rank has some heads, and nothing is sent."""
    return rank.attention(rank.q, rank.k, rank.v, causal=rank.problem.causal)


def heads_backward(rank: Rank) -> Values:
    own = rank.q, rank.k, rank.v, rank.out, rank.lse, rank.dout
    return rank.gradients(*own, causal=rank.problem.causal, partial=False)


def dcp(rank: Rank) -> Generator[Wanted, Any, Values]:
    """Decode context parallel: each rank has some keys of all KV heads. Queries are gathered, outputs and LSEs merged."""
    q = np.concatenate((yield from rank.exchange("gather queries", lambda _: {"q": rank.q})), axis=1)
    if rank.problem.page_size is None:
        out, lse = rank.attention(q, rank.k, rank.v)
    else:
        lens = [len(layouts.striped(n, rank.ranks, rank.index, rank.interleave)) for n in rank.problem.seq_lens]
        out, lse = rank.attention_over_pages(q, rank.k, rank.v, lens)

    def give(peer: int) -> dict[str, Array]:
        own = heads_of(rank.problem.heads, rank.ranks, peer)
        return {"out": out[:, own], "lse": lse[:, own]}

    got = yield from rank.exchange("merge outputs", give)
    outs, lses = zip(*got, strict=True)
    return merge(outs, lses)


SCHEMES = {
    each.name: each
    for each in (
        Scheme("ring", ring, ring_backward),
        Scheme("all_gather", all_gather, all_gather_backward),
        Scheme("ulysses", ulysses, ulysses_backward, lse="heads"),
        Scheme("heads", heads, heads_backward, q="heads", kv="heads", lse="heads"),
        Scheme("dcp", dcp, q="heads", kv="striped", lse="heads"),
    )
}
"""The schemes by name."""
