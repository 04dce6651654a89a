"""Kinds of results that nobody measures any more: how to read the files that are there. `THEN` is a commit that can run them."""

from __future__ import annotations

from typing import Any

from flashlab.measure.results import Kind, markdown_table
from flashlab.measure.sanitizers import TOOLS
from studies.rows import CELL, Made, data, each, grouped, row, shown

THEN = "05616a69"


def _then(command: str) -> str:
    return f"git switch --detach {THEN}; python -m flashlab.measure.{command}"


# -- accumulation -----------------------------------------------------------------------------------------------------

SUMS = row(
    "Row", "One instruction, its rule, and in how many cases this rule and each alternative give every bit.", instruction=str,
    kept=int, mantissa=int, together=int, cases=int, equal=int, alternatives=dict[str, int],
)  # fmt: skip
RECORDED = row(
    "Recorded",
    "Some cases of a kind in hexadecimal: a, b, c and the sum.",
    instruction=str,
    name=str,
    cases=tuple[str, ...],
)


def _sums(of: Any) -> str:
    by_rule: dict[Any, list[str]] = {}
    for r in of.rows:
        by_rule.setdefault((r.together, r.kept, r.mantissa), []).append(r.instruction)
    said = "; ".join(
        f"{n} products at a time, with {kept} bits below the largest and {bits} of the sum ({', '.join(names)})"
        for (n, kept, bits), names in by_rule.items()
    )
    equal, cases = (sum(getattr(r, name) for r in of.rows) for name in ("equal", "cases"))
    return f"tensor cores add {said}: the same in every bit in {equal:,} of {cases:,} cases"


def _sums_table(of: Any) -> str:
    """A row per rule, a column per instruction."""
    equal = ("as measured", *(f"{r.equal / r.cases:.2%}" for r in of.rows))
    others = [(name, *(f"{r.alternatives[name] / r.cases:.2%}" for r in of.rows)) for name in of.rows[0].alternatives]
    header = ("rule", *(r.instruction for r in of.rows))
    return markdown_table(header, [("cases", *(f"{r.cases:,}" for r in of.rows)), equal, *others])


ACCUMULATION = Kind(
    "accumulation", "Numbers: how tensor cores add",
    "the rule by which tensor cores add products, bit for bit, with cases that the emulator is held to",
    _then("accumulation measure"), data("Sums", "A row per instruction, and recorded cases.", SUMS, recorded=tuple[RECORDED, ...]),
    _sums, _sums_table,
)  # fmt: skip

# -- patterns ---------------------------------------------------------------------------------------------------------

PATTERN = row(
    "Row", "One pattern: an instruction, the lanes that take part, the byte offsets of all 32 lanes, and what was counted, without"
    " zeros.", kernel=str, name=str, mask=str, at=str, to=(str | None, None), counters=dict[str, int],
)  # fmt: skip


def _patterns(of: Any) -> str:
    over = f"{len(of.rows)} access patterns of a warp, over {len({r.kernel for r in of.rows})} instructions"
    return f"sectors and wavefronts of {over}: what the emulator's counts are held to"


def _patterns_table(of: Any) -> str:
    names = list(dict.fromkeys(name for r in of.rows for name in r.counters))
    made = each(names, lambda name, r: r.counters.get(name, ""))
    return shown(" | ".join(["kernel", "pattern=name", "lanes", *names]), lanes=lambda r: r.mask, **made)(of)


PATTERNS = Kind(
    "patterns", "Bytes: access patterns of a warp", "sectors and wavefronts of one warp's accesses, pattern by pattern",
    _then("patterns measure"), data("Patterns", "What ncu counted.", PATTERN), _patterns, _patterns_table,
)  # fmt: skip

# -- profile and waits ------------------------------------------------------------------------------------------------

UNITS = ("tensor", "exp", "issue", "sram", "l2", "dram")
COUNTERS = row(
    "Counters", "One launch under ncu: its clocks, how busy each unit was, and warp instructions by pipe.", entry=str, clocks=float,
    clocks_active=float, nanoseconds=float, busy=dict[str, float], executed=dict[str, float], flops=int,
)  # fmt: skip
ROUND = row("Round", "One warp's round of the main loop, by the shortest way.", instructions=int, pipes=dict[str, int], flops=int,
            tensor_clocks=float, scores=float | None)  # fmt: skip
