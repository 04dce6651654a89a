"""`flashlab time`: what it prints of a predicted time."""

from __future__ import annotations

import re
from typing import Any

import pytest

import flashlab as fl
from tests.flashlab.cli.typed import run


def test_the_rate_counts_both_products() -> None:
    """2 operations for each element of Q K^T and of P V."""
    sizes: dict[str, Any] = {"heads": 3, "len_q": 256, "head_dim": 64}
    words = [word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", n)]
    text = run("time", "flash2", *words, "--dtype", "float16", "--device", "h200", "--no-causal").stdout
    found = re.search(r"predicted: [\d.e-]+ ms, ([\d.e+-]+) TFLOP/s", text)
    assert found
    seconds = fl.timeline("flash2", fl.Problem(batch=1, dtype="float16", **sizes), device="h200").seconds
    assert float(found[1]) == pytest.approx(2 * 3 * 256 * 256 * (64 + 64) / seconds / 1e12, rel=0.01)


def test_the_rate_of_a_backward_pass_counts_five_products() -> None:
    """A causal mask leaves about half of the pairs."""
    words = ["--heads", 3, "--len-q", 256, "--head-dim", 64, "--dtype", "float16", "--device", "h200", "--causal"]
    text = run("time", "flash3_backward", *words).stdout
    found = re.search(r"predicted: [\d.e-]+ ms, ([\d.e+-]+) TFLOP/s", text)
    assert found
    problem = fl.Problem(batch=1, heads=3, len_q=256, head_dim=64, dtype="float16", causal=True)
    seconds = fl.timeline("flash3_backward", problem, device="h200").seconds
    assert float(found[1]) == pytest.approx(5 * 2 * 3 * (256 * 257 // 2) * 64 / seconds / 1e12, rel=0.01)
