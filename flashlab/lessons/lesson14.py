"""Lesson 14, several GPUs: its first two exercises, a ring of ranks and a zigzag, and who judges them.

An answer is a function of a `flashlab.parallel.Rank`, or a class that deals rows. It is judged here, in this process, by ranks in
NumPy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from flashlab.lessons.exercise import MARK
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.verdict import Line, Verdict
from flashlab.parallel.formulas import count
from flashlab.parallel.ledger import Launched, Sent
from flashlab.parallel.rank import Rank, Scheme
from flashlab.parallel.ranks import ParallelRun, simulate
from simulator import Problem, UsageError, random_inputs
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION

__all__ = ["EXERCISES", "PREDICTIONS", "RankExercise", "sends"]


@dataclass(frozen=True, kw_only=True)
class RankExercise:
    """One exercise. `judge(answer)` says what is wrong, and in which step; `slips` what that usually means, by step."""

    name: str
    title: str
    task: str
    judge: Callable[[Any], Verdict]
    hints: tuple[str, ...]
    afterwards: str
    slips: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def marked(self) -> str:
        """The solution with its marks."""
        path = files("flashlab.lessons").joinpath("solutions", self.name.replace(".", "_") + ".py")
        return path.read_text(encoding="utf-8")

    @property
    def solution(self) -> str:
        return "".join(line.replace(MARK, "").rstrip() + "\n" for line in self.marked.splitlines())

    @property
    def skeleton(self) -> str:
        """The solution without the marked lines: what the learner starts from."""
        return "".join(line + "\n" for line in self.marked.splitlines() if not line.endswith(MARK))

    def check(self, answer: Any) -> Verdict:
        """The verdict on an answer. Raises nothing."""
        found = self.judge(answer)
        return Verdict(
            self.name, found.kind, found.message, found.budget, found.problem, sram=found.sram, step=found.step,
            afterwards=self.afterwards if found.passed else self.slips.get(found.step, ""),
        )  # fmt: skip


def _wrong(kind: str, step: str, message: str, budget: tuple[Line, ...] = (), problem: str = "") -> Verdict:
    return Verdict("", kind, message, budget, problem, step=step)


# -- 14.1, a ring --------------------------------------------------------------------------------------------------

_P = Problem(batch=1, heads=4, kv_heads=2, len_q=24, head_dim=16, dtype="float32")
_CASES: Mapping[str, tuple[int, str, Problem]] = {
    "4 ranks, a causal zigzag": (4, "zigzag", _P.replace(causal=True, dtype="float16")),
    "3 ranks with contiguous rows, all keys": (3, "contiguous", _P.replace(scale=0.3)),
    "2 ranks with contiguous rows, causal": (2, "contiguous", _P.replace(causal=True, batch=2)),
    "1 rank": (1, "zigzag", _P),
}


class Part(NamedTuple):
    """A call of `attend`: whose K and V they are, whose the answer says they are, and what came out."""

    k: str
    v: str
    of: Any
    out: Array
    lse: Array


class Watched:
    """A rank that notes what it attends to."""

    def __init__(self, rank: Rank, owners: Mapping[str, Array], parts: list[Part]) -> None:
        self._rank, self._owners, self._parts = rank, owners, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def attend(self, k: Array, v: Array, of: int) -> tuple[Array, Array]:
        out, lse = self._rank.attend(k, v, of)
        self._parts.append(Part(self._whose(k), self._whose(v), of, out, lse))
        return out, lse

    def _whose(self, x: Any) -> str:
        """The name of an array that some rank has: "K of rank 2"."""
        same = (name for name, own in self._owners.items() if np.array_equal(x, own))
        return next(same, "something that no rank has")


def _ring(answer: Any) -> Verdict:
    """A ring, by its numbers, its messages and their order."""
    if not inspect.isfunction(answer):
        return _wrong("usage", "return", f"a function of a rank is asked, and this is {type(answer).__name__}")
    for said, (n, layout, p) in _CASES.items():
        q, k, v = random_inputs(p, seed=n)
        parts: list[list[Part]] = [[] for _ in range(n)]
        owners = dict[str, Array]()

        def watched(rank: Rank, parts: list[list[Part]] = parts, owners: dict[str, Array] = owners) -> Any:
            owners[f"K of rank {rank.index}"], owners[f"V of rank {rank.index}"] = rank.k, rank.v
            return answer(Watched(rank, owners, parts[rank.index]))

        masks: Any = {"causal": p.causal, "scale": p.scale}
        try:
            run = simulate(Scheme(answer.__name__, watched), q, k, v, ranks=n, layout=layout, **masks)
        except UsageError as error:
            return _misused(answer, error, said)
        except Exception as error:  # whatever a learner's function raises
            why = f"{type(error).__name__}: {error}"
            if not inspect.isgeneratorfunction(answer):
                return _wrong(
                    "crash", "receive", f"{why}. Without `yield` before it, rank.receive doesn't wait ({said})"
                )
            return _wrong("crash", "attend", f"{why} ({said})")
        found = _parts(p, run, parts, said, q, k, v) or _messages(run, said) or _in_time(run, said)
        if found is not None:
            return found
    counted = count("ring", _CASES["4 ranks, a causal zigzag"][2], ranks=4)
    budget = (Line("k, v", "sent", counted.sent[0], counted.sent[0], level="link", right=True),)
    return Verdict(
        "", "passed", "four rings, and each byte on the link is one that has to be there", budget, "a rank of 4"
    )


def _misused(answer: Any, error: UsageError, said: str) -> Verdict:
    if "waits for ever" in str(error.value):
        return _wrong("hang", "receive", f"{error.value} ({said})")
    if "nobody receives it" in str(error.value):
        return _wrong("asked", "send", f"{error.value} ({said})")
    kind, step = ("usage", "return") if error.argument.startswith("return value") else ("misuse", "send")
    hint = "" if inspect.isgeneratorfunction(answer) else ". Is there a `yield` before each rank.receive?"
    return _wrong(kind, step, f"{error}{hint} ({said})")


def _parts(
    p: Problem, run: ParallelRun, parts: list[list[Part]], said: str, q: Array, k: Array, v: Array
) -> Verdict | None:
    """Are the numbers right? If not, what did which rank look at, and was it merged?"""
    arrays = {"q": q, "k": k, "v": v}
    truth = ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    off = np.linalg.norm(run.out.astype(float) - truth["out"], axis=-1)
    wrong_out, wrong_lse = ~(off <= bounds["out"]), ~(np.abs(run.lse - truth["lse"]) <= bounds["lse"])
    if not wrong_out.any() and not wrong_lse.any():
        return None
    ranks = len(parts)
    for rank, own in enumerate(parts):
        for i, part in enumerate(own):
            where = f"rank {rank}, its product {i} ({said})"
            if not part.k.startswith("K"):
                return _wrong("numbers", "send", f"{where}: what it takes for K is {part.k}")
            if not part.v.startswith("V"):
                return _wrong("numbers", "send", f"{where}: what it takes for V is {part.v}")
            if part.k[1:] != part.v[1:]:
                return _wrong("numbers", "send", f"{where}: {part.k} meets {part.v}")
            if part.k != f"K of rank {part.of}":
                return _wrong("numbers", "attend", f"{where}: this is {part.k}, and it is said to be rank {part.of}'s")
        seen = [part.of for part in own]
        for of in range(ranks):
            if seen.count(of) != 1:
                times = "never" if of not in seen else f"{seen.count(of)} times"
                return _wrong("numbers", "attend", f"rank {rank} looks {times} at the keys of rank {of} ({said})")
    if not wrong_out.any():
        return _wrong("numbers", "merge", f"out is right, and lse isn't: it is to be that of all keys ({said})")
    first = next(r for r in range(ranks) if wrong_out[:, :, Rank.rows_of(_of(run, r), r)].any())
    mine, own = (
        run.out[:, :, Rank.rows_of(_of(run, first), first)].astype(float),
        [x.out.astype(float) for x in parts[first]],
    )
    looks = {
        "their mean": np.mean(own, axis=0), "their sum": np.sum(own, axis=0), "the last one alone": own[-1],
        "the first one alone": own[0],
    }  # fmt: skip
    like = next((name for name, x in looks.items() if np.allclose(mine, x, atol=2e-2)), "")
    like = f": the result is {like}" if like else ""
    return _wrong("numbers", "merge", f"rank {first} has the right parts, and merges them wrongly{like} ({said})")


def _of(run: ParallelRun, rank: int) -> Rank:
    return Rank(rank, run.ranks, run.problem, layout=run.layout, interleave=1, algorithm="flash2", device="h100")


def _messages(run: ParallelRun, said: str) -> Verdict | None:
    """Do K and V go to the neighbour alone, and no further than they are needed?"""
    least = count("ring", run.problem, ranks=run.ranks, layout=run.layout).sent
    for rank, events in enumerate(run.events):
        for event in events:
            if isinstance(event, Sent) and event.peer != (rank + 1) % run.ranks:
                return _wrong(
                    "asked",
                    "send",
                    f"rank {rank} sends to rank {event.peer}: in a ring it sends to rank.right alone ({said})",
                )
        if run.sent[rank] != least[rank]:
            line = Line("k, v", "sent", run.sent[rank], least[rank], level="link", right=True)
            hops = run.sent[rank] / (least[rank] / max(1, run.ranks - 1)) if least[rank] else run.sent[rank]
            more = f"rank {rank} sends K and V {hops:.3g} times, and {run.ranks - 1} would do ({said})"
            return _wrong("bytes", "send", more, (line,), f"rank {rank} of {run.ranks}")
    return None


def _in_time(run: ParallelRun, said: str) -> Verdict | None:
    """Do K and V travel while products run? Where all keys are seen each step has a launch."""
    if run.problem.causal:
        return None
    for rank, events in enumerate(run.events):
        sends = launches = 0
        for event in events:
            if isinstance(event, Launched) and sends < min(launches + 1, run.ranks - 1):
                why = f"rank {rank} computes product {launches} before it sends the K and V of that product on"
                return _wrong("asked", "order", f"{why}: nothing travels meanwhile ({said})")
            sends += isinstance(event, Sent)
            launches += isinstance(event, Launched)
    return None


# -- 14.2, a zigzag ------------------------------------------------------------------------------------------------

_DEALT = ((16, 4), (36, 3), (512, 8), (6, 1))
"""Rows, and ranks that share them."""


def _zigzag(answer: Any) -> Verdict:
    """Rows that all ranks have as many of and work as much on; and launches that have each visible pair once."""
    try:
        dealer = answer()
        for n, ranks in _DEALT:
            rows = [dealer.rows(n, ranks, rank) for rank in range(ranks)]
            found = _rows(n, ranks, rows)
            for rank in range(ranks) if found is None else ():
                for of in range(ranks):
                    found = found or _launch(n, ranks, rank, of, rows, dealer.seen(n, ranks, rank, of))
            if found is not None:
                return found
    except Exception as error:  # whatever a learner's class raises
        return _wrong("crash", "rows", f"{type(error).__name__}: {error}")
    n, ranks = 512, 8
    pairs = [_pairs(rank, n, ranks, dealer) for rank in range(ranks)]
    return Verdict(
        "", "passed", f"each of {ranks} ranks computes {pairs[0]:,} of {sum(pairs):,} pairs, {n // ranks} rows each"
    )


def _pairs(rank: int, n: int, ranks: int, dealer: Any) -> int:
    return sum(row + 1 for row in dealer.rows(n, ranks, rank))


def _numbers(x: Any) -> bool:
    return isinstance(x, list | tuple | range) and all(isinstance(row, int | np.integer) for row in x)  # pyright: ignore


def _rows(n: int, ranks: int, rows: Sequence[Any]) -> Verdict | None:
    """Has each row one rank, and each rank as many rows, as much work, and two pieces at most?"""
    said = f"{n} rows, {ranks} ranks"
    owner = dict[int, int]()
    for rank, own in enumerate(rows):
        if not _numbers(own):
            return _wrong("usage", "rows", f"rows returns {type(own).__name__}: a list of numbers is asked ({said})")
        for row in own:
            if not 0 <= row < n:
                return _wrong("asked", "rows", f"rank {rank} has row {row}, which isn't there ({said})")
            if row in owner:
                return _wrong("asked", "rows", f"rank {rank} has row {row}, and so has rank {owner[row]} ({said})")
            owner[row] = rank
    missing = next((row for row in range(n) if row not in owner), None)
    if missing is not None:
        return _wrong("asked", "rows", f"nobody has row {missing} ({said})")
    sizes = [len(own) for own in rows]
    if max(sizes) != min(sizes):
        return _wrong(
            "asked",
            "rows",
            f"rank {sizes.index(max(sizes))} has {max(sizes)} rows, and rank {sizes.index(min(sizes))} {min(sizes)} ({said})",
        )
    work = [sum(row + 1 for row in own) for own in rows]
    if max(work) > 1.01 * min(work):
        busy, idle = work.index(max(work)), work.index(min(work))
        return _wrong(
            "asked", "rows", f"rank {busy} has {max(work) / min(work):.3g} times the pairs of rank {idle} ({said})"
        )
    for rank, own in enumerate(rows):
        steps = np.diff(np.asarray(own, np.int64))
        if (steps < 0).any():
            why = "in its own square the causal mask needs them in order"
            return _wrong("asked", "rows", f"the rows of rank {rank} don't rise: {why} ({said})")
        if (pieces := 1 + int((steps > 1).sum())) > 2:
            why = "a launch computes rows that lie in one piece"
            return _wrong(
                "asked", "rows", f"the rows of rank {rank} lie in {pieces} pieces, and two are enough: {why} ({said})"
            )
    return None


def _launch(n: int, ranks: int, rank: int, of: int, rows: list[Any], launch: Any) -> Verdict | None:
    """Are the pairs of a launch those that a causal mask leaves, and no others?"""
    said = f"{n} rows, {ranks} ranks"
    mine, theirs = np.asarray(rows[rank]), np.asarray(rows[of])
    shown = np.zeros((len(mine), len(theirs)), bool)
    if launch is not None:
        try:
            some, keys, causal = launch
            high, wide = shown[some, keys].shape
            shown[some, keys] = np.tri(high, wide, wide - high, dtype=bool) if causal else True
        except (TypeError, ValueError, IndexError):
            return _wrong(
                "usage",
                "seen",
                f"seen returns {launch!r}: (rows, keys, causal) is asked, two slices and yes or no ({said})",
            )
    due = theirs[None, :] <= mine[:, None]
    whose = f"the keys of rank {of}, {'an earlier' if of < rank else 'a later'} rank" if of != rank else "its own keys"
    for i, j in np.argwhere(shown != due)[:1]:
        pair = f"row {mine[i]} {'sees' if due[i, j] else 'must not see'} key {theirs[j]}"
        what = "and no launch has that pair" if due[i, j] else "and the launch has that pair"
        return _wrong("numbers", "seen", f"rank {rank} and {whose}: {pair}, {what} ({said})")
    return None


EXERCISES = (
    RankExercise(
        name="14.1",
        title="A ring",
        task="Each rank has some rows of Q, K and V. Its rows have to meet the keys of all ranks. So K and V go around: each rank "
        "sends what it has to `rank.right`, and gets what `rank.left` had. `rank.attend(k, v, of=r)` computes your rows over the "
        "keys of rank r, with the mask that is left between you and r. Merge what came out by the LSEs. Budget: K and V make as "
        "many hops as they must, and no more. And they travel while you compute: send first.",
        judge=_ring,
        hints=(
            "In step 0 the keys are your own, in step 1 rank.left's. In step s they have come s ranks: (index − s) % ranks.",
            "`k, v = yield rank.receive(rank.left)` waits for the next message of the left one.",
            "After ranks − 1 hops everybody has seen all keys. One hop more would bring them home, where nobody needs them.",
            "`fl.merge(outs, lses)` takes a list of outputs and a list of LSEs, and returns both for all keys.",
        ),
        slips={
            "send": "send: K and V, what this rank just has, to rank.right, ranks − 1 times.",
            "receive": "receive: from rank.left, with `yield`, as often as it sends.",
            "attend": "attend: step s has the keys that began s ranks to the left.",
            "merge": "merge: a part weighs e^LSE. fl.merge does that, for outputs and LSEs.",
            "order": "send before attend: the link and the tensor cores work side by side.",
            "return": "return (out, lse), both for your rows.",
        },
        afterwards="Next: this is Ring Attention. In a causal ring with contiguous rows rank 0 had one product, and then only "
        "passed on what others needed.",
    ),
    RankExercise(
        name="14.2",
        title="Zigzag",
        task="Row i of a causal attention sees i + 1 keys. Deal n rows so that all ranks have as many rows, and within 1 % as many "
        "pairs, in two pieces at most. Then say what a rank's rows see of another rank's keys: *one* launch, a rectangle or a "
        "causal square, in which each visible pair is, and no other. n is a multiple of 2 · ranks.",
        judge=_zigzag,
        hints=(
            "A late row beside an early one: rows i and n − 1 − i see n + 1 keys together, whatever i is.",
            "Cut the rows into 2 · ranks chunks. A rank has one from the front, and one from the back, in this order.",
            "An earlier rank's early chunk lies before all your rows, and its late chunk behind them.",
            "A later rank's two chunks lie before your late chunk, and behind your early one.",
        ),
        slips={
            "rows": "rows: chunks r and 2 · ranks − 1 − r, the early one first.",
            "seen": "seen: own keys, an earlier rank's, a later rank's: half of a square each, and the same work.",
        },
        afterwards="Next: in each step of the ring all ranks have the same work now, so nobody waits. torch calls it head-tail.",
    ),
)


# -- predictions ---------------------------------------------------------------------------------------------------

RANKS = 8
SHARED = Problem(batch=1, heads=32, kv_heads=8, len_q=131_072, head_dim=128, dtype="bfloat16", causal=True)


def sends(scheme: str, kv_heads: int) -> int:
    """The bytes that each of eight ranks sends in a forward pass.

    >>> sends("ring", 8) == sends("all_gather", 8), sends("heads", 8)
    (True, 0)
    """
    return count(scheme, SHARED.replace(kv_heads=kv_heads), ranks=RANKS).sent[0]


def _of_ring(kv_heads: int) -> dict[str, float]:
    block = 2 * kv_heads * SHARED.len_q // RANKS * SHARED.head_dim * SHARED.itemsize
    return {
        "half: K alone, or elements in place of bytes": (RANKS - 1) * block / 2,
        "eight hops: but after seven everybody has seen all keys": RANKS * block,
        "one hop: but K and V go on": block,
        "all query heads': but only heads of K and V travel": (RANKS - 1) * block * SHARED.heads // kv_heads,
        "each row sent seven times, of all ranks": RANKS * (RANKS - 1) * block,
    }


def _of_ulysses(kv_heads: int) -> dict[str, float]:
    row = SHARED.len_q // RANKS * SHARED.head_dim * SHARED.itemsize
    own = SHARED.heads // RANKS
    kv = max(1, kv_heads // RANKS)
    found: dict[str, float] = {
        "the way to heads alone: but outputs go back to rows": (RANKS - 1) * row * (own + 2 * kv),
        "Q and the output alone": (RANKS - 1) * row * 2 * own,
        "its own heads, too, which stay": RANKS * row * (2 * own + 2 * kv),
        "K and V of all query heads": (RANKS - 1) * row * 4 * own,
    }
    if kv_heads < RANKS:
        few = "2 heads of K and V as they are: but each rank needs one of its own"
        found[few] = (RANKS - 1) * row * (2 * own + 2 * kv_heads / RANKS)
    return found


PREDICTIONS = (
    Prediction(
        name="14.1",
        truth=lambda: {f"{scheme}_{n}": sends(scheme, n) for n in (8, 2) for scheme in ("ring", "ulysses")},
        slips=lambda: {
            f"{name}_{n}": of(n) for n in (8, 2) for name, of in (("ring", _of_ring), ("ulysses", _of_ulysses))
        },
        because="A ring sends a rank's K and V seven times, and an all-gather sends as much. So fewer heads of K and V help it: "
        "with 2 it sends a quarter. Ulysses sends each row once, in eighths: Q, K, V, and the output back. With 2 heads of K and V "
        "each is sent to four ranks, so that costs as much as 8 heads do.",
    ),
)
