"""`fl.attention` on a GPU: numbers, every kind of array and layout, streams, and nothing touched that isn't its own."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.measure import fp8
from flashlab.run import devices
from flashlab.run import plan as plans
from flashlab.verify import rule
from simulator.dtypes import numpy_dtype
from tests.flashlab.run.gpu import cannot_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the frameworks' warnings are theirs

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries need memory as well

Array = np.ndarray[Any, Any]
ALGORITHMS = [name for name, row in fl.catalogue.of().items() if row.support.queries is None]
"""Those that take one query have tests of their own (test_decoding_rungs_gpu.py)."""
HOPPER = {name for name, row in fl.catalogue.of().items() if row.arch}
FP8 = "float8_e4m3fn"
EIGHT_BIT = {name for name, row in fl.catalogue.of().items() if FP8 in row.dtypes}
IN_THEIR_DTYPES = [(name, dtype) for name in ALGORITHMS for dtype in fl.CATALOGUE[name].dtypes]
DTYPES = ["float32", "float16", "bfloat16"]
GUARD = 4096


@pytest.fixture
def cupy() -> Any:
    return importlib.import_module("cupy")


# -- the same values as an array of each kind, and back ---------------------------------------------------------------


def to_cupy(x: Array) -> Any:
    return importlib.import_module("cupy").asarray(bits(x).view("u1") if x.dtype.name == FP8 else x)


def to_torch(x: Array) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(bits(x)).cuda().view(getattr(torch, x.dtype.name))


def to_jax(x: Array) -> Any:
    return pytest.importorskip("jax").numpy.asarray(x)


def bits(x: Array) -> Array:
    return x.view(f"i{x.itemsize}")


def to_host(x: Any) -> Array:
    if hasattr(x, "get"):
        return x.get()
    if hasattr(x, "data_ptr"):
        torch = importlib.import_module("torch")
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        return x.contiguous().view(signed).cpu().numpy().view(numpy_dtype(str(x.dtype).removeprefix("torch.")))
    return np.asarray(x)


KINDS: dict[str, Callable[[Array], Any]] = {"cupy": to_cupy, "torch": to_torch, "jax": to_jax}


def problem(dtype: str = "float16", **shape: Any) -> fl.Problem:
    default = {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 97, "len_kv": 113, "head_dim": 64}
    return fl.Problem(**default | shape, dtype=dtype)


def of(algorithm: str, **shape: Any) -> fl.Problem:
    """The same in 16 bit, or in 8 where an algorithm takes nothing else."""
    return problem(FP8 if algorithm in EIGHT_BIT else "float16", **shape)


def check(p: fl.Problem, inputs: tuple[Array, ...], out: Any, lse: Any = None) -> None:
    """The rule of `flashlab verify`, against float64; narrow heads, whose norm is no mean, may stray further."""
    found = rule.judge(rule.expect(p, *inputs), to_host(out), None if lse is None else to_host(lse))
    assert found.worst <= (1 if p.head_dim >= 16 else 4), found.message


# -- numbers ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "causal": {"causal": True},
    "fewer queries": {"len_q": 33, "len_kv": 239, "causal": True},
    "more queries": {"len_q": 150, "len_kv": 17, "causal": True},
    "one query": {"len_q": 1, "len_kv": 799, "causal": True},
    "one key": {"len_q": 70, "len_kv": 1},
    "window": {"len_q": 300, "len_kv": 300, "window": (40, 7)},
    "left window": {"len_q": 200, "len_kv": 333, "window": (65, None), "causal": True},
    "right window": {"len_q": 333, "len_kv": 200, "window": (None, 3)},
    "whole tiles": {"len_q": 256, "len_kv": 256, "causal": True},
    "long": {"batch": 1, "heads": 2, "kv_heads": 1, "len_q": 1023, "len_kv": 2049, "causal": True},
    "7:1": {"batch": 1, "heads": 7, "kv_heads": 1},
    "many heads": {"batch": 3, "heads": 16, "kv_heads": 4, "len_q": 65, "len_kv": 65, "causal": True},
    "scale": {"scale": 0.7},
    "no keys": {"len_kv": 0},
    "no queries": {"len_q": 0},
    "nothing": {"len_q": 0, "len_kv": 0, "causal": True},
}


def skip_what_cannot_run(algorithm: str) -> None:
    if reason := cannot_run(algorithm, of(algorithm)):
        pytest.skip(reason)


@pytest.mark.parametrize(("algorithm", "dtype"), IN_THEIR_DTYPES)
def test_numbers(algorithm: str, dtype: str) -> None:
    skip_what_cannot_run(algorithm)
    for shape in SHAPES.values():
        p = problem(dtype, **shape)
        inputs = fl.random_inputs(p, seed=1)
        given = [to_cupy(x) for x in inputs]
        check(p, inputs, *fl.attention(*given, algorithm=algorithm, lse=True, **p.masks))
        check(p, inputs, fl.attention(*given, algorithm=algorithm, **p.masks))
        assert all(bits(x).tobytes() == to_host(y).tobytes() for x, y in zip(inputs, given, strict=True))


@pytest.mark.parametrize("head_dim", [1, 8, 16, 40, 64, 72, 96, 111, 128, 200, 256])
@pytest.mark.parametrize(("algorithm", "dtype"), IN_THEIR_DTYPES)
def test_head_dims(algorithm: str, dtype: str, head_dim: int) -> None:
    skip_what_cannot_run(algorithm)
    for causal in (False, True):
        p = problem(dtype, head_dim=head_dim, causal=causal)
        inputs = fl.random_inputs(p, seed=2)
        check(p, inputs, *fl.attention(*map(to_cupy, inputs), algorithm=algorithm, lse=True, causal=causal))


@pytest.mark.parametrize("tile", ["16x16", "32x64", "64x32", "128x64"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tiles(algorithm: str, tile: str) -> None:
    skip_what_cannot_run(algorithm)
    if fl.CATALOGUE[algorithm].support.tile(fl.Tile.parse(tile), of(algorithm)):
        q = to_cupy(fl.random_inputs(of(algorithm))[0])
        with pytest.raises(fl.UsageError, match="64, 128 or 192 rows|one of 128x128|a multiple of 8 rows|sides of 16"):
            fl.attention(q, q, q, algorithm=algorithm, tile=tile)
        return
    if algorithm in EIGHT_BIT and fl.Tile.parse(tile).cols % 64:
        return
    for dtype in fl.CATALOGUE[algorithm].dtypes[:2]:
        p = problem(dtype, len_q=300, len_kv=333, causal=True)
        inputs = fl.random_inputs(p, seed=3)
        check(p, inputs, *fl.attention(*map(to_cupy, inputs), algorithm=algorithm, lse=True, causal=True, tile=tile))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_ptx_of_a_t4(algorithm: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(devices, "ARCH", "compute_75")
    if algorithm in HOPPER or fl.CATALOGUE[algorithm].language == "triton":
        with pytest.raises(fl.Unavailable, match=r"needs sm_90a|need 8\.0"):
            plans.gpu_plan(algorithm, of(algorithm) if algorithm in EIGHT_BIT else problem(dtype))
        return
    for head_dim in (40, 64, 111, 128):
        p = problem(dtype, head_dim=head_dim, causal=True)
        inputs = fl.random_inputs(p, seed=4)
        check(p, inputs, *fl.attention(*map(to_cupy, inputs), algorithm=algorithm, lse=True, causal=True))
        plan = plans.gpu_plan(algorithm, p)
        assert plan.counts == fl.count(algorithm, p, device="t4")
        assert {launch.kernel.ptx_version for launch in plan.launches} == {75}
    with pytest.raises(fl.UsageError, match="bfloat16"):
        fl.attention(*map(to_cupy, fl.random_inputs(problem("bfloat16"))), algorithm=algorithm)


# -- kinds of arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_that_comes_in_goes_out(kind: str, dtype: str) -> None:
    for shape in ({}, {"head_dim": 111}, {"len_kv": 0}, {"len_q": 0}, {"batch": 1, "heads": 1, "kv_heads": 1}):
        p = problem(dtype, causal=True, **shape)
        inputs = fl.random_inputs(p, seed=5)
        q, k, v = map(KINDS[kind], inputs)
        out, lse = fl.attention(q, k, v, causal=True, lse=True)
        assert type(out) is type(q)
        assert out.dtype == q.dtype
        assert out.device == q.device
        assert str(lse.dtype).endswith("float32")
        check(p, inputs, out, lse)


def test_jax_computes_on() -> None:
    jax = pytest.importorskip("jax")
    p = problem(causal=True)
    inputs = fl.random_inputs(p, seed=5)
    q, k, v = (jax.jit(lambda x: x * 1)(to_jax(x)) for x in inputs)  # still being computed, perhaps
    check(p, inputs, fl.attention(q, k, v, causal=True) * 1)
    with pytest.raises(fl.UsageError, match="out = 'an immutable array'"):
        fl.attention(q, k, v, out=q + 1)
    with pytest.raises(fl.UsageError, match="JAX array on the CPU"):
        fl.attention(*(jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)))
    with pytest.raises(fl.UsageError, match="expected a CuPy, torch or JAX array in GPU memory"):
        jax.jit(fl.attention)(q, k, v)


def test_what_torch_may_bring() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = map(to_torch, fl.random_inputs(problem()))
    leaf = v.detach().requires_grad_()
    with pytest.raises(fl.UsageError, match="out = Tensor: expected None where q, k or v requires grad"):
        fl.attention(q, k, leaf, out=torch.empty_like(q))
    with torch.no_grad():
        assert torch.equal(fl.attention(q, k, leaf), fl.attention(q, k, v))
    with pytest.raises(fl.UsageError, match="k = torch tensor on cpu"):
        fl.attention(q, k.cpu(), v)
    with pytest.raises(fl.UsageError, match="v.dtype = torch.float64"):
        fl.attention(q, k, v.double())
    with pytest.raises(fl.UsageError, match="an array of the same kind as q"):
        fl.attention(q, k, to_cupy(to_host(v)))
    assert type(fl.attention(torch.nn.Parameter(q, requires_grad=False), k, v)) is torch.Tensor


def test_numpy_is_told_where_to_go() -> None:
    with pytest.raises(fl.UsageError, match="q = NumPy array: expected a CuPy, torch or JAX array in GPU memory"):
        fl.attention(*fl.random_inputs(problem()))


# -- layouts ----------------------------------------------------------------------------------------------------------


def laid(
    cupy: Any, x: Array, axes: tuple[int, ...], pad: tuple[int, ...], shift: int, reverse: bool
) -> tuple[Any, Any]:
    """The values with their axes in another order, in a buffer of NaNs larger by `pad` and `shift` elements off."""
    order = x.transpose(axes)[:, :, :: -1 if reverse else 1]
    sizes = [n + p for n, p in zip(order.shape, pad, strict=True)]
    raw = cupy.full(int(np.prod(sizes)) * x.itemsize + 2 * GUARD, 0xFF, "u1")
    start = GUARD + shift * x.itemsize
    view = raw[start : start + int(np.prod(sizes)) * x.itemsize].view(x.dtype).reshape(sizes)
    view = view[tuple(slice(n) for n in order.shape)]
    bits(view)[...] = cupy.asarray(bits(np.ascontiguousarray(order)))
    return view[:, :, :: -1 if reverse else 1].transpose(np.argsort(axes).tolist()), raw


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, bool]] = {
    "rows padded to 16 bytes": ((0, 1, 2, 3), (0, 0, 0, -1), 0, False),
    "slices of more": ((0, 1, 2, 3), (1, 2, 3, 8), 0, False),
    "bshd": ((0, 2, 1, 3), (0, 0, 0, -1), 0, False),
    "batch within heads": ((1, 2, 0, 3), (0, 1, 0, -1), 0, False),
    "backwards": ((0, 1, 2, 3), (0, 0, 0, -1), 0, True),
    "columns outside": ((0, 1, 3, 2), (0, 0, 0, 1), 0, False),
    "off by an element": ((0, 1, 2, 3), (0, 0, 0, 8), 1, False),
    "odd rows": ((0, 1, 2, 3), (0, 0, 0, 3), 0, False),
}
"""Order of the axes, padding (-1: to 16 bytes), elements off, rows from last to first."""


@pytest.mark.parametrize("head_dim", [64, 111])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_layouts(cupy: Any, kind: str, layout: str, dtype: str, head_dim: int) -> None:
    axes, pad, shift, reverse = LAYOUTS[layout]
    if kind == "torch" and reverse:
        return  # torch has no negative strides
    pad = tuple(-head_dim % 8 if n < 0 else n for n in pad)
    torch = importlib.import_module("torch") if kind == "torch" else None
    p = problem(dtype, head_dim=head_dim, causal=True)
    inputs = fl.random_inputs(p, seed=6)
    placed = [laid(cupy, x, axes, pad, shift, reverse) for x in (*inputs, np.full_like(inputs[0], np.nan))]
    raws = [raw for _, raw in placed]
    before = [raw.get() for raw in raws]
    arrays = [torch.from_dlpack(x) if torch else x for x, _ in placed]
    expected = fl.attention(*map(to_cupy, inputs), causal=True, lse=True)
    with Guarded(cupy).used():
        out, lse = fl.attention(*arrays[:3], out=arrays[3], causal=True, lse=True)
        new = fl.attention(*arrays[:3], causal=True)
    assert out is arrays[3]
    check(p, inputs, out, lse)
    assert np.array_equal(bits(to_host(out)), bits(to_host(expected[0])))
    assert np.array_equal(bits(to_host(new)), bits(to_host(expected[0])))
    assert np.array_equal(bits(to_host(lse)), bits(to_host(expected[1])))
    for x, y in zip(before[:3], raws[:3], strict=True):
        assert np.array_equal(x, y.get())
    bits(placed[3][0])[...] = -1  # NaN again: nothing else of the caller's buffer has changed
    assert (raws[3] == 0xFF).all()


class Guarded:
    """An allocator of memory full of NaNs (all bits set) between guard bands; `sizes` is what it was asked for."""

    def __init__(self, cupy: Any) -> None:
        self.cupy, self.blocks, self.sizes = cupy, [], []

    def __call__(self, nbytes: int) -> Any:
        whole = self.cupy.get_default_memory_pool().malloc(nbytes + 2 * GUARD)
        whole.memset_async(0xFF, nbytes + 2 * GUARD, self.cupy.cuda.get_current_stream())
        self.blocks.append(whole)
        self.sizes.append(nbytes)
        return whole + GUARD

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """CuPy allocates here; at the end the guard bands must be intact."""
        with self.cupy.cuda.using_allocator(self):
            yield
        self.cupy.cuda.Device().synchronize()
        for whole, nbytes in zip(self.blocks, self.sizes, strict=True):
            for offset in (0, GUARD + nbytes):
                assert (self.cupy.ndarray(GUARD, "u1", whole + offset) == 0xFF).all()


@pytest.mark.parametrize("head_dim", [64, 111])
@pytest.mark.parametrize(("algorithm", "dtype"), [pair for pair in IN_THEIR_DTYPES if pair[1] != FP8])
def test_guard_bands_and_poison(cupy: Any, algorithm: str, dtype: str, head_dim: int) -> None:
    """What a kernel must not read is NaN, what it must not write is guarded; the result is the same to the bit. (In 8 bit,
    which CuPy doesn't have, the check `memory` of `flashlab verify` does it.)"""
    skip_what_cannot_run(algorithm)
    pad = (0, 0, 3, -head_dim % 8)
    for shape in ({}, {"len_q": 130, "len_kv": 33}, {"len_q": 1, "len_kv": 65}, {"len_kv": 0}):
        p = problem(dtype, head_dim=head_dim, causal=True, **shape)
        inputs = fl.random_inputs(p, seed=7)
        expected = fl.attention(*map(to_cupy, inputs), algorithm=algorithm, causal=True, lse=True)
        placed = [laid(cupy, x, (0, 1, 2, 3), pad, 0, False) for x in (*inputs, np.full_like(inputs[0], np.nan))]
        before = [raw.get() for _, raw in placed]
        arrays = [x for x, _ in placed]
        with Guarded(cupy).used():
            out, lse = fl.attention(*arrays[:3], out=arrays[3], algorithm=algorithm, causal=True, lse=True)
        assert np.array_equal(bits(out.get()), bits(expected[0].get()))
        assert np.array_equal(bits(lse.get()), bits(expected[1].get()))
        assert all(np.array_equal(x, raw.get()) for x, (_, raw) in zip(before[:3], placed[:3], strict=True))
        if out.size:
            bits(out)[...] = -1
        assert (placed[3][1] == 0xFF).all()


@pytest.mark.parametrize("head_dim", [64, 111])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_allocations_are_the_peak_that_is_counted(cupy: Any, algorithm: str, head_dim: int) -> None:
    skip_what_cannot_run(algorithm)
    p = of(algorithm, head_dim=head_dim)
    counts = fl.count(algorithm, p, device=devices.current_device())
    q, k, v = map(to_cupy, fl.random_inputs(p))
    out = cupy.empty(q.shape, numpy_dtype(p.out_dtype))
    own = {"q", "k", "v", "out", *(x.name for x in counts.tensors.values() if x.role == "workspace" and not x.zeros)}
    shared = sum(
        x.nbytes for x in counts.tensors.values() if x.name not in own
    )  # scales of 1; the LSE, which nobody reads
    plans.gpu_plan(algorithm, p)  # makes what calls share
    memory = Guarded(cupy)
    with memory.used():
        fl.attention(q, k, v, out=out, algorithm=algorithm)
    brought = (
        0 if head_dim * p.itemsize % 16 else q.nbytes + k.nbytes + v.nbytes + out.nbytes
    )  # all four had to be padded
    assert sum(memory.sizes) == counts.hbm.peak - shared - brought


def test_out_shared_with_an_input_is_refused(cupy: Any) -> None:
    q, k, v = map(to_cupy, fl.random_inputs(problem()))
    with pytest.raises(fl.UsageError, match="memory shared with q"):
        fl.attention(q, k, v, out=q)
    both = cupy.zeros((2, 4, 97, 128), "f2")
    both[..., :64] = q
    out = fl.attention(both[..., :64], k, v, out=both[..., 64:])  # interleaved is apart
    assert (out == fl.attention(q, k, v)).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_beyond_32_bits(cupy: Any, axis: int) -> None:
    far = 2**31 + 4096
    p = problem(batch=3, heads=3, kv_heads=3, len_q=3, len_kv=3)
    inputs = fl.random_inputs(p, seed=8)
    strides = [[3 * 3 * 128, 3 * 128, 128, 2] for _ in range(4)]
    raw = cupy.full(2 * far + 4 * 9 * 3 * 128, 0xFF, "u1")
    views = []
    for i, x in enumerate((*inputs, np.full_like(inputs[0], np.nan))):
        strides[i][axis] = far
        view = cupy.ndarray(x.shape, x.dtype, raw.data + i * 27 * 128, strides=strides[i])
        view[...] = cupy.asarray(x)
        views.append(view)
    for algorithm in sorted({*ALGORITHMS} - EIGHT_BIT):
        if cannot_run(algorithm, of(algorithm)):
            continue
        views[3][...] = np.nan
        check(p, inputs, fl.attention(*views[:3], out=views[3], algorithm=algorithm))


def test_more_elements_than_32_bits_count(cupy: Any) -> None:
    del cupy
    torch = pytest.importorskip("torch")
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    q = torch.randn(1, 4200, 8192, 64, dtype=torch.float16, device="cuda")  # 2.2e9 elements
    k, v = q[:, :, 5 : 5 + 128], q[:, :, 200 : 200 + 128]
    out, lse = fl.attention(q, k, v, lse=True)
    for head, first in ((0, 0), (4199, 8192 - 64)):
        some = [to_host(x[:, head : head + 1]) for x in (q[:, :, first : first + 64], k, v)]
        p = fl.Problem(batch=1, heads=1, len_q=64, len_kv=128, head_dim=64, dtype="float16")
        rows = slice(first, first + 64)
        check(p, tuple(some), out[:, head : head + 1, rows], lse[:, head : head + 1, rows])
    del q, k, v, out, lse
    q = torch.randn(1, 40, 8192, 64, dtype=torch.float16, device="cuda")  # S: 2.7e9 elements
    out, lse = fl.attention(q, q, q, algorithm="standard", lse=True)
    host = to_host(q[:, 39:])
    p = fl.Problem(batch=1, heads=1, len_q=64, len_kv=8192, head_dim=64, dtype="float16")
    check(p, (host[:, :, -64:], host, host), out[:, 39:, -64:], lse[:, 39:, -64:])
    importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 111])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_current_stream_of_torch(algorithm: str, head_dim: int) -> None:
    skip_what_cannot_run(algorithm)
    torch = pytest.importorskip("torch")
    p = of(algorithm, head_dim=head_dim, causal=True)
    inputs = fl.random_inputs(p, seed=9)
    ready = list(map(to_torch, inputs))
    given = [torch.zeros_like(x) for x in ready]
    fl.attention(*given, algorithm=algorithm, causal=True)  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: what runs elsewhere reads zeros
        for x, y in zip(given, ready, strict=True):
            x.copy_(y)
        out = fl.attention(*given, algorithm=algorithm, causal=True)
        torch.cuda._sleep(20_000_000)
        copy = out.clone()
        torch.cuda.current_stream().synchronize()
    check(p, inputs, copy)


