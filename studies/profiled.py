"""Where the time of a training step goes: the host's, the GPU's, and that of attention's calls.

Times of the host and of a step are measured without a profiler, which would slow the host down. Only what the GPU does comes from
torch's profiler. The GPU is idle for that share of a step in which none of its kernels runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

ROUNDS, STEPS, TOP = 10, 10, 12
"""Steps that are timed one by one, steps that are timed together, and kernels that are named."""

Row = dict[str, Any]


class Watched:
    """An attention that notes how long the host takes for each call, and for each call's node in the backward pass. A node that is
    made of several (SDPA's `math`) is watched in its last one alone."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend
        self.forward, self.backward = list[float](), list[float]()

    def __call__(self, *given: Any) -> Any:
        begun = time.perf_counter()
        out = self._attend(*given)
        self.forward.append(time.perf_counter() - begun)
        at = list[float]()

        def begins(_: Any) -> None:
            at.append(time.perf_counter())

        def ends(*_: Any) -> None:
            self.backward.append(time.perf_counter() - at.pop())

        out.grad_fn.register_prehook(begins)
        out.grad_fn.register_hook(ends)
        return out


def union(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line lies in at least one of the spans.

    >>> union([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def of_steps(torch: Any, step: Callable[[], object], wait: Callable[[], object]) -> Row:
    """What a step takes, in milliseconds. None of what a GPU does is known on a CPU."""
    for _ in range(3):
        step()
    took, queued = list[float](), list[float]()
    for _ in range(ROUNDS):
        wait()
        begun = time.perf_counter()
        step()
        queued.append(time.perf_counter() - begun)
    for _ in range(3):
        wait()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        took.append((time.perf_counter() - begun) / STEPS)
    found = {"step_ms": 1e3 * median(took), "host_ms": 1e3 * median(queued)}
    if not torch.cuda.is_available():
        return found | {"gpu_ms": None, "launches": None, "kernels": []}
    return found | _on_gpu(torch, step, wait)


def _on_gpu(torch: Any, step: Callable[[], object], wait: Callable[[], object]) -> Row:
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA], acc_events=True) as profile:
        for _ in range(3):
            step()
        wait()
    annotations = ("Optimizer.", "ProfilerStep")  # spans of these names stand among the kernels
    events = [x for x in profile.events() if str(x.device_type).endswith("CUDA")]
    on_gpu = [x for x in events if not getattr(x, "is_user_annotation", False) and not x.name.startswith(annotations)]
    launches, taken = Counter[str](), Counter[str]()
    for x in on_gpu:
        launches[x.name] += 1
        taken[x.name] += x.time_range.end - x.time_range.start
    busy = union((x.time_range.start, x.time_range.end) for x in on_gpu)
    kernels = [
        {"kernel": name[:120], "launches": launches[name] / 3, "ms": us / 3e3} for name, us in taken.most_common(TOP)
    ]
    return {"gpu_ms": busy / 3e3, "launches": len(on_gpu) / 3, "kernels": kernels}
