"""Every entry takes arrays of NumPy, CuPy, torch and JAX, bit for bit, and says in a line what it can't take."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flashlab as fl
from flashlab.base.host import from_numpy, kind_of, like, operand, to_numpy
from flashlab.measure import workload
from flashlab.run import arrays
from simulator.dtypes import numpy_dtype
from simulator.operations.backward import BACKWARD
from simulator.quantize import quantize

Array = np.ndarray[Any, Any]
KINDS = [
    "numpy",
    "cupy",
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("torch that requires grad", marks=pytest.mark.torch),
    pytest.param("jax", marks=pytest.mark.jax),
]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn"]


class OnAGpu:
    """An array of a CuPy that isn't there: on a GPU, with `get` to fetch it."""

    def __init__(self, host: Array) -> None:
        self.host, self.shape, self.dtype = host.copy(), host.shape, host.dtype

    def get(self) -> Array:
        return self.host.copy()

    def __dlpack__(self) -> None:
        raise BufferError("it lies on a GPU")


OnAGpu.__module__ = "cupy"


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("cupy")
    fake.asarray = OnAGpu
    monkeypatch.setitem(sys.modules, "cupy", fake)


def of_kind(kind: str, x: Array) -> Any:
    """A NumPy array as one of a framework; a tensor that requires grad where that has a meaning."""
    if kind != "torch that requires grad":
        return from_numpy(x.copy(), kind)
    tensor = from_numpy(x.copy(), "torch")
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def same(a: Any, b: Any) -> bool:
    """Plain data, NumPy's arrays to the bit."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# There and back


@pytest.mark.alike("numpy-bfloat16", "numpy-float8_e4m3fn", "cupy-float16", "cupy-int32")
@pytest.mark.parametrize("dtype", [*DTYPES, "int32"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_bit_survives(kind: str, dtype: str, data: st.DataObject) -> None:
    """NaNs with what they carry, denormals, signs of zero; strided and empty arrays."""
    size = numpy_dtype(dtype).itemsize
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
    bits = data.draw(hnp.arrays(f"u{size}", shape))
    x = bits.view(numpy_dtype(dtype))[
        tuple(data.draw(st.sampled_from([slice(None), slice(None, None, 2)])) for _ in shape)
    ]
    there = of_kind(kind, x)
    assert kind_of(there) == kind.split()[0]
    back = operand("x", there)
    assert isinstance(back, np.ndarray) and back.dtype == x.dtype and back.shape == x.shape
    assert back.tobytes() == x.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_comes_back(kind: str) -> None:
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    there = of_kind(kind, x)
    again = like(there, x + 1)
    assert type(again) is type(like(again, x)) and kind_of(again) == kind_of(there)
    assert to_numpy("x", again).tobytes() == (x + 1).tobytes()


@pytest.mark.torch
def test_strided_tensors_of_torch_are_read_as_they_lie() -> None:
    torch: Any = importlib.import_module("torch")
    wide = torch.arange(48.0).reshape(4, 12).to(torch.bfloat16)
    for x in (wide.t(), wide[:, ::3], wide[1:, 5], wide.expand(2, 4, 12), torch.nn.Parameter(wide)):
        assert to_numpy("x", x).astype(np.float32).tolist() == x.float().tolist()


def test_whoever_speaks_dlpack_is_read() -> None:
    class Spoken:
        def __init__(self, x: Array) -> None:
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    assert to_numpy("x", Spoken(x)).tolist() == x.tolist()


# The entries

P = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=20, len_kv=24, head_dim=16, dtype="bfloat16", causal=True)
QKV = fl.random_inputs(P, seed=1)
HALF = [x.astype(np.float32).astype(np.float16) for x in QKV]
EIGHT = quantize(*(x.astype(np.float32) for x in fl.random_inputs(P.replace(len_q=130, len_kv=130, head_dim=64))))
BACKWARD_P = fl.Problem(batch=1, heads=2, len_q=20, head_dim=16, dtype="float16", causal=True)

Taken = Callable[[Callable[[Array], Any]], Any]


def simulated(made: Callable[[Array], Any]) -> Any:
    run = fl.simulate("flash2", *map(made, QKV), causal=True, lse=True, check_finite=True)
    return dict(run.outputs), run.counts


def simulated_backward(made: Callable[[Array], Any]) -> Any:
    drawn = BACKWARD.draw(BACKWARD_P)
    return dict(fl.simulate("flash2_backward", **{k: made(x) for k, x in drawn.items()}, causal=True).outputs)


def simulated_with_scales(made: Callable[[Array], Any]) -> Any:
    q, k, v = map(made, (EIGHT.q, EIGHT.k, EIGHT.v))
    return fl.simulate("flash3_fp8", q, k, v, scales=fl.Scales(*map(made, EIGHT.scales))).out


def quantized(made: Callable[[Array], Any]) -> Any:
    found = quantize(*map(made, HALF))
    return found.q, found.k, found.v, tuple(found.scales)


def planned(made: Callable[[Array], Any], backend: str = "simulator") -> Any:
    return fl.plan("flash2", P, backend=backend, lse=True).run(**dict(zip("qkv", map(made, QKV), strict=True)))


def emulated(made: Callable[[Array], Any]) -> Any:
    return dict(fl.emulate("flash2", *map(made, QKV), causal=True, lse=True).outputs)


def attention(made: Callable[[Array], Any]) -> Any:
    out, lse = fl.attention(*map(made, QKV), causal=True, lse=True, backend="emulator")
    return to_numpy("out", out), to_numpy("lse", lse)


def file_emulated(made: Callable[[Array], Any]) -> Any:
    path = Path(__file__).with_name("twice.cu")
    x, bytes_ = np.arange(64, dtype=np.float32), np.arange(64, dtype=np.uint8)
    run = fl.emulate_file(path, {"x": made(x), "n": made(bytes_), "y": fl.Empty((64,))}, grid=1, block=64)
    assert run.passed
    return run.arrays


COMPILED = [pytest.mark.compiler]
TAKEN: dict[str, Taken] = {
    "simulate": simulated,
    "simulate, a backward pass": simulated_backward,
    "simulate, 8 bits with scales": simulated_with_scales,
    "naive": lambda made: tuple(fl.naive(*map(made, QKV), causal=True)),
    "naive_loop": lambda made: tuple(fl.naive_loop(*map(made, QKV), causal=True)),
    "compare": lambda made: fl.compare(tuple(map(made, QKV)), algorithms=["flash1", "flash2"], causal=True).to_dict(),
    "softmax": lambda made: fl.softmax("softmax_online", made(QKV[0][0, 0, 0])).out,
    "quantize": quantized,
    "plan, simulator": planned,
}
BUILT: dict[str, Taken] = {
    "plan, emulator": lambda made: planned(made, "emulator"),
    "emulate": emulated,
    "emulate_file": file_emulated,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entry", [*TAKEN, *[pytest.param(name, marks=pytest.mark.compiler) for name in BUILT]])
def test_every_entry_takes_every_kind(entry: str, kind: str) -> None:
    """What comes back is NumPy's, and the same as for arrays of NumPy."""
    call = {**TAKEN, **BUILT}[entry]
    assert same(call(lambda x: of_kind(kind, x)), call(lambda x: x))


