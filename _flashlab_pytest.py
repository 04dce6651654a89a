"""flashlab's pytest plugin: fixtures that verify and count kernels, markers for what they need, baselines of counts.

It lies outside of the package `flashlab`, since pytest loads it in every run wherever flashlab is installed. Here, only
a test that uses something of it imports flashlab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

UPDATE = "--flashlab-update"
NEEDS = {
    "flashlab_gpu": "needs an NVIDIA GPU and CuPy; skipped without them",
    "flashlab_emulator": "needs the emulator, which needs a C++ compiler and binutils; skipped without them",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "write the counts that counts_baseline gets into the baselines, instead of comparing them"
    parser.getgroup("flashlab").addoption(UPDATE, action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    for name, words in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {words}")
    if config.getoption(UPDATE) and config.getoption("numprocesses", default=None):
        raise pytest.UsageError(f"{UPDATE} = True: expected without -n, since processes would overwrite each other's")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in NEEDS:
        if item.get_closest_marker(name):
            from flashlab.verify.pytest import missing

            if reason := missing(name):
                pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in terminalreporter.config.stash.setdefault(WRITTEN, {}):
        terminalreporter.line(f"flashlab: wrote {path}")


WRITTEN = pytest.StashKey[dict[str, None]]()
"""The baselines that were written."""


@pytest.fixture(scope="session")
def verify_attention() -> Callable[..., Any]:
    """`verify_attention(fn, **options)` verifies an attention function, and fails with the report.

    The options are those of `fl.Adapter` and `fl.verify`. Returns the report.
    """
    from flashlab.verify.pytest import verify_attention

    return verify_attention


@pytest.fixture(scope="session")
def assert_bytes() -> Callable[..., None]:
    """`assert_bytes(run, hbm_read=4096, at_most={"hbm_write": 8192})`: what a run moved, in bytes."""
    from flashlab.verify.pytest import assert_bytes

    return assert_bytes


@pytest.fixture
def counts_baseline(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`counts_baseline(run)` compares what a run moved with what it moved before: a file beside the test.

    For a test in `test_mine.py` that is `test_mine.counts.json`. `--flashlab-update` writes it. A second run in one
    test takes a name: `counts_baseline(run, "decode")`.
    """
    from flashlab.verify.pytest import Baseline

    path = request.path.with_suffix(".counts.json")
    test = str(request.node.nodeid).partition("::")[2]  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    written = request.config.stash.setdefault(WRITTEN, {})
    return Baseline(path, test, written if request.config.getoption(UPDATE) else None)
