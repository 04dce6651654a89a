"""The comparison of the zoo on a GPU with the emulator: everything but the GPU. A stand-in plays compute-sanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashlab.measure import results
from flashlab.measure.sanitizers import Ran
from flashlab.run import nvrtc
from tests.flashlab.emulator import sanitizer_agreement as tool
from tests.flashlab.emulator.mutant import Mutant
from tests.flashlab.emulator.zoo import ZOO

RACE = {m.name: m for m in ZOO}["words-exchanged-in-a-warp-without-its-barrier"]
SAW = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at warp_sums(float *)+0x150 in warp_sums.cu:13
=========     and Read access at warp_sums(float *)+0x1a0 in /somewhere/warp_sums.cu:14 [64 hazards]
=========
launched 1 case
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "launched 1 case\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def said(text: str, *, killed: bool = False) -> Ran:
    return Ran(text, killed, 1.0)


@pytest.mark.compiler
def test_both_see_the_same_line() -> None:
    row = tool.judge(RACE, is_sound=False, said=said(SAW))
    assert (row.verdict, row.findings, row.same_line) == ("both", 1, True)
    assert "race" in row.emulator
    assert row.gpu_lines == ("warp_sums.cu:13", "warp_sums.cu:14")
    elsewhere = tool.judge(RACE, is_sound=False, said=said(SAW.replace("cu:1", "cu:9")))
    assert (elsewhere.verdict, elsewhere.same_line) == ("both", False)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("text", "killed", "verdict"),
    [(CLEAN, False, "emulator only"), ("Traceback\nno GPU\n", False, "not finished"), ("", True, "not finished")],
)
def test_silence_is_no_agreement(text: str, killed: bool, verdict: str) -> None:
    assert tool.judge(RACE, is_sound=False, said=said(text, killed=killed)).verdict == verdict


@pytest.mark.compiler
@pytest.mark.parametrize(("text", "verdict"), [(CLEAN, "clean"), (SAW, "FINDINGS"), ("", "not finished")])
def test_sound_kernels_must_be_clean_and_have_run(text: str, verdict: str) -> None:
    row = tool.judge(RACE, is_sound=True, said=said(text))
    assert (row.verdict, row.emulator) == (verdict, "")
    assert tool.passed([row]) == (verdict == "clean")


@pytest.mark.compiler
def test_a_hang_agrees_with_a_deadlock_only() -> None:
    hang = next(m for m in ZOO if m.sees == "deadlock")
    assert tool.judge(hang, is_sound=False, said=said("launching\n", killed=True)).verdict == "hangs"
    assert tool.judge(hang, is_sound=False, said=said("", killed=True)).verdict == "not finished"
    assert tool.judge(RACE, is_sound=False, said=said("launching\n", killed=True)).verdict == "not finished"


@pytest.mark.compiler
def test_the_file_has_a_headline_and_a_table(tmp_path: Path) -> None:
    rows = [tool.judge(RACE, is_sound=False, said=said(SAW)), tool.judge(RACE, is_sound=True, said=said(CLEAN))]
    data = tool.report(rows)
    assert data["passed"]
    read = results.load(results.save(tool.KIND, ["flash2"], data, folder=tmp_path))
    assert (
        "of 1 seeded faults that a GPU can show, the emulator found 1, compute-sanitizer 1 (1 of 1"
        in tool.KIND.claim(read)
    )
    assert "| racecheck | both | warp_sums.cu:13, warp_sums.cu:14 |" in tool.KIND.markdown(read)


def test_what_hangs_comes_last_and_every_tool_has_mutants() -> None:
    hangs = [m.hangs for m in tool.seen()]
    assert hangs == sorted(hangs)
    assert any(hangs)
    assert {m.tool for m in tool.seen()} >= {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert {m.kernel for m in tool.sound()} >= {"standard", "online_softmax", "flash1", "flash2", "block_sum"}


def test_no_gpu_is_one_line() -> None:
    if compiler_missing() is None:
        pytest.skip("there may be a GPU here")
    path = Path(tool.__file__)
    done = subprocess.run(
        [sys.executable, str(path), "--run", ZOO[0].name], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def compiler_missing() -> str | None:
    try:
        import cupy  # noqa: F401  # pyright: ignore
    except ImportError as error:
        return str(error)
    return None


@pytest.mark.nvrtc
@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in ZOO])
def test_every_mutant_is_cuda(mutant: Mutant) -> None:
    """A fault that no compiler for GPUs would take proves nothing."""
    for path, each in {x.path: x for x in mutant.job().launches}.items():
        code, options = tool.source(each)
        assert code.startswith(f'#line 1 "{path.name}"\n')
        options = (*options, f"-I{nvrtc.cuda_include_dir()}", "-arch=compute_90")
        assert nvrtc._compile(nvrtc._nvrtc(), path, options, ptx=True).image
