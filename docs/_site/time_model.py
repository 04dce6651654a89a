"""The tables and pictures of docs/time.md, from the data files: `python -m docs._site.time_model` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import flashlab as fl
from docs._site.blocks import replaced
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.views.plots import save
from simulator.catalogue import ladder
from simulator.names import DeviceName
from simulator.operations.backward import BACKWARD
from simulator.time import rates
from studies import blind

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "time.md"
COLUMNS = 10
"""Of lengths in a table, at most."""
DEVICE: DeviceName = "h200"
LADDER = tuple(ladder("flash3", "flash3_1"))
PREDICTION_FP8 = "fp8_h200_2026-11-21.jsonl"
PREDICTIONS_OF_GRADIENTS: Mapping[DeviceName, tuple[str, ...]] = {
    "h200": ("backward_h200_2026-11-27.jsonl", "climb_h200_2026-11-27.jsonl"),
    "h100": ("climb_h100_2026-11-27.jsonl",),
}
"""By device. What a later file says of a cell is of the kernel as it is now."""


# -- the model beside what was measured ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A cell predicted and measured, in milliseconds. `source`: the kind of result that measured it."""

    cell: blind.Cell
    predicted: float
    measured: float
    source: str

    @property
    def error(self) -> float:
        """Over 0 where the prediction is too long."""
        return self.predicted / self.measured - 1


def measured() -> list[tuple[blind.Cell, float, str]]:
    """What the ladder and the benchmark of flash2 measured of kernels that the model knows, by kind of result."""
    found: list[tuple[blind.Cell, float, str]] = []
    for result in benchmarks():
        for row in result.data["rows"]:
            name = row["peer"] or result.data["algorithm"]
            if name in fl.CATALOGUE:
                cell = blind.Cell(name, row["dtype"], row["head_dim"], row["causal"], row["length"])
                found.append((cell, row["milliseconds"], result.kind))
    eight = results.latest("fp8", ROOT / results.FOLDER, algorithm=blind.FP8, device=DEVICE)
    if eight is None or not eight.of_today(blind.FP8):
        return found
    for row in eight.data["speed"]:
        cell = blind.Cell(blind.FP8, blind.EIGHT, row["head_dim"], row["causal"], row["length"])
        found.append((cell, cell.tera / row["tflops"] * 1e3, eight.kind))
    return found


def benchmarks() -> list[results.Result]:
    """The newest benchmark of flash2, and of the ladder."""
    found = [
        results.latest(kind, ROOT / results.FOLDER, algorithm=algorithm, device=DEVICE)
        for kind, algorithm in (("bench", "flash2"), ("ladder", "flash3"))
    ]
    assert None not in found, f"flash2's benchmark or the ladder isn't in {results.FOLDER}"
    return [result for result in found if result is not None]


def beside() -> list[Beside]:
    """The model as it is now beside what was measured."""
    return [Beside(cell, cell.predicted(), time, source) for cell, time, source in measured()]


def gradients(device: DeviceName = DEVICE, without: Collection[str] = ()) -> list[Beside]:
    """The model as it is now beside what was measured of the backward passes on a device, `without` some of them."""
    timed = _timed_gradients(device).items()
    return [Beside(cell, cell.predicted(device), *found) for cell, found in timed if cell.algorithm not in without]


def blind_gradients(device: DeviceName = DEVICE) -> list[Beside]:
    """The backward passes as they were predicted before the schedules' author opened their measurements, beside these."""
    before = {cell: time for file in PREDICTIONS_OF_GRADIENTS[device] for cell, time in blind.said(file).items()}
    return [Beside(cell, before[cell], *found) for cell, found in _timed_gradients(device).items() if cell in before]


