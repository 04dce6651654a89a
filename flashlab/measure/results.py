"""Evidence as data: what a command measured, with the machine, the versions and the command that wrote it.

A result is one JSON file, `<kind>_<algorithms>_<device>_<date>.json`. Documents draw their figures from these files
(`latest`; `claims.headline`, `claims.markdown`), so that no measured number is ever typed by hand.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flashlab.files import plain, replace_file
from flashlab.run.arrays import cupy
from simulator.devices import DEVICES
from simulator.errors import UsageError, unknown

__all__ = [
    "FOLDER",
    "KINDS",
    "SCHEMA",
    "Result",
    "device_name",
    "environment",
    "find",
    "latest",
    "load",
    "save",
    "title",
]

SCHEMA = 1
"""The version of the files: raised when a key changes its meaning or goes."""

KINDS = (
    "verify",
    "counters",
    "agreement",
    "sanitizers",
    "zoo",
    "bench",
    "ladder",
    "blind",
    "rates",
    "profile",
    "fp8",
    "overhead",
    "patterns",
    "accumulation",
    "emulator",
)
FOLDER = Path("docs/results")
"""Where commands write, relative to where they are called."""

_PACKAGES = (
    "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "torch", "jax", "triton", "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flash-attn-4", "nvidia-cutlass-dsl",
    "flashinfer-python",
)  # fmt: skip

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """A file that was read: where it lies and what it holds."""

    path: Path
    content: Data

    @property
    def kind(self) -> str:
        return self.content["kind"]

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(self.content["algorithms"])

    @property
    def data(self) -> Data:
        """What was measured, as the report's `to_dict` gave it."""
        return self.content["data"]


def device_name(title: str | None) -> str:
    """The short name of a GPU that calls itself `title`; "cpu" for none.

    >>> device_name("NVIDIA H200"), device_name("NVIDIA GeForce RTX 2080 Ti"), device_name(None)
    ('h200', 'geforce-rtx-2080-ti', 'cpu')
    """
    if title is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", title.lower())
    if "a100" in words:
        return "a100-80" if "80gb" in words else "a100-40"
    known = [word for word in words if word in DEVICES]
    return known[0] if known else "-".join(word for word in words if word != "nvidia")


def title(content: Data) -> str | None:
    """What the GPU of a result calls itself."""
    device: Data | None = content["device"]
    return None if device is None else device["name"]


def environment() -> dict[str, Any]:
    """The machine and the versions that a measurement was made with. What isn't there is None or left out."""
    device = _device()
    return {
        "device": device,
        "driver": _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_runtime": _quietly(_cupy_version, "runtime"),
        "nvrtc": _quietly(_cupy_version, "nvrtc"),
        "cudnn": _quietly(_cudnn),
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "commit": _line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"),
        "command": _command(sys.argv),
    }


