"""Writes the generated parts of docs/flash3.md: tables, lists and docs/pictures/flash3_*.svg.

They come from the files of docs/results and from the header comments of the kernels. `docs._site.flash3_binds` writes
those that say what binds. `python -m docs._site.flash3` writes them all, and a test holds the page to them.
"""

from __future__ import annotations

import functools
import io
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import kernels_cu
from docs._site import features as asked
from docs._site import flash3_binds as climb_binds
from docs._site import kinds
from docs._site.blocks import replaced
from docs._site.figures import STYLE
from docs._site.flash3_binds import prose
from docs._site.timed import age
from flashlab.base.files import replace_file
from flashlab.measure import results, speed
from simulator.catalogue import get, ladder
from studies.timed import TILES, by_cell

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / results.FOLDER
PAGE = ROOT / "docs" / "flash3.md"
PICTURES = ROOT / "docs" / "pictures"
DEVICE = "h200"
OTHER_DEVICE = "h100"
"""The GPU of a check beside."""

BELOW = {name: str(get(name).follows) for name in ladder("flash3", "flash3_1")}
"""Each rung, with the rung below it."""
CLIMB = ("flash2", *BELOW)
DIMS, MASKS, LENGTHS = (64, 128, 256), (False, True), (1024, 4096, 16384)
COLUMNS = [f"{'causal' if causal else 'full'} {length // 1024}k" for causal in MASKS for length in LENGTHS]

Row = Mapping[str, Any]
Speeds = Mapping[tuple[str, int, bool, int], Row]
"""Rows of a benchmark by kernel, head dim, mask and length."""


def result(kind: str, algorithm: str | None, condition: str | None = None, *, device: str = DEVICE) -> results.Result:
    """The newest result of a kind on a device. Raises `FileNotFoundError` without one."""
    found = results.latest(kind, RESULTS, algorithm=algorithm, device=device, condition=condition)
    if found is None:
        raise FileNotFoundError(f"no {kind} of {algorithm or 'anything'} in {results.FOLDER}")
    return found


def speeds(of: results.Result) -> Speeds:
    """A benchmark's rows."""
    name = of.data["algorithm"]
    return {(row["peer"] or name, row["head_dim"], row["causal"], row["length"]): row for row in of.data["rows"]}


def matmul(of: results.Result) -> float:
    """TFLOP/s of the matrix product that a benchmark timed in the same run."""
    return of.data["yardsticks"][0]["matmul"]


# -- the blocks of the page -----------------------------------------------------------------------------------------


def summary() -> str:
    """A paragraph: from which speed to which the climb leads."""
    ladder, peers = result("ladder", "flash3"), result("bench", "flash3")
    cell = (128, False, 16384)
    first, last, again = (
        speeds(of)[name, *cell]["tflops"] for of, name in ((ladder, "flash2"), (ladder, "flash3"), (peers, "flash3"))
    )
    worst = min(min(row["ratio_fa4"], row["ratio_cudnn"]) for row in cells())
    return prose(
        f"From **{first:.0f}** TFLOP/s to **{last:.0f}**: this is the way at head dim 128 and 16,384 tokens without a mask. A "
        f"matrix product of that run reached {matmul(ladder):.0f}. In another run, beside others' kernels ({again:.0f}; matrix "
        f"product {matmul(peers):.0f}), `flash3` was at least {worst:.2f} times as fast as the better of FlashAttention-4 and "
        f"cuDNN in each of {len(cells())} cells."
    )


def ladder() -> str:
    """A table of each kernel's TFLOP/s at head dim 128."""
    of = result("ladder", "flash3")
    found = speeds(of)
    rows = [
        [name, *(f"{found[name, 128, causal, length]['tflops']:.0f}" for causal in MASKS for length in LENGTHS)]
        for name in (*CLIMB, "cudnn")
    ]
    return table(["TFLOP/s, head dim 128", *COLUMNS], rows) + source(of)


def rung(name: str) -> str:
    """A table of a rung's speed over that of the rung below, and what its source says of it."""
    found = speeds(result("ladder", "flash3"))

    def behind(kernel: str, *cell: Any) -> float:
        """How many times as long as flash3's calls this kernel's took: the median of interleaved pairs."""
        return found[kernel, *cell]["ratio"] or 1

    rows = [
        [
            str(dim),
            *(
                f"{behind(BELOW[name], dim, causal, length) / behind(name, dim, causal, length):.2f}"
                for causal in MASKS
                for length in LENGTHS
            ),
        ]
        for dim in DIMS
    ]
    return table([f"× {BELOW[name]}, head dim", *COLUMNS], rows) + "\n" + said(name)


