"""Lesson 14: ranks that note what they send and compute, and what went wrong where their numbers are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from flashlab.lessons.class_exercise import Found
from flashlab.lessons.histories import raised
from flashlab.parallel.ledger import ParallelCounts, Sent
from flashlab.parallel.rank import Rank, Scheme
from flashlab.parallel.ranks import ParallelRun, simulate
from simulator import UsageError
from simulator.dtypes import Array

UNKNOWN, EVERYBODY = "something that no rank has", "the queries of all ranks"


@dataclass
class Call:
    """A product: the names of the arrays that it got, whose keys the answer says they are, and what came out."""

    names: tuple[str, ...]
    of: Any
    results: tuple[Array, ...] = ()


class Message(NamedTuple):
    """What was sent to a peer: each array with the name of the one that it equals."""

    peer: int
    arrays: tuple[tuple[str, Array], ...]


class Names:
    """Arrays by what they hold: the first one of equal ones gives the name."""

    def __init__(self) -> None:
        self._names = dict[Any, str]()

    def give(self, name: str, x: Array) -> None:
        if x.size:
            self._names.setdefault(self._key(x), name)

    def of(self, x: Any) -> str:
        return self._names.get(self._key(cast("Array", x)), UNKNOWN) if isinstance(x, np.ndarray) else UNKNOWN

    @staticmethod
    def _key(x: Array) -> Any:
        return x.shape, x.dtype.str, x.tobytes()


class Watched:
    """A rank that notes what it sends and computes, in order."""

    def __init__(self, rank: Rank, names: Names) -> None:
        self.rank, self.names, self.log = rank, names, list[Call | Message]()
        self.returned: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank, name)

    exchange = Rank.exchange  # so that it is this one's messages

    @property
    def calls(self) -> list[Call]:
        return [each for each in self.log if isinstance(each, Call)]

    @property
    def messages(self) -> list[Message]:
        """Those to other ranks."""
        return [each for each in self.log if isinstance(each, Message) and each.peer != self.rank.index]

    def attend(self, k: Array, v: Array, of: int) -> tuple[Array, Array]:
        return self._noted(lambda: self.rank.attend(k, v, of), of, k, v)

    def attend_back(self, k: Array, v: Array, of: int) -> tuple[Array, Array, Array]:
        return self._noted(lambda: self.rank.attend_back(k, v, of), of, k, v)

    def attention(self, q: Array, k: Array, v: Array, *, causal: bool = False) -> tuple[Array, Array]:
        out, lse = self._noted(lambda: self.rank.attention(q, k, v, causal=causal), None, q, k, v)
        for name, x in (("output", out), ("LSE", lse)) if q.shape[1] == self.rank.problem.heads else ():
            for peer in range(self.rank.ranks):
                self.names.give(f"{name} of the heads of rank {peer}", heads_of(x, self.rank.ranks, peer))
            self.names.give(f"{name} of all heads", x)
        return out, lse

    def send(self, peer: int, step: str | int, **tensors: Array) -> None:
        self.rank.send(peer, step, **tensors)
        self.log.append(Message(peer, tuple((self.names.of(x), x.copy()) for x in tensors.values())))

    def _noted(self, compute: Callable[[], Any], of: Any, *arrays: Array) -> Any:
        call = Call(tuple(self.names.of(x) for x in arrays), of)
        self.log.append(call)
        call.results = compute()
        return call.results


def heads_of(x: Array, ranks: int, rank: int) -> Array:
    """The heads of a rank, of an array that has those of all."""
    own = x.shape[1] // ranks
    return x[:, rank * own : (rank + 1) * own]


class Ran(NamedTuple):
    """What ranks computed with an answer, and what they noted."""

    run: ParallelRun
    team: tuple[Watched, ...]
    said: str

    def wrong(self, kind: str, step: str, message: str, **more: Any) -> Found:
        return Found(kind, f"{message} ({self.said})", step, **more)


def ran(
    answer: Callable[..., Any],
    said: str,
    arrays: Sequence[Array],
    *,
    scheme: Mapping[str, Any] | None = None,
    **how: Any,
) -> Ran | Found:
    """The ranks of one case. `scheme` says more of it than its program. With a `forward` in it the answer is the way back."""
    scheme, names, team, ranks = scheme or {}, Names(), list[Watched](), how["ranks"]
    for first in range(ranks) if scheme.get("q") == "heads" else ():
        turned = ", ".join(str((first + i) % ranks) for i in range(ranks))
        own = arrays[0].shape[1] // ranks
        names.give(f"the queries of ranks {turned}" if first else EVERYBODY, np.roll(arrays[0], -first * own, axis=1))

    def watched(rank: Rank) -> Iterator[Any]:
        mine = Watched(rank, names)
        team.append(mine)
        for name in "qkv":
            names.give(f"{name.upper()} of rank {rank.index}", getattr(rank, name))
        if rank.k.shape == rank.v.shape:
            names.give(f"V and K of rank {rank.index}", np.stack([rank.k, rank.v]))
        begun = answer(mine)
        result: Any = (yield from cast("Generator[Any, Any, Any]", begun)) if inspect.isgenerator(begun) else begun
        mine.returned = result
        return result

    ways: Any = {"backward" if "forward" in scheme else "forward": watched}
    try:
        run = simulate(Scheme(name=answer.__name__, **scheme, **ways), *arrays, **how)
    except UsageError as error:
        return _taken(team, said) or _misused(answer, error, said)
    except Exception as error:  # whatever a learner's function raises
        why, step = raised(error, answer), "attend_back" if "forward" in scheme else "attend"
        if not inspect.isgeneratorfunction(answer) or ("rank.receive" in why and "yield" not in why):
            return Found("crash", f"{why}. Without `yield` before it, rank.receive doesn't wait ({said})", "receive")
        return Found("crash", f"{why} ({said})", step)
    return Ran(run, tuple(sorted(team, key=lambda each: each.rank.index)), said)


def _taken(team: Sequence[Watched], said: str) -> Found | None:
    """Did a product get something else than K and V, which it couldn't compute with?"""
    for watched in team:
        i, call, rank = len(watched.calls) - 1, watched.calls[-1] if watched.calls else None, watched.rank.index
        if call and not call.results and (why := _taken_for(call)):
            return Found("numbers", f"rank {rank}, its product {i}: {why} ({said})", "receive")
        if call and not call.results and call.names[0] == f"Q of rank {rank}":
            return Found("numbers", f"{own_heads(rank)} ({said})", "gather")
    return None


