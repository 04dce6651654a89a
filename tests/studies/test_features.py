"""What is timed can be run, and each peer is asked for what it can say."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlab.integrations.peers import flex
from flashlab.measure.speed import Cell
from simulator.catalogue import CATALOGUE
from simulator.errors import Unavailable
from studies import timed
from studies.timed import FEATURES

CELL = Cell("bfloat16", 128, True, 16384)


@pytest.mark.parametrize("feature", FEATURES)
def test_flash3_takes_every_feature_and_its_peers_what_they_can_say(feature: str) -> None:
    p = CELL.problem.replace(**FEATURES[feature])
    assert CATALOGUE["flash3"].refuses(p) is None
    unsaid = feature in ("sinks", "random half mask, bits", "random half of the blocks")
    assert (flex.refuses(p) is not None) == unsaid
    if feature != "random half mask":
        with pytest.raises(Unavailable, match="where there is a mask of booleans"):
            timed._cudnn(p, {}, {})


def test_a_peer_whose_result_is_another_is_not_timed() -> None:
    class Sized(np.ndarray[Any, Any]):
        def abs(self) -> Any:
            return np.abs(self)

    def result(value: float) -> Any:  # what of a tensor is used
        return SimpleNamespace(float=lambda: np.array([value]).view(Sized))

    def same() -> Any:
        return result(1.05)

    def ours() -> Any:
        return {"out": result(1.0)}

    assert timed._checked(same, ours) is same
    for wrong in (1.2, math.nan):
        with pytest.raises(RuntimeError, match="apart from ours"):
            timed._checked(lambda wrong=wrong: result(wrong), ours)