def save(
    kind: str, algorithms: Sequence[str], data: Data, *, folder: str | Path = FOLDER, replace: bool = False,
    about: Data | None = None,
) -> Path:  # fmt: skip
    """Write what a command measured; the path. An existing file of that name is left alone unless `replace`.

    `about` stands in for `environment()`: what was measured elsewhere or earlier.
    """
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    if not algorithms or any(not re.fullmatch(r"[\w.-]+", name) for name in algorithms):
        raise UsageError("algorithms", list(algorithms), "at least one name of letters, digits, '_', '.' and '-'")
    about = environment() if about is None else about
    device = device_name(title(about))
    path = Path(folder) / f"{kind}_{'-'.join(algorithms)}_{device}_{about['date'][:10]}.json"
    if path.exists() and not replace:
        raise UsageError("output", str(path), "a file that isn't there yet, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "kind": kind, "algorithms": list(algorithms), **about, "data": data}
    replace_file(path, json.dumps(plain(content), indent=1, allow_nan=False) + "\n", argument="output")
    return path


def load(path: str | Path) -> Result:
    """Read a result; `UsageError` for a file that is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("path", str(path), f"a result that can be read ({type(error).__name__})") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or content.get("kind") not in KINDS:  # pyright: ignore
        raise UsageError("path", str(path), f"a result of schema {SCHEMA}, of kind {', '.join(KINDS)}")
    return Result(Path(path), cast("Data", content))


def find(
    folder: str | Path = FOLDER, *, kind: str | None = None, algorithm: str | None = None, device: str | None = None
) -> list[Result]:
    """The results in a folder, and in folders inside, that match; oldest first. Plain lists of cells are passed over."""
    results = [load(path) for path in sorted(Path(folder).rglob("*.json")) if not _is_list(path)]
    return sorted(
        (
            r for r in results
            if kind in (None, r.kind)
            and (algorithm is None or algorithm in r.algorithms)
            and device in (None, device_name(title(r.content)))
        ),
        key=lambda r: str(r.content["date"]),
    )  # fmt: skip


def _is_list(path: Path) -> bool:
    """Is it a table for other programs (`flashlab bench --cells`) rather than a result?"""
    with path.open(encoding="utf-8") as file:
        return file.read(1) == "["


def latest(
    kind: str, folder: str | Path = FOLDER, *, algorithm: str | None = None, device: str | None = None
) -> Result | None:
    """The newest result of a kind; None without one."""
    found = find(folder, kind=kind, algorithm=algorithm, device=device)
    return found[-1] if found else None


def _device() -> dict[str, Any] | None:
    """The GPU as CuPy sees it, or torch; None without one."""
    return _quietly(_cupy_device) or _quietly(_torch_device)


def _cupy_device() -> dict[str, Any]:
    runtime = cupy().cuda.runtime
    p = runtime.getDeviceProperties(runtime.getDevice())
    capability, memory = (p["major"], p["minor"]), p["totalGlobalMem"]
    return _device_facts(p["name"].decode(), capability, p["multiProcessorCount"], memory, p["l2CacheSize"])


def _torch_device() -> dict[str, Any]:
    p = importlib.import_module("torch").cuda.get_device_properties()
    return _device_facts(p.name, (p.major, p.minor), p.multi_processor_count, p.total_memory, p.L2_cache_size)


def _device_facts(name: str, capability: tuple[int, int], sms: int, memory: int, l2: int) -> dict[str, Any]:
    return {
        "name": name, "compute_capability": f"{capability[0]}.{capability[1]}", "sms": sms, "memory": memory, "l2": l2,
    }  # fmt: skip


def _cupy_version(part: str) -> str:
    cuda = cupy().cuda
    if part == "nvrtc":
        major, minor = cuda.nvrtc.getVersion()
    else:
        number = cuda.runtime.runtimeGetVersion()
        major, minor = number // 1000, number % 1000 // 10
    return f"{major}.{minor}"


def _cudnn() -> str:
    return str(importlib.import_module("torch").backends.cudnn.version())


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["flashlab"] = importlib.metadata.version("flashlab-attention")
    if "flashlab" not in versions:
        import flashlab

        versions["flashlab"] = str(getattr(flashlab, "__version__", "unknown"))
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    for tool in ("ncu", "compute-sanitizer"):
        if number := _tool_version(tool):
            versions[tool] = number
    return versions


@functools.cache
def _tool_version(tool: str) -> str | None:
    if shutil.which(tool) is None:
        return None
    said = _output(tool, "--version") or ""
    match = re.search(r"\d{4}(?:\.\d+)+", said)
    return match[0] if match else None


def _command(argv: Sequence[str]) -> str:
    """How the running command would be typed: without the folder of the program, or any other of this machine."""
    program = Path(argv[0])
    name = "flashlab" if program.name in ("__main__.py", "flashlab") else program.name
    return shlex.join([name, *(Path(x).name if Path(x).is_absolute() else x for x in argv[1:])])


def _line(*command: str) -> str | None:
    """The first line that a command prints; None if it fails or isn't there."""
    said = (_output(*command) or "").strip()
    return said.splitlines()[0] if said else None


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout if not done.returncode else None
    return None


def _quietly(ask: Callable[..., Any], *arguments: Any) -> Any:
    """An answer about the machine, or None: a missing or broken library must not stop a report."""
    try:
        return ask(*arguments)
    except Exception:
        return None