@pytest.mark.compiler
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "grad" not in str(kind)])
def test_attention_gives_back_the_kind_that_it_got(kind: str) -> None:
    q, k, v = (of_kind(kind, x) for x in QKV)
    out, lse = fl.attention(q, k, v, causal=True, lse=True, backend="emulator")
    assert type(out) is type(lse) is type(q)
    assert same((to_numpy("out", out), to_numpy("lse", lse)), attention(lambda x: x))


@pytest.mark.torch
def test_a_tensor_whose_gradient_would_be_lost_is_refused() -> None:
    """That of a backward pass: attention has no second derivatives."""
    torch: Any = importlib.import_module("torch")
    q, k, v = (of_kind("torch", x) for x in QKV)
    out, lse = fl.attention(q, k, v, lse=True, backend="emulator")
    k.requires_grad_()
    line = refused(lambda: fl.attention_backward(out, q, k, v, out, lse, backend="emulator"))
    assert line.startswith("k = torch tensor that requires grad: expected one that doesn't")
    with torch.no_grad():
        assert fl.attention_backward(out, q, k, v, out, lse, backend="emulator")[1].dtype == torch.bfloat16


def test_attention_refuses_kinds_that_are_mixed_and_an_out_that_it_cannot_write() -> None:
    q, k, v = map(OnAGpu, QKV)
    assert "k = 'ndarray': expected an array of the same kind as q (OnAGpu)" in refused(
        lambda: fl.attention(q, QKV[1], v, backend="emulator")
    )
    line = refused(lambda: fl.attention(q, k, v, out=q, backend="emulator"))
    assert line.startswith("out = 'OnAGpu': expected a NumPy array")
    wide = [x.astype(np.float64) for x in QKV]
    line = refused(lambda: fl.attention(*wide, out=np.zeros_like(wide[0]), backend="emulator"))
    assert line.startswith("q.dtype = 'float64': expected one of float32")


