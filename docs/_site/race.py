"""The data of docs/race.md, from the simulator. docs/_static/race.js plays it.

`pages.write` makes the file at each build of the site. The page shows a small problem, on which both algorithms are run
step by step, and one row of its scores.
"""

from __future__ import annotations

import json
from typing import Any

import flashlab as fl
from simulator.trace import Trace

PROBLEM = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16")
TILE = (16, 16)
ROW = 22
"""A query whose maximum rises with every tile of keys."""
RACERS = {"standard": "Standard attention", "flash2": "FlashAttention-2"}


def script() -> str:
    """The data as JavaScript. A page that is opened as a file may load that, and no JSON."""
    return f"const RACE = {json.dumps(data(), ensure_ascii=False, separators=(',', ':'))};\n"


def data() -> dict[str, Any]:
    """What the page shows: each algorithm's requests of HBM in their order, and a row with its truth."""
    q, k, v = fl.random_inputs(PROBLEM, seed=0)
    traces: dict[str, Trace] = {}
    for name in RACERS:
        trace = fl.simulate(name, q, k, v, tile=TILE, trace=(0, 0)).trace
        assert trace is not None
        traces[name] = trace
    return {
        "problem": f"{PROBLEM.len_q} queries and keys, head dim {PROBLEM.head_dim}, {PROBLEM.dtype}, tiles of 16 × 16",
        "programs": [{"name": name, "title": title, "moves": moves(traces[name])} for name, title in RACERS.items()],
        "row": {
            "query": ROW,
            "tile": TILE[1],
            "scores": scores(traces["flash2"]),
            "values": [float(x) for x in v[0, 0, :, 0]],
            "truth": float(fl.naive(q, k, v).out[0, 0, ROW, 0]),
        },
    }


def moves(trace: Trace) -> list[tuple[str, str, int]]:
    """What a program requests of HBM, in its order: the step, the tensor and the bytes."""
    return [
        (event.step, each.tensor, n)
        for event in trace.events
        for each in event.transfers
        for what, n in each.nbytes.items()
        if what.startswith("hbm")
    ]


def scores(trace: Trace) -> list[float]:
    """The scores of the row, as flash2 computes them tile by tile."""
    tile, row = divmod(ROW, TILE[0])
    found = [event.values["s"][row] for event in trace.events if event.step == "scores"]
    count = PROBLEM.key_tiles(fl.Tile(*TILE))
    return [float(x) for each in found[tile * count : (tile + 1) * count] for x in each]
