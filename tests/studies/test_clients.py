"""Models beside PyTorch's attention, in sizes that take seconds on a CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from simulator.operations.backward import BACKWARD
from studies import clients, families, profiled

ONE = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "hidden": 48, "context": 16}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit status of a small run, and what it printed."""
    with pytest.raises(SystemExit) as done:
        clients.main([*words, "--tiny"])
    return int(done.value.code or 0), *capsys.readouterr()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "TINY", clients.TINY | ONE)
    text = import_module("torch").arange(4000).remainder(251).to(import_module("torch").uint8)
    monkeypatch.setattr(import_module("studies.model"), "library", lambda: (text, text))


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.usefixtures("small")
def test_a_model_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are SDPA's. What it needs is said before, what can't run is told, and a wrong dK is found."""
    plot, two = tmp_path / "losses.svg", ("--attention", "flashlab,cudnn,math", "--steps", "3", "--seeds", "0")
    status, out, err = run(capsys, "train", *two, "--plot", str(plot))
    ours, math = (line.split(" | ") for line in out.splitlines()[2:4])
    assert status == 0 and ours[0] == "| flashlab" and math[0] == "| math"
    assert ours[6:8] == math[6:8] and float(ours[6]) > float(ours[7]) - 1 > 0, "losses at the start, and at the end"
    assert ours[-1] == math[-1] == "passed |"
    assert "flashlab needs 0.0" in err and "not run: cudnn (" in err and plot.stat().st_size > 1000
    autograd = import_module("flashlab.run.autograd")
    right = autograd.called

    def wrong(operation: Any, *given: Any, **named: Any) -> Any:
        found = right(operation, *given, **named)
        return [1.001 * x if name == "dk" else x for name, x in zip(("dq", "dk"), found, strict=False)] + [*found[2:]]

    monkeypatch.setattr(autograd, "called", lambda of, *x, **y: (wrong if of is BACKWARD else right)(of, *x, **y))
    status, out, err = run(capsys, "train", *two, "--plot", str(plot))
    assert status == 1 and "studies: flashlab: gradients are off by more than they may be" in err
    assert "FAILED" in out.splitlines()[2] and "passed" in out.splitlines()[3]


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_steps_are_timed_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "speed", "--attention", "flashlab,math")
    assert status == 0 and "training tokens per second over the fastest other attention's: 0." in out


@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_a_step_is_taken_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that waits is seen in its forward time, and an attention of torch's is watched as ours is."""
    slow, right = 0.05, import_module("studies.model").ATTENTION["math"]

    def waits(*given: Any) -> Any:
        import_module("time").sleep(slow)
        return right(*given)

    monkeypatch.setitem(import_module("studies.model").ATTENTION, "sdpa", waits)
    monkeypatch.setattr(profiled, "STEPS", 1)
    status, out, _ = run(capsys, "profile", "--attention", "flashlab,sdpa")
    forward = [float(line.split(" | ")[8]) for line in out.splitlines()[2:4]]
    assert status == 0 and forward[1] >= 1e6 * slow and "takes what a CPU needs" in out and forward[0] > 0


@pytest.mark.torch
def test_memory_by_formula() -> None:
    """16 bytes a parameter, and what a layer keeps: of one linear layer without a bias its input, and what the loss keeps."""
    torch: Any = import_module("torch")
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    window = torch.zeros(1, 6, dtype=torch.int32)
    # the tokens (int32), the layer's input, and log-softmax's output and labels (int64), its weight for all: 4 bytes
    a_window = 5 * 4 + 5 * 4 * 4 + 5 * 8 * 4 + 6 * 8
    found = [clients.needed(torch, model, window, torch.float32, n) for n in (1, 2, 5)]
    assert found[2] - found[0] == 4 * (found[1] - found[0]) == pytest.approx(4 * a_window, abs=4 * 16)
    assert found[0] - 16 * (8 * 4 + 4 * 8) == pytest.approx(a_window, abs=20)


@pytest.mark.transformers
@pytest.mark.compiler
@pytest.mark.long
def test_families_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "families")
    assert status == 0 and all(f"| {name} | flashlab | float32 |" in out for name in families.FAMILIES)


