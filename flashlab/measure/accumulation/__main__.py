"""How the tensor cores of a Hopper GPU add: which rule gives the same bits, and whether the emulator gives them too.

python -m flashlab.measure.accumulation measure    measure on a GPU and write docs/results
python -m flashlab.measure.accumulation compare    hold the rule and the emulator to the newest file there
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.measure import results
from flashlab.measure.accumulation.cases import INSTRUCTIONS, Array, Cases, Instruction, chosen, drawn
from flashlab.measure.accumulation.launches import emulated, on_gpu
from flashlab.measure.accumulation.model import Rule, alternatives
from flashlab.measure.accumulation.recorded import different, recorded, text
from flashlab.measure.results import Data, Kind, markdown_table

CHAIN = 6
"""The length of a chain: instructions one after the other, each of which adds to the sums of the one before."""
DRAWN, CHAINS = 20_000, 3_000
"""Random cases per kind: of single instructions, and of chains."""


def measure(folder: Path, *, replace: bool) -> None:
    """Run all cases on the GPU, count how many each rule gives in every bit, and save the counts and some cases."""
    rows: list[dict[str, Any]] = []
    saved: list[dict[str, Any]] = []
    for name, instruction in INSTRUCTIONS.items():
        rule, others = instruction.rule, alternatives(instruction.rule)
        equal: Counter[str] = Counter(dict.fromkeys(others, 0))
        cases = right = 0
        for few, kind in _cases(instruction):
            d = on_gpu(instruction, kind)
            same = {other: _same(instead, kind, d) for other, instead in others.items()}
            equal.update({other: int(found.sum()) for other, found in same.items()})
            cases, right = cases + len(d), right + int(_same(rule, kind, d).sum())
            telling = {int(np.argmin(found)) for found in same.values() if not found.all()}
            chosen_ones = sorted({*range(0, len(d), -(-len(d) // few)), *telling})
            saved.append({"instruction": name, "name": kind.name, "cases": text(kind, d, chosen_ones)})
        rows.append(
            {
                "instruction": name,
                "kept": rule.kept,
                "mantissa": rule.mantissa,
                "together": rule.together,
                "cases": cases,
                "equal": right,
                "alternatives": dict(equal),
            }
        )
    about = {**results.environment(), "command": "python -m flashlab.measure.accumulation measure"}
    data = {"rows": rows, "recorded": saved}
    print(results.save(KIND, [], data, subject="products", folder=folder, replace=replace, about=about))


def _cases(instruction: Instruction) -> list[tuple[int, Cases]]:
    """Every kind of cases, with how many of them are saved (besides one case for each rule that the kind refutes)."""
    once, chains = drawn(instruction, 1, DRAWN, seed=0), drawn(instruction, CHAIN, CHAINS, seed=1)
    kinds = ((12, chosen(instruction)), (4, once), (1, chains))
    return [(few, kind) for few, several in kinds for kind in several]


def _same(rule: Rule, kind: Cases, d: Array) -> Array:
    """Which cases a rule gives in every bit: booleans (n,), for the GPU's results `d` (n,)."""
    return rule.added(kind.a, kind.b, kind.c).view(np.uint32) == d.view(np.uint32)


def compare(folder: Path) -> int:
    """Print every case in which the rule or the emulator gives another bit, and return how many there are.

    The emulator is held to it in e4m3 only: it adds products of 16 bits in float32.
    """
    result = results.latest("accumulation", folder)
    if result is None:
        sys.exit(f"no measured products in {folder}: python -m flashlab.measure.accumulation measure, on a Hopper GPU")
    wrong = 0
    for instruction, kind, d in recorded(result.data):
        ways = {"rule": instruction.rule.added(kind.a, kind.b, kind.c)}
        if instruction.dtype.itemsize == 1:
            ways["emulator"] = emulated(instruction, kind)
        for way, got in ways.items():
            for line in different(kind, d, got):
                wrong += 1
                print(f"{instruction.entry}, {way}: {line}")
    print(f"{wrong} cases differ ({result.path.name})")
    return wrong


class Row(Data):
    """One instruction, its rule, and in how many cases this rule and each alternative give every bit."""

    instruction: str
    kept: int
    mantissa: int
    together: int
    cases: int
    equal: int
    alternatives: dict[str, int]


class Recorded(Data):
    """Some cases of a kind in hexadecimal: a, b, c and the sum."""

    instruction: str
    name: str
    cases: tuple[str, ...]


class Sums(Data):
    """What `measure` found: a row per instruction, and recorded cases."""

    rows: tuple[Row, ...]
    recorded: tuple[Recorded, ...]


def headline(data: Sums) -> str:
    """One sentence: each rule, and in how many cases it holds."""
    by_rule: dict[str, list[str]] = {}
    for row in data.rows:
        rule = (
            f"{row.together} products at a time, with {row.kept} bits below the largest and {row.mantissa} of the sum"
        )
        by_rule.setdefault(rule, []).append(row.instruction)
    said = "; ".join(f"{rule} ({', '.join(names)})" for rule, names in by_rule.items())
    return (
        f"tensor cores add {said}: the same in every bit in {sum(row.equal for row in data.rows):,} of "
        f"{sum(row.cases for row in data.rows):,} cases"
    )


def table(data: Sums) -> str:
    """A Markdown table: a row per rule, a column per instruction."""
    rows = data.rows
    equal = [("as measured", *(f"{row.equal / row.cases:.2%}" for row in rows))]
    others = [(name, *(f"{row.alternatives[name] / row.cases:.2%}" for row in rows)) for name in rows[0].alternatives]
    header = ("rule", *(row.instruction for row in rows))
    return markdown_table(header, [("cases", *(f"{row.cases:,}" for row in rows)), *equal, *others])


KIND = Kind(
    "accumulation",
    "Numbers: how tensor cores add",
    "the rule by which tensor cores add products, bit for bit, with cases that the emulator is held to",
    "python -m flashlab.measure.accumulation measure",
    Sums,
    headline,
    table,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flashlab.measure.accumulation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("--folder", type=Path, default=results.FOLDER, help="folder of the results")
    parser.add_argument("--force", action="store_true", help="replace today's file")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.folder, replace=options.force)
    else:
        sys.exit(compare(options.folder) > 0)


if __name__ == "__main__":
    main()
