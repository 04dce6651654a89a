"""Launches: the kernels of a plan, queued on arrays whose strides are known. Each call says where they lie."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlab.run import abi, tma
from flashlab.run.arrays import Allocate, cupy, from_the_pool
from simulator.counts import Spec
from simulator.problem import round_up

if TYPE_CHECKING:
    from flashlab.run.plan import Plan

__all__ = ["APART", "Launch", "Launcher", "Zeros", "enter", "laid_out"]

APART = False
"""Does each workspace have an allocation of its own? So that memcheck sees what runs from one into the next."""

_MOST_ZEROS = 256  # streams and captured calls for which a plan has zeros ahead
_ZEROS = 8 << 20  # bytes of them, about
_ALIGNED = 32  # bytes: each workspace begins at a multiple, so at a sector of the L2
_BOX = tma.DESCRIPTOR.itemsize // 8  # words
_MOST_BOXES = 1024  # places that a launcher keeps descriptors for


@dataclass(frozen=True)
class Launch:
    """One kernel with its grid. `arguments` are names of what its `language` passes (`abi.VALUES`). `boxes` names the tensors
    that the kernel takes as TMA descriptors, each with the rows of its box."""

    language: str
    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    sram: int
    arguments: tuple[str | None, ...]
    boxes: Mapping[str, int]

    def by(self, driver: Any) -> Callable[[int, int, int], None]:
        """The driver's call. It takes a stream, the address of the pointers to the arguments, and 0."""
        (blocks,), (threads,) = self.grid, self.block
        # the driver's own: CuPy's looks at the arguments' types, which takes as long as all the rest
        return functools.partial(driver.launchKernel, self.kernel.kernel.ptr, blocks, 1, 1, threads, 1, 1, self.sram)


