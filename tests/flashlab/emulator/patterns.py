"""A warp's access patterns, which ncu counted on a GPU, on the emulator. A result of kind `patterns` has them, with the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.emulator import Arena, Launched, Library, build

SOURCE = Path(__file__).with_name("patterns.cu")

LANES = np.dtype([("at", "i4", 32), ("to", "i4", 32), ("mask", "u4")])
"""The layout of `struct Lanes` in patterns.cu."""

SPAN = 32 * 1024
"""The bytes of HBM, and of SRAM, that patterns may touch."""

KERNELS = (
    "load_global_4", "load_global_8", "load_global_16", "store_global_4", "store_global_8", "store_global_16",
    "add_global_4", "copy_async_16", "load_shared_4", "load_shared_8", "load_shared_16", "store_shared_4",
    "store_shared_8", "store_shared_16", "ldmatrix_16", "ldmatrix_transposed_16",
)  # fmt: skip
"""The kernels of patterns.cu. The number is how many bytes each lane asks for."""

ALL = 0xFFFFFFFF


@dataclass(frozen=True)
class Pattern:
    """A kernel, and the byte offsets `at` that the lanes of `mask` ask for. Copies go to the offsets `to` in SRAM."""

    name: str
    kernel: str
    at: tuple[int, ...]
    to: tuple[int, ...]
    mask: int = ALL

    @property
    def bytes(self) -> int:
        """How many bytes each lane asks for."""
        return int(self.kernel.rsplit("_", 1)[1])

    @property
    def in_sram(self) -> bool:
        """True if the kernel touches SRAM."""
        return "global" not in self.kernel

    def argument(self) -> np.void:
        """The kernel's argument, a `struct Lanes`."""
        return np.array([(self.at, self.to, self.mask)], LANES)[0]


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
