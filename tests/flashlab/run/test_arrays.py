"""What `fl.attention` does around its kernels, tested on a CuPy whose GPU memory is the CPU's (fake.py)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator
from flashlab.run import abi, arrays, call, devices, emulated, facade
from flashlab.run import plan as plans
from simulator import Problem, SramOverflow, Unavailable, UsageError
from simulator.operations.attention import problem_of
from tests.flashlab.run.fake import DTYPES, FakeCupy, Tensor, at, installed, ndarray

# TMA's descriptors are made by a real driver
ALGORITHMS = [name for name, row in simulator.catalogue.of().items() if not row.arch]


def inputs(dtype: str = "float16", **shape: Any) -> tuple[np.ndarray[Any, Any], ...]:
    return simulator.random_inputs(
        Problem(
            **{"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 5, "len_kv": 7, "head_dim": 64, "dtype": dtype} | shape
        )
    )


def close(out: ndarray, expected: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(out.host, expected.astype(out.dtype))


def in_buffer(x: np.ndarray[Any, Any], pad: tuple[int, int, int, int], shift: int = 0) -> np.ndarray[Any, Any]:
    """The same values in a buffer of NaNs, larger by `pad` along the axes, `shift` elements off a boundary."""
    sizes = [n + p for n, p in zip(x.shape, pad, strict=True)]
    raw = np.full(int(np.prod(sizes)) * x.itemsize + 512, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256 + shift * x.itemsize
    view = (
        raw[start : start + int(np.prod(sizes)) * x.itemsize].view(x.dtype).reshape(sizes)[tuple(map(slice, x.shape))]
    )
    view[...] = x
    return view


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 40, 64, 111])
@pytest.mark.parametrize("given", [False, True])
def test_any_layout_gives_the_same(cupy: FakeCupy, dtype: str, head_dim: int, given: bool) -> None:
    q, k, v = inputs(dtype, head_dim=head_dim)
    expected = simulator.naive(q, k, v, causal=True, scale=0.125)
    layouts = [
        lambda x: in_buffer(x, (0, 0, 0, 0)),
        lambda x: in_buffer(x, (0, 0, 0, -head_dim % 8)),
        lambda x: in_buffer(x, (1, 2, 3, 1)),
        lambda x: in_buffer(x, (0, 0, 0, 8), shift=1),
        lambda x: in_buffer(x.swapaxes(1, 2), (0, 0, 0, -head_dim % 8)).swapaxes(1, 2),
        lambda x: in_buffer(x.swapaxes(2, 3), (0, 0, 0, 3)).swapaxes(2, 3),
        lambda x: in_buffer(x[:, :, ::-1], (0, 0, 0, -head_dim % 8))[:, :, ::-1],
    ]
    for layout in layouts:
        before = q.tobytes(), k.tobytes(), v.tobytes()
        laid = [layout(x) for x in (q, k, v)]
        target = layout(np.full_like(q, np.nan)) if given else None
        around = None if target is None else memory_around(target)
        into = None if target is None else cupy.asarray(target)
        out, lse = call.attention(*map(cupy.asarray, laid), causal=True, scale=0.125, lse=True, out=into)
        assert close(out, expected.out)
        assert np.array_equal(lse.host, expected.lse.astype("f4"))
        assert before == tuple(x.tobytes() for x in laid)
        if target is not None:
            assert np.array_equal(target, expected.out.astype(q.dtype))
            assert around == memory_around(target)
        else:
            assert out.strides == np.empty(q.shape, q.dtype).strides


def test_numbers_of_heads_go_to_the_kernel_by_pointer(cupy: FakeCupy) -> None:
    q, k, v = inputs("float16")
    heads = q.shape[1]
    of_head = {"sinks": np.linspace(-1, 2, heads, dtype="f4"), "alibi_slopes": np.linspace(0, 1, heads, dtype="f4")}
    for names in (["sinks"], ["alibi_slopes"], ["sinks", "alibi_slopes"]):
        some = {name: of_head[name] for name in names}
        expected = simulator.naive(q, k, v, causal=True, soft_cap=3, **some)
        on_gpu = {name: cupy.asarray(x) for name, x in {"q": q, "k": k, "v": v, **some}.items()}
        out, lse = call.attention(**on_gpu, causal=True, soft_cap=3, lse=True)
        assert close(out, expected.out) and np.array_equal(lse.host, expected.lse.astype("f4"))
    plain = [cupy.asarray(x) for x in (q, k, v)]
    for sinks, what in (
        (np.zeros(heads + 1, "f4"), f"sinks.shape = ({heads + 1},): expected ({heads},), its axes are heads"),
        (np.zeros(heads), "sinks.dtype = float64: expected float32"),
        (np.zeros(2 * heads, "f4")[::2], "sinks.strides = (8,): expected a contiguous array"),
    ):
        with pytest.raises(UsageError, match=re.escape(what)):
            call.attention(*plain, sinks=cupy.asarray(sinks))
    with pytest.raises(UsageError, match="sinks = .*: expected nothing: flash1 knows causal, window, scale"):
        call.attention(*plain, sinks=cupy.asarray(of_head["sinks"]), algorithm="flash1")


def test_seed_and_offset_go_to_the_kernel_by_pointer(cupy: FakeCupy) -> None:
    q, k, v = inputs("float16")
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    for seed, offset in ((7, 0), (-1, 2**62), (7, 0)):
        state = np.array([seed, offset])
        expected = simulator.naive(q, k, v, dropout=0.5, rng_state=state)
        found = call.attention(*on_gpu, dropout=0.5, seed=seed, offset=offset)
        assert close(found, expected.out)
        assert close(call.attention(*on_gpu, dropout=0.5, rng_state=cupy.asarray(state)), expected.out)
        p = Problem(batch=2, heads=4, kv_heads=2, len_q=5, len_kv=7, head_dim=64, dtype="float16", dropout=0.5)
        ran = plans.plan("flash2", p).run(q=on_gpu[0], k=on_gpu[1], v=on_gpu[2], rng_state=state)
        assert close(ran["out"], expected.out)
    assert close(call.attention(*on_gpu, dropout=0.0), simulator.naive(q, k, v).out)
    state = np.zeros(4, np.int64)
    for wrong, what in (
        (state, "rng_state.shape = (4,): expected (2,), its axes are rng_words"),
        (state[:2].astype("i4"), "rng_state.dtype = 'int32': expected int64"),
        (state[::2], "rng_state.strides = (16,): expected a contiguous array"),
    ):
        with pytest.raises(UsageError, match=re.escape(what)):
            call.attention(*on_gpu, dropout=0.5, rng_state=cupy.asarray(wrong))


def test_lengths_go_to_the_kernel_as_offsets(cupy: FakeCupy) -> None:
    """However they are said; and a call with the same ones finds its plan again."""
    lengths = [(7, 9), 0, (0, 4), (12, 3)]
    p = simulator.Problem(batch=1, heads=4, kv_heads=2, lengths=lengths, head_dim=24, dtype="float16", causal=True)
    arrays = simulator.random_inputs(p)
    expected = simulator.naive(*arrays, causal=True, lengths=lengths)
    on_gpu = [cupy.asarray(x) for x in arrays]
    made = list[Any]()
    for said in (lengths, tuple(lengths), np.array([(7, 9), (0, 0), (0, 4), (12, 3)]), lengths):
        out, lse = call.attention(*on_gpu, causal=True, lengths=said, lse=True)
        assert close(out, expected.out) and np.allclose(lse.host, expected.lse, atol=1e-5)
        made.append(facade._plan.cache_info().misses)
    assert len(set(made)) == 1
    for wrong, what in (
        ([7, 9], "lengths = 16 queries in all: expected 19, the len_q"),
        ([19], "lengths = 19 keys in all: expected 16, the len_kv"),
        ([(7, 9), (12, -7)], "lengths[1] = -7: expected an integer of at least 0, or a pair of them, (queries, keys)"),
        ([], "lengths = []: expected a list with the length of each sequence: n, or (queries, keys)"),
        ("7,12", "lengths = '7,12': expected a list with the length of each sequence: n, or (queries, keys)"),
    ):
        with pytest.raises(UsageError, match=re.escape(what)):
            call.attention(*on_gpu, lengths=wrong)
    with pytest.raises(UsageError, match="lengths = .*: expected nothing: flash1 knows causal, window, scale"):
        call.attention(*on_gpu, lengths=lengths, algorithm="flash1")
    two = [cupy.asarray(np.repeat(x, 2, axis=0)) for x in arrays]
    with pytest.raises(UsageError, match="batch = 2: expected 1 with lengths"):
        call.attention(*two, lengths=lengths)


def memory_around(x: np.ndarray[Any, Any]) -> bytes:
    """All of a buffer but the array in it."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    mine = np.zeros(base.nbytes, bool)
    offset = x.__array_interface__["data"][0] - base.ctypes.data
    places = np.lib.stride_tricks.as_strided(mine[offset:], (*x.shape, x.itemsize), (*x.strides, 1))
    places[...] = True
    return base.view(np.uint8)[~mine].tobytes()