class Zeros:
    """Memory of zeros, which kernels leave as zeros: counters of blocks, above all.

    Each stream of a thread has its own, because calls on other streams may run at the same time. So has each call that a
    graph captures: the graph may be replayed beside them. They are made ahead, so that a call sets nothing to 0. But nothing
    can be made ahead while a graph captures: such a call takes a workspace, and its graph sets it to 0.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(max(1, nbytes), 256)
        self._held: list[Any] = []
        self._ahead: list[int] = []
        self._of_stream = dict[tuple[int, int], int]()
        if not cupy().cuda.get_current_stream().is_capturing():
            self._make()

    def at(self, stream: int, take: Allocate) -> tuple[int, Any]:
        """The pointer to zeros for a call on a stream, and what holds them. `take` is the call's allocator."""
        runtime = cupy().cuda.runtime
        if runtime.streamIsCapturing(stream):
            try:
                return self._ahead.pop(), self._held
            except IndexError:
                pointer, memory = take(self._nbytes)
                runtime.memsetAsync(pointer, 0, self._nbytes, stream)
                return pointer, memory
        key = threading.get_ident(), stream
        while key not in self._of_stream:
            try:
                self._of_stream[key] = self._ahead.pop()
            except IndexError:  # another thread may take what this one makes
                self._make()
        return self._of_stream[key], self._held

    def _make(self) -> None:
        """Makes some ahead."""
        number = max(4, min(_MOST_ZEROS, _ZEROS // self._nbytes))
        made = cupy().zeros((number * self._nbytes,), np.uint8)
        cupy().cuda.get_current_stream().synchronize()  # whichever stream comes next finds them
        self._held.append(made)
        self._ahead += [made.data.ptr + i * self._nbytes for i in reversed(range(number))]


class Launcher:
    """The launches of a plan on tensors whose strides are known. `launch` allocates the workspaces, and queues the kernels.

    `given` has the names and strides of the arrays that callers bring, in the order in which `launch` is told their pointers.
    What callers leave out lies where the plan has it. The other tensors are workspaces.
    """

    def __init__(self, plan: Plan, given: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        self._plan = plan
        strides, tensors, left_out = dict(given), plan.counts.tensors, plan.left_out
        missing = [name for name in tensors if name not in strides and name not in left_out]
        own = [tensors[name] for name in missing if name not in plan.zeros]
        pieces = [laid_out(x) for x in (([x] for x in own) if APART else [own] if own else [])]
        begins = {name: (i, offset) for i, (offsets, _) in enumerate(pieces) for name, offset in offsets.items()}
        self._pieces = [nbytes for _, nbytes in pieces]
        self._workspaces = [(*begins.get(name, (0, 0)), plan.zeros.get(name)) for name in missing]
        self.number = {name: i for i, name in enumerate((*strides, *missing))}
        self.at = {
            name: (0 if name in self.number else left_out[name].ptr, strides.get(name, plain))
            for name, _, plain in plan.tensors
        }
        if (problem := plan.counts.problem).page_size is not None and "block_table" in tensors:
            for name in self.at.keys() & {"k", "v"}:
                abi.check_pages(problem, tensors[name], self.at[name][1])
        self.box = functools.lru_cache(_MOST_BOXES)(self._box)
        self._free = [_Packed(plan, self)]

    def launch(self, pointers: Sequence[int], stream: int, take: Allocate = from_the_pool, first: int = 0) -> None:
        """Queues the kernels from number `first` on, on a stream of the current device, for arrays that begin at `pointers`.

        `take` is the allocator of the workspaces. It must hand memory on in that stream's order.
        """
        if self._workspaces:
            # held until the launches are queued: allocators hand memory on in the stream's order
            pieces = [take(nbytes) for nbytes in self._pieces]
            held = [
                (pieces[i][0] + offset, None) if zeros is None else zeros.at(stream, take)
                for i, offset, zeros in self._workspaces
            ]
            pointers = [*pointers, *[pointer for pointer, _ in held]]
        try:
            packed = self._free.pop()  # no other thread has it until it is back
        except IndexError:
            packed = _Packed(self._plan, self)
        if packed.pointers != pointers:
            packed.point_to(pointers)
        for queue, arguments in packed.calls[first:] if first else packed.calls:
            queue(stream, arguments, 0)
        self._free.append(packed)

    def _box(self, name: str, rows: int, pointer: int) -> memoryview:
        """The TMA descriptor of a tensor that begins there, in words."""
        spec, strides = self._plan.counts.tensors[name], self.at[name][1]
        shape = abi.boxed_shape(spec, self._plan.counts.problem)
        return _words(tma.descriptor(pointer, shape, strides, spec.dtype, rows))


class _Packed:
    """The arguments of the launches as the driver takes them: a pointer to each, in memory where only the addresses change.

    The driver copies them when a kernel is queued. So the next call may change them at once.
    """

    def __init__(self, plan: Plan, launcher: Launcher) -> None:
        self._box, number, driver = launcher.box, launcher.number, cupy().cuda.driver
        values = {x.language: abi.VALUES[x.language](plan.counts, launcher.at, plan.shape) for x in plan.launches}
        # by language, name, and rows of a box: all that is passed, and at which word it begins
        passed = [[(x.language, name, x.boxes.get(name or "")) for name in x.arguments] for x in plan.launches]
        places, words = dict[Any, int](), list[int]()
        self._pointers, self._descriptors = list[tuple[int, int]](), list[tuple[int, str, int, int]]()
        for language, name, rows in dict.fromkeys(key for each in passed for key in each):
            places[language, name, rows] = len(words)
            if name is not None and rows is not None:
                self._descriptors.append((len(words), name, rows, number[name]))
                words += [0] * _BOX
                continue
            if name is not None and name in number:  # it comes first, in a struct of pointer and strides, too
                self._pointers.append((len(words), number[name]))
            words += _words(values[language][name])
        memory: Any = np.array(words or [0], np.uint64)
        begin: int = memory.ctypes.data
        self._words = memoryview(memory).cast("B").cast("Q")
        self._tables = [np.array([begin + 8 * places[key] for key in each], np.uintp) for each in passed]
        self.calls = [(x.by(driver), table.ctypes.data) for x, table in zip(plan.launches, self._tables, strict=True)]
        self.pointers: Sequence[int] | None = None

    def point_to(self, pointers: Sequence[int]) -> None:
        """From now on the arrays begin at these pointers."""
        words, self.pointers = self._words, None
        for place, number in self._pointers:
            words[place] = pointers[number]
        for place, name, rows, number in self._descriptors:
            words[place : place + _BOX] = self._box(name, rows, pointers[number])
        self.pointers = pointers


def _words(value: Any) -> memoryview:
    """A NumPy scalar in words of 8 bytes."""
    content = value.tobytes()
    return memoryview(content + bytes(-len(content) % 8)).cast("Q")


def laid_out(tensors: Iterable[Spec]) -> tuple[dict[str, int], int]:
    """Where each array begins in a piece of memory that holds them all, by name, and the bytes of the piece. The largest comes
    first, so that it begins where allocations do."""
    offsets, end = dict[str, int](), 0
    for x in sorted(tensors, key=lambda x: -x.nbytes):
        offsets[x.name] = round_up(end, _ALIGNED)
        end = offsets[x.name] + x.nbytes
    return offsets, end


class _Thread(threading.local):
    cuda: Any = None
    """CuPy's, where this thread has a context."""


_thread = _Thread()


def enter(cuda: Any) -> None:
    """Sees to it that this thread has a context: the driver needs one to launch, and only the runtime makes it."""
    if _thread.cuda is not cuda:
        cuda.runtime.setDevice(cuda.runtime.getDevice())
        _thread.cuda = cuda
