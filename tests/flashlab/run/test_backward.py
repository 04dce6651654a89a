"""`fl.attention_backward`: on the emulator and on the fake GPU, what it takes, what it gives back, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.base.host import from_numpy, kind_of, to_numpy
from flashlab.verify.cases import LAYOUTS
from flashlab.verify.memory import frame_named, place
from simulator.names import DType
from simulator.operations.backward import BACKWARD
from tests.flashlab.run.fake import FakeCupy, Tensor
from tests.simulator.test_backward import ratios

P = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=40, len_kv=50, head_dim=24, dtype="float16", causal=True)
GRADIENTS = ("dq", "dk", "dv")
ENTRIES = ["flash2_backward_delta", "flash2_backward", "flash2_backward_convert"]


def drawn(p: fl.Problem = P) -> dict[str, Any]:
    return dict(BACKWARD.draw(p, seed=1))


def emulated(**arrays: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": True, "tile": (32, 16), "backend": "emulator"}
    return dict(zip(GRADIENTS, fl.attention_backward(**{**options, **arrays}), strict=True))


@pytest.mark.compiler
def test_of_what_attention_returned() -> None:
    """The slope of the forward kernel itself, along a direction, is the gradient's product with it."""
    p = P.replace(dtype="float32")
    q, k, v = fl.random_inputs(p, seed=2)
    random = np.random.default_rng(2)
    options: dict[str, Any] = {"causal": True, "tile": (32, 16), "backend": "emulator", "algorithm": "flash2"}
    out, lse = fl.attention(q, k, v, lse=True, **options)
    dout = random.standard_normal(out.shape, np.float32)
    found = emulated(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    given = {"q": q, "k": k, "v": v}
    for name, x in given.items():
        direction = random.standard_normal(x.shape, np.float32)
        ahead, behind = (
            fl.attention(**given | {name: x + np.float32(h) * direction}, **options) for h in (5e-3, -5e-3)
        )
        slope = float((dout.astype(np.float64) * (ahead.astype(np.float64) - behind)).sum()) / 1e-2
        assert slope == pytest.approx(float((found[f"d{name}"] * direction).sum(dtype=np.float64)), rel=2e-3, abs=2e-2)


@pytest.mark.alike("misaligned", "strided")
@pytest.mark.compiler
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "plain"])
def test_arrays_however_they_lie(layout: str) -> None:
    """The same bits as for dense arrays, beside NaNs; and of the inputs not a byte is changed."""
    arrays = drawn()
    plain = emulated(**arrays)
    frame = frame_named("numpy")
    placed = {name: place(frame, x, layout, float("nan")) for name, x in arrays.items() if name != "lse"}
    found = emulated(**arrays | {name: x.view for name, x in placed.items()})
    assert [x.harm() for x in placed.values() if x.harm()] == []
    for name in ("dk", "dv"):
        assert found[name].tobytes() == plain[name].tobytes()
    assert max(ratios(P, arrays, found).values()) <= 1


@pytest.mark.compiler
def test_a_broadcast_dout() -> None:
    """That of a sum: torch's autograd expands one number over the whole shape."""
    arrays = drawn()
    arrays["dout"] = np.broadcast_to(np.float16(0.5), arrays["dout"].shape)
    assert max(ratios(P, arrays, emulated(**arrays)).values()) <= 1


@pytest.mark.compiler
@pytest.mark.parametrize(
    "kind", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_the_same_kind_comes_back(kind: str) -> None:
    arrays = drawn()
    found = emulated(**{name: from_numpy(x, kind) for name, x in arrays.items()})
    assert [kind_of(x) for x in found.values()] == [kind] * 3
    assert to_numpy("dk", found["dk"]).tobytes() == emulated(**arrays)["dk"].tobytes()


@pytest.mark.compiler
def test_one_order() -> None:
    """Asked for, it is kept: dq of four workers has the bits of one's, and is what the algorithm of that name gives."""
    arrays = drawn()
    found = emulated(**arrays, deterministic=True)
    for workers in (1, 4):
        run = fl.emulate("flash2_backward_deterministic", **arrays, causal=True, tile=(32, 16), workers=workers)
        assert run.complaints() == []
        assert all(run.outputs[name].tobytes() == x.tobytes() for name, x in found.items())


@pytest.mark.compiler
@pytest.mark.parametrize(
    "masks", [{"causal": True}, pytest.param({"window": (150, 40)}, marks=pytest.mark.long)], ids=str
)
def test_one_order_on_hopper(masks: dict[str, Any]) -> None:
    """Whichever of four workers runs which block, dq has the same bits: those of key tiles that add one after the other."""
    p = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=300, len_kv=420, head_dim=64, dtype="bfloat16", **masks)
    arrays: dict[str, Any] = BACKWARD.draw(p, 3)
    runs = [
        fl.emulate("flash3_backward_deterministic", **arrays, **p.masks, device="h200", workers=workers)
        for workers in (1, 4)
    ]
    assert [run.complaints() for run in runs] == [[]] * 2
    assert len({run.outputs["dq"].tobytes() for run in runs}) == 1
    assert max(ratios(p, arrays, runs[0].outputs).values()) <= 1