def made(attention: str, seed: int, loss: float) -> dict[str, Any]:
    fixed: dict[str, Any] = {"tokens_per_s": 9.5e5, "host_ms": 5.0, "peak": 2 * 10**9, "formula": 10**9, "error": 0.01}
    return {"attention": attention, "seed": seed, "losses": [5.0] * 9 + [loss] * 20, "passed": True, **fixed}


def test_what_results_say() -> None:
    """The spread is of SDPA's runs with the same seed, and ours is compared seed by seed."""
    runs = [
        made("flashlab", 0, 2.01),
        made("sdpa-flash", 0, 2.0),
        made("flashlab", 1, 3.0),
        made("sdpa-flash", 1, 3.25),
    ]
    head: dict[str, Any] = {"part": "train", "dtype": "bfloat16", "model": {"layers": 8}, "batch": 32}
    of = clients.CLIENTS(**head, runs=[*runs, made("sdpa-flash", 0, 2.125), made("math", 0, 2.0)])
    off, spread = clients.apart(of.runs)
    assert off == pytest.approx([0.01, 0.25]) and spread == pytest.approx(0.125)
    assert "2.5e-01 from SDPA's, at most twice the 1.2e-01 between its own runs" in clients.headline(of)
    closer = clients.CLIENTS(**head, runs=[*runs, made("sdpa-flash", 0, 2.1)])
    assert "2.5e-01 from SDPA's, NOT within twice the 1.0e-01 between" in clients.headline(closer)
    assert "| flashlab | 0 | 950,000 | 5.0 | 2.000 | 1.000 | 5.0000 | 2.0100 | 1.0e-02 | passed |" in clients.table(of)
    step: dict[str, Any] = {"batch": 4, "context": 4096, "heads": 8, "kv_heads": 8, "tokens_per_s": 5e5, "rounds": 11}
    both = [
        step | {"attention": "flashlab", "ratio": 1.05, "peak": 10**9},
        step | {"attention": "cudnn", "ratio": None, "peak": None},
    ]
    assert "fastest other attention's: 1.05 × at 4 × 4,096" in clients.headline(clients.CLIENTS(**head, speeds=both))
    kernel = {"kernel": "copy", "launches": 4, "ms": 0.25}
    taken: dict[str, Any] = {
        "step_ms": 20,
        "host_ms": 19,
        "gpu_ms": 15,
        "launches": 600,
        "forward_us": 50,
        "backward_us": 80,
    }
    found = clients.CLIENTS(
        **head, profiles=[{"attention": "flashlab", "batch": 16, "context": 1024, "kernels": [kernel], **taken}]
    )
    assert clients.headline(found) == "a training step takes 20.0 ms at 16 × 1,024, the GPU idle for 25%"
    assert "| 19.00 | 15.00 | 25% | 600 | 50 | 80 |" in clients.table(
        found
    ) and "| 4 | 0.250 | copy |" in clients.table(found)
    errors = {"logits_worst": 0.02, "logits_mean": 0.01, "gradients_worst": 0.03, "gradients_mean": 0.01}
    each = [{"family": "Llama", "attention": name, "dtype": "bfloat16", **errors} for name in ("flashlab", "sdpa")]
    each[1]["logits_mean"] = 0.0125
    found = clients.headline(clients.CLIENTS(**head, families=each))
    assert "off by at most 3.0e-02 of their size, at most 1.00 × the mean errors of PyTorch's attention" in found
    batch: dict[str, Any] = {"requests": 128, "prompt_tokens": 60_000, "new_tokens": 16_384, "rounds": 3}
    both = [
        batch | {"attention": "flashlab", "equal": 16_000, "tokens_per_s": 3000},
        batch | {"attention": "sdpa", "equal": 16_384, "tokens_per_s": 2000},
    ]
    of = clients.CLIENTS(**head, generations=both)
    assert clients.headline(of) == (
        "continuous batching of 128 requests: 3,000 tokens/s, 1.50 × SDPA's; 16,000 of 16,384 tokens are equal"
    )
    assert "| flashlab | 128 | 60,000 | 16,384 | 16,000 | 3,000 | 3 |" in clients.table(of)


@pytest.mark.transformers
@pytest.mark.compiler
@pytest.mark.long
def test_requests_batched_continuously(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU, in float32, all tokens are those by SDPA."""
    status, out, _ = run(capsys, "generate")
    assert status == 0 and "; 16 of 16 tokens are equal" in out