def _timed_gradients(device: DeviceName) -> dict[blind.Cell, tuple[float, str]]:
    """Milliseconds by benchmarks and the ladder, the newest ones of each cell, and by which kind of result. Those of older kernels,
    which the model no longer has, don't count."""
    found: dict[blind.Cell, tuple[float, str]] = {}
    for kind in ("ladder", "bench"):
        for result in results.find(ROOT / results.FOLDER, kind=kind, device=device):
            if result.condition is not None:
                continue
            for row in result.data["rows"]:
                name = row.get("kernel") or row["peer"] or result.data["algorithm"]
                known = name in fl.CATALOGUE and fl.CATALOGUE[name].operation is BACKWARD
                if known and result.of_today(name):
                    cell = blind.Cell(name, row["dtype"], row["head_dim"], row["causal"], row["length"])
                    found[cell] = row["milliseconds"], kind
    return found


def blind_ladder() -> list[Beside]:
    """The rungs, and flash3_fp8, as they were predicted before their measurement was made or looked at, beside it."""
    before = {**blind.said("ladder_h200_2026-11-21.jsonl"), **blind.said(PREDICTION_FP8)}
    return [
        Beside(cell, before[cell], time, source)
        for cell, time, source in measured()
        if cell in before and source != "bench"
    ]


def beside_predictions(result: results.Result) -> list[Beside]:
    """What `measure` measured, beside what had been predicted before."""
    return [
        Beside(blind.cell_of(row), row["predicted"], row["milliseconds"], result.kind) for row in result.data["rows"]
    ]


def mean_error(cells: Iterable[Beside]) -> float:
    """The mean absolute error, relative to what was measured."""
    return statistics.fmean(abs(cell.error) for cell in cells)


# -- the page ---------------------------------------------------------------------------------------------------------


