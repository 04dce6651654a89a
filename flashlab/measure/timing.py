"""Times calls on a GPU side by side, and keeps a call in a CUDA graph.

Each call is timed by CUDA events, behind a pause that the GPU spends while Python queues the call, on a cold L2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["captured", "interleaved", "turns"]

WARM_UP = 3
"""Rounds, and calls, before the ones that count: the first may compile."""


def interleaved(
    torch: Any, calls: Sequence[Callable[[], Any]], seconds: float, *, least: int = 11
) -> list[list[float]]:
    """Milliseconds of every call in every round, in the order of `calls`. There are `least` rounds, or more in `seconds`."""
    l2 = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2, dtype=torch.uint8, device="cuda")
    pause = _pause(torch, calls)

    def one_round(first: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        for i in range(len(calls)):
            mine = (first + i) % len(calls)  # each takes every place in the order
            flush.zero_()
            torch.cuda._sleep(pause)
            events[mine][0].record()
            calls[mine]()
            events[mine][1].record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    warm = [one_round(i) for i in range(WARM_UP)][-1]
    rounds = min(200, max(least, round(1000 * seconds / max(0.01, sum(warm)))))
    return [list(times) for times in zip(*(one_round(i) for i in range(rounds)), strict=True)]


def _pause(torch: Any, calls: Sequence[Callable[[], Any]]) -> int:
    """GPU clocks that outlast the slowest queueing of a call, so that its kernels are timed and not Python."""
    slowest = 0.0
    for call in calls:
        took = 0.0
        for _ in range(WARM_UP):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            took = time.perf_counter() - begun
        slowest = max(slowest, took)
    return int(min(1e-3, 2 * slowest) * 2e9)


def captured(torch: Any, calls: Sequence[Callable[[], Any]], repeats: int = 1) -> tuple[Any, list[Any]]:
    """A CUDA graph of all calls, one after the other, `repeats` times; and what they returned, which a replay writes again.

    Raises what a call raises that can't be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the arrays may still be written there
    with torch.cuda.stream(stream):
        for call in calls:  # the first may compile
            call()
        stream.synchronize()
        graph, returned = torch.cuda.CUDAGraph(), list[Any]()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                returned = [call() for call in calls]
    return graph, returned


def turns(torch: Any, graphs: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each graph's replays, one in every round. Each takes every place in the order; two rounds warm up."""
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 2):
        for n in range(len(names)):
            name = names[(i + n) % len(names)]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if i >= 2:
                times[name].append(1e3 * begin.elapsed_time(end))
    return times
