"""What a result says: its claim in a line, and its tables, in Markdown. A pair of functions for each kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from flashlab.measure.results import Data, Result, title

__all__ = ["headline", "markdown"]


def headline(result: Result) -> str:
    """The claim that a result supports, in one line: for a README."""
    where = f"{title(result.content) or 'CPU'}, {str(result.content['date'])[:10]}"
    return f"{_HEADLINES[result.kind](result.data)} ({where})"


def markdown(result: Result) -> str:
    """A result's tables, for the site."""
    return f"{headline(result)}\n\n{_TABLES[result.kind](result.data)}"


def _headline_counters(data: Data) -> str:
    s = data["summary"]
    text = f"{s['equal']:,} of {s['compared']:,} counts of bytes and matrix FLOPs equal over {s['launches']} launches"
    text += (f"; DRAM reads within the interval (± 64 KB) in {s['dram_inside']} of the {s['dram_checked']} launches of"
             " problems over 1 MB")  # fmt: skip
    errors = {m["case"]: abs(m["error"]) for m in data.get("models", []) if m["large"]}
    fresh = {case: error for case, error in errors.items() if "fresh" in case}
    for name, chosen in (
        ("that it was fitted to", errors.keys() - fresh.keys()),
        ("measured after that", fresh.keys()),
    ):
        found = sorted(errors[case] for case in chosen)
        if found:
            text += (f"; L2 model on {len(found)} problems {name}: median error {statistics.median(found):.1%},"
                     f" worst {found[-1]:.1%}")  # fmt: skip
    return text


def _headline_bench(data: Data) -> str:
    groups: dict[str, list[float]] = {}
    for row in data["rows"]:
        if row["ratio"] is not None:
            groups.setdefault(row["peer"], []).append(row["ratio"])
    parts = [
        f"{min(ratios):.2f} to {max(ratios):.2f} × {peer} (median {statistics.median(ratios):.2f})"
        for peer, ratios in groups.items()
    ]
    return f"speed of {data['algorithm']}: {'; '.join(parts) or 'no peer was run'}"


def _headline_blind(data: Data) -> str:
    errors: dict[str, list[float]] = {}
    for row in data["rows"]:
        errors.setdefault(row["algorithm"], []).append(abs(row["predicted"] / row["milliseconds"] - 1))
    parts = ", ".join(f"{name} {statistics.fmean(found):.1%} ({len(found)} times)" for name, found in errors.items())
    return f"mean error of the time model's predictions made before measuring: {parts}"


def _table_blind(data: Data) -> str:
    header = ("kernel", "dtype", "head dim", "mask", "length", "ms", "predicted", "TFLOP/s")
    return _markdown_table(header, [
        (r["algorithm"], r["dtype"], str(r["head_dim"]), "causal" if r["causal"] else "full", str(r["length"]),
         f"{r['milliseconds']:.3f}", f"{r['predicted']:.3f}", f"{r['tflops']:.0f}")
        for r in data["rows"]
    ])  # fmt: skip


def _headline_rates(data: Data) -> str:
    ghz = [row["gigahertz"] for row in data["clocks"]]
    return (f"{len(data['rows'])} rates and latencies of an SM; its clock while attention kernels run: {min(ghz):.2f} to "
            f"{max(ghz):.2f} GHz (median {statistics.median(ghz):.2f})")  # fmt: skip


def _table_rates(data: Data) -> str:
    rows = [
        (r["what"], str(r.get("warps", "")), f"{r['value']:,.{1 if r['value'] >= 1 else 2}f}", r["unit"])
        for r in data["rows"]
    ]
    return _markdown_table(("what", "warps", "", "unit"), rows)


def _headline_profile(data: Data) -> str:
    first = data["rows"][0]["kernel"]
    mine = [row for row in data["rows"] if row["kernel"] == first]
    tensor = [row["counters"]["busy"]["tensor"] for row in mine]
    ghz = [row["loaded"]["mhz"] / 1000 for row in mine]
    capped = sum(row["loaded"]["capped"] > 0.5 for row in mine)
    return (f"{first}: tensor cores busy {min(tensor):.0%} to {max(tensor):.0%} of the clocks; called without pauses, at "
            f"{min(ghz):.2f} to {max(ghz):.2f} GHz, for power limits the clock in {capped} of {len(mine)} cells")  # fmt: skip


def _table_profile(data: Data) -> str:
    units = ("tensor", "exp", "issue", "sram", "l2", "dram")
    header = ("kernel", "head dim", "mask", "length", *units, "GHz", "W", "power-limited", "TFLOP/s", "on zeros")
    rows = [
        (r["kernel"], str(r["head_dim"]), "causal" if r["causal"] else "full", str(r["length"]),
         *(f"{r['counters']['busy'][unit]:.0%}" for unit in units), f"{r['loaded']['mhz'] / 1000:.2f}",
         f"{r['loaded']['watts']:.0f}", f"{r['loaded']['capped']:.0%}", f"{r['loaded']['tflops']:.0f}",
         f"{r['zeros']['tflops']:.0f}" if "zeros" in r else "")
        for r in data["rows"]
    ]  # fmt: skip
    return _markdown_table(header, rows)


