"""How fast the kernels are beside the best kernel of others, cell by cell, from the newest runs that timed both.

In each cell only the fastest peer counts. A ratio is the peer's time over the kernel's: above 1, the kernel is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from docs._site import evidence
from flashlab.measure import results
from simulator.catalogue import CATALOGUE

KINDS = ("bench", "decoding", "append")
"""The kinds whose runs have other libraries beside a kernel."""
PEERS = {
    "fa3": "FlashAttention-3", "fa3-wheel": "FlashAttention-3 (wheel)", "fa4": "FlashAttention-4", "cudnn": "cuDNN",
    "cudnn-paged": "cuDNN", "sdpa-flash": "torch's flash", "sdpa-efficient": "torch's efficient", "flex": "FlexAttention",
    "flashinfer": "FlashInfer", "flashinfer-batch": "FlashInfer", "flashinfer-fa2": "FlashInfer",
}  # fmt: skip
"""Whose kernel each is, by its name in a result."""


@dataclass(frozen=True)
class Speed:
    """A run, and in each of its cells the ratio to the fastest peer, by the peer's name in the result."""

    algorithm: str
    of: results.Result
    cells: tuple[tuple[float, str], ...]

    @property
    def ratios(self) -> list[float]:
        return sorted(ratio for ratio, _ in self.cells)

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def peers(self) -> str:
        """Whose kernels were beside it, the most often fastest first."""
        names = [PEERS[peer] for _, peer in self.cells]
        return ", ".join(sorted(dict.fromkeys(names), key=names.count, reverse=True))


def cells(of: results.Result) -> Iterator[Mapping[str, float]]:
    """The ratios to each peer, cell by cell. An algorithm of the catalogue is none, nor is a read of the same bytes."""
    if of.kind != "bench":
        for row in of.data["rows"]:
            yield {peer: ratio for peer, ratio in row["ratios"].items() if peer in PEERS}
        return
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in of.data["rows"]:
        if row["peer"] in PEERS:
            key = row["dtype"], row["head_dim"], row["causal"], row["length"], row.get("shape")
            found.setdefault(key, {})[row["peer"]] = row["ratio"]
    yield from found.values()


def speed(of: results.Result) -> Speed | None:
    """What a run says, or None where it had no peer."""
    found = [min((ratio, peer) for peer, ratio in cell.items()) for cell in cells(of) if cell]
    return Speed(of.data["algorithm"], of, tuple(found)) if found else None


def speeds() -> list[Speed]:
    """The best evidence of each algorithm: of today's kernel, under no special condition, of the newest day."""
    found: dict[str, list[Speed]] = {}
    for kind in KINDS:
        for of in evidence.measured(kind):
            if of.data["algorithm"] in CATALOGUE and (one := speed(of)):
                found.setdefault(one.algorithm, []).append(one)

    def rank(one: Speed) -> tuple[bool, bool, str]:
        return one.of.of_today(one.algorithm), one.of.condition is None, str(one.of.content["date"])

    return [max(found[name], key=rank) for name in CATALOGUE if name in found]
