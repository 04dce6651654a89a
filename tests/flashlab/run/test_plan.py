"""Plans on the fake GPU: made, they are warm; what a call allocates, where it launches, and from how many threads."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
import simulator
from flashlab.run import arrays, call, choose, devices, launch, nvrtc, tma
from flashlab.run.kernels import kernel_of
from flashlab.run.plan import Plan
from simulator.operations.attention import ATTENTION
from simulator.problem import WIDTH
from tests.flashlab.run.fake import FakeCupy, Tensor, at, ndarray

ALGORITHMS = fl.catalogue.with_kernels(ATTENTION)
P = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=50, len_kv=70, head_dim=64, dtype="float16", causal=True)
OUT = 2 * 4 * 50 * 64 * 2
LSE = 2 * 4 * 50 * 4


def problem(algorithm: str, **fields: Any) -> fl.Problem:
    row = fl.CATALOGUE[algorithm]
    return row.fitted(P.replace(**{"dtype": row.dtypes[-1]} | fields))


def plan_of(algorithm: str, **options: Any) -> Plan:
    made = fl.plan(algorithm, problem(algorithm), **options)
    assert isinstance(made, Plan)
    return made


@pytest.fixture(autouse=True)
def compiled(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled, by CuPy or for one architecture; and descriptors without a driver."""

    def compile_kernel(source: str, options: Any, *, arch: str) -> nvrtc.Compiled:
        return nvrtc.Compiled(image=arch.encode(), log="")

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    monkeypatch.setattr(tma, "descriptor", lambda *_: np.zeros((), tma.DESCRIPTOR)[()])
    return cupy.compiled


@pytest.fixture(params=["cupy", "torch"])
def given(request: pytest.FixtureRequest, cupy: FakeCupy, torch: Any) -> Callable[[fl.Problem], dict[str, Any]]:
    """q, k and v of a problem, of either framework, as they come from an allocator: dense."""

    def brought(x: np.ndarray[Any, Any]) -> Any:
        of_cupy = request.param == "cupy"
        held = x.view(np.uint8) if of_cupy and x.dtype.name == "float8_e4m3fn" else x  # which CuPy hasn't
        made = cupy.empty(held.shape, held.dtype)
        made.host[...] = held
        return made if of_cupy else Tensor(made)

    return lambda p: dict(zip("qkv", map(brought, fl.random_inputs(p)), strict=True))


