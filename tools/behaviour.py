"""Records the project's answers, to compare them after a change of structure.

Run `python -m tools.behaviour record before.json`, change something, then run `python -m tools.behaviour compare
before.json`. Over a fixed grid, it records all counts by launch, step and tensor; the simulator's numbers, bit for bit;
traces; what the emulator counts and computes; the commands' `--json` documents; and the machine code of every kernel.
Kinds of answers (counts, runs, commands, code) behind the file's name restrict it to these.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import flashlab as fl

PROBLEMS: tuple[dict[str, Any], ...] = (
    {"batch": 1, "heads": 2, "len_q": 128, "head_dim": 64, "causal": True},
    {"batch": 2, "heads": 4, "kv_heads": 2, "len_q": 97, "len_kv": 130, "head_dim": 40, "causal": True},
    {"batch": 1, "heads": 2, "len_q": 150, "len_kv": 70, "head_dim": 128, "window": (31, 5)},
    {"batch": 1, "heads": 1, "len_q": 5, "len_kv": 0, "head_dim": 64},
    {"batch": 1, "heads": 1, "len_q": 0, "len_kv": 5, "head_dim": 64},
    {"batch": 1, "heads": 8, "kv_heads": 1, "len_q": 33, "len_kv": 300, "head_dim": 111, "scale": 0.3},
)
LARGE: tuple[dict[str, Any], ...] = (
    {"batch": 4, "heads": 32, "kv_heads": 8, "len_q": 8192, "head_dim": 128, "causal": True},
    {"batch": 1, "heads": 16, "len_q": 1_000_000, "head_dim": 64},
    {"batch": 1, "heads": 16, "len_q": 4096, "len_kv": 65_536, "head_dim": 256, "window": (4095, 0)},
)
ALGORITHMS = tuple(name for name, row in fl.CATALOGUE.items() if row.operation.name == "attention")
DEVICES = ("h100", "h200", "a100", "t4", "4090")
COMMANDS = (
    "compare", "compare --sample", "count flash2", "count flash3 --len-q 4096 --heads 16", "count flash1 --tile 32x32 --lse",
    "count flash3_fp8", "simulate flash2", "simulate standard --no-causal --lse", "simulate flash3_fp8 --len-q 300",
    "sweep flash1 flash2 --len-q 1024,4096 --sram 65536,232448", "sweep flash2 --tile 64x64,2048x64", "devices",
    "time flash3 --len-q 4096 --heads 16 --device h200", "time flash2 --device h200", "time standard --device h200",
    "emulate flash2", "emulate flash3 --len-q 200", "emulate flash3_fp8", "counters flash2 --backend emulator",
    "verify flash2 --check key_sets,gqa --dtype float16", "count nothing",
    "count flash2 --tile 4096x4096", "count flash2 --len-q -1",
)  # fmt: skip
ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a")


def problems(name: str, shapes: tuple[dict[str, Any], ...]) -> Iterator[fl.Problem]:
    """The shapes in every dtype that an algorithm takes."""
    for dtype, shape in product(("float32", "float16", "bfloat16", "float8_e4m3fn"), shapes):
        if (dtype == "float8_e4m3fn") == (name == "flash3_fp8"):
            yield fl.Problem(dtype=dtype, **shape)


def digest(*parts: Any) -> str:
    """A short hash of arrays and texts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else str(part).encode())
    return found.hexdigest()[:16]


def counted(counts: fl.Counts) -> Any:
    """Everything that counts hold, including each launch's ledger."""
    launches = [
        [launch.name, launch.blocks, launch.warps, launch.sram_peak, launch.flops_matmul, launch.flops_other, launch.exp,
         launch.heads_together, sorted((*entry, n) for entry, n in launch.ledger.items()),
         sorted((*key, n) for key, n in launch.distinct.items())]
        for launch in counts.launches
    ]  # fmt: skip
    tensors = sorted((x.name, x.heads, x.rows, x.cols, x.dtype, x.role, x.nbytes) for x in counts.tensors.values())
    config = str(counts.config).replace(", constants=()", "")  # a later field
    return [config, str(counts.tile), launches, tensors, vars(counts.dram)]


def answered(ask: Callable[[], Any]) -> Any:
    """What a call returns, or the text of its refusal."""
    try:
        return ask()
    except (fl.UsageError, fl.Unavailable) as error:
        return f"{type(error).__name__}: {error}"


