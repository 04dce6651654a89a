"""Lesson 14: the judges of a ring, its way back, decoding with a striped cache, and a schedule for two hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from flashlab.lessons.class_exercise import Bytes, Found
from flashlab.lessons.lesson14_watched import (
    EVERYBODY,
    UNKNOWN,
    Ran,
    alike,
    budget,
    heads_of,
    in_time,
    looked,
    mixtures,
    own_heads,
    ran,
    sent,
    to_the_right,
)
from flashlab.parallel.formulas import count
from flashlab.parallel.layouts import rows
from flashlab.parallel.ranks import simulate
from flashlab.parallel.schemes import SCHEMES
from flashlab.parallel.times import ParallelTimeline, Rates, timeline
from flashlab.run.merge import merge
from simulator import Problem, random_inputs
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD

_P = Problem(batch=1, heads=4, kv_heads=2, len_q=24, head_dim=16, dtype="float32")


def _off(p: Problem, this: Ran, arrays: Mapping[str, Array]) -> Array | None:
    """Which rows of the output are wrong, `(batch, heads, len_q)`; None where they and their LSEs are right."""
    run, truth = this.run, ATTENTION.judge(p, arrays)
    bounds = ATTENTION.bounds(p, arrays, truth)
    out = ~(np.linalg.norm(run.out.astype(float) - truth["out"], axis=-1) <= bounds["out"])
    return out if out.any() or not (np.abs(run.lse - truth["lse"]) <= bounds["lse"]).all() else None


def _lse_alone(this: Ran) -> Found:
    return this.wrong("numbers", "merge", "out is right, and lse isn't: it is to be that of all keys")


def _merged_wrongly(this: Ran, off: Array) -> Found:
    """Each rank has the right parts, and makes something else of them."""
    if not off.any():
        return _lse_alone(this)
    run = this.run
    shares = [rows(run.layout, run.problem.len_q, run.ranks, rank) for rank in range(run.ranks)]
    first = next(rank for rank, own in enumerate(shares) if off[:, :, own].any())
    like = alike(run.out[:, :, shares[first]], mixtures([call.results[0] for call in this.team[first].calls]))
    return this.wrong("numbers", "merge", f"rank {first} has the right parts, and merges them wrongly{like}")


# -- 14.1, a ring --------------------------------------------------------------------------------------------------

_RINGS: Mapping[str, tuple[int, str, Problem]] = {
    "4 ranks, a causal zigzag": (4, "zigzag", _P.replace(causal=True, dtype="float16")),
    "3 ranks with contiguous rows, all keys": (3, "contiguous", _P.replace(scale=0.3)),
    "2 ranks with contiguous rows, causal": (2, "contiguous", _P.replace(causal=True, batch=2)),
    "1 rank": (1, "zigzag", _P),
}


def ring(answer: Any) -> Found:
    """A ring, by its numbers, its messages and their order."""
    for said, (n, layout, p) in _RINGS.items():
        q, k, v = random_inputs(p, seed=n)
        this = ran(answer, said, (q, k, v), ranks=n, layout=layout, causal=p.causal, scale=p.scale)
        if isinstance(this, Found):
            return this
        off = _off(p, this, {"q": q, "k": k, "v": v})
        if off is not None:
            return looked(this) or _merged_wrongly(this, off)
        found = to_the_right(this) or _hops(this, budget(count("ring", p, ranks=n, layout=layout), "forward", "k v"))
        if found := found or (None if p.causal else in_time(this)):
            return found
    least = budget(count("ring", _RINGS["4 ranks, a causal zigzag"][2], ranks=4), "forward", "k v")[0]
    return Found(
        "passed", "four rings, and each byte on the link is one that has to be there",
        budget=(_line("k, v", least, least),), problem="a rank of 4",
    )  # fmt: skip


def _line(tensors: str, moved: int, least: int) -> Bytes:
    return tensors, "sent", moved, least, "link"


def _hops(this: Ran, least: list[int]) -> Found | None:
    """Do K and V go no further than they are needed?"""
    for rank, moved in enumerate(this.run.sent):
        if moved != least[rank]:
            others = len(this.team) - 1
            hops = moved / (least[rank] / others) if others else moved
            why = f"rank {rank} sends K and V {hops:.3g} times, and {others} would do"
            line = _line("k, v", moved, least[rank])
            return this.wrong("bytes", "send", why, budget=(line,), problem=f"rank {rank} of {len(this.team)}")
    return None


# -- 14.3, the way back --------------------------------------------------------------------------------------------

_BACK: Mapping[str, tuple[int, str, Problem]] = {
    "8 ranks, a causal zigzag, float16": (8, "zigzag", _P.replace(causal=True, dtype="float16", len_q=128)),
    "3 ranks with contiguous rows, all keys": (3, "contiguous", _P.replace(scale=0.3)),
    "2 ranks with contiguous rows, causal": (2, "contiguous", _P.replace(causal=True, batch=2)),
    "1 rank": (1, "zigzag", _P),
}
_ROUNDED = 2e-3
"""So far float16 takes a sum from what it was, relative."""
_FLIPPED = 0.05
"""So many elements may be rounded to the other side, because sums of float32 have several orders."""


def way_back(answer: Any) -> Found:
    """The way back of a ring, by what its gradients are made of, its messages, their precision and their order."""
    told = Found("passed", "")
    for said, (n, layout, p) in _BACK.items():
        arrays = (*random_inputs(p, seed=n), random_inputs(p, seed=n + 1)[0])
        how: dict[str, Any] = {"dout": arrays[3], "causal": p.causal, "scale": p.scale}
        forward = {"forward": SCHEMES["ring"].forward}
        this = ran(answer, said, arrays[:3], scheme=forward, ranks=n, layout=layout, **how)
        if isinstance(this, Found):
            return this
        counted = count("ring", p, ranks=n, layout=layout, backward=True)
        kv, sums = (budget(counted, "backward", names) for names in ("k v", "dk dv"))
        beside = _beside(p, this, arrays) if p.dtype == "float16" else {}
        unlike = _unlike(this, arrays[:3], how)
        found = (looked(this, "attend_back") if unlike else None) or to_the_right(this)
        found = found or _unrounded(this, sums, beside) or _made_of(this, unlike=unlike)
        found = found or _moved(this, kv, sums) or (None if p.causal else in_time(this, back=True))
        if found is not None:
            return found
        if beside:
            dk, dv = beside["dk"], beside["dv"]
            told = Found(
                "passed", "four rings, there and back, and each sum is rounded once", problem="a rank of 8, on the way back",
                said=f"The error of dK is {dk:.2f} times that of one GPU, and that of dV {dv:.2f} times.",
                budget=(_line("k, v", kv[0], kv[0]), _line("dk, dv", sums[0], sums[0])),
            )  # fmt: skip
    return told


def _unlike(this: Ran, arrays: tuple[Array, ...], how: dict[str, Any]) -> bool:
    """Are gradients others than those of one GPU, by more than rounding?"""
    one = simulate("heads", *arrays, ranks=1, **how)
    pairs = [(getattr(this.run, name).astype(float), getattr(one, name).astype(float)) for name in ("dq", "dk", "dv")]
    return any(not np.linalg.norm(x - due) <= 5 * _ROUNDED * np.linalg.norm(due) for x, due in pairs)


def _beside(p: Problem, this: Ran, arrays: tuple[Array, ...]) -> dict[str, float]:
    """The error of dK and dV over that of one GPU, both beside float64: root mean squares."""
    q, k, v, dout = arrays
    one = simulate("heads", q, k, v, dout=dout, ranks=1, causal=p.causal, scale=p.scale)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    truth = BACKWARD.judge(p, given | ATTENTION.judge(p, given))
    errors = [
        [np.linalg.norm(getattr(run, name).astype(float) - truth[name]) for name in ("dk", "dv")]
        for run in (this.run, one)
    ]
    return {name: float(mine / its) for name, mine, its in zip(("dk", "dv"), *errors, strict=True)}


def _unrounded(this: Ran, least: list[int], beside: Mapping[str, float]) -> Found | None:
    """Are sums float32 on the link?"""
    for rank, watched in enumerate(this.team):
        for message in watched.messages if beside else ():
            for name, x in message.arrays:
                if name != UNKNOWN or x.shape != watched.rank.k.shape:
                    continue
                worse = "the error of dK is {dk:.2f} times that of one GPU, and that of dV {dv:.2f} times".format(
                    **beside
                )
                if x.dtype == np.float16:
                    line = _line("dk, dv", sent(watched, UNKNOWN[0]), least[rank])
                    why = f"rank {rank} sends sums in float16: half the bytes, and {worse}"
                    more: Any = {"budget": (line,), "problem": f"rank {rank}, on the way back"}
                    return this.wrong("bytes", "round", why, **more)
                if x.dtype == np.float32 and x.any() and np.array_equal(x, x.astype(np.float16)):
                    return this.wrong(
                        "asked", "round", f"rank {rank} sends sums that were rounded to float16 before: {worse}"
                    )
    return None


def _made_of(this: Ran, *, unlike: bool) -> Found | None:
    """What are gradients that are `unlike` one GPU's made of? Is each rounded when all shares are in it, and not before?"""
    parts = [{call.of: call.results for call in watched.calls} for watched in this.team]
    everybody = range(len(this.team))
    for rank, watched in enumerate(this.team):
        dq, *sums = (np.asarray(x, np.float32) for x in watched.returned)
        shares = {f"the share of rank {of}'s keys": own[0] for of, own in parts[rank].items()}
        if unlike and (said := _differs(dq, shares, list(shares))):
            return this.wrong("numbers", "dq", f"dQ of rank {rank} {said}")
        if _rounded_early(this, dq, [own[0] for own in parts[rank].values()]):
            return this.wrong(
                "asked", "dq", f"dQ of rank {rank} is rounded before all shares are in it: add up in float32"
            )
        for i, (name, x) in enumerate(zip(("dK", "dV"), sums, strict=True), 1):
            known = {
                f"rank {one}'s share" + (f" of d{'QKV'[j]}" if j != i else "") + (f" of rank {of}'s keys" if of != rank else ""):
                parts[one][of][j]
                for j in (i, 3 - i) for of in (rank, *(each for each in everybody if each != rank)) for one in everybody
                if of in parts[one] and parts[one][of][j].shape == x.shape
            }  # fmt: skip
            due = [f"rank {one}'s share" for one in everybody if rank in parts[one]]
            if unlike and (said := _differs(x, known, due)):
                step = "home" if f"rank {rank}'s share" in said or "keys" in said else "add"
                return this.wrong("numbers", step, f"{name} that comes home to rank {rank} {said}")
            if _rounded_early(this, x, [own[rank][i] for own in parts if rank in own]):
                return this.wrong("asked", "round", f"{name} of rank {rank} is rounded before all shares are in it")
    return this.wrong("numbers", "add", "the gradients aren't those of one GPU") if unlike else None


