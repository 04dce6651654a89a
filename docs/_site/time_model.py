"""The tables and pictures of docs/time.md, from the data files: `python -m docs._site.time_model` writes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import flashlab as fl
from docs._site.blocks import replaced
from flashlab.files import replace_file
from flashlab.measure import blind, results
from flashlab.views.plots import save
from simulator.time import rates

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "time.md"
COLUMNS = 10
"""Of lengths in a table, at most."""


def errors() -> str:
    """The errors by kernel and length, and how the blind predictions did."""
    rows, first = blind.beside(), blind.blind_ladder()
    lines = ["| kernel | cells | 1k | 4k | 16k | all | bias | predicted blind |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    groups = {name: [r for r in rows if r.cell.algorithm == name] for name in ("flash2", *blind.LADDER, blind.FP8)}
    if not groups[blind.FP8]:
        del groups[blind.FP8]  # predicted, and not measured yet
    groups["the ladder"] = [r for name in blind.LADDER for r in groups[name]]
    for name, group in groups.items():
        members = blind.LADDER if name == "the ladder" else (name,)
        before = [r for r in first if r.cell.algorithm in members]
        parts = [blind.mean_error(r for r in group if r.cell.length == n) for n in (1024, 4096, 16384)]
        shown = [f"{x:.1%}" for x in (*parts, blind.mean_error(group))]
        bias = statistics.fmean(r.error for r in group)
        lines.append(
            f"| {name} | {len(group)} | {' | '.join(shown)} | {bias:+.1%} | "
            f"{f'{blind.mean_error(before):.1%}' if before else ''} |"
        )
    return "\n".join(lines) + "\n"


def gradients() -> str:
    """The errors of the backward passes, by kernel, head dim and device, and how the blind predictions did.

    Of an H100 there are those kernels that nobody has timed on an H200 as they are now.
    """
    lines = [
        "| kernel | head dim | GPU | cells | 1k | 4k | 16k | all | bias | predicted blind |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    shown_before = set[str]()
    for device in (blind.DEVICE, "h100"):
        first = blind.blind_gradients(device)
        groups: dict[tuple[str, int], list[blind.Beside]] = {}
        for r in blind.gradients(device, without=shown_before):
            groups.setdefault((r.cell.algorithm, r.cell.head_dim), []).append(r)
        shown_before |= {name for name, _ in groups}
        for (name, dim), group in sorted(groups.items()):
            before = [r for r in first if (r.cell.algorithm, r.cell.head_dim) == (name, dim)]
            parts = [[r for r in group if r.cell.length == n] for n in (1024, 4096, 16384)]
            shown = [f"{blind.mean_error(part):.1%}" if part else "" for part in (*parts, group, before)]
            bias = statistics.fmean(r.error for r in group)
            lines.append(
                f"| {name} | {dim} | {device.upper()} | {len(group)} | {' | '.join(shown[:4])} | {bias:+.1%} | {shown[4]} |"
            )
    return "\n".join(lines) + "\n"


def blind_tables() -> str:
    """How the predictions of cells that nobody had measured did, a table a measurement."""
    return "\n".join(map(_blind_table, results.find(ROOT / results.FOLDER, kind="blind", device=blind.DEVICE)))


def _blind_table(result: results.Result) -> str:
    rows = blind.blind(result)
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
    if ladder := [r for name in blind.LADDER for r in groups.get(name, [])]:
        groups["the ladder"] = ladder
    for name, group in groups.items():
        parts = [[r for r in group if below < r.cell.length <= n] for below, n in pairwise([0, *lengths])]
        shown = [f"{blind.mean_error(part):.1%}" if part else "" for part in (*parts, group)]
        bias = statistics.fmean(r.error for r in group)
        lines.append(f"| {name} | {len(group)} | {' | '.join(shown)} | {bias:+.1%} |")
    return "\n".join(lines) + "\n"


def figures() -> dict[str, float]:
    """What the constants of simulator/time/rates.py were measured to be, by name."""
    machine = results.latest("rates", ROOT / results.FOLDER, device=blind.DEVICE)
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
        "DRAM_SHARE": statistics.fmean(y["copy"] for r in blind.benchmarks() for y in r.data["yardsticks"]) * 1e9
        / fl.DEVICES[blind.DEVICE].bandwidth,
    }  # fmt: skip


_REDUCTIONS = {"RED_BYTES": "reductions_of_all", "RED_DRAM_BYTES": "reductions_of_all_from_dram"}


@cache
def clock() -> dict[str, float]:
    """The plane through the clocks that SMs counted, over the loads that the model has in these launches."""
    machine = results.latest("rates", ROOT / results.FOLDER, device=blind.DEVICE)
    assert machine is not None, f"no rates in {results.FOLDER}"
    counted = [row["gigahertz"] * 1e9 for row in machine.data["clocks"]]
    boost = rates.Rates(fl.DEVICES[blind.DEVICE], "bfloat16").boost
    loads = np.array([_load(row) for row in machine.data["clocks"]])
    plane = np.linalg.lstsq(loads, np.array(counted) / boost, rcond=None)[0]
    return dict(zip(("AT_REST", "DRAWN", "FLOAT16", "MOVED"), map(float, plane), strict=True))


def _load(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """One, and what lowers the clock in a launch: the tensor cores' load, that in float16, and that of the way to the L2."""
    cell = blind.cell_of(row)
    busy = fl.timeline(cell.algorithm, cell.problem, device=blind.DEVICE).longest.utilisation
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

    rows = blind.beside()
    names = ("flash2", *blind.LADDER)
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


BLOCKS = {"errors": errors, "gradients": gradients, "blind": blind_tables, "constants": constants}
"""What of docs/time.md is drawn from data."""


if __name__ == "__main__":
    save(picture(), PICTURES / "time_errors.png")
    shown = blind.Cell("flash3", "bfloat16", 128, False, 4096)
    save(fl.timeline(shown.algorithm, shown.problem, device=blind.DEVICE).plot(), PICTURES / "time_flash3.png")
    replace_file(
        PAGE,
        replaced(PAGE.read_text(encoding="utf-8"), "time_model", {name: block() for name, block in BLOCKS.items()}),
    )
