"""Writes the tables of docs/several-gpus.md, by formula, by timeline and from results: `python -m docs._site.parallel`."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs._site.blocks import replaced
from docs._site.timed import device, link
from flashlab import Problem, parallel
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.views import figures
from studies.clients import LAST

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-gpus.md"
SENT = Problem(batch=1, heads=32, kv_heads=8, len_q=131_072, head_dim=128, dtype="bfloat16", causal=True)
MILLION = Problem(batch=1, heads=64, kv_heads=8, len_q=1_048_576, head_dim=128, dtype="bfloat16", causal=True)
HOST = 8
"""Ranks of a host."""
SCHEMES = (("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("ulysses", "zigzag"))


def sent() -> str:
    """What a rank of eight sends, by scheme and by the number of KV heads."""
    lines = [
        "| scheme | forward, 8 KV heads | and back | forward, 2 KV heads | and back |",
        "| --- | --- | --- | --- | --- |",
    ]
    for scheme in ("ring", "all_gather", "ulysses", "heads"):
        cells = list[str]()
        for kv_heads in (8, 2):
            if scheme == "heads" and kv_heads < 8:
                cells += ["not possible"] * 2
                continue
            for backward in (False, True):
                counted = parallel.count(scheme, SENT.replace(kv_heads=kv_heads), ranks=8, backward=backward)
                cells.append(figures.nbytes(max(counted.sent)))
        lines.append(f"| `{scheme}` | {' | '.join(cells)} |")
    said = f"*{figures.problem(SENT)}, 8 ranks: bytes that each rank sends, by formula.*"
    return "\n".join(lines) + f"\n\n{said}\n"


def million() -> str:
    """A million tokens on eight GPUs of a host and on 64 of eight hosts."""
    rates = parallel.rates("h100", per_host=HOST)
    lines = [
        "| ranks | scheme | rows | a rank sends | forward | of one GPU's rate | and back | of one GPU's rate |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    alone = [
        parallel.timeline(parallel.count("heads", MILLION, ranks=1, algorithm="flash3", backward=back), rates).seconds
        for back in (False, True)
    ]
    for ranks in (HOST, 8 * HOST):
        for scheme, layout in SCHEMES:
            cells = list[str]()
            for back, one in zip((False, True), alone, strict=True):
                counted = parallel.count(scheme, MILLION, ranks=ranks, layout=layout, algorithm="flash3", backward=back)
                found = parallel.timeline(counted, rates)
                cells += [] if back else [figures.nbytes(max(counted.sent))]
                cells += [f"{found.seconds:.3g} s", f"{one / ranks / found.seconds:.2f}"]
            lines.append(f"| {ranks} | `{scheme}` | {layout} | {' | '.join(cells)} |")
    said = f"*{figures.problem(MILLION)}: predicted, not measured. Eight ranks are a host.*"
    return "\n".join(lines) + f"\n\n{said}\n"


def rates() -> str:
    """The rates at which times are predicted, and where they are from."""
    known = parallel.rates("h100")
    lines = ["| what | rate |", "| --- | --- |"]
    for name, value in (
        ("a forward pass", f"{known.forward / 1e12:.0f} TFLOP/s"),
        ("a backward pass", f"{known.backward / 1e12:.0f} TFLOP/s"),
        ("HBM", f"{known.reading / 1e9:,.0f} GB/s"),
        ("a launch", f"{known.launch * 1e6:.1f} µs"),
        ("the link, each way", f"{known.link / 1e9:.0f} GB/s"),
        ("a message on the link", f"{known.latency * 1e6:.0f} µs"),
        ("the network, each way", f"{known.network / 1e9:.0f} GB/s"),
        ("a message on the network", f"{known.network_latency * 1e6:.0f} µs"),
    ):
        lines.append(f"| {name} | {value} |")
    told = re.split(r"; (?=(?:reading|link|network):)", known.source)
    sources = "\n".join(
        textwrap.fill(f"- {each}.", 100, subsequent_indent="  ", break_on_hyphens=False) for each in told
    )
    return "\n".join(lines) + f"\n\nWhere they are from:\n\n{sources}\n"


def newest(subject: str) -> list[results.Result]:
    """The newest result of a part, of each condition: the fewest GPUs come first."""
    found = (r for r in results.find(ROOT / results.FOLDER, kind="parallel") if r.subject == subject)
    return sorted(
        {r.condition: r for r in found}.values(), key=lambda r: (r.data["ranks"], r.data["proto"] != "Simple")
    )


def measured(subject: str, table: Callable[[Mapping[str, Any]], str]) -> str:
    """Tables of a part, each with its machine and command."""
    told = [
        f"{table(of.data)}\n\n*{of.data['ranks']} GPUs, {device(of)}, {of.content['date'][:10]}:"
        f" `{of.content['command']}` ({link(of)}).*\n"
        for of in newest(subject)
    ]
    return "\n".join(told) or "This was not measured yet.\n"


def speeds(data: Mapping[str, Any]) -> str:
    """TFLOP/s of one GPU by contender, way and length; in brackets what the timeline predicted."""
    cells = {(r["contender"], r["backward"], r["length"]): r for r in data["speeds"]}
    names, lengths = (list(dict.fromkeys(r[x] for r in data["speeds"])) for x in ("contender", "length"))
    ways = [(way, length) for way in (False, True) for length in lengths]

    def cell(name: str, way: bool, length: int) -> str:
        row = cells.get((name, way, length))
        if row is None:
            return "–"
        told = row.get("predicted")
        return f"{row['tflops']:.0f}" + (f" ({row['tflops'] * row['ms'] / told:.0f})" if told else "")

    header = ["contender", *(f"{length // 1024}k{', both ways' if way else ''}" for way, length in ways)]
    return results.markdown_table(header, [[name, *(cell(name, *each) for each in ways)] for name in names])


def link_bytes(data: Mapping[str, Any]) -> str:
    """Bytes by formula and by the counters, of the rank that is furthest off."""
    cells: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for row in data["bytes"]:
        cells.setdefault((row["contender"], row["backward"]), []).append(row)
    lines = [
        (f"`{name}`", "both ways" if backward else "forward", f"{worst['formula']:,}", f"{worst['tx']:,}",
         f"{100 * (worst['tx'] / worst['formula'] - 1):+.3f} %" if worst["formula"] else "–")
        for (name, backward), rows in cells.items()
        if (worst := max(rows, key=lambda r: abs((r["tx"] or 0) - r["formula"])))["tx"] is not None
    ]  # fmt: skip
    proto = data["proto"] or "its own choice"
    table = results.markdown_table(["scheme", "way", "formula", "NVLink's counters", "off by"], lines)
    return f"NCCL's protocol: {proto}. Bytes that a rank sent in {data['bytes'][0]['calls']} calls:\n\n{table}"


def decodes(data: Mapping[str, Any]) -> str:
    """Milliseconds of a query, and the share of one GPU's."""
    rows = [
        (r["contender"], f"{r['keys']:,}", f"{r['heads']}, {r['kv_heads']}", f"{r['ms']:.3f}",
         "" if r["share"] is None else f"{r['share']:.2f}")
        for r in data["decodes"]
    ]  # fmt: skip
    return results.markdown_table(["contender", "keys", "heads, of K and V", "ms", "× one GPU"], rows)


