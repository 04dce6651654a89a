"""The pytest plugin: what its fixtures say when they fail, baselines that are kept, and a start that costs nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashlab as fl
from flashlab.verify.pytest import assert_bytes, bytes_of, verify_attention
from simulator.errors import Unavailable

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[3]
P = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16")


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pytest with the plugin in an empty folder: `inner("test source", "--option")`."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it may be installed, too
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # bytecode would stand for a file as long that was written in the same second

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "_flashlab_pytest", "--strict-markers", *options)

    return run


# its start


def test_nothing_is_imported_until_a_test_uses_it(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("def test_nothing(): pass\n")
    program = (
        "import sys, pytest; code = pytest.main(['-q', '-p', '_flashlab_pytest', '--flashlab-update']);"
        "print(int(code), sorted({'flashlab', 'simulator', 'numpy', 'hypothesis'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_help_tells_of_it(inner: Any) -> None:
    found = inner("", "--markers").outlines + inner("", "--fixtures").outlines
    for words in ("@pytest.mark.flashlab_gpu: needs", "@pytest.mark.flashlab_emulator: needs", "counts_baseline --"):
        assert any(line.startswith(words) for line in found), words


# verify_attention


KERNELS = """
    import numpy as np
    import flashlab as fl

    def right(q, k, v, causal=False):
        swapped = (x.swapaxes(1, 2) for x in (q, k, v))
        return fl.naive(*swapped, causal=causal).out.astype(q.dtype).swapaxes(1, 2)

    def wrong(q, k, v, causal=False):
        return 1.01 * right(q, k, v)

    HOW = {"layout": "bshd", "dtypes": ["float32"], "checks": ["rule"], "examples": 0}

    def test_right(verify_attention):
        assert verify_attention(right, **HOW).verdict == "passed, LSE unchecked"

    def test_wrong(verify_attention):
        verify_attention(wrong, **HOW)
"""


def test_verify_attention_fails_with_the_report(inner: Any) -> None:
    result = inner(KERNELS)
    result.assert_outcomes(passed=1, failed=1)
    shown = [line for line in result.outlines if line.startswith("E ")]
    assert "wrong on callable: failed" in shown[0] and len(shown) < 20, shown
    assert any("smallest failing case" in line for line in shown)
    assert any(line.startswith(">") and "verify_attention(wrong" in line for line in result.outlines)
    assert not any("verify_attention(fn" in line for line in result.outlines), "the plugin's own lines are hidden"


def test_verify_attention_takes_names_and_adapters() -> None:
    how: Any = {"dtypes": ["float32"], "checks": ["gqa"]}
    assert verify_attention("flash2", **how).verdict == "passed"
    assert verify_attention(
        fl.Adapter(lambda q, k, v: q, domain=fl.Domain(groups=1, batch=2)), dtypes=["float32"], checks=["determinism"]
    )
    with pytest.raises(fl.UsageError, match="layout = bshd: expected nothing"):
        verify_attention("flash2", layout="bshd", **how)


@pytest.mark.parametrize(
    ("target", "name", "meant"),
    [(len, "layot", "layout"), (len, "exmples", "examples"), ("flash2", "chekcs", "checks")],
)
def test_an_unknown_option_is_named(target: Any, name: str, meant: str) -> None:
    with pytest.raises(fl.UsageError, match=rf"^keyword = '{name}': expected one of .*\(did you mean {meant}\?\)$"):
        verify_attention(target, **{name: "x"})


# bytes


def test_bytes_are_asserted() -> None:
    count = fl.count("flash2", P, tile=(64, 64))
    for run in (count, fl.simulate("flash2", *fl.random_inputs(P), tile=(64, 64), lse=True)):
        assert bytes_of(run)["flash2"]["hbm.read"] == {"q": 16384, "k": 32768, "v": 32768}
        assert_bytes(run, hbm_read=81920, hbm_atomic=0, at_most={"hbm_write": 16896})
    with pytest.raises(AssertionError) as error:
        assert_bytes(count, hbm_read=81919, at_most={"sram_write": 10, "hbm_write": 16895})
    assert str(error.value).splitlines() == [
        "flash2 moves other bytes than expected",
        "hbm_read is 81,920, expected = 81,919 (+1): k 32,768, q 16,384, v 32,768",
        f"sram_write is {count.sram.write:,}, expected <= 10 (+{count.sram.write - 10:,}): k 32,768, q 16,384, v 32,768",
        "hbm_write is 16,896, expected <= 16,895 (+1): lse 512, out 16,384",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hbm_reads": 1}, "what = 'hbm_reads': expected one of hbm_read"),
        ({"hbm_read": 1.5}, "hbm_read = 1.5: expected a number of bytes"),
        ({"at_most": {"hbm_write": True}}, "hbm_write = True: expected a number of bytes"),
        ({"at_most": {5: 1}}, "what = 5: expected one of hbm_read"),
        ({"at_most": 5}, "at_most = 5: expected a dictionary of bytes"),
    ],
)
def test_bad_input(words: Any, message: str) -> None:
    with pytest.raises(fl.UsageError, match=message):
        assert_bytes(fl.count("flash2", P), **words)
    with pytest.raises(fl.UsageError, match="run = 'flash2': expected what fl.emulate"):
        assert_bytes("flash2")


@pytest.mark.compiler
def test_bytes_of_what_the_emulator_ran(tmp_path: Path) -> None:
    """Of our kernels they are the formula's; a launch that was stopped has none."""
    emulated = fl.emulate("flash2", *fl.random_inputs(P), tile=(64, 64), lse=True)
    assert bytes_of(emulated)["flash2"] == bytes_of(fl.count("flash2", P, tile=(64, 64), lse=True))["flash2"]
    source = tmp_path / "copy.cu"
    source.write_text("__global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }")
    x, y = fl.random_inputs(P.replace(dtype="float32"))[0].reshape(-1), fl.Empty((64,))
    assert_bytes(fl.emulate_file(source, {"x": x[:64], "y": y}, grid=1, block=64), hbm_read=256, hbm_write=256)
    with pytest.raises(AssertionError, match="copy was stopped, so its bytes say nothing\n.*out of bounds"):
        assert_bytes(fl.emulate_file(source, {"x": x[:60], "y": y}, grid=1, block=64), hbm_read=256)


