"""flashlab: every attention algorithm as a tile program, a formula, a CUDA kernel and a lesson, held equal to the byte.

>>> import flashlab as fl
>>> p = fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16", causal=True)
>>> q, k, v = fl.random_inputs(p, seed=0)
>>> run = fl.simulate("flash2", q, k, v, causal=True, tile=(64, 64))
>>> run.counts == fl.count("flash2", p, tile=(64, 64))
True
"""

from __future__ import annotations

from flashlab.base import interrupts as interrupts  # first: it listens for interrupts while the rest loads

# isort: split

from importlib import import_module
from typing import TYPE_CHECKING, Any

import simulator

if not hasattr(simulator, "CATALOGUE"):
    raise ImportError(
        f"flashlab needs its own package `simulator`, but {simulator.__file__ or list(simulator.__path__)[0]} is in the way: "
        "remove or rename it, or change sys.path"
    )

# Not lazy: a later import of the package flashlab.player (or flashlab.verify) would bind its name over the function's.
import simulator.dtypes
from flashlab.base.version import __version__
from flashlab.player import Player, player
from flashlab.verify import Adapter, Domain, FileKernel, Report, kernel, verify
from simulator import (
    CATALOGUE,
    DEVICES,
    Algorithm,
    Block,
    Book,
    Config,
    Counts,
    Device,
    HbmTensor,
    Machine,
    Problem,
    Program,
    QuantizedCache,
    Reference,
    Registers,
    Run,
    Scales,
    Spec,
    SramOverflow,
    SramTile,
    Tile,
    Timeline,
    Trace,
    Unavailable,
    UsageError,
    catalogue,
    check_formula,
    count,
    latent_problem,
    naive,
    naive_loop,
    program,
    quantize_cache,
    random_inputs,
    shape_run,
    simulate,
    softmax,
    timeline,
)

if TYPE_CHECKING:
    from flashlab import parallel as parallel
    from flashlab import testing as testing
    from flashlab.emulator import Empty, FileRun, Poisoned, ProgramRun, emulate_file, run_program
    from flashlab.lessons import check, predict, progress
    from flashlab.run.backward import attention_backward
    from flashlab.run.blocks import block_mask
    from flashlab.run.call import attention
    from flashlab.run.cascade import cascade
    from flashlab.run.emulated import Emulation, EmulationError, emulate
    from flashlab.run.inputs import load_inputs, sample
    from flashlab.run.latent import mla
    from flashlab.run.merge import merge
    from flashlab.run.plan import plan
    from flashlab.run.pools import append_kv, copy_pages
    from flashlab.run.tables import block_table
    from flashlab.views.comparison import Comparison, compare
    from flashlab.views.sweeps import Sweep, sweep
    from simulator.time.chunks import latent_chunk

# Imported on first use, because what they need (matplotlib, rich, hypothesis, CuPy) is slow to import.
_LAZY = {
    "append_kv": "flashlab.run.pools",
    "attention": "flashlab.run.call",
    "attention_backward": "flashlab.run.backward",
    "block_mask": "flashlab.run.blocks",
    "block_table": "flashlab.run.tables",
    "plan": "flashlab.run.plan",
    "cascade": "flashlab.run.cascade",
    "check": "flashlab.lessons",
    "compare": "flashlab.views.comparison",
    "copy_pages": "flashlab.run.pools",
    "emulate": "flashlab.run.emulated",
    "emulate_file": "flashlab.emulator",
    "Empty": "flashlab.base.host",
    "Poisoned": "flashlab.base.host",
    "FileRun": "flashlab.emulator",
    "ProgramRun": "flashlab.emulator",
    "run_program": "flashlab.emulator",
    "latent_chunk": "simulator.time.chunks",
    "Emulation": "flashlab.run.emulated",
    "EmulationError": "flashlab.run.emulated",
    "Comparison": "flashlab.views.comparison",
    "load_inputs": "flashlab.run.inputs",
    "merge": "flashlab.run.merge",
    "mla": "flashlab.run.latent",
    "predict": "flashlab.lessons",
    "progress": "flashlab.lessons",
    "sample": "flashlab.run.inputs",
    "sweep": "flashlab.views.sweeps",
    "Sweep": "flashlab.views.sweeps",
}
_ROOMS = ("parallel", "testing")
"""Packages whose functions are called by the package's name, as in `fl.parallel.simulate`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"flashlab.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'flashlab' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def _in_a_notebook(trace: Trace) -> str:
    return player(trace).frame()


def _as_tables(counts: Counts) -> str:
    from flashlab.views import sheets

    return sheets.html(sheets.of_counts(counts))


def _run_as_tables(run: Run) -> str:
    from flashlab.views import sheets

    return sheets.html(sheets.of_run(run))


def _drawn(predicted: Timeline) -> Any:
    from flashlab.views.timelines import draw

    return draw(predicted)


def _to_numpy(name: str, x: Any) -> Any:
    from flashlab.base.host import operand

    return operand(name, x)


simulator.dtypes.foreign = _to_numpy
Trace.renderer = _in_a_notebook
Counts.renderer = _as_tables
Run.renderer = _run_as_tables
Timeline.drawer = _drawn


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


__all__ = [
    "Adapter", "Algorithm", "Block", "Book", "CATALOGUE", "Comparison", "Config", "Counts", "DEVICES", "Device", "Domain",
    "Empty", "Emulation", "EmulationError", "FileKernel", "FileRun", "HbmTensor", "Machine", "Player", "Poisoned", "Problem",
    "Program", "ProgramRun", "QuantizedCache", "Reference", "Registers", "Report", "Run", "Scales", "Spec", "SramOverflow",
    "SramTile", "Sweep", "Tile", "Timeline", "Trace", "Unavailable", "UsageError", "__version__", "append_kv", "attention",
    "attention_backward", "block_mask", "block_table", "cascade", "catalogue", "check", "check_formula", "compare", "copy_pages",
    "count", "emulate", "emulate_file", "kernel", "latent_chunk", "latent_problem", "load_inputs", "merge", "mla", "naive",
    "naive_loop", "plan", "player", "predict", "program", "progress", "quantize_cache", "random_inputs", "run_program", "sample",
    "shape_run", "simulate", "softmax", "sweep", "timeline", "verify",
]  # fmt: skip
