"""Writes the measured parts of docs/backward.md from the newest results: `python -m docs._site.backward`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs._site.agreed import agreed
from docs._site.blocks import replaced
from docs._site.controls import control
from docs._site.timed import device, link, timed
from flashlab.base.files import replace_file
from flashlab.measure import results
from simulator import DEVICES, Problem
from simulator.algorithms.flash3_backward_deterministic import pays

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "backward.md"
NAME, WIDE, ORDERED = "flash3_backward", "flash3_backward_wide", "flash3_backward_deterministic"
CLIMB = tuple(f"{NAME}_{n}" for n in (1, 2, 3))
PEERS = {
    "fa4": "FlashAttention-4", "cudnn": "cuDNN", "sdpa-flash": "SDPA's flash", "flash2_backward": "`flash2_backward`",
}  # fmt: skip
ALGORITHMS = (
    "standard_backward", "flash1_backward", "flash2_backward", "flash2_backward_deterministic", *CLIMB, NAME, ORDERED, WIDE,
)  # fmt: skip
RUNGS = {name: f"`{name}`" for name in ("flash2_backward", *CLIMB)}
ONE_ORDER = {name: f"`{name}`" for name in ("flash2_backward_deterministic", ORDERED)}
CONDITIONS = None, "16-heads"  # the latter: with 16 heads side by side in long sequences, too
OTHERS = {peer: PEERS[peer] for peer in PEERS if peer != "flash2_backward"}


def newest(kind: str, condition: str | None = None, *, algorithm: str = NAME) -> results.Result | None:
    """The newest result of a kind that an algorithm is part of, under this condition."""
    return results.latest(kind, ROOT / results.FOLDER, algorithm=algorithm, condition=condition)


def newest_on(device_name: str, algorithm: str = NAME) -> results.Result | None:
    """The newest times beside other libraries on a GPU of such a name. Of the drawn cells there are others."""
    found = results.find(ROOT / results.FOLDER, kind="bench", algorithm=algorithm)
    return next((r for r in reversed(found) if device_name in device(r) and r.content["condition"] in CONDITIONS), None)


def chosen(device_name: str) -> str:
    """The cells in which "auto" takes the kernel whose blocks take turns: how fast it is, and the other one."""
    either = [newest_on(device_name, name) for name in (ORDERED, NAME)]
    if None in either:
        return "This was not measured yet.\n"
    found = [
        {(row["head_dim"], row["causal"], row["length"]): row for row in of.data["rows"] if row["peer"] == "fa4"}
        for of in either
        if of
    ]
    rows: list[tuple[str, ...]] = []
    for dim, causal, length in found[0]:
        p = Problem(
            batch=16384 // length, heads=2048 // dim, len_q=length, head_dim=dim, dtype="bfloat16", causal=causal
        )
        if pays(p, DEVICES[device_name.lower()]):
            ratios = (f"{each[dim, causal, length]['ratio']:.2f} ×" for each in found)
            rows.append((str(dim), "causal" if causal else "full", f"{length:,}", *ratios))
    header = ("head dim", "mask", "tokens", f"`{ORDERED}`", f"`{NAME}`")
    links = ", ".join(link(of) for of in either if of)
    return f"{device_name}, beside FlashAttention-4 ({links}).\n\n{results.markdown_table(header, rows)}\n"


def counted(of: results.Result | None) -> str:
    """How many counts are equal, of which algorithms."""
    if of is None:
        return "This was not measured yet.\n"
    rows = [row for launch in of.data["launches"] for row in launch["rows"] if row["verdict"] in ("equal", "differs")]
    equal = sum(row["verdict"] == "equal" for row in rows)
    names = ", ".join(f"`{name}`" for name in of.algorithms)
    return (
        f"{names}, on an {device(of)}:\n{equal:,} of {len(rows):,} counts are equal in tile program, formula and "
        f"hardware counters, over\n{len(of.data['launches'])} launches ({link(of)}).\n"
    )


def odd(of: results.Result | None) -> str:
    """The drawn cells: which kernel ran, and how fast beside the peers that took the cell."""
    if of is None:
        return "This was not measured yet.\n"
    cells: dict[tuple[Any, ...], dict[str | None, Any]] = {}
    for row in of.data["rows"]:
        cells.setdefault((row["dtype"], row["head_dim"], row["causal"], row["shape"]), {})[row["peer"]] = row
    timed = {row["peer"] for row in of.data["rows"]}
    titles = {peer: title for peer, title in PEERS.items() if peer in timed}
    rows = [
        (
            shape, f"{dtype} × {dim}", "causal" if causal else "full", f"`{found[None]['kernel'] or NAME}`",
            f"{found[None]['tflops']:.0f}", *(f"{found[x]['ratio']:.2f} ×" if x in found else "–" for x in titles),
        )
        for (dtype, dim, causal, shape), found in cells.items()
    ]  # fmt: skip
    header = ("(heads, KV heads) and lengths", "dtype × head dim", "mask", "kernel", "TFLOP/s", *titles.values())
    return f"{device(of)} ({link(of)}).\n\n{results.markdown_table(header, rows)}\n"


def dropped(of: results.Result | None) -> str:
    """Both passes with dropout: how fast, and how many times its time the others take."""
    if of is None:
        return "This was not measured yet.\n"
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in of.data["rows"]:
        cells.setdefault((row["of"], row["head_dim"], row["causal"], row["length"]), {})[row["call"]] = row
    kernels = {"forward": "flash3", "backward": NAME}
    rows = [
        (
            passed, str(dim), "causal" if causal else "full", f"{length:,}", f"{found[kernels[passed]]['tflops']:.0f}",
            *(f"{found[x]['ratio']:.2f} ×" for x in ("without dropout", "cudnn", "sdpa-flash")),
        )
        for (passed, dim, causal, length), found in cells.items()
    ]  # fmt: skip
    header = ("pass", "head dim", "mask", "tokens", "TFLOP/s", "without dropout", "cuDNN", "SDPA's flash")
    return f"{device(of)}, dropout {of.data['rate']:g} ({link(of)}).\n\n{results.markdown_table(header, rows)}\n"


def ordered(of: results.Result | None) -> str:
    """How much longer the kernel takes whose blocks take turns."""
    if of is None:
        return "This was not measured yet.\n"
    cells = [row for row in of.data["rows"] if row["peer"] == ORDERED]
    by = {(row["head_dim"], row["causal"], row["length"]): row["ratio"] for row in cells}
    lengths = sorted({length for *_, length in by})
    rows = [
        (str(dim), "causal" if causal else "full", *(f"{by[dim, causal, length] - 1:.1%}" for length in lengths))
        for dim, causal in dict.fromkeys((dim, causal) for dim, causal, _ in by)
    ]
    header = ("head dim", "mask", *(f"{length:,} tokens" for length in lengths))
    return f"{device(of)} ({link(of)}).\n\n{results.markdown_table(header, rows)}\n"


def blocks() -> dict[str, str]:
    return {
        "counted": counted(newest("counters")),
        "timed": timed(newest_on("H200"), OTHERS),
        "h100": timed(newest_on("H100"), OTHERS),
        "flash2": timed(newest("bench", algorithm="flash2_backward"), {"sdpa-flash": PEERS["sdpa-flash"]}),
        "fa3": timed(newest("bench", "fa3"), {"fa3-wheel": "FlashAttention-3", "cudnn": "cuDNN"}),
        "wide": timed(newest("bench", algorithm=WIDE), {peer: PEERS[peer] for peer in PEERS if peer != "fa4"}),
        "dropped": dropped(results.latest("dropout", ROOT / results.FOLDER)),
        "control": control("mbarrier-of-a-warp"),
        "odd": odd(newest("bench", "odd")),
        "auto": "\n".join(chosen(name) for name in ("H200", "H100")),
        "rungs": timed(newest("ladder"), RUNGS),
        "orders": timed(newest("ladder"), ONE_ORDER),
        "ordered": ordered(newest("ladder")),
        "agreed": agreed(ALGORITHMS),
    }


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "backward", blocks()))
