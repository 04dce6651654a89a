"""Lesson 13: its extra exercises, a prefix cache and a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, cast
from zlib import crc32

from flashlab.lessons.class_exercise import ClassExercise, Found
from flashlab.lessons.histories import raised
from flashlab.serve.traces import read

# -- a prefix cache -----------------------------------------------------------------------------------------------

Digest = Callable[[Any, tuple[int, ...]], Any]
SIZE = 2
"""Tokens of a block in the histories of a cache."""
BLOCKS = 8


def exact(parent: Any, tokens: tuple[int, ...]) -> Any:
    """A digest that is never the same for two beginnings."""
    return (parent, tokens)


def checksum(parent: Any, tokens: tuple[int, ...]) -> int:
    """CRC-32 of the parent's and the tokens."""
    return crc32(repr((parent, tokens)).encode())


def narrow(parent: Any, tokens: tuple[int, ...]) -> int:
    """A digest of two bits: so few that beginnings collide all the time."""
    return checksum(parent, tokens) % 4


COLLIDING = ((43450, 2404), (20200, 17118))
"""Two pairs of tokens with the same `checksum`, as the first block of a prompt."""


class Call(NamedTuple):
    """A call of a cache."""

    verb: str
    tokens: tuple[int, ...] = ()
    table: tuple[int, ...] = ()
    block: int = -1

    def __str__(self) -> str:
        given = {"enter": f"{list(self.tokens)}, {list(self.table)}", "find": f"{list(self.tokens)}"}
        return f"{self.verb}({given.get(self.verb, self.block)})"


