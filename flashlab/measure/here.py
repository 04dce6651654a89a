"""What is found on this machine of all that some calls need, and how to get what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flashlab.emulator.build import compiler
from flashlab.emulator.places import check_tools
from flashlab.measure import ncu, results, sanitizers
from flashlab.run import nvrtc, tritonc
from flashlab.run.arrays import cupy
from simulator.errors import Unavailable

__all__ = ["Here", "Part", "look"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Names under which Chromium and its kin are installed."""


@dataclass(frozen=True)
class Part:
    """Something that some calls need. `found` says what is here, or `missing` how to get it; the other is None.

    >>> Part("ncu", "flashlab counters", None, "install Nsight Compute").line
    'ncu (for flashlab counters): missing; install Nsight Compute'
    """

    name: str
    purpose: str
    found: str | None
    missing: str | None

    @property
    def line(self) -> str:
        """The part in one line, for people."""
        said = f"missing; {self.missing}" if self.found is None else self.found
        return f"{self.name} (for {self.purpose}): {said}"


@dataclass(frozen=True)
class Here:
    """The versions of what is installed, by name, and the parts."""

    versions: dict[str, str]
    parts: tuple[Part, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def look() -> Here:
    """Look for everything. Nothing is installed, built or run on a GPU.

    >>> [part.name for part in look().parts][:3]
    ['GPU', 'CuPy', 'NVRTC']
    """
    about = results.environment()
    found: list[Part] = []
    for name, purpose, find in _finders(about):
        try:
            found.append(Part(name, purpose, find(), None))
        except Unavailable as error:
            found.append(Part(name, purpose, None, str(error)))
    return Here(about["versions"], tuple(found))


def _finders(about: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Each part's name, what needs it, and what finds it or raises `Unavailable`."""
    versions: dict[str, str] = about["versions"]

    def gpu() -> str:
        device, driver = about["device"], f"driver {about['driver'] or 'unknown'}"
        if device is not None:
            return f"{device['name']}, compute capability {device['compute_capability']}, {driver}"
        if about["driver"] is not None:
            return f"an NVIDIA GPU, {driver} (CuPy would know its name)"
        raise Unavailable("no NVIDIA GPU, or no driver for it: simulator, formulas and emulator need none")

    def cupy_of_a_gpu() -> str:
        return f"{cupy().__version__}, CUDA {about['cuda_runtime']}"

    def tool(name: str, path: str) -> str:
        return f"{versions.get(name, 'version unknown')}, {path}"

    def cpp() -> str:
        path, its_version = compiler()
        check_tools()  # the emulator needs binutils, too
        return f"{its_version.splitlines()[0]}, {path}"

    yield "GPU", "kernels on a GPU", gpu
    yield "CuPy", "kernels on a GPU", cupy_of_a_gpu
    yield "NVRTC", "compiling kernels without a GPU", lambda: f"its headers are in {nvrtc.cuda_include_dir()}"
    yield "Triton", "kernels in Triton", lambda: tritonc.package().__version__
    yield "ncu", "flashlab counters", lambda: tool("ncu", ncu.program())
    yield "compute-sanitizer", "flashlab sanitize", lambda: tool("compute-sanitizer", sanitizers.program())
    yield "C++ compiler", "the emulator", cpp
    yield "PyTorch", "flashlab bench and capture", lambda: _package("torch")
    yield "Transformers", "flashlab capture", lambda: _package("transformers")
    yield "Chromium", "tests of the player", _browser


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise Unavailable(f"pip install {name}") from None


def _browser() -> str:
    if path := next(filter(None, map(shutil.which, BROWSERS)), None):
        return path
    raise Unavailable("on Debian or Ubuntu, apt-get install chromium")