def test_views_that_a_kernel_can_take_are_not_copied(cupy: FakeCupy) -> None:
    q, k, v = (in_buffer(x.swapaxes(1, 2), (0, 0, 3, 8)).swapaxes(1, 2) for x in inputs())
    k = np.broadcast_to(k[:, :1], k.shape)
    out = in_buffer(np.zeros_like(q), (0, 0, 1, 0))
    plans.gpu_plan("flash2", problem_of(q, k, v))  # allocates what all calls share
    cupy.log.clear()
    call.attention(*map(cupy.asarray, (q, k, v)), out=cupy.asarray(out))
    assert cupy.log == []
    assert np.array_equal(out, simulator.naive(q, k, v).out.astype(q.dtype))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("head_dim", [64, 100])
def test_the_allocations_are_the_peak_that_is_counted(cupy: FakeCupy, algorithm: str, head_dim: int) -> None:
    q, k, v = inputs(head_dim=head_dim, len_q=simulator.CATALOGUE[algorithm].support.queries or 5)
    problem = problem_of(q, k, v)
    counts = simulator.count(algorithm, problem, device="h200")
    plans.gpu_plan(algorithm, problem)
    cupy.log.clear()
    call.attention(
        *(cupy.asarray(in_buffer(x, (0, 0, 0, 0))) for x in (q, k, v)),
        algorithm=algorithm,
        out=cupy.asarray(in_buffer(np.zeros_like(q), (0, 0, 0, 0))),
    )
    brought = sum(spec.nbytes for spec in counts.tensors.values() if spec.role == "input" or spec.name == "out")
    unread = sum(spec.nbytes for spec in counts.tensors.values() if spec.role == "output" and spec.name != "out")
    assert sum(cupy.log) == counts.hbm.peak - unread - (0 if head_dim % 8 else brought)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_launches_are_those_that_are_counted(cupy: FakeCupy, algorithm: str) -> None:
    q, k, v = inputs(len_q=simulator.CATALOGUE[algorithm].support.queries or 200, len_kv=70)
    call.attention(*map(cupy.asarray, (q, k, v)), algorithm=algorithm)
    problem = problem_of(q, k, v)
    counts = simulator.count(algorithm, problem, device=devices.current_device())
    assert devices.current_device() is simulator.DEVICES["h200"]
    assert cupy.launches == [(x.name, (x.blocks,), (32 * x.warps,), x.sram_peak) for x in counts.launches]


