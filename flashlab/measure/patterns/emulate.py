"""Runs the access patterns on the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flashlab.emulator import Arena, Launched, Library, build
from flashlab.measure.patterns.patterns import SOURCE, SPAN, Pattern

__all__ = ["counted", "crosses_lines", "differences", "launched", "library", "measured", "pattern_of"]


def library() -> Library:
    """The kernels of patterns.cu, built for the CPU."""
    return build(SOURCE, ("-DFL_DTYPE=1",), watch=False)


def pattern_of(row: Mapping[str, Any]) -> Pattern:
    """The pattern of a saved row."""
    at, to = (tuple(map(int, row[key].split())) for key in ("at", "to" if "to" in row else "at"))
    return Pattern(row["name"], row["kernel"], at, to, int(row["mask"], 16))


def launched(kernels: Library, pattern: Pattern) -> Launched:
    """Launch a pattern: one warp."""
    arena = Arena()
    arena.new("data", SPAN)
    arguments = [arena.pointer("data").to_bytes(8, "little"), pattern.argument().tobytes()]
    sram = SPAN if pattern.in_sram else 0
    return kernels.launch(pattern.kernel, [1], [32], arguments, arena, sram=sram, sanitize=False, workers=1)


def counted(kernels: Library, pattern: Pattern) -> dict[str, int]:
    """The emulator's sectors and wavefronts by instruction, without zeros. `measure.metrics` gives the names."""
    found: Counter[str] = Counter()
    for row in launched(kernels, pattern).moved:
        name, quantity = ("sectors", row.sectors) if row.space == "hbm" else ("wavefronts", row.wavefronts)
        found[f"{name}_{row.op}"] += quantity
    return {name: n for name, n in found.items() if n}


def measured(row: Mapping[str, Any]) -> dict[str, int]:
    """What the emulator must count for a saved row.

    It is the hardware's own counter where there is one, and otherwise the one that ncu derives from instructions. The
    two differ for a few 16-byte loads; counts.cpp says how.
    """
    counters: dict[str, int] = row["counters"]
    mine = {name: n for name, n in counters.items() if not name.startswith("hardware_")}
    return {name: counters.get(f"hardware_{name}", n) for name, n in mine.items()}


def differences(
    rows: Iterable[Mapping[str, Any]], kernels: Library | None = None
) -> list[tuple[Mapping[str, Any], str]]:
    """The measured patterns that the emulator counts otherwise, each with a line that shows both counts."""
    kernels = kernels or library()
    found: list[tuple[Mapping[str, Any], str]] = []
    for row in rows:
        here, there = counted(kernels, pattern_of(row)), measured(row)
        if here != there:
            found.append((row, f"{row['kernel']}, {row['name']}: measured {there}, emulated {here}"))
    return found


def crosses_lines(pattern: Pattern) -> bool:
    """True if a copy fills a line of SRAM (128 bytes) from several of HBM, or spreads a line of HBM over several.

    Only for such copies may the emulator's wavefronts differ from ncu's.
    """
    lanes = [lane for lane in range(32) if pattern.mask >> lane & 1]
    pairs = {(pattern.at[lane] // 128, pattern.to[lane] // 128) for lane in lanes}
    return len(pairs) > min(len({line for line, _ in pairs}), len({line for _, line in pairs}))