@pytest.mark.alike("256-bfloat16-masks0")
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("head_dim", "dtype", "masks"),
    [(256, "bfloat16", {"causal": True}), (192, "float16", {"window": (70, 20)}), (136, "bfloat16", {})],
)
def test_wide_heads(head_dim: int, dtype: DType, masks: dict[str, Any]) -> None:
    """Rings go round more than once, and at head dim 256 that of V has one slot. Narrow heads hold all of K in registers."""
    p = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=150, len_kv=200, head_dim=head_dim, dtype=dtype, **masks)
    arrays: dict[str, Any] = BACKWARD.draw(p, 2)
    run = fl.emulate("flash3_backward_wide", **arrays, **p.masks, device="h200")
    assert run.complaints() == []
    assert max(ratios(p, arrays, run.outputs).values()) <= 1


Q = np.zeros((1, 2, 40, 32), np.float16)
LSE = np.zeros((1, 2, 40), np.float32)
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": "flash2"},
        "algorithm = 'flash2': expected one of auto, standard_backward, flash1_backward, flash2_backward",
    ),
    (
        {"algorithm": "flash2_backward", "deterministic": True},
        "algorithm = 'flash2_backward': expected auto, standard_backward, flash1_backward, flash2_backward_deterministic",
    ),
    ({"deterministic": 3}, "deterministic = 3: expected True or False"),
    ({"algorithm": "flsh2"}, "algorithm = 'flsh2'"),
    ({"backend": "cpu"}, "backend = 'cpu': expected one of gpu, emulator"),
    ({"lse": None}, "lse = None: expected an array: backward takes q, k, v, out, lse, dout"),
    ({"lse": LSE.astype("f2")}, "lse.dtype = 'float16': expected float32"),
    ({"lse": LSE[:, :1]}, "lse.shape = (1, 1, 40): expected (1, 2, 40)"),
    ({"out": Q[:, :, 1:]}, "out.shape = (1, 2, 39, 32): expected (1, 2, 40, 32)"),
    ({"dout": Q.astype("f4")}, "dout.dtype = 'float32': expected float16"),
    ({"dout": [1.0]}, "dout = 'list': expected an array of the same kind as q (ndarray)"),
    (
        {"soft_cap": 5.0, "algorithm": "flash1_backward"},
        "soft_cap = 5.0: expected nothing: flash1_backward knows causal, window, scale, dropout, dlse",
    ),
    ({"alibi_slopes": LSE}, "keyword = 'alibi_slopes'"),
    ({"sinks": LSE}, "sinks.shape = (1, 2, 40): expected (2,)"),
    ({"sinks": LSE[0, :, 0], "lengths": [40, 3]}, "lengths = 43 queries in all: expected 40"),
    ({"sinks": LSE[0, :, 0], "algorithm": "flash1_backward"}, "sinks = True: expected nothing: flash1_backward knows"),
    ({"dlse": LSE[:, :1]}, "dlse.shape = (1, 1, 40): expected (1, 2, 40)"),
    ({"tile": (24, 32)}, "tile = '24x32': expected multiples of 16"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_bad_input_gets_one_line(change: dict[str, Any], line: str) -> None:
    given: dict[str, Any] = {"dout": Q, "q": Q, "k": Q, "v": Q, "out": Q, "lse": LSE, "backend": "emulator"} | change
    with pytest.raises(fl.UsageError) as refused:
        fl.attention_backward(**given)
    assert line in str(refused.value) and "\n" not in str(refused.value)


# On the fake GPU


@pytest.fixture(params=["cupy", "torch"])
def on_gpu(request: pytest.FixtureRequest, cupy: FakeCupy, torch: Any) -> Any:
    """Arrays of either framework, as they come from an allocator."""

    def brought(x: np.ndarray[Any, Any]) -> Any:
        made = cupy.empty(x.shape, x.dtype)
        made.host[...] = x
        return made if request.param == "cupy" else Tensor(made)

    return lambda p: {name: brought(x) for name, x in drawn(p).items()}


@pytest.mark.parametrize("head_dim", [24, 20], ids=["as they lie", "padded"])
def test_three_launches_on_the_gpu(cupy: FakeCupy, on_gpu: Any, head_dim: int) -> None:
    p = P.replace(head_dim=head_dim)
    arrays = on_gpu(p)
    options: dict[str, Any] = {"causal": True, "algorithm": "flash2_backward"}
    found = fl.attention_backward(**arrays, **options)
    assert [entry for entry, *_ in cupy.launches] == ENTRIES == cupy.compiled
    assert [tuple(x.shape) for x in found] == [(1, 4, 40, head_dim), *[(1, 2, 50, head_dim)] * 2]
    assert all(type(x) is type(arrays["q"]) for x in found)
    fl.attention_backward(**arrays, **options)
    assert [entry for entry, *_ in cupy.launches] == ENTRIES * 2 and cupy.compiled == ENTRIES, (
        "a warm call compiles nothing"
    )


@pytest.mark.parametrize(
    ("changed", "fastest"),
    [
        ({}, "flash3_backward_deterministic"),
        ({"len_kv": 1500}, "flash3_backward"),
        ({"causal": False}, "flash3_backward"),
        ({"head_dim": 136}, "flash3_backward_wide"),
        ({"dtype": "float32"}, "flash2_backward"),
        ({"lengths": [7, (20, 33), (13, 10)]}, "flash3_backward"),
        ({"lengths": [7, (20, 33), (13, 10)], "head_dim": 136}, "flash3_backward_wide"),
        ({"lengths": [7, (20, 33), (13, 10)], "soft_cap": 9.0}, "flash2_backward"),
        ({"deterministic": True}, "flash3_backward_deterministic"),
        ({"deterministic": True, "head_dim": 136}, "flash3_backward_wide"),
        ({"deterministic": True, "lengths": [7, (20, 33), (13, 10)]}, "flash3_backward_wide"),
        ({"deterministic": True, "dtype": "float32"}, "flash2_backward_deterministic"),
    ],
)
def test_auto_is_the_fastest_that_takes_the_problem(
    cupy: FakeCupy, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], fastest: str
) -> None:
    """The stand-in is an H100."""
    changed = dict(changed)
    one_order = changed.pop("deterministic", False)
    asked = list[str]()

    def gpu_plan(algorithm: str, *_: Any, **__: Any) -> Any:
        asked.append(algorithm)
        raise fl.Unavailable("asked")

    monkeypatch.setattr("flashlab.run.facade.gpu_plan", gpu_plan)
    with pytest.raises(fl.Unavailable, match="asked"):
        p = P.replace(**changed)
        fl.attention_backward(**on_gpu(p), **p.masks, deterministic=one_order)
    assert asked == [fastest]


def test_an_lse_with_gaps_is_refused(cupy: FakeCupy, on_gpu: Any) -> None:
    """Kernels get a pointer to it and no strides: read as it lies it would be misread."""

    wide = cupy.empty((1, 4, 80), np.float32)
    arrays: dict[str, Any] = {name: x.x if isinstance(x, Tensor) else x for name, x in on_gpu(P).items()}
    arrays["lse"] = type(wide)((1, 4, 40), wide.dtype, wide.data, (4 * 80 * 4, 80 * 4, 8))
    with pytest.raises(fl.UsageError, match=r"lse.strides = \(1280, 320, 8\): expected a contiguous array"):
        fl.attention_backward(**arrays, causal=True)


def test_without_a_gpu_the_emulator_is_named() -> None:
    arrays = drawn()
    with pytest.raises(fl.UsageError, match=r'q = NumPy array: expected a CuPy, torch or JAX .*backend="emulator"'):
        fl.attention_backward(**arrays, causal=True)