CODE = row(
    "Code", "The machine code that ran: a round of its main loop, instructions by pipe, and samples of warps' states.",
    instructions=int, round=ROUND, executed=dict[str, int], stalls=dict[str, dict[str, int]], spent=dict[str, int],
)  # fmt: skip
LOADED = row(
    "Loaded", "Call after call without a pause: clock, power, and the share of time in which the power limit lowers the clock.",
    calls=int, milliseconds=float, tflops=float, samples=int, mhz=float, mhz_set=float, watts=float, capped=float,
    reasons=dict[str, int],
)  # fmt: skip
PROFILED = row("Row", "A kernel in a cell. `zeros` is measured on inputs that are zero.", kernel=str, **CELL, useful_flops=float,
               counters=COUNTERS, code=CODE | None, loaded=LOADED, zeros=(LOADED | None, None))  # fmt: skip


def _profile(of: Any) -> str:
    first = of.rows[0].kernel
    mine = [r for r in of.rows if r.kernel == first]
    tensor, ghz = [r.counters.busy["tensor"] for r in mine], [r.loaded.mhz / 1000 for r in mine]
    capped = sum(r.loaded.capped > 0.5 for r in mine)
    return (
        f"{first}: tensor cores busy {min(tensor):.0%} to {max(tensor):.0%} of the clocks; "
        f"called without pauses, it runs at {min(ghz):.2f} to {max(ghz):.2f} GHz, "
        f"and power limits the clock in {capped} of {len(mine)} cells"
    )


PROFILE = Kind(
    "profile", "Speed: what binds: units, waits, clock and power",
    "what binds: how busy each unit is, the main loop's instructions, waits, clock and power under load", _then("profile"),
    data("Profiled", "What was found, and what was expected before it.", PROFILED, expected=dict[str, str], limit_watts=float,
         highest_mhz=int, seconds=float), _profile,
    shown("kernel | head dim=head_dim | mask | length | " + " | ".join(f"{x}:.0%" for x in UNITS)
          + " | GHz:.2f | W:.0f | power-limited=capped:.0% | TFLOP/s=tera:.0f | on zeros=zeros:.0f",
          GHz=lambda r: r.loaded.mhz / 1000, W=lambda r: r.loaded.watts, capped=lambda r: r.loaded.capped,
          tera=lambda r: r.loaded.tflops, zeros=lambda r: r.zeros and r.zeros.tflops,
          **each(UNITS, lambda x, r: r.counters.busy[x])),
)  # fmt: skip
WAITING = row(
    "Row", "One launch under ncu. `requested` and `dram` are bytes, read and written; `active` is the share of the clocks in which"
    " an SM had a block, on average; `states` shares out a warp's clocks by what it did or waited for (selected: it issued).",
    algorithm=str, launch=str, batch=int, heads=int, length=int, head_dim=int, milliseconds=float, clocks=float, active=float,
    busy=dict[str, float], occupancy=float, l2_hit_rate=float, requested=int, dram=int, instructions=int, states=dict[str, float],
)  # fmt: skip


def _problem(r: Any) -> tuple[int, int, int, int]:
    return r.batch, r.heads, r.length, r.head_dim


def _waits(of: Any) -> str:
    largest = max(of.rows, key=lambda r: (r.batch * r.heads * r.length**2 * (r.batch > 1), -r.head_dim))
    here = [r for r in of.rows if _problem(r) == _problem(largest)]
    took, asked = (grouped(here, "algorithm", lambda r, x=x: getattr(r, x)) for x in ("milliseconds", "requested"))
    one = next(r for r in here if r.algorithm == "flash1")
    waits = [f"{name} {share:.0%}" for name, share in one.states.items() if name != "selected"][:2]
    return (
        f"flash1 requests {sum(asked['standard']) / sum(asked['flash1']):.1f} times fewer bytes than standard attention and takes "
        f"{sum(took['flash1']) / sum(took['standard']):.1f} times as long; its warps spend their time on {' and '.join(waits)}"
    )


WAITS = Kind(
    "waits", "Speed: fewer bytes and slower, and why",
    "what the launches of standard attention, FlashAttention-1 and 2 wait for: busy units, warps, their states, heads",
    _then("waits"), data("Waits", "What was found, and what was expected before it.", WAITING, expected=dict[str, str]), _waits,
    shown("launch | problem | ms=milliseconds:.3f | requested, GB=asked:.2f | DRAM, GB=moved:.2f | occupancy:.0% | "
          + " | ".join(f"{x}:.0%" for x in UNITS) + " | most of a warp's time=most",
          problem=lambda r: "×".join(map(str, _problem(r))), asked=lambda r: r.requested / 1e9, moved=lambda r: r.dram / 1e9,
          most=lambda r: ", ".join(f"{name} {share:.0%}" for name, share in list(r.states.items())[:3]),
          **each(UNITS, lambda x, r: r.busy.get(x))),
)  # fmt: skip