def own_heads(rank: int) -> str:
    """What is wrong where a rank with a stripe of the keys doesn't gather queries."""
    return f"rank {rank} looks with the queries of its own heads alone, and nobody else has its keys"


def _taken_for(call: Call) -> str:
    """What a product has in the place of K or V, if it has something else there."""
    for letter, name in zip("KV", call.names[-2:], strict=True):
        if not name.startswith(letter):
            return f"what it takes for {letter} is {name}"
    return ""


def _misused(answer: Any, error: UsageError, said: str) -> Found:
    if "waits for ever" in str(error.value):
        return Found("hang", f"{error.value} ({said})", "receive")
    if "nobody receives it" in str(error.value):
        return Found("asked", f"{error.value} ({said})", "send")
    kind, step = ("usage", "return") if error.argument.startswith("return value") else ("misuse", "send")
    hint = "" if inspect.isgeneratorfunction(answer) else ". Is there a `yield` before each rank.receive?"
    return Found(kind, f"{error}{hint} ({said})", step)


def looked(this: Ran, step: str = "attend") -> Found | None:
    """Has each rank seen the keys of each once, and known whose they were?"""
    for rank, watched in enumerate(this.team):
        for i, call in enumerate(watched.calls):
            where, (k, v) = f"rank {rank}, its product {i}", call.names[-2:]
            if why := _taken_for(call):
                return this.wrong("numbers", "send", f"{where}: {why}")
            if k[1:] != v[1:]:
                return this.wrong("numbers", "send", f"{where}: {k} meets {v}")
            if k != f"K of rank {call.of}":
                return this.wrong("numbers", step, f"{where}: this is {k}, and it is said to be rank {call.of}'s")
        seen = [call.of for call in watched.calls]
        for of in range(len(this.team)):
            if seen.count(of) != 1:
                looks = "never looks" if of not in seen else f"looks {seen.count(of)} times"
                return this.wrong("numbers", step, f"rank {rank} {looks} at the keys of rank {of}")
    return None


def alike(mine: Array, parts: Mapping[str, Array]) -> str:
    """What a result looks like, if it is one of these: ": the result is their mean"."""
    like = next((name for name, x in parts.items() if np.allclose(mine, x, atol=2e-2)), "")
    return f": the result is {like}" if like else ""


def mixtures(parts: Sequence[Array], own: int = 0) -> dict[str, Array]:
    """What people make of parts where they don't weigh them by e^LSE."""
    several = [x.astype(float) for x in parts]
    return {
        "their mean": cast("Array", np.mean(several, axis=0)), "their sum": cast("Array", np.sum(several, axis=0)),
        "the last one alone": several[-1], "the first one alone": several[0], "its own part alone": several[own],
    }  # fmt: skip


def budget(counts: ParallelCounts, way: str, names: str) -> list[int]:
    """Bytes that each rank sends of some tensors, by formula, in steps that have a word in their names."""
    return [
        sum(n for e in events if isinstance(e, Sent) and way in e.step for tensor, n in e.tensors if tensor in names.split())
        for events in counts.events
    ]  # fmt: skip


def in_time(this: Ran, *, back: bool = False) -> Found | None:
    """Do K and V travel while products run? On the way `back` other things travel, too."""
    ranks = len(this.team)
    for rank, watched in enumerate(this.team):
        left = done = 0
        for each in watched.log:
            if isinstance(each, Call) and left < min(done + 1, ranks - 1):
                why = f"rank {rank} computes product {done} before it sends the K and V of that product on"
                return this.wrong("asked", "order", f"{why}: nothing travels meanwhile")
            left += isinstance(each, Message) and (not back or any(name[0] == "V" for name, _ in each.arrays))
            done += isinstance(each, Call)
    return None


def to_the_right(this: Ran) -> Found | None:
    """Does each rank send to its neighbour alone?"""
    ranks = len(this.team)
    for rank, watched in enumerate(this.team):
        for message in watched.messages:
            if message.peer != (rank + 1) % ranks:
                why = f"rank {rank} sends to rank {message.peer}: in a ring it sends to rank.right alone"
                return this.wrong("asked", "send", why)
    return None


def sent(watched: Watched, names: str = "") -> int:
    """Bytes that a rank sends: of arrays whose names begin with some letters, or of all."""
    arrays = [each for message in watched.messages for each in message.arrays]
    return sum(x.nbytes for name, x in arrays if not names or name[0] in names)
