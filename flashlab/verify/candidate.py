"""The process in which a candidate runs, and nothing else: `python -m flashlab.verify.candidate FOLDER`.

The judge is in the process that started this one (`session`). It draws the inputs, writes them into a file that both map, and
holds what comes back to the rule. Whatever the candidate does to this process, its Python and its libraries, it can answer only
with numbers. What is said from here is JSON, and the other side believes none of it about the numbers.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flashlab.base.apart_child import limit
from flashlab.base.host import from_numpy, lies_on_a_cpu
from flashlab.base.process import end_with_parent
from flashlab.verify.adapter import Adapter, Failure, Refused
from flashlab.verify.domain import Domain
from flashlab.verify.kernels import FileKernel, attended
from flashlab.verify.memory import frame_named
from flashlab.verify.steps import Alarm
from simulator import Program
from simulator.dtypes import as_numpy, numpy_dtype
from simulator.errors import Unavailable, UsageError

__all__ = ["MOST_ITEMS", "REQUEST", "SHARED", "Job", "Request", "Slot"]

JOB, REQUEST, SHARED = "job.pickle", "request.pickle", "shared.bin"
"""The files in the folder: what to load, what to do, and the memory of all arrays."""
MOST_ITEMS = 8
"""The most things that a candidate may return."""


@dataclass(frozen=True)
class Job:
    """What a candidate's process begins with. `load` is pickled, and returns the candidate."""

    folder: str
    path: Sequence[str]
    memory: int | None
    seconds: float
    load: bytes
    framework: str | None


@dataclass(frozen=True)
class Slot:
    """An array in the shared memory: its buffer of `count` elements lies `at` so many bytes, and it is a view of that."""

    at: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Request:
    """A call of one of the candidate's methods. Results are written from `room` on, each of them of at most so many bytes.
    `litter` is what to poison, in bytes."""

    number: int
    method: str
    given: Sequence[Any]
    named: Mapping[str, Any]
    size: int
    room: int
    most: int
    litter: Sequence[int] = ()


def main(folder: Path) -> None:
    """Load the candidate, say what it is, and answer requests until there are no more."""
    end_with_parent()
    requests, answers = _channels()
    job: Job = pickle.loads((folder / JOB).read_bytes())  # the parent's own, of this very moment
    limit(job.memory)
    os.chdir(job.folder)
    sys.path[:] = job.path

    def answer(number: int, body: Callable[[], dict[str, Any]]) -> bool:
        found = {**_caught(body), "number": number}
        sys.stdout.flush()
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()
        return found["kind"] == "done"

    candidate: list[Candidate] = []

    def load() -> dict[str, Any]:
        candidate.append(Candidate(pickle.loads(job.load)(), folder, job))
        return {"kind": "done", "value": described(candidate[0].thing)}

    if answer(0, load):
        while requests.read(1):
            request: Request = pickle.loads((folder / REQUEST).read_bytes())
            answer(request.number, lambda request=request: candidate[0].answer(request))