def _differs(x: Array, known: Mapping[str, Array], due: list[str]) -> str:
    """How a sum isn't that of the shares that are due, in words; "" if it is. Least squares say how often each is in it."""
    right = np.sum([known[name] for name in due], axis=0)
    if np.linalg.norm(x - right) <= _ROUNDED * np.linalg.norm(right):
        return ""
    columns = {name: part.ravel().astype(float) for name, part in known.items() if part.any()}
    flat, matrix = x.ravel().astype(float), np.stack(list(columns.values()), axis=1)
    times = np.linalg.lstsq(matrix, flat)[0]
    if not np.linalg.norm(matrix @ times - flat) <= 5 * _ROUNDED * np.linalg.norm(flat):
        return "is no sum of shares"
    found = dict(zip(columns, times, strict=True))
    for name, n in sorted(found.items(), key=lambda each: each[0] in due):
        if abs(n - (name in due)) > 0.1:
            return f"lacks {name}" if abs(n) < 0.1 else f"has {name}{'' if abs(n - 1) < 0.1 else f' {n:.2g} times'}"
    return "is no sum of shares"


def _rounded_early(this: Ran, x: Array, parts: list[Array]) -> bool:
    """Is a sum of float32 another one, once it is rounded, than the sum of its parts?"""
    if this.run.problem.dtype == "float32" or len(parts) < len(this.team):
        return False
    due = np.sum(parts, axis=0, dtype=np.float32).astype(np.float16)
    return bool((x.astype(np.float16) != due).mean() > _FLIPPED)


