"""The judge's side of a candidate that runs in a process of its own (`candidate`).

All that comes back from there are numbers and words. Arrays pass through a file that the child maps. This side reads and writes it
as a file: so a child that cuts it off ends no process but its own. Nothing that the child wrote is ever unpickled.
"""

from __future__ import annotations

import inspect
import json
import math
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from flashlab.base.process import START, Stopwatch, end_child, how_it_ended, start_child
from flashlab.verify.adapter import Failure, Raised, Refused
from flashlab.verify.candidate import JOB, MOST_ITEMS, REQUEST, SHARED, Job, Request, Slot
from flashlab.verify.memory import NumpyFrame
from flashlab.verify.steps import MOST_ENDS, WHERE, Ended, Steps, line_of
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Said, Unavailable, UsageError

__all__ = ["Counted", "Function", "OutsideFrame", "Session", "place_of", "word"]

_PAGE = 4096
_LINE = 1 << 20
"""The most bytes of an answer's words."""
_FLOOD = 16 << 20
"""The most bytes that a child may print: every thread of a kernel may have its line."""
_ROOM, _TIMES = 64 << 20, 16
"""The most bytes that a result may have: so many, or so many times those of the inputs."""
_SLACK = 30.0
"""Seconds after which this side ends a call that the child's own alarm should have ended."""
_LAST = 2.0
"""Seconds that a child has to end once nothing more is asked."""
_WAIT = 0.2
_NUMBERS = re.compile(r"(u?int|float|complex)\d+(_\w+)?|bfloat16|bool")