def test_a_workload_has_what_it_drew_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_FRESH", 100)
    q, k, v = workload.inputs("flash2", P, seed=3).values()
    drawn = np.random.default_rng(3).standard_normal(100, np.float32).astype(numpy_dtype(P.dtype))
    assert q.host.tobytes() == np.tile(drawn, 7)[: q.host.size].tobytes()
    assert [x.host.shape for x in (q, k, v)] == [x.shape for x in QKV]
    eight = workload.inputs("flash3_fp8", P.replace(dtype="float8_e4m3fn"))["q"].host
    assert eight.dtype == np.uint8 and eight.shape == QKV[0].shape


# What can't be taken


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(fl.UsageError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("x", [[[1.0]], None, "q", 3, object()])
def test_what_is_no_array(x: Any) -> None:
    q, k, v = HALF
    for call in (fl.naive, fl.naive_loop, quantize, lambda *x: fl.compare(x), lambda *x: fl.simulate("flash2", *x)):
        assert refused(lambda call=call: call(q, x, v)).startswith("k = ")
    assert "an array of NumPy, torch, JAX or CuPy" in refused(lambda: fl.naive(q, x, v))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values() -> None:
    torch: Any = importlib.import_module("torch")
    q, k, v = (of_kind("torch", x) for x in HALF)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for x in (k.to_sparse(), k.to("meta"), nested, torch.zeros(k.shape, dtype=torch.float8_e5m2)):
        line = refused(lambda x=x: fl.simulate("flash2", q, x, v))
        assert line.startswith("k = torch array without values to read (")
    seen = torch.func.vmap(lambda x: torch.tensor(len(refused(lambda: fl.naive(x, k, v)))))
    assert seen(torch.ones(2, 3))[0] > 0


@pytest.mark.jax
def test_arrays_that_jax_traces() -> None:
    jax: Any = importlib.import_module("jax")
    lines: list[str] = []

    def traced(x: Any) -> Any:
        lines.append(refused(lambda: fl.naive(x, x, x)))
        return x

    jax.jit(traced)(of_kind("jax", HALF[0]))
    assert lines[0].startswith("q = JAX array without values to read (")


# No GPU, and arrays that lie on a CPU


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for cache in (arrays.cupy, arrays._framework_named, arrays._framework_of):
        cache.cache_clear()


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cupy"])
def test_arrays_on_a_cpu_are_told_of_the_emulator(kind: str) -> None:
    line = refused(lambda: fl.attention(*(of_kind(kind, x) for x in HALF)))
    assert line.startswith("q = ") and 'backend="emulator"' in line


@pytest.mark.usefixtures("without_cupy")
def test_a_plan_without_a_gpu_tells_of_the_emulator() -> None:
    with pytest.raises(fl.Unavailable, match=r'pip install .*backend="emulator"') as error:
        fl.plan("flash2", P)
    assert "\n" not in str(error.value)
