"""The one way in: what a warm call does, on the fake GPU, and that every operation is asked for its own algorithms and arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.run import nvrtc, plan, tma
from tests.flashlab.run.fake import FakeCupy, Kernel, Tensor
from tests.work import calls

OURS = str(Path(fl.__file__).parent)
SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float16", "causal": True}


@pytest.fixture(autouse=True)
def stubs(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do nothing, and descriptors without a driver."""
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda *_, arch: nvrtc.Compiled(image=arch.encode(), log=""))
    monkeypatch.setattr(tma, "descriptor", lambda *_: np.zeros((), tma.DESCRIPTOR)[()])
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)


@pytest.fixture(params=["cupy", "torch"])
def brought(request: pytest.FixtureRequest, cupy: FakeCupy, torch: Any) -> Callable[[str, fl.Problem], dict[str, Any]]:
    """The arrays of an algorithm's problem, of either framework, each time elsewhere."""

    def bring(x: np.ndarray[Any, Any]) -> Any:
        made = cupy.empty(x.shape, x.dtype)
        made.host[...] = x
        return made if request.param == "cupy" else Tensor(made)

    def drawn(algorithm: str, problem: fl.Problem) -> dict[str, Any]:
        return {name: bring(x) for name, x in fl.CATALOGUE[algorithm].operation.draw(problem).items()}

    return drawn


def run_of(algorithm: str, problem: fl.Problem, arrays: dict[str, Any]) -> Callable[[], Any]:
    made = fl.plan(algorithm, problem)
    return lambda: made.run(arrays)


WAYS: dict[str, tuple[str, Callable[[fl.Problem, dict[str, Any]], Callable[[], Any]], int]] = {
    "attention": ("flash2", lambda p, x: lambda: fl.attention(**x, causal=True), 56),
    "attention, out": ("flash2", lambda p, x: (lambda out: lambda: fl.attention(**x, causal=True, out=out))(fl.attention(**x)), 49),
    "attention, auto, LSE": ("flash3", lambda p, x: lambda: fl.attention(**x, algorithm="auto", lse=True, causal=True), 75),
    "backward": ("flash2_backward", lambda p, x: lambda: fl.attention_backward(**x, causal=True), 108),
    "plan.run": ("flash2", lambda p, x: run_of("flash2", p, x), 44),
    "plan.run, backward": ("flash2_backward", lambda p, x: run_of("flash2_backward", p, x), 94),
}  # fmt: skip
"""By name: of which algorithm the arrays are, the call, and the most function calls of a warm one. One of the forward pass's asks
torch whether it casts, and one of each asks it whether gradients are on."""


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_call_does_little(brought: Any, way: str) -> None:
    """Function calls that flashlab makes, also of the fakes' functions. (Its microseconds: python -m flashlab.measure.overhead.)"""
    algorithm, call_of, most = WAYS[way]
    made: list[int] = []
    for length in (16, 600):
        p = fl.Problem(**SIZES, len_q=length)
        call = call_of(p, brought(algorithm, p))
        call(), call()
        made.append(calls(call, by=OURS))
    assert max(made) <= most


@pytest.mark.parametrize("algorithm", ["flash3", "flash3_backward"])
def test_a_call_at_other_addresses_decides_nothing_again(
    brought: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """As in training, where each layer's arrays lie elsewhere."""
    p = fl.Problem(**SIZES, len_q=50)
    call = fl.attention if algorithm == "flash3" else fl.attention_backward
    call(**brought(algorithm, p), algorithm=algorithm, causal=True)
    for name in ("Plan", "Ready", "Launcher"):
        monkeypatch.setattr(getattr(plan, name), "__init__", lambda *_: pytest.fail("decided again"))
    x = brought(algorithm, p)
    assert calls(lambda: call(**x, algorithm=algorithm, causal=True), by=OURS) < 400


@pytest.mark.parametrize("backend", ["gpu", "emulator"])
def test_an_algorithm_of_another_operation_is_refused(brought: Any, backend: Any) -> None:
    """`fl.attention` with a backward pass's name would launch its kernels on what nobody wrote."""
    x = brought("flash2", p := fl.Problem(**SIZES, len_q=16))
    given = x if backend == "gpu" else dict(zip("qkv", fl.random_inputs(p), strict=True))
    with pytest.raises(fl.UsageError, match="algorithm = 'flash2_backward': expected one of auto, standard, "):
        fl.attention(**given, algorithm="flash2_backward", backend=backend)


def test_what_pages_know_nothing_of_is_refused(brought: Any) -> None:
    p = fl.Problem(batch=2, heads=2, len_q=1, len_kv=40, page_size=16, head_dim=64, dtype="float16")
    x = brought("paged", p)
    for name in ("mask", "block_mask", "alibi_slopes", "rng_state"):
        with pytest.raises(fl.UsageError, match=f"{name} = .*: expected None with a block_table"):
            fl.attention(**x, **{name: x["q"]})
    with pytest.raises(fl.UsageError, match="scales = .*: expected None with a block_table"):
        fl.attention(**x, scales=(x["q"],) * 3)
    for call, arrays in (
        (fl.attention, brought("flash2", fl.Problem(**SIZES, len_q=16))),
        (fl.mla, {"latent": x["k"], "q": x["q"]}),
    ):
        name = "draft_mask" if call is fl.attention else "seq_lens"
        with pytest.raises(fl.UsageError, match=f"{name} = .*: expected None without a block_table"):
            call(**arrays, **{name: x["seq_lens"]})
