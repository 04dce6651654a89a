"""The trace of one head: each step of each block, what it moved, what was alive in SRAM, and the values it computed."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from simulator.dtypes import Array
from simulator.registers import Registers

if TYPE_CHECKING:
    from simulator.block import Block
    from simulator.counts import Book, Spec
    from simulator.tensors import SramTile

SCHEMA = 1
_NOWHERE = None, None, None
_STEP, _TRANSFER, _VALUES = 400, 700, 200  # bytes of an `Event`, a `Transfer` and an array besides what the array holds


@dataclass(slots=True)
class Transfer:
    """What one operation moved: `nbytes` by level and direction, as in `{"hbm.read": 8192}`.

    `rows` and `cols` are half-open ranges of elements of a tensor in HBM. They are None for a buffer in SRAM. Keys in pages
    have the rows that they are of their request. `plane` is which one of a workspace with several, and else None. `line` is
    the line that asked for the transfer, in the function `source`.
    """

    tensor: str
    line: int
    nbytes: dict[str, int]
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    source: str = ""
    plane: int | None = None


@dataclass(slots=True)
class Event:
    """One step of one block. `block` is (row tile, key tile of the grid), and `line` the line of the tile program.

    `source` names the function that has the line. What a program does before its first `step` is a step called "".
    `sram` maps the buffers that are alive when the step ends to their bytes. `values` maps the register tiles that the
    step changed, by the program's own names (m, l, acc), to float32 arrays `(rows, cols)`. `request` is the batch that the
    block is of, where a trace has several: rows of its transfers are that batch's. It is None where a block has rows of all.
    """

    launch: str
    step: str
    block: tuple[int, int]
    line: int
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    sram: dict[str, int] = field(default_factory=dict[str, int])
    values: dict[str, Array] = field(default_factory=dict[str, Array])
    source: str = ""
    request: int | None = None


@dataclass(frozen=True)
class HbmShape:
    """One head of an array in HBM: `rows` x `cols` of a dtype. `role` is "input", "output" or "workspace".

    A `vector` (LSE, l, m) has one value per row, without padding.
    """

    rows: int
    cols: int
    dtype: str
    role: str
    vector: bool


@dataclass(frozen=True)
class SramShape:
    """A buffer in SRAM: `copies` (the stages of a ring, or one per warp) of `rows` x `cols` of a dtype."""

    rows: int
    cols: int
    dtype: str
    copies: int


@dataclass(repr=False)
class Trace:
    """What happened to one (batch, head), in order. `to_dict` and `to_json` make it JSON, and `load` reads it back.

    Of requests with a prefix in common it has all, because tiles have queries of all.

    `sources` maps each function that took part to its first line and its text. `tensors` and `buffers` have the shapes
    of what lay in HBM and in SRAM, by name. `sram_limit` is the device's limit per block, in bytes. `pages` are the numbers
    of the pages that each batch's keys lie in, in the order of the keys. It is empty where none lie in pages.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16")
    >>> run = fl.simulate("flash2", *fl.random_inputs(p), tile=(32, 32), trace=(0, 1))
    >>> [event.step for event in run.trace.events[:4]]
    ['load_q', 'load_k', 'scores', 'mask']
    """

    algorithm: str
    head: tuple[int, int]
    problem: dict[str, Any]
    tile: tuple[int, int]
    device: str
    sram_limit: int
    sources: dict[str, tuple[int, str]]
    events: list[Event]
    tensors: dict[str, HbmShape] = field(default_factory=dict[str, HbmShape])
    buffers: dict[str, SramShape] = field(default_factory=dict[str, SramShape])
    pages: list[list[int]] = field(default_factory=list[list[int]])

    renderer: ClassVar[Callable[[Trace], str] | None] = None
    """How a notebook shows a trace. `flashlab` puts its player here, because this layer does not know the player."""

    def __repr__(self) -> str:
        return f"<trace of {self.algorithm}, batch {self.head[0]}, head {self.head[1]}: {len(self.events):,} steps>"

    def _repr_html_(self) -> str | None:
        render = type(self).renderer
        return None if render is None else render(self)

    def to_dict(self, *, values: bool = True) -> dict[str, Any]:
        """Plain data for JSON. Arrays become `{"shape": [rows, cols], "float32": base64}`.

        `values=False` leaves the arrays out.
        """
        return {
            "schema": SCHEMA,
            "algorithm": self.algorithm,
            "head": list(self.head),
            "problem": self.problem,
            "tile": list(self.tile),
            "device": self.device,
            "sram_limit": self.sram_limit,
            "sources": {name: {"first_line": first, "text": text} for name, (first, text) in self.sources.items()},
            "tensors": {name: asdict(shape) for name, shape in self.tensors.items()},
            "buffers": {name: asdict(shape) for name, shape in self.buffers.items()},
            "pages": self.pages,
            "events": [
                {
                    "launch": e.launch,
                    "step": e.step,
                    "block": list(e.block),
                    "source": e.source,
                    "line": e.line,
                    "sram": e.sram,
                    "transfers": [
                        {"tensor": t.tensor, "source": t.source, "line": t.line, "bytes": t.nbytes}
                        | ({} if t.rows is None else {"rows": list(t.rows), "cols": list(t.cols or ())})
                        | ({} if t.plane is None else {"plane": t.plane})
                        for t in e.transfers
                    ],
                }
                | ({} if e.request is None else {"request": e.request})
                | ({"values": {name: _encode(x) for name, x in e.values.items()}} if values else {})
                for e in self.events
            ],
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Trace:
        """The inverse of `to_dict`."""
        events = [
            Event(
                e["launch"], e["step"], (e["block"][0], e["block"][1]), e["line"],
                [
                    Transfer(t["tensor"], t["line"], t["bytes"], tuple(t["rows"]) if "rows" in t else None,
                             tuple(t["cols"]) if "cols" in t else None, t.get("source", ""), t.get("plane"))
                    for t in e["transfers"]
                ],
                e["sram"], {name: _decode(x) for name, x in e.get("values", {}).items()}, e.get("source", ""),
                e.get("request"),
            )
            for e in d["events"]
        ]  # fmt: skip
        sources = {name: (s["first_line"], s["text"]) for name, s in d["sources"].items()}
        return cls(d["algorithm"], (d["head"][0], d["head"][1]), d["problem"], (d["tile"][0], d["tile"][1]), d["device"],
                   d["sram_limit"], sources, events,
                   {name: HbmShape(**shape) for name, shape in d.get("tensors", {}).items()},
                   {name: SramShape(**shape) for name, shape in d.get("buffers", {}).items()}, d.get("pages", []))  # fmt: skip

    def to_json(self) -> str:
        """One compact JSON document."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that holds what `to_json` returned."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


