"""Triton's compiler: what it is told, what is said where it can't work, and what it makes of the kernel for Hopper."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashlab as fl
from flashlab.measure import workload
from flashlab.run import abi, arrays, tritonc
from simulator.algorithms.flash2_triton import power_of_two
from tests.flashlab.run import fake
from tests.flashlab.run.fake import FakeCupy
from tests.tiers import one_of_each

P = fl.Problem(batch=1, heads=2, len_q=50, head_dim=64, dtype="float16", causal=True)
NAME = "flash2_triton"
KERNEL = fl.CATALOGUE[NAME].kernels[0]


def package(version: str = "3.6.0", interpret: bool = False) -> Any:
    return SimpleNamespace(__version__=version, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=interpret)))


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (None, r"kernels in Triton need it: pip install 'triton>=3.6', on Linux"),
        (package("3.5.1"), r"Triton 3.5.1 is too old: pip install 'triton>=3.6', on Linux"),
        (
            package(interpret=True),
            "TRITON_INTERPRET is set, and Triton compiles nothing for a GPU: start again without it",
        ),
    ],
)
def test_what_is_missing_is_one_line(installed: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", installed)
    with pytest.raises(fl.Unavailable, match=line):
        tritonc.compile_kernel(KERNEL, fl.count(NAME, P))


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0+git1234", "4.0.0"])
def test_newer_ones_do(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", package(version))
    assert tritonc.compiler().__version__ == version


def test_bases_and_strides_are_said_to_be_multiples_of_16_bytes() -> None:
    """What `fl.attention` sees to for every array; Triton loads 16 bytes at once only where it knows."""
    for dtype, width, pointer in (("float32", 4, "*fp32"), ("float16", 2, "*fp16"), ("bfloat16", 2, "*bf16")):
        found = abi.triton_parameters(fl.count(NAME, P.replace(dtype=dtype)))
        assert found["q"] == (pointer, 16) and found["q_row"] == found["out_batch"] == ("i64", 16 // width)
        assert found["lse"] == ("*fp32", None) and "lse_row" not in found
        assert (found["len_q"], found["scale"]) == (("i32", None), ("fp32", None))


def test_more_sram_than_there_is_is_refused(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the compiler knows how much a kernel takes."""
    monkeypatch.setattr(tritonc, "compile_kernel", lambda *given: replace(fake.compile_in_triton(*given), sram=250_000))
    with pytest.raises(
        fl.SramOverflow, match="tile = '128x128': .* 250,000 bytes of SRAM per block, and h200 has 232,448"
    ):
        fl.plan(NAME, P)


@pytest.mark.parametrize(("tile", "taken"), [((64, 32), True), ((48, 64), False), ((64, 256), False), ((8, 16), False)])
def test_tiles_are_powers_of_two(cupy: FakeCupy, tile: tuple[int, int], taken: bool) -> None:
    assert arrays.cupy() is cupy
    if taken:
        assert fl.plan(NAME, P, tile=tile).counts.tile == tile
        return
    with pytest.raises(fl.UsageError, match="expected sides of 16, 32, 64 or 128"):
        fl.plan(NAME, P, tile=tile)


def test_an_older_gpu_is_refused() -> None:
    line = fl.CATALOGUE[NAME].refuses(P, fl.DEVICES["t4"])
    assert line == "Tesla T4 has compute capability 7.5: the kernels need 8.0 or higher"