def _channels() -> tuple[BinaryIO, BinaryIO]:
    """Where requests come in and answers go out. What the candidate reads is empty, and what it prints goes elsewhere."""
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _caught(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `body` returns, or what it raised."""
    try:
        return body()
    except NotImplementedError as error:
        return {"kind": "not implemented", "said": str(error)}
    except Refused as error:
        return {"kind": "refused", "said": str(error)}
    except Failure as error:
        return {"kind": "failure", "said": str(error), "place": error.place}
    except UsageError as error:
        value = str(error).removeprefix(f"{error.argument} = ").removesuffix(f": expected {error.accepted}")
        return {"kind": "usage", "argument": str(error.argument), "value": value, "accepted": str(error.accepted)}
    except Unavailable as error:
        return {"kind": "unavailable", "said": str(error)}
    except (Exception, SystemExit) as error:
        from flashlab.emulator import BuildError

        innermost = error.__traceback__
        while innermost and innermost.tb_next:
            innermost = innermost.tb_next
        at_call = innermost is not None and innermost.tb_frame.f_code is called.__code__
        of = next((kind.__name__ for kind in (BuildError, TypeError, RuntimeError) if isinstance(error, kind)), "")
        return {"kind": "raised", "type": type(error).__name__, "said": str(error), "of": of, "at_call": at_call}


def called(body: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The call of the candidate. An alarm's traceback knows its line by this frame."""
    return body(*given, **named)


class Candidate:
    """A candidate that was loaded, with the arrays that it is given."""

    def __init__(self, thing: Any, folder: Path, job: Job) -> None:
        self.thing, self.folder = thing, folder
        self.alarm = Alarm(folder, job.seconds)
        said = thing.framework if isinstance(thing, Adapter) else job.framework
        self.frame = frame_named(said or "numpy")
        self.methods = methods_of(thing)
        self.mapped, self.kept = np.empty(0, np.uint8), dict[int, Any]()

    def answer(self, request: Request) -> dict[str, Any]:
        """Do what is asked, and write the results."""
        self._map(request.size)
        buffers = dict[int, tuple[Slot, Any]]()
        given = [self._array(x, buffers) for x in request.given]
        named = {name: self._array(x, buffers) for name, x in request.named.items()}
        if request.litter:
            self.frame.litter(request.litter)
        with self.alarm.call():
            found = called(self.methods[request.method], given, named)
        results = self._written(found, request.room, request.most)
        self._back(buffers)
        return {"kind": "done", **results}

    def _map(self, size: int) -> None:
        if self.mapped.size < size:
            with (self.folder / SHARED).open("r+b") as file:
                self.mapped = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)

    def _array(self, x: Any, buffers: dict[int, tuple[Slot, Any]]) -> Any:
        if issubclass(type(x), dict):
            return {name: self._array(each, buffers) for name, each in x.items()}
        if not isinstance(x, Slot):
            return x
        if x.at not in buffers:
            buffers[x.at] = x, self._buffer(x)
        return self.frame.view(buffers[x.at][1], x.shape, x.strides, x.offset)

    def _flat(self, slot: Slot) -> Any:
        dtype = numpy_dtype(slot.dtype)
        return self.mapped[slot.at : slot.at + slot.count * dtype.itemsize].view(dtype)

    def _buffer(self, slot: Slot) -> Any:
        """A buffer of the frame with what the slot holds: the memory itself where that can be, else the same copy each time."""
        fresh = from_numpy(self._flat(slot), self.frame.name, self.frame.device)
        if not self.frame.views or lies_on_a_cpu(fresh):
            return fresh
        kept = self.kept.get(slot.at)
        if kept is None or kept.shape != fresh.shape or kept.dtype != fresh.dtype:
            self.kept[slot.at] = fresh
            return fresh
        kept[...] = fresh
        return kept

    def _back(self, buffers: Mapping[int, tuple[Slot, Any]]) -> None:
        """What is in copies goes back, so that the judge sees what was changed."""
        for slot, buffer in buffers.values():
            if self.frame.views and not lies_on_a_cpu(buffer):
                self._flat(slot).view(np.uint8)[...] = self.frame.get(buffer).view(np.uint8)

    def _written(self, found: Any, room: int, most: int) -> dict[str, Any]:
        if found is None or isinstance(found, bool | str):
            return {"value": found, "items": []}
        named = issubclass(type(found), dict)
        names: Any = [*found] if named else None
        items: list[Any] = [*found.values()] if named else [*found] if type(found) in (tuple, list) else [found]
        said, at = list[Any](), room
        with (self.folder / SHARED).open("r+b") as file:
            for x in items[:MOST_ITEMS]:
                if x is None:
                    said.append(None)
                    continue
                try:
                    values = as_numpy("result", x)
                except UsageError:
                    said.append({"other": type(x).__name__})
                    continue
                said.append({"at": at, "shape": values.shape, "dtype": values.dtype.name})
                if values.nbytes <= most and not values.dtype.hasobject:  # else the judge refuses it by its words
                    file.seek(at)
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                    at += -(-values.nbytes // 64) * 64
        return {"names": names, "items": said}


def methods_of(thing: Any) -> dict[str, Callable[..., Any]]:
    """What may be asked of a candidate, by name."""
    if isinstance(thing, Adapter):
        return methods_of(thing.fn) | ({} if thing.supports is None else {"supports": thing.supports})
    if isinstance(thing, FileKernel):
        return {"attend": lambda *given, **named: attended(thing, *given, **named)}
    if isinstance(thing, Program):
        from flashlab.verify import programs

        return programs.methods_of(thing)
    if callable(thing):
        return {"call": thing, "differentiated": partial(_forward, thing), "gradients": partial(_gradients, thing)}
    raise UsageError("target", type(thing).__name__, "a function, an Adapter or a tile program")


def _forward(fn: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What it returns in torch where a gradient is asked for."""
    return _forward_on(fn, [x.detach().requires_grad_() for x in given], named)


def _forward_on(fn: Callable[..., Any], leaves: Sequence[Any], named: Mapping[str, Any]) -> Any:
    torch: Any = import_module("torch")
    with torch.enable_grad():
        return fn(*leaves, **named)


def _gradients(fn: Callable[..., Any], dout: Any, *given: Any, **named: Any) -> Any:
    """What torch's autograd finds for dout; None where the output has no graph."""
    torch: Any = import_module("torch")
    leaves = [x.detach().requires_grad_() for x in given]
    found = _forward_on(fn, leaves, named)
    out = found[0] if type(found) in (tuple, list) else found
    return list(torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)) if out.requires_grad else None


# what a candidate is, in JSON


def described(thing: Any) -> dict[str, Any]:
    """What the judge is told of a candidate. It makes of it what a caller could have said of a function of its own."""
    if isinstance(thing, Adapter):
        said = {f.name: _plain(getattr(thing, f.name)) for f in fields(Adapter) if f.name not in ("fn", "supports")}
        return {**described(thing.fn), "adapter": said, "supports": thing.supports is not None}
    if isinstance(thing, FileKernel):
        return {"kind": "kernel", **_of_kernel(thing)}
    if isinstance(thing, Program):
        from flashlab.verify import programs

        return {"kind": "program", **programs.described(thing)}
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return {
        "kind": "function",
        "parameters": _parameters(thing),
        "module": str(getattr(thing, "__module__", "")),
        "name": str(getattr(thing, "__qualname__", type(thing).__name__)),
        "place": code and [code.co_filename, code.co_firstlineno],
    }


def _parameters(fn: Callable[..., Any]) -> list[Any] | None:
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in found]


def _of_kernel(kernel: FileKernel) -> dict[str, Any]:
    from flashlab.verify.adapter import TOLD

    declared = kernel.declared()
    return {
        "file": str(kernel.file), "name": kernel.name, "declared": [declared.file, declared.line, declared.name],
        "takes": [feature for feature in TOLD if kernel.takes(feature)], "source": kernel.source(),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A convention as JSON has it."""
    if isinstance(value, Domain):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(Domain)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if issubclass(type(value), Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if type(value) in (tuple, list, set, frozenset):
        return [_plain(x) for x in value]
    return value


if __name__ == "__main__":
    from flashlab.verify.candidate import main as run  # by its own name: requests are pickled as of that

    run(Path(sys.argv[1]))
