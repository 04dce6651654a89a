"""Every kernel compiles without a GPU, at its default tiles, for every architecture: no spills, no warnings."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path

import pytest

import kernels_cu
from flashlab.run import nvrtc
from flashlab.run.nvrtc import Compiled, compile_kernel, defines
from simulator import CATALOGUE, Config, Device, Problem, Tile
from simulator.catalogue import with_kernels
from tests.patches import patched
from tests.tiers import one_of_each

pytestmark = pytest.mark.nvrtc

DEVICES = {"sm_75": "t4", "sm_80": "a100", "sm_89": "l4", "sm_90": "h100", "sm_90a": "h200"}
WITH_KERNELS = {name: CATALOGUE[name] for name in with_kernels()}
HOPPER = [name for name, row in CATALOGUE.items() if row.arch]
HEAD_DIMS = (40, 64, 128, 256)
SPILLED_ONCE = [("flash2", "float32", 208), ("standard", "float32", 16)]
"""With other tiles: their defaults step aside."""
MATRIX = [
    case
    for name, row in WITH_KERNELS.items()
    for case in itertools.product([name], row.dtypes, HEAD_DIMS, DEVICES)
    if (case[1], case[3]) != ("bfloat16", "sm_75")  # bfloat16 begins with compute capability 8.0
    and (case[0] in HOPPER) == (case[3] == "sm_90a")
] + [(*case, arch) for case in SPILLED_ONCE for arch in DEVICES]
FLASH3_3, INCLUDE = kernels_cu.source("flash3_3"), kernels_cu.include_dir()
SMALL = defines(Config(tile=Tile(16, 16), warps=1), "float16", 16)


def compiled_by_default(name: str, dtype: str, head_dim: int, arch: str, *options: str) -> Compiled:
    problem = Problem(batch=1, heads=8, len_q=4096, head_dim=head_dim, dtype=dtype, causal=True)
    config = CATALOGUE[name].program.configure(problem, Device.named(DEVICES[arch]))
    return compile_kernel(name, (*defines(config, dtype, head_dim), *options), arch=arch)


def complaints(compiled: Compiled) -> list[str]:
    """What a compiled kernel must not have: warnings, spills, a stack."""
    stacks = [f"{name}: {each}" for name, each in compiled.resources.items() if each.stack]
    return [*compiled.warnings, *([f"{compiled.spills} bytes of spills"] if compiled.spills else []), *stacks]


@pytest.mark.parametrize("case", one_of_each(MATRIX, lambda case: case[:2], lambda case: "-".join(map(str, case))))
def test_compiles_without_spills_or_warnings(case: tuple[str, str, int, str]) -> None:
    name, dtype, head_dim, arch = case
    compiled = compiled_by_default(name, dtype, head_dim, arch)
    assert complaints(compiled) == []
    assert compiled.image.startswith(b"\x7fELF")
    entries = {kernel.entry for kernel in CATALOGUE[name].kernels if kernel.source == name}
    assert set(compiled.resources) == entries
    assert all(0 < each.registers <= 255 and each.static_smem == 0 for each in compiled.resources.values())


@pytest.mark.long
@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", HOPPER)
def test_every_tile_of_hoppers_kernels(name: str, causal: bool, head_dim: int, length: int) -> None:
    dtype = CATALOGUE[name].dtypes[-1]
    problem = Problem(batch=1, heads=8, len_q=length, head_dim=head_dim, dtype=dtype, causal=causal)
    config = CATALOGUE[name].program.configure(problem, Device.named("h200"))
    assert complaints(compile_kernel(name, defines(config, dtype, head_dim), arch="sm_90a")) == []


@pytest.mark.parametrize("name", [name for name in WITH_KERNELS if name not in HOPPER])
def test_ptx_for_the_oldest_architecture(name: str) -> None:
    image = compile_kernel(name, SMALL, arch="compute_75").image
    assert b".target sm_75" in image
    assert f".entry {name if name != 'standard' else 'standard_scores'}".encode() in image


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package of the kernels' sources, and a cache of its own."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "number.cuh").write_text("constexpr int NUMBER = 1;\n")
    (tmp_path / "tiny.cu").write_text(
        '#include "number.cuh"\nextern "C" __global__ void tiny(int* x) { *x = NUMBER; }\n'
    )
    monkeypatch.setattr(kernels_cu, "source", lambda name: tmp_path / f"{name}.cu")
    monkeypatch.setattr(kernels_cu, "include_dir", lambda: tmp_path / "include")
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_spill_is_seen(own_sources: Path) -> None:
    lines = [f"float x{i} = x[{i} * n];" for i in range(64)] + [f"x[{i}] = x{i};" for i in range(64)]
    (own_sources / "tiny.cu").write_text(
        f'extern "C" __global__ void tiny(volatile float* x, int n) {{ {" ".join(lines)} }}\n'
    )
    assert complaints(compile_kernel("tiny", arch="sm_80")) == []
    found = complaints(compile_kernel("tiny", ("-maxrregcount=32",), arch="sm_80"))
    assert any("spilled" in line for line in found)
    assert any("bytes of spills" in line for line in found)


def test_a_warning_is_seen(own_sources: Path) -> None:
    (own_sources / "tiny.cu").write_text('extern "C" __global__ void tiny(int* x) { int unused; *x = 1; }\n')
    assert any("unused" in line for line in complaints(compile_kernel("tiny", arch="sm_80")))


def test_a_remark_on_wgmma_is_seen(own_sources: Path) -> None:
    """Without its fence a product makes ptxas put one in, and say so: C7519."""
    shutil.copytree(INCLUDE, own_sources / "include", dirs_exist_ok=True)
    text = FLASH3_3.read_text(encoding="utf-8")
    without = patched(text, "wgmma_fence(); multiply_pv(", "multiply_pv(", step="output")
    options = defines(Config(tile=Tile(128, 64), warps=12, stages=2, consumers=2), "float16", 64)
    for source, ok in ((text, True), (without, False)):
        (own_sources / "tiny.cu").write_text(source, encoding="utf-8")
        found = complaints(compile_kernel("tiny", options, arch="sm_90a"))
        assert (found == []) == ok
        assert ok or any("C7519" in line for line in found)


def test_an_error_shows_the_log(own_sources: Path) -> None:
    (own_sources / "tiny.cu").write_text("nonsense\n")
    with pytest.raises(nvrtc.CompileError, match="tiny.cu.*nonsense|nonsense.*"):
        compile_kernel("tiny", arch="sm_80")


def test_the_cache_answers_until_a_header_changes(own_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = 0
    compile_really = nvrtc._compile  # pyright: ignore[reportPrivateUsage]

    def counted(*args: object, **options: object) -> Compiled:
        nonlocal compiles
        compiles += 1
        return compile_really(*args, **options)  # pyright: ignore

    monkeypatch.setattr(nvrtc, "_compile", counted)
    first, digest = compile_kernel("tiny", arch="sm_80"), nvrtc.sources_digest()
    assert compile_kernel("tiny", arch="sm_80") == first
    assert compiles == 1
    compile_kernel("tiny", arch="sm_90")
    compile_kernel("tiny", ("-DX=1",), arch="sm_80")
    assert compiles == 3
    (own_sources / "include" / "number.cuh").write_text("constexpr int NUMBER = 2;\n")
    assert nvrtc.sources_digest() != digest
    assert compile_kernel("tiny", arch="sm_80").image != first.image
    assert compiles == 4


def test_a_broken_cache_is_compiled_anew(own_sources: Path) -> None:
    first = compile_kernel("tiny", arch="sm_80")
    for path in (own_sources / "cache").rglob("*.json"):
        path.write_text("{")
    assert compile_kernel("tiny", arch="sm_80").image == first.image


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(nvrtc.CompilerMissing, match="^NVRTC's Python bindings are missing: pip install .*nvrtc.*$"):
        compile_kernel("standard", SMALL, arch="sm_80")
