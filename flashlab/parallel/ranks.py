"""Ranks in NumPy: each has its share of the rows, keys or heads, sends and receives, and merges what it computed.

A scheme is what each rank does: a function of a `Rank`. Where it waits it is a generator, and waits by `yield`. So all ranks run
here in turn, in one thread, and each bit is the same in each run.
"""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from flashlab.parallel import layouts
from flashlab.parallel.ledger import ParallelCounts, Received
from flashlab.parallel.problems import check, scheme_of
from flashlab.parallel.rank import Rank, Scheme, Wanted, sizes_of
from flashlab.parallel.schemes import heads_of
from simulator import catalogue
from simulator.devices import Device
from simulator.dtypes import Array, as_numpy, numpy_dtype
from simulator.errors import Said, UsageError
from simulator.names import DeviceName
from simulator.operations.attention import ATTENTION
from simulator.program import Program

__all__ = ["ParallelRun", "simulate"]


@dataclass(frozen=True)
class ParallelRun(ParallelCounts):
    """What ranks computed, put together, and what they moved.

    `out` (batch, heads, len_q, head_dim_v), in the storage dtype, and `lse` (batch, heads, len_q), float32. dq, dk and dv have
    the shapes and the dtype of q, k and v; without `dout` they are None.
    """

    out: Array = field(repr=False, compare=False)
    lse: Array = field(repr=False, compare=False)
    dq: Array | None = field(default=None, repr=False, compare=False)
    dk: Array | None = field(default=None, repr=False, compare=False)
    dv: Array | None = field(default=None, repr=False, compare=False)


