"""What a child process has had of its time: the processor's while it works, the clock's while it sleeps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flashlab.base import process

Had = dict[str, float]


def shown(monkeypatch: pytest.MonkeyPatch, had: list[Had], every: float = 10.0, cores: int = 4) -> list[float]:
    """What a stopwatch shows at each look, if a process has had so much of the processors, and `every` so many seconds."""
    clock: Iterator[float] = iter(every * n for n in range(len(had)))
    looks = iter(had)
    monkeypatch.setattr(process, "_processor_time", lambda _: next(looks))
    monkeypatch.setattr(process.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    watch = process.Stopwatch(1)
    return [watch.seconds for _ in had[1:]]


@pytest.mark.parametrize(
    ("had", "seconds"),
    [
        ([{"": 1, "a": 1}, {"": 2, "a": 2}, {"": 12, "a": 12}], [1, 11]),  # a busy machine, which then is at rest
        ([{"": 1, "a": 1}, {"": 1, "a": 1}], [10]),  # it sleeps: of that no machine is guilty
        ([{"": 1, "a": 1}, {"": 25, "a": 1, "b": 6, "c": 6, "d": 6, "e": 6}], [6]),  # many threads: as long as the one
        ([{"": 1, "a": 1}, {"": 33, "a": 1}], [8]),  # of many more threads, which have ended, each core's share
        ([{"": 1, "a": 1}, {"": 81, "a": 1}], [10]),  # never more than by the clock
        ([{"": 0}, {"": 0}, {"": 0}], [10, 20]),  # a system that says nothing
    ],
)
def test_a_stopwatch(monkeypatch: pytest.MonkeyPatch, had: list[Had], seconds: list[float]) -> None:
    assert shown(monkeypatch, had) == seconds


def test_it_looks_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each time that it is asked."""
    looks = [{"": float(n), "a": float(n)} for n in range(1000)]
    found = shown(monkeypatch, looks, every=0.01)
    assert 3 <= len(set(found)) <= 1 + 1000 * 0.01 / process.LOOK


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only Linux says it")
def test_what_a_process_has_had_is_read_with_what_it_has_started() -> None:
    """A thread's own, and in all that of the others and of children."""
    before = process._processor_time(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    after = process._processor_time(os.getpid())
    assert after[""] > before[""] and str(os.getpid()) in after
    script = "import sys; print(flush=True); n = 0\nwhile True: n += 1"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert str(child.pid) in process._processor_time(os.getpid())
        child.kill()
