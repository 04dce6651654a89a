"""What ranks of a torch.distributed group tell one another: that they mean the same call, and then rows.

A call that fails on one rank ends on all of them: with a `UsageError` where they disagree, which all find out before a row is
sent, and with `Interrupted` where a rank is gone. Transfers write to buffers of their own, which nobody sees before they are full.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from flashlab.run.autograd import torch
from simulator.errors import Said, Unavailable, UsageError

__all__ = ["Interrupted", "Peers", "counted", "peers_of"]


_HEAD_START = 40_000
"""Cycles, some 20 µs."""


class Interrupted(RuntimeError):
    """Another rank is gone, or late. One line says which step that ended."""


Ledger = Counter[tuple[int, str, str]]
_ledger: Ledger | None = None


@contextmanager
def counted() -> Generator[Ledger]:
    """Counts what this rank sends meanwhile: bytes by `(peer, step, tensor)`, a group's ranks counted from 0."""
    global _ledger
    before, _ledger = _ledger, Ledger()
    try:
        yield _ledger
    finally:
        _ledger = before


class Peers:
    """A rank's view of its group: `rank` of `ranks`."""

    def __init__(self, group: Any) -> None:
        dist = torch.distributed
        self.group, self._dist = group, dist
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._gather = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )  # its name before torch 2.13
        self._agreed: Any = None
        self.checked: Any = None
        """What was checked and agreed on last."""
        self._rounds = 0

    def agree(self, said: Mapping[str, Any], refused: UsageError | None = None) -> None:
        """Returns where all ranks say the same. Else all raise the same `UsageError`, or `Interrupted` if one says nothing in time.

        They compare over the group's store. What equals the call before isn't compared again. That can't go wrong: all agreed
        on the call before, so two ranks that both repeat it mean the same, and one that repeats it while another doesn't sends
        nothing to the store. Then the other stops. If this rank has `refused` its arrays, the others are told so.
        """
        if refused is None and said == self._agreed:
            return
        self._agreed = None
        if self.ranks > 1:
            text = {"refused": str(refused)} if refused else {name: repr(value) for name, value in said.items()}
            others = self._told(json.dumps(text))
            if refused is None:
                _compare([json.loads(x) for x in others])
        if refused is not None:
            raise refused
        self._agreed = dict(said)

    def _told(self, text: str) -> list[str]:
        """What each rank says in this round."""
        c10d = self._dist.distributed_c10d
        store = self._dist.PrefixStore(f"flashlab/{self.group.group_name}", c10d._get_default_store())
        keys = [f"{self._rounds}/{rank}" for rank in range(self.ranks)]
        self._rounds += 1
        store.set(keys[self.rank], text)
        try:
            store.wait(keys, store.timeout)
            found = [store.get(key).decode() for key in keys]
        except RuntimeError as error:
            seconds = store.timeout.total_seconds()
            line = f"a rank didn't come to this call within {seconds:g} s, or another call is its next: {_first(error)}"
            raise Interrupted(line) from error
        if len(set(found)) > 1:  # all stop: the one that has the store stays until the others have read
            with suppress(RuntimeError):
                store.set(f"{keys[self.rank]}/read", "")
                store.wait([f"{key}/read" for key in keys], store.timeout)
        return found

    @contextmanager
    def _named(self, step: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            line = f"rank {self.rank} of {self.ranks}: {step} was interrupted, nothing is returned: {_first(error)}"
            raise Interrupted(line) from error

    def shift(self, step: str, **tensors: Any) -> Pending:
        """To the next rank of the ring, and the same from the one before. Tensors are contiguous, and nobody writes to them."""
        right, left, dist = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks, self._dist
        received = [torch.empty_like(x) for x in tensors.values()]
        self._count(step, {name: x.nbytes for name, x in tensors.items()}, [right])
        with self._named(step):
            # the order is one on all ranks, and a tag tells tensors of one batch apart
            sends = [dist.P2POp(dist.isend, x, None, self.group, i, right) for i, x in enumerate(tensors.values())]
            receives = [dist.P2POp(dist.irecv, x, None, self.group, i, left) for i, x in enumerate(received)]
            works = dist.batch_isend_irecv([*sends, *receives])
        return Pending(self, step, works, received, [*tensors.values()])

    def head_start(self, x: Any) -> None:
        """On a GPU the next kernel waits a moment, so that the blocks of a transfer come to their SMs before its own.

        Both wait for the same work. The kernel is the faster to start, takes all SMs, and keeps them until it ends: nothing would
        overlap. Once NCCL has its SMs, a kernel's last blocks wait for them, and then take what is left to do. A backward pass
        needs no such wait, for its first launch is a short one.
        """
        if x.is_cuda:
            torch.cuda._sleep(_HEAD_START)

    def gather(self, step: str, x: Any, sizes: Mapping[str, int]) -> Pending:
        """`(ranks, …)`: what each rank has, to all. `sizes` are the bytes of the tensors in x."""
        found = x.new_empty((self.ranks, *x.shape))
        self._count(step, sizes, range(self.ranks))
        with self._named(step):
            work = self._gather(found.flatten(0, 1), x, group=self.group, async_op=True)
        return Pending(self, step, [work], [found], [x])

    def exchange(self, step: str, x: Any, sizes: Mapping[str, int]) -> Pending:
        """`(ranks, …)`: x[i] goes to rank i, and what rank i sends is at i. `sizes` are the bytes of the tensors in an x[i]."""
        found = torch.empty_like(x)
        self._count(step, sizes, range(self.ranks))
        with self._named(step):
            work = self._dist.all_to_all_single(found, x, group=self.group, async_op=True)
        return Pending(self, step, [work], [found], [x])

    def _count(self, step: str, sizes: Mapping[str, int], peers: Any) -> None:
        if _ledger is not None:
            for peer in peers:
                if peer != self.rank:
                    _ledger.update({(peer, step, name): nbytes for name, nbytes in sizes.items()})


class Pending:
    """A transfer on its way. It keeps what is sent alive."""

    def __init__(self, peers: Peers, step: str, works: list[Any], received: list[Any], sent: list[Any]) -> None:
        self._peers, self._step, self._works, self._received, self._sent = peers, step, works, received, sent

    def wait(self) -> list[Any]:
        """What was received. On a GPU the current stream waits, and on a CPU the caller does."""
        with self._peers._named(self._step):  # pyright: ignore[reportPrivateUsage]
            for work in self._works:
                work.wait()
        self._sent.clear()
        return self._received


_known: WeakKeyDictionary[Any, Peers] = WeakKeyDictionary()


def peers_of(group: Any) -> Peers:
    """The peers of a group (None: all ranks). Raises `Unavailable` where torch.distributed wasn't started."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        raise Unavailable("no ranks here: call torch.distributed.init_process_group first, or start by torchrun")
    group = dist.group.WORLD if group is None else group
    found = _known.get(group)
    if found is None:
        if dist.get_rank(group) < 0:
            raise UsageError("group", Said("a group without this rank"), "one that this rank is in")
        found = _known[group] = Peers(group)
    return found


def _compare(said: list[dict[str, str]]) -> None:
    """Raises the same `UsageError` on all ranks, where one says something else than rank 0."""
    for rank, each in enumerate(said):
        if "refused" in each:
            raise UsageError(f"rank {rank}", Said(each["refused"]), "arrays that it takes, as on the other ranks")
    first, *others = said
    for rank, each in enumerate(others, 1):
        for name, value in each.items():
            if value != first.get(name):
                raise UsageError(f"{name} of rank {rank}", Said(value), f"{first.get(name)}, as rank 0 has")


def _first(error: Exception) -> str:
    """The first line of an error of torch's."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