def errors() -> str:
    """The errors by kernel and length, and how the blind predictions did."""
    rows, first = beside(), blind_ladder()
    lines = ["| kernel | cells | 1k | 4k | 16k | all | bias | predicted blind |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    groups = {name: [r for r in rows if r.cell.algorithm == name] for name in ("flash2", *LADDER, blind.FP8)}
    if not groups[blind.FP8]:
        del groups[blind.FP8]  # predicted, and not measured yet
    groups["the ladder"] = [r for name in LADDER for r in groups[name]]
    for name, group in groups.items():
        members = LADDER if name == "the ladder" else (name,)
        before = [r for r in first if r.cell.algorithm in members]
        parts = [mean_error(r for r in group if r.cell.length == n) for n in (1024, 4096, 16384)]
        shown = [f"{x:.1%}" for x in (*parts, mean_error(group))]
        bias = statistics.fmean(r.error for r in group)
        lines.append(
            f"| {name} | {len(group)} | {' | '.join(shown)} | {bias:+.1%} | "
            f"{f'{mean_error(before):.1%}' if before else ''} |"
        )
    return "\n".join(lines) + "\n"


def backward() -> str:
    """The errors of the backward passes, by kernel, head dim and device, and how the blind predictions did.

    Of an H100 there are those kernels that nobody has timed on an H200 as they are now.
    """
    lines = [
        "| kernel | head dim | GPU | cells | 1k | 4k | 16k | all | bias | predicted blind |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    shown_before = set[str]()
    for device in (DEVICE, "h100"):
        first = blind_gradients(device)
        groups: dict[tuple[str, int], list[Beside]] = {}
        for r in gradients(device, without=shown_before):
            groups.setdefault((r.cell.algorithm, r.cell.head_dim), []).append(r)
        shown_before |= {name for name, _ in groups}
        for (name, dim), group in sorted(groups.items()):
            before = [r for r in first if (r.cell.algorithm, r.cell.head_dim) == (name, dim)]
            parts = [[r for r in group if r.cell.length == n] for n in (1024, 4096, 16384)]
            shown = [f"{mean_error(part):.1%}" if part else "" for part in (*parts, group, before)]
            bias = statistics.fmean(r.error for r in group)
            lines.append(
                f"| {name} | {dim} | {device.upper()} | {len(group)} | {' | '.join(shown[:4])} | {bias:+.1%} | {shown[4]} |"
            )
    return "\n".join(lines) + "\n"


def blind_tables() -> str:
    """How the predictions of cells that nobody had measured did, a table a measurement."""
    return "\n".join(map(_blind_table, results.find(ROOT / results.FOLDER, kind="blind", device=DEVICE)))


def _blind_table(result: results.Result) -> str:
    rows = beside_predictions(result)
    lengths = sorted({r.cell.length for r in rows})
    up_to = ""
    if len(lengths) > COLUMNS:  # a seed drew them, and hardly one comes twice
        lengths, up_to = [2**n for n in range((lengths[0] - 1).bit_length(), (lengths[-1] - 1).bit_length() + 1)], "≤ "
    sizes = " | ".join(up_to + (f"{n // 1024}k" if n % 1024 == 0 else str(n)) for n in lengths)
    lines = [
        f"`{Path(result.data['prediction']).with_suffix('.jsonl')}`, measured by `{result.path.name}`:",
        "",
        f"| kernel | cells | {sizes} | all | bias |",
        "|---|--:|" + len(lengths) * "--:|" + "--:|--:|",
    ]
    groups = {
        name: [r for r in rows if r.cell.algorithm == name] for name in dict.fromkeys(r.cell.algorithm for r in rows)
    }
    if rungs := [r for name in LADDER for r in groups.get(name, [])]:
        groups["the ladder"] = rungs
    for name, group in groups.items():
        parts = [[r for r in group if below < r.cell.length <= n] for below, n in pairwise([0, *lengths])]
        shown = [f"{mean_error(part):.1%}" if part else "" for part in (*parts, group)]
        bias = statistics.fmean(r.error for r in group)
        lines.append(f"| {name} | {len(group)} | {' | '.join(shown)} | {bias:+.1%} |")
    return "\n".join(lines) + "\n"


def figures() -> dict[str, float]:
    """What the constants of simulator/time/rates.py were measured to be, by name."""
    machine = results.latest("rates", ROOT / results.FOLDER, device=DEVICE)
    assert machine is not None, f"no rates in {results.FOLDER}"
    rows, peak = machine.data["rows"], 4096.0

    def of(what: str, key: str = "value", warps: int | None = None) -> float:
        return next(row[key] for row in rows if row["what"] == what and row.get("warps") == warps)

    box, eight = 128 * 128 / of("boxes_of_one"), 8 * 2 * 64 * 128 * 16 / peak
    ss, rs = (of(f"products_128_{where}", "clocks", 4) - eight for where in ("sram", "registers"))
    beside: list[float] = []
    products: list[float] = []
    for what, clocks, latency in (
        ("128_sram", eight, ss),
        ("64_registers", eight / 2, rs),
        ("128_registers", eight, rs),
    ):
        for warps in (4, 8):
            name = f"exponentials_beside_{what}"
            beside.append(128 * warps / of(name, warps=warps))
            products.append((of(name, "products", warps) - latency) / clocks)
    compared = [of(f"{what}_beside_products") / 0.5 for what in ("maximum", "maximum_of_three")]
    # a file from before the tool measured them lacks reductions
    red = {name: of(what) for name, what in _REDUCTIONS.items() if any(row["what"] == what for row in rows)}
    return {
        **red, **clock(), "VECTOR": statistics.fmean(beside), "PRODUCTS": statistics.fmean(products),
        "COMPARED": statistics.fmean(compared),
        "ALONE": statistics.fmean(128 * warps / of("exponentials", warps=warps) for warps in (4, 8, 12)),
        "LAUNCH": of("empty_launch") * 1e-6, "TURNOVER": of("block_turnover"), "TURN": of("turn"), "DEPENDENT": of("dependent"),
        "SRAM_BYTES": of("shared_bandwidth"), "SRAM_LATENCY": of("shared_latency"), "EXP": of("exponential"),
        "L2_LATENCY": of("l2_latency"), "DRAM_LATENCY": of("dram_latency"),
        "L2_BYTES": statistics.fmean((of("l2_bandwidth_of_all"), of("boxes_of_all"))),
        "BOX_L2_LATENCY": of("box_latency") - box, "BOX_DRAM_LATENCY": of("box_latency_dram") - box,
        "SS_LATENCY": ss, "RS_LATENCY": rs, "MMA_SHARE": of("warp_products", warps=8) / peak,
        "MMA_ALONE": of("warp_products", warps=4) / peak,
        "DRAM_SHARE": statistics.fmean(y["copy"] for r in benchmarks() for y in r.data["yardsticks"]) * 1e9
        / fl.DEVICES[DEVICE].bandwidth,
    }  # fmt: skip


_REDUCTIONS = {"RED_BYTES": "reductions_of_all", "RED_DRAM_BYTES": "reductions_of_all_from_dram"}


@cache
def clock() -> dict[str, float]:
    """The plane through the clocks that SMs counted, over the loads that the model has in these launches."""
    machine = results.latest("rates", ROOT / results.FOLDER, device=DEVICE)
    assert machine is not None, f"no rates in {results.FOLDER}"
    counted = [row["gigahertz"] * 1e9 for row in machine.data["clocks"]]
    boost = rates.Rates(fl.DEVICES[DEVICE], "bfloat16").boost
    loads = np.array([_load(row) for row in machine.data["clocks"]])
    plane = np.linalg.lstsq(loads, np.array(counted) / boost, rcond=None)[0]
    return dict(zip(("AT_REST", "DRAWN", "FLOAT16", "MOVED"), map(float, plane), strict=True))


def _load(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """One, and what lowers the clock in a launch: the tensor cores' load, that in float16, and that of the way to the L2."""
    cell = blind.cell_of(row)
    busy = fl.timeline(cell.algorithm, cell.problem, device=DEVICE).longest.utilisation
    return 1.0, -busy["tensor"], -busy["tensor"] * (cell.dtype == "float16"), -busy["copy"]


def constants() -> str:
    """A table of them, and what the model has."""
    shown = {**vars(rates), **{name: getattr(rates, name)[9] for name in ("MMA_SHARE", "MMA_ALONE")}}
    lines = ["| constant | measured | in the model |", "|---|--:|--:|"]
    lines += [f"| `{name}` | {value:.3g} | {shown[name]:g} |" for name, value in figures().items()]
    return "\n".join(lines) + "\n"


def picture() -> Any:
    """Prediction against measurement, a panel a kernel, TFLOP/s."""
    from flashlab.views.plots import Picture

    rows = beside()
    names = ("flash2", *LADDER)
    figure: Any = Picture(figsize=(12.5, 3.3), layout="constrained")
    colours = {64: "#D55E00", 128: "#0072B2", 256: "#009E73"}
    for ax, name in zip(figure.subplots(1, len(names), sharex=True, sharey=True), names, strict=True):
        for r in (r for r in rows if r.cell.algorithm == name):
            size = {1024: 16, 4096: 36, 16384: 64}[r.cell.length]
            face = colours[r.cell.head_dim] if r.cell.causal else "none"
            ax.scatter(
                r.cell.tera / r.measured * 1e3,
                r.cell.tera / r.predicted * 1e3,
                s=size,
                edgecolors=colours[r.cell.head_dim],
                facecolors=face,
                linewidths=1.2,
            )
        ax.plot([150, 900], [150, 900], color="#8C8C8C", linewidth=0.8)
        ax.fill_between([150, 900], [132, 792], [168, 1008], color="#EDEDED", linewidth=0, zorder=0)
        ax.set(title=name, xlim=(200, 880), ylim=(200, 880), xlabel="measured, TFLOP/s", aspect="equal")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("predicted, TFLOP/s")
    for dim, colour in colours.items():
        figure.axes[0].scatter([], [], color=colour, label=f"head dim {dim}")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


BLOCKS = {"errors": errors, "gradients": backward, "blind": blind_tables, "constants": constants}
"""What of docs/time.md is drawn from data."""


if __name__ == "__main__":
    save(picture(), PICTURES / "time_errors.png")
    shown = blind.Cell("flash3", "bfloat16", 128, False, 4096)
    save(fl.timeline(shown.algorithm, shown.problem, device=DEVICE).plot(), PICTURES / "time_flash3.png")
    replace_file(
        PAGE,
        replaced(PAGE.read_text(encoding="utf-8"), "time_model", {name: block() for name, block in BLOCKS.items()}),
    )
