"""One process that works for long: its memory doesn't grow, and no file stays open.

    FLASHLAB_LONG_RUN=3600 pytest -m long tests/properties/test_long_runs.py

runs for an hour; FLASHLAB_LONG_RUN is in seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

import pytest

import flashlab as fl
from simulator.operations.attention import ATTENTION
from tests.properties import fuzz

SECONDS = float(os.environ.get("FLASHLAB_LONG_RUN", "3600"))


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def work(random: Random, *, emulated: bool) -> None:
    """Simulate, count, emulate and verify a random problem."""
    p = fl.Problem(**{**fuzz.BASE, **random.choice([x for x in fuzz.PROBLEMS if x.get("dtype") != "float8_e4m3fn"])})
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


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
def test_nothing_grows() -> None:
    from tests.conftest import NEEDS

    emulated, random = NEEDS["compiler"]() is None, Random(0)
    fl.compare(fl.Problem(**fuzz.BASE), algorithms=["flash2"]).plot()  # matplotlib keeps its fonts open
    held: list[int] = []
    begun = time.monotonic()
    open_before: int | None = None
    while (spent := time.monotonic() - begun) < SECONDS or len(held) < 8:
        work(random, emulated=emulated)
        held.append(resident())
        if open_before is None and spent > SECONDS / 4:  # by then all that stays open is open
            open_before = descriptors()
    quarter = len(held) // 4
    second, last = median(held[quarter : 2 * quarter]), median(held[-quarter:])
    print(f"{len(held)} rounds, {second / 2**20:.1f} MiB in the second quarter, {last / 2**20:.1f} MiB in the last")
    assert last <= 1.05 * second
    assert open_before is not None and descriptors() <= open_before
