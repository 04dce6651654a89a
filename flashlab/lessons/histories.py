"""A learner's block manager held to a model that knows no pages: histories are drawn, replayed and shrunk.

To the model a request is a list of tokens, each with a number of its own. A pool stands for K and V: a row holds the number of the
token that was written there last. After each operation all requests read their tokens back through the manager's tables. The
manager's own attributes have to mean what the skeleton says of them, so that a mistake shows in the operation that makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, cast

from flashlab.lessons.lines import at_line, line_of

NAMES = "abcdef"
EPISODE = 200
"""Operations of a history, before it is shrunk."""
MOST = 12
"""Blocks of a pool."""
ROOMY = 4
"""Blocks that are enough for a short history."""
SHRUNK = 3
"""How many histories that fail are shrunk. The shortest is shown."""
SEARCHED = 3
"""Of histories of so many operations, or fewer, all are tried."""
_ATTRIBUTES = ("tables", "lengths", "refs", "free_blocks")


class Operation(NamedTuple):
    """A call of the manager: its verb, the request, and the child of a fork or the number of new tokens."""

    verb: str
    request: str
    other: str = ""
    n: int = 0

    def __str__(self) -> str:
        rest = f", {self.other!r}" if self.other else f", {self.n}" if self.n else ""
        return f"{self.verb}({self.request!r}{rest})"


class Pool(NamedTuple):
    """So many blocks of so many tokens."""

    blocks: int
    size: int


class Broken(Exception):
    """What an operation has broken, and as which kind of verdict."""

    def __init__(self, message: str, kind: str = "history") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Model:
    """What requests have, without pages. Forks share all tokens (`copying`), or those of full blocks."""

    pool: Pool
    copying: bool
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    written: int = 0

    def refuses(self, operation: Operation) -> str:
        """Why an operation is to be refused, or ""."""
        if operation.verb != "allocate_slots" and operation.request not in self.tokens:
            return f"there is no request {operation.request!r}"
        if operation.verb == "fork" and operation.other in self.tokens:
            return f"there is a request {operation.other!r} already"
        return ""

    def chunks(self, name: str) -> list[tuple[int, ...]]:
        """A request's tokens, a block of them at a time. Equal chunks may share a block, others can't."""
        tokens, size = self.tokens[name], self.pool.size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)]

    @property
    def used(self) -> int:
        """The least blocks that hold all tokens."""
        return len({chunk for name in self.tokens for chunk in self.chunks(name)})

    def copies(self, name: str) -> int:
        """How many blocks have to be copied before a request writes: one, if its last block isn't full, and others have it."""
        last = self.chunks(name)[-1] if self.tokens.get(name) else ()
        shared = any(last in self.chunks(other) for other in self.tokens if other != name)
        return int(0 < len(last) < self.pool.size and shared)

    def do(self, operation: Operation) -> bool:
        """Make it so, unless there is no room: then False."""
        verb, name, other, n = operation
        if verb == "free":
            del self.tokens[name]
        elif verb == "fork":
            tokens, size = self.tokens[name], self.pool.size
            self.tokens[other] = tokens[: len(tokens) if self.copying else len(tokens) // size * size]
        else:
            before = self.tokens.get(name)
            self.tokens[name] = [*(before or ()), *range(self.written, self.written + n)]
            if self.used > self.pool.blocks:
                self.tokens.pop(name) if before is None else self.tokens.update({name: before})
                return False
            self.written += n
        return True


def drawn(random: Random, pool: Pool, *, copying: bool, length: int = EPISODE) -> list[Operation]:
    """A history of a pool. Most of it can be done; some of it is to be refused."""
    model, found = Model(pool, copying), list[Operation]()
    while len(found) < length:
        live = list(model.tokens)
        absent = [name for name in NAMES if name not in live]
        full = model.used > 0.8 * pool.blocks  # then it is time that some are over
        verb = random.choices(("allocate_slots", "fork", "free"), (3, 1, 3) if full else (5, 3, 1))[0]
        strange = random.random() < 0.05
        if verb == "allocate_slots":
            operation = Operation(verb, random.choice(NAMES), n=random.randint(1, pool.size + 1))
        elif verb == "fork":
            operation = Operation(verb, random.choice(NAMES if strange or not live else live),
                                  random.choice(NAMES if strange or not absent else absent))  # fmt: skip
        else:
            operation = Operation(verb, random.choice(NAMES if strange or not live else live))
        found.append(operation)
        if not model.refuses(operation):
            model.do(operation)
    return found


@dataclass
class World:
    """A manager, the model, and a pool that stands for K and V.

    `copied` counts blocks, `least` those that had to be, and `forked` those that forks shared.
    """

    manager: Any
    model: Model
    copied: int = 0
    least: int = 0
    forked: int = 0

    def __post_init__(self) -> None:
        pool = self.model.pool
        self.rows: list[int | None] = [None] * (pool.blocks * pool.size)

    def do(self, operation: Operation) -> str:
        """What the manager answers. Raises `Broken`."""
        model, name, refused = self.model, operation.request, self.model.refuses(operation)
        before = len(model.tokens.get(name, ()))
        copies = model.copies(name) if operation.verb == "allocate_slots" else 0
        room = bool(refused) or model.do(operation)
        kept = self._state() if refused or not room else None
        try:
            answer = getattr(self.manager, operation.verb)(*(x for x in operation[1:] if x))
        except Exception as error:
            if refused and isinstance(error, KeyError):
                self._unchanged(kept, "it is refused, and yet")
                return "KeyError"
            raise Broken(f"it raises {raised(error, self.manager)}", "crash") from error
        if refused:
            raise Broken(f"{refused}: a KeyError belongs here, and it returns {answer!r}")
        self._answered(operation, answer, room)
        if not room:
            self._unchanged(kept, "there is no room, and yet")
            return repr(answer)
        for wrong in (*self._of_requests(), *self._of_blocks()):
            raise Broken(wrong)
        if operation.verb == "allocate_slots":
            self._write(name, before, answer if model.copying else [], copies)
        if operation.verb == "fork":
            self.forked += len(self.manager.tables[operation.other])
        self._read()
        return repr(answer)

    # -- what is looked at

    def _state(self) -> tuple[Any, ...]:
        tables, lengths, refs, free = (getattr(self.manager, name) for name in _ATTRIBUTES)
        return {k: list(x) for k, x in tables.items()}, dict(lengths), deepcopy(refs), sorted(free)

    def _unchanged(self, kept: tuple[Any, ...] | None, why: str) -> None:
        for name, was, now in zip(_ATTRIBUTES, kept or (), self._state(), strict=False):
            if was != now:
                raise Broken(f"{why} {name} has changed, from {was} to {now}")

    def _answered(self, operation: Operation, answer: Any, room: bool) -> None:
        if operation.verb == "fork" and not self.model.copying:
            due = len(self.model.tokens[operation.other])
            if answer != due or isinstance(answer, bool):
                raise Broken(f"it returns {answer!r}, and {due} tokens of {operation.request} are in full blocks")
        if operation.verb != "allocate_slots":
            return
        refusal = None if self.model.copying else False
        if not room and answer is not refusal:
            raise Broken(f"it returns {answer!r} where there are too few blocks: {refusal} belongs here")
        if room and answer is refusal:
            enough = f"{_blocks(self.model.used)} can hold all tokens, and the pool has {self.model.pool.blocks}"
            raise Broken(f"it returns {refusal}, and there are enough blocks: {enough}")
        if room and not self.model.copying and answer is not True:
            raise Broken(f"it returns {answer!r}, and True belongs here")
        if room and self.model.copying and not _are_pairs(answer):
            raise Broken(f"it returns {answer!r}, and a list of pairs (from, to) belongs here")

    def _of_requests(self) -> Iterator[str]:
        """Has each request as many blocks as its tokens need?"""
        tables, lengths, due, size = self.manager.tables, self.manager.lengths, self.model.tokens, self.model.pool.size
        for what, has in (("tables", tables), ("lengths", lengths)):
            for name in has:
                if name not in due:
                    yield f"{name} is over, and {what} still has it"
            for name in due:
                if name not in has:
                    yield f"{what} has no {name}"
        for name, tokens in due.items():
            for other in due:
                if other > name and isinstance(tables[name], list) and tables[name] is tables[other]:
                    yield f"{name} and {other} have one and the same list: what the one appends, the other has, too"
            if lengths[name] != len(tokens):
                yield f"lengths[{name!r}] is {lengths[name]}, and {name} has {_tokens(len(tokens))}"
            if len(tables[name]) != (blocks := -(-len(tokens) // size)):
                yield f"{name} has {_blocks(len(tables[name]))} for {_tokens(len(tokens))}: {blocks} would do"

    def _write(self, name: str, before: int, copies: Sequence[tuple[int, int]], least: int) -> None:
        """Make the copies, then write the new tokens of a request, which had `before`, where its table says."""
        size, blocks = self.model.pool.size, range(self.model.pool.blocks)
        for source, target in copies:
            if source not in blocks or target not in blocks:
                raise Broken(f"it copies block {source} to block {target}: the pool has the blocks 0 to {blocks[-1]}")
            self.rows[target * size : (target + 1) * size] = self.rows[source * size : (source + 1) * size]
        table, tokens = self.manager.tables[name], self.model.tokens[name]
        for n in range(before, len(tokens)):
            block = table[n // size]
            if others := sorted(x for x, each in self.manager.tables.items() if x != name and block in each):
                raise Broken(f"{name} writes token {n} into block {block}, and {_and(others)}, too")
            self.rows[block * size + n % size] = tokens[n]
        self.copied, self.least = self.copied + len(copies), self.least + least
        if len(copies) > least:
            raise Broken(f"it copies {_blocks(len(copies))}, and {least or 'none'} would do", "bytes")

    def _read(self) -> None:
        """Each request reads its tokens back."""
        size = self.model.pool.size
        for name, tokens in self.model.tokens.items():
            for n, token in enumerate(tokens):
                block = self.manager.tables[name][n // size]
                if self.rows[block * size + n % size] != token:
                    raise Broken(f"token {n} of {name} isn't in block {block}, where {name}'s table has it")

    def _of_blocks(self) -> Iterator[str]:
        """Which request has which block? Tables, counts and the free list have to agree."""
        m, blocks = self.manager, self.model.pool.blocks
        tables, refs, free = m.tables, m.refs, m.free_blocks
        for name, table in tables.items():
            for block, times in Counter[Any](table).items():
                if not isinstance(block, int) or not 0 <= block < blocks:
                    yield f"{name} has block {block!r}: the pool has the blocks 0 to {blocks - 1}"
                if times > 1:
                    yield f"{name} has block {block} {'twice' if times == 2 else f'{times} times'}"
        owners = {block: [name for name, table in tables.items() if block in table] for block in range(blocks)}
        for block, names in owners.items():
            if refs[block] != len(names):
                have = f"{len(names)} table{'s have' if len(names) != 1 else ' has'} block {block}"
                yield f"refs[{block}] is {refs[block]}, and {have}" + (f" ({' and '.join(names)})" if names else "")
        for block, times in Counter[Any](free).items():
            if block not in owners:
                yield f"block {block!r} is free: the pool has the blocks 0 to {blocks - 1}"
            elif names := owners[block]:
                yield f"block {block} is free, and {_and(names)}"
            elif times > 1:
                yield f"block {block} is free twice: two requests will get it"
        for block, names in owners.items():
            if not names and block not in free:
                yield f"block {block} is lost: no table has it, and free_blocks neither"


def _are_pairs(answer: Any) -> bool:
    pairs: list[Any] = cast("list[Any]", answer) if isinstance(answer, list) else [None]
    return all(type(x) is tuple and len(x) == 2 for x in pairs)


def raised(error: Exception, manager: Any) -> str:
    """An exception in words, with the line of the manager's own text, or the function's, that it came from."""
    own = manager if isinstance(manager, type) else type(manager)
    texts: list[Any] = [manager, *cast("dict[str, Any]", vars(own)).values()]
    file = next((x.__code__.co_filename for x in texts if hasattr(x, "__code__")), "")
    return f"{type(error).__name__}: {error}{at_line(line_of(error.__traceback__, file), file)}"


def _and(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'have' if len(names) > 1 else 'has'} it"


def _tokens(n: int) -> str:
    return f"{n} token{'s' * (n != 1)}"


def _blocks(n: int) -> str:
    return f"{n} block{'s' * (n != 1)}"


# -- replay -------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A history that breaks a manager. Its last operation is the one that does; `answers` are of those before.

    It is empty if the manager can't even be made.
    """

    pool: Pool
    history: list[Operation]
    answers: list[str]
    kind: str
    message: str

    @property
    def told(self) -> list[str]:
        """A line for each operation."""
        if not self.history:
            return [f"✘ {self.message}"]
        lines = [
            f"{n}  {x} → {answer}" for n, (x, answer) in enumerate(zip(self.history, self.answers, strict=False), 1)
        ]
        return [*lines, f"{len(self.history)}  {self.history[-1]}  ✘ {self.message}"]


def replay(manager: Callable[..., Any], pool: Pool, history: Sequence[Operation], *, copying: bool) -> Failure | World:
    """What a manager does wrong in a history, or the world after it."""
    answers = list[str]()
    try:
        world = World(manager(*pool), Model(pool, copying))
    except Exception as error:
        message = f"{manager.__name__}({pool.blocks}, {pool.size}) raises {raised(error, manager)}"
        return Failure(pool, [], [], "crash", message)
    if missing := [name for name in _ATTRIBUTES if not hasattr(world.manager, name)]:
        message = (
            f"{manager.__name__} has no attribute {missing[0]}: tables, lengths, refs and free_blocks are looked at"
        )
        return Failure(pool, [], [], "history", message)
    for n, operation in enumerate(history):
        try:
            answers.append(world.do(operation))
        except Broken as broken:
            return Failure(pool, list(history[: n + 1]), answers, broken.kind, str(broken))
        except Exception as error:  # an attribute is gone, or of another type
            message = f"its attributes can't be read: {type(error).__name__}: {error}"
            return Failure(pool, list(history[: n + 1]), answers, "history", message)
    return world


def shrunk(manager: Callable[..., Any], failure: Failure, *, copying: bool) -> Failure:
    """The same mistake, or another, with fewer operations, fewer tokens and a plainer pool."""

    def tried(pool: Pool, history: list[Operation]) -> bool:
        nonlocal failure
        found = replay(manager, pool, history, copying=copying)
        if isinstance(found, Failure) and _weight(found) < _weight(failure):
            failure = found
            return True
        return False

    before = None
    while before != failure:
        before = failure
        for part in [len(before.history) >> n for n in range(len(before.history).bit_length())]:
            at = 0
            while part and at < len(failure.history):
                history = failure.history
                if not tried(failure.pool, history[:at] + history[at + part :]):
                    at += part
        for i in range(len(failure.history)):
            for n in range(1, failure.history[i].n if i < len(failure.history) else 0):
                history = failure.history
                if tried(failure.pool, [*history[:i], history[i]._replace(n=n), *history[i + 1 :]]):
                    break
        least = [x._replace(n=min(x.n, 1)) for x in failure.history]
        for pool in sorted((Pool(blocks, size) for size in range(1, 5) for blocks in range(1, MOST + 1)), key=_plain):
            if tried(pool, least) or tried(pool, failure.history):
                break
    names = {name: NAMES[i] for i, name in enumerate(dict.fromkeys(x for op in failure.history for x in op[1:3] if x))}
    renamed = [x._replace(request=names[x.request], other=names.get(x.other, "")) for x in failure.history]
    found = replay(manager, failure.pool, renamed, copying=copying)
    return found if isinstance(found, Failure) else failure


def _weight(failure: Failure) -> tuple[int, ...]:
    return len(failure.history), sum(x.n for x in failure.history), *_plain(failure.pool)


def _plain(pool: Pool) -> tuple[int, int]:
    """The plainer a pool, the less. A mistake is to show as itself, and not as a lack of room: so `ROOMY` blocks are plain."""
    return pool.size, abs(pool.blocks - ROOMY)


def shortest(manager: Callable[..., Any], failure: Failure, *, copying: bool, most: int = SEARCHED) -> Failure:
    """A failure, or one with fewer operations: of the histories of up to `most` operations all are tried, on a few small pools."""
    pools = sorted((Pool(blocks, size) for size in (1, 2) for blocks in (1, 2, ROOMY)), key=_plain)
    for length in range(1, min(most, len(failure.history) - 1) + 1):
        for history in short_histories(length):
            for pool in pools:
                found = replay(manager, pool, history, copying=copying)
                if isinstance(found, Failure):
                    return found
    return failure


def short_histories(length: int, known: int = 0) -> Iterator[list[Operation]]:
    """All histories of so many operations with up to 3 new tokens, but for the names: these come in the order of the alphabet.

    >>> [str(history[0]) for history in short_histories(1)]
    ["allocate_slots('a', 1)", "allocate_slots('a', 2)", "allocate_slots('a', 3)", "fork('a', 'a')", "free('a')"]
    """
    if not length:
        yield []
        return
    there, near = NAMES[: max(known, 1)], NAMES[: known + 1]
    first = [Operation("allocate_slots", name, n=n) for name in near for n in (1, 2, 3)]
    first += [Operation("fork", parent, child) for parent in there for child in near]
    first += [Operation("free", name) for name in there]
    for operation in first:
        seen = max(known, *(NAMES.index(name) + 1 for name in operation[1:3] if name))
        for rest in short_histories(length - 1, seen):
            yield [operation, *rest]


class Held(NamedTuple):
    """What a manager that held did: the tokens in blocks that it copied, and in those that it had to; how many blocks it copied,
    and how many its forks shared."""

    tokens: int
    least: int
    copied: int
    forked: int


def held(manager: Callable[..., Any], *, copying: bool, operations: int, seed: int = 13) -> Failure | Held:
    """Hold a manager to the model for so many operations: the shortest history that was found to break it, or what it did.

    Histories follow from the seed. Each has a pool of its own, of 1 to 12 blocks of 1 to 4 tokens.
    """
    random, failures = Random(seed), list[Failure]()
    tokens = least = copied = forked = 0
    for _ in range(-(-operations // EPISODE)):
        pool = Pool(random.randint(1, MOST), random.randint(1, 4))
        found = replay(manager, pool, drawn(random, pool, copying=copying), copying=copying)
        if isinstance(found, World):
            tokens, least = tokens + pool.size * found.copied, least + pool.size * found.least
            copied, forked = copied + found.copied, forked + found.forked
            continue
        failures.append(shrunk(manager, found, copying=copying))
        if len(failures) == SHRUNK:
            break
    if failures:
        return shortest(manager, min(failures, key=_weight), copying=copying)
    return Held(tokens, least, copied, forked)