def test_the_current_stream_of_cupy(cupy: Any) -> None:
    p = problem(causal=True)
    inputs = fl.random_inputs(p, seed=9)
    ready = list(map(to_cupy, inputs))
    given = [cupy.zeros_like(x) for x in ready]
    fl.attention(*given, causal=True)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin() { long long t = clock64(); while (clock64() - t < 200000000); }', "spin"
    )
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin((1,), (1,), ())
        for x, y in zip(given, ready, strict=True):
            x[...] = y
        out = fl.attention(*given, causal=True)
        stream.synchronize()
    check(p, inputs, out)


def test_a_cuda_graph_of_torch(cupy: Any) -> None:
    """flash2 with `out=` allocates nothing but its LSE, from a warm pool: it can be captured and replayed."""
    del cupy
    torch = pytest.importorskip("torch")
    p = problem(causal=True)
    q, k, v = map(to_torch, fl.random_inputs(p, seed=9))
    out = torch.empty_like(q)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fl.attention(q, k, v, out=out, causal=True)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        fl.attention(q, k, v, out=out, causal=True)
    other = fl.random_inputs(p, seed=10)
    for x, y in zip((q, k, v), other, strict=True):
        x.copy_(to_torch(y))
    graph.replay()
    check(p, other, out)


@pytest.mark.parametrize("algorithm", sorted(HOPPER))
def test_a_thousand_runs_are_equal_to_the_bit(cupy: Any, algorithm: str) -> None:
    skip_what_cannot_run(algorithm)
    for head_dim in (64, 128, 256):
        dtype = fl.CATALOGUE[algorithm].dtypes[-1]
        p = problem(dtype, batch=2, heads=16, kv_heads=4, len_q=700, len_kv=700, head_dim=head_dim, causal=True)
        q, k, v = map(to_cupy, fl.random_inputs(p))
        first, out = (fl.attention(q, k, v, algorithm=algorithm, causal=True) for _ in range(2))
        off = cupy.zeros((), "i8")
        for _ in range(1000):
            fl.attention(q, k, v, algorithm=algorithm, causal=True, out=out)
            off += (out.view("u2") != first.view("u2")).sum()
        assert int(off) == 0


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_counts_are_those_of_the_device(algorithm: str) -> None:
    skip_what_cannot_run(algorithm)
    device = devices.current_device()
    p = of(algorithm, len_q=1000)
    assert plans.gpu_plan(algorithm, p).counts == fl.count(algorithm, p, device=device)
    named = fl.DEVICES.get(device.name)
    assert named is None or named is device
    attributes = importlib.import_module("cupy").cuda.Device().attributes
    assert device.sms == attributes["MultiProcessorCount"]
    assert device.sram_per_block == attributes["MaxSharedMemoryPerBlockOptin"]
    assert device.sram_per_sm == attributes["MaxSharedMemoryPerMultiprocessor"]
    assert abs(device.l2 - attributes["L2CacheSize"]) <= device.l2 // 50


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kernels_neither_spill_nor_hold_sram_of_their_own(algorithm: str) -> None:
    skip_what_cannot_run(algorithm)
    for dtype in fl.CATALOGUE[algorithm].dtypes:
        for launch in plans.gpu_plan(algorithm, problem(dtype, len_q=64)).launches:
            assert launch.kernel.local_size_bytes == 0
            assert launch.kernel.shared_size_bytes == 0


