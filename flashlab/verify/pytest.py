"""What the pytest plugin does once a test uses it. The plugin itself is `_flashlab_pytest`, outside of the package.

`verify_attention` and `assert_bytes` may also be imported from here: they are plain functions that raise AssertionError.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

from flashlab.base.files import replace_file
from flashlab.emulator import FileRun, Launched
from flashlab.run.emulated import Emulation
from flashlab.verify import Adapter, Report, verify
from flashlab.views.differences import differences, read
from simulator import Counts, Program, Run
from simulator.counts import LaunchCounts
from simulator.errors import Unavailable, UsageError, unknown

__all__ = ["Baseline", "assert_bytes", "bytes_of", "missing", "verify_attention"]

SCHEMA = 1
"""The version of the baselines. It rises when a key changes its meaning."""
WHATS = ("hbm.read", "hbm.write", "hbm.atomic", "sram.read", "sram.write")
_ADAPTER = frozenset(field.name for field in fields(Adapter)) - {"fn"}
_OPTIONS = [name for name in signature(verify).parameters if name not in ("target", "launch")]

Moved = dict[str, dict[str, dict[str, int]]]
"""Bytes by launch, what ("hbm.read") and tensor."""


def verify_attention(fn: Any, **options: Any) -> Report:
    """Verify a function, a kernel, an adapter or a name. Raises AssertionError with the report if it doesn't pass.

    The options are those of `fl.Adapter` (`layout`, `causal`, `lse`, `domain` ...) and of `fl.verify` (`dtypes`,
    `checks`, `examples` ...). Returns the report, whose `verdict` says more: "passed, LSE unchecked".

    >>> import flashlab as fl
    >>> def attention(q, k, v, causal=False): return fl.naive(q, k, v, causal=causal).out.astype(q.dtype)
    >>> verify_attention(attention, dtypes=["float32"], checks=["prefix"]).verdict
    'passed, LSE unchecked'
    """
    __tracebackhide__ = True
    if callable(fn) and not isinstance(fn, Adapter | Program):
        known = [*sorted(_ADAPTER), *_OPTIONS]
        for name in options.keys() - known:
            raise unknown("keyword", name, known)
        conventions = {name: options.pop(name) for name in _ADAPTER & options.keys()}
        fn = Adapter(fn, **conventions)
    report = verify(fn, **options)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def assert_bytes(run: Any, *, at_most: Mapping[str, int] | None = None, **exactly: int) -> None:
    """Assert what a run moved, in bytes: `hbm_read`, `hbm_write`, `hbm_atomic`, `sram_read` or `sram_write`.

    `run` is what `fl.emulate`, `fl.emulate_file`, `fl.simulate`, `fl.count` or a kernel's `run` returned. Keywords must
    be met exactly, and `at_most` has budgets. Raises AssertionError with a table of what differs.

    >>> import flashlab as fl
    >>> c = fl.count("flash2", fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16"), tile=(64, 64))
    >>> assert_bytes(c, hbm_read=81920, at_most={"hbm_write": 20_000})
    """
    __tracebackhide__ = True
    if not isinstance(at_most, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("at_most", at_most, "a dictionary of bytes, as in {'hbm_write': 8192}")
    moved, budgets = bytes_of(run), dict(at_most or {})
    totals = Counter[str]()
    for launch in moved.values():
        for what, tensors in launch.items():
            totals[what] += sum(tensors.values())
    wrong: list[str] = []
    for sign, wanted in (("=", exactly), ("<=", budgets)):
        for name, limit in wanted.items():
            what = str(name).replace("_", ".", 1)
            if what not in WHATS:
                raise unknown("what", name, [each.replace(".", "_") for each in WHATS])
            if isinstance(limit, bool) or not isinstance(limit, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(name, limit, "a number of bytes")
            n = totals[what]
            if (n != limit) if sign == "=" else (n > limit):
                parts = ", ".join(f"{tensor} {x:,}" for tensor, x in _by_tensor(moved, what).items())
                wrong.append(f"{name} is {n:,}, expected {sign} {limit:,} ({n - limit:+,}): {parts or 'nothing'}")
    if wrong:
        raise AssertionError("\n".join([f"{', '.join(moved)} moves other bytes than expected", *wrong]))


def bytes_of(run: Any) -> Moved:
    """What a run moved: bytes by launch, what and tensor. Raises `UsageError` for what isn't a run.

    A launch that a finding stopped raises AssertionError: how far it came is an accident.
    """
    found: Moved = {}
    for launch in _launches(run):
        if isinstance(launch, Launched) and launch.stopped:
            raise AssertionError(
                "\n".join([f"{launch.kernel} was stopped, so its bytes say nothing", *map(str, launch.findings)])
            )
        names = launch.kernel if isinstance(launch, Launched) else launch.name
        own = next(
            name for n in range(1, len(found) + 2) if (name := names if n == 1 else f"{names}, {n}") not in found
        )
        sums: Counter[tuple[str, str]] = Counter()
        for what, tensor, n in _ledger(launch):
            sums[what, tensor] += n
        found[own] = {}
        for (what, tensor), n in sorted(sums.items()):
            found[own].setdefault(what, {})[tensor] = n
    return found


def _launches(run: Any) -> Iterable[Launched | LaunchCounts]:
    if isinstance(run, FileRun):
        return [run.launched]
    if isinstance(run, Launched):
        return [run]
    if isinstance(run, Run):
        run = run.counts
    if isinstance(run, Emulation | Counts):
        return run.launches
    raise UsageError("run", run, "what fl.emulate, fl.emulate_file, fl.simulate, fl.count or a kernel's run returned")


def _ledger(launch: Launched | LaunchCounts) -> Iterable[tuple[str, str, int]]:
    """(what, tensor, bytes). Of a kernel with steps, what a block writes to SRAM before the first counts nothing."""
    if isinstance(launch, LaunchCounts):
        return [(entry.what, entry.tensor, n) for entry, n in launch.ledger.items()]
    steps = any(row.step for row in launch.moved)
    return [
        (row.what, row.tensor, row.bytes) for row in launch.moved if row.step or not steps or row.what != "sram.write"
    ]


def _by_tensor(moved: Moved, what: str) -> Counter[str]:
    sums = Counter[str]()
    for launch in moved.values():
        sums.update(launch.get(what, {}))
    return sums


@dataclass(frozen=True)
class Baseline:
    """The fixture `counts_baseline` of one test: a run's counts against those in a file.

    `written` is None where they are compared. Where they are to be written, the file is noted there.
    """

    path: Path
    test: str
    written: dict[str, None] | None

    def __call__(self, run: Any, name: str = "") -> None:
        """Compare, or write. Raises AssertionError with a table of what differs, or if there is no baseline."""
        __tracebackhide__ = True
        key, moved = self.test + (f": {name}" if name else ""), bytes_of(run)
        known: dict[str, Moved] = self._read()
        where = os.path.relpath(self.path)
        if self.written is not None:
            if known.get(key) != moved:
                content = {"schema": SCHEMA, "counts": dict(sorted({**known, key: moved}.items()))}
                replace_file(self.path, json.dumps(content, indent=1) + "\n", argument="baseline")
                self.written[where] = None
            return
        if key not in known:
            raise AssertionError(f"{where} has no counts of {key}: run pytest --flashlab-update, and commit the file")
        found = differences(known[key], moved)
        if found.found:
            raise AssertionError(
                f"counts of {key} differ from {where} (pytest --flashlab-update accepts them), in bytes\n{found.text}"
            )

    def _read(self) -> dict[str, Moved]:
        if not self.path.exists():
            return {}
        content = read("baseline", self.path)
        if content.get("schema") != SCHEMA or not isinstance(content.get("counts"), dict):
            raise UsageError("baseline", str(self.path), f"counts of schema {SCHEMA}, as --flashlab-update writes them")
        return content["counts"]


def missing(marker: str) -> str | None:
    """What a marker needs and isn't here, in one line with how to get it, or None."""
    try:
        if marker == "flashlab_gpu":
            from flashlab.run.devices import current_device

            current_device()
        else:
            from flashlab.emulator.build import compiler
            from flashlab.emulator.places import check_tools

            compiler()
            check_tools()
    except Unavailable as error:
        return str(error)
    return None
