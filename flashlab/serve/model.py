"""A model of serving that knows no blocks, and a driver that holds a block manager to it.

To the model, a request is a list of tokens, some of which are computed. A pool stands for K and V: each of its rows holds which
tokens were written there, the token's own and all before it, as K and V of a deeper layer depend on them. Launches wait in a queue.
When one runs, it makes its copies, writes its rows, and reads all rows of its requests by the block table that it was given.

An action is a name and two numbers, which choose among what is there. So any part of a run can be run again, and a run that
fails is shrunk by leaving out what it doesn't need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, NamedTuple

from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.invariants import violations
from flashlab.serve.requests import Request
from simulator.errors import UsageError

__all__ = ["ACTIONS", "Action", "Failure", "Pool", "World", "drive", "replay", "shrunk"]

Manager = Callable[..., KVCacheManager]
_MOST_REQUESTS = 6


class Action(NamedTuple):
    """What happens, and two numbers that choose to whom and how."""

    name: str
    a: int
    b: int


class Pool(NamedTuple):
    """The pool of a run."""

    num_blocks: int = 8
    block_size: int = 2
    enable_caching: bool = True
    watermark: float = 0.0


class Failure(AssertionError):
    """What a manager did wrong."""


@dataclass
class _Launch:
    """A launch in the queue, with all that it was given."""

    requests: list[Request]
    copies: list[tuple[int, int]]
    slots: list[int]
    table: list[list[int]]


class World:
    """A manager, a pool that stands for K and V, and what the model says of each request.

    >>> world = World(KVCacheManager)
    >>> for action in (Action("arrive", 5, 3), Action("allocate", 0, 3), Action("launch", 0, 0), Action("run", 0, 0)):
    ...     world.do(action)
    >>> world.computed
    {Request(name='r0', tokens=[1, 0, 1, 0], salt=''): 4}
    """

    def __init__(self, manager: Manager, pool: Pool | None = None) -> None:
        pool = pool or Pool()
        self.manager = manager(**pool._asdict())
        self.rows: list[int | None] = [None] * (pool.num_blocks * pool.block_size)
        self.computed: dict[Request, int] = {}
        self.freed: list[Request] = []  # while a launch reads them
        self.queue: list[_Launch] = []
        self.arrived = 0

    def do(self, action: Action) -> None:
        """Do something if there is somebody to do it to, and look at everything. Raises `Failure`."""
        try:
            getattr(self, action.name)(action.a, action.b)
        except Failure:
            raise
        except Exception as error:  # whatever a wrong manager raises
            raise Failure(f"{action.name} raised {type(error).__name__}: {error}") from error
        self.check()

    # -- actions

    def arrive(self, a: int, b: int) -> None:
        """A request with 1 to 12 tokens, which many others begin with."""
        if len(self.computed) < _MOST_REQUESTS:
            tokens = [a >> i & 1 for i in range(1 + b % 12)]
            self.computed[Request(f"r{self.arrived}", tokens, "salt" if b % 5 == 4 else "")] = 0
            self.arrived += 1

    def answer(self, a: int, b: int) -> None:
        """A request gets another token."""
        for request in self._one(a, self.computed):
            request.tokens.append(b & 1)

    def allocate(self, a: int, b: int) -> None:
        """Room for some tokens of a request that is not in flight, if there is room."""
        m = self.manager
        idle = [r for r, n in self.computed.items() if n < len(r.tokens) and not self._in_flight(r)]
        for request in self._one(a, idle):
            newcomer = request not in m.owned
            hits, found = m.get_computed_blocks(request)
            if newcomer and (found >= len(request.tokens) or found != len(hits) * m.block_size):
                raise Failure(f"a hit of {found} tokens, of {len(request.tokens)}")
            if newcomer and found != (there := self._there(request)):
                raise Failure(f"{found} tokens of {request.name} were found, and {there} are there")
            if not newcomer and found != self.computed[request]:
                raise Failure(f"{request.name} has {found} tokens computed, not {self.computed[request]}")
            n = 1 + b % (len(request.tokens) - found)
            before, order = self._state(), [block for block in m.free_list if block not in hits]
            room, need = self._free() - self._idle(hits if newcomer else ()), -(-(found + n) // m.block_size)
            need -= len(hits)
            shared = not newcomer and found % m.block_size > 0 and m.refs[hits[-1]] > 1
            if newcomer and m.owned:
                room -= m.watermark
            too_long = -(-(found + n) // m.block_size) >= m.num_blocks
            try:
                new = m.allocate_slots(request, n)
            except UsageError:
                if not too_long:
                    raise
                new = None
            if new is None and (self._state() != before or (need + shared <= room and not too_long)):
                raise Failure(f"{need + shared} blocks were refused where {room} are free, or some were kept")
            if new is not None:
                if need + shared > room or len(new) != need + shared:
                    raise Failure(f"got {len(new)} blocks of {room} where {need + shared} are needed")
                if new != order[: len(new)]:
                    raise Failure(f"took the blocks {new}, where {order} is the order")
                self.computed[request] = found

    def launch(self, a: int, b: int) -> None:
        """Queue a launch of all that have room for new tokens, or of some."""
        m = self.manager
        waiting = [r for r in self._live() if m.owned[r].reserved and not self._queued(r)]
        if waiting:
            some = [r for i, r in enumerate(waiting) if i >= a % len(waiting) or m.owned[r].source is not None]
            table = [m.block_table([request])[0].tolist() for request in some]
            self.queue.append(_Launch(some, m.take_copies(), m.slot_mapping(some).tolist(), table))

    def run(self, a: int, b: int) -> None:
        """The first launch of the queue runs."""
        if not self.queue:
            return
        launch, size = self.queue.pop(0), self.manager.block_size
        self._copy(launch)
        after = [self._expected(r, self._end(r)) for r in launch.requests]
        written = [row for r, rows in zip(launch.requests, after, strict=True) for row in rows[self._written(r) :]]
        for slot, row in zip(launch.slots, written, strict=True):
            self.rows[slot] = row
        for request, rows, blocks in zip(launch.requests, after, launch.table, strict=True):
            for n, row in enumerate(rows):
                if self.rows[blocks[n // size] * size + n % size] != row:
                    raise Failure(f"the launch reads wrong K and V for token {n} of {request.name}")
            self.manager.commit(request)
            if request in self.freed:
                self.freed.remove(request)
            else:
                self.computed[request] = len(rows)

    def fail(self, a: int, b: int) -> None:
        """What was allocated is given back: an exception came before the launch, or while it wrote."""
        m = self.manager
        if self.queue and b % 2:
            launch = self.queue.pop()
            if b & 2:
                self._copy(launch)
            for slot in launch.slots[: b // 4 % (len(launch.slots) + 1)] if b & 2 else ():
                self.rows[slot] = -1
            failed = launch.requests
        else:
            failed = [r for r in self._live() if m.owned[r].reserved and not self._queued(r)]
        for request in failed:
            m.abandon(request)
            if request in self.freed:
                self.freed.remove(request)

    def fork(self, a: int, b: int) -> None:
        """A request is forked, and may go on with another token."""
        m = self.manager
        idle = [r for r in self._live() if not m.owned[r].reserved and m.owned[r].source is None]
        if len(self.computed) < _MOST_REQUESTS:
            for parent in self._one(a, idle):
                tokens = parent.tokens[: self.computed[parent]] + [b & 1]
                child = Request(f"r{self.arrived}", tokens, parent.salt)
                self.arrived += 1
                before = self._state()
                m.fork(parent, child)
                m.free(child)
                if self._state() != before:
                    raise Failure("a fork that is freed at once leaves something behind")
                m.fork(parent, child)
                self.computed[child] = self.computed[parent]

    def free(self, a: int, b: int) -> None:
        """A request ends, is cancelled, or is preempted: then it comes back later, with all its tokens."""
        for request in self._one(a, [r for r in self._live() if r not in self.freed]):
            own = self.manager.owned[request]
            flying = own.reserved > 0
            self.manager.free(request)
            order = [x for x in self.manager.free_list if x in own.table and self.manager.contents[x] is not None]
            if order != [x for x in reversed(own.table) if x in order]:
                raise Failure(f"blocks {order} are free in this order, and {own.table} was the table")
            if flying:
                self.freed.append(request)
            if b % 3 or flying:
                del self.computed[request]
            else:
                self.computed[request] = 0

    def free_again(self, a: int, b: int) -> None:
        """Somebody frees what is free, or was freed already. That is refused, and changes nothing."""
        before = self._state()
        for request in [*self.freed[-1:], Request("stranger", [1])]:
            try:
                self.manager.free(request)
            except UsageError:
                continue
            raise Failure(f"{request.name} was freed twice")
        if self._state() != before:
            raise Failure("freeing what is free has changed something")

    def drain(self, a: int, b: int) -> None:
        """All launches run, and all requests end: then the whole pool is free."""
        while self.queue:
            self.run(0, 0)
        self.fail(0, 0)
        for request in self._live():
            self.manager.free(request)
        self.computed.clear()
        if self._free() != self.manager.num_blocks - 1 or self.manager.num_free_blocks != self._free():
            raise Failure("all requests have ended, and blocks are still in use")

    # -- what is looked at

    def check(self) -> None:
        """Raise `Failure` for a broken invariant, and for rows that a request owns and that aren't its own."""
        m = self.manager
        if found := violations(m):
            raise Failure("; ".join(found))
        for launch in self.queue:
            used = {block for line in launch.table for block in line} | {source for source, _ in launch.copies}
            if lost := used & set(m.free_list):
                raise Failure(f"blocks {sorted(lost)} are free while their launch is queued")
        owed = {own.table[own.written // m.block_size] for own in m.owned.values() if own.source is not None}
        for request, n in self.computed.items():
            own = m.owned.get(request)
            if own is None:
                if n:
                    raise Failure(f"{request.name} has lost its {n} tokens")
                continue
            if own.written != n:
                raise Failure(f"{request.name} has {own.written} tokens computed, not {n}")
            for i, row in enumerate(self._expected(request, n)):
                block = own.table[i // m.block_size]
                if block not in owed and self.rows[block * m.block_size + i % m.block_size] != row:
                    raise Failure(f"token {i} of {request.name} is not in its block")

    def _expected(self, request: Request, n: int) -> list[int]:
        """The rows of a request's first tokens: what each stands for depends on all before it."""
        rows, before = list[int](), hash((request.salt == "salt",))
        for token in request.tokens[:n]:
            before = hash((before, token))
            rows.append(before)
        return rows

    def _there(self, request: Request) -> int:
        """How many tokens of a newcomer's beginning are in full blocks of the pool, its last token aside."""
        known, size = set[tuple[str, tuple[int, ...]]](), self.manager.block_size
        for content in filter(None, self.manager.contents):
            tokens, at = content.tokens, content.parent
            while at is not None:
                tokens, at = at.tokens + tokens, at.parent
            known.add((content.salt, tokens))
        found = 0
        while found + size < len(request.tokens) and (request.salt, tuple(request.tokens[: found + size])) in known:
            found += size
        return found

    def _one(self, a: int, among: Any) -> list[Request]:
        found = list(among)
        return [found[a % len(found)]] if found else []

    def _live(self) -> list[Request]:
        """Those that own blocks."""
        return [r for r in (*self.computed, *self.freed) if r in self.manager.owned]

    def _queued(self, request: Request) -> bool:
        return any(request in launch.requests for launch in self.queue)

    def _in_flight(self, request: Request) -> bool:
        return request in self.manager.owned and self.manager.owned[request].reserved > 0

    def _written(self, request: Request) -> int:
        return self.manager.owned[request].written

    def _end(self, request: Request) -> int:
        own = self.manager.owned[request]
        return own.written + own.reserved

    def _copy(self, launch: _Launch) -> None:
        size = self.manager.block_size
        for source, target in launch.copies:
            self.rows[target * size : (target + 1) * size] = self.rows[source * size : (source + 1) * size]

    def _used(self) -> set[int]:
        """The blocks that a table has, or a launch copies from, by what requests own alone."""
        owned = self.manager.owned.values()
        return {x for own in owned for x in (*own.table, *([own.source] if own.source else []))}

    def _free(self) -> int:
        """How many blocks are free."""
        return self.manager.num_blocks - 1 - len(self._used())

    def _idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free."""
        return len(set(blocks) - self._used())

    def _state(self) -> tuple[Any, ...]:
        m = self.manager
        tables = {request.name: (tuple(own.table), own.written) for request, own in m.owned.items()}
        return tables, list(m.refs), list(m.holds), sorted(m.free_list), list(m.copies), dict(m.cached)


ACTIONS = {
    "arrive": 4, "answer": 4, "allocate": 9, "launch": 5, "run": 5, "fail": 2, "fork": 3, "free": 3, "free_again": 1, "drain": 0.1,
}  # fmt: skip
"""How often the driver draws each action."""
_EPISODE = 200


def drive(manager: Manager = KVCacheManager, *, steps: int, seed: int = 0) -> tuple[Pool, list[Action], str] | None:
    """Hold a manager to the model for so many steps: None, or the run that failed, shrunk, and what it did wrong.

    Each run has 200 actions, on a pool of 3 to 11 blocks of 1 to 4 tokens, with or without caching and a watermark.

    >>> drive(steps=400)
    """
    random = Random(seed)
    names, weights = list(ACTIONS), list(ACTIONS.values())
    for _ in range(-(-steps // _EPISODE)):
        pool = Pool(random.randint(3, 11), random.randint(1, 4), random.random() < 0.9, random.choice([0, 0, 0.3]))
        drawn = random.choices(names, weights, k=_EPISODE)
        actions = [Action(name, random.getrandbits(12), random.getrandbits(8)) for name in drawn]
        if replay(manager, pool, actions) is not None:
            least = shrunk(manager, pool, actions)
            return pool, least, str(replay(manager, pool, least))
    return None


def replay(manager: Manager, pool: Pool, actions: Sequence[Action]) -> str | None:
    """What a manager does wrong in a run, or None. At its end all launches run, and all requests end."""
    world = World(manager, pool)
    try:
        for action in (*actions, Action("drain", 0, 0)):
            world.do(action)
    except Failure as failure:
        return str(failure)
    return None


def shrunk(manager: Manager, pool: Pool, actions: Sequence[Action]) -> list[Action]:
    """A run that fails, without the actions that it doesn't need, and with small numbers."""

    def fails(run: list[Action]) -> bool:
        return replay(manager, pool, run) is not None

    kept, before = list(actions), list[Action]()
    while kept != before:
        before = kept
        for part in [len(before) >> n for n in range(len(before).bit_length())]:
            at = 0
            while at < len(kept):
                fewer = kept[:at] + kept[at + part :]
                kept, at = (fewer, at) if fails(fewer) else (kept, at + part)
        for i, field in product(range(len(kept)), ("a", "b")):
            for value in range(min(4, getattr(kept[i], field))):
                smaller = [*kept[:i], kept[i]._replace(**{field: value}), *kept[i + 1 :]]
                if fails(smaller):
                    kept = smaller
                    break
    return kept
