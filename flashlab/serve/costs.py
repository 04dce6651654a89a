"""What a step costs: bytes by the formulas of the kernels, and a time that follows from them.

The kernels are today's. Requests with one new token are a launch of `paged`. Those with more are a launch of `flash3_paged` for
each number of new tokens, since all requests of a launch have as many. Each layer does all of it.

What a launch moves is a sum over its requests, and what its blocks read of the requests' lengths. So each length is counted once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from simulator.algorithms import flash_decoding
from simulator.catalogue import CATALOGUE
from simulator.config import Config
from simulator.counts import Book
from simulator.devices import Device
from simulator.errors import unknown
from simulator.fields import integer
from simulator.problem import Problem
from simulator.programs.flash_decoding import TILES_PER_CHUNK, Splits
from simulator.ragged import sorted_together

__all__ = ["Cost", "Costs", "Model", "Rate", "rates"]

Pair = tuple[int, int]
"""New tokens of a request, and its keys: all tokens that are computed then."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The attention layers of a model: what one token's K and V are, and how many queries meet them.

    `weights` are bytes that each step reads beside: those of all other layers, if they are to count. 0 is attention alone.
    """

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    weights: int = 0

    @property
    def token_bytes(self) -> int:
        """K and V of a token, in all layers.

        >>> Model().token_bytes
        131072
        """
        one = self.problem([(1, 1)], 16)
        return 2 * self.layers * self.kv_heads * self.head_dim * one.itemsize

    def problem(self, pairs: list[Pair], page_size: int) -> Problem:
        """The problem of a launch. Raises `UsageError` for what isn't a model's size."""
        for name, least in (("layers", 1), ("weights", 0)):
            integer(name, getattr(self, name), least)
        sizes: Any = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return Problem(batch=len(pairs), lengths=pairs, page_size=page_size, causal=True, **sizes)


class Rate(NamedTuple):
    """What was measured of a GPU: bytes a second that a plain read gets, and the seconds that a launch takes beyond its bytes."""

    bytes_per_second: float
    seconds_per_launch: float
    source: str


@cache
def rates() -> dict[str, Rate]:
    """The measured rates by GPU, drawn from docs/results/decoding.

    >>> sorted(rates())
    ['h100', 'h200']
    """
    path = Path(__file__).resolve().parents[1] / "data" / "measured.json"
    return {name: Rate(**found) for name, found in json.loads(path.read_text(encoding="utf-8"))["reading"].items()}


class Cost(NamedTuple):
    """Launches of attention, bytes of HBM that they request, those of K and V among them, and the predicted seconds."""

    launches: int
    nbytes: int
    kv_bytes: int
    seconds: float


class _Part(NamedTuple):
    """What one request adds to a launch of one layer."""

    nbytes: int
    kv_bytes: int
    blocks: int


class Costs:
    """What steps cost for a model, on pages of a size, on a GPU whose rate was measured.

    >>> cost = Costs(Model(layers=1), page_size=16, device="h200").step([(1, 4096)] * 64)
    >>> cost.launches, cost.kv_bytes, f"{cost.seconds * 1e6:.0f} µs"
    (1, 1073741824, '240 µs')
    """

    def __init__(self, model: Model, page_size: int, device: str = "h100") -> None:
        self.model, self.page_size, self.device = model, page_size, Device.named(device)
        known = rates()
        if self.device.name not in known:
            raise unknown("device", device, known)
        self.rate = known[self.device.name]
        for algorithm, pair in (("paged", (1, 1)), ("flash3_paged", (2, 2))):
            CATALOGUE[algorithm].check(model.problem([pair], page_size), self.device)
        self._config, self._one = cache(self._configured), cache(self._alone)
        self._part = cache(self._counted)
        self._units = cache(self._dealt_out)
        self._passes = cache(self._walked)

    def step(self, pairs: Iterable[Pair]) -> Cost:
        """The cost of a step whose requests have so many new tokens, and so many keys."""
        groups = defaultdict[int, list[Pair]](list)
        for pair in pairs:
            groups[pair[0]].append(pair)
        layers, nbytes, kv_bytes = self.model.layers, 0, 0
        for group in groups.values():
            moved = self._launch(group)
            nbytes, kv_bytes = nbytes + moved.nbytes, kv_bytes + moved.kv_bytes
        launches = len(groups) * layers
        read = nbytes * layers + self.model.weights
        seconds = launches * self.rate.seconds_per_launch + read / self.rate.bytes_per_second
        return Cost(launches, nbytes * layers, kv_bytes * layers, seconds)

    def _launch(self, group: list[Pair]) -> _Part:
        """What a launch of one layer moves, as `fl.count` says."""
        new, requests = group[0][0], len(group)
        config = self._config(new)
        run = self._run(group, config) if new == 1 else 0
        parts = [self._part(pair, run) for pair in group]
        nbytes, kv_bytes, blocks = (sum(each) for each in zip(*parts, strict=True))
        if config.sorted:
            lengths = 4 * (blocks // requests) * sum(n * n for n in sorted_together(requests))
        else:
            walks = self._passes(requests, run) * flash_decoding.WALKS * config.warps
            lengths = 4 * requests * walks * min(blocks, self.device.sms)
        return _Part(nbytes + lengths, kv_bytes, blocks)

    def _configured(self, new: int) -> Config:
        program = CATALOGUE["paged" if new == 1 else "flash3_paged"].program
        return program.configure(self.model.problem([(new, new)], self.page_size), self.device, None)

    def _alone(self, pair: Pair) -> Problem:
        return self.model.problem([pair], self.page_size).sequences[0]

    def _counted(self, pair: Pair, run: int) -> _Part:
        row = CATALOGUE["paged" if pair[0] == 1 else "flash3_paged"]
        one, config = self._one(pair), self._config(pair[0])
        if run:
            config = replace(config, constants=tuple((k, run if k == "RUN" else n) for k, n in config.constants))
        book = Book(row.name, one, config.tile, self.device, config)
        for operands, role in ((row.operation.taken(one), "input"), (row.operation.written(one), "output")):
            for operand in operands:
                book.tensor(operand.spec(one, config.tile, role))
        assert row.formula is not None
        row.formula(book, one, config.tile, config, lse=False)
        counts = book.close()
        moved = counts.hbm.read + counts.hbm.write + counts.hbm.atomic
        kv = counts.by_tensor["k"].hbm_read + counts.by_tensor["v"].hbm_read
        return _Part(moved, kv, counts.launches[0].blocks)

    def _walked(self, requests: int, run: int) -> int:
        return flash_decoding.passes(self.model.problem([(1, 1)] * requests, self.page_size), run)

    def _dealt_out(self, keys: int, run: int) -> int:
        """Units of a request with one new token: its runs, for each KV head."""
        one = self._one((1, keys))
        splits = Splits(one, self._config(1).tile, run)
        return splits.runs * splits.row_tiles * one.kv_heads

    def _run(self, group: list[Pair], config: Config) -> int:
        """How many chunks a block of `paged` computes before it moves on, as `flash_decoding.run_for` chooses."""
        cols = config.tile.cols
        runs = flash_decoding.runs_of(self._one((1, 1)), config.tile, config.warps)
        tiles = [-(-keys // cols) * cols for _, keys in group]  # whole tiles have as many units
        units = {run: sum(self._units(keys, run) for keys in tiles) for run in runs}
        longest = max(1, -(-max(tiles) // (TILES_PER_CHUNK * cols)))
        return flash_decoding.best_run(units, longest, self._one((1, 1)), config.tile, config.warps, self.device)