class Shared:
    """An array of nobody in particular, who speaks DLPack; immutable."""

    place = (2, 0)

    def __init__(self, x: ndarray) -> None:
        self.x, self.waited = x, 0

    def block_until_ready(self) -> None:
        self.waited += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self) -> None:
        raise NotImplementedError

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=Shared)


@pytest.mark.parametrize("head_dim", [64, 111])
def test_arrays_through_dlpack(cupy: FakeCupy, head_dim: int) -> None:
    q, k, v = (Shared(cupy.asarray(x)) for x in inputs(head_dim=head_dim))
    out, lse = call.attention(q, k, v, scale=0.25, lse=True)
    expected = simulator.naive(*(x.x.host for x in (q, k, v)), scale=0.25)
    assert type(out) is type(lse) is Shared
    assert close(out.x, expected.out)
    assert [x.waited for x in (q, k, v)] == [1, 1, 1]
    assert cupy.synchronized == 2
    with pytest.raises(UsageError, match="out = 'an immutable array'"):
        call.attention(q, k, v, out=out)
    k.place = (1, 0)
    with pytest.raises(UsageError, match="k = .* array on the CPU: expected a CuPy, torch or JAX array in GPU memory"):
        call.attention(q, k, v)


def test_a_warm_call_enters_no_stream(torch: Any, cupy: FakeCupy) -> None:
    q, k, v = (Tensor(cupy.asarray(x)) for x in inputs())
    call.attention(q, k, v)
    cupy.Stream.entered.clear()
    for handle in (0, 1234, 0):
        torch._C._cuda_getCurrentRawStream = lambda _, handle=handle: handle
        call.attention(q, k, v)
    assert [stream for _, stream in cupy.queued] == [1234, 0, 1234, 0]
    assert cupy.Stream.entered == []


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_torch_tensors(torch: Any, cupy: FakeCupy, dtype: str) -> None:
    q, k, v = (Tensor(cupy.asarray(x)) for x in inputs(dtype, head_dim=40))
    cupy.Stream.entered.clear()
    out, lse = call.attention(q, k, v, scale=0.25, lse=True)
    assert cupy.Stream.entered == [1234]
    expected = simulator.naive(*(x.x.host for x in (q, k, v)), scale=0.25)
    assert type(out) is type(lse) is Tensor
    assert close(out.x, expected.out)
    assert np.array_equal(lse.x.host, expected.lse.astype("f4"))
    into = Tensor(cupy.empty(q.shape, q.x.dtype))
    into.requires_grad = True
    with pytest.raises(UsageError, match="out = torch tensor that requires grad: expected one that doesn't"):
        call.attention(q, k, v, out=into)
    torch.is_grad_enabled = lambda: False
    assert close(call.attention(q, k, v, scale=0.25, out=into).x, expected.out)
    k.is_cuda, k.device = False, "cpu"
    del torch._C._cuda_getCurrentRawStream  # what a torch that was built without CUDA lacks
    arrays._framework_named.cache_clear()
    arrays._framework_of.cache_clear()
    with pytest.raises(UsageError, match="k = torch tensor on cpu: expected a CuPy, torch or JAX array in GPU memory"):
        call.attention(q, k, v)
    with pytest.raises(UsageError, match=r"k = 'ndarray': expected an array of the same kind as q \(Tensor\)"):
        call.attention(q, k.x, v)


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 7), (5, 0), (0, 0)])
def test_empty_lengths(cupy: FakeCupy, len_q: int, len_kv: int) -> None:
    q, k, v = inputs(len_q=len_q, len_kv=len_kv, head_dim=40)
    out, lse = call.attention(*map(cupy.asarray, (q, k, v)), lse=True)
    assert out.shape == q.shape
    if len_q:
        assert not out.host.any()
        assert np.isneginf(lse.host).all()
    else:
        assert not cupy.launches


