"""What a step costs is what the formulas say, launch by launch."""

from __future__ import annotations

from random import Random

import pytest

import flashlab as fl
from flashlab.measure import results
from flashlab.serve.costs import Costs, Model, rates
from tests.flashlab.serve.places import RESULTS


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize(
    "model", [Model(), Model(heads=16, kv_heads=16, head_dim=64, dtype="float16"), Model(heads=8, kv_heads=1)]
)
@pytest.mark.parametrize("size", [1, 16])
def test_bytes_are_those_of_fl_count(device: str, model: Model, size: int) -> None:
    """More than 32 requests, too, whose lengths are looked at in another way; and one alone."""
    random, costs = Random(size), Costs(model, size, device)
    for requests in (1, 5, 40):
        groups = {
            new: [(new, new + random.randint(0, 2500)) for _ in range(random.randint(1, requests))]
            for new in (1, 2, 70)
        }
        moved = kv = 0
        for new, group in groups.items():
            counts = fl.count("paged" if new == 1 else "flash3_paged", model.problem(group, size), device=device)
            moved += counts.hbm.read + counts.hbm.write + counts.hbm.atomic
            kv += counts.by_tensor["k"].hbm_read + counts.by_tensor["v"].hbm_read
        shuffled = [pair for group in groups.values() for pair in group]
        random.shuffle(shuffled)
        cost = costs.step(shuffled)
        assert (cost.nbytes, cost.kv_bytes, cost.launches) == (
            moved * model.layers,
            kv * model.layers,
            3 * model.layers,
        )


def test_a_step_of_nothing_costs_nothing() -> None:
    assert Costs(Model(), 16).step([]) == (0, 0, 0, 0.0)


def test_time_is_bytes_over_the_measured_rate_and_a_cost_per_launch() -> None:
    costs, rate = Costs(Model(weights=10**9), 16), rates()["h100"]
    cost = costs.step([(1, 1000)] * 8)
    assert cost.seconds == 32 * rate.seconds_per_launch + (cost.nbytes + 10**9) / rate.bytes_per_second


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_rate_gives_back_the_cells_that_it_was_drawn_from(device: str) -> None:
    """The fewest bytes exactly, by construction. What is many times larger is within a tenth of its measured time."""
    name = rates()[device].source.partition("/")[2].partition(":")[0]
    rows = results.load(RESULTS / "decoding" / name).data["rows"]
    least = min(rows, key=lambda row: row["nbytes"])
    for row in rows:
        predicted = rates()[device].seconds_per_launch + row["nbytes"] / rates()[device].bytes_per_second
        measured = row["microseconds"]["flash_decoding"] / 1e6
        assert abs(predicted / measured - 1) < (1e-9 if row is least else 0.1)


def test_a_device_that_nobody_measured_is_refused() -> None:
    with pytest.raises(fl.UsageError, match="device = 'a100': expected one of h100, h200"):
        Costs(Model(), 16, "a100")
    with pytest.raises(fl.UsageError, match="kv_heads"):
        Costs(Model(heads=7, kv_heads=2), 16)
    with pytest.raises(fl.UsageError, match="dtype"):
        Costs(Model(dtype="float32"), 16)
    with pytest.raises(fl.UsageError, match="layers"):
        Costs(Model(layers=0), 16)
