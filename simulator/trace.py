"""The trace of one head: every step of every block, what it moved, what was alive in SRAM, and the values it computed."""

from __future__ import annotations

import base64
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.dtypes import Array
from simulator.registers import Registers

if TYPE_CHECKING:
    from simulator.machine import Block

SCHEMA = 1


@dataclass
class Transfer:
    """Bytes moved by one operation. `rows` and `cols` are half-open ranges of elements of a tensor in HBM, else None."""

    tensor: str
    line: int
    nbytes: dict[str, int]
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None


@dataclass
class Event:
    """One step of one block: `block` is (row tile, key tile of the grid), `line` the line of the tile program.

    `sram` maps the buffers alive at its end to bytes; `values` the register tiles that it changed (by the program's own
    names, such as m, l and acc) to float32 arrays `(rows, cols)`.
    """

    launch: str
    step: str
    block: tuple[int, int]
    line: int
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    sram: dict[str, int] = field(default_factory=dict[str, int])
    values: dict[str, Array] = field(default_factory=dict[str, Array])


@dataclass
class Trace:
    """What happened to one (batch, head), in order. `to_dict` and `save` make it JSON; `load` reads it back.

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

    def to_dict(self, *, values: bool = True) -> dict[str, Any]:
        """Plain data for JSON. Arrays become `{"shape": [rows, cols], "float32": base64}`; `values=False` leaves them out."""
        return {
            "schema": SCHEMA,
            "algorithm": self.algorithm,
            "head": list(self.head),
            "problem": self.problem,
            "tile": list(self.tile),
            "device": self.device,
            "sram_limit": self.sram_limit,
            "sources": {name: {"first_line": first, "text": text} for name, (first, text) in self.sources.items()},
            "events": [
                {
                    "launch": e.launch, "step": e.step, "block": list(e.block), "line": e.line, "sram": e.sram,
                    "transfers": [
                        {"tensor": t.tensor, "line": t.line, "bytes": t.nbytes}
                        | ({} if t.rows is None else {"rows": list(t.rows), "cols": list(t.cols or ())})
                        for t in e.transfers
                    ],
                } | ({"values": {name: _encode(x) for name, x in e.values.items()}} if values else {})
                for e in self.events
            ],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Trace:
        """The inverse of `to_dict`."""
        events = [
            Event(
                e["launch"], e["step"], (e["block"][0], e["block"][1]), e["line"],
                [
                    Transfer(t["tensor"], t["line"], t["bytes"], tuple(t["rows"]) if "rows" in t else None,
                             tuple(t["cols"]) if "cols" in t else None)
                    for t in e["transfers"]
                ],
                e["sram"], {name: _decode(x) for name, x in e.get("values", {}).items()},
            )
            for e in d["events"]
        ]  # fmt: skip
        sources = {name: (s["first_line"], s["text"]) for name, s in d["sources"].items()}
        return cls(d["algorithm"], (d["head"][0], d["head"][1]), d["problem"], (d["tile"][0], d["tile"][1]), d["device"],
                   d["sram_limit"], sources, events)  # fmt: skip

    def to_json(self) -> str:
        """One compact JSON document."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `to_json` wrote to a file."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


class Recorder:
    """Listens to a machine that runs one head, one block at a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sources: dict[str, tuple[int, str]] = {}
        self._launch = ""
        self._block: Block | None = None
        self._frame: FrameType | None = None
        self._seen: dict[str, Registers] = {}
        self._range: tuple[tuple[int, int], tuple[int, int]] | None = None

    def launch(self, name: str) -> None:
        self._launch = name

    def step(self, name: str, frame: FrameType, block: Block) -> None:
        """A step begins; what the last one left in the program's variables belongs to the last one."""
        self._snapshot()
        self._frame, self._block = frame, block
        i = block.i if isinstance(block.i, int) else int(block.i[0])
        code = frame.f_code
        if code.co_name not in self.sources:
            self.sources[code.co_name] = (code.co_firstlineno, _source(frame))
        self.events.append(Event(self._launch, name, (i, block.j), frame.f_lineno))

    def range(self, rows: tuple[int, int], cols: tuple[int, int]) -> None:
        self._range = rows, cols

    def bytes(self, tensor: str, nbytes: dict[str, int], frame: FrameType) -> None:
        if not self.events:
            return
        rows, cols = self._range or (None, None)
        self._range = None
        moved = {what.replace("_", "."): n for what, n in nbytes.items() if n}
        self.events[-1].transfers.append(Transfer(tensor, frame.f_lineno, moved, rows, cols))

    def end(self) -> None:
        self._snapshot()
        self._frame = self._block = None
        self._seen.clear()

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


def _source(frame: FrameType) -> str:
    try:
        return inspect.getsource(frame.f_code)
    except OSError:
        return ""  # typed at a prompt: there is no file to read it from


def _encode(x: Array) -> dict[str, Any]:
    return {"shape": list(x.shape), "float32": base64.b64encode(x.astype("<f4").tobytes()).decode("ascii")}


def _decode(d: dict[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(d["float32"]), "<f4").reshape(d["shape"]).copy()
