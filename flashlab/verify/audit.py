"""Tests put to the test: which wrong attention kernels of the zoo does a test let pass, and which input would have caught them?"""

from __future__ import annotations

import inspect
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

from flashlab.verify.adapter import KEYWORDS, Adapter, CallableTarget
from flashlab.verify.bench import Bench
from flashlab.verify.cases import INPUTS, describe, edges
from flashlab.verify.rule import Align, bottom_right
from flashlab.verify.zoo import KINDS, Fault, tiled
from simulator import Problem
from simulator.dtypes import Array, as_numpy
from simulator.errors import Said, Unavailable, UsageError, among, unknown
from simulator.fields import integer
from simulator.names import DType
from simulator.operations.attention import ATTENTION

__all__ = ["Audit", "Audited", "Replacement", "audit_inputs", "audit_test", "telling"]

SCHEMA = 1
"""The version of `Audit.to_dict`. It rises when a key changes its meaning."""
ZOO: Mapping[Fault, str] = {fault: kind for kind, faults in KINDS.items() for fault in faults}
"""The kind of each fault."""
_OF_MASKS = ("sentinel", "mask ", "NaN in empty", "mean in empty", "LSE 0 in empty", "uninitialised", "len_q of 1")
_OF_SCALES = ("scale ignored", "scale rounded", "scale absolute", "zero scale")


@dataclass(frozen=True, kw_only=True)
class Audited:
    """One wrong kernel: `status` is "caught", "passes", or "not run" where the function can't show its fault. `calls` of it were
    made. `telling` is an input that would have caught it, by the row rule or a probe of `fl.verify`."""

    fault: str
    kind: str
    status: str
    calls: int = 0
    telling: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit:
    """What a test lets pass. `passed` is true if it catches every wrong kernel whose fault it could see.

    `beside` calls went to the function itself, since they asked for what the wrong kernels don't know.
    """

    test: str
    rows: Sequence[Audited]
    seconds: float
    beside: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many wrong kernels were caught, passed, and weren't run."""
        found = Counter(row.status for row in self.rows)
        return {status: found[status] for status in ("caught", "passes", "not run")}

    @property
    def passed(self) -> bool:
        return not self.counts["passes"] and self.counts["caught"] > 0

    def __repr__(self) -> str:
        return f"<Audit {self.headline}>"

    @property
    def headline(self) -> str:
        """The result in a line."""
        n = self.counts
        out = f" ({n['not run']} can't show in this function)" if n["not run"] else ""
        return f"{self.test} catches {n['caught']} of {n['caught'] + n['passes']} wrong kernels{out}"

    def __str__(self) -> str:
        lines = [self.headline]
        for row in self.rows:
            if row.status == "passes":
                lines.append(f"  passes: {row.fault}; {row.telling} would have caught it")
        if self.beside:
            lines.append(
                f"  {self.beside} calls went to the function itself: they ask for what the wrong kernels don't know"
            )
        return "\n".join(lines)

    def print(self, file: Any = None) -> None:
        """Print it to the terminal, or into an open text file."""
        print(self, file=file)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": SCHEMA, "test": self.test, "passed": self.passed, "counts": self.counts, "beside": self.beside,
            "seconds": round(self.seconds, 3), "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip


@cache
def telling(fault: Fault, dtype: DType = "float16") -> str:
    """An input that shows a fault, in words: the first edge that breaks the row rule, or else the first probe that fails.

    >>> telling("scale missing")
    'aligned (1x2x128x128x64 float16)'
    """
    from flashlab.verify import verify  # which imports this room

    adapter = Adapter(tiled(fault), lse="e", bitwise=True)
    bench = Bench(CallableTarget(adapter), (dtype,), False, 0)
    with np.errstate(all="ignore"):
        for word, case in edges(dtype, full=False):
            if bench.does(case.problem) and bench.perform("rule", _trial(bench, word, case)).status == "failed":
                inputs = "" if case.inputs == "normal" else f", {INPUTS[case.inputs]}"
                return f"{word} ({describe(case.problem)}{inputs})"
        report = verify(adapter, dtypes=[dtype], examples=0)
    row = next(iter(report.failed), None)
    return "" if row is None else f"{row.check}, {row.case} ({row.problem})"