def _headline_fp8(data: Data) -> str:
    ratios: dict[int, list[float]] = {}
    for row in data["speed"]:
        ratios.setdefault(row["head_dim"], []).append(row["ratio"])
    speed = "; ".join(f"{min(r):.2f} to {max(r):.2f} × bfloat16 at head dim {dim}" for dim, r in ratios.items())
    errors = ", ".join(f"{row['rmse']:.1e} ({row['kernel']})" for row in data["accuracy"])
    return f"FP8: {speed}; RMSE {errors}"


def _table_fp8(data: Data) -> str:
    errors = _markdown_table(("kernel", "RMSE"), [(row["kernel"], f"{row['rmse']:.2e}") for row in data["accuracy"]])
    rows = [
        (str(s["head_dim"]), "causal" if s["causal"] else "full", str(s["length"]), f"{s['tflops']:.0f}",
         f"{s['tflops_bfloat16']:.0f}", f"{s['ratio']:.2f}")
        for s in data["speed"]
    ]  # fmt: skip
    header = ("head dim", "mask", "length", "TFLOP/s", "bfloat16", "ratio")
    return f"{errors}\n\n{_markdown_table(header, rows)}"


def _headline_sanitizers(data: Data) -> str:
    s = data["summary"]
    return (f"{s['findings']} findings by {', '.join(s['tools'])} over {s['runs']} runs; "
            f"{s['faults_found']} of {s['faults']} seeded faults found")  # fmt: skip


def _headline_agreement(data: Data) -> str:
    s = data["summary"]
    same = ", ".join(what for what, (equal, compared) in s["by_quantity"].items() if equal == compared)
    apart = [f"{what} in {equal} of {n}" for what, (equal, n) in s["by_quantity"].items() if equal != n]
    return (f"emulator and GPU over {s['problems']} problems: equal in every launch: {same}"
            f"{'; ' if apart else ''}{', '.join(apart)}; outputs at most {s['worst_output']:.2f} of the rule's bound apart; "
            f"{s['findings']} findings")  # fmt: skip


def _table_agreement(data: Data) -> str:
    rows = [(what, f"{n:,}", f"{equal:,}") for what, (equal, n) in data["summary"]["by_quantity"].items()]
    return _markdown_table(("", "launches", "equal"), rows)


def _headline_zoo(data: Data) -> str:
    s = data["summary"]
    return (f"of {s['mutants']} seeded faults that a GPU can show, the emulator found {s['emulator']}, compute-sanitizer "
            f"{s['both']} ({s['same_line']} of {s['with_lines']} at the emulator's line), and {s['hangs']} hang it; "
            f"{s['sound_findings']} findings in {s['sound']} runs of sound kernels")  # fmt: skip


def _headline_verify(data: Data) -> str:
    n = data["counts"]
    failed = dict.fromkeys(f"{row['check']} ({row['case']})" for row in data["rows"] if row["status"] == "failed")
    where = f", in {', '.join(failed)}" if failed else ""
    how = "full" if data.get("full") else "quick"
    return (f"{data['target']} on {data['backend']} ({how}): {data['verdict']}; {n['passed']:,} checks passed, "
            f"{n['failed']:,} failed{where}, {n['not run']:,} not run")  # fmt: skip


def _table_counters(data: Data) -> str:
    header = ("problem", "launch", "hbm.read", "hbm.write", "sram.read", "sram.write", "DRAM read")
    rows: list[tuple[str, ...]] = []
    for launch in data["launches"]:
        cells = {row["what"]: row for row in launch["rows"]}
        rows.append((
            launch["case"], launch["launch"],
            *(_agreement(cells.get(what)) for what in header[2:6]),
            f"{launch['dram']['measured']:,}" if launch["dram"] else "",
        ))  # fmt: skip
    models = [
        (model["case"], f"{model['measured']:,}", f"{model['estimate']:,}", f"{model['error']:+.1%}")
        for model in data["models"] if model["large"]
    ]  # fmt: skip
    text = _markdown_table(header, rows)
    return (
        text if not models else text + "\n\n" + _markdown_table(("problem", "DRAM read", "L2 model", "error"), models)
    )


def _agreement(row: Data | None) -> str:
    if row is None:
        return ""
    return f"= {row['measured']:,}" if row["verdict"] == "equal" else f"**{row['measured']} ≠ {row['formula']:,}**"


def _table_bench(data: Data) -> str:
    header = ("dtype", "head dim", "mask", "length", "kernel", "TFLOP/s", "ratio", "of matmul")
    rows = [
        (r["dtype"], str(r["head_dim"]), "causal" if r["causal"] else "full", str(r["length"]),
         r["peer"] or data["algorithm"], f"{r['tflops']:.0f}", "" if r["ratio"] is None else f"{r['ratio']:.2f}",
         "" if r["of_matmul"] is None else f"{r['of_matmul']:.0%}")
        for r in data["rows"]
    ]  # fmt: skip
    return _markdown_table(header, rows)


