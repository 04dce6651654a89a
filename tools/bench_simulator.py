"""How long the simulator takes beside naive NumPy attention: `python tools/bench_simulator.py`.

The problem has 8 heads × 2048 × 64. flash2 has a tile of 128 × 128 and gives numbers and exact counts, without a
trace. Times are in seconds, the median of ten calls. Each call waits until the BLAS threads of the last one sleep,
because they spin for a while and would take a core from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import flashlab as fl


def naive(q: Any, k: Any, v: Any) -> Any:
    """softmax(Q K^T / sqrt(d)) V in float32, in plain NumPy."""
    s = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    s -= s.max(-1, keepdims=True)
    p = np.exp(s)
    p /= p.sum(-1, keepdims=True)
    return p @ v


def seconds(call: Callable[[], object]) -> float:
    """The median time of ten calls, after one that isn't counted."""
    taken: list[float] = []
    for _ in range(11):
        time.sleep(0.3)
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def line(dtype: str) -> str:
    """The printed line of a dtype."""
    p = fl.Problem(batch=1, heads=8, len_q=2048, head_dim=64, dtype=dtype)
    inputs = fl.random_inputs(p)
    single = [x.astype(np.float32) for x in inputs]
    full = seconds(lambda: fl.simulate("flash2", *inputs, tile=(128, 128)))
    causal = seconds(lambda: fl.simulate("flash2", *inputs, causal=True, tile=(128, 128)))
    return f"{dtype:>8}: naive float32 {seconds(lambda: naive(*single)):.3f}, flash2 {full:.3f}, causal {causal:.3f}"


if __name__ == "__main__":
    for name in ("float32", "float16", "bfloat16"):
        print(line(name))
