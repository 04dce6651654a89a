"""What pages are worth to a server, by replay: `python -m studies serve [--traces FOLDER] [--out docs/results]`.

Days of traces, counted, whose step reads the weights of 8 billion parameters, too. What requests hold of a cache, by the way in
which it is handed out. What sharing saves where several answers grow from one prompt, and how many more tokens a pool then gives
per step. And the block manager, held to its model for so many steps.

A folder with `conversation_trace.jsonl` (Mooncake: github.com/kvcache-ai/Mooncake, FAST25-release/traces) and
`AzureLLMInferenceTrace_conv.csv` (github.com/Azure/AzurePublicDataset, data) adds their days. This needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from flashlab.measure import results
from flashlab.measure.results import Data, Kind, markdown_table
from flashlab.serve import traces
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.costs import Costs, Model
from flashlab.serve.day import Day, serve
from flashlab.serve.model import drive
from flashlab.serve.requests import Request
from flashlab.serve.scheduler import Scheduler
from flashlab.serve.shares import shares
from flashlab.views.progress import track

WEIGHTS = 16_060_000_000
"""Bytes of 8.03 billion parameters in 16 bits."""
MOONCAKE, AZURE = "conversation_trace.jsonl", "AzureLLMInferenceTrace_conv.csv"
SEEDS = 4
"""The driver's steps are split over so many seeds."""


class Spread(Data):
    """Milliseconds: the median and the 99th percentile."""

    p50: float
    p99: float


class DayRow(Data):
    """A day. `waste` is the share of owned rows without a token, `saved` the share of pages that sharing saves, over time. Times
    are predicted. `least_steps` and `least_busy` are what it needs with all pages free."""

    trace: str
    requests: int
    rate: float | None
    policy: str
    page_size: int
    pages: int
    caching: bool
    device: str
    steps: int
    least_steps: int
    busy: float
    least_busy: float
    first_token: Spread
    per_token: Spread
    prompt_tokens: int
    answer_tokens: int
    reused: int
    recomputed: int
    preempted: int
    peak_pages: int
    waste: float
    saved: float


class ShareRow(Data):
    """The used share of what live requests hold."""

    lengths: str
    way: str
    share: float


class SharingRow(Data):
    """Groups of `width` answers to one prompt. At each step, each answer is given up for a fork of another with this chance.
    `saved` is the share of pages, `faster` the tokens per step over those without sharing, in the same pool."""

    lengths: str
    width: int
    given_up: float
    page_size: int
    pages: int
    groups: int
    saved: float
    faster: float


class DrivenRow(Data):
    """Steps of the driver, and what failed."""

    seed: int
    steps: int
    failed: str | None


class Serving(Data):
    """What pages are worth."""

    days: tuple[DayRow, ...]
    shares: tuple[ShareRow, ...]
    sharing: tuple[SharingRow, ...]
    driven: tuple[DrivenRow, ...]


def headline(of: Serving) -> str:
    steps, failed = sum(row.steps for row in of.driven), sum(row.failed is not None for row in of.driven)
    pages = [row.share for row in of.shares if row.way == "pages of 16"]
    said = ", ".join(f"{1 - share:.1%}" for share in pages)
    faults = f"{failed} of its runs failed" if failed else "nothing failed"
    return f"Waste with pages of 16: {said}; the block manager, held to its model for {steps:,} steps: {faults}"


def table(of: Serving) -> str:
    """All four lists."""
    head = ("trace", "requests", "policy", "pages of", "pages", "prefixes", "steps (least)", "first token, ms (99 %)",
            "per token, ms (99 %)", "reused", "recomputed", "most pages", "waste", "saved by sharing")  # fmt: skip
    days = [
        (
            row.trace, f"{row.requests:,}", row.policy, str(row.page_size), f"{row.pages:,}",
            "found" if row.caching else "not found",
            f"{row.steps:,} ({row.least_steps:,})", f"{row.first_token.p50:,.4g} ({row.first_token.p99:,.4g})",
            f"{row.per_token.p50:,.3g} ({row.per_token.p99:,.3g})", f"{row.reused:,}", f"{row.recomputed:,}", f"{row.peak_pages:,}",
            f"{row.waste:.2%}", f"{row.saved:.1%}",
        )
        for row in of.days
    ]  # fmt: skip
    ways = list(dict.fromkeys(row.way for row in of.shares))
    by = {(row.way, row.lengths): row.share for row in of.shares}
    lengths = list(dict.fromkeys(row.lengths for row in of.shares))
    used = [(way, *(f"{by[way, name]:.1%}" for name in lengths)) for way in ways]
    sharing = [
        (row.lengths, str(row.width), f"{row.given_up:.0%}", f"{row.saved:.1%}", f"{row.faster:.2f} ×")
        for row in of.sharing
    ]
    driven = [(str(row.seed), f"{row.steps:,}", row.failed or "nothing") for row in of.driven]
    return "\n\n".join(
        (
            markdown_table(head, days),
            markdown_table(("handed out by", *lengths), used),
            markdown_table(("lengths", "answers", "given up per step", "saved", "tokens per step"), sharing),
            markdown_table(("seed", "steps", "failed"), driven),
        )
    )