def _table_sanitizers(data: Data) -> str:
    header = ("tool", "algorithm", "problems", "findings", "verdict")
    return _markdown_table(
        header, [(r["tool"], r["target"], str(r["cases"]), str(r["findings"]), r["verdict"]) for r in data["rows"]]
    )


def _table_zoo(data: Data) -> str:
    header = ("fault", "kernel", "emulator", "line", "tool", "verdict", "tool's lines")
    return _markdown_table(header, [
        (r["target"], r["kernel"], r["emulator"], r["emulator_line"], r["tool"], r["verdict"], ", ".join(r["gpu_lines"][:3]))
        for r in data["rows"] if not r["sound"]
    ])  # fmt: skip


def _table_verify(data: Data) -> str:
    by_check: dict[str, Counter[str]] = {}
    for row in data["rows"]:
        by_check.setdefault(row["check"], Counter())[row["status"]] += 1
    columns = ("passed", "failed", "not run")
    rows = [(check, *(str(found[status]) for status in columns)) for check, found in by_check.items()]
    return _markdown_table(("check", *columns), rows)


def _headline_overhead(data: Data) -> str:
    calls = ", ".join(f"{row['microseconds']:.1f} µs ({row['algorithm']}, {row['framework']})" for row in data["rows"])
    return f"a warm call from Python: {calls}"


def _table_overhead(data: Data) -> str:
    rows = [(row["algorithm"], row["framework"], f"{row['microseconds']:.1f}") for row in data["rows"]]
    return _markdown_table(("algorithm", "arrays", "µs a call"), rows)


def _headline_emulator(data: Data) -> str:
    row = data["rows"][0]
    return (f"the emulator on {data['cores']} cores: {row['algorithm']}, float16, 2 heads × {row['length']} × 64, "
            f"in {row['seconds']:.3f} s")  # fmt: skip


def _table_emulator(data: Data) -> str:
    rows = [
        (row["algorithm"], f"2 × {row['length']:,} × 64", "yes" if row["sanitize"] else "no", f"{row['seconds']:.3f}")
        for row in data["rows"]
    ]
    return _markdown_table(("algorithm", "float16", "sanitised", "s"), rows)


def _headline_patterns(data: Data) -> str:
    instructions = {row["kernel"] for row in data["rows"]}
    return (f"sectors and wavefronts of {len(data['rows'])} access patterns of a warp, over {len(instructions)} "
            "instructions: what the emulator's counts are held to")  # fmt: skip


def _table_patterns(data: Data) -> str:
    names = list(dict.fromkeys(name for row in data["rows"] for name in row["counters"]))
    cells = [
        (row["kernel"], row["name"], row["mask"], *(str(row["counters"].get(name, "")) for name in names))
        for row in data["rows"]
    ]
    return _markdown_table(("kernel", "pattern", "lanes", *names), cells)


def _headline_accumulation(data: Data) -> str:
    rows = data["rows"]
    by_rule: dict[str, list[str]] = {}
    for row in rows:
        rule = (
            f"{row['together']} products at once, {row['kept']} bits below the largest and {row['mantissa']} of the sum"
        )
        by_rule.setdefault(rule, []).append(row["instruction"])
    said = "; ".join(f"{rule} ({', '.join(names)})" for rule, names in by_rule.items())
    return (f"tensor cores add {said}: the same in every bit in {sum(row['equal'] for row in rows):,} of "
            f"{sum(row['cases'] for row in rows):,} cases")  # fmt: skip


def _table_accumulation(data: Data) -> str:
    rows = data["rows"]
    header = ("rule", *(row["instruction"] for row in rows))
    equal = [("as measured", *(f"{row['equal'] / row['cases']:.2%}" for row in rows))]
    others = [
        (name, *(f"{row['alternatives'][name] / row['cases']:.2%}" for row in rows)) for name in rows[0]["alternatives"]
    ]
    return _markdown_table(header, [("cases", *(f"{row['cases']:,}" for row in rows)), *equal, *others])


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


_HEADLINES: dict[str, Callable[[Data], str]] = {
    "verify": _headline_verify, "counters": _headline_counters, "sanitizers": _headline_sanitizers,
    "bench": _headline_bench, "ladder": _headline_bench, "blind": _headline_blind, "rates": _headline_rates, "fp8": _headline_fp8,
    "patterns": _headline_patterns, "zoo": _headline_zoo, "agreement": _headline_agreement, "overhead": _headline_overhead,
    "accumulation": _headline_accumulation,
    "emulator": _headline_emulator, "profile": _headline_profile,
}  # fmt: skip
_TABLES: dict[str, Callable[[Data], str]] = {
    "verify": _table_verify, "counters": _table_counters, "sanitizers": _table_sanitizers, "bench": _table_bench,
    "ladder": _table_bench, "blind": _table_blind, "rates": _table_rates, "fp8": _table_fp8,
    "patterns": _table_patterns, "zoo": _table_zoo, "agreement": _table_agreement, "overhead": _table_overhead,
    "accumulation": _table_accumulation, "emulator": _table_emulator, "profile": _table_profile,
}  # fmt: skip
