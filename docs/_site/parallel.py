"""Writes the tables of docs/several-gpus.md, by formula and by timeline: `python -m docs._site.parallel`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from docs._site.blocks import replaced
from flashlab import Problem, parallel
from flashlab.base.files import replace_file
from flashlab.views import figures

PAGE = Path(__file__).resolve().parents[1] / "several-gpus.md"
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


BLOCKS = {"sent": sent, "million": million, "rates": rates}


def blocks() -> dict[str, str]:
    return {name: write() for name, write in BLOCKS.items()}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "parallel", blocks()))
