"""`partial=True`: dK and dV as a backward pass has summed them up. Rounded, they are what it returns without, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlab as fl
from simulator.catalogue import of
from simulator.operations.backward import BACKWARD
from tests.tiers import those_in

P = fl.Problem(
    batch=1, heads=4, kv_heads=2, len_q=70, len_kv=150, head_dim=39, dtype="bfloat16", causal=True, partial=True
)
IN_PARTS = fl.Problem(batch=1, heads=4, kv_heads=1, len_q=64, len_kv=70, head_dim=72, dtype="float16", partial=True)
"""So few key tiles that `flash3_backward` takes the heads of a group in parts, and adds them up in a launch of its own."""


def both(name: str, p: fl.Problem, backend: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradients with `partial`, and without."""
    arrays = BACKWARD.draw(p)
    with_it, without = (
        fl.plan(name, each, backend=backend, device="h100").run(arrays) for each in (p, p.replace(partial=False))
    )
    return with_it, without


def rounds_to(with_it: dict[str, Any], without: dict[str, Any]) -> None:
    for name in ("dk", "dv"):
        assert with_it[name].dtype == np.float32
        assert with_it[name].astype(without[name].dtype).tobytes() == without[name].tobytes()
        assert (with_it[name] != without[name].astype(np.float32)).any()
    assert with_it["dq"].dtype == without["dq"].dtype


KNOW_IT = [name for name, row in of(BACKWARD).items() if "partial" in row.support.masks]


@pytest.mark.parametrize("p", [P, IN_PARTS], ids=["causal", "in parts"])
@pytest.mark.parametrize("name", KNOW_IT)
def test_rounded_they_are_what_it_returns_without(name: str, p: fl.Problem) -> None:
    rounds_to(*both(name, p, "simulator"))


@pytest.mark.compiler
@pytest.mark.parametrize("p", [P, pytest.param(IN_PARTS, marks=pytest.mark.long)], ids=["causal", "in parts"])
@pytest.mark.parametrize("name", those_in({"flash2_backward", "flash3_backward"}, KNOW_IT))
def test_so_they_are_of_the_kernels(name: str, p: fl.Problem) -> None:
    rounds_to(*both(name, p, "emulator"))


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["flash2_backward", "flash3_backward"])
def test_their_bytes_are_those_of_float32(name: str) -> None:
    arrays: Any = BACKWARD.draw(P)
    run = fl.emulate(name, **arrays, **P.masks, device="h100")
    counts = fl.count(name, P, device="h100")
    assert run.complaints() == []
    assert run.counts.hbm == counts.hbm
    assert counts.by_tensor["dk"].hbm_write == 2 * 150 * 40 * 4


def test_what_does_not_know_it_says_so() -> None:
    arrays: Any = BACKWARD.draw(P)
    with pytest.raises(fl.UsageError, match=r"^partial = True: expected nothing: flash1_backward knows causal, .*$"):
        fl.simulate("flash1_backward", **arrays, causal=True, partial=True)
    with pytest.raises(fl.UsageError, match=r"^partial = True: expected nothing: flash2 knows causal, .*$"):
        fl.simulate("flash2", *(arrays[name] for name in "qkv"), partial=True)
    assert KNOW_IT == [
        "flash2_backward", "flash2_backward_deterministic", "flash3_backward", "flash3_backward_deterministic",
    ]  # fmt: skip


@pytest.mark.compiler
@pytest.mark.torch
def test_torch_tensors_are_of_float32_too() -> None:
    torch: Any = pytest.importorskip("torch")
    arrays = {name: x.astype(np.float32) for name, x in BACKWARD.draw(P).items()}
    given: Any = {
        name: torch.from_numpy(x).to(torch.float32 if name == "lse" else torch.bfloat16) for name, x in arrays.items()
    }
    dq, dk, dv = fl.attention_backward(**given, causal=True, partial=True, backend="emulator")
    assert (dq.dtype, dk.dtype, dv.dtype) == (torch.bfloat16, torch.float32, torch.float32)
