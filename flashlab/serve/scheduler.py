"""Who computes how many tokens in the next step.

There are no phases. A request has tokens, and some of them are computed. A step computes more of them: one for a request that
answers, many for one whose prompt is new, and a part of a prompt where the step has no room for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.requests import Request
from simulator.errors import UsageError, among
from simulator.fields import integer

__all__ = ["POLICIES", "Job", "Scheduler"]

POLICIES = ("fcfs", "shortest")
"""Who is let in first of those that wait: the first that came, or the one with the fewest tokens left to compute."""


@dataclass(eq=False)
class Job:
    """A request that is served, until it has so many tokens, and what happened to it."""

    request: Request
    length: int
    prompt: int
    reused: int = 0
    """Tokens that were found when it was let in."""
    recomputed: int = 0
    """Tokens that were computed before, and again after it was preempted."""
    preempted: int = 0
    computed: int = field(default=0, repr=False)
    """The most tokens that were ever computed."""

    @property
    def done(self) -> bool:
        return len(self.request.tokens) >= self.length


class Scheduler:
    """Fills steps with at most `max_num_batched_tokens` tokens of at most `max_num_seqs` requests.

    Those that run come first, in the order in which they came. If one finds no room for its next token, the latest is preempted: it
    gives its blocks back, and computes its tokens again later. Then those that wait are let in, by `policy`, until one finds no
    room. A step is `schedule`, the launches, and `update`.

    >>> scheduler = Scheduler(KVCacheManager(64, 16), max_num_seqs=8, max_num_batched_tokens=32)
    >>> job = scheduler.add(Request("a", list(range(40))), answer=3)
    >>> [(request.name, n) for request, n in scheduler.schedule().items()]
    [('a', 32)]
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        policy: str = "fcfs",
    ) -> None:
        self.manager = manager
        self.max_num_seqs = integer("max_num_seqs", max_num_seqs, 1)
        self.max_num_batched_tokens = integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        self.policy = among("policy", policy, POLICIES)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.jobs: dict[Request, Job] = {}
        self.preempted: list[Job] = []
        """In the last step."""
        self._step: dict[Request, int] = {}

    def add(self, request: Request, answer: int) -> Job:
        """A request arrives, which will be answered with so many tokens. Raises `UsageError` for one that the pool can't hold."""
        length, room = len(request.tokens) + integer("answer", answer, 1), self.manager.num_blocks - 1
        tokens = room * self.manager.block_size
        if length - 1 > tokens:  # of the last token nobody needs K and V
            raise UsageError(
                "request", f"{request.name}, {length:,} tokens", f"at most {tokens + 1:,}: the pool has no more"
            )
        if request in self.jobs:
            raise UsageError("request", request.name, "a request that wasn't added before")
        job = self.jobs[request] = Job(request, length, len(request.tokens))
        self.waiting.append(job)
        return job

    def cancel(self, request: Request) -> None:
        """A request's client has gone."""
        job = self._known(request)
        if request in self.manager.owned:
            self.manager.free(request)
        self._gone(job)

    def schedule(self) -> dict[Request, int]:
        """The next step: for each of its requests how many new tokens. Their slots are allocated."""
        if self._step:
            raise UsageError("schedule", "called twice", "update or abandon between two steps")
        self.preempted = []
        left = self._run(self.max_num_batched_tokens)
        if not self.preempted:
            self._let_in(left)
        return dict(self._step)

    def update(self, tokens: Mapping[Request, int]) -> list[Job]:
        """The step is done: `tokens` has the next token of each request in `answers`. Returns those that ended."""
        ended: list[Job] = []
        for request in self._step:
            self.manager.commit(request)
            job = self.jobs.get(request)
            if job is None:  # cancelled
                continue
            job.computed = max(job.computed, self.manager.num_computed_tokens(request))
            if job.computed == len(request.tokens) == self.manager.num_computed_tokens(request):
                request.tokens.append(tokens[request])
                if job.done:
                    self.manager.free(request)
                    self._gone(job)
                    ended.append(job)
        self._step = {}
        return ended

    def abandon(self) -> None:
        """The step has failed. Nothing is lost: the next one computes the same tokens."""
        for request in self._step:
            self.manager.abandon(request)
        self._step = {}

    def answers(self) -> list[Request]:
        """Those of the step that get a token: all of theirs are computed then."""
        m = self.manager
        return [r for r, n in self._step.items() if m.num_computed_tokens(r) + n == len(r.tokens)]

    # -- inside

    def _run(self, left: int) -> int:
        """Those that run. Returns how many more tokens the step may have."""
        i = 0
        while i < len(self.running) and left:
            job = self.running[i]
            n = min(len(job.request.tokens) - self.manager.num_computed_tokens(job.request), left)
            while self.manager.allocate_slots(job.request, n) is None:
                if self._preempt(self.running[-1]) is job:
                    return left
            self._step[job.request] = n
            left, i = left - n, i + 1
        return left

    def _preempt(self, job: Job) -> Job:
        """The latest waits again, in front of all others."""
        self.manager.free(job.request)
        self.running.remove(job)
        self.waiting.insert(0, job)
        job.preempted += 1
        self.preempted.append(job)
        return job

    def _let_in(self, left: int) -> None:
        """Those that wait, so long as there is room."""
        if self.policy == "shortest":
            self.waiting.sort(key=lambda job: len(job.request.tokens))
        while self.waiting and left and len(self.running) < self.max_num_seqs:
            job = self.waiting[0]
            _, found = self.manager.get_computed_blocks(job.request)
            n = min(len(job.request.tokens) - found, left)
            if self.manager.allocate_slots(job.request, n) is None:
                return
            self.waiting.pop(0)
            self.running.append(job)
            if job.preempted:
                job.recomputed += max(0, job.computed - found)
            job.reused += found
            self._step[job.request] = n
            left -= n

    def _known(self, request: Request) -> Job:
        if request not in self.jobs:
            raise UsageError("request", getattr(request, "name", request), "a request that is served")
        return self.jobs[request]

    def _gone(self, job: Job) -> None:
        del self.jobs[job.request]
        for jobs in (self.waiting, self.running):
            if job in jobs:
                jobs.remove(job)
