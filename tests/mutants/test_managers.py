"""Every seeded bug of a block manager is killed by the model, in a run that is told in a few actions."""

from __future__ import annotations

import pytest

from flashlab.serve.model import drive, replay
from tests.mutants.managers import MANAGERS, Bug

MOST_STEPS = 60_000


@pytest.mark.parametrize("bug", MANAGERS, ids=lambda bug: bug.name)
def test_killed(bug: Bug) -> None:
    manager = bug.manager()
    found = drive(manager, steps=MOST_STEPS, seed=0)
    assert found is not None, f"{bug.name} survives {MOST_STEPS:,} steps"
    pool, actions, said = found
    assert replay(manager, pool, actions) == said
    assert len(actions) <= 30


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({bug.name for bug in MANAGERS}) == len(MANAGERS) >= 30
    reported = " ".join(bug.seen for bug in MANAGERS)
    for issue in (
        "#1556",
        "#3347",
        "#1584",
        "#1930",
        "#42571",
        "#49125",
        "#12621",
        "#54727",
        "#4158",
        "#35270",
        "#38941",
    ):
        assert issue in reported