# -- defects of published kernels -------------------------------------------------------------------------------------

OF: Any = {"repository": str, "file": str, "commit": str, "kernel": str}
NAMED: Made = {"where": lambda r: f"{r.repository}: {r.file}", "name": lambda r: f"`{r.kernel}`"}
DEFECT = row(
    "Row", "One defect, and what the emulator said of the launch that shows it: the findings, and the lines that they name. `blob`"
    " is git's name for the file's content. `nans` are elements that are NaN in the arrays that the launch left; `error` is how far"
    " an element is at most from NumPy's in float64 (None if a finding stopped the launch).", **OF, blob=str, findings=list[str],
    lines=list[int], nans=int, error=float | None,
)  # fmt: skip
SEEN = row(
    "Seen", "What a tool of compute-sanitizer said of one launch: errors, of racecheck hazards (None: it didn't end), and how many"
    " are warnings; the first message, or why it didn't end; does a message name the kernel, and which lines; is one of them a line"
    " that takes part in the defect?", tool=str, findings=int | None, warnings=int, first=str, kernel=bool, lines=list[int],
    takes_part=bool,
)  # fmt: skip
PLAIN = row(
    "Plain", "The same launch without a tool, many times, each on the same arrays: how many different results they left (None: they"
    " didn't end, and `said` is why), how far an element is at most from NumPy's, and the most elements that are NaN.",
    launches=int, distinct=int | None, error=float | None, nans=int | None, said=str,
)  # fmt: skip
ON_GPU = row("Row", "One defect on a GPU. `registers` are per thread, as ptxas reports them.", **OF, registers=int, plain=PLAIN,
             tools=list[SEEN])  # fmt: skip


def _found(of: Any) -> str:
    rows = [r for r in of.rows if not r.nans]
    named, numbers = sum(bool(r.findings) for r in rows), len(of.rows) - len(rows)
    return f"defects of published kernels: {named} of {len(rows)} found by the emulator; {numbers} more compute NaN"


FOUND = Kind(
    "found", "Correctness: defects of published kernels",
    "what the emulator says of kernels of public repositories that misuse memory or barriers", _then("found CHECKOUT…"),
    data("Found", "What the emulator found in published kernels.", DEFECT), _found,
    shown("file=where | kernel=name | lines", **NAMED,
          lines=lambda r: ", ".join(map(str, r.lines)) or (f"{r.nans} NaN" if r.nans else "not found")),
)  # fmt: skip


def _on_gpu(of: Any) -> str:
    named = {x: sum(any(t.takes_part for t in r.tools if t.tool == x) for r in of.rows) for x in TOOLS}
    counts, differ = (
        ", ".join(f"{tool} {n}" for tool, n in named.items()),
        sum((r.plain.distinct or 0) > 1 for r in of.rows),
    )
    return (
        f"of {len(of.rows)} defects of published kernels, compute-sanitizer names at a line that takes part: {counts}; "
        f"{differ} show themselves in results that differ from launch to launch"
    )


def said(of: Any) -> str:
    """What a tool found, in a few words."""
    if not of.findings:
        return "no end" if of.findings is None else "–"
    return f"{of.findings:,}, " + ("at its lines" if of.takes_part else "elsewhere" if of.lines else "no line")


def without(plain: Any) -> str:
    """What the launches without a tool showed, in a few words."""
    if plain.distinct is None:
        return plain.said
    differ = f"{plain.distinct:,} results" if plain.distinct > 1 else "always the same"
    return f"{differ}, {plain.nans:,} NaN" if plain.nans else f"{differ}{off(plain.error)}"


def off(error: float | None) -> str:
    """How far a result is from NumPy's, in a few words.

    >>> off(0.125), off(0.0), off(None)
    (', 0.12 off', '', '')
    """
    return f", {error:.2g} off" if error else ""


FOUND_ON_GPU = Kind(
    "found-gpu", "Correctness: defects of published kernels on a GPU",
    "what a GPU and compute-sanitizer show of the same launches", _then("found_gpu CHECKOUT…"),
    data("FoundOnGpu", "What a GPU and compute-sanitizer show of them.", ON_GPU), _on_gpu,
    shown("file=where | kernel=name | " + " | ".join(TOOLS) + " | without a tool=alone", **NAMED,
          alone=lambda r: without(r.plain), **each(TOOLS, lambda tool, r: said(next(x for x in r.tools if x.tool == tool)))),
)  # fmt: skip
