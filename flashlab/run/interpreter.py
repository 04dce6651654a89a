"""Runs a kernel in Triton on the CPU: Triton's own interpreter, with every access to HBM checked and counted.

The interpreter computes on whole tiles, one program after the other. It has neither threads nor SRAM. So what goes through
SRAM is not counted, and no race between threads is seen.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashlab.emulator.library import Arena, Finding, Launched, Line, Moved
from flashlab.run import tritonc

__all__ = ["launch"]

_STEP = re.compile(r"\s*# step: (\w+)")
_SECTOR = 32
_OPS = {"read": "ld", "write": "st"}
_one_at_a_time = threading.Lock()  # the interpreter has one builder for all threads


def launch(
    path: Path, entry: str, blocks: int, values: Mapping[str, Any], arena: Arena, dtypes: Mapping[str, str], *,
    time_limit: float = 0,
) -> Launched:  # fmt: skip
    """Launch `blocks` programs of a module's function. `values` has its arguments by name; those in `dtypes` are pointers to
    buffers of the arena. A launch that still runs after `time_limit` seconds of processor time (0: no limit) is stopped, which
    is a finding.

    Raises `Unavailable` without Triton, or where Triton isn't set to its interpreter.
    """
    tritonc.interpreter()
    kernel, watch = tritonc.function(path, entry), _Watch(path, arena, time_limit)
    given = {name: _Pointer(int(x), dtypes[name]) if name in dtypes else x for name, x in values.items()}
    with _one_at_a_time, watch.watching(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # as on a GPU, the logarithm of 0 is no accident
        try:
            kernel[(blocks,)](**given)
        except watch.interpreter.InterpreterError:
            if not watch.stopped:
                raise
    return Launched(
        kernel=entry,
        moved=tuple(watch.moved.values()),
        findings=tuple(watch.findings.values()),
        dropped=0,
        plain=0,
        flops=watch.flops,
        exp=watch.exp,
        stopped=watch.stopped,
    )


class _Pointer:
    """A pointer that looks to the interpreter like a torch tensor on the CPU."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> _Pointer:
        return self

    cpu = untyped_storage

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset

    def new_empty(self, *_: Any, **__: Any) -> _Pointer:
        return _Pointer(self.address, self.dtype)

    def set_(self, *_: Any) -> None:
        """The interpreter has copied to the CPU what lies there already."""

    copy_ = set_