def rules(data: Mapping[str, Any]) -> str:
    """The largest error over what the rule allows."""
    rows = [(r["contender"], *(f"{r['shares'][x]:.2f}" for x in ("out", "dq", "dk", "dv"))) for r in data["rules"]]
    return results.markdown_table(["contender", "out", "dQ", "dK", "dV"], rows)


def trainings(data: Mapping[str, Any]) -> str:
    """The loss at the end by rows on all ranks, and on one rank."""

    def end(losses: Sequence[float]) -> str:
        return f"{statistics.mean(losses[-LAST:]):.4f}"

    rows = [(r["contender"], str(r["steps"]), end(r["losses"]), end(r["alone"])) for r in data["trainings"]]
    return results.markdown_table(["contender", "steps", f"mean loss of the last {LAST}", "on one GPU"], rows)


BLOCKS = {
    "sent": sent,
    "million": million,
    "rates": rates,
    "speed": partial(measured, "speed", speeds),
    "bytes": partial(measured, "bytes", link_bytes),
    "decode": partial(measured, "decode", decodes),
    "rule": partial(measured, "rule", rules),
    "train": partial(measured, "train", trainings),
}


def blocks() -> dict[str, str]:
    return {name: write() for name, write in BLOCKS.items()}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "parallel", blocks()))