@pytest.mark.parametrize(
    "asked",
    [{"soft_cap": 5.0}, {"sinks": True}, {"alibi": True}, {"mask": "dense"}, {"lengths": [20, 30]}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_it_does_not_know_is_refused_in_a_line(asked: dict[str, Any]) -> None:
    """It has no code for these: without the refusal it would compute as if nobody had asked."""
    p = P.replace(**asked)
    line = fl.CATALOGUE[NAME].refuses(p)
    assert line is not None and re.fullmatch(
        rf"{next(iter(asked))} = .*: expected nothing: {NAME} knows causal, window, scale", line
    )
    with pytest.raises(fl.UsageError, match=f"{NAME} knows"):
        fl.count(NAME, p)


def test_what_is_counted_is_compiled_without_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """ncu misreads asynchronous copies."""
    monkeypatch.setattr(tritonc, "OPTIONS", dict(tritonc.OPTIONS))
    monkeypatch.setattr("flashlab.run.nvrtc.OPTIONS", ())
    monkeypatch.setattr("flashlab.run.arrays.cupy", lambda: None)
    workload.launch([], counted=True)
    assert tritonc.OPTIONS["num_stages"] == 1


# With Triton, in a process that isn't set to its interpreter

_COMPILE = """
import json, sys
import flashlab as fl
from flashlab.run import tritonc

for job in json.load(sys.stdin):
    tritonc.OPTIONS = {"enable_fp_fusion": True, "maxnreg": 255, **job["options"]}
    counts = fl.count("flash2_triton", fl.Problem(batch=1, heads=1, len_q=64, **job["problem"]), device=job["device"])
    made = tritonc.compile_kernel(fl.CATALOGUE["flash2_triton"].kernels[0], counts)
    cubin = job["folder"] + "/kernel.cubin"
    open(cubin, "wb").write(made.cubin)
    print(json.dumps({"ptx": made.ptx.decode(), "warps": made.warps, "sram": made.sram, "peak": counts.sram.peak, "cubin": cubin}))
"""


def compiled(folder: Path, problem: dict[str, Any], device: str = "h200", **options: Any) -> dict[str, Any]:
    """What Triton makes of the kernel, and the registers and the stack that a thread takes."""
    job = {"problem": problem, "device": device, "folder": str(folder), "options": options}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], input=json.dumps([job]), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    tools = Path(importlib.import_module("triton.backends.nvidia").__file__).parent / "bin"
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", found["cubin"]], capture_output=True, text=True, check=True
    ).stdout
    words = dict(word.split(":")[:2] for word in usage.split() if ":" in word and word.split(":")[1].isdigit())
    return found | {"registers": int(words["REG"]), "stack": int(words["STACK"])}


CASES = [(dtype, head_dim) for dtype in ("bfloat16", "float32", "float16") for head_dim in (128, 64, 256)]


@pytest.mark.triton
@pytest.mark.parametrize(
    "case", one_of_each(CASES, lambda case: case[0] == "float32", lambda case: f"{case[0]}-{case[1]}")
)
def test_for_hopper_nothing_spills(case: tuple[str, int], tmp_path: Path) -> None:
    dtype, head_dim = case
    found = compiled(tmp_path, {"head_dim": head_dim, "dtype": dtype})
    assert found["stack"] == 0 and found["registers"] <= 255 and found["warps"] == 8
    assert found["sram"] <= found["peak"] <= fl.DEVICES["h200"].sram_per_block
    half = dtype != "float32"
    assert ("wgmma.mma_async" in found["ptx"]) is half
    assert "cp.async.cg.shared.global" in found["ptx"]
    if half:  # K and V, as many stages as the configuration says, and Q
        assert found["sram"] == found["peak"]


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), pytest.param("float32", 111, marks=pytest.mark.long)])
def test_the_counted_build_loads_each_chunk_once(dtype: str, head_dim: int, tmp_path: Path) -> None:
    """By plain loads of 16 bytes; the other one copies, as many tiles ahead as there are stages."""
    found = compiled(tmp_path, {"head_dim": head_dim, "dtype": dtype}, num_stages=1)
    config = fl.count(NAME, P.replace(head_dim=head_dim, dtype=dtype), device="h200").config
    assert config is not None
    threads, chunks = 32 * found["warps"], power_of_two(head_dim) * P.replace(dtype=dtype).itemsize // 16
    q, kv = config.tile.rows * chunks // threads, 2 * (config.tile.cols * chunks // threads)
    loads = [line for line in found["ptx"].splitlines() if "ld.global" in line]
    assert len(loads) == q + kv and all("ld.global.v4.b32" in line for line in loads)
    assert "cp.async" not in found["ptx"]
    usual = compiled(tmp_path, {"head_dim": head_dim, "dtype": dtype})["ptx"]
    assert usual.count("cp.async.cg.shared.global") == config.stages * kv


@pytest.mark.triton
@pytest.mark.long
@pytest.mark.parametrize("device", ["a100", "l40s"])
def test_for_other_gpus_it_compiles(device: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, {"head_dim": 128, "dtype": "float16"}, device)
    assert found["sram"] <= fl.DEVICES[fl.Device.named(device).name].sram_per_block
    assert "mma.sync" in found["ptx"] and "wgmma" not in found["ptx"]