def _moved(this: Ran, kv: list[int], sums: list[int]) -> Found | None:
    """Does nothing go further than it has to?"""
    others = len(this.team) - 1
    for rank, watched in enumerate(this.team):
        keys, total = sent(watched, "KV"), sent(watched)
        rest = total - keys
        if total == kv[rank] + sums[rank]:
            continue
        lines = _line("k, v", keys, kv[rank]), _line("dk, dv", rest, sums[rank])
        what, moved, least = ("K and V", keys, kv[rank]) if keys != kv[rank] else ("dK and dV", rest, sums[rank])
        hops = moved / (least / others) if others else moved
        why = f"rank {rank} sends {what} {hops:.3g} times, and {others} would do"
        shape = watched.rank.q.shape
        if any(name == UNKNOWN and x.shape == shape for message in watched.messages for name, x in message.arrays):
            why = f"rank {rank} sends something of the shape of Q: dQ stays with its rows"
        return this.wrong("bytes", "send", why, budget=lines, problem=f"rank {rank} of {others + 1}, on the way back")
    return None


# -- 14.4, decoding ------------------------------------------------------------------------------------------------

_TOKEN = Problem(batch=2, heads=8, kv_heads=4, len_q=1, len_kv=37, head_dim=16, dtype="float32")
_CACHES: Mapping[str, tuple[int, int, Problem]] = {
    "4 ranks, 37 keys": (4, 1, _TOKEN),
    "4 ranks, 3 keys": (4, 1, _TOKEN.replace(len_kv=3)),
    "2 ranks, 4 keys at a time, 2 queries, float16": (2, 4, _TOKEN.replace(len_q=2, dtype="float16")),
    "1 rank": (1, 1, _TOKEN),
}
_DEALT = {"q": "heads", "kv": "striped", "lse": "heads"}


