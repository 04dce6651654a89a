"""The data of docs/race.md, from the simulator. flashlab/lessons/race.js plays the race, docs/_static/race.js the rest.

`pages.write` makes the files at each build of the site. The page shows a small problem, on which both algorithms are run
step by step, and one row of its scores.
"""

from __future__ import annotations

from typing import Any

import flashlab as fl
from flashlab.lessons import race
from simulator.trace import Trace

PROBLEM = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16")
TILE = (16, 16)
ROW = 22
"""A query whose maximum rises with every tile of keys."""
RACERS = {"standard": "Standard attention", "flash2": "FlashAttention-2"}


def script() -> str:
    """The page's data and the race, as JavaScript."""
    return race.script(data())


def data() -> dict[str, Any]:
    """What the page shows: the race, and a row with its truth."""
    q, k, v = fl.random_inputs(PROBLEM, seed=0)
    traces: dict[str, Trace] = {}
    for name, title in RACERS.items():
        trace = fl.simulate(name, q, k, v, tile=TILE, trace=(0, 0)).trace
        assert trace is not None
        traces[title] = trace
    return {
        **race.data(traces),
        "row": {
            "query": ROW,
            "tile": TILE[1],
            "scores": scores(traces[RACERS["flash2"]]),
            "values": [float(x) for x in v[0, 0, :, 0]],
            "truth": float(fl.naive(q, k, v).out[0, 0, ROW, 0]),
        },
    }


def scores(trace: Trace) -> list[float]:
    """The scores of the row, as flash2 computes them tile by tile."""
    tile, row = divmod(ROW, TILE[0])
    found = [event.values["s"][row] for event in trace.events if event.step == "scores"]
    count = PROBLEM.key_tiles(fl.Tile(*TILE))
    return [float(x) for each in found[tile * count : (tile + 1) * count] for x in each]