def cache_history(random: Random, length: int = 60) -> list[Call]:
    """Requests of few tokens, which begin alike. A block is entered once: it is forgotten before it holds something else."""
    found, holds = list[Call](), dict[int, tuple[int, ...]]()
    while len(found) < length:
        tokens = tuple(random.randint(0, 1) for _ in range(random.randint(1, 7)))
        verb = random.choice(("enter", "find", "find", "forget"))
        if verb == "enter":
            blocks = random.sample(range(BLOCKS), -(-len(tokens) // SIZE))
            for block in (x for x in blocks if x in holds):
                found.append(Call("forget", block=block))
            holds |= dict.fromkeys(blocks, tokens)
            found.append(Call("enter", tokens, tuple(blocks)))
        elif verb == "find":
            found.append(Call("find", tokens))
        else:
            found.append(Call("forget", block=random.randrange(BLOCKS)))
    return found


def colliding() -> list[Call]:
    """One of two prompts with equal hashes is there, and the other one is looked for, alone and with more behind it."""
    one, other = COLLIDING
    return [
        Call("enter", (*one, 5, 6, 7), (0, 1, 2)),
        Call("find", (*other, 5, 6, 7)),
        Call("find", (*one, 5, 6, 7)),
    ]


def cache_failure(
    make: Callable[..., Any], history: Sequence[Call], digest: Digest
) -> tuple[int, str, list[str]] | None:
    """The number of the call that a cache gets wrong, why, and what it answered before; None if it gets none wrong."""
    due, holds, answers = dict[tuple[int, ...], int](), dict[int, tuple[int, ...]](), list[str]()
    try:
        cache = make(SIZE, digest)
    except Exception as error:
        return 0, f"its beginning raises {raised(error, make)}", []
    for n, call in enumerate(history):
        verb, tokens, table, block = call
        try:
            answer = getattr(cache, verb)(
                *{"enter": (list(tokens), list(table)), "find": (list(tokens),)}.get(verb, (block,))
            )
        except Exception as error:
            return n, f"it raises {raised(error, cache)}", answers
        answers.append(repr(answer) if verb == "find" else "")
        if verb == "enter":
            for i in range(len(tokens) // SIZE):
                holds[table[i]] = tokens[: (i + 1) * SIZE]
                due.setdefault(tokens[: (i + 1) * SIZE], table[i])
        elif verb == "forget":
            holds.pop(block, None)
            due = {prefix: x for prefix, x in due.items() if x != block}
        elif why := _found_wrongly(tokens, answer, due, holds, exactly=digest is exact):
            return n, why, answers
    return None


def _found_wrongly(tokens: tuple[int, ...], answer: Any, due: dict[tuple[int, ...], int], holds: dict[int, tuple[int, ...]],
                   *, exactly: bool) -> str:  # fmt: skip
    """What is wrong with the blocks that were found, or ""."""
    if not isinstance(answer, list):
        return f"it returns {answer!r}, and a list of blocks belongs here"
    blocks = cast("list[Any]", answer)
    for i, block in enumerate(blocks):
        prefix = tokens[: (i + 1) * SIZE]
        if block not in holds:
            return f"it finds block {block}, which nobody may find: it was given away, or isn't full"
        if holds[block] != prefix:
            what = f"which holds the end of {list(holds[block])}, for {list(prefix)}"
            return f"it finds block {block}, {what}: somebody else's prompt"
    if len(blocks) * SIZE >= len(tokens):
        return f"it finds {len(blocks) * SIZE} tokens of {len(tokens)}: the last one has to be computed for an answer"
    right = list[int]()
    for i in range((len(tokens) - 1) // SIZE):
        if tokens[: (i + 1) * SIZE] not in due:
            break
        right.append(due[tokens[: (i + 1) * SIZE]])
    if exactly and blocks != right:
        return f"it returns {blocks}, and {right} are there"
    return ""


def _shorter(make: Callable[..., Any], history: list[Call], digest: Digest) -> list[Call]:
    """A history that a cache gets wrong, without the calls that it doesn't need."""
    at = 0
    while at < len(history):
        fewer = history[:at] + history[at + 1 :]
        failure = cache_failure(make, fewer, digest)
        if failure:
            history, at = fewer[: failure[0] + 1], 0
        else:
            at += 1
    return history


def _cache(answer: Any) -> Found:
    random = Random(13)
    drawn = [(cache_history(random), digest) for _ in range(80) for digest in (exact, narrow)]
    shown: list[tuple[tuple[int, int], Found]] = []
    for history, digest in [(colliding(), checksum), *drawn]:
        if failure := cache_failure(answer, history, digest):
            history = _shorter(answer, history[: failure[0] + 1], digest)
            failure = cache_failure(answer, history, digest)
            assert failure is not None
            n, why, answers = failure
            equal = "" if digest is exact else ", where the digests of two beginnings are equal"
            told = [
                f"{i}  {call}" + (f" → {said}" if said else "")
                for i, (call, said) in enumerate(zip(history, answers, strict=False), 1)
            ]
            told = [*told[:n], f"{n + 1}  {history[n]}  ✘ {why}"]
            kind = "crash" if "raises" in why else "history"
            message = f"{history[n]}: {why} (call {n + 1} of the shortest history that was found, blocks of {SIZE} tokens{equal})"
            shown.append(((len(history), digest is not exact), Found(kind, message, history[n].verb, tuple(told))))
            if len(shown) == 3:
                break
    if shown:
        return min(shown, key=lambda one: one[0])[1]
    return Found("passed", f"{len(drawn) + 1} histories; in half of them digests are equal all the time")


# -- a scheduler --------------------------------------------------------------------------------------------------

ROOM = 4096
"""Tokens that the pool of a day has room for."""
PROMPTS = 512
"""Tokens of prompts that a step can read."""
PATIENT = 2
"""How many times the longest wait of first come, first served a request may wait."""


class Waiting(NamedTuple):
    """A request as a scheduler sees it."""

    name: str
    prompt: int
    waited: int


@dataclass
class _Job:
    name: str
    arrives: int
    prompt: int
    answer: int
    made: int = 0
    waits: int = 0
    longest: int = 0
    first: int | None = None
    ended: bool = False
    entered: int = field(default=0)

    @property
    def tokens(self) -> int:
        return self.prompt + self.made

    def seen(self) -> Waiting:
        return Waiting(self.name, self.tokens, self.waits)


class Misused(Exception):
    """What a scheduler answered that is no answer."""


class Outcome(NamedTuple):
    """A day: steps from arrival to the first token on the mean, the longest wait in a row, and the request's name."""

    mean: float
    longest: int
    name: str


def day() -> list[tuple[int, int, int]]:
    """When requests come, and how long their prompts and answers are. At times more come than can be served."""
    arrivals = read("lognormal:sharegpt", requests=160, seed=4, rate=1.0)
    return [(round(2 * one.seconds), one.prompt, 1 + one.answer // 8) for one in arrivals]


def simulate_day(choose: Callable[[tuple[Waiting, ...], int], Any]) -> Outcome:
    """A day in steps. Each step lets some in, and gives every request that runs a token; without room the latest is preempted."""
    jobs = [_Job(f"r{n}", *one) for n, one in enumerate(day())]
    waiting, running, step = list[_Job](), list[_Job](), 0
    while not all(job.ended for job in jobs):
        waiting += [job for job in jobs if job.arrives == step]
        while sum(job.tokens + 1 for job in running) > ROOM:
            latest = max(running, key=lambda job: job.entered)
            running.remove(latest)
            waiting.insert(0, latest)
        free, left = ROOM - sum(job.tokens + 1 for job in running), PROMPTS
        by_name = {job.name: job for job in waiting}
        for request in _chosen(choose, waiting, free):
            job = by_name[request.name]
            if job.tokens + 1 > free or (job.tokens > left and left < PROMPTS):
                break
            waiting.remove(job)
            running.append(job)
            job.entered, job.waits = step, 0
            free, left = free - job.tokens - 1, left - job.tokens
        if not running and waiting:
            raise Misused(
                f"step {step}: nobody runs, {len(waiting)} wait, and nobody is let in: that stays so for ever"
            )
        for job in list(running):
            job.made += 1
            job.first = step + 1 if job.first is None else job.first
            if job.made == job.answer:
                job.ended = True
                running.remove(job)
        for job in waiting:
            job.waits += 1
            job.longest = max(job.longest, job.waits)
        step += 1
    slowest = max(jobs, key=lambda job: job.longest)
    return Outcome(fmean((job.first or 0) - job.arrives for job in jobs), slowest.longest, slowest.name)


def _chosen(choose: Callable[[tuple[Waiting, ...], int], Any], waiting: list[_Job], free: int) -> Iterator[Waiting]:
    """What a scheduler chooses. Raises `Misused` for what isn't there to be chosen."""
    given = tuple(job.seen() for job in waiting)
    answer: Any = choose(given, free)
    if not isinstance(answer, list | tuple) or isinstance(answer, Waiting):
        raise Misused(f"it returns {type(answer).__name__}, and a list of requests that wait belongs here")
    chosen = cast("Sequence[Any]", answer)
    for n, request in enumerate(chosen):
        if not isinstance(request, Waiting) or request not in given:
            raise Misused(f"it returns {request!r}, which is none of the requests in `waiting`")
        if request in chosen[:n]:
            raise Misused(f"it returns {request.name} twice")
        yield request


def _scheduler(answer: Any) -> Found:
    first_come = simulate_day(lambda waiting, free: list(waiting))
    try:
        scheduler = answer()
        found = simulate_day(scheduler.choose)
    except Misused as error:
        return Found("history", f"choose: {error}", "choose", (f"choose  ✘ {error}",))
    except Exception as error:
        said = f"choose: it raises {raised(error, answer)}"
        return Found("crash", said, "choose", (f"choose  ✘ {said}",))
    score = (
        f"score: {found.mean:.1f} steps until the first token, on the mean; first come, first served: {first_come.mean:.1f}; the "
        f"bound, if each were alone: 1. The longest wait: {found.longest} steps; first come, first served: {first_come.longest}"
    )
    if found.longest > PATIENT * first_come.longest:
        most = PATIENT * first_come.longest
        why = (
            f"{found.name} waits {found.longest} steps in a row, and nobody may wait more than {most}: twice the longest of "
            "first come, first served"
        )
        return Found("starved", f"choose: {why}", "choose", (f"choose  ✘ {why}",), score)
    return Found("passed", "a day of 160 requests, and nobody starves", said=score)


EXERCISES = (
    ClassExercise(
        name="13.5",
        title="A prefix cache",
        task="`enter` says which blocks hold a request's tokens. `find` returns the blocks that hold the beginning of a prompt, "
        "one after the other, as far as they are there. `forget` takes a block out that is given to somebody else. Only full "
        "blocks are found, and never the whole prompt: its last token has to be computed for an answer. K and V of a block "
        "depend on all tokens before it. `digest` is given, and it isn't perfect: among the tests is a pair of prompts whose "
        "digests are equal.",
        methods={"enter": ("tokens", "table"), "find": ("tokens",), "forget": ("block",)},
        judge=_cache,
        hints=(
            "The digest of block i is `digest(that of block i - 1, its own tokens as a tuple)`. The first one has None before it.",
            "A digest leads to an entry. Keep in it what you need to be sure: the block, and *all* tokens up to its end.",
            "`find` stops at the first block that isn't there: what comes behind it is of no use. And it looks at "
            "`(len(tokens) - 1) // block_size` blocks only.",
        ),
        slips={
            "find": "find: equal digests prove nothing. Compare the tokens of the block and all before it.",
            "enter": "enter: full blocks only. If an entry is there already, it stays.",
            "forget": "forget: from now on the block holds other tokens.",
        },
        afterwards="Next: the library's cache does this with SHA-256, and compares tokens too. To compare all tokens before a "
        "block takes time, so it compares the objects that stand for them, which are mostly the same.",
        extra=True,
    ),
    ClassExercise(
        name="13.6",
        title="A scheduler for a day",
        task=f"160 requests come during a day, at times more than can be served. The pool has room for {ROOM:,} tokens, and a "
        f"step reads at most {PROMPTS} tokens of prompts. In each step you say in which order requests are let in. That goes on "
        "until one of them finds no room. When there is none for the next token, the latest one waits again. There is no right "
        "answer, but a score: steps from arrival to the first token, on the mean, beside first come, first served, and beside "
        "the bound of one step. One thing is asked: nobody starves. No request may wait for more than twice as many steps in a "
        "row as the longest wait of first come, first served.",
        methods={"choose": ("waiting", "free_tokens")},
        judge=_scheduler,
        hints=(
            "First come, first served is `return list(waiting)`. What does a long prompt do to the short ones behind it?",
            "`sorted(waiting, key=lambda request: request.prompt)` lets the short ones in first. Which ones are never let in?",
            "Two lists: those that have waited too long, in front, and all others, the short ones first.",
        ),
        slips={
            "choose": "choose: a list of requests of `waiting`, each once, and in each step somebody may be let in."
        },
        afterwards="Next: vLLM's default is first come, first served, for a good reason: nobody starves, and nobody has to guess. "
        "The library's scheduler has both (flashlab serve --policy).",
        extra=True,
    ),
)
