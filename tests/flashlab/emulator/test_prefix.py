"""What every kernel includes is compiled once. The kernels are the same without that, and nobody hears of it."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.base import cache
from flashlab.emulator import BuildError, build
from flashlab.emulator.prefix import options_of, precompiled

building: Any = importlib.import_module("flashlab.emulator.build")
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif("clang" in (os.environ.get("CXX") or ""), reason="only g++ has one"),
]

KERNEL = """
#include <cuda_fp16.h>
__global__ void past(const half* x, float* y) {
  __shared__ float sums[32];
  sums[threadIdx.x] = __half2float(x[threadIdx.x]);
  __syncthreads();
  y[threadIdx.x + 1] = sums[31 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefix") / "past.cu"
    path.write_text(KERNEL)
    return path


@pytest.fixture(scope="module")
def whole(source: Path) -> tuple[object, ...]:
    """What is told of the kernel where nothing is precompiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "precompiled", lambda *_: None)
        return told(source)


@pytest.fixture
def headers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The headers that builds are given from here on, each a copy. Libraries are built anew; the runtime is the same for all."""
    (tmp_path / "runtime").symlink_to(cache.folder() / "runtime")
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    building._library.cache_clear()
    given: list[Path] = []

    def copied(*arguments: Any) -> Path:
        made = precompiled(*arguments)
        assert made is not None
        given.append(tmp_path / made.name)
        for file in (made, made.with_name(f"{made.name}.gch")):
            shutil.copy(file, tmp_path)
        return given[-1]

    monkeypatch.setattr(building, "precompiled", copied)
    return given


def told(path: Path) -> tuple[object, ...]:
    """All that a launch tells, and the lines that call the runtime."""
    arrays = {"x": np.arange(32, dtype=np.float16), "y": np.zeros(32, "f4")}
    done = fl.emulate_file(path, arrays, grid=1, block=32)
    return done.launched.to_dict(), done.arrays["y"].tolist(), sorted(map(str, build(path).places.values()))


def test_it_is_loaded_and_the_kernel_is_the_same(source: Path, whole: tuple[object, ...], headers: list[Path]) -> None:
    assert told(source) == whole
    options = [*options_of(building._command(source, (), (), arch=900, std="c++17"))]
    command = [building.compiler()[0], *options, *building._WATCH, *building._WATCH_GCC, "-DHEAD_DIM=64", "-H"]
    command += ["-fsyntax-only", "-include", str(headers[0]), "-x", "c++", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said.startswith(f"! {headers[0]}.gch\n")  # the mark of one that g++ loads


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_without_it_too(
    how: str, source: Path, whole: tuple[object, ...], headers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = building.precompiled

    def harmed(*arguments: Any) -> Path:
        header: Path = copied(*arguments)
        header.with_name(f"{header.name}.gch").write_bytes(b"gpch" + bytes(100))
        if how == "gone":
            header.unlink()
        return header

    monkeypatch.setattr(building, "precompiled", harmed)
    assert told(source) == whole and len(headers) == 1


def test_what_does_not_compile_is_told_by_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "past.cu"
    path.write_text(KERNEL.replace("sums[31 - threadIdx.x]", "sum[31 - threadIdx.x]"))
    with pytest.raises(BuildError) as error:
        build(path)
    said = str(error.value)
    assert (
        said.startswith("past.cu doesn't compile at past.cu:7") and "prefix" not in said and "command-line" not in said
    )
