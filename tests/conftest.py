"""What all tests share: what a test may need and not find here, and a list at the end of what was not run for it."""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

# Before NumPy is imported: two workers whose matrix products spin on every core slow each other down twentyfold.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before Triton is imported, by whatever library: its own functions are made for its interpreter then, or for a GPU.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

import pytest
from hypothesis import settings

from tests.tiers import like_cases_are_long, may_be_meant

# The same examples in every run, and no deadline: a busy machine is no bug. HYPOTHESIS_PROFILE=explore looks further.
# Properties with a number of their own say it by tests.tiers.examples.
settings.register_profile("ci", max_examples=35, derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("long", settings.get_profile("ci"), max_examples=100)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

os.environ.setdefault("MPLBACKEND", "Agg")


def _gpu() -> str | None:
    try:
        import cupy  # pyright: ignore
    except ImportError:
        return "no CuPy: pip install 'cupy-cuda12x[ctk]'"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no NVIDIA GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no NVIDIA GPU ({error})"


def _nvrtc() -> str | None:
    from flashlab.run import nvrtc

    try:
        nvrtc.cuda_include_dir()
    except nvrtc.CompilerMissing as missing:
        return str(missing)
    return None


def _compiler() -> str | None:
    names = [os.environ.get("CXX") or "c++", "g++", "clang++"]
    return None if any(map(shutil.which, names)) else "no C++ compiler: install g++ or clang++"


def _triton() -> str | None:
    if find_spec("triton") is None:
        return "no Triton: make test-triton"
    return None if os.environ["TRITON_INTERPRET"] == "1" else "Triton is set to its compiler: TRITON_INTERPRET=1"


def _nvcc() -> str | None:
    return None if shutil.which("nvcc") else "no nvcc: install the CUDA toolkit"


def _module(name: str, remedy: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(name) else f"no {remedy}"


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Names under which Chromium and its kin are installed."""


def find_browser() -> str | None:
    """The path of a browser that the player can be tested in."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _browser() -> str | None:
    if find_spec("playwright") is None:
        return "no Playwright: pip install playwright"
    return None if find_browser() else "no Chromium: on Debian, apt-get install chromium"


NEEDS: dict[str, Callable[[], str | None]] = {
    marker: functools.cache(find)
    for marker, find in (
        ("gpu", _gpu),
        ("nvrtc", _nvrtc),
        ("nvcc", _nvcc),
        ("compiler", _compiler),
        ("browser", _browser),
        ("torch", _module("torch", "PyTorch: make test-torch")),
        ("triton", _triton),
        ("transformers", _module("transformers", "Transformers: make test-torch")),
        ("jax", _module("jax", "JAX: make test-long")),
    )
}
"""By marker: what is missing here, in one line, or None."""

ALL = {"nvrtc", "compiler", "browser"}
"""What FLASHLAB_REQUIRE=all means: what the locks and a Debian have. Others are required by their names."""


def required(marker: str) -> bool:
    """Must it be here, by FLASHLAB_REQUIRE?"""
    names = os.environ.get("FLASHLAB_REQUIRE", "").split(",")
    return marker in names or ("all" in names and marker in ALL)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alike: of these cases a few run in `make test`; tests/tiers.py says which")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, find in NEEDS.items():
        if item.get_closest_marker(marker) and (missing := find()):
            if required(marker):
                pytest.fail(f"FLASHLAB_REQUIRE={os.environ['FLASHLAB_REQUIRE']}, but {missing}", pytrace=False)
            pytest.skip(missing)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has none of the tests asked for isn't even imported: all of them take half a minute in each process."""
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        text = collection_path.read_text(encoding="utf-8")
        return None if may_be_meant(text, config.option.markexpr, NEEDS) else True
    return None


LEFT_OUT = pytest.StashKey[int]()
"""How many long tests were left out."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests are left out unless somebody asks for them: by a marker, or by the name of a test.

    Groups go first. One worker has a whole group, and the others would wait for it at the end. FLASHLAB_PART=3/8 leaves the third
    of eight parts.
    """
    like_cases_are_long(items, whole=not any("::" in word for word in config.args))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    if part := os.environ.get("FLASHLAB_PART"):
        k, n = map(int, part.split("/"))
        others = [item for item in items if crc32(item.nodeid.encode()) % n != k - 1]
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % n == k - 1]
        config.hook.pytest_deselected(items=others)
    if config.option.markexpr or any("::" in word for word in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    config.stash[LEFT_OUT] = len(long)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = len(long)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What one of xdist's processes has left out, all have."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests by reason, and long ones, so that a green run says what it did not look at."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    if n := terminalreporter.config.stash.get(LEFT_OUT, 0):
        reasons["too long: make test-long"] = n
    if reasons:
        terminalreporter.section("not run here")
        for reason, n in reasons.most_common():
            terminalreporter.line(f"{n:5} tests: {reason}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of a module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=find_browser())
        yield running
        running.close()