@pytest.mark.parametrize("head_dim", [64, 36], ids=["as they lie", "padded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", ["run", "attention"])
def test_a_plan_is_the_warm_up(
    cupy: FakeCupy, given: Any, compiled: list[str], algorithm: str, head_dim: int, way: str
) -> None:
    """The first call compiles nothing, copies nothing from the CPU and waits for nothing: a captured stream would refuse it."""
    p = problem(algorithm, head_dim=head_dim)
    plan: Any = fl.plan(algorithm, p)
    entries = [kernel.entry for kernel in fl.CATALOGUE[algorithm].launched(p)]
    assert (compiled, ndarray.copiers != set()) == (entries, head_dim % 8 != 0)
    before = len(compiled), set(ndarray.copiers), cupy.synchronized
    arrays_ = given(p)
    cupy.capturing = True
    plan.run(arrays_) if way == "run" else call.attention(**arrays_, algorithm=algorithm, causal=True)
    assert (len(compiled), ndarray.copiers, cupy.synchronized) == before
    assert [entry for entry, *_ in cupy.launches] == entries


@pytest.mark.parametrize("head_dim", [64, 36], ids=["as they lie", "padded"])
def test_outputs_that_are_given_are_written_in_place(cupy: FakeCupy, given: Any, head_dim: int) -> None:
    p = problem("flash2", head_dim=head_dim)
    plan, arrays_ = fl.plan("flash2", p, lse=True), given(p)
    expected = plan.run(arrays_)
    if not arrays.framework("q", arrays_["q"]).writable:
        with pytest.raises(fl.UsageError, match="out = 'an immutable array': expected None"):
            plan.run(arrays_, out=expected["out"])
        return
    target = plan.run(given(p))["out"]  # of other inputs: it isn't what is expected
    getattr(target, "x", target).host[...] = 0
    cupy.log.clear()
    found = plan.run(arrays_, out=target)
    assert found["out"] is target and list(found) == ["out", "lse"]
    assert head_dim == 36 or sum(cupy.log) == LSE + plan.workspace
    for name in found:
        same = [getattr(x[name], "x", x[name]).host.tobytes() for x in (found, expected)]
        assert same[0] == same[1]
    for wrong, line in (
        ({"out": arrays_["q"]}, "out = 'memory shared with q': expected an array apart from the inputs"),
        ({"out": expected["lse"]}, r"out.shape = .*: expected "),
        ({"outs": target}, "operand = 'outs': expected one of q, k, v"),
    ):
        with pytest.raises(fl.UsageError, match=line):
            plan.run(arrays_, **wrong)
    with pytest.raises(fl.UsageError, match="operand = 'lse': expected one of"):
        fl.plan("flash2", p).run(arrays_, lse=expected["lse"])


@pytest.mark.parametrize("backend", ["gpu", "simulator", "emulator"])
def test_a_plan_is_pickled_by_what_it_was_made_of(backend: Any) -> None:
    device: Any = {} if backend == "gpu" else {"device": "a100"}
    plan: Any = fl.plan("flash2", P, backend=backend, tile=(64, 64), lse=True, **device)
    again = pickle.loads(pickle.dumps(plan))
    assert type(again) is type(plan) and again is not plan
    assert (again.counts, again.device, again.workspace) == (plan.counts, plan.device, plan.workspace)
    if backend != "gpu":
        found, expected = (each.run(dict(zip("qkv", fl.random_inputs(P), strict=True))) for each in (again, plan))
        assert found.keys() == expected.keys() == {"out", "lse"}
        assert all(found[name].tobytes() == expected[name].tobytes() for name in found)


@fl.program
def own(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
    out = m.output("out")
    for block in m.launch("own", rows=problem.row_tiles(tile), warps=4):
        block.step("store")
        block.store(out, block.full(tile.rows, v.cols, 0.0), block.i, tile.rows)
    return out


def test_programs_and_rows_of_the_catalogue_are_pickled_by_name() -> None:
    for name, row in fl.CATALOGUE.items():
        assert pickle.loads(pickle.dumps(row)) is row and copy.deepcopy(row) is row, name
        assert pickle.loads(pickle.dumps(row.program)) is row.program
    mine = fl.catalogue.get(own)
    assert pickle.loads(pickle.dumps(own)) is own and pickle.loads(pickle.dumps(mine)) == mine
    assert pickle.loads(pickle.dumps(fl.plan(own, P, backend="simulator"))).row == mine
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda") as refused:
        pickle.dumps(fl.program(lambda: None))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("backend", ["simulator", "emulator"])
def test_a_plan_on_the_cpu_writes_outputs_in_place(backend: Any) -> None:
    p = fl.Problem(batch=1, heads=2, len_q=40, head_dim=16, dtype="float16", causal=True)
    plan, inputs = fl.plan("flash2", p, backend=backend, lse=True), dict(zip("qkv", fl.random_inputs(p), strict=True))
    expected, target = plan.run(inputs), np.zeros((1, 2, 40, 16), np.float16)
    found = plan.run(inputs, out=target)
    assert found["out"] is target and list(found) == ["out", "lse"]
    assert all(found[name].tobytes() == expected[name].tobytes() for name in found)
    for wrong, line in (
        (inputs["q"], "out = 'memory shared with q': expected an array apart from the inputs"),
        (target[:, :1], r"out.shape = \(1, 1, 40, 16\): expected \(1, 2, 40, 16\)"),
        (target.tolist(), "out = 'list': expected a NumPy array"),
    ):
        with pytest.raises(fl.UsageError, match=line):
            plan.run(inputs, out=wrong)


@pytest.mark.parametrize("backend", ["simulator", "emulator"])
def test_a_plan_wants_what_its_problem_has(backend: Any) -> None:
    """Without its sinks or its mask of drafts a request would be answered wrongly, and nobody would know."""
    for changes, missing in (({"sinks": True}, "sinks"), ({"drafts": True}, "draft_mask")):
        p = fl.Problem(batch=1, heads=2, lengths=[(2, 9)], head_dim=16, dtype="float16", page_size=4, **changes)
        arrays_: Any = fl.CATALOGUE["paged"].operation.draw(p)
        plan = fl.plan("paged", p, backend=backend)
        assert plan.run(arrays_)["out"].shape == (1, 2, 2, 16) and plan.workspace == 0
        del arrays_[missing]
        line = f"{missing} = None: expected an array: the plan is for a problem that has {missing}"
        with pytest.raises(fl.UsageError, match=line):
            plan.run(arrays_)
    with pytest.raises(fl.UsageError, match="arrays = list: expected arrays by name"):
        plan.run([1])  # pyright: ignore


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_call_allocates_its_outputs_and_its_workspace(cupy: FakeCupy, given: Any, algorithm: str, lse: bool) -> None:
    p = problem(algorithm)
    plan, arrays_ = plan_of(algorithm, lse=lse), given(p)
    out_bytes, lse_bytes = (n // P.len_q * p.len_q for n in (OUT, lse * LSE))
    plan.run(arrays_)  # makes counters of blocks ahead, for further streams, too
    cupy.log.clear()
    found = plan.run(arrays_)
    assert list(found) == (["out", "lse"] if lse else ["out"])
    assert sum(cupy.log) == out_bytes + lse_bytes + plan.workspace
    out = found["out"]
    if arrays.framework("out", out).writable:
        for _ in range(2):  # this plan, too, makes counters ahead
            cupy.log.clear()
            call.attention(**arrays_, algorithm=algorithm, causal=True, lse=lse, out=out)
        assert sum(cupy.log) == lse_bytes + plan.workspace


def test_zeros_belong_to_a_stream_of_a_thread_or_to_a_captured_call(cupy: FakeCupy) -> None:
    """Kernels count in them, so no two calls that may run at the same time share any."""
    zeros = launch.Zeros(300)
    one, two, captured = 1, 2, 3
    cupy.streamIsCapturing = lambda stream: stream == captured  # type: ignore[method-assign]
    asked = list[int]()

    def take(nbytes: int) -> tuple[int, Any]:
        asked.append(nbytes)
        return -1024 * len(asked), asked

    def at(stream: int) -> int:
        return zeros.at(stream, take)[0]

    cupy.log.clear()
    mine = at(one)
    assert at(one) == mine and at(two) != mine
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(at, one).result()
    places = {mine, at(two), theirs, *(at(captured) for _ in range(20))}
    assert len(places) == 23 and min(b - a for a, b in pairwise(sorted(places))) >= 300
    assert not cupy.log and not asked and not cupy.cleared, "made ahead"
    places |= {at(captured) for _ in range(launch._MOST_ZEROS)}  # pyright: ignore[reportPrivateUsage]
    assert len(places) == 23 + launch._MOST_ZEROS  # pyright: ignore[reportPrivateUsage]
    assert cupy.cleared == [(-1024 * n, 512, 3) for n in range(1, len(asked) + 1)], (
        "a graph sets those to 0 that it took itself"
    )
    assert asked and not cupy.log


def test_zeros_of_a_plan_that_is_made_while_a_graph_captures(cupy: FakeCupy) -> None:
    """Nothing can be allocated from the driver then. Later calls find zeros that were made for them."""
    cupy.capturing = True
    zeros = launch.Zeros(300)
    cupy.capturing = False
    assert not cupy.log
    pointer, _ = zeros.at(1, lambda nbytes: pytest.fail("it takes no workspace"))
    assert cupy.log and zeros.at(1, lambda nbytes: (0, None))[0] == pointer


def test_a_plan_counts_in_zeros_of_its_own(cupy: FakeCupy, given: Any) -> None:
    long = P.replace(len_q=1, len_kv=5000)
    first, second = (fl.plan("flash_decoding", long.replace(scale=scale)) for scale in (None, 2.0))
    assert isinstance(first, Plan) and isinstance(second, Plan)
    assert list(first.zeros) == ["arrivals"] and first.zeros["arrivals"] is not second.zeros["arrivals"]
    arrivals = first.counts.tensors["arrivals"].nbytes
    assert first.workspace == sum(x.nbytes for x in first.counts.tensors.values() if x.role == "workspace") - arrivals
    arrays_ = given(long)
    cupy.log.clear()
    first.run(arrays_)
    assert sum(cupy.log) == 2 * 4 * 64 * 2 + first.workspace


def test_workspaces_are_said_in_bytes() -> None:
    said = {name: plan_of(name).workspace for name in ("standard", "flash1", "flash2")}
    rows = 2 * 4 * 50
    # S in float32 and P in bfloat16, rows of 70 keys padded; O, l and m in float32
    assert said == {"standard": rows * (4 * 72 + 2 * 72), "flash1": rows * 4 * (64 + 2), "flash2": 0}
    assert plan_of("flash2", lse=True).workspace == 0


@drawn(sizes=st.lists(st.integers(0, 1000), max_size=8))
def test_arrays_lie_side_by_side_in_one_piece(sizes: list[int]) -> None:
    """In the order of their sizes, each at a multiple of 32."""
    named: Any = [SimpleNamespace(name=str(i), nbytes=n) for i, n in enumerate(sizes)]
    offsets, nbytes = launch.laid_out(named)
    spans = sorted((begin, begin + sizes[int(name)]) for name, begin in offsets.items())
    assert all(begin % 32 == 0 for begin, _ in spans)
    assert all(0 <= after[0] - before[1] < 32 for before, after in pairwise(spans))
    assert len(spans) == len(sizes) and nbytes == (spans[-1][1] if spans else 0)


def test_what_a_launch_has_no_place_for_is_allocated(cupy: FakeCupy) -> None:
    """Inputs and outputs, too: a planted fault launches a kernel on what nobody wrote."""
    plan = plan_of("flash2")
    cupy.log.clear()
    plan.launch({})
    assert cupy.log == [OUT + 2 * OUT // 2 * 70 // 50 + OUT]  # q, k, v, out in one piece


def test_a_workspace_may_have_an_allocation_of_its_own(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """For memcheck, which looks at allocations."""
    plan = plan_of("flash1")
    own = [x.nbytes for x in plan.counts.tensors.values() if x.role == "workspace"]
    for apart, expected in ((False, [sum(own)]), (True, own)):
        monkeypatch.setattr(launch, "APART", apart)
        given = {name: cupy.asarray(x) for name, x in zip("qkv", fl.random_inputs(problem("flash1")), strict=True)}
        plan._launcher.cache_clear()
        plan._ready.cache_clear()
        plan._warm.clear()
        out = plan.run(given)["out"]
        cupy.log.clear()
        plan.run(given, out=out)
        assert cupy.log == expected


def test_what_a_captured_call_allocates_is_the_graphs(cupy: FakeCupy, torch: Any, given: Any) -> None:
    """Workspaces and padded buffers: of torch, whose graphs keep what they used, or held for CuPy's."""
    p = problem("flash1", head_dim=36)
    arrays_, plan = given(p), fl.plan("flash1", p)
    held, cupy.capturing = len(arrays._captured), True
    cupy.log.clear()
    out = plan.run(arrays_)["out"]
    kept = [memory.mem.size for memory in arrays._captured[held:]]
    beside = sorted(cupy.log)
    beside.remove(2 * 4 * 50 * 36 * 2)
    assert len(beside) == 1 + 4  # O, l and m in one piece; q, k, v and out, padded
    assert len(kept) == (0 if isinstance(out, Tensor) else len(beside))
    assert torch.allocated == (cupy.log if isinstance(out, Tensor) else [])


@pytest.mark.parametrize("head_dim", [64, 36], ids=["as they lie", "padded"])
@pytest.mark.parametrize("algorithm", ["flash2", "flash2_triton"])
def test_the_lse_comes_where_it_was_asked_for(cupy: FakeCupy, given: Any, algorithm: str, head_dim: int) -> None:
    p = problem(algorithm, dtype="float16", head_dim=head_dim, scale=0.125)
    arrays_ = given(p)
    found = fl.plan(algorithm, p, lse=True).run(arrays_)
    expected = simulator.naive(*fl.random_inputs(p), **p.masks)
    host = {name: getattr(x, "x", x).host for name, x in found.items()}
    assert np.array_equal(host["out"], expected.out.astype("f2"))
    assert np.array_equal(host["lse"], expected.lse.astype("f4"))


def test_it_launches_on_the_current_stream_of_cupy(cupy: FakeCupy) -> None:
    p = problem("flash1")
    plan, arrays_ = fl.plan("flash1", p), [cupy.asarray(x) for x in fl.random_inputs(p)]
    for handle in (0, 77, 78):
        with cupy.Stream(handle):
            plan.run(dict(zip("qkv", arrays_, strict=True)))
            call.attention(*arrays_, algorithm="flash1", causal=True)
    assert cupy.queued == [(0, 0)] * 2 + [(0, 77)] * 2 + [(0, 78)] * 2


def test_it_launches_on_the_current_stream_of_torch(cupy: FakeCupy, torch: Any) -> None:
    p = problem("flash1")
    plan, arrays_ = fl.plan("flash1", p), [Tensor(cupy.asarray(x)) for x in fl.random_inputs(p)]
    for handle in (0, 1234, 4321):
        torch._C._cuda_getCurrentRawStream = lambda _, handle=handle: handle
        with cupy.Stream(77):  # CuPy's own is another
            plan.run(dict(zip("qkv", arrays_, strict=True)))
            call.attention(*arrays_, algorithm="flash1", causal=True)
    assert cupy.queued == [(0, 0)] * 2 + [(0, 1234)] * 2 + [(0, 4321)] * 2


def test_it_launches_on_the_arrays_gpu(cupy: FakeCupy, given: Any) -> None:
    p = problem("flash1")
    with cupy.Device(1):
        plan, there = fl.plan("flash1", p), given(p)
    here = given(p)
    out = plan.run(there)["out"]
    call.attention(**there, algorithm="flash1", causal=True)
    assert [device for device, _ in cupy.queued] == [1, 1] and cupy.here == 0
    assert getattr(out, "x", out).data.device_id == 1
    with pytest.raises(fl.UsageError, match="q.device = 0: expected GPU 1, for which the plan was made"):
        plan.run(here)
    with pytest.raises(fl.UsageError, match="k.device = 0: expected GPU 1, where q lies"):
        plan.run(there | {"k": here["k"]})


def test_arrays_are_of_one_kind(cupy: FakeCupy, torch: Any) -> None:
    p = problem("flash1")
    q, k, v = (cupy.asarray(x) for x in fl.random_inputs(p))
    with pytest.raises(fl.UsageError, match=r"k = 'Tensor': expected an array of the same kind as q \(ndarray\)"):
        fl.plan("flash1", p).run(q=q, k=Tensor(k), v=v)


def in_a_thread(do: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


def test_a_new_thread_needs_no_context_of_its_own(cupy: FakeCupy, given: Any) -> None:
    """The driver refuses to launch in a thread where nothing has called the runtime yet."""
    p = problem("flash1")
    plan, arrays_ = fl.plan("flash1", p), given(p)
    in_a_thread(lambda: plan.run(arrays_))
    in_a_thread(lambda: call.attention(**arrays_, algorithm="flash1", causal=True))
    assert len(cupy.launches) == 2


def test_threads_that_make_the_same_plan_compile_it_once(cupy: FakeCupy, compiled: list[str]) -> None:
    cupy.compiling = 0.02
    begin = threading.Barrier(4)

    def make(_: int) -> Any:
        begin.wait()
        return plan_of("flash1").launches[0].kernel

    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(make, range(4)))
    assert (compiled, len(kernels)) == (["flash1"], 1)


@pytest.mark.parametrize("changed", ["flash2.cu", "include/params.cuh"])
def test_another_revision_has_kernels_of_its_own(
    cupy: FakeCupy, compiled: list[str], tmp_path: Path, changed: str
) -> None:
    """Who times two revisions must not get one kernel twice, whichever of its files differs."""
    other = tmp_path / "kernels_cu"
    shutil.copytree(kernels_cu.source("flash2").parent, other, ignore=shutil.ignore_patterns("emulator"))
    with (other / changed).open("a", encoding="utf-8") as file:
        file.write("// another revision\n")
    mine = plan_of("flash2").launches[0].kernel
    with kernels_cu.sources_in(other):
        theirs = plan_of("flash2").launches[0].kernel
    assert (plan_of("flash2").launches[0].kernel is mine, theirs is mine, compiled) == (True, False, ["flash2"] * 2)


def test_threads_share_a_plan(cupy: FakeCupy) -> None:
    """Each gets what it would have got alone, on its own stream."""
    p = problem("flash2", dtype="float16")
    plan = fl.plan("flash2", p)
    data = [[cupy.asarray(x) for x in fl.random_inputs(p, seed=seed)] for seed in range(4)]
    expected = [simulator.naive(*(x.host for x in inputs), causal=True).out.astype("f2") for inputs in data]

    def work(n: int) -> bool:
        with cupy.Stream(100 + n):
            found = [plan.run(dict(zip("qkv", data[n], strict=True)))["out"] for _ in range(10)]
        return all(np.array_equal(out.host, expected[n]) for out in found)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
    assert sorted(cupy.queued) == [(0, 100 + n) for n in range(4) for _ in range(10)]


def test_what_is_left_out_stays_where_it_is(cupy: FakeCupy) -> None:
    """Scales of 1 are made once, whichever thread or plan asks first: kernels have their addresses."""
    first, second = plan_of("flash3_fp8"), plan_of("flash3_fp8", lse=True)
    places = [{name: x.ptr for name, x in plan.left_out.items() if name != "lse"} for plan in (first, second)]
    assert places[0] == places[1] and set(places[0]) == {"q_scale", "k_scale", "v_scale"}
    assert all((at(x, (1,), (4,), np.dtype("f4")) == 1).all() for x in places[0].values())


def test_what_nobody_reads_has_one_place(cupy: FakeCupy, given: Any) -> None:
    """The LSE that flash2 writes and nobody asked for: no call allocates it, and plans share it by powers of two."""
    lens = {40: 2 * 4 * 40 * 4, 50: LSE, 100: 2 * 4 * 100 * 4}
    plans_ = {n: fl.plan("flash2", P.replace(len_q=n)) for n in lens}
    places = {n: plan.left_out["lse"] for n, plan in plans_.items()}
    assert places[40].ptr == places[50].ptr != places[100].ptr
    assert all(place.mem.size >= lens[n] for n, place in places.items())
    assert "lse" not in fl.plan("flash2", P, lse=True).left_out
    before = len(cupy.log)
    arrays_ = given(P)
    plans_[50].run(arrays_)
    assert len(cupy.log) == before + 4  # q, k, v and out


def test_a_cache_of_cupys_that_cannot_be_written_is_named(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied", "/nobody/.cupy/kernel_cache")

    line = "/nobody/.cupy/kernel_cache'.*: set CUPY_CACHE_DIR to a folder that can be written"
    monkeypatch.setattr(cupy, "RawModule", refuse)
    with pytest.raises(fl.Unavailable, match=line):
        kernel_of("flash2", "flash2", (), None, 0)
    monkeypatch.setattr(arrays, "import_module", refuse)
    arrays.cupy.cache_clear()
    with pytest.raises(fl.Unavailable, match=line):
        fl.plan("flash2", P)


@pytest.mark.parametrize("dtype", WIDTH)
def test_copies_of_any_operand_are_warmed(cupy: FakeCupy, dtype: str) -> None:
    """Each width has code of its own, there and back."""
    arrays.warm_copies(dtype, 0)
    assert {(kind.itemsize, axes) for kind, axes, *_ in ndarray.copiers} == {(WIDTH[dtype], 2)}
    assert len(ndarray.copiers) == 2


RAGGED: dict[str, Any] = {"batch": 1, "len_kv": None}


@pytest.mark.parametrize(
    ("changes", "arch", "name"),
    [
        ({"len_q": 1}, "compute_90", "flash_decoding"),
        ({"len_q": 2}, "compute_80", "flash_decoding"),
        ({"len_q": 3}, "compute_90", "flash_decoding"),
        ({"len_q": 512}, "compute_90", "flash3"),
        ({"len_q": 3, "dtype": "float32"}, "compute_90", "flash2"),
        ({"len_q": 512}, "compute_80", "flash2"),
        ({"len_q": 1, "alibi": True}, "compute_90", "flash3"),
        ({"len_q": 1, "soft_cap": 30.0, "sinks": True}, "compute_90", "flash_decoding"),
        ({**RAGGED, "lengths": [(1, 4096), (1, 70)]}, "compute_90", "flash_decoding"),
        ({**RAGGED, "lengths": [(2, 4096), (2, 70)]}, "compute_80", "flash_decoding"),
        ({**RAGGED, "lengths": [(1, 4096), (2, 70)]}, "compute_90", "flash3"),
        ({**RAGGED, "lengths": [(512, 4096), (512, 700)]}, "compute_90", "flash3"),
    ],
)
def test_auto_decodes_where_queries_are_few(changes: dict[str, Any], arch: str, name: str) -> None:
    sizes: dict[str, Any] = {"batch": 2, "heads": 8, "kv_heads": 2, "len_kv": 4096, "head_dim": 128, "dtype": "float16"}
    p = fl.Problem(**{**sizes, **changes})
    assert choose.fastest(ATTENTION, p, devices.gpu_device(arch)) == name