class _Watch:
    """The interpreter's builder: it sees what a launch does."""

    def __init__(self, path: Path, arena: Arena, time_limit: float) -> None:
        self.limit, self.end = time_limit, time.thread_time() + (time_limit or math.inf)
        self.path, self.arena, self.steps = str(path), arena, _steps(path)
        self.moved: dict[tuple[str, str, str], Moved] = {}
        self.findings: dict[tuple[Any, ...], Finding] = {}
        self.flops = self.exp = 0
        self.stopped = False
        self.writers = {name: np.zeros(x.data.nbytes, np.int64) for name, x in arena.buffers.items()}
        self.interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        self.builder, self.types = self.interpreter.interpreter_builder, importlib.import_module("triton.language")

    @contextmanager
    def watching(self) -> Generator[None]:
        """The builder does what it does by way of this object."""
        ways: dict[str, Callable[..., Any]] = {
            "create_masked_load": self._load, "create_masked_store": self._store, "create_dot": self._dot,
            "create_exp": self._exp, "create_exp2": self._exp, "cast_impl": self._cast,
        }  # fmt: skip
        for name, way in ways.items():
            setattr(self.builder, name, partial(way, getattr(self.builder, name)))
        try:
            yield
        finally:
            for name in ways:
                delattr(self.builder, name)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _load(self, do: Callable[..., Any], pointers: Any, mask: Any, *rest: Any) -> Any:
        return do(pointers, self._access("read", pointers, mask), *rest)

    def _store(self, do: Callable[..., Any], pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return do(pointers, value, self._access("write", pointers, mask), *rest)

    def _access(self, way: str, pointers: Any, mask: Any) -> Any:
        """Check and count an access. Returns the mask without the elements that lie in no buffer."""
        if time.thread_time() > self.end:
            self.stopped = True
            self._find(
                "time limit", f"is still running after {self.limit:g} s of processor time", "", np.zeros(1, np.int64), 0
            )
            raise TimeoutError
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        where, active = np.broadcast_arrays(pointers.data, mask.data)
        inside = np.zeros(where.shape, bool)
        for name, buffer in self.arena.buffers.items():
            first = self.arena.pointer(name)
            here = active & (where >= first) & (where + width <= first + buffer.data.nbytes)
            if here.any():
                self._touch(way, name, (where[here] - first).astype(np.int64), width)
                inside |= here
        if (lost := active & ~inside).any():
            self._outside(way, int(where[lost][0]), width, int(lost.sum()))
        return self.interpreter.TensorHandle(inside, mask.dtype)

    def _touch(self, way: str, name: str, offsets: Any, width: int) -> None:
        buffer, at = self.arena.buffers[name], np.unique(offsets)
        each = (at[:, None] + np.arange(width)).ravel()
        self._count(way, name, each.size, np.unique(each // _SECTOR).size)
        if way == "read":
            unwritten = at[~buffer.written[each].reshape(-1, width).all(1)]
            self._find("uninitialised", "reads what nobody wrote", name, unwritten, width)
            return
        if buffer.read_only:
            self._find("input written", "writes an input", name, at, width)
            return
        mine, before = self._block() + 1, self.writers[name][each]
        others = at[((before != 0) & (before != mine)).reshape(-1, width).any(1)]
        self._find(
            "race between blocks", "writes what another block wrote, with no order between them", name, others, width
        )
        self.writers[name][each], buffer.written[each] = mine, 1

    def _count(self, way: str, name: str, nbytes: int, sectors: int) -> None:
        step = self._step(self._lines()[-1].number)
        key = step, name, _OPS[way]
        was = self.moved.get(key) or Moved(step, name, "hbm", _OPS[way], 0, 0, 0, 0, 0, 0)
        self.moved[key] = replace(
            was, instructions=was.instructions + 1, bytes=was.bytes + nbytes, sectors=was.sectors + sectors
        )

    def _outside(self, way: str, address: int, width: int, times: int) -> None:
        near = min(self.arena.buffers, key=lambda name: self._distance(name, address))
        offset, size = address - self.arena.pointer(near), self.arena.buffers[near].data.nbytes
        place = f"{-offset:,} bytes before the start" if offset < 0 else f"{offset + width - size:,} bytes past the end"
        self._find("out of bounds", f"{way}s {width} bytes: {place} of {near}", near, np.full(times, offset), width)

    def _distance(self, name: str, address: int) -> int:
        first = self.arena.pointer(name)
        return max(first - address, address - first - self.arena.buffers[name].data.nbytes)

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def _dot(self, do: Callable[..., Any], a: Any, b: Any, d: Any, *rest: Any) -> Any:
        self.flops += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return do(self._widened(a), self._widened(b), d, *rest)

    def _widened(self, x: Any) -> Any:
        """bfloat16 as float32: the interpreter multiplies its bits."""
        if x.dtype.scalar != self.types.bfloat16:
            return x
        return self.interpreter.TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), self.types.float32)

    def _cast(self, do: Callable[..., Any], x: Any, to: Any) -> Any:
        """Rounds to bfloat16 as a GPU does. The interpreter cuts off."""
        if (x.dtype.scalar, to.scalar) != (self.types.float32, self.types.bfloat16):
            return do(x, to)
        return self.interpreter.TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), to.scalar)

    def _exp(self, do: Callable[..., Any], x: Any) -> Any:
        self.exp += x.data.size
        return do(x)

    # -- places -------------------------------------------------------------------------------------------------------

    def _lines(self) -> tuple[Line, ...]:
        """The lines of the kernel's module that are being executed, innermost first: the last is the kernel's own."""
        found: list[Line] = []
        frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                found.append(Line(self.path, frame.f_lineno))
            frame = frame.f_back
        return tuple(found)

    def _step(self, line: int) -> str:
        return self.steps[line - 1]

    def _block(self) -> int:
        return int(self.builder.grid_idx[0])

    def _find(self, kind: str, message: str, name: str, offsets: Any, width: int) -> None:
        """Note a misuse of some elements: once per kind and line."""
        if not len(offsets):
            return
        lines, offset, buffer = self._lines(), int(offsets[0]), self.arena.buffers.get(name)
        key = kind, name, lines
        if key in self.findings:
            self.findings[key] = replace(self.findings[key], times=self.findings[key].times + len(offsets))
            return
        self.findings[key] = Finding(
            kind=kind, message=message, line=lines[-1], via=lines[:-1], step=self._step(lines[-1].number),
            block=(self._block(), 0, 0), thread=None, space="hbm", tensor=name, offset=offset, bytes=width,
            times=len(offsets), index=buffer.index(offset) if buffer and offset >= 0 else "", at=lines[0],
        )  # fmt: skip


def _steps(path: Path) -> list[str]:
    """The step of each line: what the mark above it names, in the same function."""
    found, step = list[str](), ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace():
            step = ""
        elif mark := _STEP.match(line):
            step = mark[1]
        found.append(step)
    return found