def _trial(bench: Bench, word: str, case: Any) -> Any:
    from flashlab.verify.bench import Trial

    return Trial(word, case.problem, lambda: bench.judge_case(case), case)


def audit_inputs(
    problem: Problem, *, rtol: float, atol: float, inputs: str = "normal", seed: int = 0
) -> Audit:  # fmt: skip
    """Which wrong kernels pass a comparison of `out` with attention in float64, on the inputs of one problem.

    The comparison is that of `numpy.allclose`, element by element: `|out - ref| <= atol + rtol |ref|`. `inputs` is one of
    `flashlab.verify.INPUTS`. Raises `UsageError` for bad input.

    >>> import flashlab as fl
    >>> from flashlab.testing import audit_inputs
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=32, dtype="float16")
    >>> audit_inputs(p, rtol=1e-2, atol=1e-2).counts["caught"] < 40
    True
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(name, value, "a number of at least 0")
    among("inputs", inputs, INPUTS)
    integer("seed", seed, 0)
    if not isinstance(problem, Problem):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("problem", problem, "a Problem")
    unlike = [name for name in problem.applied if name not in ("causal", "window", "scale")]
    if unlike:
        raise UsageError(
            "problem", ", ".join(unlike), "none but causal, window and scale: the wrong kernels know no others"
        )
    begun, arrays = time.perf_counter(), ATTENTION.draw(problem, seed, inputs)
    truth = ATTENTION.judge(problem, arrays)["out"]
    told: Any = {"causal": problem.causal, "scale": problem.scale, "window": problem.window}
    rows = list[Audited]()
    for fault, kind in ZOO.items():
        if kind == "LSE":
            continue  # only `out` is compared
        kernel = tiled(fault)
        with np.errstate(all="ignore"):
            out = np.asarray(kernel(*(arrays[name].copy() for name in "qkv"), **told)[0], np.float64)
        close = out.shape == truth.shape and bool((np.abs(out - truth) <= atol + rtol * np.abs(truth)).all())
        status = "passes" if close else "caught"
        known = telling(fault) if close else ""
        rows.append(Audited(fault=fault, kind=kind, status=status, calls=1, telling=known))
    words = f"{describe(problem)}, rtol {rtol:g}, atol {atol:g}"
    return Audit(test=words, rows=rows, seconds=time.perf_counter() - begun)


@dataclass
class Replacement:
    """What stands in for a function of attention: a kernel of the zoo, called by the function's own conventions.

    Arrays have four axes in `layout`, or three (batch, length, head_dim), or two. A call that asks for what the kernels don't know
    goes to the function itself. `lse`: it returns (out, lse), to that base.
    """

    fn: Callable[..., Any]
    layout: str = "bhsd"
    causal: Align = "bottom-right"
    lse: str | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    kernel: Callable[..., Any] | None = None
    calls: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        among("layout", self.layout, ("bhsd", "bshd"))
        among("causal", self.causal, ("bottom-right", "top-left"))
        if self.lse is not None:
            among("lse", self.lse, ("e", "2"))
        try:
            self.signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            raise UsageError(
                "replace", Said(getattr(self.fn, "__name__", "it")), "a function with a signature"
            ) from None

    def knows(self, name: str) -> str | None:
        """The function's own keyword for causal, scale or window."""
        own = (self.names[name],) if name in self.names else KEYWORDS[name]
        return next((word for word in own if word in self.signature.parameters), None)

    def shows(self, fault: str) -> bool:
        """Can the function show a fault at all?"""
        if ZOO.get(cast("Fault", fault)) == "LSE":
            return self.lse is not None
        if fault.startswith("window"):
            return self.knows("window") is not None
        if fault.startswith("causal") or fault.startswith(_OF_MASKS):
            return self.knows("causal") is not None or (
                self.knows("window") is not None and not fault.startswith("causal")
            )
        return not fault.startswith(_OF_SCALES) or self.knows("scale") is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kernel is None or (asked := self._asked(*args, **kwargs)) is None:
            self.beside += self.kernel is not None
            return self.fn(*args, **kwargs)
        self.calls += 1
        return self._done(*asked)

    def _asked(self, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """q, k and v, and what the kernels know of the rest; None if they can't do it."""
        given = self.signature.bind(*args, **kwargs)
        rest = dict(given.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                rest |= rest.pop(name, {})
        arrays = [rest.pop(name) for name in list(rest)[:3]]
        if len(arrays) < 3 or not all(hasattr(x, "shape") and 2 <= len(x.shape) <= 4 for x in arrays):
            return None
        masks = {
            name: rest.pop(own) for name in ("causal", "scale", "window") if (own := self.knows(name)) and own in rest
        }
        for name, value in rest.items():
            known = self.signature.parameters.get(name)
            default = None if known is None or known.default is known.empty else known.default
            if not (
                value is None or value is False or value is default or (np.isscalar(value) and value == (default or 0))
            ):
                return None
        window = masks.get("window")
        if window is not None:
            left, right = window
            masks["window"] = tuple(None if n is None or n < 0 else int(n) for n in (left, right))
        return arrays, masks

    def _done(self, arrays: Sequence[Any], masks: dict[str, Any]) -> Any:
        from flashlab.base.host import from_numpy, kind_of  # only where something is run

        first, axes = arrays[0], len(arrays[0].shape)
        q, k, v = (self._four(_values(x)) for x in arrays)
        causal, scale, window = bool(masks.get("causal")), masks.get("scale"), masks.get("window")
        p = Problem(
            batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], len_q=q.shape[2], len_kv=k.shape[2], head_dim=q.shape[3],
            dtype="float32", causal=causal, window=window,
        )  # fmt: skip
        p = bottom_right(p, self.causal)
        assert self.kernel is not None
        with np.errstate(all="ignore"):
            out, lse = self.kernel(
                q, k[:, :, : p.len_kv], v[:, :, : p.len_kv], causal=p.causal, scale=None if scale is None else float(scale),
                window=p.window,
            )  # fmt: skip
        lse = lse / np.float32(math.log(2)) if self.lse == "2" else lse
        out = out.swapaxes(1, 2) if self.layout == "bshd" and axes == 4 else out
        drop = (slice(None), 0) if axes == 3 else (0, 0) if axes == 2 else ()
        kind, device = kind_of(first), getattr(first, "device", None)
        found = [
            from_numpy(np.ascontiguousarray(x[drop]), kind, None if kind == "numpy" else device) for x in (out, lse)
        ]
        return tuple(found) if self.lse else found[0]

    def _four(self, x: Array) -> Array:
        """An array of four axes, (batch, heads, length, head_dim)."""
        x = (
            x[None, None]
            if x.ndim == 2
            else x[:, None]
            if x.ndim == 3
            else x.swapaxes(1, 2)
            if self.layout == "bshd"
            else x
        )
        return np.ascontiguousarray(x)


def _values(x: Any) -> Array:
    return as_numpy("q", x.detach() if hasattr(x, "detach") else x)


def replaced(name: str, **conventions: Any) -> tuple[Replacement, Callable[[], None]]:
    """Put a `Replacement` in the place of "module:function", wherever its package holds it. Returns it, and what undoes that."""
    module, _, path = name.partition(":")
    try:
        holder = import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        fn = getattr(holder, last)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError("replace", name, f"package:function that can be imported ({error})") from None
    if not callable(fn):
        raise UsageError("replace", name, "package:function that can be called")
    made, root = Replacement(fn, **conventions), module.partition(".")[0]
    held = [(holder, last)] + [
        (other, attribute)
        for other in list(sys.modules.values())
        if getattr(other, "__name__", "").partition(".")[0] == root
        for attribute, value in list(vars(other).items())
        if value is fn
    ]
    for where, attribute in held:
        setattr(where, attribute, made)

    def undo() -> None:
        for where, attribute in held:
            setattr(where, attribute, fn)

    return made, undo


def audit_test(
    test: str, replace: str, *, select: str | None = None, faults: Sequence[str] | None = None, layout: str = "bhsd",
    causal: Align = "bottom-right", lse: str | None = None, names: Mapping[str, str] | None = None,
    on_row: Callable[[Audited], None] | None = None,
) -> Audit:  # fmt: skip
    """Run somebody's tests with pytest against the wrong kernels of the zoo, in the place of the function `replace`.

    `test` is a file, a folder or "file.py::test", as pytest takes it, and `select` its `-k`. `replace` is "package:function",
    a function (q, k, v, ...) of attention, whose conventions are `layout`, `causal`, `lse` and `names`, as of `fl.Adapter`.
    `faults` are names in `ZOO` (None: all). The tests have to pass with a right kernel in its place: else `UsageError` says
    so. They run in this process, and may not rely on gradients of the function. Raises `Unavailable` without pytest.
    """
    chosen = _chosen(faults)
    for name, value in (("test", test), ("replace", replace), ("select", "" if select is None else select)):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(name, value, "text")
    if names is not None and not isinstance(names, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("names", names, 'a dictionary such as {"causal": "is_causal"}')
    try:
        there = Path(test.partition("::")[0]).exists()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there or not test:
        raise UsageError("test", test, "a file or a folder of tests that is there")
    run = _pytest(test, select)
    begun, rows = time.perf_counter(), list[Audited]()
    sys.path[:0] = [os.getcwd()]
    made, undo = replaced(replace, layout=layout, causal=causal, lse=lse, names=dict(names or {}))
    try:
        for kernel, whose in ((None, "the function itself"), (tiled(), "a right kernel in its place")):
            made.kernel = kernel
            if code := run():
                why = {4: "can't be collected", 5: "have nothing to run"}.get(code, f"fail with {whose}")
                raise UsageError("test", test, f"tests that pass first: these {why}")
        if not made.calls:
            what = "what the kernels know" if made.beside else "it at all"
            raise UsageError("replace", replace, f"a function that the tests call: they don't ask for {what}")
        beside = made.beside
        for fault in chosen:
            if not made.shows(fault):
                row = Audited(fault=fault, kind=ZOO[fault], status="not run")
            else:
                made.kernel, made.calls = tiled(fault), 0
                passes = not run()
                known = telling(fault) if passes else ""
                row = Audited(
                    fault=fault,
                    kind=ZOO[fault],
                    status="passes" if passes else "caught",
                    calls=made.calls,
                    telling=known,
                )
            rows.append(row)
            if on_row:
                on_row(row)
    finally:
        undo()
        sys.path.remove(os.getcwd())
    return Audit(test=test, rows=rows, seconds=time.perf_counter() - begun, beside=beside)


def _chosen(faults: Any) -> tuple[Fault, ...]:
    """The names of wrong kernels that are asked for."""
    if faults is None:
        return tuple(ZOO)
    try:
        found = (faults,) if isinstance(faults, str) else tuple(faults)
    except TypeError:  # arrays without axes say so late
        found = (faults,)
    for fault in found:
        if not isinstance(fault, str) or fault not in ZOO:
            raise unknown("faults", fault, ZOO)
    return cast("tuple[Fault, ...]", found)


def _pytest(test: str, select: str | None) -> Callable[[], int]:
    """What runs the tests without a word, and returns pytest's status."""
    try:
        pytest = import_module("pytest")
    except ImportError:
        raise Unavailable("audit-test runs tests with pytest: pip install pytest") from None
    words = [test, "-q", "-x", "-p", "no:cacheprovider", *(["-k", select] if select else [])]

    def run() -> int:
        with _quiet():
            return int(pytest.main(words))

    return run


class _quiet:
    """Prints nothing on stdout and stderr."""

    def __enter__(self) -> None:
        self.kept = sys.stdout, sys.stderr
        self.null = open(os.devnull, "w", encoding="utf-8")
        sys.stdout = sys.stderr = self.null

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self.kept
        self.null.close()
