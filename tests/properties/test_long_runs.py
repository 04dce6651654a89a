"""One process that works for long: its memory doesn't grow, and no file stays open.

    FLASHLAB_LONG_RUN=3600 pytest -m long tests/properties/test_long_runs.py

runs for an hour; FLASHLAB_LONG_RUN is in seconds. `make test-long` takes twenty minutes of it, beside all its other tests.

The first quarter draws work at random, and the others repeat it. What is used for the first time (a library, a font, a kernel's
code) stays for good: one such step is up to 26 MB of 180, and comes at any time while work is new. Among repetitions, nothing is
used for the first time, so what grows then is a leak. Lengths are new in every round: a cache of them without an end shows, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import pytest

import flashlab as fl
from simulator.operations.attention import ATTENTION
from tests.properties import fuzz

SECONDS = float(os.environ.get("FLASHLAB_LONG_RUN", "1200"))


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def work(random: Random, fresh: Random, *, emulated: bool) -> None:
    """Simulate, count, emulate and verify a random problem. `fresh` draws a length that no other round has."""
    drawn = [fl.Problem(**{**fuzz.BASE, **x}) for x in fuzz.PROBLEMS]
    taken = [x for x in drawn if fl.CATALOGUE["flash2"].refuses(x) is None]
    p = random.choice([x for x in taken if x.mask != "blocks"])  # such small ones hold no tile
    p = p.replace(lengths=None, len_q=p.len_q, len_kv=p.len_kv)
    arrays = ATTENTION.draw(p, random.randrange(100))
    fl.simulate("flash2", **arrays, **p.masks, trace=random.random() < 0.2)
    fl.count("flash2", p.replace(len_q=random.randrange(1, 10**6))).dram  # noqa: B018  (an estimate is computed on access)
    fl.verify("flash2", checks=["determinism"], dtypes=["float16"], examples=3, seed=random.randrange(100))
    if emulated and p.head_dim_v == p.head_dim:
        fl.emulate("flash2", **arrays, **p.masks)
    with fuzz.apart():
        for _ in range(20):
            fuzz.one(random)


def holds(round_: Callable[[Random, Random], None], seconds: float) -> tuple[list[int], bool]:
    """What the process holds after each round of the last three quarters, and whether it kept more files open.

    The first quarter, of at least two rounds, takes `seconds`; the others are as many rounds, and the same.
    """
    fresh, begun, rounds = Random(-1), time.monotonic(), 0
    while time.monotonic() - begun < seconds or rounds < 2:
        round_(Random(rounds), fresh)
        rounds += 1
    open_before, held = descriptors(), list[int]()
    for n in range(3 * rounds):
        round_(Random(n % rounds), fresh)
        held.append(resident())
    return held, descriptors() > open_before


def grew(held: list[int]) -> float:
    """How much more the last quarter holds than the second, as a share. `held` begins with the second."""
    quarter = len(held) // 3
    return median(held[-quarter:]) / median(held[:quarter]) - 1


@pytest.mark.long
@pytest.mark.xdist_group("long run")  # groups go first: the longest test doesn't begin when all others have ended
@pytest.mark.timeout(0)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
def test_nothing_grows() -> None:
    from tests.conftest import NEEDS

    emulated = NEEDS["compiler"]() is None
    fl.compare(fl.Problem(**fuzz.BASE), algorithms=["flash2"]).plot()  # matplotlib keeps its fonts open
    held, opened = holds(partial(work, emulated=emulated), SECONDS / 4)
    print(f"{len(held)} rounds repeated, from {held[0] / 2**20:.1f} to {held[-1] / 2**20:.1f} MiB: {grew(held):+.1%}")
    assert grew(held) <= 0.05
    assert not opened


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
@pytest.mark.parametrize("leak", ["none", "memory", "files", "first use"])
def test_a_leak_is_found_and_a_first_use_is_none(leak: str) -> None:
    """Of what every round leaves behind, and only of that."""
    kept = list[object]()

    def round_(random: Random, fresh: Random) -> None:
        if leak == "memory":  # 2 % of what the process holds, in pages that are written
            kept.append(bytes(os.urandom(1024)) * (resident() // 50 // 1024))
        elif leak == "files":
            kept.append(os.dup(0))
        elif leak == "first use" and not kept:
            kept.append(bytearray(b"x") * resident())

    held, opened = holds(round_, 0.0)
    for each in kept:
        if isinstance(each, int):
            os.close(each)
    assert (grew(held) > 0.05, opened) == (leak == "memory", leak == "files")