def test_header_edits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlab.run import nvrtc

    first = plans.gpu_plan("flash2", problem()).launches[0].kernel
    assert plans.gpu_plan("flash2", problem()).launches[0].kernel is first
    monkeypatch.setattr(nvrtc, "sources_digest", lambda: "0123456789abcdef")
    assert plans.gpu_plan("flash2", problem()).launches[0].kernel.options != first.options


@pytest.fixture(autouse=True)
def no_error_left(cupy: Any) -> Iterator[None]:
    yield
    cupy.cuda.Device().synchronize()


# -- 8 bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [1024, 4096, 16384, 65536])
def test_8_bit_products_add_up(keys: int, head_dim: int) -> None:
    """Where V is 1, out is 1; where it is 1 for half of the keys, out is their share of the weights: within 1 %. The tensor cores'
    own sums would lose half of all, and less of a half."""
    skip_what_cannot_run("flash3_fp8")
    p = problem(FP8, batch=1, heads=1, kv_heads=1, len_q=200, len_kv=keys, head_dim=head_dim)
    q, k, v = fl.random_inputs(p.replace(dtype="float32"), seed=12)
    for first, last in ((0, keys), (0, keys // 2), (keys // 2, keys)):
        v[:] = 0
        v[:, :, first:last] = 1
        x = fp8.quantize(q, k, v)
        share = fl.naive(*(y.astype(np.float32) for y in x.values())).out
        assert np.abs(fp8.attention(x).astype(np.float64) / share - 1).max() < 0.01, (first, last)


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_scales_of_8_bit_operands(kind: str) -> None:
    """Those of the caller, whatever framework they are from; of another shape they are refused."""
    skip_what_cannot_run("flash3_fp8")
    p = problem(FP8, batch=2, heads=4, kv_heads=2, len_q=300, len_kv=270, head_dim=128, causal=True)
    q, k, v = fl.random_inputs(p.replace(dtype="float32"), seed=11)
    x = fp8.quantize(q, k * 3, v / 7)
    to = KINDS[kind]
    scales = fl.Scales(*map(to, x.scales))
    out, lse = fl.attention(*map(to, (x.q, x.k, x.v)), algorithm="flash3_fp8", scales=scales, causal=True, lse=True)
    check(p, tuple(y.astype(np.float32) for y in x.values()), out, lse)
    plain = fl.attention(*map(to, (x.q, x.k, x.v)), algorithm="flash3_fp8", causal=True)
    check(p, (x.q, x.k, x.v), plain)
    with pytest.raises(fl.UsageError, match=r"^scales\.k\.shape"):
        fl.attention(*map(to, (x.q, x.k, x.v)), algorithm="flash3_fp8", scales=scales._replace(k=scales.q))
