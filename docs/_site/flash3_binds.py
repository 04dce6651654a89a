"""Writes what binds the rungs, in docs/flash3.md and flash3_units.svg, from a result of the closed study `profile`."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from docs._site.figures import STYLE
from flashlab.measure import results

Row = Mapping[str, Any]
Cell = tuple[str, int, bool, int]
"""Kernel, head dim, causal, length."""

DIMS, SHORT, LONG = (64, 128, 256), 1024, 16384
MATMUL = "matmul"
"""What the rows call a matrix product, 8192³."""
FLOPS_16_BIT, FLOPS_8_BIT = 4096, 8192
"""Of the tensor cores, per clock of a Hopper SM."""
LANES = {"exp": 16, "fma": 128, "alu": 64, "issue": 128}
"""Lanes per clock of a Hopper SM (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions")."""
KERNELS = ("flash2", "flash3_1", "flash3_2", "flash3_3", "flash3", "cudnn")
REASONS = {
    "issues": ("selected",),
    "its own latency": ("wait",),
    "exponentials' queue": ("mio", "short_sb"),
    "dispatch": ("dispatch",),
    "another warp issues": ("not_selected",),
    "products": ("wgmma",),
    "turns": ("barrier",),
    "mbarriers": ("long_sb",),
}
"""What a warp does, as ncu's states of a sampled warp. Exponentials share the queue "mio" with memory instructions."""


def clocks_of_a_round(found: Mapping[str, Any]) -> dict[str, float]:
    """The clocks for which one warp's round of the main loop occupies each unit of an SM.

    >>> pipes = {"tensor": 16, "exp": 64, "fma": 141, "alu": 77, "uniform": 103, "other": 18}
    >>> clocks_of_a_round({"instructions": 419, "pipes": pipes, "tensor_clocks": 256.0})
    {'tensor': 256.0, 'exp': 128.0, 'fma': 35.25, 'alu': 38.5, 'issue': 104.75}
    """
    pipes = {**found["pipes"], "issue": found["instructions"]}
    return {"tensor": found["tensor_clocks"], **{name: 32 * pipes.get(name, 0) / rate for name, rate in LANES.items()}}


class Profile:
    """A result of kind `profile`, beside the rows of a benchmark."""

    def __init__(self, of: results.Result, benchmark: Iterable[Row]) -> None:
        self.of = of
        self.rows: dict[Cell, Row] = {
            (r["kernel"], r["head_dim"], r["causal"], r["length"]): r for r in of.data["rows"]
        }
        self._milliseconds = {(r["head_dim"], r["causal"], r["length"]): r["milliseconds"] for r in benchmark}
        self.sms: int = of.content["device"]["sms"]

    @property
    def product(self) -> Row:
        """The matrix product's row."""
        return next(row for (kernel, *_), row in self.rows.items() if kernel == MATMUL)

    def mine(self) -> list[Row]:
        """The 18 cells of flash3."""
        return [row for (kernel, *_), row in self.rows.items() if kernel == "flash3"]

    def long(self, kernel: str, dim: int) -> Row:
        """A kernel's row without a mask, at the greatest length."""
        return self.rows[kernel, dim, False, LONG]

    def benchmark_ghz(self, row: Row) -> float:
        """The clock rate in the benchmark, whose calls have pauses: a launch's clocks over its time there."""
        return row["counters"]["clocks"] / self._milliseconds[row["head_dim"], row["causal"], row["length"]] / 1e6


def busy(row: Row, unit: str) -> float:
    return row["counters"]["busy"][unit]


def ghz(row: Row) -> float:
    return row["loaded"]["mhz"] / 1e3


def picojoules(row: Row) -> float:
    """The board's energy per FLOP under load."""
    return row["loaded"]["watts"] / row["loaded"]["tflops"]


def faster_on_zeros(row: Row) -> float:
    return row["zeros"]["tflops"] / row["loaded"]["tflops"]


def outside(row: Row) -> float:
    """The share of the computing warps' samples that fell outside of the main loop."""
    inside, beyond = (sum(row["code"]["stalls"][where].values()) for where in ("loop", "outside"))
    return beyond / (inside + beyond)


def spent(row: Row, reasons: Sequence[str]) -> float:
    """The share of the main loop's samples that have one of these reasons."""
    stalls = row["code"]["stalls"]["loop"]
    return sum(stalls.get(reason, 0) for reason in reasons) / sum(stalls.values())


def padding(row: Row) -> float:
    """FLOPs executed per FLOP that the field counts: above 1 by what tiles have past the length or under the mask."""
    return row["counters"]["flops"] / row["useful_flops"]


def said(row: Row) -> str:
    return f"{'causal' if row['causal'] else 'full'} {row['length'] // 1024}k"


def span(values: Iterable[float], shown: str = "{:.0%}") -> str:
    """The least and the greatest value, in words."""
    found = sorted(values)
    low, high = shown.format(found[0]), shown.format(found[-1])
    return low if low == high else f"{low} to {high}"


def prose(text: str, indent: str = "") -> str:
    """A paragraph of the page, in lines of at most 100 columns."""
    return textwrap.fill(text, 98, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


# -- blocks of the page ---------------------------------------------------------------------------------------------

Table = Callable[..., str]


def rounds(profile: Profile, table: Table) -> str:
    """A table of what the compiler made of one round of the main loop."""
    rows: list[list[str]] = []
    for dim in DIMS:
        for kernel in ("flash3_1", "flash3_2", "flash3", "cudnn"):
            found = profile.long(kernel, dim)["code"]["round"]
            clocks = clocks_of_a_round(found)
            shares = [f"{100 * clocks[unit] / clocks['tensor']:.0f}" for unit in ("exp", "issue", "alu", "fma")]
            per_score = f"{32 * found['instructions'] / found['scores']:.1f}"
            uniform = f"{found['pipes'].get('uniform', 0) / found['instructions']:.0%}"
            rows.append([str(dim), kernel, per_score, uniform, *shares])
    header = ["head dim", "kernel", "instructions per score", "uniform ones",
              "exponentials", "issue slots", "ALU", "FMA"]  # fmt: skip
    return table(header, rows, left=2)


def rung_2(profile: Profile) -> str:
    """A paragraph: why rung 2 loses to rung 1 at head dim 64 and 1k."""
    lower, upper = (
        [profile.rows[name, 64, causal, SHORT] for causal in (False, True)] for name in ("flash3_1", "flash3_2")
    )
    work = [f"{padding(b) / padding(a):.2f}" for a, b in zip(lower, upper, strict=True)]
    rates = [f"{busy(b, 'tensor'):.0%} instead of {busy(a, 'tensor'):.0%}" for a, b in zip(lower, upper, strict=True)]
    waits = [f"{outside(b):.0%} instead of {outside(a):.0%}" for a, b in zip(lower, upper, strict=True)]
    return prose(
        f"By ncu, at head dim 64 and 1k tokens, rung 2 executes {work[0]} times rung 1's products without a mask, and {work[1]} "
        f"times under a causal one. The cause is that 192 rows fit the length worse than 128. Its tensor cores are busy {rates[0]} "
        f"of the clocks (causal: {rates[1]}): what the overlap gains, the larger tile wastes. Of its computing warps' time, "
        f"{waits[0]} passes outside of the main loop (causal: {waits[1]})."
    )


def units(profile: Profile, table: Table, source: str) -> str:
    """A table of how busy the units are in flash3's short and long cells."""
    rows = [
        [
            str(row["head_dim"]),
            said(row),
            *(f"{busy(row, unit):.0%}" for unit in ("tensor", "exp", "issue", "sram", "l2", "dram")),
            f"{outside(row):.0%}",
        ]
        for row in profile.mine()
        if row["length"] != 4096
    ]
    header = ["head dim", "cell", "tensor cores", "exponential", "issue slots",
              "SRAM", "L2", "DRAM", "outside of the loop"]  # fmt: skip
    return table(header, rows, left=2) + source


def load(profile: Profile, table: Table) -> str:
    """A table of flash3's clock rate, power and speed under load, and a paragraph on the power limit."""
    rows = [
        [*where, f"{ghz(row):.2f}", f"{row['loaded']['watts']:.0f}", f"{row['loaded']['tflops']:.0f}", *clock,
         f"{faster_on_zeros(row):.2f}"]
        for row in [*profile.mine(), profile.product] if "zeros" in row
        for where, clock in [
            (["–", "matrix product"], [""]) if row["kernel"] == MATMUL
            else ([str(row["head_dim"]), said(row)], [f"{profile.benchmark_ghz(row):.2f}"])
        ]
    ]  # fmt: skip
    header = ["head dim", "cell", "GHz", "W", "TFLOP/s", "GHz in the benchmark", "times as fast on zeros"]
    capped = [row["loaded"]["capped"] for row in profile.mine()]
    free = [row["zeros"]["mhz"] / 1e3 for row in profile.mine() if "zeros" in row and row["zeros"]["capped"] < 0.1]
    d = profile.of.data
    cooler = [row["zeros"]["watts"] for row in profile.mine() if "zeros" in row and row["zeros"]["capped"] > 0.5]
    watts, highest = f"{d['limit_watts']:.0f}", f"{d['highest_mhz'] / 1e3:.2f}"
    text = prose(
        f"The limit is {watts} W. By the driver, it lowers the clock {span(capped)} of the time, in each of the {len(capped)} "
        f"cells. On zeros it does not in {len(free)} of {len(free) + len(cooler)} cells: there the SMs count "
        f"{span(free, '{:.2f}')} GHz, and NVML says {highest}. In the other {len(cooler)} the driver names the limit on zeros "
        f"too, although the board then draws only {span(cooler, '{:.0f}')} W. Something else is limited there, and we don't know "
        "what."
    )
    return f"{table(header, rows, left=2)}\n{text}"


def energy(profile: Profile, table: Table) -> str:
    """A table of the energy per FLOP and the speed, by kernel."""
    rows = [
        [
            kernel,
            *(f"{picojoules(profile.long(kernel, dim)):.2f}" for dim in DIMS),
            *(f"{profile.long(kernel, dim)['loaded']['tflops']:.0f}" for dim in DIMS),
        ]
        for kernel in KERNELS
    ]
    header = ["16k tokens, full", *(f"pJ per FLOP, {dim}" for dim in DIMS), *(f"TFLOP/s, {dim}" for dim in DIMS)]
    row = profile.product
    ratios = [
        x["loaded"]["tflops"] / profile.rows["cudnn", dim, causal, length]["loaded"]["tflops"]
        for (kernel, dim, causal, length), x in profile.rows.items()
        if kernel == "flash3" and ("cudnn", dim, causal, length) in profile.rows
    ]
    text = prose(
        f"The matrix product takes {picojoules(row):.2f} pJ per FLOP and does {row['loaded']['tflops']:.0f} TFLOP/s. flash3 is "
        f"{span(ratios, '{:.2f}')} times as fast as cuDNN in the {len(ratios)} cells that both ran under load."
    )
    return f"{table(header, rows)}\n{text}"


def waits(profile: Profile, table: Table) -> str:
    """A table of what a computing warp does in the main loop."""
    rows = [
        [kernel, str(dim), *(f"{spent(profile.long(kernel, dim), reasons):.0%}" for reasons in REASONS.values())]
        for dim in DIMS
        for kernel in ("flash3_2", "flash3", "cudnn")
    ]
    return table(["16k tokens, full", "head dim", *REASONS], rows)


def bursts(profile: Profile) -> str:
    """A paragraph: how warps meet at the exponentials at head dim 64."""
    row = profile.long("flash3", 64)
    spent = row["code"]["spent"]
    share = spent["exp"] / sum(spent.values())
    none, one = (1 - share) ** 3, 3 * share * (1 - share) ** 2
    return prose(
        f"A warp stands at its exponentials for {share:.0%} of the main loop. If the three warps of a scheduler came to them at "
        f"random, none would be there for {none:.0%} of the time, and two or three would queue for {1 - none - one:.0%}. The "
        f"units are idle for {1 - busy(row, 'exp'):.0%}."
    )


def fp8(profile: Profile) -> str:
    """A paragraph on FP8's kernel."""
    rows = [profile.long("flash3_fp8", dim) for dim in (128, 256)]
    parts = [
        f"{busy(row, 'tensor'):.0%} tensor cores, {busy(row, 'exp'):.0%} exponential units, {busy(row, 'issue'):.0%} issue slots"
        for row in rows
    ]
    capped = [row["loaded"]["capped"] for row in rows]
    round_ = [profile.long(name, 128)["code"]["round"] for name in ("flash3_fp8", "flash3")]
    each = [32 * x["instructions"] / x["scores"] for x in round_]
    return prose(
        f"At 16k without a mask, these shares are busy: {parts[0]} at head dim 128; {parts[1]} at 256. A score takes "
        f"{each[0]:.1f} instructions at head dim 128, and {each[1]:.1f} in bfloat16. Under load the kernel does "
        f"{rows[0]['loaded']['tflops']:.0f} and {rows[1]['loaded']['tflops']:.0f} TFLOP/s, at {ghz(rows[0]):.2f} and "
        f"{ghz(rows[1]):.2f} GHz. The driver names the power limit {span(capped)} of the time."
    )


def ends(profile: Profile) -> str:
    """A paragraph on 1k tokens, where a row tile's start and end count most."""
    row, long = profile.rows["flash3", 128, False, SHORT], profile.long("flash3", 128)
    share, first = outside(row), 1 / 8
    pace = (first / share) / ((1 - first) / (1 - share))
    masked, narrow = profile.rows["flash3", 128, True, SHORT], profile.rows["flash3", 64, False, SHORT]
    return prose(
        "At head dim 128 and 1k tokens without a mask, a row tile's first scores and its last output are an eighth of its "
        f"products. They take {share:.0%} of the computing warps' time, so the main loop runs at {1 / pace:.1f} times their "
        f"pace. The tensor cores are busy {busy(row, 'tensor'):.0%} of the clocks, instead of {busy(long, 'tensor'):.0%} at "
        f"16k. Under a causal mask, {outside(masked):.0%} of the time passes there. At head dim 64, the tile of 192 rows doesn't "
        f"divide 1,024 either: {padding(narrow) - 1:.0%} more products are executed than count."
    )


def found(profile: Profile) -> dict[str, tuple[str, bool]]:
    """What was found for each expectation that the result holds, and whether it came true."""
    wide = [profile.long("flash3", dim) for dim in (128, 256)]
    tensor, clocks, zeros = (
        [busy(r, "tensor") for r in wide],
        [ghz(r) for r in wide],
        [faster_on_zeros(r) for r in wide],
    )
    narrow = profile.long("flash3", 64)
    pair = [busy(narrow, unit) for unit in ("tensor", "exp")]
    slots = [busy(row, "issue") for row in profile.mine()]
    memory = {unit: [busy(row, unit) for row in profile.mine()] for unit in ("dram", "l2", "sram")}
    end, masked = (
        profile.rows["flash3", 128, False, SHORT],
        [r for r in profile.mine() if r["causal"] and r["length"] == SHORT],
    )
    capped = [row["loaded"]["capped"] for row in masked]
    work = [
        padding(profile.rows["flash3_2", 64, c, SHORT]) / padding(profile.rows["flash3_1", 64, c, SHORT])
        for c in (False, True)
    ]
    return {
        "power": (
            f"tensor cores {span(tensor)}, {span(clocks, '{:.2f}')} GHz, on zeros {span(zeros, '{:.2f}')} times as fast",
            0.85 <= min(tensor) and max(tensor) <= 0.92 and 1.55 <= min(clocks) and max(zeros) <= 1.15,
        ),
        "exp": (
            f"tensor cores {pair[0]:.0%}, exponential units {pair[1]:.0%}, {ghz(narrow):.2f} GHz",
            0.7 <= min(pair) and max(pair) <= 0.75,
        ),
        "issue": (f"{span(slots)}", max(slots) < 0.6),
        "memory": (
            f"DRAM {span(memory['dram'])}, L2 {span(memory['l2'])}, SRAM {span(memory['sram'])}",
            max(memory["dram"]) < 0.15 and max(memory["l2"]) < 0.5 and max(memory["sram"]) < 0.65,
        ),
        "ends": (
            f"{outside(end):.0%}; but the limit lowers the clock {span(capped)} of the time",
            0.2 <= outside(end) <= 0.3 and max(capped) < 0.1,
        ),
        "rung 1": (f"{work[0]:.2f} and {work[1]:.2f} times", 1.05 <= work[0] <= 1.15 and 1.25 <= work[1] <= 1.35),
    }


def expected(profile: Profile, table: Table) -> str:
    """A table of what was expected and what was found."""
    so = found(profile)
    rows = [[text, so[name][0], "yes" if so[name][1] else "no"] for name, text in profile.of.data["expected"].items()]
    return table(["expected", "found", "true?"], rows, left=3)


# -- the picture ----------------------------------------------------------------------------------------------------


def picture(profile: Profile) -> str:
    """How busy tensor cores, exponential units and issue slots are, and the clock under load, as SVG on white."""
    looks = {
        "tensor": ("#0072B2", "tensor cores"),
        "exp": ("#D55E00", "exponential units"),
        "issue": ("#BDBDBD", "issue slots"),
    }
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportUnknownMemberType]
        figure: Any = Figure(figsize=(8.2, 3.6), layout="constrained")
        panels: Any = figure.subplots(1, len(DIMS), sharey=True)
        for panel, dim in zip(panels, DIMS, strict=True):
            rows = [profile.long(kernel, dim) for kernel in KERNELS]
            for i, (unit, (colour, name)) in enumerate(looks.items()):
                places = [x + 0.27 * (i - 1) for x in range(len(rows))]
                panel.bar(places, [100 * busy(row, unit) for row in rows], 0.26, color=colour, label=name)
            for x, row in enumerate(rows):
                panel.text(x, 102, f"{ghz(row):.2f}", ha="center", fontsize=6.5)
            panel.set(title=f"head dim {dim}", ylim=(0, 114), yticks=range(0, 101, 25))
            panel.set_xticks(range(len(rows)), KERNELS, rotation=40, ha="right", rotation_mode="anchor")
        panels[0].set_ylabel("% of the clocks busy")
        panels[0].text(-0.4, 108, "GHz under load:", fontsize=6.5)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
        content = io.StringIO()
        figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def half_rate(profile: Profile) -> str:
    """A caption that says what a busy clock of `mma.sync` is worth."""
    row = profile.long("flash2", 128)["counters"]
    share = row["flops"] / (row["busy"]["tensor"] * row["clocks"] * profile.sms * FLOPS_16_BIT)
    return prose(
        f"*Shares of the clocks of one launch, from a cold L2, at 16k tokens without a mask. The products of flash2 are "
        f"`mma.sync`: one of its busy clocks does {share:.0%} of the FLOPs of a busy clock of wgmma. Above the bars stands the "
        "clock when calls follow each other without a pause.*"
    )