def peers() -> str:
    """A table of the 18 cells beside others' kernels."""
    of = result("bench", "flash3")
    names, clocked = others(of), [row for row in cells() if "mhz" in row]

    def ratio(row: Row, peer: str) -> float | None:
        return row.get(f"ratio_{peer.replace('-', '_')}")

    rows = [
        [
            str(row["head_dim"]),
            "causal" if row["causal"] else "full",
            f"{row['length']:,}",
            f"{row['tflops']:.0f}",
            *("" if (found := ratio(row, peer)) is None else f"{found:.2f}" for peer in names),
            f"{row['share_of_matmul']:.0%}",
            *([f"{row['mhz']:.0f}"] if clocked else []),
        ]
        for row in cells()
    ]
    middle = [
        f"{statistics.median(found for row in cells() if (found := ratio(row, peer)) is not None):.2f}"
        for peer in names
    ]
    header = [
        "head dim",
        "mask",
        "tokens",
        "flash3, TFLOP/s",
        *(f"× {OTHERS[peer]}" for peer in names),
        "of the matmul",
    ]
    shown = [*rows, ["median", "", "", "", *middle, "", *([""] if clocked else [])]]
    return table([*header, *(["MHz"] if clocked else [])], shown, left=2) + remarks(of) + source(of)


def odd() -> str:
    """A table of the odd cells beside others' kernels."""
    of = result("bench", "flash3", "odd")
    names, clocked = others(of), any(row.get("mhz") for row in of.data["rows"])
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in of.data["rows"]:
        cell = row["dtype"], row["head_dim"], "causal" if row["causal"] else "full", row["shape"]
        cells.setdefault(cell, {})[row["peer"] or "flash3"] = row
    rows = [
        [
            shape, dtype, str(dim), mask, f"{found['flash3']['tflops']:.0f}",
            *(f"{found[peer]['ratio']:.2f}" if peer in found else "" for peer in names),
            *([f"{found['flash3']['mhz']:.0f}"] if clocked else []),
        ]
        for (dtype, dim, mask, shape), found in cells.items()
    ]  # fmt: skip
    header = ["batch × (heads, KV heads) × queries × keys", "dtype", "head dim", "mask", "flash3, TFLOP/s"]
    header += [*(f"× {OTHERS[peer]}" for peer in names), *(["MHz"] if clocked else [])]
    return table(header, rows, left=4) + remarks(of) + source(of)


def elsewhere() -> str:
    """A list of what was found on another GPU: how fast beside others' kernels, and what the checks said."""
    lines = list[str]()
    for condition, what in (None, "the {} cells of the table above"), ("odd", "the {} cells that a seed drew"):
        of = result("bench", "flash3", condition, device=OTHER_DEVICE)
        timed = {peer: [row["ratio"] for row in of.data["rows"] if row["peer"] == peer] for peer in others(of)}
        said = ", ".join(
            f"{min(ratios):.2f} to {max(ratios):.2f} × as fast as {OTHERS[peer]} (median {statistics.median(ratios):.2f} ×, "
            f"{len(ratios)} cells)"
            for peer, ratios in timed.items()
        )
        number = sum(row["peer"] is None for row in of.data["rows"])
        lines.append(f"- In {what.format(number)}: {said}. {link(of)}")
    found = [result("verify", "flash3", dtype, device=OTHER_DEVICE) for dtype in ("float16", "bfloat16")]
    found += [result(kind, "flash3", device=OTHER_DEVICE) for kind in ("counters", "sanitizers")]
    lines += [f"- {kinds.claim(each)}: {link(each)}" for each in found]
    return "".join(prose(line, "  ") for line in lines)


def sweep() -> str:
    """A paragraph: how far the tiles that were chosen when all were timed are from the best ones."""
    of = result("tiles", "flash3")
    cells = by_cell(TILES.data(of).rows)
    far = {cell: min(row.ratio for row in rows) for cell, rows in cells.items()}
    worst = min(far, key=lambda cell: far[cell])
    own = next(row for row in cells[worst] if row.chosen)
    best = min(cells[worst], key=lambda row: row.ratio)
    return prose(
        f"A sweep times every tile that fits, in {len(cells)} cells. In {sum(x >= 0.97 for x in far.values())} of them no tile "
        f"was faster than the rule's by more than 3 %. The worst choice was {own.tile[0]} × {own.tile[1]} at head dim "
        f"{own.head_dim}: with {own.length:,} tokens, {'causal' if own.causal else 'full'}, it took {1 / far[worst]:.2f} times "
        f"as long as {best.tile[0]} × {best.tile[1]}."
    ) + source(of)