def passed(data: Any, algorithm: str) -> bool:
    del algorithm
    return all(row["failed"] is None for row in data["driven"])


SERVE = Kind(
    "serve", "Serving: pages by replay",
    "days of traces by policy and page size, what sharing saves, and the block manager's driver",
    "python -m studies serve", Serving, headline, table, passed=passed,
)  # fmt: skip


# -- days


def days(folder: Path | None) -> Iterator[DayRow]:
    rate: dict[str, float] = {"lognormal:sharegpt": 16.0, "lognormal:alpaca": 64.0}
    plans: list[tuple[str, int, dict[str, Any]]] = [
        *(("lognormal:sharegpt", 300, {"size": size}) for size in (16, 32, 64)),
        *(("lognormal:alpaca", 300, {"size": size}) for size in (16, 64)),
        *(("lognormal:sharegpt", 300, {"pages": 1024, "policy": policy}) for policy in ("fcfs", "shortest")),
        *(((AZURE, 300, {}),) if folder else ()),
        *((MOONCAKE, 60, {"pages": 65_536, "caching": caching}) for caching in ((True, False) if folder else ())),
    ]
    costs: dict[int, Costs] = {}
    for name, requests, how in track("days")(plans):
        size = how.get("size", 16)
        held = costs.setdefault(size, Costs(Model(weights=WEIGHTS), size, "h100"))
        manager = KVCacheManager(how.get("pages", 131_072 // size), size, enable_caching=how.get("caching", True))
        scheduler = Scheduler(manager, policy=how.get("policy", "fcfs"))
        where = name if name in rate else str((folder or Path()) / name)
        arrivals = traces.read(where, requests=requests, rate=rate.get(name, 1.0))
        yield day_row(serve(arrivals, scheduler, held, trace=name), rate.get(name), manager.enable_caching)


def day_row(day: Day, rate: float | None, caching: bool) -> DayRow:
    s = day.summary()
    same: Any = {key: s[key] for key in ("requests", "steps", "busy", "prompt_tokens", "answer_tokens", "reused", "recomputed",
                 "preempted", "waste", "saved")}  # fmt: skip
    times: Any = {key: Spread(p50=s[key]["p50"] * 1e3, p99=s[key]["p99"] * 1e3) for key in ("first_token", "per_token")}
    return DayRow(
        trace=day.trace, rate=rate, policy=day.policy, page_size=day.block_size, pages=day.num_blocks - 1, caching=caching,
        device=day.device, least_steps=day.bound.steps, least_busy=day.bound.seconds, peak_pages=s["peak_blocks"], **same, **times,
    )  # fmt: skip


# -- several answers to a prompt


class Group:
    """Answers that grow from one prompt."""

    def __init__(self, i: int, prompt: int, answer: int) -> None:
        first = (i + 1) << 32
        self.name, self.prompt, self.left = f"g{i}", list(range(first, first + prompt)), answer
        self.members: list[Request] = []


def grown(manager: KVCacheManager, request: Request, n: int) -> bool:
    """Compute a request's next n tokens, if there is room."""
    if manager.allocate_slots(request, n) is None:
        return False
    manager.take_copies()
    manager.commit(request)
    return True


def admitted(manager: KVCacheManager, group: Group, width: int, shared: bool) -> bool:
    """All members have the prompt, or none has."""
    group.members = [Request(f"{group.name}.{n}", list(group.prompt)) for n in range(width)]
    for n, member in enumerate(group.members):
        if shared and n:
            manager.fork(group.members[0], member)
        elif not grown(manager, member, len(group.prompt)):
            for done in group.members[:n]:
                manager.free(done)
            return False
    return True


def replayed(
    lengths: Sequence[tuple[int, int]], width: int, given_up: float, *, shared: bool, pages: int, size: int
) -> tuple[float, float]:
    """Serve groups, the first that came first: tokens per step, and the share of pages that sharing saves. If no page is left, the
    latest group gives its pages back, and begins again later."""
    random, manager = Random(0), KVCacheManager(pages, size, enable_caching=False)
    waiting = [Group(i, prompt, answer) for i, (prompt, answer) in enumerate(lengths)]
    running, steps, tables, used = list[Group](), 0, 0, 0
    answers = {group.name: group.left for group in waiting}
    while waiting or running:
        while waiting and admitted(manager, waiting[0], width, shared):
            running.append(waiting.pop(0))
        i = 0
        while i < len(running):
            group = running[i]
            for n in range(width) if shared else ():
                if random.random() < given_up:
                    other = group.members[random.randrange(width)]
                    if other is not group.members[n]:
                        manager.free(group.members[n])
                        group.members[n] = Request(f"{group.name}.{n}", list(other.tokens))
                        manager.fork(other, group.members[n])
            fits = True
            for n, member in enumerate(group.members):
                if len(member.tokens) == manager.num_computed_tokens(member):
                    member.tokens.append(n)
                while fits and not grown(manager, member, 1):
                    last = running.pop()
                    for each in last.members:
                        manager.free(each)
                    last.left = answers[last.name]
                    waiting.insert(0, last)
                    fits = last is not group
                if not fits:
                    break
            i += fits
        steps += 1
        tables += sum(len(own.table) for own in manager.owned.values())
        used += pages - 1 - manager.num_free_blocks
        for group in list(running):
            group.left -= 1
            if not group.left:
                running.remove(group)
                for member in group.members:
                    manager.free(member)
    return width * sum(answers.values()) / steps, 1 - used / tables


def sharing() -> Iterator[SharingRow]:
    plans = [
        (name, width, chance) for name in ("alpaca", "sharegpt") for width in (2, 4, 6) for chance in (0.0, 0.1, 0.5)
    ]
    size, groups = 16, 120
    for name, width, chance in track("groups")(plans):
        lengths = [(one.prompt, one.answer) for one in traces.read(f"lognormal:{name}", requests=groups, seed=1)]
        pages = 1 + 8 * width * -(-sum(map(sum, lengths)) // groups // size)  # about eight groups fit without sharing
        rate, saved = replayed(lengths, width, chance, shared=True, pages=pages, size=size)
        without, _ = replayed(lengths, width, chance, shared=False, pages=pages, size=size)
        yield SharingRow(
            lengths=name, width=width, given_up=chance, page_size=size, pages=pages - 1, groups=groups, saved=saved,
            faster=rate / without,
        )  # fmt: skip


def driven(steps: int) -> Iterator[DrivenRow]:
    for seed in track("driver")(range(SEEDS)):
        found = drive(steps=steps // SEEDS, seed=seed)
        failed = None if found is None else f"{found[2]}, after {' '.join(map(str, found[1]))}"
        yield DrivenRow(seed=seed, steps=steps // SEEDS, failed=failed)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies serve", description=__doc__)
    parser.add_argument("--traces", type=Path, help="the folder with Mooncake's and Azure's files")
    parser.add_argument("--steps", type=int, default=10**6, help="of the driver")
    parser.add_argument("--out", help="save the result in this folder")
    parser.add_argument("--force", action="store_true", help="replace a file of today")
    asked = parser.parse_args(words)
    if asked.out:
        results.place(SERVE, [], subject="pages", folder=asked.out, replace=asked.force)
    held = [
        ShareRow(lengths=name, way=way, share=share) for name in traces.LOGNORMAL for way, share in shares(name).items()
    ]
    data = Serving(
        days=tuple(days(asked.traces)), shares=tuple(held), sharing=tuple(sharing()), driven=tuple(driven(asked.steps))
    )
    print(table(data))
    if asked.out:
        print(results.save(SERVE, [], data.model_dump(), subject="pages", folder=asked.out, replace=asked.force))