def decoding(answer: Any) -> Found:
    """Decoding with a striped cache, by its numbers, its bytes and its bits."""
    line = _line("q, out, lse", 0, 0)
    for said, (n, interleave, p) in _CACHES.items():
        q, k, v = random_inputs(p, seed=n)
        how: dict[str, Any] = {"scheme": _DEALT, "ranks": n, "interleave": interleave, "scale": p.scale}
        this = ran(answer, said, (q, k, v), **how)
        if isinstance(this, Found):
            return this
        off = _off(p, this, {"q": q, "k": k, "v": v})
        if off is not None:
            return _asked(this) or _given(this) or _merged_of(this, off)
        least = budget(count("dcp", p, ranks=n, interleave=interleave), "", "q out lse")
        if found := _exchanged(this, least):
            return found
        if n == 4:
            line = _line("q, out, lse", *[max(least[0], line[2])] * 2)
            moved = [np.roll(x, x.shape[1] // n, axis=1) for x in (q, k, v)]
            again = ran(answer, said, moved, **how)
            if isinstance(again, Found):
                return again
            if found := _same_bits(this, again, p.heads // n):
                return found
    return Found(
        "passed",
        "four caches, and each head has the same bits on each rank",
        budget=(line,),
        problem="a rank of 4, 2 requests",
    )


def _asked(this: Ran) -> Found | None:
    """Does each rank look with the queries of all heads, in the order of the ranks, at the keys that it has?"""
    for rank, watched in enumerate(this.team):
        if not watched.calls:
            return this.wrong("numbers", "attend", f"rank {rank} computes nothing")
        for *_, q, k, v in ((UNKNOWN, *call.names) for call in watched.calls):
            if watched.rank.k.size and (k != f"K of rank {rank}" or v != f"V of rank {rank}"):
                return this.wrong("numbers", "attend", f"rank {rank} looks at {k} and {v}: K and V stay where they are")
            if q == f"Q of rank {rank}":
                return this.wrong("numbers", "gather", own_heads(rank))
            if q != EVERYBODY:
                why = q if q != UNKNOWN else "what isn't the queries of all heads"
                return this.wrong(
                    "numbers", "gather", f"rank {rank} looks with {why}: heads belong in the order of the ranks"
                )
    return None


def _given(this: Ran) -> Found | None:
    """Does each rank get the outputs of its own heads, and their LSEs in float32?"""
    for rank, watched in enumerate(this.team):
        for message in watched.messages:
            for name, x in message.arrays:
                if x.ndim == 3 and x.dtype != np.float32:
                    return this.wrong("numbers", "give", f"rank {rank} sends LSEs in {x.dtype}: a weight is e^LSE")
                alike = (x == x.flat[0]).all()  # so are those of a rank without keys, whatever the head
                if name.startswith(("output", "LSE")) and not name.endswith(f" {message.peer}") and not alike:
                    return this.wrong("numbers", "give", f"rank {rank} sends the {name} to rank {message.peer}")
    return None


def _merged_of(this: Ran, off: Array) -> Found:
    """Each rank has looked right, and outputs are merged wrongly."""
    if not off.any():
        return _lse_alone(this)
    run, n = this.run, len(this.team)
    if np.isnan(run.out).any():
        return this.wrong(
            "numbers", "merge", "NaN where a rank has no keys: there the LSE is -inf, and the output counts as 0"
        )
    first = next(rank for rank in range(n) if heads_of(off, n, rank).any())
    parts, lses = ([heads_of(watched.calls[0].results[i], n, first) for watched in this.team] for i in (0, 1))
    keys = [watched.rank.k.shape[2] for watched in this.team]
    others = [rank for rank in range(n) if rank != first]
    looks = mixtures(parts, first) | {
        "weighed by numbers of keys": np.average(parts, axis=0, weights=keys),
        "without its own part": merge([parts[i] for i in others], [lses[i] for i in others])[0],
    }
    like = alike(heads_of(run.out, n, first), looks)
    return this.wrong("numbers", "merge", f"rank {first} merges the outputs of its heads wrongly{like}")


def _exchanged(this: Ran, least: list[int]) -> Found | None:
    """Are queries, outputs and LSEs all that is sent, and only to the rank that needs them?"""
    for rank, watched in enumerate(this.team):
        if (moved := sent(watched)) == least[rank]:
            continue
        names = {name for message in watched.messages for name, _ in message.arrays}
        why = f"rank {rank} sends {moved / least[rank] if least[rank] else moved:.3g} times the bytes that it has to"
        if any(name.startswith(("K", "V")) for name in names):
            why = f"{why}, because keys travel: they stay, and queries come to them"
        elif any("of all heads" in name for name in names):
            why = f"{why}, because outputs of all heads go to everybody: a rank needs those of its own heads"
        elif any(x.dtype == np.float32 and x.ndim == 4 for m in watched.messages for _, x in m.arrays):
            why = f"{why}, because outputs travel in float32"
        line = _line("q, out, lse", moved, least[rank])
        return this.wrong("bytes", "give", why, budget=(line,), problem=f"rank {rank} of {len(this.team)}")
    return None


def _same_bits(this: Ran, again: Ran, own: int) -> Found | None:
    """Has each head the same bits where the heads have moved on by a rank?"""
    for name in ("out", "lse"):
        before, after = getattr(this.run, name), np.roll(getattr(again.run, name), -own, axis=1)
        for head in range(before.shape[1]):
            if not np.array_equal(before[:, head], after[:, head]):
                rank, n = head // own, len(this.team)
                why = f"{name} of head {head} has other bits on rank {rank} than on rank {(rank + 1) % n}"
                return this.wrong("asked", "order", f"{why}: each of them merges the parts in an order of its own")
    return None


# -- 14.5, two hosts -----------------------------------------------------------------------------------------------

RANKS, BUSY = 8, 0.9
_HOSTS = Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float32", causal=True)


def two_hosts() -> Rates:
    """Two hosts of four ranks: a product takes 1 ms, K and V of a rank 0.5 ms to a rank of its host, and 3 ms to one of the other.

    >>> counts = count("ring", _HOSTS, ranks=RANKS)
    >>> found = timeline(counts, two_hosts())
    >>> [round(1e3 * x, 3) for x in (found.seconds, found.computes[0])]
    [22.0, 8.0]
    """
    counts = count("ring", _HOSTS, ranks=RANKS)
    flops, nbytes = counts.counts[0][0].flops.matmul, counts.sent[0] / (RANKS - 1)
    return Rates(
        forward=flops / 1e-3, backward=flops / 1e-3, reading=1e30, launch=0.0, link=nbytes / 0.5e-3, latency=0.0,
        network=nbytes / 3e-3, network_latency=0.0, per_host=RANKS // 2, source="an exercise's",
    )  # fmt: skip


def schedule(answer: Any) -> Found:
    """Any schedule with the right numbers, by the time that it takes."""
    q, k, v = random_inputs(_HOSTS, seed=14)
    this = ran(answer, "8 ranks on two hosts", (q, k, v), ranks=RANKS, causal=True)
    if isinstance(this, Found):
        return this
    off = _off(_HOSTS, this, {"q": q, "k": k, "v": v})
    if off is not None:
        return looked(this) or _merged_wrongly(this, off)
    found = timeline(this.run, two_hosts())
    ring_takes = timeline(count("ring", _HOSTS, ranks=RANKS), found.rates).seconds
    said = f"{1e3 * found.seconds:.3g} ms, where the products take 8 and a plain ring {1e3 * ring_takes:.3g}"
    if found.busy < BUSY:
        return Found("asked", f"{said}. {_longest(found)}", "waits")
    return Found("passed", f"{said}: ranks compute {found.busy:.0%} of the time", said=_longest(found))


def _longest(found: ParallelTimeline) -> str:
    """The longest wait, and what became of the message that was waited for."""
    waits = [span for span in found.spans if span.what == "waits"]
    if not waits:
        return "Nobody waits."
    wait = max(waits, key=lambda span: (round(span.end - span.begin, 9), span.begin))
    sends = [span for span in found.spans if span.what == "sends" and span.rank == wait.peer]
    message = next(span for span in sends if (span.peer, span.step) == (wait.rank, wait.step) and span.end > wait.begin)
    before = [span for span in sends if span.begin < message.begin and abs(span.end - message.begin) < 1e-9]
    done = sum(span.what == "forward" and span.end <= wait.begin for span in found.spans if span.rank == wait.rank)
    half = RANKS // 2
    across = sum(span.rank // half != cast("int", span.peer) // half for span in sends)
    left = f"That left at {1e3 * message.begin:.3g} ms" + (f", behind one to rank {before[-1].peer}" if before else "")
    left += f", and took {1e3 * (message.end - message.begin):.3g} ms"
    waited = f"rank {wait.rank}, from {1e3 * wait.begin:.3g} to {1e3 * wait.end:.3g} ms, with {done} of {RANKS} products done"
    return (
        f"The longest wait: {waited}, for step {wait.step} of rank {wait.peer}. {left}. "
        f"Rank {wait.peer} sends {across} message{'s' * (across != 1)} over the network."
    )