def features() -> str:
    """A table of what users ask of the kernel, and what it costs."""
    runs = (
        result("features", "flash3"),
        result("features", "flash3", "soft-caps"),
        result("features", "flash3", "window"),
    )
    return table(*asked.table(runs)) + "".join(map(source, runs))


OTHERS = {
    "fa3": "FA3", "fa3-wheel": "FA3's wheel", "fa4": "FA4", "cudnn": "cuDNN", "flex": "FlexAttention",
    "sdpa-flash": "SDPA flash",
}  # fmt: skip
"""The titles of other libraries' kernels, by the names that the benchmark has for them."""


def others(of: results.Result) -> list[str]:
    """The peers that were timed in a benchmark."""
    timed = {row["peer"] for row in of.data["rows"]}
    return [peer for peer in OTHERS if peer in timed]


def remarks(of: results.Result) -> str:
    """What a reader of a benchmark's table has to know of it: its clocks, how calls were queued, and what FA3 is."""
    rows = [row for row in of.data["rows"] if row.get("mhz")]
    if not rows:
        return ""
    mine = [row for row in rows if row["peer"] is None]
    limited = [row["capped"] for row in mine if row["capped"]]
    said = ["MHz is the clock of the SMs while flash3 runs, by their own count."]
    if limited:
        said.append(
            f"In {len(limited)} of the {len(mine)} cells the power limit lowered it, for up to {max(limited):.0%} of the time."
        )
    if replayed := sum(row["queued"] == "in a graph" for row in mine):
        said.append(
            f"In {replayed} cells flash3 takes less than {speed.SHORT} ms: calls are replayed from CUDA graphs there."
        )
        short = {(row["dtype"], row["head_dim"], row["causal"], row["length"], row["shape"])
                 for row in mine if row["queued"] == "in a graph"}  # fmt: skip
        not_replayed = sorted({
            OTHERS[row["peer"]] for row in rows if row["peer"] in OTHERS and row["queued"] != "in a graph"
            and (row["dtype"], row["head_dim"], row["causal"], row["length"], row["shape"]) in short
        })  # fmt: skip
        if not_replayed:
            said.append(f"Some calls of {', '.join(not_replayed)} can't be captured, and Python queues them.")
    if any(row["peer"] == "fa3-wheel" for row in rows):
        said.append(
            "FA3's wheel is flash-attn3-jax, which has head dim 128 alone and was built by an older compiler. Its column says "
            "nothing of FA3's source built by a newer one, and it isn't counted where flash3 is compared with the best."
        )
    return "\n" + textwrap.fill(" ".join(said), 100, break_long_words=False, break_on_hyphens=False) + "\n"


def cells() -> Sequence[Row]:
    """The newest run beside others' kernels: one flat row per cell."""
    return speed.flat(speed.BENCH.data(result("bench", "flash3")))


def fp8() -> str:
    """Tables of FP8's errors and speed, and what was expected of it."""
    of = result("fp8", "flash3_fp8")
    errors = [[row["kernel"], f"{row['rmse']:.1e}"] for row in of.data["accuracy"]]
    found = {(row["head_dim"], row["causal"], row["length"]): row for row in of.data["speed"]}
    rows = [
        [str(dim), what, *("" if x is None else shown.format(x) for x in values)]
        for dim in (128, 256)
        for what, key, shown in (
            ("TFLOP/s", "tflops", "{:.0f}"),
            ("× bfloat16", "ratio", "{:.2f}"),
            ("with V's launch", "ratio_of_calls", "{:.2f}"),
            ("× cuDNN's FP8", "ratio_to_cudnn", "{:.2f}"),
            ("with V's launch", "ratio_of_calls_to_cudnn", "{:.2f}"),
        )
        if any(values := [found[dim, causal, length].get(key) for causal in MASKS for length in LENGTHS])
    ]
    inputs = f"Inputs: {of.data['inputs']}.\n\n"
    papers = ""
    if of.data.get("papers"):
        there = [[row["kernel"], f"{row['rmse']:.1e}"] for row in of.data["papers"]]
        papers = (
            f"In the paper's setting: {of.data['papers_inputs']}, unrounded.\n\n"
            + table(["kernel", "RMSE against float64"], there)
            + "\n"
        )
    return (
        inputs
        + table(["kernel", "RMSE against float64"], errors)
        + "\n"
        + papers
        + table(["head dim", "unit", *COLUMNS], rows, left=2)
        + source(of)
        + "\n"
        + gains(found)
    )