@pytest.mark.parametrize(("len_q", "len_kv"), [(0, 7), (5, 0), (0, 0)])
def test_empty_lengths_of_torch_tensors(torch: Any, cupy: FakeCupy, len_q: int, len_kv: int) -> None:
    q, k, v = (Tensor(cupy.asarray(x)) for x in inputs(len_q=len_q, len_kv=len_kv, head_dim=40))
    out, lse = call.attention(q, k, v, lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert not out.x.host.any()


def test_a_second_call_reuses_the_plan(cupy: FakeCupy) -> None:
    q, k, v = map(cupy.asarray, inputs())
    for _ in range(2):
        call.attention(q, k, v, window=(2, 0), scale=0.1)
    assert facade._plan.cache_info().misses == 1
    call.attention(q, k, v, window=[2, 0], scale=0.1, tile=[64, 64])  # unhashable: no cache, the same result
    for out in (None, cupy.empty(q.shape, "f2")):
        call.attention(q, k, v, causal=True, out=out)
        with pytest.raises(UsageError, match="causal = 1"):
            call.attention(q, k, v, causal=1, out=out)  # pyright: ignore[reportArgumentType]


def test_a_plan_that_needs_less_sram_leaves_the_others_theirs(cupy: FakeCupy) -> None:
    many, none = ([cupy.asarray(x) for x in inputs(len_kv=n, head_dim=256)] for n in (70, 0))
    for q, k, v in (many, none, many):  # one kernel; without keys its blocks hold Q only
        call.attention(q, k, v, tile=(128, 128))
    assert [sram for *_, sram in cupy.launches] == [3 << 16, 1 << 16, 3 << 16]


# 4-byte units from a pool's beginning to q, k, v and out: on 16-byte boundaries and off them, over each other and apart;
# the dtypes of the inputs and of out; causal and scale, equal ones too that are not the same to the checks
CALLS = st.tuples(
    st.tuples(*map(st.sampled_from, ([0, 1], [256, 320], [512], [0, 319, 768, 769, 1024]))),
    st.sampled_from([("f4", "f4"), ("f4", "f4"), ("f2", "f2"), ("f2", "f4")]),
    st.sampled_from([True, True, True, 1]),
    st.sampled_from([0.5, 1, True]),
)
Call = tuple[tuple[int, ...], tuple[str, str], bool, float]


def outcome(cupy: FakeCupy, pool: np.ndarray[Any, Any], one: Call) -> bytes | str:
    """What a call comes to: the bytes of the whole pool afterwards, or the error's line."""
    places, (dtype, dtype_out), causal, scale = one
    pool[...] = np.random.default_rng(0).integers(0, 60, pool.size)  # finite in either dtype
    *inputs, out = (
        cupy.asarray(pool[4 * place :].view(kind)[:256].reshape(1, 2, 8, 16))
        for place, kind in zip(places, [dtype] * 3 + [dtype_out], strict=True)
    )
    try:
        call.attention(*inputs, out=out, causal=causal, scale=scale)
    except UsageError as error:
        return str(error)
    return pool.tobytes()


@settings(deadline=None)
@given(st.lists(CALLS, min_size=2, max_size=6))
def test_what_earlier_calls_left_ready_changes_nothing(calls: list[Call]) -> None:
    """Each call of a sequence does what it does as the first one; twice, so that it finds itself warm."""
    pool = np.zeros(1 << 14, np.uint8)
    with installed(FakeCupy()) as warm:
        found = [outcome(warm, pool, one) for one in calls * 2]
    for i, one in enumerate(calls):
        with installed(FakeCupy()) as cold:
            assert found[i] == found[i + len(calls)] == outcome(cold, pool, one)


def test_workspaces_are_passed_where_they_lie_now(cupy: FakeCupy) -> None:
    """flash1's O, l and m from the pool: at other addresses in each call here, for the ones before are held."""
    arrays_ = [cupy.asarray(x) for x in inputs()]
    out, held = cupy.empty(arrays_[0].shape, "f2"), list[Any]()
    passed = list[set[int]]()  # the first word of each argument
    taken = cupy.alloc

    def launch(*given: Any) -> None:
        passed.append({int(at(int(p), (1,), (8,), np.uintp)[0]) for p in at(given[9], (8,), (8,), np.uintp)})

    cupy.alloc = lambda nbytes: held.append(taken(nbytes)) or held[-1]  # type: ignore[method-assign]
    cupy.launchKernel = launch  # type: ignore[method-assign]
    for _ in range(3):
        call.attention(*arrays_, algorithm="flash1", out=out)
    assert len(passed) == 3
    for pointers, memory in zip(passed, held[-3:], strict=True):  # before these, what the plan allocates
        assert memory.ptr in pointers


def test_runs_where_the_arrays_lie(cupy: FakeCupy) -> None:
    cupy.here = 1
    q, k, v = map(cupy.asarray, inputs())
    cupy.here = 0
    assert call.attention(q, k, v).data.device_id == 1
    assert cupy.here == 0
    with pytest.raises(UsageError, match="v.device = 0: expected GPU 1, where q lies"):
        call.attention(q, k, cupy.asarray(inputs()[2]))


BAD = [
    ({"algorithm": "flash3x"}, "algorithm = 'flash3x': expected one of"),
    ({"backend": "gppu"}, "did you mean gpu"),
    ({"device": "h100"}, "device = 'h100': expected None"),
    ({"tile": "1024x512"}, "bytes of SRAM per block"),
    ({"tile": (24, 32)}, "tile = '24x32': expected multiples of 16"),
    ({"window": (-1, 0)}, "window = "),
    ({"window": 3}, "window = 3"),
    ({"scale": float("nan")}, "scale = nan"),
    ({"q": np.zeros((2, 4, 5, 64), "f2")}, "q = NumPy array: expected a CuPy, torch or JAX array in GPU memory"),
    ({"k": [1.0]}, "k = Python list"),
    ({"v": "float64"}, "v.dtype = float64: expected float32 or float16 or bfloat16"),
    ({"v": "float32"}, "v.dtype = 'float32': expected float16"),
    ({"k": (2, 4, 7)}, "k.shape"),
    ({"k": (1, 2, 7, 64)}, "k.shape"),
    ({"v": (2, 2, 6, 64)}, "v.shape"),
    ({"v": (2, 2, 7, 32)}, "head_dim of v = 32: expected 64"),
    ({"k": (2, 3, 7, 64), "v": (2, 3, 7, 64)}, "kv_heads = 3: expected a divisor of heads = 4"),
    ({"q": (2, 4, 5, 264), "k": (2, 2, 7, 264), "v": (2, 2, 7, 264)}, "head_dim = 264: expected at most 256"),
    ({"q": (2, 0, 5, 64)}, "heads = 0"),
    ({"out": (2, 4, 5, 32)}, "out.shape = "),
    ({"out": "float32"}, "out.dtype = 'float32': expected float16"),
    ({"out": np.zeros((2, 4, 5, 64), "f2")}, "out = NumPy array"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_bad_input_gets_one_line(cupy: FakeCupy, change: dict[str, Any], line: str) -> None:
    shapes = {"q": (2, 4, 5, 64), "k": (2, 2, 7, 64), "v": (2, 2, 7, 64)}

    def made(name: str, x: Any) -> Any:
        if name in ("q", "k", "v", "out") and isinstance(x, tuple | str):
            shape, dtype = (x, "float16") if isinstance(x, tuple) else (shapes.get(name, shapes["q"]), x)
            return cupy.asarray(np.zeros(shape, dtype))
        return x

    with pytest.raises((UsageError, Unavailable)) as caught:
        call.attention(**{name: made(name, x) for name, x in (shapes | change).items()})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cupy.launches


def test_out_must_be_apart_from_the_inputs_and_itself(cupy: FakeCupy) -> None:
    both = np.zeros((2, 4, 5, 2, 64), "f2")
    q, out = both[..., 0, :], both[..., 1, :]
    k, v = np.zeros((2, 2, 2, 7, 64), "f2")
    call.attention(*map(cupy.asarray, (q, k, v)), out=cupy.asarray(out))  # interleaved is apart
    with pytest.raises(UsageError, match="out = 'memory shared with q'"):
        call.attention(*map(cupy.asarray, (q, k, v)), out=cupy.asarray(q))
    with pytest.raises(UsageError, match="don't overlap each other"):
        call.attention(*map(cupy.asarray, (q, k, v)), out=cupy.asarray(np.broadcast_to(out[:, :1].copy(), out.shape)))


WRONG_OUT = [
    np.zeros((2, 4, 5, 32), "f2"),
    np.zeros((2, 4, 5, 64), "f4"),
    np.broadcast_to(np.zeros((2, 1, 5, 64), "f2"), (2, 4, 5, 64)),
    None,  # k's own memory
]


@pytest.mark.parametrize("out", WRONG_OUT, ids=["shape", "dtype", "itself", "inputs"])
def test_both_backends_refuse_an_out_by_one_rule(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, out: Any) -> None:
    monkeypatch.setattr(emulated, "emulate_problem", lambda *_, **__: pytest.fail("ran"))
    given = [*inputs(kv_heads=4, len_kv=5)]
    if out is None:
        out = given[1]
    elif not out.flags.writeable:
        out = np.lib.stride_tricks.as_strided(out.base, out.shape, out.strides)
    lines: list[str] = []
    for made, backend in ((cupy.asarray, "gpu"), (lambda x: x, "emulator")):
        with pytest.raises(UsageError) as refused:
            call.attention(*map(made, given), out=made(out), backend=backend)
        lines.append(str(refused.value))
    assert lines[0] == lines[1] and lines[0].startswith("out")
    assert not cupy.launches


@pytest.mark.parametrize("kind", ["numpy", "torch", "whoever speaks DLPack"])
def test_a_plan_tells_arrays_on_a_cpu_of_the_emulator(torch: Any, cupy: FakeCupy, kind: str) -> None:
    q, k, v = map(cupy.asarray, inputs(kv_heads=4, len_kv=5))
    x: Any = q.host if kind == "numpy" else Tensor(q) if kind == "torch" else Shared(q)
    if kind == "torch":
        x.is_cuda, x.device = False, "cpu"
    elif kind != "numpy":
        x.place = (1, 0)
    problem = problem_of(q, k, v)
    with pytest.raises(UsageError, match='^q = .*GPU memory.*backend="emulator"'):
        plans.gpu_plan("flash2", problem).run(q=x, k=x, v=x)


def test_sizes_past_the_grid_are_refused(cupy: FakeCupy) -> None:
    problem = Problem(batch=2**16, heads=2**12, len_q=2**10, head_dim=64, dtype="float16")
    with pytest.raises(UsageError, match="a grid of at most 2,147,483,647"):
        plans.gpu_plan("flash2", problem, tile=(16, 16))
    with pytest.raises(UsageError, match="len_kv = "):
        plans.gpu_plan("flash2", problem.replace(len_kv=2**30 + 1))
    with pytest.raises(SramOverflow):
        plans.gpu_plan("flash2", problem, tile=(1024, 512))


def test_what_each_gpu_cannot() -> None:
    with installed(FakeCupy((7, 5), "NVIDIA Quadro RTX 6000")) as cupy:
        mine = devices.current_device()
        assert (mine.name, mine.compute_capability, mine.sms) == ("Quadro RTX 6000", (7, 5), 132)
        call.attention(*map(cupy.asarray, inputs("float32")))
        with pytest.raises(UsageError, match="dtype = 'bfloat16': expected float32 or float16"):
            call.attention(*map(cupy.asarray, inputs("bfloat16")))
    with installed(FakeCupy((7, 0), "Tesla V100")) as cupy, pytest.raises(Unavailable, match="compute capability 7.0"):
        call.attention(*map(cupy.asarray, inputs()))


def test_without_cupy_or_gpu_it_says_how_to_get_it() -> None:
    array = type("Array", (), {"__module__": "jaxlib", "__dlpack__": None})()
    with installed(None), pytest.raises(Unavailable, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        call.attention(array, array, array)
    module = FakeCupy()
    module.getDeviceCount = lambda: 0  # type: ignore[method-assign]
    with installed(module), pytest.raises(Unavailable, match="finds no GPU"):
        devices.current_device()


def test_the_architecture_can_be_chosen(cupy: FakeCupy) -> None:
    del cupy
    assert devices._device_of_arch("compute_75") is simulator.DEVICES["t4"]
    with pytest.raises(UsageError, match="FLASHLAB_ARCH = 'sm_75': expected one of compute_75"):
        devices._device_of_arch("sm_75")


def test_operands_of_any_dtype_have_a_view(torch: Any, cupy: FakeCupy) -> None:
    """Indices and lengths too, not only what q, k and v are stored in; what attention refuses, it refuses by name."""
    torch.int32 = "torch.int32"
    table = cupy.asarray(np.zeros((2, 3), np.int32))
    for x in (table, Tensor(table)):
        kind = arrays.framework("block_table", x)
        view = kind.view("block_table", x)
        assert view.dtype == "int32" and arrays.is_aligned(view._replace(strides=(16, 4)))
    with pytest.raises(UsageError, match=r"q\.dtype = 'int32': expected one of float32"):
        call.attention(*[cupy.asarray(np.zeros((2, 4, 5, 64), "i4"))] * 3)


def test_structs_lie_as_in_c() -> None:
    assert abi.TENSOR.itemsize == 32
    assert [abi.TENSOR.fields[name][1] for name in abi.TENSOR.names] == [0, 8, 16, 24]  # type: ignore[index, union-attr]
    assert abi.SHAPE.itemsize == 68