# baselines


COUNTED = """
    import pytest
    import flashlab as fl

    @pytest.mark.parametrize("length", [64, 128])
    def test_counts(counts_baseline, length):
        p = fl.Problem(batch=1, heads=1, len_q=length, head_dim=64, dtype="float16")
        counts_baseline(fl.count("flash2", p, tile=(TILE, 64)))
        counts_baseline(fl.count("flash1", p), "flash1")
"""


def test_a_baseline_is_written_kept_and_compared(inner: Any, pytester: pytest.Pytester) -> None:
    source = COUNTED.replace("TILE", "64")
    first = inner(source)
    first.assert_outcomes(failed=2)
    name = f"{next(pytester.path.glob('test_*.py')).stem}.counts.json"
    first.stdout.fnmatch_lines([f"*{name} has no counts of test_counts?64?: run pytest --flashlab-update*"])
    written = inner(source, "--flashlab-update")
    written.assert_outcomes(passed=2)
    written.stdout.fnmatch_lines([f"flashlab: wrote {name}"])
    kept = pytester.path / name
    content = json.loads(kept.read_text())
    assert content["schema"] == 1 and list(content["counts"]) == [
        f"test_counts[{n}]{more}" for n in (128, 64) for more in ("", ": flash1")
    ]
    inner(source).assert_outcomes(passed=2)
    before = kept.stat().st_mtime_ns
    assert "wrote" not in inner(source, "--flashlab-update").stdout.str() and kept.stat().st_mtime_ns == before

    other = inner(COUNTED.replace("TILE", "32"))
    other.assert_outcomes(failed=2)
    other.stdout.fnmatch_lines([
        "E * counts of test_counts?64? differ from *.counts.json (pytest --flashlab-update accepts them), in bytes",
        "E * was * is * change",
        "E * flash2.hbm.read.k * 8,192 * 16,384 * +8,192 (+100.0%)",
    ])  # fmt: skip
    kept.write_text('{"schema": 7}')
    inner(source).stdout.fnmatch_lines(["*baseline = *expected counts of schema 1, as --flashlab-update writes them"])


def test_baselines_are_written_by_one_process(inner: Any) -> None:
    pytest.importorskip("xdist")
    result = inner("", "-p", "xdist", "-n", "2", "--flashlab-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--flashlab-update = True: expected without -n" in result.stdout.str() + result.stderr.str()


# markers


def test_markers_skip_and_say_why(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import pytest

        @pytest.mark.flashlab_gpu
        def test_gpu(): pass

        @pytest.mark.flashlab_emulator
        def test_emulator(): pass
    """

    def nothing() -> Any:
        raise Unavailable("nothing here: apt install everything")

    # by module: packages have functions of the same names
    devices, build, places = map(
        importlib.import_module, ("flashlab.run.devices", "flashlab.emulator.build", "flashlab.emulator.places")
    )
    monkeypatch.setattr(devices, "current_device", nothing)
    monkeypatch.setattr(build, "compiler", nothing)
    result = inner(source, "-rs")
    result.assert_outcomes(skipped=2)
    assert sum("nothing here: apt install everything" in line for line in result.outlines) >= 1
    for module, name in ((devices, "current_device"), (build, "compiler"), (places, "check_tools")):
        monkeypatch.setattr(module, name, lambda: None)
    inner(source).assert_outcomes(passed=2)
