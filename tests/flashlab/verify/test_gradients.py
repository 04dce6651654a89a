"""The checks of gradients themselves: a right tile program passes them in every case, ragged ones with sinks included."""

from __future__ import annotations

import pytest

import flashlab as fl
from simulator.operations.backward import BACKWARD


def report() -> fl.Report:
    return fl.verify("flash2_backward_deterministic", checks=["head_order"], dtypes=["float32"])


def test_heads_that_change_places_take_their_gradients_with_them() -> None:
    found = report()
    assert found.passed
    assert any("sinks" in row.problem and "lengths" in row.problem for row in found.rows)


def test_an_operand_of_another_form_would_be_moved_along_the_wrong_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged dsinks have a row for each sequence, others for each batch."""
    operand = type(BACKWARD).operand
    monkeypatch.setattr(type(BACKWARD), "operand", lambda self, name, problem=None: operand(self, name))  # pyright: ignore[reportUnknownLambdaType]
    assert not report().passed