def gains(found: Mapping[tuple[int, bool, int], Any]) -> str:
    """What was expected of FP8's speed, and what was measured."""
    ratio = {cell: row["ratio"] for cell, row in found.items()}
    long = {dim: [ratio[dim, causal, 16384] for causal in MASKS] for dim in (128, 256)}
    short = [x for (_, _, length), x in ratio.items() if length == 1024]
    came = "as expected" if min(long[256]) > max(long[128]) else "not as expected"
    wide = [
        f"{full:.2f} times bfloat16 at head dim {dim} ({causal:.2f} causal)" for dim, (full, causal) in long.items()
    ]
    expected = "the products take half as long, the softmax as long as before, so head dim 256 gains more than 128."
    measured = f"{came}, at 16k tokens {' and '.join(wide)}, and at 1k {climb_binds.span(short, '{:.2f}')} times."
    return prose(f"**Expected**: {expected}") + "\n" + prose(f"**Measured**: {measured}")


def verified() -> str:
    """A list of what the checks said of the rungs, one entry per result."""
    found = [result("verify", name) for name in (*BELOW, "flash3_fp8")]
    found += [result(kind, name) for kind in ("counters", "agreement") for name in ("flash3", "flash3_fp8")]
    found.append(sanitized())
    once = {each.path: each for each in found}  # one result may hold several kernels
    return "".join(prose(f"- {kinds.claim(each)}: {link(each)}", "  ") for each in once.values())


def sanitized() -> results.Result:
    """The newest run of the sanitizers over `flash3` and `flash3_fp8` that has no kernels of other pages."""
    runs = results.find(RESULTS, kind="sanitizers", algorithm="flash3", device=DEVICE)
    names = {"flash3", "flash3_fp8"}
    return next(of for of in reversed(runs) if names <= set(of.algorithms) <= {*BELOW, *BELOW.values(), *names})


def links() -> str:
    """The targets of the page's reference links."""
    return f"[accumulation]: {target(result('accumulation', None))}\n"


def profile() -> climb_binds.Profile:
    """The newest profile, with the benchmark's cells."""
    return climb_binds.Profile(result("profile", "flash3"), cells())


BINDS: dict[str, Callable[[climb_binds.Profile], str]] = {
    "rounds": lambda x: climb_binds.rounds(x, table) + source(x.of),
    "rung_2": climb_binds.rung_2,
    "busy": climb_binds.half_rate,
    "load": lambda x: climb_binds.load(x, table),
    "energy": lambda x: climb_binds.energy(x, table),
    "units": lambda x: climb_binds.units(x, table, source(x.of)),
    "waits": lambda x: climb_binds.waits(x, table),
    "bursts": climb_binds.bursts,
    "ends": climb_binds.ends,
    "fp8_units": climb_binds.fp8,
    "expected": lambda x: climb_binds.expected(x, table),
}
"""The page's blocks that say what binds."""


def bound(name: str) -> str:
    """The text of one of these blocks."""
    return BINDS[name](profile())


def beside() -> str:
    """A paragraph: what a warp issues beside products, and what share of their full rate products keep."""
    of = result("rates", None)
    rows = {row["what"]: row for row in of.data["rows"]}
    floats, whole = (
        [rows[f"{name}_beside_products"] for name in names]
        for names in (("add", "multiply_add"), ("maximum", "maximum_of_three", "convert_pair", "exponential"))
    )
    rate = [f"{row['value']:.2f}" for row in (*floats, *whole)]
    left = min(row["tensor_share"] for row in whole)
    said = prose(
        "Let a warp work beside a warpgroup that always has products waiting. It gets through "
        f"{rate[0]} additions in float32 per clock, or {rate[1]} FMAs, and the tensor cores through "
        f"{floats[0]['tensor_share']:.0%} of what they can do. Of maxima, conversions and exponentials it gets through "
        f"{rate[2]}, {rate[4]} and {rate[5]} per clock, and the tensor cores through {left:.0%}."
    )
    return said + source(of)


BLOCKS = {"summary": summary, "ladder": ladder, **{name: lambda name=name: rung(name) for name in BELOW},
          "peers": peers, "odd": odd, "elsewhere": elsewhere, "sweep": sweep, "features": features,
          "fp8": fp8, "beside": beside, "verified": verified, "links": links,
          **{name: functools.partial(bound, name) for name in BINDS}}  # fmt: skip
