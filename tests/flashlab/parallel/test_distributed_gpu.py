"""What ranks need of a GPU, on one; and ranks on two, by NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("torch without CUDA")
    return found


@pytest.mark.parametrize("own_float", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_part_joins_by_the_kernel_as_by_torch(torch: Any, dtype: str, own_float: bool) -> None:
    from flashlab.parallel.merging import merge_into

    made = torch.Generator().manual_seed(0)
    storage = getattr(torch, dtype)
    whole = torch.randn(2, 3, 300, 64, generator=made).to(torch.float32 if own_float else storage)
    part, logs, part_log = (torch.randn(x, generator=made) for x in ((2, 3, 170, 64), (2, 3, 300), (2, 3, 170)))
    part_log[0, 0, :9] = -torch.inf
    found: list[Any] = []
    for device in ("cpu", "cuda"):
        own, log = whole.to(device, copy=True), logs.to(device, copy=True)
        merge_into(own[:, :, 130:], log[:, :, 130:], part.to(device, storage), part_log.to(device))
        found.append((own.float().cpu(), log.cpu()))
    (right, right_log), (mine, my_log) = found
    assert torch.equal(mine[:, :, :130], right[:, :, :130])
    torch.testing.assert_close(mine, right, rtol=2.0**-7 if dtype == "bfloat16" else 2.0**-10, atol=1e-5)
    torch.testing.assert_close(my_log, right_log, rtol=0, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_sms_that_are_left_to_others_change_no_bit(torch: Any, causal: bool) -> None:
    from flashlab.run.facade import called
    from simulator.operations.attention import ATTENTION

    q, k, v = (torch.randn(1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    outs = [
        called(
            ATTENTION, {"q": q, "k": k, "v": v}, {"causal": causal}, algorithm="auto", tile=None, backend="gpu", device=None,
            lse=True, sm_margin=margin,
        )
        for margin in (0, 16, 1000)
    ]  # fmt: skip
    for out, lse in outs[1:]:
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


def test_gradients_that_are_left_unrounded_round_to_the_others(torch: Any) -> None:
    import flashlab as fl

    q, k, v, dout = (torch.randn(1, 4, 500, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = fl.attention(q, k, v, lse=True, causal=True, algorithm="auto")
    rounded = fl.attention_backward(dout, q, k, v, out, lse, causal=True)
    for x, y in zip(
        fl.attention_backward(dout, q, k, v, out, lse, causal=True, partial=True)[1:], rounded[1:], strict=True
    ):
        assert x.dtype == torch.float32 and torch.equal(x.to(torch.bfloat16), y)


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
def test_two_gpus(torch: Any, scheme: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    words = ["--nproc-per-node", "2", "-m", "flashlab.parallel", "--backend", "nccl", "--scheme", scheme]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("passed") == 2
