"""Many launches of random problems on a GPU that does something else beside them, in poisoned memory: the same bits each time."""

from __future__ import annotations

import importlib
import os
from random import Random
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import rule
from simulator.operations.attention import ATTENTION

pytestmark = pytest.mark.gpu

LAUNCHES = int(os.environ.get("FLASHLAB_LAUNCHES", "10000"))
SHAPES: list[dict[str, Any]] = [
    {"heads": 4, "len_q": 257}, {"heads": 8, "kv_heads": 2, "len_q": 97, "len_kv": 1023, "causal": True},
    {"heads": 2, "len_q": 1, "len_kv": 799}, {"batch": 3, "heads": 2, "len_q": 113, "window": (31, 5)},
    {"heads": 1, "len_q": 100, "len_kv": 37, "causal": True}, {"heads": 2, "len_q": 640, "head_dim": 128},
    {"heads": 2, "len_q": 64, "head_dim": 111, "dtype": "bfloat16"}, {"heads": 2, "len_q": 200, "scale": -0.3},
]  # fmt: skip


def cupy() -> Any:
    return importlib.import_module("cupy")


def bits(x: Any) -> bytes:
    return cupy().asnumpy(x.view("u1")).tobytes()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_launches_under_load() -> None:
    """Buffers that were given back are full of NaN, so what a kernel reads before it is written shows."""
    xp = cupy()
    beside, other = xp.cuda.Stream(non_blocking=True), xp.ones((2048, 2048), np.float32)
    random, first = Random(0), dict[tuple[int, str], tuple[bytes, bytes]]()
    for _ in range(LAUNCHES):
        n, algorithm = random.randrange(len(SHAPES)), random.choice(["standard", "online_softmax", "flash1", "flash2"])
        p = fl.Problem(**{"batch": 1, "head_dim": 64, "dtype": "float16", **SHAPES[n]})
        arrays = ATTENTION.draw(p, seed=n)
        with beside:
            other @ other
        poison = [xp.full(size, np.nan, np.float32) for size in (1 << 10, 1 << 16, 1 << 20)]
        del poison
        given = {name: xp.asarray(x) for name, x in arrays.items()}
        out, lse = fl.attention(**given, **p.masks, algorithm=algorithm, lse=True)
        got = bits(out), bits(lse)
        if (n, algorithm) not in first:
            expected: Any = rule.expect(p, **dict[str, Any](arrays))
            assert rule.judge(expected, xp.asnumpy(out), xp.asnumpy(lse)).message is None
            first[n, algorithm] = got
        assert got == first[n, algorithm], (algorithm, p)


def test_out_of_memory_leaves_the_context_usable() -> None:
    xp = cupy()
    p = fl.Problem(batch=1, heads=8, len_q=2048, head_dim=64, dtype="float16")
    given = [xp.asarray(x) for x in fl.random_inputs(p)]
    before, pool = bits(fl.attention(*given, algorithm="standard")), xp.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes() + (16 << 20))  # S of 8 heads takes 128 MiB
    try:
        with pytest.raises(MemoryError, match=r"allocat\w+ [\d,]+ bytes"):
            fl.attention(*given, algorithm="standard")
    finally:
        pool.set_limit(size=0)
    assert bits(fl.attention(*given, algorithm="standard")) == before