class Session:
    """A candidate in a child process, which is started again where it ended. `load` is pickled, and returns the candidate.

    A call may take `seconds`, and the child `memory` bytes of address space. What it prints goes to stderr when it has ended.
    `told` is what it says of the candidate, `ends` how often it has ended before its time, and `taken` the seconds from the
    last request to its answer, by the clock on this side.
    """

    def __init__(
        self, folder: Path, name: str, load: bytes, seconds: float, memory: int | None, framework: str | None,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.folder, self.name, self.seconds, self._environment = folder, name, seconds, environment
        job = Job(
            str(Path.cwd()), [str(Path(x).absolute()) if x else x for x in sys.path], memory, seconds, load, framework
        )
        (folder / JOB).write_bytes(pickle.dumps(job))
        self._shared = (folder / SHARED).open("w+b")
        self._size = 0
        self._number = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread()
        self.ends, self.taken = 0, 0.0
        try:
            self.told = self._start()
        except Ended as ended:
            self.close()
            raise UsageError("target", Said(name), f"a target that can be loaded: {ended.message}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the child. What it printed goes to stderr."""
        if self._child is not None:
            assert self._child.stdin is not None
            with suppress(OSError):
                self._child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_LAST)
            self._ended()
        self._shared.close()

    def ask(self, method: str, *given: Any, **named: Any) -> Any:
        """What a method of the candidate returns: an array, or a list or a dictionary of arrays. Raises what it raises.

        NumPy arrays among the arguments are handed over with the buffers that they are views of, the same place for the same
        sizes. What the call changes there is changed here too. Raises `Ended` if the process ended in the call.
        """
        if self._child is None:
            self._start()
        self._number += 1
        laid = _Laid(self._write)
        request = [laid.slot(x) for x in given], {key: laid.slot(x) for key, x in named.items()}
        room = laid.end  # where results may begin
        self._write(
            room, np.full(min(max(2 * room, 1), _ROOM), 255, np.uint8)
        )  # NaN in any float: nothing old can be an answer
        most = max(_ROOM, _TIMES * laid.end)
        litter = sorted({n for x in laid.buffers.values() for n in (x.nbytes, x.size * 4)})
        (self.folder / REQUEST).write_bytes(
            pickle.dumps(Request(self._number, method, *request, self._size, room, most, litter))
        )
        assert self._child is not None and self._child.stdin is not None
        begun = time.perf_counter()
        try:
            self._child.stdin.write(b"?")
            self._child.stdin.flush()
        except OSError:
            self._fail()
        answer = self._answer(self._number, 2 * self.seconds + _SLACK)
        self.taken = time.perf_counter() - begun
        # at once: what a thread of the candidate's writes later comes too late
        found = [self._item(x, room, most) for x in _listed(answer.get("items"))]
        for at, buffer in laid.buffers.items():
            self._read(at, buffer)
        if answer["kind"] != "done":
            _raise(answer)
        if answer.get("value") is not None or not _is(answer.get("items"), list):
            return answer.get("value")
        names: Any = answer.get("names")
        return dict(zip(map(str, names), found, strict=False)) if _is(names, list) else found

    def _start(self) -> dict[str, Any]:
        (self.folder / WHERE).unlink(missing_ok=True)
        with (self.folder / "printed.txt").open("wb") as sink:
            child = start_child(
                self.folder, "flashlab.verify.candidate", self._environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink,
            )  # fmt: skip
        self._child, lines = child, queue.SimpleQueue[bytes]()
        self._lines = lines

        def listen() -> None:
            assert child.stdout is not None
            with child.stdout as answers, suppress(OSError, ValueError):
                while line := answers.readline(_LINE):
                    lines.put(line)
            lines.put(b"")

        self._listener = threading.Thread(target=listen, daemon=True)
        self._listener.start()
        answer = self._answer(0, START)
        if answer["kind"] != "done":
            _raise(answer, self.name)
        told: Any = answer.get("value")
        return told if _is(told, dict) else {}

    def _answer(self, number: int, limit: float) -> dict[str, Any]:
        """The child's answer to a request, the load being 0. Raises `Ended`."""
        assert self._child is not None
        watch: Stopwatch | None = None
        while True:
            try:
                line = self._lines.get(timeout=_WAIT)
            except queue.Empty:
                if self._printed() > _FLOOD:
                    self._fail(f"it printed more than {_FLOOD:,} bytes")
                if self._child.poll() is not None:
                    line = self._lines.get() if not self._lines.empty() else b""
                elif math.isinf(limit):
                    continue
                else:
                    watch = watch or Stopwatch(self._child.pid)
                    if watch.seconds > limit:
                        self._fail(f"no end within {limit:g} seconds")
                    continue
            if not line:
                self._fail()
            with suppress(ValueError, RecursionError):
                answer: Any = json.loads(line)
                if _is(answer, dict) and _is(answer.get("kind"), str) and answer.get("number") == number:
                    return answer
            self._fail("it wrote among the answers")

    def _printed(self) -> int:
        return (self.folder / "printed.txt").stat().st_size

    def _fail(self, message: str = "") -> NoReturn:
        """The child has ended, or is ended here. Raises `Ended`."""
        assert self._child is not None
        with suppress(subprocess.TimeoutExpired):
            if not message:
                self._child.wait(_LAST)
        status = self._child.poll()
        where = self.folder / WHERE
        text = where.read_text(encoding="utf-8", errors="replace") if where.exists() else ""
        self._ended()
        self.ends += 1
        if not message:
            message = how_it_ended(status) if status is not None else "it closed the channel of its answers"
        if text:
            message = f"a call was still running after {self.seconds:g} seconds"
        raise Ended(message, line_of(text))

    def _ended(self) -> None:
        assert self._child is not None
        end_child(self._child)
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()
        self._listener.join(
            _LAST
        )  # it closes the other end, unless something that the child has started still holds that
        self._child = None
        with (self.folder / "printed.txt").open(encoding="utf-8", errors="replace") as printed:
            print(printed.read(_FLOOD), end="", file=sys.stderr)

    # the shared memory

    def _write(self, at: int, values: Array) -> None:
        self._grow(at + values.nbytes)
        self._shared.seek(at)
        self._shared.write(values.view(np.uint8).data)
        self._shared.flush()

    def _grow(self, size: int) -> None:
        if size > self._size:
            self._size = -(-max(size, 2 * self._size, _ROOM) // _PAGE) * _PAGE
            self._shared.truncate(self._size)

    def _read(self, at: int, into: Array) -> None:
        self._shared.seek(at)
        if into.nbytes and self._shared.readinto(into.view(np.uint8).data) != into.nbytes:
            raise Failure("the shared memory was cut off")

    def _item(self, said: Any, room: int, most: int) -> Any:
        """An array among the results, copied from the shared memory; or what stands for a thing that is none."""
        found: dict[str, Any] = said if _is(said, dict) else {}
        if not found:
            return None
        if "other" in found:
            return type(str(found["other"])[:80], (), {})()
        at: Any = found.get("at")
        shape: Any = found.get("shape")
        dtype: Any = found.get("dtype")
        placed = _is(at, int) and at >= room
        shaped = _is(shape, list) and len(shape) <= 32 and all(_is(n, int) and 0 <= n < 1 << 48 for n in shape)
        if not placed or not shaped or not _NUMBERS.fullmatch(str(dtype)):
            raise Failure("what it returned is no array of numbers")
        kind, count = numpy_dtype(str(dtype)), int(math.prod(shape))
        if count * kind.itemsize > most:
            raise Failure(f"it returned an array of the shape {tuple(shape)}")
        values: Array = np.empty(count, kind)
        self._read(at, values)
        return values.reshape(shape)


def _is(x: object, kind: type) -> bool:
    """Is it just that? Said so that a type checker still takes it for anything."""
    return type(x) is kind


def _listed(items: Any) -> list[Any]:
    """What a child says is a list, and isn't longer than it may be."""
    return items[:MOST_ITEMS] if _is(items, list) else []


class _Laid:
    """Lays the buffers of arrays into the shared memory, one behind the other."""

    def __init__(self, write: Callable[[int, Array], None]) -> None:
        self.write, self.end = write, 0
        self.buffers = dict[int, Array]()
        self._at = dict[int, int]()

    def slot(self, x: Any) -> Any:
        """What stands for an argument: for an array, or a dictionary of them, where they lie."""
        if _is(x, dict):
            return {name: self.slot(each) for name, each in x.items()}
        if np.ndim(x) == 0 or not issubclass(type(x), np.ndarray):
            return x
        return self._laid(x)

    def _laid(self, x: Array) -> Slot:
        root = _root(x)
        if root is None:  # nobody looks at the memory around it
            root = x = np.ascontiguousarray(x)
        flat = root.reshape(-1)
        at = self._at.get(flat.ctypes.data)
        if at is None:
            at = self.end
            self._at[flat.ctypes.data], self.buffers[at] = at, flat
            self.end += -(-max(flat.nbytes, 1) // _PAGE) * _PAGE
            self.write(at, flat)
        item = x.itemsize
        offset = (x.ctypes.data - flat.ctypes.data) // item
        return Slot(at, flat.size, x.dtype.name, x.shape, tuple(n // item for n in x.strides), offset)


def _root(x: Array) -> Array | None:
    """The array whose memory an array is a view of, if that is contiguous and of the same dtype."""
    root: Any = x
    while getattr(root, "base", None) is not None:
        root = root.base
    whole = type(root) is np.ndarray and root.dtype == x.dtype and root.flags.c_contiguous and root.flags.writeable
    return root if whole else None


class OutsideFrame(NumpyFrame):
    """A framework in another process. Here its arrays are NumPy's. They become the framework's there."""

    def __init__(self, name: str) -> None:
        super().__init__()  # which imports NumPy
        self.name, self.views = name, name != "jax"  # pyright: ignore[reportAttributeAccessIssue]

    def put(self, values: Array) -> Any:
        return values.copy()


class Counted(Steps):
    """The steps of a verification of what runs in a session: after too many ends nothing more is run."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def over(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"its process had ended {MOST_ENDS} times" if self.session.ends >= MOST_ENDS else ""

    def step(self, body: Callable[[], Any]) -> Any:
        if self.over:
            raise Refused(self.over)
        return body()


class Function:
    """A candidate's function as one of this process: its signature, its name and its place. `frame` makes its arrays."""

    frame = OutsideFrame

    def __init__(self, session: Session) -> None:
        self._session, told = session, session.told
        self.__signature__ = _signature(told.get("parameters"))
        self.__module__ = word(told.get("module"))
        self.__qualname__ = self.__name__ = word(told.get("name")) or "callable"
        place: Any = told.get("place")
        if (at := place_of(place)) is not None:
            self.__code__ = SimpleNamespace(co_filename=at[0], co_firstlineno=at[1])

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _function_result(self._session.ask("call", *given, **named))

    def differentiated(self, *given: Any, **named: Any) -> Any:
        """The same where a gradient is asked for."""
        return _function_result(self._session.ask("differentiated", *given, **named))

    def gradients(self, *given: Any, **named: Any) -> Any:
        """What torch's autograd finds there: for dout, and what the function takes."""
        return self._session.ask("gradients", *given, **named)


def _function_result(found: Any) -> list[Any]:
    if not _is(found, list):  # words, or nothing
        return [type(type(found).__name__, (), {})()]
    return found or [None]


def word(text: Any) -> str:
    """The name that a child says, or "" for what is none: it may come into Python that somebody runs."""
    return text if isinstance(text, str) and re.fullmatch(r"[\w.<>]{1,200}", text) else ""


def _signature(parameters: Any) -> Any:
    """The signature of such parameters, or what says that there is none."""
    if not _is(parameters, list):
        return 0
    try:
        return inspect.Signature(
            [
                inspect.Parameter(name, getattr(inspect.Parameter, kind), **({"default": None} if default else {}))
                for name, kind, default in parameters
            ]
        )
    except (AttributeError, TypeError, ValueError):
        return 0


def _raise(answer: Mapping[str, Any], loaded: str = "") -> NoReturn:
    """Raise what the candidate raised: an error of ours of the same words, or `Raised`."""
    kind, said = answer["kind"], str(answer.get("said", ""))
    if kind == "usage":
        raise UsageError(str(answer.get("argument")), Said(answer.get("value")), str(answer.get("accepted")))
    if kind == "unavailable":
        raise Unavailable(said)
    if kind == "not implemented":
        raise NotImplementedError(said)
    if kind == "refused":
        raise Refused(said)
    if kind == "failure":
        raise Failure(said, place_of(answer.get("place")))
    of = str(answer.get("of", ""))
    if loaded and of == "BuildError":
        from flashlab.emulator import BuildError

        raise BuildError(said)
    if loaded:
        what = f"{answer.get('type')}: {' '.join(said.split())}"[:300]
        raise UsageError("target", Said(loaded), f"a target that can be loaded: {what}")
    raise Raised(str(answer.get("type")), said, of=of, at_call=answer.get("at_call") is True)


def place_of(said: Any) -> tuple[str, int] | None:
    """The (file, line) that a child says, or None for what is none."""
    return (
        (said[0], said[1]) if _is(said, list) and len(said) == 2 and _is(said[0], str) and _is(said[1], int) else None
    )
