"""The measurement of dropout: what is timed can be run, results are compared, and the table says it all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashlab.measure.speed import Cell
from simulator.catalogue import CATALOGUE
from studies.timed import DROPOUT, OTHERS, OUTPUTS, PLAIN, RATE, apart, pass_of


class Tensor(np.ndarray[Any, Any]):
    """What of a tensor is used."""

    def float(self) -> Tensor:
        return self

    def norm(self) -> float:
        return float(np.linalg.norm(self))


def tensor(*numbers: float) -> Any:
    return np.array(numbers).view(Tensor)


@pytest.mark.parametrize("ours", OTHERS)
def test_our_kernels_take_what_is_timed(ours: str) -> None:
    p = Cell("bfloat16", 128, True, 16384).problem.replace(dropout=RATE)
    for name in (ours, OTHERS[ours]):
        row = CATALOGUE[name]
        assert row.refuses(row.fitted(p)) is None
        assert set(OUTPUTS[pass_of(name)]) <= {operand.name for operand in row.operation.outputs}


def test_results_apart() -> None:
    a, b = tensor(3.0, 4.0), tensor(3.0, 4.5)
    assert apart((a,), (a,)) == 0
    assert apart((a, b), (a, a)) == pytest.approx(0.1)  # the worst of both
    assert not apart((tensor(np.nan),), (tensor(1.0),)) < 0.02


def test_a_headline_and_a_table() -> None:
    def row(of: Any, call: str, ratio: float) -> dict[str, Any]:
        cell = {
            "dtype": "bfloat16",
            "head_dim": 128,
            "causal": True,
            "length": 4096,
            "milliseconds": 1.5,
            "tflops": 400.0,
        }
        return {**cell, "of": of, "call": call, "ratio": ratio, "quartiles": (ratio, ratio), "rounds": 11}

    rows = [row("forward", "flash3", 1.0), row("forward", "cudnn", 1.6), row("forward", "cudnn", 1.75)]
    rows += [row("backward", "flash3_backward", 1.0), row("backward", PLAIN, 0.9)]
    data = DROPOUT.schema(rate=RATE, rows=tuple(rows), not_run=())  # pyright: ignore[reportCallIssue]
    assert DROPOUT.headline(data) == (
        "dropout 0.1; flash3: times over its own, 1.60 to 1.75 for cudnn; "
        "flash3_backward: times over its own, 0.90 to 0.90 for without dropout"
    )
    assert (
        DROPOUT.table(data).splitlines()[-1]
        == "| backward | without dropout | 128 | causal | 4,096 | 1.500 | 400 | 0.90 |"
    )