def counts_of(name: str, shapes: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, Any]]:
    tiles = (None, (64, 64), (128, 128)) if shapes is PROBLEMS else (None,)
    for p, device, tile, lse in product(problems(name, shapes), DEVICES, tiles, (False, True)):
        asked = answered(lambda: counted(fl.count(name, p, device=device, tile=tile, lse=lse)))  # noqa: B023
        yield f"count {name} {p.dtype} {shape_of(p)} {device} {tile} {lse}", digest(json.dumps(asked, default=str))


def shape_of(p: fl.Problem) -> str:
    names = "batch", "heads", "kv_heads", "len_q", "len_kv", "head_dim", "causal", "window", "scale"
    return " ".join(str(p.given.get(name)) for name in names)


def runs_of(name: str) -> Iterator[tuple[str, Any]]:
    for p in problems(name, PROBLEMS):
        data = fl.random_inputs(p, seed=1)

        def simulated(p: fl.Problem = p, data: Any = data) -> str:
            run = fl.simulate(name, *data, **p.masks, lse=True, trace=(0, 0))
            trace = "" if run.trace is None else run.trace.to_json()
            return digest(run.out.view(np.uint8), run.lse, counted(run.counts), trace)

        def emulated(p: fl.Problem = p, data: Any = data) -> str:
            run = fl.emulate(name, *data, **p.masks, lse=True)
            ledgers = [sorted(launch.ledger.items()) for launch in run.launches]
            return digest(run.out.view(np.uint8), run.lse, ledgers, run.complaints())

        yield f"simulate {name} {p.dtype} {shape_of(p)}", answered(simulated)
        yield f"emulate {name} {p.dtype} {shape_of(p)}", answered(emulated)


def commands() -> Iterator[tuple[str, Any]]:
    app = importlib.import_module("flashlab.cli").app
    for command in COMMANDS:
        printed, said = io.StringIO(), io.StringIO()
        status: Any = 0
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            try:
                app([*command.split(), "--json"], prog_name="flashlab")
            except SystemExit as stop:
                status = stop.code
        yield f"flashlab {command}", [status, said.getvalue(), _timeless(printed.getvalue())]


def _timeless(text: str) -> Any:
    """A document without times and versions, which change from run to run."""
    try:
        content = json.loads(text)
    except ValueError:
        return text

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key not in ("seconds", "version")}
        return [without(each) for each in value] if isinstance(value, list) else value

    return without(content)


def machine_code() -> Iterator[tuple[str, Any]]:
    """A hash of every kernel's cubin, compiled in the default configuration of each architecture."""
    nvrtc = importlib.import_module(
        "flashlab.run.nvrtc" if importlib.util.find_spec("flashlab.run") else "flashlab.compiler"
    )
    devices = {"sm_75": "t4", "sm_80": "a100", "sm_89": "4090", "sm_90a": "h200"}
    for name, arch, dim in product(ALGORITHMS, ARCHITECTURES, (64, 128, 256)):
        hopper = name.startswith("flash3")
        if hopper != (arch == "sm_90a"):
            continue
        for dtype in (
            ("float8_e4m3fn",)
            if name == "flash3_fp8"
            else ("float16", "bfloat16")
            if hopper
            else ("float32", "float16")
        ):
            p = fl.Problem(batch=1, heads=2, len_q=4096, head_dim=dim, dtype=dtype, causal=True)
            config = fl.count(name, p, device=devices[arch]).config
            macros = nvrtc.defines(config, dtype, dim)
            for source in dict.fromkeys(kernel.source for kernel in fl.CATALOGUE[name].kernels):
                compiled = nvrtc.compile_kernel(source, macros, arch=arch)
                yield f"cubin {name} {source} {dtype} {dim} {arch}", hashlib.sha256(compiled.image).hexdigest()[:16]


def everything(kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ALGORITHMS:
        if "counts" in kinds:
            found |= dict(counts_of(name, PROBLEMS)) | dict(counts_of(name, LARGE))
        if "runs" in kinds:
            found |= dict(runs_of(name))
    if "commands" in kinds:
        found |= dict(commands())
    if "code" in kinds:
        found |= dict(machine_code())
    return found


def main() -> None:
    what, path, *kinds = sys.argv[1:]
    found = json.loads(json.dumps(everything(kinds or ["counts", "runs", "commands", "code"]), default=str))
    if what == "record":
        Path(path).write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        print(f"{len(found):,} answers recorded")
        return
    before = json.loads(Path(path).read_text(encoding="utf-8"))
    differing = [key for key in found if key in before and before[key] != found[key]]
    for key in differing:
        print(f"{key}\n  before: {str(before[key])[:300]}\n  now:    {str(found[key])[:300]}")
    new = sum(key not in before for key in found)
    print(f"{len(found) - len(differing) - new:,} answers as before, {len(differing)} differ, {new} are new")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
