"""A rank as a scheme sees it: what it has, `send` and `receive`, and launches whose bytes and FLOPs are counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from flashlab.parallel import layouts
from flashlab.parallel.ledger import Event, Launched, Sent, Sizes
from simulator.api import simulate
from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.fields import integer
from simulator.memory import check_memory
from simulator.operations.paged import STRAY
from simulator.problem import Problem

__all__ = ["Rank", "Scheme", "Values", "Wanted", "sizes_of"]

Values = tuple[Array, ...]
Program = Callable[["Rank"], Any]
"""What a rank does: it returns `(out, lse)`, or on the way back `(dq, dk, dv)`."""


class Wanted(NamedTuple):
    """What a rank waits for: the next message of a peer."""

    peer: int


@dataclass(frozen=True)
class Scheme:
    """How ranks share attention. `forward` returns `(out, lse)` of a rank, and `backward` `(dq, dk, dv)`, float32 or rounded.

    `q`, `kv` and `lse` say what a rank has of Q, of K and V and of the LSE: "rows" that the layout gives it, "heads", or of a
    striped cache its keys, "striped". `out`, `dout` and dQ are dealt as Q is.

    >>> import flashlab as fl
    >>> def alone(rank):  # each rank looks at its own keys only, which is wrong
    ...     return rank.attend(rank.k, rank.v, of=rank.index)
    >>> q, k, v = fl.random_inputs(fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float32"))
    >>> run = fl.parallel.simulate(fl.parallel.Scheme("alone", alone), q, k, v, ranks=4)
    >>> run.sent, bool(abs(run.out - fl.naive(q, k, v).out).max() > 0.1)
    ((0, 0, 0, 0), True)
    """

    name: str
    forward: Program
    backward: Program | None = None
    q: str = "rows"
    kv: str = "rows"
    lse: str = "rows"


class Rank:
    """One rank: what it has of the arrays, `send` and `receive`, and launches on what it has. All of it is counted."""

    def __init__(
        self, index: int, ranks: int, problem: Problem, *, layout: str, interleave: int, algorithm: Any, device: Any
    ) -> None:
        self.index, self.ranks, self.problem, self.layout, self.interleave = index, ranks, problem, layout, interleave
        self._algorithm: str = algorithm  # a name, or a program of one's own
        self._options: Any = {"scale": problem.scale, "soft_cap": problem.soft_cap, "device": device}
        self.q = self.k = self.v = self.out = self.lse = self.dout = cast("Array", None)
        self.saved: Values = ()
        """What the forward pass keeps for the way back."""
        self.events: list[Event] = []
        """What it did so far, in order."""
        self.outbox = list[tuple[int, str, dict[str, Array]]]()

    @property
    def left(self) -> int:
        """The rank before this one in the ring."""
        return (self.index - 1) % self.ranks

    @property
    def right(self) -> int:
        """The rank after it."""
        return (self.index + 1) % self.ranks

    def send(self, peer: int, step: str | int, **tensors: Array) -> None:
        """Hand arrays to the link, as they are now, and go on. To itself a rank sends for nothing."""
        peer = integer("peer", peer, 0, f"a rank from 0 to {self.ranks - 1}")
        if peer >= self.ranks:
            raise UsageError("peer", peer, f"a rank from 0 to {self.ranks - 1}")
        for name, x in tensors.items():
            if not isinstance(x, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(name, type(x).__name__, f"an array of NumPy, to send to rank {peer}")
        if not tensors:
            raise UsageError("tensors", Said("none"), f"an array at least, to send to rank {peer}")
        self.outbox.append((peer, str(step), {name: x.copy() for name, x in tensors.items()}))
        if peer != self.index:
            self.events.append(Sent(str(step), peer, sizes_of(tensors)))

    def receive(self, peer: int) -> Wanted:
        """`k, v = yield rank.receive(peer)`: wait for the next message of a peer. One array alone comes without a tuple."""
        return Wanted(peer)

    def attention(self, q: Array, k: Array, v: Array, *, causal: bool = False) -> tuple[Array, Array]:
        """`out` and `lse` of any rows and keys: a launch. A causal mask is aligned to the last row and the last key."""
        run = simulate(self._algorithm, q, k, v, lse=True, causal=causal, **self._options)
        self.events.append(Launched("forward", run.counts))
        return run.out, cast("Array", run.lse)

    def attention_over_pages(self, q: Array, k: Array, v: Array, lens: Sequence[int]) -> tuple[Array, Array]:
        """The same with keys in pages of the rank's own. Request b has the first `lens[b]` keys. Rows that nobody owns are NaN."""
        size = self.problem.page_size or 1
        used = [-(-n // size) for n in lens]
        check_memory("the pages of a rank", sum(used) * size * sum(x[0, :, 0].nbytes for x in (k, v)))
        table, free = np.full((len(used), max(used)), STRAY, np.int32), iter(range(sum(used)))
        pools = [np.full((sum(used), x.shape[1], size, x.shape[3]), np.nan, x.dtype) for x in (k, v)]
        for b, n in enumerate(lens):
            for first in range(0, n, size):
                table[b, first // size] = page = next(free)
                for pool, x in zip(pools, (k, v), strict=True):
                    keys = x[b, :, first : min(first + size, n)]
                    pool[page, :, : keys.shape[1]] = keys
        seq_lens = np.array(lens, np.int32)
        run = simulate(self._algorithm, q, *pools, table, seq_lens=seq_lens, lse=True, **self._options)
        self.events.append(Launched("forward", run.counts))
        return run.out, cast("Array", run.lse)

    def gradients(
        self, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, *, causal: bool = False, partial: bool = True
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """`(dq, dk, dv)` of any rows and keys, for the `out` and `lse` of all keys: a launch.

        With `partial`, dk and dv are float32, to be added up.
        """
        inputs = q, k, v, out, lse, dout
        run = simulate(f"{self._algorithm}_backward", *inputs, causal=causal, partial=partial, **self._options)
        self.events.append(Launched("backward", run.counts))
        return run.outputs["dq"], run.outputs["dk"], run.outputs["dv"]

    def attend(self, k: Array, v: Array, of: int) -> tuple[Array, Array]:
        """`out` and `lse` of this rank's rows over the keys that rank `of` holds. A row that sees none has 0 and -inf."""
        out = np.zeros((*self.q.shape[:3], v.shape[3]), self.q.dtype)
        lse = np.full(self.q.shape[:3], -np.inf, np.float32)
        if (found := self._seen(of)) is not None:
            rows, keys, causal = found
            out[:, :, rows], lse[:, :, rows] = self.attention(
                self.q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=causal
            )
        return out, lse

    def attend_back(self, k: Array, v: Array, of: int) -> tuple[Array, Array, Array]:
        """What this rank's rows and the keys that rank `of` holds add to dQ, and to dK and dV of these keys: float32."""
        dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (self.q, k, v))
        if (found := self._seen(of)) is not None:
            rows, keys, causal = found
            own = (x[:, :, rows] for x in (self.out, self.lse, self.dout))
            dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = self.gradients(
                self.q[:, :, rows], k[:, :, keys], v[:, :, keys], *own, causal=causal
            )
        return dq, dk, dv

    def _seen(self, of: int) -> tuple[slice, slice, bool] | None:
        p, n = self.problem, self.ranks
        return layouts.seen(self.layout, self.index, of, p.len_q // n, p.len_kv // n, causal=p.causal)

    def rows_of(self, rank: int, length: int | None = None) -> Array:
        """Which rows of a length (None: the queries) the layout gives a rank."""
        return layouts.rows(self.layout, self.problem.len_q if length is None else length, self.ranks, rank)

    def in_order(self, parts: Sequence[Array]) -> Array:
        """The rows of all ranks, put in the order of the sequence."""
        whole = np.concatenate(parts, axis=2)
        return whole[:, :, np.argsort(layouts.order(self.layout, whole.shape[2], self.ranks))]

    def exchange(self, step: str, give: Callable[[int], dict[str, Array]]) -> Generator[Wanted, Any, list[Any]]:
        """All to all: each rank gets what `give(rank)` says. Returns what this one gets of each, in their order."""
        for i in range(self.ranks):
            peer = (self.index + i) % self.ranks
            self.send(peer, step, **give(peer))
        got = dict[int, Any]()
        for i in range(self.ranks):
            peer = (self.index - i) % self.ranks
            got[peer] = yield self.receive(peer)
        return [got[peer] for peer in range(self.ranks)]


def sizes_of(tensors: Mapping[str, Array]) -> Sizes:
    """The names and bytes of a message's arrays."""
    return tuple((name, x.nbytes) for name, x in tensors.items())
