"""Arrays whose last part begins beyond 2³¹ and beyond 2³² elements, for every algorithm, on a GPU.

One array at a time lies that far apart, in memory full of NaN. An offset that was computed in 32 bits would read NaN, or write
elsewhere. So the bits must be those of the same arrays where they are dense.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.measure import problems
from flashlab.verify import general
from tests.flashlab.run.gpu import cannot_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the frameworks' warnings are theirs

FAR = [2**31, 2**32]
ROWS = [
    name for name, row in fl.CATALOGUE.items() if row.kernels and row.language == "cuda" and "float16" in row.dtypes
]


def placed(xp: Any, buffer: Any, x: Any, axis: int, elements: int) -> Any:
    """A copy of `x` in `buffer`, with so large a stride along `axis` that its last part begins beyond so many elements."""
    stride = -(-(elements + 4096) // (x.shape[axis] - 1)) * x.itemsize
    strides = [*dense(x)]
    strides[axis] = -(-stride // 256) * 256
    bits = f"u{x.itemsize}"
    xp.ndarray(x.shape, bits, buffer, strides=strides)[...] = x.view(bits)
    return xp.ndarray(x.shape, x.dtype, buffer, strides=strides)


def dense(x: Any) -> tuple[int, ...]:
    """Strides of rows that are padded to 16 bytes, as kernels take them."""
    row = -(-x.shape[-1] * x.itemsize // 16) * 16
    lengths = [row, *(n for n in x.shape[-2:0:-1])]
    return (*(int(n) for n in np.cumprod(lengths)[::-1]), x.itemsize)


def check(
    algorithm: str, p: fl.Problem, drawn: Mapping[str, Any], wanted: Mapping[str, Any], got: Mapping[str, Any]
) -> None:
    """The bits are those that are wanted; what atomics add up holds the operation's bound."""
    row = fl.CATALOGUE[algorithm]
    host = {name: x.get() for name, x in got.items()}
    assert not [
        name for name, x in wanted.items() if name not in row.atomics and x.get().tobytes() != host[name].tobytes()
    ]
    if row.atomics:
        assert general.judged(row, p, drawn, host) <= 1


def one_of(algorithm: str) -> fl.Problem:
    """The first problem of its counter matrix that fills several batches, requests or pages."""
    cases = [case.problem for case in problems.matrix([algorithm]) if case.problem.dtype == "float16"]
    return next((p for p in cases if p.batch > 1), cases[0])


@pytest.fixture
def buffer() -> Iterator[Any]:
    cupy = importlib.import_module("cupy")
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    nbytes = 2 * max(FAR) + (256 << 20)
    if cupy.cuda.runtime.memGetInfo()[0] < nbytes + (4 << 30):
        pytest.skip(f"needs {nbytes + (4 << 30):,} bytes of GPU memory")
    yield cupy.empty(nbytes, "u1")
    pool.free_all_blocks()


@pytest.mark.parametrize("algorithm", ROWS)
def test_offsets_beyond_32_bits(algorithm: str, buffer: Any) -> None:
    cupy = importlib.import_module("cupy")
    p = one_of(algorithm)
    if why := cannot_run(algorithm, p):
        pytest.skip(why)
    plan: Any = fl.plan(algorithm, p)
    drawn = plan.operation.draw(p, 5)
    given = {name: cupy.asarray(x) for name, x in drawn.items()}
    wanted = plan.run(given)
    held = given | wanted
    tried = 0
    for name, x in held.items():
        if x.ndim < 4 or plan.counts.tensors[name].vector or x.itemsize > 2:
            continue
        for axis in (n for n in range(3) if x.shape[n] > 1):
            for elements in FAR:
                buffer[...] = 0xFF
                far = placed(cupy, buffer.data, x, axis, elements)
                got = plan.run({**given, name: far})
                check(algorithm, p, drawn, wanted, got)
                tried += 1
    assert tried


@pytest.mark.parametrize("algorithm", ["flash2_backward", "flash2_backward_deterministic", "flash3_backward"])
def test_a_backward_pass_of_more_than_2_to_the_32_elements(algorithm: str) -> None:
    """dQ's float32 sums, too, have over 2³² elements. Heads at both ends hold the bound."""
    torch = pytest.importorskip("torch")
    if torch.cuda.mem_get_info()[0] < 62 << 30:
        pytest.skip("needs 62 GiB of GPU memory")
    p = fl.Problem(batch=1, heads=8400, kv_heads=70, len_q=8192, len_kv=128, head_dim=64, dtype="float16")
    if why := cannot_run(algorithm, p):
        pytest.skip(why)
    q = torch.randn(1, 8400, 8192, 64, dtype=torch.float16, device="cuda")  # 4.4e9 elements
    k, v = (torch.randn(1, 70, 128, 64, dtype=torch.float16, device="cuda") for _ in "kv")
    out, lse = fl.attention(q, k, v, lse=True)
    dout = torch.randn_like(q)
    dq = fl.attention_backward(dout, q, k, v, out, lse, algorithm=algorithm)[0]
    for head in (0, 4100, 8399):  # at the beginning, beyond 2³¹, beyond 2³²
        rows = {"q": q, "out": out, "lse": lse, "dout": dout}
        arrays = {name: x[:, head : head + 1].cpu().numpy() for name, x in rows.items()}
        arrays |= {name: x[:, head // 120 : head // 120 + 1].cpu().numpy() for name, x in (("k", k), ("v", v))}
        operation, one = fl.CATALOGUE[algorithm].operation, p.replace(heads=1, kv_heads=1)
        truth = operation.judge(one, arrays)
        error = np.abs(dq[:, head : head + 1].cpu().numpy() - truth["dq"])
        assert (error <= operation.bounds(one, arrays, truth)["dq"][..., None]).all(), head
    del q, k, v, out, lse, dout, dq
    torch.cuda.empty_cache()
    importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()