class Recorder:
    """Listens to a machine that runs one head, one block at a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sources: dict[str, tuple[int, str]] = {}
        self.tensors: dict[str, HbmShape] = {}
        self.buffers: dict[str, SramShape] = {}
        self._launch = ""
        self._block: Block | None = None
        self._request: int | None = None
        self._frame: FrameType | None = None
        # kept from block to block, because a variable that is not yet set anew still holds the old block's tile
        self._seen: dict[str, Registers] = {}
        self._range: tuple[tuple[int, int] | None, tuple[int, int] | None, int | None] = _NOWHERE
        self._names: dict[CodeType, str] = {}
        self._files: dict[str, str] = {}

    def tensor(self, spec: Spec) -> None:
        self.tensors[spec.name] = HbmShape(spec.rows, spec.cols, spec.dtype, spec.role, spec.vector)

    def buffer(self, tile: SramTile, copies: int) -> None:
        self.buffers[tile.name] = SramShape(tile.rows, tile.cols, tile.dtype, copies)

    def launch(self, name: str) -> None:
        self._launch = name

    def block(self, block: Block, request: int | None) -> None:
        """A block begins, of a batch or of all. What the program's variables hold until now belongs to the block before."""
        self.end()
        self._block, self._request = block, request

    def step(self, name: str, frame: FrameType) -> None:
        """A step begins. What the last step left in the program's variables belongs to the last step."""
        self._snapshot()
        self._begin(name, frame)

    def range(self, rows: tuple[int, int], cols: tuple[int, int], plane: int | None) -> None:
        self._range = rows, cols, plane

    def bytes(self, tensor: str, nbytes: dict[str, int], frame: FrameType) -> None:
        if self._frame is None:
            self._begin("", frame)
        rows, cols, plane = self._range
        self._range = _NOWHERE
        moved = {what.replace("_", "."): n for what, n in nbytes.items() if n}
        self.events[-1].transfers.append(
            Transfer(tensor, frame.f_lineno, moved, rows, cols, self._source(frame), plane)
        )

    def end(self) -> None:
        self._snapshot()
        self._frame = None

    def _begin(self, name: str, frame: FrameType) -> None:
        assert self._block is not None
        self._frame = frame
        i = self._block.i if isinstance(self._block.i, int) else int(self._block.i[0])
        at = i, self._block.j
        self.events.append(
            Event(self._launch, name, at, frame.f_lineno, source=self._source(frame), request=self._request)
        )

    def _snapshot(self) -> None:
        if self._frame is None or self._block is None:
            return
        event = self.events[-1]
        event.sram = self._block.sram_alive()
        for name, x in self._frame.f_locals.items():
            if isinstance(x, Registers) and self._seen.get(name) is not x:
                self._seen[name] = x
                event.values[name] = np.broadcast_to(x.array, (*x.array.shape[:-2], x.rows, x.array.shape[-1]))[
                    0, 0, 0, 0
                ].copy()

    def _source(self, frame: FrameType) -> str:
        """The name under which a function's text is kept. A function inside a kept one is part of that one's text."""
        code = frame.f_code
        if code not in self._names:
            self._names[code] = self._keep(code)
        return self._names[code]

    def _keep(self, code: CodeType) -> str:
        for name, (first, text) in self.sources.items():
            if self._files[name] == code.co_filename and first <= code.co_firstlineno < first + len(text.splitlines()):
                return name
        name = code.co_name
        while name in self.sources:  # a function of the same name in another file
            name += "'"
        self.sources[name] = code.co_firstlineno, _source(code)
        self._files[name] = code.co_filename
        return name


class Sizes(Recorder):
    """Records nothing, and counts in a book what a recorder would have kept: the bytes of steps, transfers and values."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self._book = book

    def bytes(self, tensor: str, nbytes: dict[str, int], frame: FrameType) -> None:
        if self._frame is None:
            self._begin("", frame)
        self._book.add("", "trace", kept=_TRANSFER)

    def _begin(self, name: str, frame: FrameType) -> None:
        self._frame = frame
        self._book.add("", "trace", steps=1, kept=_STEP)

    def _snapshot(self) -> None:
        if self._frame is None or self._block is None:
            return
        for name, x in self._frame.f_locals.items():
            if isinstance(x, Registers) and self._seen.get(name) is not x:
                self._seen[name] = x
                self._book.add("", "trace", kept=_VALUES + 4 * x.size)


def _source(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except OSError:
        return ""  # typed at a prompt: there is no file to read it from


def _encode(x: Array) -> dict[str, Any]:
    return {"shape": list(x.shape), "float32": base64.b64encode(x.astype("<f4").tobytes()).decode("ascii")}


def _decode(d: dict[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(d["float32"]), "<f4").reshape(d["shape"]).copy()