"""What writes each block, by the name in the page's marks."""


# -- text -----------------------------------------------------------------------------------------------------------


def said(name: str) -> str:
    """The header comment of a kernel's source from "Expected" on, as a Markdown quotation."""
    comment = re.match(r"(?://.*\n)+", kernels_cu.source(name).read_text(encoding="utf-8"))
    assert comment is not None
    lines = [line.removeprefix("//").removeprefix(" ").rstrip() for line in comment[0].splitlines()]
    parts: list[str] = []
    for line in lines[next(i for i, line in enumerate(lines) if line.startswith("Expected")) :]:
        if begun := re.match(r"(Expected|Measured|What it took|What binds)(.*)", line):
            parts.append(f"**{begun[1]}**{begun[2]}")
        elif line.startswith("  - "):
            parts.append(line[2:])
        else:
            parts[-1] += " " + line.strip()
    text = ""
    for before, part in zip(["", *parts], parts, strict=False):
        apart = "" if not before or (before.startswith("- ") and part.startswith("- ")) else ">\n"
        text += apart + quoted(part)
    return f"From the head of `kernels_cu/{name}.cu`:\n\n{text}"


def quoted(part: str) -> str:
    """A paragraph or a list entry as a Markdown quotation."""
    return textwrap.indent(prose(part, "  " if part.startswith("- ") else ""), "> ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table. Columns after the first `left` are flush right."""
    lines = [header, ["---"] * left + ["--:"] * (len(header) - left), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def target(of: results.Result) -> str:
    return of.path.relative_to(PAGE.parent).as_posix()


def link(of: results.Result) -> str:
    return f"[{of.kind}]({target(of)}){age(of)}"


def source(of: results.Result) -> str:
    """A line that says where the figures above it come from."""
    c = of.content
    said = f"*{c['device']['name']}, driver {c['driver']}, {str(c['date'])[:10]}: `{c['command']}`, {link(of)}.*"
    return f"\n{prose(said)}"


# -- the picture ----------------------------------------------------------------------------------------------------


def ladder_picture() -> str:
    """The ladder at 16k tokens as SVG on white: one panel per head dim, a pair of bars per kernel."""
    of = result("ladder", "flash3")
    found, kernels = speeds(of), (*CLIMB, "cudnn")
    looks = {False: ("#0072B2", "full", -0.23), True: ("#9CC9E8", "causal", 0.23)}
    greys = {False: "#6E6E6E", True: "#BDBDBD"}
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportUnknownMemberType]
        figure: Any = Figure(figsize=(8.2, 3.9), layout="constrained")
        panels: Any = figure.subplots(1, len(DIMS), sharey=True)
        for panel, dim in zip(panels, DIMS, strict=True):
            for causal, (colour, mask, shift) in looks.items():
                heights = [found[name, dim, causal, 16384]["tflops"] for name in kernels]
                colours = [greys[causal] if name == "cudnn" else colour for name in kernels]
                bars = panel.bar([i + shift for i in range(len(kernels))], heights, 0.46, color=colours, label=mask)
                panel.bar_label(
                    bars, [f"{x:.0f}" for x in heights], fontsize=5.8, padding=-8, color="black" if causal else "white"
                )
            panel.axhline(matmul(of), color="#D55E00", linestyle="--", linewidth=1, zorder=0)
            panel.set(title=f"head dim {dim}", ylim=(0, 900))
            panel.set_xticks(range(len(kernels)), kernels, rotation=40, ha="right", rotation_mode="anchor")
        panels[0].set_ylabel("TFLOP/s, 16,384 tokens, bfloat16")
        panels[0].text(
            -0.4, matmul(of) + 12, f"matrix product of the run: {matmul(of):.0f}", color="#A34700", fontsize=7.5
        )
        panels[0].legend(loc="upper left", bbox_to_anchor=(0, 0.84), fontsize=8)
        content = io.StringIO()
        figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


DRAWN = {"flash3_ladder.svg": ladder_picture, "flash3_units.svg": lambda: climb_binds.picture(profile())}
"""What draws the page's pictures, by their files."""

if __name__ == "__main__":
    replace_file(
        PAGE, replaced(PAGE.read_text(encoding="utf-8"), "flash3", {name: draw() for name, draw in BLOCKS.items()})
    )
    for name, draw in DRAWN.items():
        replace_file(PICTURES / name, draw())