def simulate(
    scheme: str | Scheme | Callable[[Rank], Any], q: Any, k: Any, v: Any, *, dout: Any = None, ranks: int, layout: str = "zigzag",
    algorithm: str | Program = "flash2", interleave: int = 1, page_size: int | None = None,
    device: Device | DeviceName = "h100", **masks: Any,
) -> ParallelRun:  # fmt: skip
    """Attention on several ranks, in NumPy: the numbers, what each rank launches, and every byte between them.

    `scheme` is ring, all_gather, ulysses, heads or dcp, a `Scheme`, or a function of a `Rank` for the forward pass. Arrays are as
    `fl.simulate` takes them, whole: each rank gets its share. With `dout`, the gradient of the output, there is a way back, too.
    `layout` ("contiguous" or "zigzag") says which rows a rank has. `algorithm` computes each part, and the one called
    `…_backward` its gradients. Masks are `causal`, `scale` and `soft_cap`.

    dcp stripes keys over ranks, `interleave` at a time. With a `page_size` each rank has them in pages of its own (`algorithm`
    "paged"), and `lengths` may say how many keys each request has, as in a `Problem`.

    Raises `UsageError` for bad input, for a scheme whose ranks wait for ever, and for messages that nobody receives.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float32", causal=True)
    >>> q, k, v = fl.random_inputs(p, seed=0)
    >>> run = fl.parallel.simulate("ring", q, k, v, dout=q, ranks=4, causal=True)
    >>> bool(abs(run.out - fl.naive(q, k, v, causal=True).out).max() < 1e-5), run.dk.shape
    (True, (1, 2, 64, 16))
    >>> from flashlab.parallel import Link
    >>> run.links[Link(0, 1, "forward 0", "k", "link.sent")] == 2 * 16 * 16 * 4  # its share of K, heads × rows × head dim × bytes
    True
    """
    plan = scheme_of(scheme)
    given = {name: as_numpy(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    lengths = masks.pop("lengths", None)
    problem = ATTENTION.problem(given, **masks).replace(page_size=page_size, lengths=lengths)
    check(plan, problem, ranks, layout, interleave, backward=dout is not None)
    row = catalogue.get(algorithm)
    if dout is not None:
        catalogue.get(f"{row.name}_backward")
        given["dout"] = as_numpy("dout", dout)
        shape = (*given["q"].shape[:3], problem.head_dim_v)
        if given["dout"].shape != shape or given["dout"].dtype != given["q"].dtype:
            raise UsageError("dout", given["dout"], f"an array of {problem.dtype}, {shape}")
    how: Any = {"layout": layout, "interleave": interleave, "device": Device.named(device)}
    how["algorithm"] = algorithm if dout is None else row.name
    team = [Rank(i, ranks, problem, **how) for i in range(ranks)]
    dealt = {"q": plan.q, "k": plan.kv, "v": plan.kv, "dout": plan.q, "out": plan.q, "lse": plan.lse, "dq": plan.q}
    dealt |= {"dk": plan.kv, "dv": plan.kv}
    for rank in team:
        for name, x in given.items():
            setattr(rank, name, x[_share(dealt[name], rank, x.shape)])
    shapes = {name: x.shape for name, x in given.items()}
    shapes |= {"out": (*shapes["q"][:3], problem.head_dim_v), "lse": shapes["q"][:3]}
    found = _joined(plan, team, _together(plan, team, plan.forward), ("out", "lse"), dealt, shapes)
    if dout is not None:
        for rank in team:
            rank.out, rank.lse = (found[name][_share(dealt[name], rank, shapes[name])] for name in ("out", "lse"))
        backward = cast("Callable[[Rank], Any]", plan.backward)
        shapes |= {f"d{name}": shapes[name] for name in "qkv"}
        found |= _joined(plan, team, _together(plan, team, backward), ("dq", "dk", "dv"), dealt, shapes)
    return ParallelRun(plan.name, problem, layout, tuple(tuple(rank.events) for rank in team), **found)


def _share(dealt: str, rank: Rank, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Where a rank's share of an array lies in the whole."""
    if dealt == "heads":
        return slice(None), heads_of(shape[1], rank.ranks, rank.index)
    if dealt == "striped":
        return slice(None), slice(None), layouts.striped(shape[2], rank.ranks, rank.index, rank.interleave)
    return slice(None), slice(None), rank.rows_of(rank.index, shape[2])


def _joined(
    plan: Scheme, team: list[Rank], results: list[Any], names: tuple[str, ...], dealt: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Array]:  # fmt: skip
    """What ranks returned, put together and rounded. Raises `UsageError` for a rank that returned something else."""
    dtype = numpy_dtype(team[0].problem.dtype)
    whole = {name: np.empty(shapes[name], np.float32 if name == "lse" else dtype) for name in names}
    for rank, result in zip(team, results, strict=True):
        parts = cast("list[Any]", list(result) if isinstance(result, tuple | list) else [])  # pyright: ignore
        wanted = {name: whole[name][_share(dealt[name], rank, shapes[name])].shape for name in names}
        if [getattr(x, "shape", None) for x in parts] != list(wanted.values()):
            shown = ", ".join(f"{name} {shape}" for name, shape in wanted.items())
            raise UsageError(f"return value of {plan.name}, rank {rank.index}", cast("object", result), shown)
        for name, x in zip(names, parts, strict=True):
            whole[name][_share(dealt[name], rank, shapes[name])] = x
    return whole


def _together(plan: Scheme, team: list[Rank], program: Callable[[Rank], Any]) -> list[Any]:
    """Run a program on all ranks, each until it waits. Messages of a rank to another arrive in the order in which they are sent."""
    results: list[Any] = [None] * len(team)
    running, waits = dict[int, Generator[Wanted, Any, Any]](), dict[int, int]()
    mail = defaultdict[tuple[int, int], deque[tuple[str, dict[str, Array]]]](deque)

    def post(rank: Rank) -> None:
        for peer, step, tensors in rank.outbox:
            mail[rank.index, peer].append((step, tensors))
        rank.outbox.clear()

    def advance(rank: Rank, message: Any) -> None:
        try:
            wanted = running[rank.index].send(message)
        except StopIteration as end:
            del running[rank.index]
            results[rank.index] = end.value
        else:
            if not isinstance(wanted, Wanted) or wanted.peer not in range(len(team)):  # pyright: ignore
                raise UsageError(f"yield of {plan.name}, rank {rank.index}", wanted, "rank.receive(peer)")
            waits[rank.index] = wanted.peer
        post(rank)

    for rank in team:
        begun = program(rank)
        if inspect.isgenerator(begun):
            running[rank.index] = cast("Generator[Wanted, Any, Any]", begun)
            advance(rank, None)
        else:
            results[rank.index] = begun
            post(rank)
    while running:
        ready = [i for i in running if mail[waits[i], i]]
        if not ready:
            shown = ", ".join(f"rank {i} for rank {waits[i]}" for i in sorted(running))
            raise UsageError(plan.name, Said(f"waits for ever ({shown})"), "a send for each receive")
        for i in ready:
            step, tensors = mail[waits[i], i].popleft()
            if waits[i] != i:
                team[i].events.append(Received(step, waits[i], sizes_of(tensors)))
            values = tuple(tensors.values())
            advance(team[i], values[0] if len(values) == 1 else values)
    for (sender, receiver), left in mail.items():
        if left:
            shown = f"{', '.join(left[0][1])} of rank {sender}, step {left[0][0]}, to rank {receiver}"
            raise UsageError(plan.name, Said(f"{shown}: nobody receives it"), "a receive for each send")
    return results
